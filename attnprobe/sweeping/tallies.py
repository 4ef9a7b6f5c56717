"""What is counted and added up: numbers of one layer that merge by adding, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from attnprobe.heads import BASIC, MASSES
from attnprobe.sweeping.plans import Plan
from attnprobe.sweeping.rows import LayerRows
from attnprobe.sweeping.texts import CLASSES

BINS = 100
"""The bins of each histogram, all as wide, on the scale of `scaled`."""


def names(by_value: bool) -> tuple[str, ...]:
    """The statistics that are gathered of each row, S of them."""
    return (*BASIC, *MASSES, *(f"value_{name}" for name in MASSES if by_value))


def edges(name: str, limit: int) -> np.ndarray:
    """Where the bins of a statistic begin and end, (BINS + 1,): between 0 and the most it can be.

    Those of distances are narrow near 0 and wide far off: even in ln(1 + distance). `limit` is N,
    the most tokens of a text.
    """
    even = np.linspace(0.0, 1.0, BINS + 1)
    if name == "entropy":
        return even * math.log(max(limit, 2))
    if name.startswith("distance"):
        return np.expm1(even * math.log(max(limit, 2)))
    return even


def _binned(values: Tensor, counted: Tensor, limit: int) -> Tensor:
    """The number of each value's bin, and `BINS` where it does not count: (S, B, H, T) int64."""
    top = math.log(max(limit, 2))
    scaled = values.clone()
    scaled[BASIC.index("entropy")] /= top
    far = [at for at, name in enumerate(BASIC) if name.startswith("distance")]
    scaled[far] = scaled[far].log1p() / top
    return scaled.mul_(BINS).long().clamp_(0, BINS - 1).masked_fill_(~counted, BINS)


@dataclass(eq=False)
class Tally:
    """One layer of H heads, over any number of texts of at most N tokens.

    Attributes:
        rows: (H, S) int64, how many rows count for each statistic.
        sums, squares: (H, S) float64, of the statistics and of their squares.
        bins: (H, S, BINS) int64, their histograms.
        distances: (H, 2N - 1) float64, sums of weights from a key N - 1 tokens before the query to
            one as far after it.
        cells: (H, 2N - 1) int64, how many weights these are sums of.
        classes: (H, C, C) float64, sums over queries of a class of the mass on keys of a class.
        uniform: (H, C, C) float64, what they were if weights were uniform.
        class_rows: (H, C) int64, how many queries there are of each class.
    """

    rows: np.ndarray
    sums: np.ndarray
    squares: np.ndarray
    bins: np.ndarray
    distances: np.ndarray
    cells: np.ndarray
    classes: np.ndarray
    uniform: np.ndarray
    class_rows: np.ndarray

    @classmethod
    def empty(cls, heads: int, statistics: int, limit: int) -> Tally:
        """Of no text."""
        count = len(CLASSES)

        def zeros(*shape: int, dtype: type = np.float64) -> np.ndarray:
            return np.zeros((heads, *shape), dtype)

        return cls(
            rows=zeros(statistics, dtype=np.int64),
            sums=zeros(statistics),
            squares=zeros(statistics),
            bins=zeros(statistics, BINS, dtype=np.int64),
            distances=zeros(2 * limit - 1),
            cells=zeros(2 * limit - 1, dtype=np.int64),
            classes=zeros(count, count),
            uniform=zeros(count, count),
            class_rows=zeros(count, dtype=np.int64),
        )

    @classmethod
    def of(cls, found: LayerRows, plan: Plan) -> Tally:
        """Of the rows of one call."""
        statistics, heads = found.values.shape[0], found.values.shape[2]
        counted = plan.counted  # (BASIC and MASSES, B, H or 1, T)
        extra = (statistics - len(counted)) // len(MASSES)
        counted = torch.cat([counted, *[counted[-len(MASSES) :]] * extra])
        counted = counted.expand(-1, -1, heads, -1).contiguous()
        counted[BASIC.index("distance_without_first")] &= found.rest
        values = found.values.double().masked_fill_(~counted, 0.0)  # (S, B, H, T)
        tally = cls.empty(heads, statistics, plan.limit)
        tally.rows += _by_head(counted.sum((1, 3)))
        tally.sums += _by_head(values.sum((1, 3)))
        tally.squares += _by_head(values.square().sum((1, 3)))
        numbers = _binned(values, counted, plan.limit)
        place = torch.arange(statistics * heads, device=numbers.device) * (BINS + 1)
        numbers += place.view(statistics, 1, heads, 1)
        size = statistics * heads * (BINS + 1)
        bins = np.bincount(numbers.flatten().cpu().numpy(), minlength=size)
        by_statistic = bins.reshape(statistics, heads, BINS + 1)[..., :BINS]
        tally.bins += by_statistic.transpose(1, 0, 2)
        tally.distances += found.distances.cpu().numpy()
        tally.cells += plan.cells
        tally.classes += found.classes.cpu().numpy()
        tally.uniform += plan.uniform
        tally.class_rows += plan.class_rows
        return tally

    def add(self, other: Tally) -> None:
        """Add what another holds."""
        for one in fields(self):
            getattr(self, one.name).__iadd__(getattr(other, one.name))

    @property
    def finite(self) -> bool:
        """Whether every sum is a number."""
        sums = (self.sums, self.squares, self.distances, self.classes)
        return all(np.isfinite(one.sum()) for one in sums)


def _by_head(by_statistic: Tensor) -> np.ndarray:
    """(S, H) -> (H, S)."""
    found: np.ndarray = by_statistic.T.cpu().numpy()
    return found

"""Biases on the scores, made anew from what defines them: ALiBi's slopes, T5's learned distances.

Pure tensors: nothing here knows transformers. A bias is O(T·S), so its rows are made as they are
asked for.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attnprobe.rounding import gamma, unit_roundoff


class Bias(Protocol):
    """What is added to scores, (B or 1, H, T, S): `ByKey` or `ByDistance`."""

    @property
    def unit(self) -> float:
        """How far a model's own may be off by rounding, relative to each number."""

    def rows(self, start: int, stop: int, keys: int) -> Tensor:
        """Rows `start` to `stop` over the first `keys` keys, (B or 1, H, t or 1, keys) float64."""


@dataclass(frozen=True, eq=False)
class ByKey:
    """A number for each key, whoever asks: softmax sees only how far keys are apart.

    Attributes:
        values: (B or 1, H, 1, S) float64.
        unit: see `Bias`.
    """

    values: Tensor
    unit: float

    def rows(self, start: int, stop: int, keys: int) -> Tensor:
        """See `Bias`: one row for all queries."""
        return self.values[..., :keys]


@dataclass(frozen=True, eq=False)
class ByDistance:
    """A number for each distance from a query to a key.

    Attributes:
        values: (H, T + S - 1) float64, from the last query's distance to the first key, which is
            the lowest, to the first query's distance to the last key.
        queries: T.
        unit: see `Bias`; 0, as the numbers are looked up.
    """

    values: Tensor
    queries: int
    unit: float = 0.0

    def rows(self, start: int, stop: int, keys: int) -> Tensor:
        """See `Bias`: each query's row begins one distance lower than the row before."""
        windows = self.values.unfold(-1, keys, 1)  # (H, …, keys), the last query's row first
        return windows[:, self.queries - stop : self.queries - start].flip(1)[None]


def alibi_slopes(heads: int, largest: float = 8.0) -> Tensor:
    """ALiBi's slope for each head, (H,) float64: 2^(-8/H), 2^(-16/H), …, 2^-8.

    Press et al. 2022, *Train Short, Test Long*, section 3. Where H is no power of two, as in their
    code: the slopes of the next lower power, then every second of those of the next higher one.

    Args:
        heads: H.
        largest: the exponent that the sequence ends at, which MPT's configs set.
    """
    power = 1 << (heads - 1).bit_length()
    slopes = 2.0 ** (-largest / power * torch.arange(1, power + 1, dtype=torch.float64))
    # Of twice as many slopes, every second is one of half the heads.
    return slopes if power == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]


def alibi(
    slopes: Tensor, positions: Tensor, factor: float, stored: tuple[torch.dtype, ...]
) -> ByKey:
    """ALiBi's bias: slope times position, of which softmax sees the difference to the query's.

    Press et al. add -slope·(i - j) to the score of query i and key j; models leave the query's own
    position away, which moves a whole row and so no weight.

    Args:
        slopes: (H,) float64.
        positions: where each key stands, (B or 1, S).
        factor: on all of it.
        stored: in which dtypes a model rounds it, after it made the slopes, and the product with
            the positions, in float32. A slope is a power of a base that is rounded: its relative
            error grows with the exponent, at most 2H.
    """
    values = slopes[:, None, None] * (positions.double() * factor)[:, None, None, :]
    made = gamma(2.0 * len(slopes) + 16, unit_roundoff(torch.float32))
    rounded = [math.log1p(unit_roundoff(dtype)) for dtype in stored]
    return ByKey(values, math.expm1(math.fsum([math.log1p(made), *rounded])))


def distance_buckets(distances: Tensor, count: int, farthest: int, *, one_sided: bool) -> Tensor:
    """T5's bucket of each distance from a query to a key, j - i; int64 of the same shape.

    Raffel et al. 2020, section 2.1, and their code: of N buckets the first N/2 are for one distance
    each; the rest grow by logarithm up to a distance of `farthest`, and all beyond are in the last:
    N/2 + ⌊ln(n / (N/2)) / ln(farthest / (N/2)) · N/2⌋. Here in whole numbers, so that nothing is
    rounded where a bucket begins.

    Args:
        distances: int64.
        count: the number of buckets. With two sides, half of it is for keys that come later.
        farthest: the distance from which all are in the last bucket.
        one_sided: whether no key comes later, as in a decoder; those that do are in bucket 0.
    """
    if not one_sided:
        count //= 2
    begins = torch.tensor(_bucket_begins(count, farthest), device=distances.device)
    far = -distances.clamp(max=0) if one_sided else distances.abs()
    bucket = torch.bucketize(far, begins, right=True) - 1
    return bucket if one_sided else bucket + count * (distances > 0)


@functools.cache
def _bucket_begins(count: int, farthest: int) -> tuple[int, ...]:
    """The least distance in each of `count` buckets."""
    exact = count // 2
    rest = count - exact
    begins = list(range(exact))
    distance = exact
    for step in range(rest):  # n / exact ≥ (farthest / exact)^(step / rest)
        while distance**rest * exact**step < farthest**step * exact**rest:
            distance += 1
        begins.append(distance)
    return tuple(begins)


def learned(
    table: Tensor, queries: int, keys: int, offset: int, farthest: int, *, one_sided: bool
) -> ByDistance:
    """T5's bias: a learned number for the bucket of each distance.

    Args:
        table: (buckets, H), the weights.
        queries, keys: T and S.
        offset: how many keys stand before the first query.
        farthest, one_sided: see `distance_buckets`.
    """
    first = -(offset + queries - 1)
    distances = torch.arange(first, first + queries + keys - 1, device=table.device)
    buckets = distance_buckets(distances, len(table), farthest, one_sided=one_sided)
    return ByDistance(table.detach()[buckets].T.double(), queries)  # (H, T + S - 1)

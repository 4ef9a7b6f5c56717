"""The statistics of every row of one attention call, while the tile of its weights is in hand.

As in `attnprobe.outputs`, time goes by waiting for memory: a few texts and query rows are taken at
a time, in buffers that are written over, and the weights are never divided by their sums: what is
made of them is. Scores are in units of ln 2, as a power of 2 takes a quarter of the time that one
of e does. Row by row, in float32 for models of float32 and less: their rows are no more exact than
that themselves. Definitions are those of `head_stats`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.checking.basis import Basis
from attnprobe.heads import BASIC, DIAGONALS, MASSES
from attnprobe.outputs import Buffers
from attnprobe.sweeping.plans import ALL, PUNCTUATION, Plan
from attnprobe.sweeping.texts import CLASSES

ROWS = 64
"""Query rows at a time."""

TILE = 2**19
"""How many weights to have in hand at a time."""

_buffers = Buffers()

_UNIT = math.log(2)


@dataclass(frozen=True, eq=False)
class LayerRows:
    """What is known of the rows of one call.

    Attributes:
        values: (S, B, H, T) each row's `BASIC` and `MASSES`, and the masses by value where asked
            for; of any content where a row does not count.
        rest: (B, H, T) bool, rows with weight beyond the first key.
        distances: (H, 2N - 1) float64, the sums of weights by distance, as `Plan.cells`.
        classes: (H, C, C) float64, the sums over rows of the mass on each class of keys, by class
            of the query.
        strongest: (B, H, T) int64, which key gets the most of each row.
    """

    values: Tensor
    rest: Tensor
    distances: Tensor
    classes: Tensor
    strongest: Tensor


def rows_of(basis: Basis, plan: Plan, norms: Tensor | None) -> LayerRows:
    """Gather the statistics of a call's rows.

    Args:
        basis: what the call's formula is computed on; it departs from nothing.
        plan: of the call's batch, under its mask.
        norms: ‖v·W_O‖ of each value, (B, H, T), for masses by value; None for none.
    """
    call = basis.call
    batch, heads, length, _ = call.query.shape
    dtype = torch.float64 if call.dtype == torch.float64 else torch.float32
    count = len(BASIC) + len(MASSES) * (1 if norms is None else 2)
    new = call.query.new_empty
    found = LayerRows(
        new(count, batch, heads, length, dtype=dtype),
        new(batch, heads, length, dtype=torch.bool),
        torch.zeros(heads, 2 * plan.limit - 1, dtype=torch.float64, device=call.query.device),
        torch.zeros(
            heads, len(CLASSES), len(CLASSES), dtype=torch.float64, device=call.query.device
        ),
        new(batch, heads, length, dtype=torch.long),
    )
    step = max(1, TILE // (heads * ROWS * length))
    for first in range(0, batch, step):
        texts = slice(first, min(first + step, batch))
        some = _Texts(basis, plan, texts, dtype, None if norms is None else norms[texts].to(dtype))
        for start in range(0, length, ROWS):
            some.gather(start, min(start + ROWS, length), found)
    return found


class _Texts:
    """A few texts of a call: b of them, H heads."""

    def __init__(
        self, basis: Basis, plan: Plan, texts: slice, dtype: torch.dtype, norms: Tensor | None
    ) -> None:
        call = basis.call
        self.plan, self.texts, self.dtype, self.norms = plan, texts, dtype, norms
        self.terms = basis.terms
        self.query = call.query[texts].to(dtype) * (call.expected_scaling / _UNIT)  # (b, H, T, D)
        self.key = call.key[texts].to(dtype).flatten(0, 1)  # (b·Hkv, S, D)
        self.flags = plan.reading.flags[texts].to(dtype)  # (b, S, F)
        self.classes = plan.reading.classes[texts]  # (b, T, C)

    def gather(self, start: int, stop: int, found: LayerRows) -> None:
        """Gather rows `start` to `stop`."""
        scores, largest, top = self._scores(start, stop)  # (b, H, t, K), (b, H, t), (b, H, t)
        skewed = _Skewed.of(scores, start, self.plan.causal)
        weights = torch.exp2(scores, out=skewed.weights)  # times `total`
        here = (self.texts, slice(None), slice(start, stop))
        found.strongest[here] = _strongest(weights)
        flagged = skewed.flagged(self.flags)  # (b, H, t, F)
        total = flagged[..., ALL]  # (b, H, t)
        whole = self._with_sink(total, top, start, stop)
        # -Σ w·ln w with w = 2^s / whole
        product = _buffers.take("product", tuple(scores.shape), self.dtype, scores)
        by_score = torch.mul(weights, scores, out=product).sum(-1)
        entropy = ((whole.log2() * total - by_score) / whole).clamp(min=0) * _UNIT
        at = torch.arange(start, stop, device=total.device).to(self.dtype)
        moved = skewed.moved()  # without the first key
        first = weights[..., 0]
        rest = flagged[..., 1 : len(CLASSES)].sum(-1)  # the class of the first key is its own
        seen = self.plan.open[self.texts, :, start:stop] > 0
        by_row = torch.where(seen, 1 / whole, 0.0)  # (b, H, t)
        found.rest[here] = rest > 0
        basic = {
            "entropy": entropy,
            "entropy_share": entropy / self.plan.logs[self.texts, :, start:stop],
            "largest": (largest - top).exp2() / whole,
            "distance": (moved + first * at) / whole,
            "distance_without_first": moved / rest.clamp(min=torch.finfo(self.dtype).tiny),
        }
        masses = [one / whole for one in self._masses(skewed, flagged, start, stop)]
        values = [*(basic[name] for name in BASIC), *masses]
        skewed.add_distances(by_row, found.distances, self.plan.limit)
        mass = (flagged[..., : len(CLASSES)] * by_row[..., None]).double()  # (b, H, t, C)
        by_query = self.classes[:, start:stop]
        found.classes.add_(torch.einsum("bhtk,btq->hqk", mass, by_query))
        if self.norms is not None:
            weights.mul_(self.norms[:, :, None, : weights.shape[-1]])
            flagged = skewed.flagged(self.flags)
            total = flagged[..., ALL].clamp(min=torch.finfo(self.dtype).tiny)
            values += [one / total for one in self._masses(skewed, flagged, start, stop)]
        for number, one in enumerate(values):
            found.values[(number, *here)] = one

    def _scores(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """The masked scores less the top of each row, the largest of each, and the top: the largest
        of it and the sink's."""
        count, heads, _, size = self.query.shape
        reach = self.plan.reach(stop)
        query = self.query[:, :, start:stop].reshape(len(self.key), -1, size)  # (b·Hkv, g·t, D)
        out = _buffers.take("scores", (*query.shape[:2], reach), self.dtype, query)
        torch.bmm(query, self.key[:, :reach].mT, out=out)
        scores = out.view(count, heads, stop - start, reach)
        if self.terms.softcap is not None:
            cap = self.terms.softcap / _UNIT
            scores.div_(cap).tanh_().mul_(cap)
        bias = self.terms.bias_of(start, stop, reach)
        if bias is not None:
            scores.add_((bias[self.texts] if len(bias) > 1 else bias) / _UNIT)
        first, added = self.plan.added(start, stop, self.dtype)
        if added is not None:
            scores[..., first:].add_(added[self.texts] if len(added) > 1 else added)
        top = largest = scores.amax(-1)
        sinks = self._sinks(start, stop)
        if sinks is not None:
            top = torch.maximum(top, sinks)
        return scores.sub_(top[..., None]), largest, top

    def _sinks(self, start: int, stop: int) -> Tensor | None:
        """(b or 1, H, t or 1), or None."""
        sinks = self.terms.sinks_of(start, stop)
        if sinks is None:
            return None
        return (sinks if len(sinks) == 1 else sinks[self.texts])[..., 0].to(self.dtype) / _UNIT

    def _with_sink(self, total: Tensor, top: Tensor, start: int, stop: int) -> Tensor:
        sinks = self._sinks(start, stop)
        return total if sinks is None else total + (sinks - top).exp2()

    def _masses(self, skewed: _Skewed, flagged: Tensor, start: int, stop: int) -> list[Tensor]:
        """Each row's sums over the kinds of keys, (b, H, t), in the order of `MASSES`."""
        found = {"first": skewed.weights[..., 0], "punctuation": flagged[..., PUNCTUATION]}
        found |= {name: skewed.diagonal(back) for name, back in DIAGONALS.items()}
        for name, pairs in self.plan.copies(self.texts, start, stop).items():
            found[name] = skewed.over(pairs)
        return [found[name] for name in MASSES]


def _strongest(weights: Tensor) -> Tensor:
    """The key of the largest weight in each row, the first of several: (…, K) -> (…)."""
    if weights.device.type != "cpu":
        return weights.argmax(-1)
    return torch.from_numpy(weights.numpy().argmax(-1))  # ten times as fast as torch's


@dataclass(frozen=True, eq=False)
class _Skewed:
    """A tile of weights (b, H, t, K) in rows with t - 1 zeros between them: read with a step of one
    more than a row, it has the keys of one distance below each other."""

    flat: Tensor
    weights: Tensor  # (b, H, t, K)
    by_distance: Tensor  # (b·H, t, W): column c holds the keys j = i + c - (stop - 1)
    start: int

    @classmethod
    def of(cls, scores: Tensor, start: int, causal: bool) -> _Skewed:
        """Memory for weights of the shape of these scores."""
        count, heads, rows, keys = scores.shape
        gap, width = rows - 1, keys + rows - 1
        size = count * heads * rows * width
        flat = _buffers.take("weights", (size + gap,), scores.dtype, scores)
        whole = flat[:size].view(count, heads, rows, width)
        whole[..., :gap] = 0.0
        flat[size:] = 0.0
        columns = keys if causal else width
        steps = (rows * width, width + 1, 1)
        by_distance = flat.as_strided((count * heads, rows, columns), steps)
        return cls(flat, whole[..., gap:], by_distance, start)

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.start + self.weights.shape[2]

    def flagged(self, flags: Tensor) -> Tensor:
        """Each row's sums over the keys with each flag: flags (b, S, F) -> (b, H, t, F)."""
        count, heads, rows, keys = self.weights.shape
        flat = self.weights.as_strided(
            (count, heads * rows, keys),
            (self.weights.stride(0), self.weights.stride(2), 1),
            self.weights.storage_offset(),
        )
        return torch.bmm(flat, flags[:, :keys]).view(count, heads, rows, -1)

    def moved(self) -> Tensor:
        """Σ weight·|i - j| of each row over all keys but the first, (b, H, t)."""
        first = self.weights[..., 0].clone()
        self.weights[..., 0] = 0.0
        columns = self.by_distance.shape[-1]
        far = (torch.arange(columns, device=first.device) - (self.stop - 1)).abs().to(first)
        shape = tuple(self.by_distance.shape)
        product = _buffers.take("product", shape, first.dtype, first)
        found = torch.mul(self.by_distance, far, out=product).sum(-1).view(first.shape)
        self.weights[..., 0] = first
        return found

    def add_distances(self, by_row: Tensor, sums: Tensor, limit: int) -> None:
        """Add the weights, divided by rows, to the sums by distance, (H, 2N - 1)."""
        count, heads, rows, _ = self.weights.shape
        found = torch.bmm(by_row.reshape(count * heads, 1, rows), self.by_distance)
        found = found.view(count, heads, -1).double().sum(0)
        begin = limit - self.stop
        sums[:, begin : begin + found.shape[1]] += found

    def diagonal(self, back: int) -> Tensor:
        """Each row's weight on the key so many tokens before it, (b, H, t); 0 where none is."""
        column = self.stop - 1 - back
        if not 0 <= column < self.by_distance.shape[-1]:
            return torch.zeros_like(self.weights[..., 0])
        return self.by_distance[:, :, column].view(self.weights.shape[:3])

    def over(self, pairs: Tensor) -> Tensor:
        """Each row's sum over its pairs: their texts, rows and keys, (3, pairs) -> (b, H, t)."""
        text, row, key = pairs
        count, heads, rows, _ = self.weights.shape
        found = self.weights[text, :, row, key]  # (pairs, H)
        sums = found.new_zeros(count * rows, heads).index_add_(0, text * rows + row, found)
        return sums.view(count, rows, heads).transpose(1, 2)

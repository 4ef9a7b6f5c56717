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
from attnprobe.sweeping.plans import ALL, FLAGS, PUNCTUATION, Copies, Plan
from attnprobe.sweeping.skewed import Skewed, buffers
from attnprobe.sweeping.texts import CLASSES

ROWS = 64
"""Query rows at a time."""

TILE = 2**21
"""How many weights to have in hand at a time."""

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
    sums = _Sums.of(call.query, dtype, plan.limit, norms is not None)
    parts = math.ceil(batch / max(1, TILE // (heads * ROWS * length)))
    step = math.ceil(batch / parts)  # none much smaller than the others
    for first in range(0, batch, step):
        texts = slice(first, min(first + step, batch))
        some = _Texts(basis, plan, texts, dtype, None if norms is None else norms[texts].to(dtype))
        for start in range(0, length, ROWS):
            some.gather(start, min(start + ROWS, length), sums)
    return sums.rows(plan)


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

    def gather(self, start: int, stop: int, sums: _Sums) -> None:
        """Gather rows `start` to `stop`."""
        scores = self._scores(start, stop)  # (b, H, t, K)
        here = (self.texts, slice(None), slice(start, stop))
        sums.strongest[here] = _strongest(scores)
        largest, sinks = scores.amax(-1), self._sinks(start, stop)  # (b, H, t)
        top = largest if sinks is None else torch.maximum(largest, sinks)
        scores.sub_(top[..., None])
        skewed = Skewed.of(scores, start, self.plan.causal)
        weights = torch.exp2(scores, out=skewed.weights)  # times `whole`
        copies = self.plan.copies(self.texts, start, stop)
        flagged = sums.weights.take(here, skewed, self.flags, copies)  # (b, H, t, F)
        total = flagged[..., ALL]
        whole = total if sinks is None else total + (sinks - top).exp2()
        product = buffers.take("product", tuple(scores.shape), self.dtype, scores)
        by_score = torch.mul(weights, scores, out=product).sum(-1)
        seen = self.plan.open[self.texts, :, start:stop] > 0
        by_row = torch.where(seen, 1 / whole, 0.0)
        numbers = (whole, by_row, by_score, skewed.moved(), (largest - top).exp2())
        sums.numbers[(slice(None), *here)] = torch.stack(numbers)
        skewed.add_distances(by_row, sums.distances, self.plan.limit)
        if sums.by_value is not None:
            assert self.norms is not None
            weights.mul_(self.norms[:, :, None, : weights.shape[-1]])
            sums.by_value.take(here, skewed, self.flags, copies)

    def _scores(self, start: int, stop: int) -> Tensor:
        """The masked scores, (b, H, t, K)."""
        count, heads, _, size = self.query.shape
        reach = self.plan.reach(stop)
        query = self.query[:, :, start:stop].reshape(len(self.key), -1, size)  # (b·Hkv, g·t, D)
        out = buffers.take("scores", (*query.shape[:2], reach), self.dtype, query)
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
        return scores

    def _sinks(self, start: int, stop: int) -> Tensor | None:
        """(b or 1, H, t or 1), or None."""
        sinks = self.terms.sinks_of(start, stop)
        if sinks is None:
            return None
        return (sinks if len(sinks) == 1 else sinks[self.texts])[..., 0].to(self.dtype) / _UNIT


def _strongest(scores: Tensor) -> Tensor:
    """The key of the largest score in each row, the first of several: (…, K) -> (…)."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    return torch.from_numpy(scores.numpy().argmax(-1))  # ten times as fast as torch's


@dataclass(frozen=True, eq=False)
class _Sums:
    """What the tiles of a call leave of its rows, of weights that are not divided yet.

    Attributes:
        numbers: (5, B, H, T): the sum of each row's weights, its sink's with them; 1 divided by it,
            0 where the row sees no key; the sums of weights times scores and, but for the first
            key's, of weights times distances; and the largest weight.
        weights, by_value: over the kinds of keys; by value None where it is not asked for.
        distances, strongest: as `LayerRows` has them.
    """

    numbers: Tensor
    weights: _Kinds
    by_value: _Kinds | None
    distances: Tensor
    strongest: Tensor

    @classmethod
    def of(cls, query: Tensor, dtype: torch.dtype, limit: int, by_value: bool) -> _Sums:
        """Of no row of queries (B, H, T, D) yet."""
        rows = query.shape[:3]
        return cls(
            query.new_empty(5, *rows, dtype=dtype),
            _Kinds.of(query, dtype),
            _Kinds.of(query, dtype) if by_value else None,
            query.new_zeros(rows[1], 2 * limit - 1, dtype=torch.float64),
            query.new_empty(rows, dtype=torch.long),
        )

    def rows(self, plan: Plan) -> LayerRows:
        """The statistics."""
        whole, by_row, by_score, moved, largest = self.numbers  # (B, H, T)
        flagged, first = self.weights.flagged, self.weights.single[0]
        tiny = torch.finfo(whole.dtype).tiny
        # -Σ w·ln w with w = 2^s / whole
        entropy = (whole.log2() * flagged[..., ALL] - by_score) / whole
        entropy = entropy.clamp_(min=0).mul_(_UNIT)
        rest = flagged[..., 1 : len(CLASSES)].sum(-1)  # the class of the first key is its own
        at = torch.arange(whole.shape[-1], device=whole.device).to(whole)
        basic = {
            "entropy": entropy,
            "entropy_share": (entropy / plan.logs).to(whole),
            "largest": largest / whole,
            "distance": (moved + first * at) / whole,
            "distance_without_first": moved / rest.clamp(min=tiny),
        }
        values = [*(basic[name] for name in BASIC), *self.weights.masses(whole)]
        if self.by_value is not None:
            values += self.by_value.masses(self.by_value.flagged[..., ALL].clamp(min=tiny))
        mass = (flagged[..., : len(CLASSES)] * by_row[..., None]).double()  # (B, H, T, C)
        classes = torch.einsum("bhtk,btq->hqk", mass, plan.reading.classes)
        return LayerRows(torch.stack(values), rest > 0, self.distances, classes, self.strongest)


@dataclass(frozen=True, eq=False)
class _Kinds:
    """Each row's sums over the kinds of keys.

    Attributes:
        flagged: (B, H, T, F), over the keys with each flag.
        single: (1 + diagonals, B, H, T), on the first key, and on those of `DIAGONALS`.
        copies: for each kind of copies, tile by tile, the pairs' rows, counted through the batch,
            and weights, (pairs,) and (pairs, H).
    """

    flagged: Tensor
    single: Tensor
    copies: dict[str, list[tuple[Tensor, Tensor]]]

    @classmethod
    def of(cls, query: Tensor, dtype: torch.dtype) -> _Kinds:
        """Of no row of queries (B, H, T, D) yet."""
        rows = query.shape[:3]
        return cls(
            query.new_empty(*rows, FLAGS, dtype=dtype),
            query.new_empty(1 + len(DIAGONALS), *rows, dtype=dtype),
            {},
        )

    def take(
        self, here: tuple[slice, ...], skewed: Skewed, flags: Tensor, copies: dict[str, Copies]
    ) -> Tensor:
        """Take a tile; the sums over the keys with each flag, (b, H, t, F)."""
        flagged = self.flagged[here] = skewed.flagged(flags)
        diagonals = [skewed.diagonal(back) for back in DIAGONALS.values()]
        self.single[(slice(None), *here)] = torch.stack([skewed.weights[..., 0], *diagonals])
        for kind, pairs in copies.items():
            self.copies.setdefault(kind, []).append((pairs.rows, skewed.at(pairs.places)))
        return flagged

    def masses(self, total: Tensor) -> list[Tensor]:
        """The shares of a total, (B, H, T) each, in the order of `MASSES`."""
        batch, heads, length = total.shape
        found = dict(zip(("first", *DIAGONALS), self.single, strict=True))
        found["punctuation"] = self.flagged[..., PUNCTUATION]
        for kind, tiles in self.copies.items():
            rows, weights = (torch.cat(parts) for parts in zip(*tiles, strict=True))
            sums = weights.new_zeros(batch * length, heads).index_add_(0, rows, weights)
            found[kind] = sums.view(batch, length, heads).transpose(1, 2)
        return [found[name] / total for name in MASSES]

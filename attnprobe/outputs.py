"""softmax(QKᵀ/√d_k + M)V where no tile is asked for: its weights whole, or its output and bound.

Most of the time of an attention goes by waiting for memory: so a few heads and query rows are taken
at a time, their scores stay in the processor's cache, and every step is done in place, in the same
buffers from tile to tile. For the output, the weights are never divided by their sum: it comes out
of the product with the values, to which a column of ones is added. Pure torch, as
`attnprobe.formula`.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.formula import TILE_BYTES, tiles
from attnprobe.masks import Rule
from attnprobe.rounding import Arithmetic
from attnprobe.rowbounds import RowBounds, holds
from attnprobe.terms import PLAIN, Terms

ROWS = 64
"""How many query rows are taken at a time. More cost more beyond the diagonal; with fewer, matrix
products run at less than their speed."""

BAND = 4
"""How many such tiles are divided by their sums and bounded together: numbers of a row are so few
that each step costs its call."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Some query rows of some heads of one text: all float64, each with a memory of its own.

    `seen` is None where every row may attend to a key; else it is False for those that may not,
    whose output is 0.
    """

    text: int
    heads: slice
    start: int
    stop: int
    output: Tensor  # (h, t, Dv)
    bound: Tensor | None = None  # (h, t, Dv)
    seen: Tensor | None = None  # (h or 1, t) bool


class Buffers(threading.local):
    """Memory that is written over from tile to tile and from call to call: what is new to a process
    costs as much time as the arithmetic. Nothing that is given out lies in it."""

    def __init__(self) -> None:
        self.flat: dict[tuple[object, ...], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
        """A tensor of any content, until the same name is asked for again."""
        key = (name, dtype, like.device, torch.is_inference_mode_enabled())
        size = math.prod(shape)
        if key not in self.flat or self.flat[key].numel() < size:
            self.flat[key] = torch.empty(size, dtype=dtype, device=like.device)
        return self.flat[key][:size].view(shape)


_buffers = Buffers()


def attention(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, scaling: float, terms: Terms = PLAIN
) -> Tensor:
    """softmax(QKᵀ·scaling + M)V in float64, (B, T, H, Dv): heads last, as kernels return it."""
    batch, heads, queries, _ = query.shape
    output = query.new_empty(batch, queries, heads, value.shape[-1], dtype=torch.float64)
    for rows in outputs(query, key, value, rule, scaling, terms):
        output[rows.text, rows.start : rows.stop, rows.heads] = rows.output.transpose(0, 1)
    return output


def weights(
    query: Tensor,
    key: Tensor,
    rule: Rule,
    scaling: float,
    terms: Terms = PLAIN,
    *,
    rows: slice = slice(None),
) -> Tensor:
    """softmax(QKᵀ·scaling + M) of one text in float64, whole: (H, T, S), or fewer rows of it.

    Args:
        query: (H, T, D).
        key: (h, S, D).
        rule, scaling, terms: as for `formula.tiles`.
        rows: which query rows, a stretch.
    """
    begin, end, _ = rows.indices(query.shape[1])
    keys = key.shape[1]
    found = query.new_empty(len(query), end - begin, keys, dtype=torch.float64)
    if not terms.plain:
        no_value = key[None, ..., :0]
        for tile in tiles(query[None], key[None], no_value, rule, scaling, terms, rows=rows):
            reach = tile.weights.shape[-1]
            here = found[:, tile.start - begin : tile.stop - begin]
            here[..., :reach], here[..., reach:] = tile.weights[0], 0.0
        return found
    served, height, step = _steps(query, key, TILE_BYTES)
    for first in range(0, len(key), step):
        some = slice(first, first + step)
        heads = slice(first * served, (first + step) * served)
        scores = _Scores.of(0, heads, query[heads], key[some], rule, scaling)
        for start in range(begin, end, height):
            stop = min(start + height, end)
            exp = scores.exponentials(start, stop).exp  # (h, R, K)
            here = found[heads, start - begin : stop - begin]
            reach = exp.shape[-1]
            exp = exp.view(*here.shape[:2], reach)
            total = exp.sum(-1, keepdim=True)
            torch.div(exp, total.masked_fill_(total == 0, 1.0), out=here[..., :reach])
            here[..., reach:] = 0.0
    return found


def outputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    scaling: float,
    terms: Terms = PLAIN,
    *,
    rounding: Arithmetic | None = None,
    tile_bytes: int = TILE_BYTES,
) -> Iterator[Rows]:
    """The output of one attention call, some heads and rows at a time; as `formula.tiles`.

    With `rounding`, with the bound of `rounding.bounds`, or, where that is as good, `rowbounds`.
    """
    if not terms.plain or (rounding is not None and not holds(query, key, scaling, rounding)):
        yield from _by_weights(query, key, value, rule, scaling, terms, rounding)
        return
    served, height, step = _steps(query[0], key[0], tile_bytes)
    for text in range(len(query)):
        for first in range(0, key.shape[1], step):
            some = slice(first, first + step)
            heads = slice(first * served, (first + step) * served)
            scores = _Scores.of(text, heads, query[text, heads], key[text, some], rule, scaling)
            few = _Heads.of(scores, value[text, some], scaling, rounding)
            for start, stop in _bands(query.shape[2], height):
                yield few.rows(start, stop, height)


def _steps(query: Tensor, key: Tensor, tile_bytes: int) -> tuple[int, int, int]:
    """Of (H, T, D) and (h, S, D): how many heads one key head serves, and how many query rows and
    key heads make a tile of the size aimed at."""
    served = len(query) // len(key)
    row = 8 * served * key.shape[1]  # bytes
    rows = min(ROWS, max(1, tile_bytes // row))
    return served, rows, max(1, min(len(key), tile_bytes // (row * rows)))


def _bands(queries: int, height: int) -> Iterator[tuple[int, int]]:
    """Stretches of `BAND` tiles of one height, or fewer at the end; what is left is one tile."""
    whole = queries - queries % height
    return itertools.pairwise(sorted({*range(0, whole, BAND * height), whole, queries, 0}))


def _by_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    scaling: float,
    terms: Terms,
    rounding: Arithmetic | None,
) -> Iterator[Rows]:
    for tile in tiles(query, key, value, rule, scaling, terms, rounding=rounding):
        for text in range(len(query)):
            yield Rows(
                text,
                slice(0, query.shape[1]),
                tile.start,
                tile.stop,
                tile.output[text],
                None if tile.output_bound is None else tile.output_bound[text],
                tile.seen[text if len(tile.seen) > 1 else 0],
            )


@dataclass(frozen=True, eq=False)
class _Exponentials:
    """exp(s - the row's largest s) of some rows, in a buffer, and what it was made with."""

    exp: Tensor  # (h, R, K), 0 where a row may not attend; R is the rows of all heads served
    largest: Tensor | None  # (h, R, 1): at least the row's largest |s|, where it was asked for
    counts: Tensor  # (H or 1, t): how many keys a row may attend to


@dataclass(frozen=True, eq=False)
class _Scores:
    """Query and key of some heads of one text as float64: H of them, served by h key heads."""

    text: int
    heads: slice
    rule: Rule
    query: Tensor  # (H, T, D), scaled
    key: Tensor  # (h, S, D)

    @classmethod
    def of(
        cls, text: int, heads: slice, query: Tensor, key: Tensor, rule: Rule, scaling: float
    ) -> _Scores:
        """Of query (H, T, D) and key (h, S, D) as the model has them."""
        query, key = (
            _buffers.take(name, one.shape, torch.float64, one).copy_(one)
            for name, one in (("query", query), ("key", key))
        )
        return cls(text, heads, rule, query.mul_(scaling), key)

    def exponentials(self, start: int, stop: int, *, largest: bool = False) -> _Exponentials:
        """Rows `start` to `stop`."""
        groups, reach = len(self.key), self.rule.reach(stop)
        q = self.query[:, start:stop].reshape(groups, -1, self.query.shape[-1])  # (h, R, D)
        exp = _buffers.take("scores", (*q.shape[:2], reach), torch.float64, q)
        torch.bmm(q, self.key[:, :reach].mT, out=exp)  # (h, R, K): scores, as yet
        low = exp.amin(-1, keepdim=True) if largest else None  # of what is masked, too
        counts = self._hide(exp, start, stop)
        top = exp.amax(-1, keepdim=True)
        if self.rule.open_to(start) == 0:  # a row may attend to no key
            top = top.masked_fill(top == -torch.inf, 0.0)
        exp.sub_(top).exp_()
        return _Exponentials(exp, None if low is None else torch.maximum(top, -low), counts)

    def _hide(self, scores: Tensor, start: int, stop: int) -> Tensor:
        """Write -inf to the scores, (h, R, K), of keys that a row may not attend to.

        Returns:
            How many keys are left to each row, (H or 1, t) float64.
        """
        reach = scores.shape[-1]
        first = min(self.rule.open_to(start), reach)
        if first == reach:
            return scores.new_full((1, stop - start), reach)
        allowed = self.rule.allowed(start, stop, keys=reach, first=first, device=scores.device)
        allowed = allowed[self.text if len(allowed) > 1 else 0]  # (H or 1, t, K - first)
        if len(allowed) > 1:
            allowed = allowed[self.heads]
        by_head = scores.view(len(self.query), stop - start, reach)
        by_head[..., first:].masked_fill_(~allowed, -torch.inf)
        return first + allowed.sum(-1).double()


@dataclass(frozen=True, eq=False)
class _Heads:
    """Some heads of one text with their values."""

    scores: _Scores
    value: Tensor  # (h, S, Dv + 2 and more): values, 1, |k|, and ones
    value_size: int  # Dv
    bounds: RowBounds | None

    @classmethod
    def of(
        cls, scores: _Scores, value: Tensor, scaling: float, rounding: Arithmetic | None
    ) -> _Heads:
        """With value (h, S, Dv) as the model has it."""
        bounds = None if rounding is None else RowBounds.of(scores.key, value, scaling, rounding)
        size = value.shape[-1]
        # Products run faster where rows do not begin a power of two apart.
        shape = (*value.shape[:2], (size + 2) // 8 * 8 + 8)
        padded = _buffers.take("value", shape, torch.float64, value)
        padded[..., :size] = value
        padded[..., size:] = 1.0
        if bounds is not None:
            padded[..., size + 1, None] = bounds.norms
        return cls(scores, padded, size, bounds)

    def rows(self, start: int, stop: int, height: int) -> Rows:
        """Rows `start` to `stop`, in n tiles of `height` rows or one that is lower."""
        heads, groups = len(self.scores.query), len(self.value)
        tiles = -(-(stop - start) // height)
        shape = (tiles, groups, heads // groups, (stop - start) // tiles)  # (n, h, H/h, R)
        product = self._buffer("product", (*shape, self.value.shape[-1]), torch.float64)
        sums = self._buffer("sums", (*shape, 2 * self.value_size), torch.float32)
        counts, largest = [], []
        for i, first in enumerate(range(start, stop, height)):
            last = min(first + height, stop)
            made = self.scores.exponentials(first, last, largest=self.bounds is not None)
            reach = made.exp.shape[-1]
            torch.bmm(made.exp, self.value[:, :reach], out=product[i].flatten(1, 2))
            counts.append(made.counts)
            if self.bounds is not None and made.largest is not None:
                scratch = self._buffer("weights", made.exp.shape, torch.float32)
                self.bounds.sums(made.exp, scratch, sums[i].flatten(1, 2))
                largest.append(made.largest)
        n = torch.cat(counts, -1)  # (H or 1, t)
        seen = n > 0 if self.scores.rule.open_to(start) == 0 else None
        total = product[..., self.value_size, None]
        if seen is not None:
            total = total.masked_fill(total == 0, 1.0)
        output = product.new_empty(heads, stop - start, self.value_size)
        torch.div(product[..., : self.value_size], total, out=_tiled(output, shape))
        bound = None
        if self.bounds is not None:
            bound = torch.empty_like(output)
            norms = torch.linalg.vector_norm(self.scores.query[:, start:stop], dim=-1, keepdim=True)
            self.bounds.output(
                sums,
                total,
                product[..., self.value_size + 1, None],
                _tiled(output, shape),
                _tiled(norms, shape),
                torch.stack(largest).view_as(total),
                _tiled(n.expand(heads, -1)[..., None], shape),
                reach,
                out=_tiled(bound, shape),
            )
        return Rows(self.scores.text, self.scores.heads, start, stop, output, bound, seen)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return _buffers.take(name, shape, dtype, self.value)


def _tiled(x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """(H, t, …) seen as n tiles of R rows of the heads that each of h serves: (n, h, H/h, R, …)."""
    tiles, groups, served, rows = shape
    return x.view(groups, served, tiles, rows, x.shape[-1]).movedim(2, 0)

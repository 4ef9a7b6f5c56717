"""softmax(QKᵀ/√d_k + M)V where no tile is asked for: its weights whole, or its output and bound.

Most of the time of an attention goes by waiting for memory: so a few heads and query rows are taken
at a time, their scores stay in the processor's cache, and every step is done in place, in the same
buffers from tile to tile. Pure torch, as `attnprobe.formula`.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.formula import tiles
from attnprobe.masks import Rule
from attnprobe.rounding import Arithmetic
from attnprobe.rowbounds import HeadBounds, RowBounds
from attnprobe.terms import PLAIN, Terms

TILE_BYTES = 2 * 2**20
"""About how much the weights of one tile take: no more than the processors' own caches hold beside
keys and values."""

ROWS = 64
"""How many query rows are taken at a time. More cost more beyond the diagonal; with fewer, matrix
products run at less than their speed."""

BAND = 4
"""How many such tiles are bounded together: numbers of a row are so few that each step costs its
call."""


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
    hidden = _Hidden(rule)
    for first in range(0, len(key), step):
        some = slice(first, first + step)
        heads = slice(first * served, (first + step) * served)
        scores = _Scores.of(0, heads, query[heads], key[some], hidden, scaling)
        for start in range(begin, end, height):
            stop = min(start + height, end)
            some_rows, _ = scores.weights(start, stop)  # (h, R, K)
            here = found[heads, start - begin : stop - begin]
            reach = some_rows.shape[-1]
            here[..., :reach] = some_rows.view(*here.shape[:2], reach)
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
    bounds = None
    if terms.plain and rounding is not None:
        bounds = RowBounds.of(query, key, scaling, rounding)
    if not terms.plain or (rounding is not None and bounds is None):
        yield from _by_weights(query, key, value, rule, scaling, terms, rounding)
        return
    served, height, step = _steps(query[0], key[0], tile_bytes)
    hidden = _Hidden(rule)
    for text in range(len(query)):
        for first in range(0, key.shape[1], step):
            some = slice(first, first + step)
            heads = slice(first * served, (first + step) * served)
            scores = _Scores.of(text, heads, query[text, heads], key[text, some], hidden, scaling)
            own = None
            if bounds is not None:
                own = bounds.of_heads(text, heads, some, value[text, some])
            few = _Heads.of(scores, value[text, some], own)
            for start, stop in _bands(query.shape[2], height):
                yield few.rows(start, stop, height)


def _steps(query: Tensor, key: Tensor, tile_bytes: int) -> tuple[int, int, int]:
    """Of (H, T, D) and (h, S, D): how many heads one key head serves, and how many query rows and
    key heads make a tile of about the size aimed at.

    Threads share a tile out by its key heads: so there are as many heads, or a multiple.
    """
    served = len(query) // len(key)
    row = 8 * served * key.shape[1]  # bytes
    rows = min(ROWS, max(1, tile_bytes // row))
    threads = torch.get_num_threads()
    fit = max(1, tile_bytes // (row * rows))
    parts = -(-len(key) // fit)
    each = -(-len(key) // parts)
    return served, rows, min(len(key), -(-each // threads) * threads)


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


_Counted = tuple[Tensor, Tensor]


class _Hidden:
    """Which keys are hidden from the rows of a tile, and how many are not: made once for all heads
    and tiles where it is the diagonal alone, which is alike in each."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.made: dict[tuple[int, int], _Counted] = {}

    def of(self, start: int, stop: int, first: int, device: torch.device) -> _Counted:
        """Of rows `start` to `stop` among the keys that they can reach, from `first` on.

        Returns:
            (B or 1, H or 1, t, K - first) bool, True where hidden; how many of them are not,
            (B or 1, H or 1, t).
        """
        if first == 0:  # else nothing but causality hides anything: see `Rule.open_to`
            return self._made(start, stop, first, device)
        size = (stop - start, self.rule.reach(stop) - first)
        if size not in self.made:
            self.made[size] = self._made(start, stop, first, device)
        return self.made[size]

    def _made(self, start: int, stop: int, first: int, device: torch.device) -> _Counted:
        keys = self.rule.reach(stop)
        allowed = self.rule.allowed(start, stop, keys=keys, first=first, device=device)
        return ~allowed, allowed.sum(-1)


@dataclass(frozen=True, eq=False)
class _Scores:
    """Query and key of some heads of one text as float64: H of them, served by h key heads."""

    text: int
    heads: slice
    hidden: _Hidden
    query: Tensor  # (H, T, D), scaled
    key: Tensor  # (h, S, D)

    @classmethod
    def of(
        cls, text: int, heads: slice, query: Tensor, key: Tensor, hidden: _Hidden, scaling: float
    ) -> _Scores:
        """Of query (H, T, D) and key (h, S, D) as the model has them."""
        query, key = (
            _buffers.take(name, one.shape, torch.float64, one).copy_(one)
            for name, one in (("query", query), ("key", key))
        )
        return cls(text, heads, hidden, query.mul_(scaling), key)

    def weights(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """softmax of rows `start` to `stop`, in a buffer.

        Returns:
            (h, R, K), 0 where a row may not attend; R is the rows of all heads served. And how many
            keys each row may attend to, (H or 1, t).
        """
        rule, groups = self.hidden.rule, len(self.key)
        reach = rule.reach(stop)
        q = self.query[:, start:stop].reshape(groups, -1, self.query.shape[-1])  # (h, R, D)
        scores = _buffers.take("scores", (*q.shape[:2], reach), torch.float64, q)
        torch.bmm(q, self.key[:, :reach].mT, out=scores)  # (h, R, K)
        first = min(rule.open_to(start), reach)
        if first == reach:
            torch.softmax(scores, -1, out=scores)
            return scores, torch.full((1, stop - start), reach, device=q.device)
        hidden, counts = (
            self._own(one) for one in self.hidden.of(start, stop, first, scores.device)
        )
        by_head = scores.view(len(self.query), stop - start, reach)
        by_head[..., first:].masked_fill_(hidden, -torch.inf)
        torch.softmax(scores, -1, out=scores)
        if first == 0:  # a row may attend to no key, and softmax then gives NaN
            by_head.masked_fill_((counts == 0)[..., None], 0.0)
        return scores, first + counts

    def _own(self, one: Tensor) -> Tensor:
        """(B or 1, H or 1, …) -> (H or 1, …), of this text and these heads."""
        one = one[self.text if len(one) > 1 else 0]
        return one[self.heads] if len(one) > 1 else one


@dataclass(frozen=True, eq=False)
class _Heads:
    """Some heads of one text with their values."""

    scores: _Scores
    value: Tensor  # (h, S, Dv + 1 and more): values, |k| or nothing, and zeros
    value_size: int  # Dv
    bounds: HeadBounds | None

    @classmethod
    def of(cls, scores: _Scores, value: Tensor, bounds: HeadBounds | None) -> _Heads:
        """With value (h, S, Dv) as the model has it."""
        size = value.shape[-1]
        # Products run faster where rows do not begin a power of two apart.
        shape = (*value.shape[:2], (size + 1) // 8 * 8 + 8)
        padded = _buffers.take("value", shape, torch.float64, value)
        padded[..., :size] = value
        padded[..., size:] = 0.0
        if bounds is not None:
            padded[..., size, None] = bounds.norms
        return cls(scores, padded, size, bounds)

    def rows(self, start: int, stop: int, height: int) -> Rows:
        """Rows `start` to `stop`, in n tiles of `height` rows or one that is lower."""
        heads, groups, size = len(self.scores.query), len(self.value), self.value_size
        tiles = -(-(stop - start) // height)
        shape = (tiles, groups, heads // groups, (stop - start) // tiles)  # (n, h, H/h, R)
        product = self._buffer("product", (*shape, self.value.shape[-1]), torch.float64)
        sums = self._buffer("sums", (*shape, 2 * size), torch.float32)
        counts = []
        for i, first in enumerate(range(start, stop, height)):
            weights, n = self.scores.weights(first, min(first + height, stop))
            reach = weights.shape[-1]
            torch.bmm(weights, self.value[:, :reach], out=product[i].flatten(1, 2))
            if self.bounds is not None:
                scratch = self._buffer("weights", weights.shape, torch.float32)
                self.bounds.sums(weights, scratch, sums[i].flatten(1, 2))
            counts.append(n)
        n = torch.cat(counts, -1)  # (H or 1, t)
        output = product.new_empty(heads, stop - start, size)
        _tiled(output, shape).copy_(product[..., :size])
        bound = None
        if self.bounds is not None:
            bound = torch.empty_like(output)
            self.bounds.output(
                sums,
                product[..., size, None],
                _tiled(output, shape),
                _tiled(self.bounds.of_query[:, start:stop], shape),
                _tiled(self.bounds.call.by_count[n].expand(heads, -1, -1), shape),
                reach,
                scratch=product[..., :size],
                out=_tiled(bound, shape),
            )
        seen = n > 0 if self.scores.hidden.rule.open_to(start) == 0 else None
        return Rows(self.scores.text, self.scores.heads, start, stop, output, bound, seen)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return _buffers.take(name, shape, dtype, self.value)


def _tiled(x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """(H, t, …) seen as n tiles of R rows of the heads that each of h serves: (n, h, H/h, R, …)."""
    tiles, groups, served, rows = shape
    return x.view(groups, served, tiles, rows, x.shape[-1]).movedim(2, 0)

"""softmax(QKᵀ/√d_k + M)V where the weights are not asked for: only the output, and its bound.

Most of the time of an attention goes by waiting for memory: so a few heads and query rows are taken
at a time, their scores stay in the processor's cache, and every step is done in place, in the same
buffers from tile to tile. The weights are never divided by their sum: it comes out of the product
with the values, to which a column of ones is added. Pure torch, as `attnprobe.formula`.
"""

from __future__ import annotations

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


class _Buffers(threading.local):
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


_buffers = _Buffers()


def attention(
    query: Tensor, key: Tensor, value: Tensor, rule: Rule, scaling: float, terms: Terms = PLAIN
) -> Tensor:
    """softmax(QKᵀ·scaling + M)V in float64, (B, T, H, Dv): heads last, as kernels return it."""
    batch, heads, queries, _ = query.shape
    output = query.new_empty(batch, queries, heads, value.shape[-1], dtype=torch.float64)
    for rows in outputs(query, key, value, rule, scaling, terms):
        output[rows.text, rows.start : rows.stop, rows.heads] = rows.output.transpose(0, 1)
    return output


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
    plain = terms.softcap is None and terms.bias is None and terms.sinks is None
    if not plain or (rounding is not None and not holds(query, key, scaling, rounding)):
        yield from _by_weights(query, key, value, rule, scaling, terms, rounding)
        return
    groups, keys = key.shape[1:3]
    served = query.shape[1] // groups  # heads that one key head serves
    row = 8 * served * keys  # bytes
    rows = min(ROWS, max(1, tile_bytes // row))
    step = max(1, min(groups, tile_bytes // (row * rows)))
    for text in range(len(query)):
        for first in range(0, groups, step):
            some = slice(first, min(first + step, groups))
            heads = slice(some.start * served, some.stop * served)
            operands = (query[text, heads], key[text, some], value[text, some])
            few = _Heads.of(text, heads, *operands, rule, scaling, rounding)
            for start in range(0, query.shape[2], rows):
                yield few.rows(start, min(start + rows, query.shape[2]))


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
class _Heads:
    """Some heads of one text: H of them, served by h key heads, as float64."""

    text: int
    heads: slice
    rule: Rule
    query: Tensor  # (H, T, D), scaled
    key: Tensor  # (h, S, D)
    value: Tensor  # (h, S, Dv + 2 and more): values, 1, |k|, and ones
    value_size: int  # Dv
    bounds: RowBounds | None

    @classmethod
    def of(
        cls,
        text: int,
        heads: slice,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: Rule,
        scaling: float,
        rounding: Arithmetic | None,
    ) -> _Heads:
        """Of query (H, T, D), key (h, S, D) and value (h, S, Dv) as the model has them."""
        query, key = (
            _buffers.take(name, one.shape, torch.float64, one).copy_(one)
            for name, one in (("query", query), ("key", key))
        )
        query.mul_(scaling)
        bounds = None if rounding is None else RowBounds.of(key, value, scaling, rounding)
        size = value.shape[-1]
        # Products run faster where rows do not begin a power of two apart.
        shape = (*value.shape[:2], (size + 2) // 8 * 8 + 8)
        padded = _buffers.take("value", shape, torch.float64, value)
        padded[..., :size] = value
        padded[..., size:] = 1.0
        if bounds is not None:
            padded[..., size + 1, None] = bounds.norms
        return cls(text, heads, rule, query, key, padded, size, bounds)

    def rows(self, start: int, stop: int) -> Rows:
        """Rows `start` to `stop`."""
        groups, reach = len(self.key), self.rule.reach(stop)
        q = self.query[:, start:stop].reshape(groups, -1, self.query.shape[-1])  # (h, R, D)
        shape = (*q.shape[:2], reach)
        exp = _buffers.take("scores", shape, torch.float64, q)
        torch.bmm(q, self.key[:, :reach].mT, out=exp)  # (h, R, K): scores, as yet
        low = None if self.bounds is None else exp.amin(-1, keepdim=True)
        n = self._hide(exp, start, stop)  # (H or 1, t)
        seen = n > 0 if self.rule.open_to(start) == 0 else None
        top = exp.amax(-1, keepdim=True)
        if seen is not None:
            top = top.masked_fill(top == -torch.inf, 0.0)
        exp.sub_(top).exp_()
        product = torch.bmm(exp, self.value[:, :reach])  # (h, R, Dv + 2 and more)
        total = product[..., self.value_size, None]  # (h, R, 1)
        if seen is not None:
            total = total.masked_fill(total == 0, 1.0)
        output = product[..., : self.value_size] / total  # (h, R, Dv)
        bound = None
        if self.bounds is not None and low is not None:
            by_norm = product[..., self.value_size + 1, None]
            served = len(self.query) // groups
            counts = n.repeat(1, served) if len(n) == 1 else n.reshape(groups, -1)
            norms = torch.linalg.vector_norm(q, dim=-1, keepdim=True)
            largest = torch.maximum(top, -low)
            scratch = [_buffers.take(name, shape, torch.float32, q) for name in ("weights", "ε")]
            bound = self.bounds.output(
                *(exp, total, by_norm, output, norms, largest),
                counts[..., None],
                (scratch[0], scratch[1]),
            ).view(len(self.query), stop - start, -1)
        output = output.view(len(self.query), stop - start, -1)
        return Rows(self.text, self.heads, start, stop, output, bound, seen)

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

"""The checks of one attention call: what the model did against the formula, computed again.

Each check takes a call and gives rows of a report, one a head or one a layer. The scale and the
mask come from facts (`AttentionCall.expected_scaling`, `.expected_mask`), never from what the model
handed its kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attnprobe.checking.basis import basis_of, row_blocks
from attnprobe.checking.report import Row
from attnprobe.errors import InputError
from attnprobe.formula import Tile
from attnprobe.projections import merged, projected, unsure
from attnprobe.records import AttentionCall

_AWAY = "the layer's weights are offloaded between forwards, so there is nothing to compare with"

_ALL = slice(None)

_NOT_FINITE = "what the kernel was given or gave holds NaN or infinity, so it has no bound"

_EMPTY = "{} in {} may round these scores so far that the output could be any of the values'"


def _projection(call: AttentionCall) -> list[Row]:
    """X·W + b, normed and turned as the family does, against query, key and value; a row per head,
    the worst of its three."""
    expected = _AWAY if call.offloaded else projected(call)
    if isinstance(expected, str):
        return [Row("projection", call.layer, None, reason=expected)]
    worst = _Worst(call.heads, call.query.device)
    for name, (want, bound) in expected.items():
        # A cache's keys stand before this forward's own, and a static cache's room behind them.
        first = 0 if name == "query" else call.first_key
        got = getattr(call, name)[:, :, first : first + want.shape[2]]
        if got.shape[1] > want.shape[1]:  # the model repeats its key heads before the kernel
            want, bound = (_for_heads(got.shape[1], one) for one in (want, bound))
        if got.shape != want.shape:
            reason = f"this forward's own {name} is not found among {getattr(call, name).shape[2]}"
            return [Row("projection", call.layer, None, reason=reason)]
        error = _for_heads(call.heads, (got.double() - want).abs_())
        worst.update(error, _for_heads(call.heads, bound))
    return _settled(worst.rows("projection", call), call)


def _for_heads(heads: int, one: Tensor) -> Tensor:
    """Of (B, h, …), each of the h repeated for the heads it serves: (B, heads, …)."""
    served = heads // one.shape[1]
    return one if served == 1 else one.repeat_interleave(served, 1)  # which copies even then


def _settled(rows: list[Row], call: AttentionCall) -> list[Row]:
    """The rows of `projection` or `merge`; of a class that is not known, none is a mismatch, and
    no projection that went through a cache that rounds it."""
    if not any(row.verdict == "mismatch" for row in rows):
        return rows
    reason = unsure(call)
    if rows[0].check == "projection" and call.cache is not None:
        reason = reason or call.cache.inexact
    return [Row(rows[0].check, call.layer, None, reason=reason)] if reason else rows


def _mask(call: AttentionCall) -> list[Row]:
    """M rebuilt from facts against what the kernel went by: the mask passed, or its own causality.

    The error is 1 if any entry differs, else 0: there is nothing to round in a mask. A bias in it
    differs where it is further off than its rounding (see `attnprobe.biases`). Where M is taken as
    it was passed, an error says that it is another than the rule's.
    """
    basis = basis_of(call)
    if basis.taken:
        differs = call.expected_mask is not None and basis.mask_difference
        return [Row("mask", call.layer, None, 1.0 if differs else math.nan, reason=basis.taken)]
    reason = basis.mask_difference
    return [Row("mask", call.layer, None, float(bool(reason)), 0.0, reason)]


def _weights(call: AttentionCall) -> list[Row]:
    """The weights of the formula against the model's own; a row per head."""
    if call.weights_model is None:
        reason = f"the {call.kernel} kernel does not return its weights; load with attn='eager'"
        return [Row("weights", call.layer, None, reason=reason)]
    if _before_sinks(call):
        reason = "the model returns its weights as they are before its sinks take their share"
        return [Row("weights", call.layer, None, reason=reason)]
    basis = basis_of(call)
    if basis.unheld:
        return [Row("weights", call.layer, None, reason=basis.unheld)]
    worst = _Worst(call.heads, call.query.device)
    for tile in basis.tiles():
        _compare_weights(call, tile, worst)
    return worst.rows("weights", call, basis.difference)


def _before_sinks(call: AttentionCall) -> bool:
    """Whether the model's weights sum to 1 along each row though sinks have a share (Granite)."""
    assert call.weights_model is not None
    basis = basis_of(call)
    if basis.terms.sinks is None or basis.unheld:
        return False
    taken = off = 0.0
    for tile in basis.tiles():
        sums = call.weights_model[:, :, tile.start : tile.stop].double().sum(-1)  # (B, H, t)
        taken = max(taken, float((1 - tile.weights.sum(-1)).masked_fill(~tile.seen, 0.0).max()))
        off = max(off, float((sums - 1).abs().masked_fill(~tile.seen, 0.0).max()))
    return taken > 0.1 and off < 0.01


def _output(call: AttentionCall) -> list[Row]:
    """weights · V against what the kernel returned; a row per head."""
    basis = basis_of(call)
    if basis.unheld:
        return [Row("output", call.layer, None, reason=basis.unheld)]
    assert call.head_output_model is not None
    batch, heads, queries, _ = call.query.shape
    expected = (batch, queries, heads, call.value.shape[-1])
    if call.head_output_model.shape != expected:
        raise InputError(
            f"layer {call.layer}: head_output_model is {tuple(call.head_output_model.shape)}, and "
            f"its query and value ask for {expected}: give the call as it was captured"
        )
    worst, largest = _Worst(call.heads, call.query.device), _largest_error(call)
    for rows in basis.outputs():
        assert rows.bound is not None
        seen = None if rows.seen is None else rows.seen[None, ..., None]  # (1, h or 1, t, 1)
        got = call.head_output_model[rows.text, rows.start : rows.stop, rows.heads]
        error = rows.output.sub_(got.transpose(0, 1)).abs_()  # (h, t, Dv)
        worst.update(error[None], rows.bound[None], seen, rows.heads)
        worst.count_empty(rows.bound[None], largest[rows.text, rows.heads], seen, rows.heads)
    return worst.rows("output", call, basis.difference)


def _compare_weights(call: AttentionCall, tile: Tile, worst: _Worst) -> None:
    assert call.weights_model is not None
    assert tile.weights_bound is not None
    seen = tile.seen[..., None]
    got = call.weights_model[:, :, tile.start : tile.stop]  # (B, H, t, S)
    reach = tile.weights.shape[-1]
    near, past = got[..., :reach], got[..., reach:]
    worst.update((near.double() - tile.weights).abs(), tile.weights_bound, seen)
    if past.shape[-1]:  # past the diagonal the weights are exactly 0
        worst.update(past.double().abs(), torch.zeros_like(past, dtype=torch.float64), seen)


def _largest_error(call: AttentionCall) -> Tensor:
    """2·max|v|, (B, H, 1, Dv): no mean of the values can be further off, whatever the weights.

    Infinite where all values are 0, and so is the output.
    """
    largest = 2 * call.value.abs().amax(2, keepdim=True).double()  # (B, Hkv, 1, Dv)
    largest = largest.masked_fill(largest == 0, math.inf)
    return _for_heads(call.heads, largest)


def _merge(call: AttentionCall) -> list[Row]:
    """heads · W_O + b against the attention module's output, or where more follows in it, or W_O
    stands outside of it, against what W_O gave; one row."""
    expected = _AWAY if call.offloaded else merged(call)
    if isinstance(expected, str):
        return [Row("merge", call.layer, None, reason=expected)]
    assert call.attention_output is not None
    want, bound = expected
    worst = _Worst(1, call.query.device)
    worst.update((call.attention_output.double() - want).abs()[:, None], bound[:, None])
    rows = [replace(row, head=None) for row in worst.rows("merge", call)]
    return _settled(rows, call)


def _by_head(x: Tensor) -> Tensor:
    """(B, H, …) -> (H, …), flat."""
    return x.transpose(0, 1).flatten(1)


class _Worst:
    """For each head, the number that stands worst against its bound so far."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.ratio = torch.full((heads,), -1.0, dtype=torch.float64, device=device)
        self.error = torch.zeros_like(self.ratio)
        self.bound = torch.zeros_like(self.ratio)
        self.empty = torch.zeros_like(self.ratio)  # numbers whose bound says nothing
        self.count = torch.zeros_like(self.ratio)

    def update(
        self, error: Tensor, bound: Tensor, seen: Tensor | None = None, heads: slice = _ALL
    ) -> None:
        """Take in (B, h, …) errors and their bounds, but for rows where `seen` is False."""
        ratio = error / bound
        if seen is not None:
            ratio.masked_fill_(~seen, -1.0)
        top, at = _by_head(ratio).max(-1)  # (h,)
        if top.isnan().any():  # 0/0 is no error; any other NaN is the worst
            ratio = torch.where(error == 0, ratio.nan_to_num(0.0), ratio.nan_to_num(math.inf))
            top, at = _by_head(ratio).max(-1)
        better = top > self.ratio[heads]
        if better.any():
            here = [top, *(_by_head(x).gather(-1, at[:, None])[:, 0] for x in (error, bound))]
            for new, kept in zip(here, (self.ratio, self.error, self.bound), strict=True):
                kept[heads] = torch.where(better, new, kept[heads])

    def count_empty(
        self, bound: Tensor, largest: Tensor, seen: Tensor | None, heads: slice = _ALL
    ) -> None:
        """Take in where a bound, (B, h, …), is so wide as to say nothing: not below `largest`."""
        if seen is None:
            self.count[heads] += bound[:, 0].numel()
        else:
            self.count[heads] += _by_head(seen.expand_as(bound)).sum(-1)
        if bound.amax() < largest.amin():  # as nearly always, and a NaN is not
            return
        empty = bound >= largest
        self.empty[heads] += _by_head(empty if seen is None else empty & seen).sum(-1)

    def rows(self, check: str, call: AttentionCall, reason: str = "") -> list[Row]:
        """A row per head; an error that is not a number counts as infinite.

        A head within its bounds, most of which say nothing, is not checked.
        """
        rows = []
        empty = (self.empty > self.count / 2).tolist()
        numbers = zip(self.error.tolist(), self.bound.tolist(), empty, strict=True)
        for head, (error, bound, is_empty) in enumerate(numbers):
            error = math.inf if math.isnan(error) else error
            why = reason or (_NOT_FINITE if math.isnan(bound) else "")
            row = Row(check, call.layer, head, error, bound, why)
            if row.verdict == "verified" and is_empty:
                row = Row(check, call.layer, head, reason=_EMPTY.format(call.kernel, call.dtype))
            rows.append(row)
        return rows


def rows_left_out(call: AttentionCall) -> int:
    """How many query rows of the batch may attend to no key."""
    if call.expected_mask is None or call.expected_mask.padding is None:
        return 0
    return sum(
        int((~call.expected_mask.allowed(start, stop).any(-1)).sum())
        for start, stop in row_blocks(call)
    )


BY_CALL: dict[str, Callable[[AttentionCall], list[Row]]] = {
    "projection": _projection,
    "mask": _mask,
    "weights": _weights,
    "output": _output,
    "merge": _merge,
}

"""The checks of one attention call: what the model did against the formula, computed again.

Each check takes a call and gives rows of a report, one a head or one a layer. The scale and the
mask come from facts (`AttentionCall.expected_scaling`, `.expected_mask`), never from what the model
handed its kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attnprobe.formula import Tile
from attnprobe.masks import MaskRule, disagreement
from attnprobe.projections import merged, projected
from attnprobe.records import AttentionCall
from attnprobe.report import Row

NO_RULE = "the mask came whole (4-D, or by layer type), so there are no facts to rebuild it from"

_EMPTY = "{} in {} may round these scores so far that the output could be any of the values'"


def _projection(call: AttentionCall) -> list[Row]:
    """X·W + b against query, key and value; a row per head, the worst of its three."""
    expected = projected(call)
    if isinstance(expected, str):
        return [Row("projection", call.layer, None, reason=expected)]
    worst = _Worst(call.heads, call.query.device)
    offset = call.expected_mask.offset if call.expected_mask is not None else 0
    for name, (want, bound) in expected.items():
        # A cache's keys stand before this forward's own, and a static cache's room behind them.
        first = 0 if name == "query" else offset
        got = getattr(call, name)[:, :, first : first + want.shape[2]]
        repeats = call.heads // got.shape[1]
        error = (got.double() - want).abs().repeat_interleave(repeats, 1)
        worst.update(error, bound.repeat_interleave(repeats, 1))
    return worst.rows("projection", call)


def _mask(call: AttentionCall) -> list[Row]:
    """M rebuilt from facts against what the kernel went by: the mask passed, or its own causality.

    The error is 1 if any entry differs, else 0: there is nothing to round in a mask.
    """
    if call.expected_mask is None:
        return [Row("mask", call.layer, None, reason=NO_RULE)]
    reason = _mask_difference(call)
    if reason and not call.facts_known:
        return [Row("mask", call.layer, None, reason=f"{_unknown_type(call)}: {reason}")]
    return [Row("mask", call.layer, None, float(bool(reason)), 0.0, reason)]


def _mask_difference(call: AttentionCall) -> str:
    """Where the mask that the kernel went by differs from the rebuilt one; empty if nowhere."""
    rule = call.expected_mask
    assert rule is not None
    different, first = 0, ""
    for start, stop in _row_blocks(call):
        allowed = rule.allowed(start, stop, device=call.query.device, keys=rule.keys)
        used = _mask_used(call, start, stop)  # (B or 1, H or 1, t, S)
        differs = disagreement(used, allowed)
        if differs.any() and not different:
            where = differs.nonzero()[0].tolist()
            first = f"first at query {start + where[2]}, key {where[3]}"
        different += int(differs.sum())
    return f"{different} mask entries differ from the rule, {first}" if different else ""


def _scaling_difference(call: AttentionCall) -> str:
    """How the scale that the model passed differs from the expected one; empty if not."""
    if math.isclose(call.scaling, call.expected_scaling, rel_tol=1e-6):
        return ""
    return f"the model scales by {call.scaling:.6g}, expected {call.expected_scaling:.6g}"


def _unknown_type(call: AttentionCall) -> str:
    kind = getattr(getattr(call.module, "config", None), "model_type", "this model")
    return f"whether {kind} has rules of its own is not known"


def _mask_used(call: AttentionCall, start: int, stop: int) -> Tensor:
    """Rows of the mask that the kernel went by, boolean or additive."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    if call.mask is None:
        # eager masks nothing by itself; others mask the future unless a single query asks. sdpa
        # draws the diagonal from the top left, the flash kernels to the bottom right.
        causal = call.is_causal and queries > 1 and "eager" not in call.kernel
        offset = 0 if call.kernel == "sdpa" else keys - queries
        rule = MaskRule(queries, keys, causal=causal, offset=offset)
        return rule.allowed(start, stop, device=call.query.device, keys=keys)
    if call.mask.dim() == 2:  # the flash kernels take padding, and mask the future by themselves
        rule = MaskRule(
            queries,
            keys,
            causal=call.is_causal and queries > 1,
            padding=call.mask[:, :keys].bool(),
            offset=keys - queries,
        )
        return rule.allowed(start, stop, keys=keys)
    rows = call.mask if call.mask.shape[-2] == 1 else call.mask[..., start:stop, :]
    return rows[..., :keys]


def _weights(call: AttentionCall) -> list[Row]:
    """The weights of the formula against the model's own; a row per head."""
    if call.weights_model is None:
        reason = f"the {call.kernel} kernel does not return its weights; load with attn='eager'"
        return [Row("weights", call.layer, None, reason=reason)]
    return _compare_tiles("weights", call)


def _output(call: AttentionCall) -> list[Row]:
    """weights · V against what the kernel returned; a row per head."""
    return _compare_tiles("output", call)


def _compare_tiles(check: str, call: AttentionCall) -> list[Row]:
    reason = unheld(call)
    if reason:
        return [Row(check, call.layer, None, reason=reason)]
    assert call.expected_mask is not None
    worst = _Worst(call.heads, call.query.device)
    largest = _largest_error(call)
    for tile in call.tiles():
        seen = tile.seen[..., None]  # (B, 1, t, 1)
        if check == "output":
            assert call.head_output_model is not None
            assert tile.output_bound is not None
            got = call.head_output_model[:, tile.start : tile.stop].transpose(1, 2)
            worst.update((got.double() - tile.output).abs(), tile.output_bound, seen)
            worst.count_empty(tile.output_bound >= largest, seen)
        else:
            _compare_weights(call, tile, worst)
    return worst.rows(check, call, _scaling_difference(call))


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
    largest = 2 * call.value.double().abs().amax(2, keepdim=True)  # (B, Hkv, 1, Dv)
    largest = largest.masked_fill(largest == 0, math.inf)
    return largest.repeat_interleave(call.heads // call.value.shape[1], 1)


def _merge(call: AttentionCall) -> list[Row]:
    """heads · W_O + b against the attention module's output; one row."""
    expected = merged(call)
    if isinstance(expected, str):
        return [Row("merge", call.layer, None, reason=expected)]
    assert call.attention_output is not None
    want, bound = expected
    worst = _Worst(1, call.query.device)
    worst.update((call.attention_output.double() - want).abs()[:, None], bound[:, None])
    return [replace(row, head=None) for row in worst.rows("merge", call)]


class _Worst:
    """For each head, the number that stands worst against its bound so far."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.ratio = torch.full((heads,), -1.0, dtype=torch.float64, device=device)
        self.error = torch.zeros_like(self.ratio)
        self.bound = torch.zeros_like(self.ratio)
        self.empty = torch.zeros_like(self.ratio)  # numbers whose bound says nothing
        self.count = torch.zeros_like(self.ratio)

    def update(self, error: Tensor, bound: Tensor, seen: Tensor | None = None) -> None:
        """Take in (B, H, …) errors and their bounds, but for rows where `seen` is False."""
        ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=math.inf)
        if seen is not None:
            ratio = ratio.masked_fill(~seen, -1.0)
        by_head = [x.transpose(0, 1).flatten(1) for x in (ratio, error, bound)]  # (H, …)
        at = by_head[0].argmax(-1, keepdim=True)
        here = [x.gather(-1, at).squeeze(-1) for x in by_head]
        better = here[0] > self.ratio
        self.ratio, self.error, self.bound = (
            torch.where(better, new, old)
            for new, old in zip(here, (self.ratio, self.error, self.bound), strict=True)
        )

    def count_empty(self, empty: Tensor, seen: Tensor) -> None:
        """Take in where, in (B, H, …) numbers, the bound is too wide to say anything."""
        here = (empty & seen).transpose(0, 1).flatten(1)
        self.empty += here.sum(-1)
        self.count += seen.expand_as(empty).transpose(0, 1).flatten(1).sum(-1)

    def rows(self, check: str, call: AttentionCall, reason: str = "") -> list[Row]:
        """A row per head; an error that is not a number counts as infinite.

        A head within its bounds, most of which say nothing, is not checked.
        """
        rows = []
        for head in range(len(self.error)):
            error, bound = self.error[head].item(), self.bound[head].item()
            row = Row(
                check, call.layer, head, math.inf if math.isnan(error) else error, bound, reason
            )
            if row.verdict == "verified" and self.empty[head] > self.count[head] / 2:
                row = Row(check, call.layer, head, reason=_EMPTY.format(call.kernel, call.dtype))
            rows.append(row)
        return rows


def unheld(call: AttentionCall) -> str:
    """Why the formula here does not hold for a call; empty where it does."""
    return _unheld_term(call) or ("" if call.facts_known else _departure(call))


def difference(call: AttentionCall) -> str:
    """Why the formula's weights would not be the model's own; empty where they are."""
    return _unheld_term(call) or _departure(call)


def _unheld_term(call: AttentionCall) -> str:
    if call.expected_mask is None:
        return NO_RULE
    if call.terms:
        return f"the formula here has no {', '.join(call.terms)}"
    if call.dropout:
        return f"dropout of {call.dropout} was on, so the weights were random"
    return ""


def _departure(call: AttentionCall) -> str:
    """How the scale or mask that the model went by departs from the facts; empty if not."""
    found = _scaling_difference(call) or _mask_difference(call)
    return found if not found or call.facts_known else f"{_unknown_type(call)}: {found}"


def rows_left_out(call: AttentionCall) -> int:
    """How many query rows of the batch may attend to no key."""
    if call.expected_mask is None or call.expected_mask.padding is None:
        return 0
    return sum(
        int((~call.expected_mask.allowed(start, stop).any(-1)).sum())
        for start, stop in _row_blocks(call)
    )


def _row_blocks(call: AttentionCall, rows: int = 256) -> Iterator[tuple[int, int]]:
    queries = call.query.shape[2]
    for start in range(0, queries, rows):
        yield start, min(start + rows, queries)


BY_CALL: dict[str, Callable[[AttentionCall], list[Row]]] = {
    "projection": _projection,
    "mask": _mask,
    "weights": _weights,
    "output": _output,
    "merge": _merge,
}

"""The `logits` check: the whole model run with the formula in place of every attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.capturing import output_of
from attnprobe.checking.basis import basis_of
from attnprobe.checking.report import Row
from attnprobe.hooks import replaced
from attnprobe.loading.amounts import need_forward
from attnprobe.records import AttentionCall, Capture, dtype_name

FALSE_ALARM = 1e-9
"""The chance that a right model's logits pass the bound of the `logits` check by bad luck."""

UNRELATED = 3.0
"""Outputs that have nothing to do with each other surely differ, somewhere in the vocabulary, by
this many of their standard deviations."""

LESS = "checks=['mask', 'output'], without the logits,"
"""What to ask for where three outputs are too much."""

TOKENS_AT_ONCE = 8
"""How many tokens' logits are compared in float64 at a time."""


def logits_row(cap: Capture, reason: str) -> Row:
    """The model run with the formula in place of every attention, against the logits it gave.

    How much may they differ? The two runs differ in nothing but each attention's output, and there
    by at most the bound of the `output` check, b. A third run measures what that is worth: every
    attention output is moved by b with a random sign, and Δ is what moves at the logits. To first
    order Δ = J·(±b) at each logit, of mean square ‖J·diag(b)‖². For errors that are independent,
    centred and within ±b, Hoeffding's inequality bounds a logit's difference by λ‖J·diag(b)‖ but
    for a chance of 2exp(-λ²/2), and λ is chosen so that all N logits together hold but for a chance
    of FALSE_ALARM. This is the probabilistic rounding analysis of Higham & Mary, SIAM J. Sci.
    Comput. 41 (2019), with the conditioning measured instead of derived.

    So this bound is an estimate, not a proof: ‖J·diag(b)‖ is taken from one sample, as the larger
    of the mean square of Δ over the vocabulary at the token where it is largest, and over the
    tokens at the vocabulary's entry in question.

    Where rounding alone may move the logits by as much as unrelated ones would differ, the first
    order says nothing any more, and neither does this check: it is not_checked.

    Args:
        cap: what `capture` returned.
        reason: why it cannot be checked, if that is known already; else empty.

    Raises:
        InputError: two more outputs would take more memory than `attnprobe.memory` allows.
    """
    if cap.lm is None:
        return Row("logits", None, None, reason="the capture has no model with it")
    if cap.part:
        return Row("logits", None, None, reason=f"this is the {cap.part} alone: verify the whole")
    if reason:
        return Row("logits", None, None, reason=reason)
    need_forward(cap.lm.model, cap.inputs, outputs=2, instead=LESS)
    generator = torch.Generator().manual_seed(0)
    outputs = (
        cap.output,
        _output_with(cap, _formula),
        _output_with(cap, lambda call: _moved(call, generator)),
    )
    if outputs[1].shape != cap.output.shape:
        shapes = f"{tuple(outputs[1].shape)}, the capture's output is {tuple(cap.output.shape)}"
        return Row("logits", None, None, reason=f"the model gives {shapes}")
    rows = cap.output_padding
    found = _spread(*outputs, rows)
    count = int(rows.sum()) * cap.output.shape[-1]
    bound = found.spread * math.sqrt(2 * math.log(2 * count / FALSE_ALARM))  # (V,)
    usual = bound.median().item()
    if not usual < UNRELATED * found.scale:
        reason = (
            f"rounding alone may move this model's output in {dtype_name(cap.output.dtype)} by "
            f"{usual:.2g}, as much as unrelated ones differ (their deviation is {found.scale:.2g})"
        )
        return Row("logits", None, None, reason=reason)
    worst = int(
        torch.where(found.error == 0, 0.0, found.error / bound).nan_to_num(math.inf).argmax()
    )
    return Row("logits", None, None, found.error[worst].item(), bound[worst].item())


@dataclass(frozen=True, eq=False)
class _Spread:
    error: Tensor  # (V,): the largest |given - own| of each entry over the tokens
    spread: Tensor  # (V,): how far moving each attention by its bound moves each entry
    scale: float  # the deviation of own over the vocabulary, at the token where it is least


def _spread(given: Tensor, own: Tensor, moved: Tensor, rows: Tensor) -> _Spread:
    """How three outputs, (B, T, V) each, differ at tokens that are no padding, (B, T) bool; in
    float64, a block of tokens at a time."""
    error = torch.zeros(given.shape[-1], dtype=torch.float64, device=given.device)
    by_entry, by_token = torch.zeros_like(error), torch.zeros_like(error[0])
    scale = torch.full_like(by_token, math.inf)
    blocks = (torch.split(one.flatten(0, 1), TOKENS_AT_ONCE) for one in (given, own, moved, rows))
    for *some, kept in zip(*blocks, strict=True):
        if not kept.any():
            continue
        # Picking rows copies them, and most texts have no padding.
        g, o, m = (one.double() if kept.all() else one[kept].double() for one in some)
        square = (m - o).square_()
        by_entry += square.sum(0)
        by_token = torch.maximum(by_token, square.mean(-1).max())
        error = torch.maximum(error, (g - o).abs_().amax(0))
        # o.std(-1) of rows as long as these takes ten times as long, and longer than all the rest.
        off = torch.linalg.vector_norm(o - o.mean(-1, keepdim=True), dim=-1)
        scale = torch.minimum(scale, off.min() / math.sqrt(o.shape[-1] - 1))
    spread = torch.maximum(by_entry / rows.sum(), by_token).sqrt()
    return _Spread(error, spread, scale.item())


def _output_with(cap: Capture, kernel: Callable[[AttentionCall], Tensor]) -> Tensor:
    assert cap.lm is not None

    def handle(call: AttentionCall, _: object) -> tuple[Tensor, None]:
        return kernel(call).to(call.value.dtype).contiguous(), None

    with torch.no_grad(), replaced(cap.lm.model, handle):
        output = output_of(cap.lm.model(**cap.inputs), cap.lm.model, cap.output_padding)
        return output.to(cap.output.device)


def _formula(call: AttentionCall) -> Tensor:
    return basis_of(call).output()


def _moved(call: AttentionCall, generator: torch.Generator) -> Tensor:
    """The formula's output, each number moved by its bound, up or down at random."""
    batch, heads, queries, _ = call.query.shape
    shape = (batch, queries, heads, call.value.shape[-1])
    moved = call.query.new_empty(shape, dtype=torch.float64)
    for rows in basis_of(call).outputs():
        assert rows.bound is not None
        sign = torch.randint(0, 2, rows.output.shape, generator=generator, dtype=torch.int8) * 2 - 1
        number = torch.addcmul(rows.output, sign.to(rows.output), rows.bound)
        moved[rows.text, rows.start : rows.stop, rows.heads] = number.transpose(0, 1)
    return moved

"""`verify`: every check of every attention call, and of the whole model's logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from attnprobe.capturing import Texts, forward, output_of
from attnprobe.checking.basis import basis_of
from attnprobe.checking.caches import cache_rows
from attnprobe.checking.checks import BY_CALL, rows_left_out
from attnprobe.checking.report import Row, VerificationReport
from attnprobe.errors import InputError
from attnprobe.hooks import replaced
from attnprobe.models import as_language_model
from attnprobe.records import WRITTEN, AttentionCall, Calls, Capture, LanguageModel, UnseenAttention

CHECKS = ("projection", "cache", "mask", "weights", "output", "merge", "logits")

FALSE_ALARM = 1e-9
"""The chance that a right model's logits pass the bound of the `logits` check by bad luck."""

UNRELATED = 3.0
"""Outputs that have nothing to do with each other surely differ, somewhere in the vocabulary, by
this many of their standard deviations."""

TOKENS_AT_ONCE = 8
"""How many tokens' logits are compared in float64 at a time."""

Progress = Callable[[str, int, int], None]


def verify(
    what: object,
    text: Texts | None = None,
    *,
    checks: Sequence[str] | None = None,
    target: Texts | None = None,
    padding_side: Literal["left", "right"] | None = None,
    progress: Progress | None = None,
) -> VerificationReport:
    """Compare what the model computed with the formula, computed again in float64.

    | check | compares |
    |---|---|
    | `projection` | X·W + b against the query, key and value seen |
    | `cache` | keys and values that a cache gives back against those of the forward before |
    | `mask` | M rebuilt from facts against the one the model used |
    | `weights` | softmax(QKᵀ/√d_k + M) against the model's own weights, where it gives them |
    | `output` | weights · V against what the kernel returned |
    | `merge` | heads · W_O + b against the attention module's output |
    | `logits` | the model run with this formula in place of every attention, against its logits |

    `cache` is made where a forward goes on from a cache, as the steps of a generation do. It and
    `mask` allow no difference. The other bounds are worst-case bounds on rounding (see
    `attnprobe.formula`), but that of `logits` is probabilistic: see `_logits`.

    Args:
        what: what `capture` returned; or the calls that a `probe` yields: of a generation, every
            step; without the `logits` check. A slice of them does as well. Or a model, as `capture`
            takes it, which is then run on `text`: each layer is checked as soon as it has run, and
            nothing of it is kept.
        text, target, padding_side: of a model, as for `capture`. Several texts run as one padded
            batch: in groups of one length there would be no padding, and what the model does with
            it would go unchecked. Texts of very different lengths cost less one at a time.
        checks: some of the names above; all of them by default.
        progress: called as `progress(label, done, total)` after each layer.

    Raises:
        InputError: a name in `checks` that is none of the above; neither a capture, calls, nor a
            model with its text; a plain list of calls, which no longer says what was not seen; of
            a model, what `capture` refuses.
        ModelError, NonFiniteError: as `capture`.
    """
    found = _Found(_chosen(checks), progress)
    if isinstance(what, Capture | list) or not _is_model(what):
        if not (text is target is padding_side is None):
            raise InputError("text, target and padding_side go with a model, not with its capture")
        calls = what.calls if isinstance(what, Capture) else _calls(what)
        found.expected = len(calls)
        for call in calls:
            found.take(call)
        if isinstance(what, Capture):
            return _of_capture(found, what)
        if "cache" in found.checks:
            found.rows += _cache(calls, asked=checks is not None)
        reason = "a probe's calls hold no logits: capture one forward"
        return found.report(_calls(what).unseen, lambda: Row("logits", None, None, reason=reason))
    lm = as_language_model(what)
    if text is None:
        raise InputError("expected a text for the model to run on: verify(lm, text)")
    found.expected = _layers_of(lm)
    return _of_capture(found, forward(lm, text, target, padding_side, found.take))


def _is_model(what: object) -> bool:
    """Whether this may be what `capture` takes for a model."""
    pair = isinstance(what, tuple) and any(isinstance(one, nn.Module) for one in what)
    return pair or isinstance(what, LanguageModel | nn.Module)


def _chosen(checks: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(checks, str) or not isinstance(checks, Sequence | None):
        raise InputError(f"expected a list of checks, got {checks!r}")
    chosen = CHECKS if checks is None else tuple(checks)
    unknown = [name for name in chosen if name not in CHECKS]
    if unknown or not chosen:
        raise InputError(f"unknown check {unknown}; the checks are {', '.join(CHECKS)}")
    return chosen


def _of_capture(found: _Found, cap: Capture) -> VerificationReport:
    """The report of a whole forward, whose calls `found` has taken."""
    if "cache" in found.checks and found.checks is not CHECKS:
        found.rows += _cache((), asked=True)
    found.leave_out(cap)
    report = found.report(cap.unseen, functools.partial(_logits, cap, found.unheld))
    return replace(
        report,
        model=cap.lm.name if cap.lm is not None else "",
        texts=len(cap),
        tokens=int(cap.padding.sum()),
        model_layers=_layers_of(cap.lm) if cap.target is None else None,
    )


@dataclass(eq=False)
class _Found:
    """What the checks have found so far, call by call."""

    checks: tuple[str, ...]
    progress: Progress | None
    expected: int | None = None  # calls, where that is known
    rows: list[Row] = field(default_factory=list)
    kernels: dict[str, None] = field(default_factory=dict)  # in the order of the calls
    dtypes: dict[str, None] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    first: tuple[int, str] | None = None  # layer and part of the first call
    taken: int = 0
    texts: int = 0
    tokens: int = 0
    left_out: int = 0
    unheld: str = ""

    def take(self, call: AttentionCall) -> None:
        """Make the checks of a call."""
        for name in self.checks:
            if name in BY_CALL:
                found = BY_CALL[name](call)
                if call.written and name in ("projection", "weights", "output"):
                    found = [Row(name, call.layer, None, reason=WRITTEN)]
                rows = (replace(row, part=call.part) for row in found)
                self.rows += [_in_step(row, call.step) for row in rows]
        self.kernels[call.kernel] = self.dtypes[_name(call.dtype)] = None
        self.steps.add(call.step)
        if self.first is None:
            self.first, self.texts = (call.layer, call.part), len(call.query)
        if self.first == (call.layer, call.part):
            self.tokens += _tokens(call)
        self.left_out += rows_left_out(call)
        self.unheld = self.unheld or basis_of(call).unheld
        self._show(f"layer {call.layer}")

    def leave_out(self, cap: Capture) -> None:
        """Say which layers were not kept: nothing counts as verified by being left out."""
        if "output" in self.checks and cap.left_out:
            reason = _left_out(cap)
            self.rows += [
                Row("output", one.layer, None, reason=reason, part=one.part) for one in cap.left_out
            ]

    def report(
        self, unseen: Sequence[UnseenAttention], logits: Callable[[], Row]
    ) -> VerificationReport:
        """What came of it all."""
        if "output" in self.checks:
            self.rows += [
                Row("output", one.layer, None, reason=str(one), part=one.part) for one in unseen
            ]
        if "logits" in self.checks:
            self.rows.append(logits())
            self.expected = None
            self._show("logits")
        self.rows.sort(key=lambda row: CHECKS.index(row.check))  # stable: layers stay in order
        return VerificationReport(
            rows=tuple(self.rows),
            model="a probe's calls",
            kernel=", ".join(self.kernels),
            dtype=", ".join(self.dtypes),
            texts=self.texts,
            tokens=self.tokens,
            rows_left_out=self.left_out,
            steps=len(self.steps),
        )

    def _show(self, label: str) -> None:
        self.taken += 1
        if self.progress:
            more = self.expected is not None and "logits" in self.checks
            total = max(self.taken, (self.expected or 0) + more)
            self.progress(label, self.taken, total)


def _calls(given: object) -> Calls:
    """The calls that a probe yielded, with what it did not see."""
    expected = "expected a capture, what ap.capture returns, the calls of a probe, or a model"
    if not isinstance(given, list | tuple):
        got = f"the text {given!r}" if isinstance(given, str) else type(given).__name__
        raise InputError(f"{expected}; got {got}")
    if not given or not all(isinstance(one, AttentionCall) for one in given):
        raise InputError(f"{expected}; got {'no calls' if not given else 'a list of other things'}")
    if not isinstance(given, Calls):
        raise InputError(
            f"{expected}; got a plain {type(given).__name__} of them, which no longer says what "
            "attention was not seen: give what the probe yielded, or a slice of it"
        )
    return given


def _cache(calls: Sequence[AttentionCall], *, asked: bool) -> list[Row]:
    """The rows of `cache`; where no forward goes on from one, it is left out unless asked for."""
    rows = cache_rows(calls)
    if not rows and asked:
        return [Row("cache", None, None, reason="no forward here goes on from a cache")]
    return rows


def _tokens(call: AttentionCall) -> int:
    """How many tokens a forward was given, without padding where that is known."""
    batch, _, queries, _ = call.query.shape
    rule = call.expected_mask
    if rule is None or rule.padding is None or call.kind == "cross":
        return batch * queries
    return int(rule.padding[:, rule.offset : rule.offset + queries].sum())


def _in_step(row: Row, step: int) -> Row:
    """A row of a forward after the first: a mismatch says of which."""
    if row.verdict != "mismatch" or not step:
        return row
    return replace(row, reason=f"in step {step}: {row.reason}" if row.reason else f"in step {step}")


def _logits(cap: Capture, unheld: str) -> Row:
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
    """
    if cap.lm is None:
        return Row("logits", None, None, reason="the capture has no model with it")
    if cap.part:
        return Row("logits", None, None, reason=f"this is the {cap.part} alone: verify the whole")
    reason = str(cap.unseen[0]) if cap.unseen else unheld or _left_out(cap)
    if reason:
        return Row("logits", None, None, reason=reason)
    generator = torch.Generator().manual_seed(0)
    outputs = (
        cap.output,
        _output_with(cap, _formula),
        _output_with(cap, lambda call: _moved(call, generator)),
    )
    rows = cap.output_padding
    found = _spread(*(output[rows] for output in outputs))
    count = int(rows.sum()) * cap.output.shape[-1]
    bound = found.spread * math.sqrt(2 * math.log(2 * count / FALSE_ALARM))  # (V,)
    usual = bound.median().item()
    if not usual < UNRELATED * found.scale:
        reason = (
            f"rounding alone may move this model's output in {_name(cap.output.dtype)} by "
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


def _spread(given: Tensor, own: Tensor, moved: Tensor) -> _Spread:
    """How three outputs, (tokens, V) each, differ; in float64, a block of tokens at a time."""
    error = torch.zeros(given.shape[-1], dtype=torch.float64, device=given.device)
    by_entry, by_token = torch.zeros_like(error), torch.zeros_like(error[0])
    scale = torch.full_like(by_token, math.inf)
    for some in zip(
        *(torch.split(one, TOKENS_AT_ONCE) for one in (given, own, moved)), strict=True
    ):
        g, o, m = (one.double() for one in some)
        square = (m - o).square()
        by_entry += square.sum(0)
        by_token = torch.maximum(by_token, square.mean(-1).max())
        error = torch.maximum(error, (g - o).abs().amax(0))
        scale = torch.minimum(scale, o.std(-1).min())
    spread = torch.maximum(by_entry / len(given), by_token).sqrt()
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


def _left_out(cap: Capture) -> str:
    """Which layers were not kept; empty where all were."""
    names = [f"{one.part} {one.layer}".strip() for one in cap.left_out]
    return f"not kept, so not checked: layer {', '.join(names)}" if names else ""


def _layers_of(lm: LanguageModel | None) -> int | None:
    """How many layers the config speaks of, attention in them or not."""
    layers = getattr(getattr(lm and lm.model, "config", None), "num_hidden_layers", None)
    return layers if isinstance(layers, int) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

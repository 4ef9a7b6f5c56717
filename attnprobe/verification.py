"""`verify`: every check of every attention call, and of the whole model's logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from attnprobe.capturing import Texts, forward
from attnprobe.checking.basis import basis_of
from attnprobe.checking.caches import cache_rows
from attnprobe.checking.checks import BY_CALL, rows_left_out
from attnprobe.checking.logits import LESS, logits_row
from attnprobe.checking.report import Row, VerificationReport
from attnprobe.errors import InputError
from attnprobe.models import as_language_model
from attnprobe.records import (
    WRITTEN,
    AttentionCall,
    Calls,
    Capture,
    LanguageModel,
    UnseenAttention,
    dtype_name,
)

CHECKS = ("projection", "cache", "mask", "weights", "output", "merge", "logits")

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
    `attnprobe.formula`), but that of `logits` is probabilistic: see `attnprobe.checking.logits`.

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
        InputError: a name in `checks` that is none of the above; more memory than
            `attnprobe.memory` allows; neither a capture, calls, nor a
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
        found.take_cache(calls)
        reason = "a probe's calls hold no logits: capture one forward"
        return found.report(_calls(what).unseen, lambda: Row("logits", None, None, reason=reason))
    lm = as_language_model(what)
    if text is None:
        raise InputError("expected a text for the model to run on: verify(lm, text)")
    found.expected = lm.layers
    outputs, instead = (3, LESS) if "logits" in found.checks else (1, "")
    cap = forward(lm, text, target, padding_side, found.take, outputs=outputs, instead=instead)
    return _of_capture(found, cap)


def _is_model(what: object) -> bool:
    """Whether this may be what `capture` takes for a model."""
    pair = isinstance(what, tuple) and any(isinstance(one, nn.Module) for one in what)
    return pair or isinstance(what, LanguageModel | nn.Module)


def _chosen(checks: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(checks, str) or not isinstance(checks, Sequence | None):
        raise InputError(f"expected a list of checks, got {checks!r}")
    chosen = CHECKS if checks is None else tuple(checks)
    if not chosen:
        raise InputError(f"no check was given; the checks are {', '.join(CHECKS)}")
    unknown = [name for name in chosen if name not in CHECKS]
    if unknown:
        raise InputError(f"unknown check {unknown}; the checks are {', '.join(CHECKS)}")
    return chosen


def _of_capture(found: _Found, cap: Capture) -> VerificationReport:
    """The report of a whole forward, whose calls `found` has taken."""
    found.take_cache(())  # one forward goes on from none
    found.leave_out(cap)
    reason = str(cap.unseen[0]) if cap.unseen else found.unheld or _left_out(cap)
    report = found.report(cap.unseen, functools.partial(logits_row, cap, reason))
    return replace(
        report,
        model=cap.model_name,
        texts=len(cap),
        tokens=int(cap.padding.sum()),
        model_layers=cap.model_layers if cap.target is None else None,
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
        self.kernels[call.kernel] = self.dtypes[dtype_name(call.dtype)] = None
        self.steps.add(call.step)
        if self.first is None:
            self.first, self.texts = (call.layer, call.part), len(call.query)
        if self.first == (call.layer, call.part):
            self.tokens += _tokens(call)
        self.left_out += rows_left_out(call)
        if "logits" in self.checks:
            self.unheld = self.unheld or basis_of(call).unheld
        self._show(f"layer {call.layer}")

    def take_cache(self, calls: Sequence[AttentionCall]) -> None:
        """Make the check `cache`; where no forward goes on from one, it is left out unless it was
        asked for by name."""
        if "cache" in self.checks:
            rows = cache_rows(calls)
            if not rows and self.checks is not CHECKS:
                rows = [Row("cache", None, None, reason="no forward here goes on from a cache")]
            self.rows += rows

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


def _left_out(cap: Capture) -> str:
    """Which layers were not kept; empty where all were."""
    names = [f"{one.part} {one.layer}".strip() for one in cap.left_out]
    return f"not kept, so not checked: layer {', '.join(names)}" if names else ""

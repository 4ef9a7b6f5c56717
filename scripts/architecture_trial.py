"""One small model of one type under one kernel: captured, verified, and what came of it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from small_configs import FIRST_WORD, LAST_WORD, small_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import attnprobe as ap
from attnprobe.checking.report import Row
from attnprobe.masks import MASKED_BELOW
from attnprobe.records import AttentionCall

TASKS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
"""The class of each model type, by task: the tables of transformers' auto classes."""

CHECKS = ("projection", "mask", "weights", "output", "merge", "logits")

NO_KERNEL = re.compile("does not support an attention implementation|does not support .*attention")

OTHER_INPUT = re.compile(
    "takes no token ids|specify exactly one of input_features|shared_kv_states cannot be None"
)
"""What models without text for their input say."""

NOT_TEXT = {"musicgen": "a row of codes for each codebook", "musicgen_melody": "as musicgen"}
"""Types that take token ids which are no text, and fail on those of one."""


@dataclass
class Trial:
    """What came of one model under one kernel.

    Attributes:
        state: verified, mismatch, not_checked, unsupported, no_kernel or crash.
        reason: why, unless it is verified.
        checks: for each check its verdicts, reasons and worst ratio.
        terms: what the model's attention holds beyond the plain formula.
        entropy: of the weights, as a share of its maximum; None if the kernel gives none.
        quiet: attention modules with a softmax of their own that ran beside what was seen.
        calls: what is known of each attention call.
    """

    state: str
    reason: str = ""
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    terms: list[str] = field(default_factory=list)
    entropy: float | None = None
    quiet: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


def texts() -> list[list[int]]:
    """Token ids of two texts, of 11 and 7 words."""
    words = LAST_WORD - FIRST_WORD + 1
    return [[FIRST_WORD + (17 * at + 5 * long) % words for at in range(long)] for long in (11, 7)]


def targets() -> list[list[int]]:
    """Token ids of what decoders are given with the two texts, of 8 and 9 words."""
    return [
        row[::-1][:long] + row[: max(0, long - len(row))]
        for row, long in zip(texts(), (8, 9), strict=True)
    ]


def trial(task: str, kind: str, kernel: str) -> Trial:
    """Make, capture and verify a small model of a type; whatever it raises is told, not raised."""
    try:
        model_class = getattr(transformers, TASKS[task][kind])
        model = small_model(kind, model_class, kernel, decoder=task == "causal")
    except ImportError as error:
        return Trial("unsupported", f"needs a package: {told(error)}")
    except Exception as error:  # noqa: BLE001  # any model's error is a row of the table
        state = "no_kernel" if NO_KERNEL.search(str(error)) else "crash"
        return Trial(state, told(error))
    if kind in NOT_TEXT:
        found = Trial("unsupported", f"needs an input other than text: {NOT_TEXT[kind]}")
    else:
        found = captured(model)
        if "put it in place as it ran" in found.reason:
            found = captured(model)
    return found


def captured(model: nn.Module) -> Trial:
    """What `ap.capture` and `ap.verify` say of a model."""
    try:
        with attention_run(model) as ran:
            pair = getattr(model.config, "is_encoder_decoder", False)
            cap = ap.capture(model, texts(), target=targets() if pair else None)
        report = ap.verify(cap)
    except Exception as error:  # noqa: BLE001  # as above
        return refused(model, error)
    if cap.unseen and report.verdict == "not_checked":
        return Trial("unsupported", f"attention that cannot be followed: {cap.unseen[0]}")
    if "keys that are later or padding" in report.summary:
        return Trial("unsupported", "its mask opens what causality or padding closes")
    checks = by_check(report.rows)
    unchecked = "; ".join(checks["output"]["reasons"])
    reasons = {"verified": "", "mismatch": report.summary, "not_checked": unchecked}
    return Trial(
        report.verdict,
        reasons[report.verdict],
        checks=checks,
        terms=terms(cap.calls, model),
        entropy=entropy(cap.calls),
        quiet=quiet(ran, cap.calls),
        calls=[described(call) for call in cap.calls],
    )


def refused(model: nn.Module, error: Exception) -> Trial:
    """A trial that ended with an error: unsupported for a reason with a name, or a crash."""
    text = str(error)
    if "computed no softmax attention" in text:
        _, unseen, reason = text.partition("computed its attention unseen: ")
        if unseen:
            return Trial("unsupported", f"attention that cannot be followed: {reason}")
        own = sorted(own_softmax(model))
        if own:
            return Trial("unsupported", f"attention unseen: {', '.join(own)}")
        return Trial("unsupported", "no softmax attention")
    if "gives neither logits" in text:
        return Trial("unsupported", "no output for each token")
    if OTHER_INPUT.search(text):
        return Trial("unsupported", f"needs an input other than text: {told(error)}")
    return Trial("crash", told(error))


def told(error: Exception) -> str:
    """An error in one line, with the place that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]} ({place})"


def by_check(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """For each check: how many rows of each verdict, the reasons given, the worst ratio."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = found.setdefault(row.check, {"verdicts": {}, "reasons": {}, "ratio": 0.0})
        for key, value in (("verdicts", row.verdict), ("reasons", row.reason)):
            if value:
                one[key][value] = one[key].get(value, 0) + 1
        if row.verdict != "not_checked":
            one["ratio"] = max(one["ratio"], row.ratio)
    return found


def terms(calls: Sequence[AttentionCall], model: nn.Module) -> list[str]:
    """What a model's attention holds beyond one head, one key, one causal mask."""
    found: set[str] = set()
    for call in calls:
        key_heads = call.key.shape[1]
        if key_heads < call.heads:
            found.add("MQA" if key_heads == 1 else "GQA")
        if call.value.shape[-1] != call.query.shape[-1]:
            found.add("value size ≠ key size")
        if call.kind == "cross":
            found.add("cross attention")
        if call.expected_mask is not None and call.expected_mask.window:
            found.add("window")
        if call.mask is not None and call.mask.dtype != torch.bool:
            bias = (call.mask > MASKED_BELOW) & (call.mask != 0)
            found |= {"bias in the mask"} if bool(bias.any()) else set()
        found |= own_terms(call)
        found |= {"chunked"} if getattr(call.expected_mask, "chunk", None) else set()
    names = Counter(call.name for call in calls)
    if max(names.values(), default=1) > 1:
        found.add("a module runs several times")
    blocks = Counter((re.split(r"(?<=\.\d)\.", name)[0]) for name in names)
    if len(names) > 1 and max(blocks.values()) > 1:
        found.add("several attentions in a block")
    return sorted(found)


def own_terms(call: AttentionCall) -> set[str]:
    """The names of what a call passed beyond the plain formula."""
    return {name for name, value in vars(call.terms).items() if value is not None}


def entropy(calls: Sequence[AttentionCall]) -> float | None:
    """The mean entropy of the model's own weights as a share of the most it may be."""
    shares: list[Tensor] = []
    for call in calls:
        if call.weights_model is not None and call.expected_mask is not None:
            weights = call.weights_model.double()
            allowed = call.expected_mask.allowed(keys=weights.shape[-1]).sum(-1)
            most = allowed.expand(weights.shape[:3]).double().log()
            own = -torch.special.xlogy(weights, weights).sum(-1)
            shares.append((own / most)[most > 0])
    return round(torch.cat(shares).mean().item(), 2) if shares else None


def described(call: AttentionCall) -> dict[str, Any]:
    """What is known of a call, in plain values."""
    rule = call.expected_mask
    return {
        "name": call.name,
        "module": type(call.module).__name__,
        "kind": call.kind,
        "query": list(call.query.shape),
        "key": list(call.key.shape),
        "value": list(call.value.shape),
        "scaling": call.scaling,
        "expected_scaling": call.expected_scaling,
        "mask": None if call.mask is None else [str(call.mask.dtype), *call.mask.shape],
        "is_causal": call.is_causal,
        "rule": None if rule is None else {"causal": rule.causal, "window": rule.window},
        "terms": sorted(own_terms(call)),
    }


@contextlib.contextmanager
def attention_run(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Gather the modules that have a softmax of their own, are no router, and ran."""
    ran: dict[str, nn.Module] = {}
    names = {one: name for name, one in model.named_modules() if has_softmax(type(one))}

    def note(module: nn.Module, _: Any) -> None:
        ran[names[module]] = module

    hooks = [module.register_forward_pre_hook(note) for module in names]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


def quiet(ran: dict[str, nn.Module], calls: Sequence[AttentionCall]) -> list[str]:
    """The classes of those that ran and neither asked for a kernel nor hold one that did."""
    seen = [f"{call.name}." for call in calls]
    return sorted(
        {
            type(module).__name__
            for name, module in ran.items()
            if not any(one.startswith(f"{name}.") or name.startswith(one) for one in seen)
        }
    )


def own_softmax(model: nn.Module) -> set[str]:
    """The classes of a model's modules that compute a softmax by themselves and are no router."""
    return {type(module).__name__ for module in model.modules() if has_softmax(type(module))}


@functools.cache
def has_softmax(cls: type[nn.Module]) -> bool:
    """Whether a class of transformers' own computes a softmax, other than over experts."""
    if issubclass(cls, PreTrainedModel) or re.search(
        "Router|Routing|Gate$|Mo[eE]|FFN", cls.__name__
    ):
        return False
    own = [one for one in cls.__mro__ if one.__module__.startswith("transformers.models")]
    methods = [value for one in own for value in vars(one).values() if inspect.isfunction(value)]
    names = {name for method in methods for name in inspect.unwrap(method).__code__.co_names}
    return not names.isdisjoint({"softmax", "Softmax", "logsumexp"})

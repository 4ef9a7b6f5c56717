"""Attention that is wrong on purpose.

A mutant is a right kernel with one thing wrong, or a model that asks a right kernel for something
wrong. `planting` puts it into a model, `mutants` runs each on every kind it applies to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from mutant_models import Kind, Rule
from torch import Tensor, nn

LOWER = {
    torch.float32: torch.float16,
    torch.float16: torch.bfloat16,
    torch.bfloat16: torch.float8_e4m3fn,
}

Output = tuple[Tensor, Tensor | None]
Kernel = Callable[["Asked"], Output]


@dataclass(frozen=True, eq=False)
class Asked:
    """What a kernel is asked, (B, H or Hkv, T or S, D) each, and what is known of the one call."""

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    rest: dict[str, Any]
    kind: Kind
    layer: int
    seed: int
    eager: bool
    memory: dict[Any, Any]  # of one forward

    @property
    def rule(self) -> Rule:
        """Which keys the queries may see."""
        return self.kind.rule(self.layer, self.query.shape[2], self.key.shape[2], self.seed)

    @property
    def cross(self) -> bool:
        """Whether the keys are another text's."""
        return self.query.shape[2] != self.key.shape[2]

    def scaled(self, scaling: float) -> Asked:
        """The same with another factor on q·k."""
        return replace(self, rest=self.rest | {"scaling": scaling})

    def without(self, name: str) -> Asked:
        """The same without an argument that adds a term."""
        return replace(self, rest={key: one for key, one in self.rest.items() if key != name})

    def seeing(self, rule: Rule) -> Asked:
        """The same with another mask."""
        mask = additive(rule.allowed(self.query.shape[2]), self.query.dtype)
        return replace(self, mask=mask, rest=self.rest | {"is_causal": False})


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query may attend, the lowest number elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


def by_hand(asked: Asked, weigh: Callable[[Tensor], Tensor] = lambda s: s.softmax(-1)) -> Output:
    """Attention with a way from scores to weights; in float32 as fused kernels have it, or rounded
    at each step as eager's."""
    wide = asked.query.dtype if asked.eager else torch.float32
    groups = asked.query.shape[1] // asked.key.shape[1]
    key, value = (one.repeat_interleave(groups, 1).to(wide) for one in (asked.key, asked.value))
    scores = asked.query.to(wide) @ key.transpose(-1, -2) * asked.rest["scaling"]
    softcap, bias, sinks = (asked.rest.get(one) for one in ("softcap", "position_bias", "s_aux"))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.to(wide)
    mask = asked.mask
    if mask is None and not asked.eager:
        mask = asked.rule.allowed(scores.shape[-2])  # None says: causal, or all
    if mask is not None:
        mask = additive(mask, wide) if mask.dtype == torch.bool else mask.to(wide)
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.to(wide).view(1, -1, 1, 1).expand_as(scores[..., :1])], -1
        )
    weights = weigh(scores)[..., : key.shape[2]]
    output = (weights @ value).to(asked.value.dtype).transpose(1, 2)
    return output, weights if asked.eager else None


# Mutants


def unchanged(kernel: Kernel, asked: Asked) -> Output:
    """No mutant: the kernel as it is."""
    return kernel(asked)


def no_scaling(kernel: Kernel, asked: Asked) -> Output:
    """softmax(QKᵀ + M)V."""
    return kernel(asked.scaled(1.0))


def scaled_by_head(kernel: Kernel, asked: Asked) -> Output:
    """1/√d_k, in a model whose scale is another (query_pre_attn_scalar, YaRN's, none)."""
    return kernel(asked.scaled(asked.query.shape[3] ** -0.5))


def scaled_by_embedding(kernel: Kernel, asked: Asked) -> Output:
    """Divided by the root of the embedding's size instead of one head's."""
    return kernel(asked.scaled((asked.query.shape[1] * asked.query.shape[3]) ** -0.5))


def no_mask(kernel: Kernel, asked: Asked) -> Output:
    """Every word sees every other, and the padding."""
    everything = torch.ones_like(asked.rule.padding)
    return kernel(asked.seeing(Rule(everything, causal=False)))


def padding_ignored(kernel: Kernel, asked: Asked) -> Output:
    """The mask without padding."""
    return kernel(asked.seeing(replace(asked.rule, padding=torch.ones_like(asked.rule.padding))))


def mask_one_later(kernel: Kernel, asked: Asked) -> Output:
    """The diagonal one key further: each word sees the next one."""
    return kernel(asked.seeing(replace(asked.rule, diagonal=1)))


def mask_one_earlier(kernel: Kernel, asked: Asked) -> Output:
    """The diagonal one key back: no word but the first sees itself."""
    return kernel(asked.seeing(replace(asked.rule, diagonal=-1)))


def _window(change: Callable[[Rule], Rule]) -> Callable[[Kernel, Asked], Output]:
    def mutant(kernel: Kernel, asked: Asked) -> Output:
        has = asked.rule.window is not None
        return kernel(asked.seeing(change(asked.rule)) if has else asked)

    return mutant


window_one_wider = _window(lambda rule: replace(rule, window=(rule.window or 0) + 1))
window_one_narrower = _window(lambda rule: replace(rule, window=(rule.window or 0) - 1))
window_ignored = _window(lambda rule: replace(rule, window=None, ahead=None))


def window_everywhere(kernel: Kernel, asked: Asked) -> Output:
    """The window of some layers, in all."""
    limits = {"window": asked.kind.window, "ahead": asked.kind.ahead}
    return kernel(asked.seeing(replace(asked.rule, **limits)))


def bias_dropped(kernel: Kernel, asked: Asked) -> Output:
    """Scores without what is added for the distance."""
    return kernel(asked.without("position_bias"))


def chunk_ignored(kernel: Kernel, asked: Asked) -> Output:
    """Words see past the beginning of their chunk."""
    return kernel(asked.seeing(replace(asked.rule, chunk=None)))


def softcap_dropped(kernel: Kernel, asked: Asked) -> Output:
    """Scores as they are, not c·tanh(s/c)."""
    return kernel(asked.without("softcap"))


def sink_dropped(kernel: Kernel, asked: Asked) -> Output:
    """Weights that sum to 1 without the sink."""
    return by_hand(asked.without("s_aux"))


def softmax_over_queries(kernel: Kernel, asked: Asked) -> Output:
    """Columns sum to 1 instead of rows."""
    return by_hand(asked, lambda scores: scores.softmax(-2))


def heads_swapped(kernel: Kernel, asked: Asked) -> Output:
    """The first two heads stand in each other's place."""
    output, weights = kernel(asked)
    order = [1, 0, *range(2, output.shape[2])]
    return output[:, :, order], None if weights is None else weights[:, order]


def key_heads_tiled(kernel: Kernel, asked: Asked) -> Output:
    """Key and value heads 0 1 2 0 1 2, where each must be repeated, 0 0 1 1 2 2."""
    order = torch.arange(asked.query.shape[1]) % asked.key.shape[1]
    return by_hand(replace(asked, key=asked.key[:, order], value=asked.value[:, order]))


def values_of_another_layer(kernel: Kernel, asked: Asked) -> Output:
    """Values of the layer before, from the second layer on."""
    seen = asked.memory.setdefault((*asked.value.shape, asked.cross), [])
    before = (value for layer, value in reversed(seen) if layer != asked.layer)
    seen.append((asked.layer, asked.value))
    return kernel(replace(asked, value=next(before, asked.value)))


def text_of_another(kernel: Kernel, asked: Asked) -> Output:
    """Cross attention to the other text of the batch."""
    if asked.cross:
        asked = replace(asked, key=asked.key.flip(0), value=asked.value.flip(0))
    return kernel(asked)


def weights_rounded(kernel: Kernel, asked: Asked) -> Output:
    """Weights kept in the next lower dtype: float32 → float16 → bfloat16 → float8."""
    lower = LOWER[asked.value.dtype]
    return by_hand(asked, lambda scores: scores.softmax(-1).to(lower).to(scores.dtype))


Change = Callable[[Kernel, Asked], Output]


@contextmanager
def before_rotary(kind: Kind, model: nn.Module) -> Iterator[None]:
    """Query and key as they are before their positions turn them."""
    with mock.patch.object(file_of(model), kind.rotary, lambda query, key, *_, **__: (query, key)):
        yield


@contextmanager
def key_norm_dropped(kind: Kind, model: nn.Module) -> Iterator[None]:
    """Keys as they are before their norm."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name.endswith("k_norm"):
                stack.enter_context(mock.patch.object(module, "forward", lambda x: x))
        yield


@dataclass(frozen=True)
class Mutant:
    """Something wrong, and where.

    Attributes:
        change: what a kernel does otherwise; of `before`, what a model does.
        place: "kernel" where a kernel computes otherwise than it was asked to; "model" where the
            model asks a right kernel for the wrong thing; "before" where query or key are made
            wrongly.
    """

    change: Any
    place: str

    @property
    def name(self) -> str:
        """What it does, in words."""
        return str(NAMES[self.change])


def _always(_: Kind) -> bool:
    return True


_CHANGES: tuple[tuple[str, Any, str, Callable[[Kind], bool]], ...] = (
    ("no scaling", no_scaling, "kernel model", lambda kind: kind.scale != "none"),
    ("1/√d_k", scaled_by_head, "kernel model", lambda kind: kind.scale != "head"),
    ("1/√(embedding size)", scaled_by_embedding, "kernel model", _always),
    ("no mask", no_mask, "kernel model", _always),
    ("padding ignored", padding_ignored, "kernel model", lambda kind: kind.causal),
    ("mask one later", mask_one_later, "kernel model", lambda kind: kind.causal),
    ("mask one earlier", mask_one_earlier, "kernel model", lambda kind: kind.causal),
    ("window one wider", window_one_wider, "kernel model", lambda kind: bool(kind.window)),
    ("window one narrower", window_one_narrower, "kernel model", lambda kind: bool(kind.window)),
    ("window ignored", window_ignored, "kernel model", lambda kind: bool(kind.window)),
    (
        *("window in every layer", window_everywhere, "kernel model"),
        lambda kind: bool(kind.window) and len(kind.windowed) == 1,
    ),
    ("chunks ignored", chunk_ignored, "kernel model", lambda kind: bool(kind.chunk)),
    ("softcap dropped", softcap_dropped, "kernel model", lambda kind: kind.softcap),
    ("sink dropped", sink_dropped, "kernel", lambda kind: kind.sinks),
    ("bias dropped", bias_dropped, "kernel model", lambda kind: kind.bias),
    ("softmax over queries", softmax_over_queries, "kernel", _always),
    ("two heads swapped", heads_swapped, "kernel", _always),
    ("key heads tiled", key_heads_tiled, "kernel", lambda kind: kind.grouped),
    ("values of another layer", values_of_another_layer, "kernel", _always),
    ("cross attention to another text", text_of_another, "kernel", lambda kind: kind.pair),
    ("weights rounded lower", weights_rounded, "kernel", _always),
    ("query and key before rotary", before_rotary, "before", lambda kind: bool(kind.rotary)),
    ("key's norm dropped", key_norm_dropped, "before", lambda kind: kind.norm),
)
"""A name, the mutant, its places, and the kinds that it applies to."""

NAMES = {change: name for name, change, _, _ in _CHANGES} | {unchanged: "no change"}

PLACED = [(change, place) for _, change, places, _ in _CHANGES for place in places.split()]
"""Each mutant at each of its places."""

UNCHANGED = Mutant(unchanged, "kernel")
"""The model as it is."""


def mutants_of(kind: Kind) -> list[Mutant]:
    """All that apply to a kind. What a model of own code asks of itself is not told apart from
    what it computes."""
    return [
        Mutant(change, place)
        for _, change, places, applies in _CHANGES
        for place in places.split()
        if applies(kind) and not (kind.own and place == "model")
    ]


def file_of(model: nn.Module) -> Any:
    """The modeling file of a model."""
    return sys.modules[type(model).__module__]

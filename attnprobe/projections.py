"""X → query, key, value, and heads → W_O, from the layer's own weights, family by family.

A family is known by its attention class. What is not known is said to be so, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnprobe.records import AttentionCall
from attnprobe.rounding import linear

Projected = tuple[Tensor, Tensor]
"""What a projection should give, and the bound on its rounding: both float64."""


def projected(call: AttentionCall) -> dict[str, Projected] | str:
    """X·W + b for query, key and value, each (B, H or Hkv, T, D); or why that is not known.

    Key and value are those of this forward's own T tokens, not what a cache adds before them.
    """
    family = _family(call)
    if isinstance(family, str):
        return family
    if call.hidden_states is None:
        return "the attention module's input was not seen"
    return family.projected(call)


def merged(call: AttentionCall) -> Projected | str:
    """heads · W_O + b, (B, T, E), from the model's own head output; or why that is not known."""
    family = _family(call)
    if isinstance(family, str):
        return family
    if call.head_output_model is None or call.attention_output is None:
        return "the attention module's output was not seen"
    return family.merged(call)


def _family(call: AttentionCall) -> Family | str:
    """What is known of a call's own weights; or why nothing is."""
    name = type(call.module).__name__
    family = FAMILIES.get(name)
    if family is None:
        return f"the projections of {name} are not known"
    if call.kind == "cross":
        return "the projections of cross-attention are not known"
    for part, kind in family.parts.items():
        found = type(getattr(call.module, part)).__name__
        if found != kind:  # an adapter or a quantised layer: its product is not x·W + b
            return f"{call.name}.{part} is a {found}, not a {kind}: what it computes is not known"
    return family


def source(call: AttentionCall, name: str, head: int) -> str:
    """In words, where one head's query, key or value comes from: the weight and its columns."""
    tensor: Tensor = getattr(call, name)
    family = _family(call)
    if isinstance(family, str):
        return f"what the kernel got from {call.name}"
    own = head // (call.heads // tensor.shape[1])
    return family.source(call, name, own)


def value_norms(call: AttentionCall, heads: list[int], value: Tensor) -> Tensor | str:
    """‖v·W_O‖ in float64, the length of what each value brings to the output, (h, S).

    Args:
        call: the attention call.
        heads: which heads.
        value: those heads' values, (h, S, Dv).

    Returns:
        The lengths; or, as text, why W_O is not known.
    """
    family = _family(call)
    if isinstance(family, str):
        return family
    weight = family.output_weight(call)[heads].double()  # (h, Dv, E)
    norms: Tensor = (value.double() @ weight).norm(dim=-1)  # (h, S)
    return norms


def _gpt2_projected(call: AttentionCall) -> dict[str, Projected]:
    """One matrix of shape (E, 3E) holds W_Q, W_K and W_V side by side, each with H·D columns."""
    assert call.hidden_states is not None
    module: Any = call.module
    weights = module.c_attn.weight.detach().chunk(3, dim=1)  # 3 × (E, E)
    biases = module.c_attn.bias.detach().chunk(3)
    result = {}
    for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        y, bound = linear(call.hidden_states, weight, bias, call.rounding)  # (B, T, E)
        result[name] = (_split_heads(y, call.heads), _split_heads(bound, call.heads))
    return result


def _gpt2_merged(call: AttentionCall) -> Projected:
    assert call.head_output_model is not None
    heads = call.head_output_model.flatten(-2)  # (B, T, E): heads side by side
    module: Any = call.module
    weight, bias = module.c_proj.weight.detach(), module.c_proj.bias.detach()
    return linear(heads, weight, bias, call.rounding)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H·D) -> (B, H, T, D)."""
    batch, tokens, _ = x.shape
    return x.view(batch, tokens, heads, -1).transpose(1, 2)


def _gpt2_source(call: AttentionCall, name: str, head: int) -> str:
    size = call.query.shape[-1]
    first = ("query", "key", "value").index(name) * call.heads * size + head * size
    return f"X·W + b; head {head}: {call.name}.c_attn.weight[:, {first}:{first + size}]"


def _gpt2_output_weight(call: AttentionCall) -> Tensor:
    module: Any = call.module
    weight: Tensor = module.c_proj.weight.detach()  # (H·Dv, E)
    return weight.view(call.heads, -1, weight.shape[-1])  # (H, Dv, E)


@dataclass(frozen=True)
class Family:
    """What is known of one attention class's own weights."""

    parts: dict[str, str]  # its linear layers, and the class each must be of
    projected: Callable[[AttentionCall], dict[str, Projected]]
    merged: Callable[[AttentionCall], Projected]
    output_weight: Callable[[AttentionCall], Tensor]  # W_O head by head, (H, Dv, E)
    source: Callable[[AttentionCall, str, int], str]


FAMILIES = {
    "GPT2Attention": Family(
        parts={"c_attn": "Conv1D", "c_proj": "Conv1D"},
        projected=_gpt2_projected,
        merged=_gpt2_merged,
        output_weight=_gpt2_output_weight,
        source=_gpt2_source,
    )
}

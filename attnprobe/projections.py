"""X → query, key, value, and heads → W_O, from the layer's own weights, family by family.

Which layer gives what is known by the names of the layers (`attnprobe.architecture.layouts`); what
stands between them and the kernel, by the attention class (`FAMILIES`). Of others it is
supposed that it does what most do: what then agrees is verified, as no chance makes it agree;
what does not is not known, see `unsure`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnprobe.architecture import rotary
from attnprobe.architecture.facts import SCALED_BEFOREHAND
from attnprobe.architecture.layouts import Layout, layout_of
from attnprobe.records import AttentionCall
from attnprobe.rounding import Bounded, linear, rms_norm, scaled

PARTS = ("query", "key", "value")


@dataclass(frozen=True)
class Family:
    """What one attention class does to query and key between its linear layers and the kernel.

    Attributes:
        pairs: which two numbers its rotary positions turn together; None if it has none.
        norm: what `q_norm` and `k_norm` do to each head: the RMS norm times their weight (Llama's),
            or times 1 + weight (Gemma's); None if it has none.
        known: this project's own tests show that it is so; else it is supposed.
    """

    pairs: rotary.Pairs | None = None
    norm: Literal["weight", "1 + weight"] | None = None
    known: bool = True


_PLAIN = Family()
_ROTARY = Family(pairs="halves")

FAMILIES = {
    **dict.fromkeys(("GPT2Attention", "OPTAttention", "T5Attention", "BartAttention"), _PLAIN),
    **dict.fromkeys(("BertSelfAttention", "RobertaSelfAttention"), _PLAIN),
    **dict.fromkeys(("AlbertAttention", "DistilBertSelfAttention"), _PLAIN),
    **dict.fromkeys(("LlamaAttention", "MistralAttention", "MixtralAttention"), _ROTARY),
    **dict.fromkeys(("Qwen2Attention", "GemmaAttention", "Gemma2Attention"), _ROTARY),
    **dict.fromkeys(("PhiAttention", "Phi3Attention", "GPTNeoXAttention"), _ROTARY),
    "GptOssAttention": _ROTARY,
    "CohereAttention": Family(pairs="neighbours"),
    "Qwen3Attention": Family(pairs="halves", norm="weight"),
    "Gemma3Attention": Family(pairs="halves", norm="1 + weight"),
}


def projected(call: AttentionCall) -> dict[str, Bounded] | str:
    """What query, key and value should be, each (B, H or Hkv, T, D); or why that is not known.

    Where a model repeats its key heads before the kernel, they are the heads before that.

    X·W + b, its norm, its rotary positions and its scale, as far as the family has them. Key and
    value are those of this forward's own T tokens, not what a cache adds before them.
    """
    found = _found(call)
    if isinstance(found, str):
        return found
    layout, family = found
    x, query = call.hidden_states, call.query
    if x is None:
        return "the attention module's input was not seen"
    if x.shape[:-1] != (len(query), query.shape[2]):
        return f"the input has shape {tuple(x.shape)}, the query {tuple(query.shape)}"
    into = {weight_and_bias(getattr(call.module, part))[0].shape[0] for part in layout.inputs}
    if into != {x.shape[-1]}:
        return f"the input has {x.shape[-1]} numbers, the layers take {', '.join(map(str, into))}"
    frequencies = _frequencies(call) if family.pairs else None
    if isinstance(frequencies, str):
        return frequencies
    result = {}
    parts: dict[str, Bounded] = {}  # what each layer gives: one may give query, key and value
    for name in PARTS:
        place = _place(call, layout, name)
        if place.part not in parts:
            weight, bias = _weights_at(call, getattr(call.module, place.part))
            parts[place.part] = linear(x, weight, bias, call.layer_rounding)  # (B, T, F)
        given, bound = parts[place.part]
        made = place.by_head(given), place.by_head(bound)
        if family.norm and name != "value":
            weight, eps = _norm(call, family, name)
            made = rms_norm(made, weight, eps, call.layer_rounding)
        if family.pairs and frequencies and name != "value":
            assert call.position_ids is not None
            made = rotary.rotated(
                made, call.position_ids, frequencies, family.pairs, call.layer_rounding
            )
        if name == "query" and _scaled_beforehand(call):
            made = scaled(made, query.shape[-1] ** -0.5, call.layer_rounding)
        result[name] = made
    return result


def merged(call: AttentionCall) -> Bounded | str:
    """heads · W_O + b, (B, T, E), from the model's own head output; or why that is not known."""
    found = _found(call)
    if isinstance(found, str):
        return found
    if call.head_output_model is None or call.attention_output is None:
        return "the attention module's output was not seen"
    heads = call.head_output_model.flatten(-2)  # (B, T, H·Dv): heads side by side
    weight, bias = _weights_at(call, _output_layer(call, found[0]))
    shape = (*heads.shape[:-1], weight.shape[1])
    if call.attention_output.shape != shape:
        return f"the module's output has shape {tuple(call.attention_output.shape)}, W_O's {shape}"
    return linear(heads, weight, bias, call.layer_rounding)


def unsure(call: AttentionCall) -> str:
    """Why a disagreement is none of the model's own, as its class is not known; "" if it is."""
    found = _found(call)
    if isinstance(found, str) or found[1].known:
        return ""
    return (
        f"whether {type(call.module).__name__} does more than its linear layers, a norm and rotary "
        "positions is not known"
    )


def source(call: AttentionCall, name: str, head: int) -> str:
    """In words, where one head's query, key or value comes from: its rows or columns of a weight,
    and what is done to it before the kernel gets it."""
    found = _found(call)
    if isinstance(found, str) or not found[1].known:
        return f"what the kernel got from {call.name}"
    layout, family = found
    place = _place(call, layout, name)
    own = head // (call.heads // place.heads)
    layer = getattr(call.module, place.part)
    first = place.first + own * place.step
    span = f"{first}:{first + place.size}"
    product, span = ("X·W", f":, {span}") if isinstance(layer, Conv1D) else ("X·Wᵀ", span)
    words = [f"{product}{'' if layer.bias is None else ' + b'}"]
    words.append(f"head {own}: {call.name}.{place.part}.weight[{span}]")
    if family.norm and name != "value":
        words.append(f"then its RMS norm, {_norm_name(name)}")
    if family.pairs and name != "value":
        words.append("then turned by the token's position (rotary)")
    if name == "query" and _scaled_beforehand(call):
        words.append("then times 1/√d_k")
    return "; ".join(words)


def value_norms(call: AttentionCall, heads: list[int], value: Tensor) -> Tensor | str:
    """‖v·W_O‖ in float64, the length of what each value brings to the output, (h, S).

    Args:
        call: the attention call.
        heads: which heads.
        value: those heads' values, (h, S, Dv).

    Returns:
        The lengths; or, as text, why W_O is not known.
    """
    found = output_weights(call)
    if isinstance(found, str):
        return found
    by_head = found[0][heads].double()  # (h, Dv, E)
    norms: Tensor = (value.double() @ by_head).norm(dim=-1)  # (h, S)
    return norms


def output_weights(call: AttentionCall) -> tuple[Tensor, Tensor | None] | str:
    """W_O by head, (H, Dv, E), and b, (E,), or None, in the model's dtype: what an attention
    module puts out is the sum over its heads of head output · W_O, plus b.

    Returns:
        W_O and b; or, as text, why they are not known.
    """
    found = _found(call)
    if isinstance(found, str):
        return found
    layout, family = found
    if not family.known:
        return f"what {type(call.module).__name__} does between its heads and W_O is not known"
    weight, bias = _weights_at(call, _output_layer(call, layout))  # (H·Dv, E)
    return weight.reshape(call.heads, -1, weight.shape[-1]), bias


def _found(call: AttentionCall) -> tuple[Layout, Family] | str:
    """What is known or supposed of a call's own weights; or why nothing is."""
    if call.module is None:
        return "the capture has no model with it"
    kind = type(call.module).__name__
    layout = layout_of(call.module, call.parent)
    if layout is None:
        return f"the projections of {kind} are not known"
    if call.kind == "cross":
        return "the projections of cross-attention are not known"
    sizes: dict[str, int] = {}  # how many numbers each layer gives
    for name in PARTS:
        place = _place(call, layout, name)
        sizes[place.part] = max(sizes.get(place.part, 0), place.stop)
    for part, size in sizes.items():
        reason = unlike(f"{call.name}.{part}", getattr(call.module, part), out=size)
        if reason:
            return reason
    heads = call.heads * call.value.shape[-1]
    reason = unlike(f"{call.name}'s {layout.output}", _output_layer(call, layout), into=heads)
    family = FAMILIES.get(kind) or _supposed(call.module)
    return reason or _unknown_norm(call, family) or (layout, family)


def _supposed(module: nn.Module) -> Family:
    """What most models do whose config and layers look like this."""
    rotates = getattr(getattr(module, "config", None), "rope_parameters", None)
    has_norm = hasattr(module, "q_norm") and hasattr(module, "k_norm")
    return Family("halves" if rotates else None, "weight" if has_norm else None, known=False)


def unlike(name: str, layer: nn.Module, into: int | None = None, out: int | None = None) -> str:
    """Why a layer is not known to make `out` numbers of `into` by x·W + b; "" if it is.

    An adapter or a quantised layer may be called Linear as well, so its very class is compared.
    """
    kind = type(layer)
    if kind not in (nn.Linear, Conv1D):
        return f"{name} is a {kind.__module__}.{kind.__name__}: what it computes is not known"
    weight: Any = layer.weight
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or weight.is_meta:
        return f"the weight of {name} is packed, or not in memory"
    if not weight.is_floating_point():
        return f"the weight of {name} is packed as {weight.dtype}"
    found = tuple(weight_and_bias(layer)[0].shape)
    if found != (into or found[0], out or found[1]):
        return f"{name} makes {found[1]} numbers of {found[0]}, unlike the heads: {into or out}"
    return ""


def _unknown_norm(call: AttentionCall, family: Family) -> str:
    """Why what stands between the linear layers and the kernel is not known; "" if it is."""
    module: Any = call.module
    children = dict(module.named_children())
    norms = sorted(name for name in children if name[0] in "qk" and "norm" in name)
    if norms != (["k_norm", "q_norm"] if family.norm else []):
        return f"{call.name} has {', '.join(norms) or 'no norm'}: that is not known"
    size = (call.query.shape[-1],)
    for name in norms:
        weight: Any = getattr(children[name], "weight", None)
        if not isinstance(weight, Tensor) or weight.shape != size:
            return f"{call.name}.{name} has no weight of size {size[0]}: what it does is not known"
    eps = getattr(getattr(module, "config", None), "rms_norm_eps", None)
    if norms and eps is None:
        return f"the config tells no eps for {call.name}'s norms"
    return ""


@dataclass(frozen=True)
class _Place:
    """Where query, key or value comes from: the layer `part`, of whose outputs head h's are the
    `size` from `first` + h·`step` on."""

    part: str
    heads: int
    size: int
    first: int
    step: int

    @property
    def stop(self) -> int:
        """How many outputs there are up to the last of these."""
        return self.first + (self.heads - 1) * self.step + self.size

    def by_head(self, x: Tensor) -> Tensor:
        """(B, T, F) -> (B, heads, T, D): of a layer's outputs those of each head."""
        own = x[..., self.first : self.stop]
        return own.unfold(-1, self.size, self.step).transpose(1, 2)


def _place(call: AttentionCall, layout: Layout, name: str) -> _Place:
    sizes = [(_own_heads(call, layout, part), getattr(call, part).shape[3]) for part in PARTS]
    at = PARTS.index(name)
    heads, size = sizes[at]
    if len(layout.inputs) > 1:
        return _Place(layout.inputs[at], heads, size, 0, size)
    part = layout.inputs[0]
    if layout.by_head:
        step = sum(size for _, size in sizes)
        return _Place(part, heads, size, sum(size for _, size in sizes[:at]), step)
    return _Place(part, heads, size, sum(heads * size for heads, size in sizes[:at]), size)


def _own_heads(call: AttentionCall, layout: Layout, name: str) -> int:
    """How many heads of query, key or value the layers make: fewer than the kernel gets where a
    model repeats its key heads before."""
    seen, size = getattr(call, name).shape[1::2]
    if name == "query" or seen < call.heads or len(layout.inputs) == 1:
        return int(seen)
    layer = getattr(call.module, layout.inputs[PARTS.index(name)])
    if type(layer) is not nn.Linear:
        return int(seen)
    made = layer.out_features // size
    return int(made if made and seen % made == 0 else seen)


def weight_and_bias(layer: Any) -> tuple[Tensor, Tensor | None]:
    """A layer's W, (in, out), and b, (out,), or None; x·W + b is what it gives."""
    weight: Tensor = layer.weight.detach()
    bias = None if layer.bias is None else layer.bias.detach()
    return weight if isinstance(layer, Conv1D) else weight.T, bias


def _weights_at(call: AttentionCall, layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """W and b where the call's tensors are kept, which need not be the model's own device."""
    weight, bias = weight_and_bias(layer)
    device = call.query.device
    return weight.to(device), None if bias is None else bias.to(device)


def _output_layer(call: AttentionCall, layout: Layout) -> nn.Module:
    assert call.module is not None
    layer = layout.output_layer(call.module, call.parent)
    assert layer is not None
    return layer


def _norm_name(name: str) -> str:
    return f"{name[0]}_norm"


def _norm(call: AttentionCall, family: Family, name: str) -> tuple[Tensor, float]:
    """What a head's RMS norm multiplies by, (D,) float64, and its eps, from the config."""
    module: Any = call.module
    weight = getattr(module, _norm_name(name)).weight.detach().to(call.query.device).double()
    return weight + 1 if family.norm == "1 + weight" else weight, module.config.rms_norm_eps


def _frequencies(call: AttentionCall) -> rotary.Frequencies | str:
    """The layer's rotary frequencies, from the config; or why they are not known."""
    module: Any = call.module
    config = module.config
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and layer is not None and "rope_theta" not in parameters:
        parameters = parameters.get(kinds[layer]) or {}  # Gemma 3: some for each kind of layer
    if call.position_ids is None:
        return "the tokens have more than one position each"
    return rotary.frequencies(parameters, call.query.shape[-1], call.frequency_dtype)


def _scaled_beforehand(call: AttentionCall) -> bool:
    config = getattr(call.module, "config", None)
    return getattr(config, "model_type", None) in SCALED_BEFOREHAND

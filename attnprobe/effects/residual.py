"""The residual stream of one token: what the embedding and each MLP add to it, and its final norm.

Which modules it runs through is known by the class of the language model (`STREAMS`). In all of
them a block adds its attention's output and its MLP's to what it was given, one after the other or
both at once, and nothing else; a final norm and `lm_head` make logits of the sum. Models that do
more (a norm behind the attention or the MLP, a factor on the embedding, the residual or the logits,
a softcap on the logits) are not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.capturing import output_of
from attnprobe.errors import InputError, ModelError
from attnprobe.loading.amounts import need_forward
from attnprobe.projections import unlike, weight_and_bias
from attnprobe.records import Capture
from attnprobe.rounding import Arithmetic, Bounded, layer_norm, rms_norm


@dataclass(frozen=True)
class Stream:
    """The names of the modules that a family's residual stream runs through."""

    embedding: str
    blocks: str
    norm: str
    position: str = ""
    """The embedding of positions; empty where a model has none (rotary positions)."""


_LLAMA = Stream("model.embed_tokens", "model.layers", "model.norm")

STREAMS = {
    "GPT2LMHeadModel": Stream(
        "transformer.wte", "transformer.h", "transformer.ln_f", position="transformer.wpe"
    ),
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), _LLAMA),
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"), _LLAMA),
    "PhiForCausalLM": Stream("model.embed_tokens", "model.layers", "model.final_layernorm"),
    "GPTNeoXForCausalLM": Stream(
        "gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm"
    ),
}


def stream_of(cap: Capture) -> Stream:
    """The names of a captured model's modules.

    Raises:
        InputError: the capture has no model with it, or no attention call.
        ModelError: a model of a class that is not known (the message says which are).
    """
    if cap.lm is None:
        raise InputError("the capture has no model with it: its logits cannot be taken apart")
    if not cap.calls:
        raise InputError("the capture has no attention call: its logits cannot be taken apart")
    kind = type(cap.lm.model)
    stream = STREAMS.get(kind.__name__)
    if stream is None or not kind.__module__.startswith("transformers."):
        raise ModelError(
            f"how {kind.__name__} makes its logits of what its layers add is not known here: known "
            f"are {', '.join(STREAMS)}. Take a wrapper off first (peft's merge_and_unload)"
        )
    return stream


@dataclass(frozen=True, eq=False)
class FinalNorm:
    """A model's final norm: LayerNorm, or RMSNorm, which does not subtract the mean."""

    weight: Tensor  # (E,) float64
    bias: Tensor | None  # (E,) float64
    eps: float
    centred: bool

    @classmethod
    def of(cls, name: str, module: nn.Module) -> FinalNorm:
        """Read a norm's weights.

        Raises:
            ModelError: it is neither of the two, or its weights are not in memory.
        """
        read: Any = module
        centred = type(module) is nn.LayerNorm
        weight = getattr(module, "weight", None)
        if (
            not isinstance(weight, Tensor)
            or weight.is_meta
            or not (centred or hasattr(module, "variance_epsilon"))
        ):
            kind = type(module).__name__
            raise ModelError(
                f"the logits cannot be taken apart: {name} is a {kind}; expected is a LayerNorm or "
                "RMSNorm whose weights are in memory"
            )
        bias = getattr(module, "bias", None)
        return cls(
            _plain(weight),
            None if bias is None else _plain(bias),
            read.eps if centred else read.variance_epsilon,
            centred,
        )

    def applied(self, x: Tensor, rounding: Arithmetic) -> Bounded:
        """What the norm makes of x, (E,) float64, and the bound on the model's own error in it."""
        if self.centred:
            return layer_norm(x, self.weight, self.bias, self.eps, rounding)
        return rms_norm((x, torch.zeros_like(x)), self.weight, self.eps, rounding)

    def centre(self, x: Tensor) -> Tensor:
        """x without the mean that the norm subtracts, if it does, (..., E)."""
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def frozen(self, x: Tensor, reader: Tensor) -> Tensor:
        """What reads off the centred parts of x, (E,), what they bring to `reader`: the norm with
        its root kept as x makes it is linear.

        reader · norm(x) = centre(x) · this + reader · bias.
        """
        root = (self.centre(x).square().mean() + self.eps).sqrt()
        return self.weight * reader / root


@dataclass(frozen=True, eq=False)
class Residual:
    """The residual stream of one token in one forward, all float64, on the CPU."""

    embedding: Tensor  # (E,)
    position: Tensor | None  # (E,)
    states: Tensor  # (L + 1, E): what each block was given, and then the final norm
    mlps: Tensor  # (L, E): what each MLP gave
    normed: Tensor  # (E,): what the final norm gave
    norm: FinalNorm
    lm_head: tuple[Tensor, Tensor | None]  # W (E, V) and b (V,), in the model's dtype


def residual(cap: Capture, stream: Stream, text: int, place: int) -> Residual:
    """Run a captured model once more and keep the residual stream of one token.

    Args:
        cap: what `capture` returned.
        stream: what `stream_of` gave for it.
        text: which text of the batch.
        place: which token, counted in the padded batch.

    Raises:
        ModelError: a model whose final norm or `lm_head` is not a plain one, or that gives other
            logits than those captured.
    """
    assert cap.lm is not None
    model = cap.lm.model
    blocks = [f"{stream.blocks}.{layer}" for layer in range(cap.layers)]
    mlps = [f"{block}.mlp" for block in blocks]
    after = [stream.embedding, *([stream.position] if stream.position else []), *mlps, stream.norm]
    given: dict[str, Tensor] = {}
    gave: dict[str, Tensor] = {}

    def row(x: Tensor) -> Tensor:
        return _plain(x.expand(len(cap), -1, -1)[text, place])  # positions may be (1, T, E)

    def enter(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            given[name] = row(args[0] if args else kwargs["hidden_states"])

        return keep

    def leave(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            gave[name] = row(output)

        return keep

    with torch.no_grad(), ExitStack() as stack:
        for name in [*blocks, stream.norm]:
            module = model.get_submodule(name)
            hook = module.register_forward_pre_hook(enter(name), with_kwargs=True)
            stack.callback(hook.remove)
        for name in after:
            stack.callback(model.get_submodule(name).register_forward_hook(leave(name)).remove)
        need_forward(model, cap.inputs)
        output = output_of(model(**cap.inputs), model, cap.padding)
    captured = cap.output[text, place].to(output.device)
    if not torch.equal(output[text, place], captured):
        raise ModelError(
            "the model no longer gives the logits that were captured: its weights, its kernel or "
            "the number of threads have changed since, or it was captured inside an edit. Capture "
            "the text again, outside of any"
        )
    return Residual(
        embedding=gave[stream.embedding],
        position=gave.get(stream.position),
        states=torch.stack([given[name] for name in [*blocks, stream.norm]]),
        mlps=torch.stack([gave[name] for name in mlps]),
        normed=gave[stream.norm],
        norm=FinalNorm.of(stream.norm, model.get_submodule(stream.norm)),
        lm_head=_unembedding(model),
    )


def _unembedding(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    layer = model.get_submodule("lm_head")
    reason = unlike("lm_head", layer)
    if reason:
        raise ModelError(f"the logits cannot be taken apart: {reason}")
    return weight_and_bias(layer)


def _plain(x: Tensor) -> Tensor:
    return x.detach().double().cpu()

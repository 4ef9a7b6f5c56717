"""About how much memory a forward takes, and what is kept of it, by the model's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attnprobe.memory import need


@dataclass(frozen=True)
class Amounts:
    """In bytes; 0 for what a config does not tell.

    Attributes:
        output: the logits, or the last hidden state.
        running: what eager attention makes of one layer as it runs, and the mask.
        layer: what a capture keeps of one layer: query, key, value, input, outputs.
        weights: the weights of one layer, where its kernel gives them.
        layers: how many layers.
    """

    output: int
    running: int
    layer: int
    weights: int
    layers: int

    @classmethod
    def of(cls, model: nn.Module, texts: int, tokens: int) -> Amounts:
        """Those of a model that runs on so many texts of so many tokens."""
        config: Any = getattr(model, "config", None)
        inner = config.get_text_config() if hasattr(config, "get_text_config") else config
        weight = next((one for one in model.parameters() if one.is_floating_point()), None)
        size = 4 if weight is None else weight.element_size()
        heads, layers, width = (
            _number(inner, name)
            for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")
        )
        if getattr(config, "is_encoder_decoder", False):
            layers *= 3  # the encoder's, the decoder's and cross attention's
        of_head = getattr(model, "get_output_embeddings", lambda: None)()
        vocabulary = getattr(getattr(of_head, "weight", None), "shape", (width,))[0]
        eager = getattr(config, "_attn_implementation", None) == "eager"
        numbers = texts * heads * tokens**2 if eager else 0
        return cls(
            output=texts * tokens * vocabulary * size,
            running=3 * max(size, 4) * numbers + texts * tokens**2 * (size if eager else 1),
            layer=6 * texts * tokens * width * size,
            weights=numbers * size,
            layers=layers,
        )


def need_forward(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    keeps: int | None = 0,
    outputs: float = 1,
    instead: str = "",
) -> None:
    """Refuse a forward that would take too much, before it runs.

    Args:
        model: what runs.
        inputs: its input_ids, and decoder_input_ids.
        keeps: how many layers' calls are kept of it; None for all.
        outputs: how many times as much as its output is held, that included.
        instead: what asks for less, beside a shorter text.

    Raises:
        InputError: more than `attnprobe.memory` allows.
    """
    shapes = [inputs[name].shape for name in inputs if name.endswith("input_ids")]
    texts, tokens = shapes[0][0], max(shape[1] for shape in shapes)
    amounts = Amounts.of(model, texts, tokens)
    kept = amounts.layers if keeps is None else min(keeps, amounts.layers)
    weights = kept * amounts.weights
    parts = {
        "the output": outputs * amounts.output,
        "eager attention's scores": amounts.running,
        f"the weights of {kept} layers, which the eager kernel gives,": weights,
        f"query, key and value of {kept} layers": kept * amounts.layer,
    }
    most = max(parts, key=parts.__getitem__)
    fewer = ["a model loaded with attn='sdpa'"] if amounts.weights else []
    fewer += ["layers=[…]"] if kept > 1 else []
    fewer += [instead] if instead else []
    fewer += ["fewer texts at a time"] if texts > 1 else []
    need(
        sum(parts.values()),
        f"a forward over {texts} × {tokens:,} tokens, most of it {most}",
        " or ".join([*fewer, "a shorter text"]),
        inputs["input_ids"].device,
    )


def _number(config: Any, name: str) -> int:
    found = getattr(config, name, 0)
    return found if isinstance(found, int) else 0

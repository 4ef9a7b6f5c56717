"""What the config and the inputs say the formula should be: the scale, causality, the window.

These are the facts from which M and 1/√d_k are built anew. Where the config says nothing, the plain
formula holds. Nothing here looks at the mask or the scale that the model hands its kernel: those
are what is checked.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from attnprobe.masks import MaskRule

TERMS = ("softcap", "s_aux", "sinks", "position_bias", "cu_seq_lens_q")
"""Arguments with which a model adds a term that the formula here does not hold."""


def expected_scaling(config: Any, head_size: int, layer: int) -> float:
    """The factor on q·k: 1/√d_k, unless the config says otherwise."""
    scaling = head_size**-0.5
    if getattr(config, "query_pre_attn_scalar", None) is not None:
        scaling = config.query_pre_attn_scalar**-0.5
    if getattr(config, "attention_multiplier", None) is not None:
        scaling = config.attention_multiplier
    if getattr(config, "scale_attn_weights", True) is False:
        scaling = 1.0
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        scaling /= layer + 1
    return float(scaling)


def is_causal(config: Any, module: nn.Module) -> bool:
    """Whether the architecture is one in which no word sees a later one.

    A type that transformers lists for causal and not for masked language models is causal; one that
    it lists for both (BERT) is causal where it is a decoder. Elsewhere, as in the halves of an
    encoder-decoder, the module's own word is all there is.
    """
    if getattr(config, "is_causal", None) is False:
        return False
    if getattr(config, "use_bidirectional_attention", None):
        return False
    kind = getattr(config, "model_type", None)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not getattr(
        config, "is_encoder_decoder", False
    ):
        if kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            return True
        return bool(getattr(config, "is_decoder", False))
    return bool(getattr(module, "is_causal", False))


def window(config: Any, layer: int) -> int | None:
    """How many keys back, itself included, a word of this layer sees; None for all."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return config.sliding_window if kinds[layer] == "sliding_attention" else None
    if not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)


def mask_rule(
    module: nn.Module,
    config: Any,
    layer: int,
    kind: str,
    shape: tuple[int, int, int],
    padding: Tensor | None,
    past: int,
) -> MaskRule | None:
    """M's rule for one call, or None where the inputs do not say it (the caller gave a 4-D mask).

    Args:
        module: the attention module.
        config: its config, or the model's.
        layer: counted from 0.
        kind: "self" or "cross".
        shape: (B, T, S).
        padding: (B, S) of 0 and 1, what the caller gave as `attention_mask`; or None.
        past: how many tokens a cache held before this forward.
    """
    batch, queries, keys = shape
    if padding is not None:
        if padding.dim() != 2 or padding.shape[0] != batch or padding.shape[1] < keys:
            return None
        padding = padding[:, :keys].bool()
    if kind == "cross":
        return MaskRule(queries, keys, causal=False, padding=padding)
    # A cache that slides or was cropped holds fewer keys than tokens went by.
    offset = past if past + queries <= keys else keys - queries
    return MaskRule(
        queries,
        keys,
        causal=is_causal(config, module),
        window=window(config, layer),
        padding=padding,
        offset=offset,
    )

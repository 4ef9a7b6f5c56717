"""What the config and the inputs say the formula should be: the scale, causality, the window.

These are the facts from which M and 1/√d_k are built anew. Where the config says nothing, the plain
formula holds. Nothing here looks at the mask or the scale that the model hands its kernel: those
are what is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from attnprobe.masks import MaskRule

UNHELD = ("cu_seq_lens_q",)
"""Arguments with which a model adds a term that the formula here does not hold."""


SCALED_BEFOREHAND = frozenset(
    {
        *("opt", "whisper", "esm", "mvp", "trocr", "xglm", "xlm", "flaubert", "fsmt", "prophetnet"),
        *("deberta", "deberta-v2", "nystromformer", "led"),
    }
)
"""Types that multiply the query, the key or both by what makes 1/√d_k, and q·k by nothing."""

UNSCALED = frozenset(
    {
        *("t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "gpt_neo"),
        *("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
        *("gemma4_unified", "gemma4_unified_text"),
    }
)
"""Types that leave out 1/√d_k: T5's weights are initialized for it, Gemma's q and k have norms."""


class Config:
    """A config, of which each attribute is looked up once: transformers' own way to look one up
    takes so long that the facts of a layer would take as long as all else that is seen of it."""

    def __init__(self, config: Any) -> None:
        self.of = config
        self._missing: set[str] = set()

    def __getattr__(self, name: str) -> Any:  # of what is not among this object's own yet
        if name not in self._missing:
            try:
                vars(self)[name] = found = getattr(self.of, name)
                return found
            except AttributeError:
                self._missing.add(name)
        raise AttributeError(name)


def index_of(module: nn.Module, order: int) -> int:
    """Which layer of the model a module is: what it says itself, else its place in the order of
    calls. In a hybrid the two differ, and where layers run several times."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else order


def config_of(module: nn.Module, config: Any, index: int) -> Any:
    """The config that holds for one layer, where layers have configs of their own."""
    if getattr(config, "is_heterogeneous", False):
        return config.per_layer_config[index]
    return config


def expected_scaling(config: Any, head_size: int, index: int) -> float:
    """The factor on q·k: 1/√d_k, unless the config or its type says otherwise."""
    kind = getattr(config, "model_type", None)
    if kind in SCALED_BEFOREHAND or kind in UNSCALED:
        return 1.0
    if kind == "inkling_text":
        return 1 / head_size
    scaling = head_size**-0.5
    if getattr(config, "attention_hidden_size", None) == 2 * getattr(config, "hidden_size", 0):
        scaling = (head_size / 2) ** -0.5  # Zamba: a layer's input and the model's side by side
    if getattr(config, "query_pre_attn_scalar", None) is not None:
        scaling = config.query_pre_attn_scalar**-0.5
    if getattr(config, "attention_multiplier", None) is not None:
        scaling = config.attention_multiplier
    if kind == "mpt" and config.attn_config.softmax_scale is not None:
        scaling = config.attn_config.softmax_scale
    if getattr(config, "scale_attn_weights", True) is False:
        scaling = 1.0
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        scaling /= index + 1
    return float(scaling * _yarn(config))


def scaled_before(config: Any, head_size: int) -> float:
    """The factor on q·k that query and key bring along, as a kernel gets them."""
    beforehand = getattr(config, "model_type", None) in SCALED_BEFOREHAND
    return float(head_size**-0.5) if beforehand else 1.0


def _yarn(config: Any) -> float:
    """By what DeepSeek's models raise the scale with a context that YaRN has stretched.

    Peng et al. 2023, *YaRN*, section 3.4: (0.1·mscale·ln(factor) + 1)², in models with latent
    attention, whose rotary embedding does not hold it.
    """
    rope = getattr(config, "rope_parameters", None)
    latent = getattr(config, "kv_lora_rank", None) is not None
    if not latent or not isinstance(rope, dict) or rope.get("rope_type", "default") == "default":
        return 1.0
    mscale, factor = rope.get("mscale_all_dim"), rope.get("factor", 1.0)
    if not mscale or factor <= 1:
        return 1.0
    return float((0.1 * mscale * math.log(factor) + 1) ** 2)


def is_causal(config: Any, module: nn.Module) -> bool:
    """Whether the architecture is one in which no word sees a later one.

    In an encoder-decoder, that is what a module says of being a decoder's; a type that transformers
    lists for causal language models is causal, unless it may be an encoder as well and is no
    decoder (BERT). Elsewhere the module's own word is all there is.
    """
    if getattr(config, "is_causal", None) is False:
        return False
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return False
    if getattr(config, "is_encoder_decoder", False):
        decoder = getattr(module, "is_decoder", None)
        return bool(getattr(module, "is_causal", False) if decoder is None else decoder)
    kind = getattr(config, "model_type", None)
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        may_encode = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind == "bert-generation"
        return not may_encode or bool(getattr(config, "is_decoder", False))
    return bool(getattr(module, "is_causal", False))


def reach(config: Any, index: int, causal: bool) -> dict[str, int]:
    """What of `MaskRule` a layer's config sets: window, ahead, chunk."""
    own = getattr(config, "attention_layers", None)  # GPT-Neo's
    if own and own[index % len(own)] == "local":
        return {"window": config.window_size}
    kinds = getattr(config, "layer_types", None) or ()
    kind = kinds[index] if index < len(kinds) else ""
    size = getattr(config, "sliding_window", None)
    if "chunked" in kind:
        return {"chunk": config.attention_chunk_size}
    sliding = "sliding" in kind
    if not any("sliding" in one for one in kinds):
        sliding = getattr(config, "use_sliding_window", True) and not kinds
    if not sliding or size is None:
        return {}
    return {"window": size} if causal else {"window": size + 1, "ahead": size}


def _padding_of(frames: list[dict[str, Any]], kind: str, batch: int, keys: int) -> Any:
    """The `attention_mask` of 0 and 1, (B, S or more), that holds for a call; else what was given.

    Args:
        frames: the arguments of the models that are running, the outermost first: what the user
            gave goes before what one part of the model hands to another. In an encoder-decoder each
            half has padding of its own, and only the innermost frame tells which.
        kind: "self" or "cross".
        batch: B.
        keys: S.
    """
    whole = next((frame for frame in frames if frame.get("decoder_input_ids") is not None), None)
    if whole is not None:  # an encoder-decoder: what it was given, not what its halves were
        in_decoder = frames[-1].get("encoder_hidden_states") is not None
        own = kind == "self" and in_decoder
        return whole.get("decoder_attention_mask" if own else "attention_mask")
    if kind == "cross":
        return frames[-1].get("encoder_attention_mask") if frames else None
    if any(frame.get("encoder_decoder") for frame in frames):
        frames = frames[-1:]
    given = [frame["attention_mask"] for frame in frames if frame.get("attention_mask") is not None]
    fitting = [mask for mask in given if _fits(mask, batch, keys)]
    return fitting[0] if fitting else given[0] if given else None


def _packs_documents(frames: list[dict[str, Any]]) -> bool:
    """Whether positions start anew within a row, without a mask: several documents in one text."""
    given = [frame.get("position_ids") for frame in frames]
    return any(
        isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any())
        for positions in given
    ) and not any(isinstance(frame.get("attention_mask"), Tensor) for frame in frames)


def positions(frames: list[dict[str, Any]], batch: int, queries: int) -> Tensor | None:
    """At which position each token of a call stands, (B or 1, T); None if it has more than one.

    They are the inputs' own `position_ids`, the outermost model's first; without them models count
    on from what the cache holds, padding or not.
    """
    given = [frame["position_ids"] for frame in frames if frame.get("position_ids") is not None]
    if given:
        fitting = [
            one
            for one in given
            if isinstance(one, Tensor) and one.shape in ((batch, queries), (1, queries))
        ]
        return fitting[0].detach() if fitting else None
    first = past(frames)
    return torch.arange(first, first + queries)[None]


def frequency_dtype(modules: Iterable[nn.Module]) -> torch.dtype:
    """The dtype in which a model's modules hold rotary frequencies; float32 if they hold none.

    `from_pretrained(dtype=…)` keeps them in float32; `model.to(dtype)` rounds them too.
    """
    held = [
        buffer.dtype
        for module in modules
        for name, buffer in module._buffers.items()
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
        if buffer is not None
    ]
    return max(held, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)


def first_key(frames: list[dict[str, Any]], kind: str, shape: tuple[int, int, int]) -> int:
    """Where a call's own keys begin: in self-attention after those that a cache held before it.

    A cache that slides or was cropped holds fewer keys than tokens went by; see `standing`.
    """
    _, queries, keys = shape
    return 0 if kind == "cross" else min(past(frames), keys - queries)


def past(frames: list[dict[str, Any]]) -> int:
    """How many tokens went by before this forward; a cache that slides may have let some go."""
    return max((frame["past"] for frame in frames), default=0)


def _of_tokens(frame: dict[str, Any], queries: int) -> bool:
    """Whether a call's queries are as many as the tokens of the model that is running.

    Else it is no attention among tokens: Inkling attends to its layers.
    """
    given = [frame.get(name) for name in ("input_ids", "inputs_embeds")]
    lengths = [one.shape[1] for one in given if isinstance(one, Tensor) and one.dim() > 1]
    return not lengths or queries in lengths


def _fits(padding: Any, batch: int, keys: int) -> bool:
    """Whether this is one row of 0 and 1 for each text; transformers also hands on whole masks."""
    if not isinstance(padding, Tensor):
        return False
    return padding.dim() == 2 and padding.shape[0] == batch and padding.shape[1] >= keys


@dataclass(frozen=True, eq=False)
class Standing:
    """Where the tokens of a call stand among its keys.

    Attributes:
        padding: (B, S) bool, True where a token stands; None where nothing is padded.
        gone: how many tokens have left a cache that slides.
        offset: how many keys stand before the first query.
    """

    padding: Tensor | None
    gone: int
    offset: int


def standing(
    frames: list[dict[str, Any]], kind: str, shape: tuple[int, int, int]
) -> Standing | None:
    """Where a call's tokens stand, or None where the inputs do not say it: a mask of more than two
    axes, several documents packed into one text, a layer that was run outside of its model.

    Args:
        frames: the arguments of the models that are running, the outermost first, with `past`: how
            many tokens a cache held before this forward.
        kind: "self" or "cross".
        shape: (B, T, S).
    """
    batch, queries, keys = shape
    if not frames or _packs_documents(frames):
        return None
    if kind == "self" and not _of_tokens(frames[-1], queries):
        return None
    gone = 0 if kind == "cross" else max(past(frames) + queries - keys, 0)
    padding = _padding_of(frames, kind, batch, gone + keys)
    if padding is not None:
        if not _fits(padding, batch, gone + keys):
            return None
        padding = padding[:, gone : gone + keys].bool()
        if padding.all():
            padding = None  # of which no mask need be made
    return Standing(padding, gone, first_key(frames, kind, shape))


def mask_rule(
    module: nn.Module,
    config: Any,
    index: int,
    kind: str,
    shape: tuple[int, int, int],
    stand: Standing | None,
) -> MaskRule | None:
    """M's rule for one call, or None where the inputs do not say it.

    Args:
        module: the attention module.
        config: its config, or the model's.
        index: which layer of the model it is (see `index_of`).
        kind: "self" or "cross".
        shape: (B, T, S).
        stand: where its tokens stand, if that is known.
    """
    _, queries, keys = shape
    if stand is None:
        return None
    if kind == "cross":
        return MaskRule(queries, keys, causal=False, padding=stand.padding)
    causal = is_causal(config, module)
    limits = reach(config, index, causal)
    if stand.gone and "chunk" in limits:  # chunks are counted from a token that is gone
        return None
    return MaskRule(
        queries,
        keys,
        causal=causal,
        padding=stand.padding,
        offset=stand.offset,
        **limits,
    )

"""What the config and the weights say a model adds to the formula: a softcap, sinks, a bias.

As in `attnprobe.architecture.facts`, nothing here looks at what the model hands its kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.biases import Bias, alibi, alibi_slopes, learned
from attnprobe.masks import MaskRule
from attnprobe.terms import Terms

LEARNED = frozenset({"t5", "mt5", "umt5", "longt5", "switch_transformers", "pop2piano", "mpnet"})
"""Types whose self-attention adds a learned bias by distance, as T5 does."""


def expected_terms(module: nn.Module, config: Any, bias: Bias | None = None) -> Terms:
    """The softcap that the config names, the sinks that the module's weights hold, and a bias."""
    sinks = getattr(module, "sinks", None)
    return Terms(
        softcap=getattr(config, "attn_logit_softcapping", None),
        bias=bias,
        sinks=sinks.detach() if isinstance(sinks, Tensor) else None,
    )


def adds_bias(config: Any, kind: str) -> bool:
    """Whether a type is known to add a bias to the scores of a call of a kind, self or cross."""
    match getattr(config, "model_type", None):
        case "bloom":
            return True
        case "falcon":
            return bool(config.alibi)
        case "mpt":
            return bool(config.attn_config.alibi)
        case other:
            return kind == "self" and other in LEARNED


def expected_bias(
    module: nn.Module,
    parents: Mapping[nn.Module, nn.Module],
    config: Any,
    kind: str,
    rule: MaskRule | None,
    query: Tensor,
) -> Bias | None:
    """The bias of one call; None where there is none, or where nothing tells it.

    Args:
        module: the attention module.
        parents: for each module of the model, the one that holds it.
        config: the module's, or the model's.
        kind: "self" or "cross".
        rule: the call's mask, which says where queries and keys stand.
        query: (B, H, T, D).
    """
    if rule is None or not adds_bias(config, kind):
        return None
    if config.model_type in LEARNED:
        table = bias_table(module, parents)
        if table is None:
            return None
        farthest = getattr(config, "relative_attention_max_distance", 128)
        return learned(
            *(table.to(query.device), rule.queries, rule.keys, rule.offset, farthest),
            one_sided=rule.causal,
        )
    _, heads, _, size = query.shape
    by_key = torch.arange(rule.keys, device=query.device)[None]  # (1, S)
    if config.model_type == "mpt":  # counts back from the last key, over padding as well
        slopes = alibi_slopes(heads, config.attn_config.alibi_bias_max).to(query.device)
        return alibi(slopes, by_key + 1 - rule.keys, 1.0, ())
    slopes = alibi_slopes(heads).to(query.device)
    tokens = by_key if rule.padding is None else (rule.padding.cumsum(-1) - 1) * rule.padding
    if config.model_type == "bloom":
        return alibi(slopes, tokens, 1.0, (query.dtype,))
    # Falcon divides its bias by √d_k as well; slopes, positions and bias are in bfloat16 first.
    stored = (torch.bfloat16,) * 3 + (query.dtype,) * 2
    return alibi(slopes, tokens, 1 / math.sqrt(size), stored)


def bias_table(module: nn.Module, parents: Mapping[nn.Module, nn.Module]) -> Tensor | None:
    """The weights from which a layer's bias is looked up, (buckets, H): its own, or those that its
    stack holds once; None where they are not at hand.

    Args:
        module: the attention module.
        parents: for each module of the model, the one that holds it.
    """
    at: nn.Module | None = module
    while at is not None:
        for one in at.modules():
            found = getattr(one, "relative_attention_bias", None)
            if found is not None:  # an adapter's wrapper is none, and offloaded weights are away
                at_hand = isinstance(found, nn.Embedding) and not found.weight.is_meta
                return found.weight if at_hand else None
        at = parents.get(at)
    return None

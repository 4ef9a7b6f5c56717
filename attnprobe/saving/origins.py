"""Whether a model is the one that a capture was made of."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from attnprobe.errors import InputError
from attnprobe.records import LanguageModel, Origin

SAMPLED = 256
"""How many numbers of each weight the fingerprint is made of, at even distances."""

_MAY_DIFFER = {
    *("_name_or_path", "transformers_version", "architectures", "auto_map", "use_cache"),
    *("dtype", "torch_dtype", "output_attentions", "output_hidden_states", "return_dict"),
    *("_attn_implementation", "_attn_implementation_internal", "attn_implementation"),
    *("_experts_implementation", "_experts_implementation_internal", "quantization_config"),
}
"""What a config holds that says nothing of what is computed, or that the weights tell by
themselves, as their dtype."""


def origin_of(lm: LanguageModel) -> Origin:
    """What tells this model from others: its class, its config by key, and of each weight its
    shape, dtype and SAMPLED of its numbers, as hashes.

    A weight of which none of these numbers differs is not told apart; training moves them all.
    Weights that are offloaded are left out.
    """
    weights = {
        name: _hash(f"{tuple(one.shape)} {one.dtype}".encode() + _sample(one))
        for name, one in lm.model.named_parameters()
        if not one.is_meta
    }
    config: Any = getattr(lm.model, "config", None)
    told = config.to_dict() if hasattr(config, "to_dict") else {}
    return Origin(
        name=lm.name,
        kind=type(lm.model).__name__,
        layers=lm.layers,
        config={
            str(key): _hash(json.dumps(value, sort_keys=True, default=str).encode())
            for key, value in told.items()
            if key not in _MAY_DIFFER
        },
        weights=weights,
    )


def refuse_other(origin: Origin | None, lm: LanguageModel) -> None:
    """Refuse a model that a capture was not made of.

    What only one of the two fingerprints has is not compared: another version of transformers may
    add to a config, and weights may be offloaded.

    Raises:
        InputError: it is another, or nothing is known of the capture's.
    """
    if origin is None:
        raise InputError("the capture was made without a model, so none can be told to be its own")
    own = origin_of(lm)
    what = f"the capture is of {origin.name or origin.kind}, and {own.name} is another model"
    if own.kind != origin.kind:
        raise InputError(f"{what}: a {own.kind}, not a {origin.kind}")
    for name, ours, theirs in (
        ("weight", own.weights, origin.weights),
        ("config's", own.config, origin.config),
    ):
        shared = ours.keys() & theirs.keys()
        differs = [key for key in ours if key in shared and ours[key] != theirs[key]]
        if differs:
            raise InputError(f"{what}: its {name} {differs[0]} differs (dtype, shape or numbers)")
    if own.weights and not own.weights.keys() & origin.weights.keys():
        raise InputError(f"{what}: none of its weights has the name of one of the capture's")


def _sample(weight: nn.Parameter) -> bytes:
    """The bytes of some of a weight's numbers."""
    flat: Any = weight.detach()
    at = torch.linspace(0, max(weight.numel() - 1, 0), min(SAMPLED, weight.numel()))
    places = torch.unravel_index(at.double().round().long().to(weight.device), weight.shape)
    some = flat[places] if weight.dim() else flat.reshape(1)
    return some.cpu().contiguous().view(torch.uint8).numpy().tobytes()  # type: ignore[no-any-return]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]

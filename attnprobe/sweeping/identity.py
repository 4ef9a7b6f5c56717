"""What a sweep's numbers hang on beside the corpus, and whether one begun before agrees in it."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from typing import Any

import torch

import attnprobe
from attnprobe.errors import InputError
from attnprobe.records import LanguageModel, dtype_name
from attnprobe.sweeping import shards
from attnprobe.sweeping.folder import Folder
from attnprobe.sweeping.measuring import Settings
from attnprobe.sweeping.texts import STEP


def about_of(lm: LanguageModel, settings: Settings, field: str) -> dict[str, Any]:
    """What the numbers hang on beside the corpus: a run goes on with one that agrees in it."""
    config = getattr(lm.model, "config", None)
    weight = next(lm.model.parameters())
    return {
        "model": {
            "name": lm.name,
            "class": type(lm.model).__name__,
            "revision": getattr(config, "_commit_hash", None),
            "dtype": dtype_name(weight.dtype),
            "kernel": getattr(config, "_attn_implementation", None),
            "device": weight.device.type,
            "sha256": _sha256_of_weights(lm),
        },
        "tokenizer": {
            "name": getattr(lm.tokenizer, "name_or_path", ""),
            "class": type(lm.tokenizer).__name__,
            "sha256": _sha256_of_tokenizer(lm),
        },
        "settings": {
            "tokens": settings.tokens,
            "value": settings.value,
            "pairs": settings.pairs,
            "verify": settings.every,
            "field": field,
            "passage_characters": shards.PASSAGE,
            "shard_characters": shards.SHARD,
            "padded_to_a_multiple_of": STEP,
        },
        "seeds": {},  # nothing is drawn at random
        "versions": {
            "attnprobe": attnprobe.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
            **{name: metadata.version(name) for name in ("numpy", "pandas", "pyarrow")},
        },
    }


def _sha256_of_weights(lm: LanguageModel) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(lm.model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        if not weight.is_meta:
            plain = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(plain.numpy().data)
    return digest.hexdigest()


def _sha256_of_tokenizer(lm: LanguageModel) -> str:
    tokenizer = lm.tokenizer
    assert tokenizer is not None
    if getattr(tokenizer, "is_fast", False):
        content = tokenizer.backend_tokenizer.to_str()
    else:
        content = repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()


_OTHER = {
    "model": "another model",
    "tokenizer": "another tokenizer",
    "settings": "other settings",
    "versions": "other versions",
}
"""What must agree to go on, and how a difference in it is called."""


def begun(folder: Folder, about: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a sweep to go on with; None where there is none.

    Raises:
        InputError: it is of another model, of other settings, or of other versions.
    """
    before = folder.manifest()
    if before is None:
        return None
    for part in _OTHER:
        for name, now in about[part].items():
            known = before.get(part)
            was = known.get(name) if isinstance(known, dict) else None
            if was != now:
                raise InputError(
                    f"{folder.path} was begun with {_OTHER[part]}: {name} was {was!r}, and is "
                    f"{now!r} now. Give the same, or another folder"
                )
    return before

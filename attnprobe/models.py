"""Loading a model with its tokenizer: the bundled one, a folder, a GGUF file, or a hub id."""

from __future__ import annotations

import json
import os
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError  # what torch raises; nothing here unpickles
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from attnprobe.errors import AttnprobeError, InputError, ModelError
from attnprobe.loading.places import Place, locate
from attnprobe.records import LanguageModel

_DTYPES = ("float32", "float16", "bfloat16", "float64")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "spiece.model", "*.bpe.model")

# Weights of a checkpoint that stand behind the last layer and that neither attention nor the
# logits of the class named in the config depend on: BERT's pooler and sentence-order heads.
_WITHOUT_EFFECT = re.compile(r"(^|\.)pooler\.|^cls\.seq_relationship\.|^sop_classifier\.")

# What transformers, safetensors and the GGUF reader raise over files they cannot use.
_UNUSABLE = (
    OSError,
    ValueError,
    LookupError,
    ArithmeticError,
    ImportError,
    RuntimeError,
    struct.error,
    StrictDataclassError,
    UnpicklingError,
)


_loading = threading.Lock()  # transformers' verbosity, and torch's dtype meanwhile, are global


def load(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    attn: str | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    pickle: bool = False,
) -> LanguageModel:
    """Load a model with its tokenizer, in eval mode.

    Args:
        source: `"bundled"`, a folder, a path ending in `.gguf`, or an id on the Hugging Face hub.
            A folder goes before a hub id of the same name.
        revision: branch, tag or commit, for a hub id.
        dtype: `"float32"`, `"float16"`, `"bfloat16"`, `"float64"`, or `"auto"`: as stored.
            A GGUF file's weights are unpacked to it.
        attn: transformers' name of an attention kernel: `"sdpa"`, `"eager"`, …; None leaves the
            choice to transformers.
        device: where the model goes.
        trust_remote_code: run code that the model brings along: its own Python files, or the
            compiled kernels of a repository that its config names. Without it none is run, or even
            fetched, and a model that does not work without it is refused.
        pickle: read weights from a pickle, `pytorch_model.bin`, where there are no others: by
            torch's reader that makes tensors alone, and runs no code that it does not know.

    A folder without tokenizer files gives a `LanguageModel` without a tokenizer. Weights are read
    from safetensors or GGUF: a pickle may be made to run whatever code is in it, and is refused
    unless it is asked for.

    Raises:
        InputError: a dtype, kernel or device that does not exist, or a revision of a local model;
            trust_remote_code or pickle that is neither True nor False.
        ModelError: no such model, none that the hub lets this user read, none that transformers
            can load, or one whose weights do not fit it; a pickle, or code that the model needs,
            where that was not allowed; an adapter, whose base is another model.
    """
    for name, given in (("trust_remote_code", trust_remote_code), ("pickle", pickle)):
        if not isinstance(given, bool):
            raise InputError(f"{name} is True or False, got {given!r}")
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise InputError(f"expected 'bundled', a folder, a .gguf file or a hub id, got {source!r}")
    weights_dtype = _dtype(dtype)
    where = device_named(device)
    kernel = {} if attn is None else {"attn_implementation": _kernel(attn)}
    name = os.fspath(source)
    with _refusing(name):
        place = locate(name, revision, trust_remote_code, pickle)
        options = {"local_files_only": True, "trust_remote_code": trust_remote_code} | place.gguf
        with _loading, _quiet():
            model = _model(place, weights_dtype, kernel, options)
            tokenizer = _tokenizer(place, options)
        model.eval().to(where)
    return LanguageModel(model, tokenizer, place.name)


def as_language_model(lm: Any) -> LanguageModel:
    """Take a `LanguageModel`, a `(model, tokenizer)` pair or a bare model for the first of them.

    Raises:
        InputError: it is none of these.
    """
    if isinstance(lm, LanguageModel):
        return lm
    if isinstance(lm, nn.Module):
        return LanguageModel(lm, None, _own_name(lm))
    if isinstance(lm, tuple) and len(lm) == 2:
        model, tokenizer = lm
        fits = tokenizer is None or isinstance(tokenizer, PreTrainedTokenizerBase)
        if isinstance(model, nn.Module) and fits:
            return LanguageModel(model, tokenizer, _own_name(model))
    if isinstance(lm, str):
        raise InputError(f"expected a model, got the text {lm!r}: load it first, ap.load({lm!r})")
    got = tuple(type(one).__name__ for one in lm) if isinstance(lm, tuple) else type(lm).__name__
    raise InputError(
        f"expected a model from ap.load, a (model, tokenizer) pair or a torch module, got {got}"
    )


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its inputs.

    Weights that accelerate offloads are on "meta" between forwards; its hooks then move the inputs
    to where they are run.

    Raises:
        ModelError: weights on "meta" that nothing brings back.
    """
    # model.parameters() also looks for those that are shared, which takes longer than all of this.
    weights = (weight for module in model.modules() for weight in module._parameters.values())
    devices = [weight.device for weight in weights if weight is not None]
    here = [device for device in devices if device.type != "meta"]
    away = len(here) < len(devices)
    if away and not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ModelError(
            "the model has weights on the device 'meta', which holds no numbers: load them first"
        )
    return here[0] if here else torch.device("cpu")


def _own_name(model: nn.Module) -> str:
    name = getattr(getattr(model, "config", None), "name_or_path", "")
    return name or type(model).__name__


# Options


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto":
        return "auto"
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise InputError(f"unknown dtype {name!r}: expected one of {', '.join(_DTYPES)} or auto")
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _kernel(name: str) -> str:
    known = sorted({"eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()})
    if name not in known:
        raise InputError(f"unknown attention kernel {name!r}: expected one of {', '.join(known)}")
    return name


def device_named(device: str | torch.device) -> torch.device:
    """A device that can hold numbers here.

    Raises:
        InputError: there is none of this name.
    """
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:  # without CUDA, torch asserts
        reason = str(error).partition("\n")[0]
        raise InputError(f"device {str(device)!r} cannot be used here: {reason}") from None
    if found.type == "meta":
        raise InputError("device 'meta' holds no numbers: there is no attention to see on it")
    return found


# Model and tokenizer


def _model(
    place: Place, dtype: str | torch.dtype, kernel: dict[str, str], options: dict[str, Any]
) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(place.folder, **options)
    if not options["trust_remote_code"] and not kernel:
        _refuse_kernels(place.name, config)
    if place.gguf:
        # Packed weights would be unpacked again in every forward.
        options = options | {"quantization_config": transformers.GgufConfig(dequantize=True)}
    model, fit = _model_class(config, options["trust_remote_code"]).from_pretrained(
        place.folder,
        config=config,
        dtype=dtype,
        use_safetensors=not place.pickled,
        weights_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that _check_weights can name them
        **kernel,
        **options,
    )
    _check_weights(place.name, fit)
    assert isinstance(model, nn.Module)
    return model


def _refuse_kernels(name: str, config: Any) -> None:
    """Refuse a config that asks for a kernel out of a repository, which is code to fetch and run.

    Raises:
        ModelError: it does.
    """
    inner = (getattr(config, one, None) for one in getattr(config, "sub_configs", ()))
    for one in (config, *inner):
        kernel = getattr(one, "_attn_implementation", None)
        if isinstance(kernel, str) and "/" in kernel:
            raise ModelError(
                f"the config of {name} asks for the attention kernel {kernel!r} of a repository, "
                "which is code: it is run with trust_remote_code=True only. Or name another "
                "kernel, such as attn='sdpa'"
            )


def _model_class(config: Any, trust_remote_code: bool) -> Any:
    """The class that the checkpoint was saved from, else what its type of config asks for."""
    own_code = getattr(config, "auto_map", None) or {}
    if trust_remote_code and own_code:
        kinds = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
        kind = next((kind for kind in kinds if kind in own_code), "AutoModel")
        return getattr(transformers, kind)
    for name in config.architectures or ():
        saved_from = getattr(transformers, str(name), None)
        if saved_from is not None and getattr(saved_from, "config_class", None) is type(config):
            return saved_from
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    masked = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    # BERT and its like can be built as decoders, but are none unless their config says so.
    decodes = getattr(config, "is_decoder", False) or not masked
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and decodes:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForMaskedLM if masked else transformers.AutoModel


def _check_weights(name: str, fit: dict[str, Any]) -> None:
    """Refuse a model that has weights the checkpoint lacks, or lacks weights that are in it."""
    missing = sorted(key for key in fit["missing_keys"] if not _WITHOUT_EFFECT.search(key))
    unused = sorted(key for key in fit["unexpected_keys"] if not _WITHOUT_EFFECT.search(key))
    sizes = sorted(
        f"{key} ({_size(stored)}, the model's is {_size(built)})"
        for key, stored, built in fit["mismatched_keys"]
    )
    faults = [
        f"{len(keys)} {what}: {', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}"
        for what, keys in (
            ("missing, which would be random", missing),
            ("of another size", sizes),
            ("that the model has no place for", unused),
        )
        if keys
    ]
    if faults:
        raise ModelError(
            f"the weights of {name} do not fit its config.json: {'; '.join(faults)}. To use it "
            "all the same, load it with transformers and pass (model, tokenizer)"
        )


def _size(shape: Any) -> str:
    return "×".join(str(one) for one in shape)


def _tokenizer(place: Place, options: dict[str, Any]) -> Any:
    if not place.gguf:
        files = [file for pattern in _TOKENIZER_FILES for file in place.folder.glob(pattern)]
        if not files:
            return None
        # The tokenizers library raises a bare Exception over these, which nobody can tell apart.
        for file in files:
            _check_json(place.name, file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(place.folder, **options)
    # What transformers makes of a tokenizer_config.json without a vocabulary.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ModelError(f"the tokenizer of {place.name} has no vocabulary: its files are missing")
    return tokenizer


def _check_json(name: str, file: Path) -> None:
    if file.suffix != ".json":
        return
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"the tokenizer of {name} is damaged: {file.name}: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"the tokenizer of {name} is damaged: {file.name} holds no JSON object")


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Say which model it was that transformers could not load."""
    try:
        yield
    except AttnprobeError:
        raise
    except SafetensorError as error:
        raise ModelError(
            f"{name} cannot be loaded: a file of its weights is damaged ({_in_short(error)}). Get "
            "it again"
        ) from error
    except _UNUSABLE as error:
        raise ModelError(f"{name} cannot be loaded: {_in_short(error)}") from error
    except Exception as error:
        if type(error) is not Exception:  # which the tokenizers library raises as it is
            raise
        raise ModelError(f"{name} cannot be loaded: {_in_short(error)}") from error


def _in_short(error: BaseException, limit: int = 1000) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]}…"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' bars and reports to itself: what matters in them is raised here."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()

"""Texts or token ids → what a model's forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnprobe.errors import InputError, ModelError
from attnprobe.models import device_of
from attnprobe.records import LanguageModel, Target
from attnprobe.spans import refuse_surrogates
from attnprobe.words import Words, read


@dataclass(frozen=True, eq=False)
class Batch:
    """One or more texts, filled up to one length."""

    texts: tuple[str | None, ...]
    words: tuple[Words, ...]
    padding: Tensor  # (B, T) bool, True where a token stands
    inputs: dict[str, Tensor]  # the forward's keyword arguments
    target: Target | None = None


def encode(
    lm: LanguageModel,
    text: Any,
    target: Any = None,
    padding_side: Literal["left", "right"] | None = None,
) -> Batch:
    """Tokenize, check and pad; `target` is what an encoder-decoder's decoder is given.

    Raises:
        ModelError: a model that takes no token ids.
        InputError: no text, an empty one, one longer than the model's positions, text without a
            tokenizer, ids outside the vocabulary; padding that would shift positions; an
            encoder-decoder without a target, another model with one, or not one target for each
            text.
    """
    config = getattr(lm.model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        if target is not None:
            raise InputError(f"{type(lm.model).__name__} has no decoder to give a target to")
        return _batch(lm, text, padding_side)
    if target is None:
        raise InputError(
            f"{type(lm.model).__name__} is an encoder-decoder: it needs a target as well, what its "
            "decoder is given. capture(lm, text, target=…)"
        )
    source = _batch(lm, text, padding_side)
    start = getattr(config, "decoder_start_token_id", None)
    given = _batch(lm, target, padding_side, "target", start)
    if len(source.texts) != len(given.texts):
        raise InputError(f"got {len(source.texts)} texts and {len(given.texts)} targets")
    inputs = {name: source.inputs[name] for name in ("input_ids", "attention_mask")}
    inputs |= {f"decoder_{name}": given.inputs[name] for name in inputs}
    ids = given.inputs["input_ids"]
    return replace(
        source, inputs=inputs, target=Target(given.texts, ids, given.padding, given.words)
    )


def _batch(
    lm: LanguageModel,
    text: Any,
    padding_side: Literal["left", "right"] | None,
    what: Literal["text", "target"] = "text",
    start: int | None = None,
) -> Batch:
    """One side's texts; texts, not ids, begin with the token `start`, where there is one."""
    texts, ids = _token_ids(lm, text, what)
    if start is not None and texts[0] is not None:
        ids = [[start, *row] for row in ids]
        texts = (None,) * len(ids)  # read from its ids, with the token that begins it
    _check(lm, ids, what)
    side = padding_side or getattr(lm.tokenizer, "padding_side", "right")
    if side not in ("left", "right"):
        raise InputError(f"padding_side must be 'left' or 'right', not {side!r}")
    words = (read(lm.tokenizer, row, one) for row, one in zip(ids, texts, strict=True))
    return padded(lm, ids, texts, tuple(words), side)


def padded(
    lm: LanguageModel,
    ids: list[list[int]],
    texts: tuple[str | None, ...],
    words: tuple[Words, ...],
    side: Literal["left", "right"],
    length: int = 0,
) -> Batch:
    """Texts as token ids, filled up on one side to the longest, or to a `length` beyond it.

    Raises:
        ModelError: a model that takes no token ids.
        InputError: padding that would shift positions.
    """
    filler = getattr(lm.tokenizer, "pad_token_id", None) or 0
    names = accepted(lm.model)
    if "input_ids" not in names:
        raise ModelError(
            f"{type(lm.model).__name__} takes no token ids: there is no text to give it"
        )
    length = max(length, *map(len, ids))
    input_ids = torch.full((len(ids), length), filler, device=device_of(lm.model))
    mask = torch.zeros_like(input_ids)  # (B, T)
    for row, (own_ids, own_mask) in zip(ids, zip(input_ids, mask, strict=True), strict=True):
        place = slice(len(row)) if side == "right" else slice(length - len(row), None)
        own_ids[place] = torch.tensor(row)
        own_mask[place] = 1
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    if not mask[:, 0].all():
        _refuse_positions(lm.model, names)
    if not mask[:, 0].all() and "position_ids" in names:
        # Absolute positions count from a text's first token, not from the padding before it.
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0) + _first_position(lm.model)
    return Batch(texts, words, mask.bool(), inputs)


def accepted(model: nn.Module) -> set[str]:
    """The names that a model's forward takes; a wrapper's (peft's) hands the rest to the inner."""
    inner = next((one for one in model.modules() if isinstance(one, PreTrainedModel)), model)
    parameters = inspect.signature(model.forward).parameters
    hands_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if inner is model or not hands_on:
        return {*parameters}
    return {*parameters, *inspect.signature(inner.forward).parameters}


def _refuse_positions(model: nn.Module, accepted: set[str]) -> None:
    """Refuse padding before a text where it would shift the text's positions (BART)."""
    for name, module in model.named_modules():
        absolute = isinstance(module, nn.Embedding) and "position" in name
        if absolute and "position_ids" not in accepted:
            raise InputError(
                f"{type(model).__name__} counts positions from the first token, padding or not "
                f"({name}), and takes no position_ids: give padding_side='right'"
            )


def _first_position(model: nn.Module) -> int:
    """The position of a text's first token: RoBERTa's and its like count on from the padding's."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def _token_ids(
    lm: LanguageModel, text: Any, what: str
) -> tuple[tuple[str | None, ...], list[list[int]]]:
    """Texts, None where ids were given, and their ids; `what` they are called in messages."""
    if isinstance(text, bytes | bytearray):
        raise InputError(f"expected a {what} as str, got bytes: decode them first")
    if isinstance(text, str):
        text = [text]
    if isinstance(text, Mapping):
        text = _encoded(lm, text)
    if isinstance(text, Tensor):
        text = text.tolist()
    if not isinstance(text, Sequence) or not text:
        raise InputError(f"expected a {what}, a list of {what}s or token ids, got {text!r}")
    if all(isinstance(one, str) for one in text):
        if lm.tokenizer is None:
            raise InputError(f"a bare model takes token ids; for a {what}, give (model, tokenizer)")
        for number, one in enumerate(text):
            if not one:
                which = what if len(text) == 1 else f"{what} {number}"
                raise InputError(f"{which} is empty: there is nothing to attend to. Give a word")
            refuse_surrogates(one)
        return tuple(text), [list(lm.tokenizer(one, verbose=False)["input_ids"]) for one in text]
    if any(isinstance(one, Mapping) for one in text):
        raise InputError(
            "a chat goes through its tokenizer's template: "
            "capture(lm, tokenizer.apply_chat_template(chat))"
        )
    if all(_is_id(one) for one in text):
        text = [text]
    rows = [row.tolist() if isinstance(row, Tensor) else row for row in text]
    if not all(isinstance(row, Sequence) and all(_is_id(one) for one in row) for row in rows):
        raise InputError(f"expected token ids as whole numbers, one list of them a {what}")
    return (None,) * len(rows), [list(row) for row in rows]


def _encoded(lm: LanguageModel, given: Mapping[str, Any]) -> list[list[int]]:
    """The ids of what a tokenizer returned, without the padding that its attention_mask marks."""
    if "input_ids" not in given:
        raise InputError(f"expected what a tokenizer returns, with input_ids; got {[*given]}")
    rest = accepted(lm.model) & {*given} - {"input_ids", "attention_mask"}
    other = [name for name in sorted(rest) if torch.as_tensor(given[name]).any()]
    if other:
        raise InputError(f"capture gives a model its token ids alone, and no {', '.join(other)}")
    ids, marks = (_rows(given.get(name)) for name in ("input_ids", "attention_mask"))
    marks = marks or [[1] * len(row) for row in ids]
    for row in marks:
        if 0 in row[row.index(1) : len(row) - row[::-1].index(1)] if 1 in row else False:
            raise InputError("attention_mask hides tokens within a text, not only padding")
    return [
        [one for one, mark in zip(row, seen, strict=True) if mark]
        for row, seen in zip(ids, marks, strict=True)
    ]


def _rows(given: Any) -> list[list[int]]:
    rows = torch.as_tensor(given).tolist() if isinstance(given, Tensor) else list(given or ())
    return [rows] if rows and not isinstance(rows[0], list) else rows


def _is_id(one: object) -> bool:
    return isinstance(one, int) and not isinstance(one, bool)


def _check(lm: LanguageModel, ids: list[list[int]], what: str) -> None:
    config = getattr(lm.model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None:  # XLNet's -1 stands for none
        limit = limit - _first_position(lm.model) if limit > 0 else None
    vocabulary = getattr(config, "vocab_size", None)
    for number, row in enumerate(ids):
        if not row:
            raise InputError(f"{what} {number} has no tokens: there is nothing to attend to")
        if limit is not None and len(row) > limit:
            raise InputError(
                f"{what} {number} has {len(row)} tokens; the model takes at most {limit}. "
                f"Give a shorter {what}"
            )
        if vocabulary is not None and not (min(row) >= 0 and max(row) < vocabulary):
            raise InputError(
                f"{what} {number} holds token ids from {min(row)} to {max(row)}; the model's "
                f"vocabulary has ids 0 to {vocabulary - 1}"
            )

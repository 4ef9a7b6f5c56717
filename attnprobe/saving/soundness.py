"""Whether the parts of a capture fit each other: what is computed of it takes that for granted."""

from __future__ import annotations

import torch
from torch import Tensor

from attnprobe.biases import ByDistance, ByKey
from attnprobe.masks import MaskRule
from attnprobe.records import AttentionCall, Capture, Target
from attnprobe.saving.parsing import shown
from attnprobe.saving.reading import DamagedError
from attnprobe.terms import Terms
from attnprobe.words import Words

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Sizes = tuple[int | None, ...]


def refuse_unsound(cap: Capture) -> None:
    """Refuse a capture whose parts do not fit each other.

    Raises:
        DamagedError: so it is; the message says where.
    """
    sides = {"": Target(cap.texts, cap.input_ids, cap.padding, cap.words)}
    for name in ("target", "source"):
        if getattr(cap, name) is not None:
            sides[name] = getattr(cap, name)
    for name, side in sides.items():
        _side(side, f"{name}." if name else "")
    batch = len(cap.texts)
    _demand("target", all(len(side.texts) == batch for side in sides.values()), f"{batch} texts")
    _demand("part", not cap.part or cap.target is not None, "a target with it")
    _demand("source", (cap.source is not None) == (cap.part == "cross"), "one in cross attention")
    rows = cap.output_padding
    _tensor(cap.output, "output", FLOATS, (*rows.shape, None))
    _inputs(cap)
    parts = ("",) if cap.target is None else (cap.part,) if cap.part else _PARTS
    for at, call in enumerate(cap.calls):
        _demand(f"calls.{at}.kind", call.part in parts, f"attention of {' or '.join(parts)}")
        _call(call, batch, f"calls.{at}.")
    others = [(one.layer, one.part) for some in (cap.unseen, cap.left_out) for one in some]
    places = [*((call.layer, call.part) for call in cap.calls), *others]
    _demand("calls", all(part in parts for _, part in places), f"parts among {parts}")
    _demand("calls", len(set(places)) == len(places), "each layer once")
    _demand("calls", all(0 <= layer < len(places) for layer, _ in places), "layers from 0")


_PARTS = ("encoder", "decoder", "cross")


def _demand(at: str, holds: bool, expected: str, got: object = None) -> None:
    if not holds:
        raise DamagedError(
            f"{at}: expected {expected}{'' if got is None else f', got {shown(got)}'}"
        )


def _tensor(
    tensor: Tensor | None, at: str, dtypes: tuple[torch.dtype, ...], *shapes: Sizes
) -> None:
    """A tensor of one of these dtypes and shapes, None in a shape for any size from 1."""
    if tensor is None:
        return
    names = ", ".join(str(one).removeprefix("torch.") for one in dtypes)
    _demand(at, tensor.dtype in dtypes, f"dtype {names}", tensor.dtype)
    size = tuple(tensor.shape)
    fits = any(
        len(shape) == len(size)
        and all(b >= 1 and a in (b, None) for a, b in zip(shape, size, strict=True))
        for shape in shapes
    )
    text = " or ".join(
        f"({', '.join('any' if a is None else str(a) for a in shape)})" for shape in shapes
    )
    _demand(at, fits, f"shape {text}", size)


def _broadcast(
    tensor: Tensor | None, at: str, dtypes: tuple[torch.dtype, ...], to: tuple[int, ...]
) -> None:
    """A tensor that broadcasts to this shape, but for its last axis, which may be longer."""
    if tensor is None:
        return
    size = tuple(tensor.shape)
    if len(size) == len(to):
        lead = (1 if own == 1 else whole for own, whole in zip(size[:-1], to[:-1], strict=True))
        to = (*lead, max(size[-1], to[-1]))
    _tensor(tensor, at, dtypes, to)


def _side(side: Target, at: str) -> None:
    """Texts, ids, padding and words."""
    count = len(side.texts)
    _demand(f"{at}texts", count >= 1, "a text")
    _tensor(side.padding, f"{at}padding", (torch.bool,), (count, None))
    _tensor(side.input_ids, f"{at}input_ids", (torch.int64, torch.int32), tuple(side.padding.shape))
    _demand(f"{at}input_ids", bool((side.input_ids >= 0).all()), "ids from 0")
    _demand(f"{at}words", len(side.words) == count, f"those of {count} texts", len(side.words))
    for number, (row, words) in enumerate(zip(side.padding, side.words, strict=True)):
        stretch = row.nonzero().flatten()
        own = int(row.sum())
        one_stretch = own >= 1 and int(stretch[-1] - stretch[0]) + 1 == own
        _demand(f"{at}padding.{number}", one_stretch, "one stretch of tokens")
        _words(words, own, f"{at}words.{number}.")


def _words(words: Words, count: int, at: str) -> None:
    """Each token in one word, in order, and each word's place in the text."""
    _demand(f"{at}tokens", len(words.tokens) == len(words.shared) == count, f"{count} tokens")
    of = tuple(number for number, word in enumerate(words.words) for _ in word.tokens)
    held = tuple(token for word in words.words for token in word.tokens)
    _demand(f"{at}words", held == tuple(range(count)), "each token in one word, in order")
    _demand(f"{at}word_of", of == words.word_of, "each token's word")
    parts = [word for word in words.words if word.span[0] != word.span[1]]
    _demand(f"{at}words", all(word.tokens for word in words.words), "tokens in each word")
    whole = "".join(word.space + word.text for word in parts) + words.tail
    _demand(f"{at}words", whole == words.text, "what makes up the text")
    end = 0
    for word in parts:
        begin = end + len(word.space)
        end = begin + len(word.text)
        _demand(f"{at}words", word.span == (begin, end), f"the span {(begin, end)}", word.span)
    inside = all(0 <= word.span[0] <= len(words.text) for word in words.words)
    _demand(f"{at}words", inside, "spans within the text")


def _inputs(cap: Capture) -> None:
    """What the model is run on again: the ids that the capture holds, and their masks."""
    known = {"input_ids", "attention_mask", "position_ids"}
    named = {f"decoder_{name}" for name in known} if cap.target is not None else set()
    for name, tensor in cap.inputs.items():
        _demand(f"inputs.{name}", name in known | named, f"one of {sorted(known | named)}")
        _tensor(tensor, f"inputs.{name}", (torch.int64, torch.int32, torch.bool), (None, None))
        _demand(f"inputs.{name}", len(tensor) == len(cap.texts), f"{len(cap.texts)} rows")
    if not cap.part:
        decoder = {} if cap.target is None else {"decoder_input_ids": cap.target.input_ids}
        for name, ids in ({"input_ids": cap.input_ids} | decoder).items():
            given = cap.inputs.get(name)
            same = given is not None and torch.equal(given.cpu(), ids.cpu())
            _demand(f"inputs.{name}", same, "the capture's own")
            mask = cap.inputs.get(name.replace("input_ids", "attention_mask"))
            rows = cap.padding if name == "input_ids" else cap.output_padding
            same = mask is not None and torch.equal(mask.cpu().bool(), rows.cpu())
            _demand(f"inputs of {name}", same, "an attention_mask that is the padding")


def _call(call: AttentionCall, batch: int, at: str) -> None:
    """What one call holds. Its queries need not be the tokens: a model may have its own among them
    or in their place."""
    _tensor(call.query, f"{at}query", FLOATS, (batch, None, None, None))
    _, heads, tokens, size = call.query.shape
    seen = call.key.shape[2] if call.key.dim() == 4 else 0
    _tensor(call.key, f"{at}key", FLOATS, (batch, None, None, size))
    served = call.key.shape[1]
    _demand(f"{at}key", heads % served == 0, f"heads that divide {heads}", served)
    _tensor(call.value, f"{at}value", FLOATS, (batch, served, seen, None))
    whole = (batch, tokens, heads, call.value.shape[3])
    _tensor(call.head_output_model, f"{at}head_output_model", FLOATS, whole)
    _demand(f"{at}head_output_model", call.head_output_model is not None, "what a kernel returned")
    _tensor(call.weights_model, f"{at}weights_model", FLOATS, (batch, heads, tokens, seen))
    for name in ("hidden_states", "attention_output"):
        _tensor(getattr(call, name), f"{at}{name}", FLOATS, (None,) * 2, (None,) * 3, (None,) * 4)
    _tensor(
        call.position_ids, f"{at}position_ids", (torch.int64, torch.int32), *_rows(batch, tokens)
    )
    full = (batch, heads, tokens, seen)
    if call.mask is not None and call.mask.dim() == 2:
        _broadcast(
            call.mask, f"{at}mask", (*FLOATS, torch.bool, torch.int64, torch.int32), (batch, seen)
        )
    else:
        _broadcast(call.mask, f"{at}mask", (*FLOATS, torch.bool), full)
    for name in ("layer", "step"):
        _demand(f"{at}{name}", getattr(call, name) >= 0, "a number from 0", getattr(call, name))
    if call.cache is not None:
        _demand(f"{at}cache", call.cache.past >= 0, "tokens that went by", call.cache.past)
    if call.expected_mask is not None:
        _rule(call.expected_mask, batch, tokens, seen, f"{at}expected_mask.")
    for name in ("terms", "expected_terms"):
        _terms(getattr(call, name), full, f"{at}{name}.")


def _rows(batch: int, tokens: int) -> tuple[Sizes, Sizes]:
    return (batch, tokens), (1, tokens)


def _rule(rule: MaskRule, batch: int, tokens: int, seen: int, at: str) -> None:
    """M's facts: as many queries and keys as there are."""
    sizes = (rule.queries, rule.keys)
    _demand(f"{at}queries", sizes == (tokens, seen), f"{tokens} queries, {seen} keys", sizes)
    _tensor(rule.padding, f"{at}padding", (torch.bool,), *_rows(batch, seen))
    for name in ("window", "chunk"):
        number = getattr(rule, name)
        _demand(f"{at}{name}", number is None or number >= 1, "a size from 1", number)
    _demand(f"{at}ahead", rule.ahead is None or rule.ahead >= 0, "a number from 0", rule.ahead)
    _demand(f"{at}offset", 0 <= rule.offset <= seen, f"0 to {seen}", rule.offset)


def _terms(terms: Terms, full: tuple[int, int, int, int], at: str) -> None:
    """What is added to the formula, of a call with scores of this shape."""
    batch, heads, tokens, seen = full
    match terms.bias:
        case Tensor() as bias:
            _broadcast(bias, f"{at}bias", FLOATS, full)
        case ByKey(values=values):
            _tensor(
                values, f"{at}bias", (torch.float64,), (batch, heads, 1, seen), (1, heads, 1, seen)
            )
        case ByDistance(values=values, queries=queries):
            _tensor(values, f"{at}bias", (torch.float64,), (heads, tokens + seen - 1))
            _demand(f"{at}bias.queries", queries == tokens, f"{tokens}", queries)
    _tensor(terms.sinks, f"{at}sinks", FLOATS, (heads,), (batch, heads, tokens, 1))
    _demand(f"{at}softcap", terms.softcap is None or terms.softcap > 0, "a number above 0")

"""Token ids → the text they stand for, and which of its characters each token holds.

Three ways, and the first that fits the ids is taken:

1. The tokenizer's own character offsets, where it has them and gives the same ids for the text.
   They refer to the text as it was before any normalizer, so `É` stays `É` in a model that reads
   `e`. What they get wrong is mended: see `_mended` and `_bytes_apart`.
2. What the ids decode to, token by token, laid over the text that was given: slow tokenizers, and
   ids that came about in another way.
3. What the ids decode to, alone: ids without a text, or with one that they do not spell.

Positions are characters (Unicode code points) of the text, from 0: `(start, stop)` as in a slice.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from attnprobe.errors import InputError

Span = tuple[int, int]

SPACE_MARKS = "▁Ġ"
"""What SentencePiece and byte-level BPE write for a space."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BYTE_OF = {sign: byte for byte, sign in bytes_to_unicode().items()}


@dataclass(frozen=True)
class Spans:
    """A text and its tokens' places in it; one entry a token in each tuple."""

    text: str
    places: tuple[Span, ...]
    """Empty, `(at, at)`, for a token without characters in the text, such as an added `[CLS]`."""
    names: tuple[str, ...]
    """The tokens as the vocabulary writes them; `<id 50300>` for an id that it does not know."""
    special: tuple[bool, ...]
    """Special tokens, and ids that the tokenizer does not know."""
    unknown: tuple[bool, ...]
    """`[UNK]` and its like, where they stand for characters of the text."""
    partial: tuple[bool, ...]
    """The token's bytes begin or end inside a character, or form none."""


def locate(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    text: str | None,
    offsets: Sequence[Span] | None = None,
) -> Spans:
    """Where each token stands in the text, or in what the ids decode to; `offsets` are the
    tokenizer's own for them, where they are at hand.

    Raises:
        InputError: an id below 0 or above 32 bits, or a text with a lone surrogate.
    """
    _refuse(ids, text)
    tokens = _without_places(tokenizer, ids)
    if text is not None and offsets is not None:
        return _by_offsets(tokenizer, ids, text, tokens, offsets)
    if getattr(tokenizer, "is_fast", False):
        whole = text
        if whole is None:
            whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        offsets = _offsets(tokenizer, ids, whole)
        if offsets is not None:
            return _by_offsets(tokenizer, ids, whole, tokens, offsets)
    decoded = _decoded(tokenizer, ids, tokens)
    if text is None or text == decoded.text:
        return decoded
    for fold in (str, _letters):
        places = _laid_over(text, decoded, fold)
        if places is not None:
            return replace(decoded, text=text, places=places)
    return decoded


def refuse_surrogates(text: str) -> None:
    """Refuse a text that is no Unicode, before a tokenizer fails on it in its own way.

    Raises:
        InputError: a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text holds a lone surrogate, U+{ord(error.object[error.start]):04X}, at "
            f"character {error.start}: half of a UTF-16 pair, or a byte that is not UTF-8. No "
            "tokenizer can take it: decode the text anew, or replace it"
        ) from None


def _refuse(ids: Sequence[int], text: str | None) -> None:
    for id_ in ids:
        if not 0 <= id_ < 2**32:
            raise InputError(f"a token id is a whole number from 0, of 32 bits; got {id_}")
    if text is not None:
        refuse_surrogates(text)


def _without_places(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Spans:
    """The tokens' names and which are special, without a text."""
    added = tokenizer.added_tokens_decoder
    fast = getattr(tokenizer, "is_fast", False)
    special = set(tokenizer.all_special_ids) | {id_ for id_ in added if added[id_].special}
    # A slow tokenizer may raise anything over an id that it does not know.
    known = [id_ for id_ in set(ids) if fast or id_ in added or id_ < tokenizer.vocab_size]
    names: dict[int, str | None] = dict.fromkeys(ids)
    names.update(zip(known, tokenizer.convert_ids_to_tokens(known), strict=True))
    nowhere = (False,) * len(ids)
    return Spans(
        text="",
        places=((0, 0),) * len(ids),
        names=tuple(names[id_] or f"<id {id_}>" for id_ in ids),
        special=tuple(id_ in special or names[id_] is None for id_ in ids),
        unknown=nowhere,
        partial=nowhere,
    )


# The tokenizer's own offsets


def _offsets(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str
) -> list[Span] | None:
    """A fast tokenizer's own offsets; None where it makes other ids of the text."""
    for add_special_tokens in (True, False):
        encoded = tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        if encoded["input_ids"] == list(ids):
            found: list[Span] = encoded["offset_mapping"]
            return found
    return None


def _by_offsets(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    text: str,
    tokens: Spans,
    offsets: Sequence[Span],
) -> Spans:
    """Places from the tokenizer's offsets."""
    offsets = _bytes_apart(text, list(offsets), tokens.names)
    tokens = replace(tokens, text=text)
    unk = tokenizer.unk_token_id
    if unk in ids:
        unknown = tuple(
            id_ == unk and start < stop and text[start:stop].strip() != name
            for id_, (start, stop), name in zip(ids, offsets, tokens.names, strict=True)
        )
        special = tuple(a and not b for a, b in zip(tokens.special, unknown, strict=True))
        tokens = replace(tokens, special=special, unknown=unknown)
    return replace(tokens, places=_mended(offsets, tokens))


def _mended(offsets: list[Span], tokens: Spans) -> tuple[Span, ...]:
    """Offsets in order, with tokens of spaces where the spaces are.

    The `▁` that SentencePiece puts before a text shares the place of the first letter: it has
    none. Byte-level BPE with `trim_offsets` takes a token of one space for empty: it has the space.
    """
    if all(a < b <= c for (a, b), (c, _) in pairwise([*offsets, (len(tokens.text), 0)])):
        return tuple(offsets)  # one after the other, and none is empty
    text = tokens.text
    places = []
    reached = floor = 0
    for at, (start, stop) in enumerate(offsets):
        special = tokens.special[at]
        after = offsets[at + 1] if at + 1 < len(offsets) else (stop, stop)
        start = max(start, floor)
        stop = max(start, stop)
        if start == stop:
            blank = _blank(tokens, at) and text[reached:start].isspace()
            start, stop = (reached, start) if blank else (reached, reached)
        elif start >= reached and after[0] < min(stop, after[1]) and _blank(tokens, at):
            stop = start
        places.append((start, stop))
        reached = max(reached, stop)
        if special:
            floor = reached
    return tuple(places)


def _blank(tokens: Spans, at: int) -> bool:
    """Whether a token is of spaces alone, as the vocabulary writes them."""
    return not tokens.special[at] and not tokens.names[at].strip(SPACE_MARKS + " ")


def _bytes_apart(text: str, offsets: list[Span], names: tuple[str, ...]) -> list[Span]:
    """Give each byte token its own character.

    Unigram models with byte fallback give all byte tokens of a stretch the whole stretch.
    """
    if not any(map(_BYTE.fullmatch, names)):
        return offsets
    apart = list(offsets)
    first = 0
    for at in range(1, len(offsets) + 1):
        if at < len(offsets) and offsets[at] == offsets[first]:
            continue
        start, stop = offsets[first]
        bytes_ = [_BYTE.fullmatch(name) for name in names[first:at]] if stop - start > 1 else []
        if bytes_ and all(bytes_):
            stretch, places, _ = _characters([bytes.fromhex(one[1]) for one in bytes_ if one])
            if stretch == text[start:stop]:
                apart[first:at] = [(start + left, start + right) for left, right in places]
        first = at
    return apart


# What the ids decode to


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], tokens: Spans) -> Spans:
    """Places in what the ids decode to, where bytes that form no character show as `<0xAC>`."""
    text, places, partial = _characters(_pieces(tokenizer, ids, tokens))
    return replace(tokens, text=text, places=places, partial=partial)


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], tokens: Spans) -> list[bytes]:
    """What each token adds to the text, in UTF-8."""
    decoder = _Decoder(tokenizer)
    pieces = []
    before: int | None = None
    for id_, name in zip(ids, tokens.names, strict=True):
        if name == f"<id {id_}>":
            pieces.append(name.encode())
        else:
            pieces.append(decoder.piece(before, id_, name))
            before = id_
    return pieces


class _Decoder:
    """Decodes token by token, each pair of tokens once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.added = tokenizer.added_tokens_decoder
        # The decode of slow SentencePiece tokenizers drops spaces, and shows bytes as written.
        self.sentencepiece = hasattr(tokenizer, "sp_model")
        self.byte_of: dict[str, int] = getattr(tokenizer, "byte_decoder", {})
        if getattr(tokenizer, "is_fast", False):
            byte_level = "ByteLevel(" in str(tokenizer.backend_tokenizer.decoder)
            self.byte_of = _BYTE_OF if byte_level else {}
        self.decoded: dict[tuple[int, ...], str] = {}

    def piece(self, before: int | None, id_: int, name: str) -> bytes:
        """What a token adds after the one before it; None before the first."""
        byte = _BYTE.fullmatch(name)
        own = id_ not in self.added
        if own and self.byte_of and self.byte_of.keys() >= set(name):
            return bytes(self.byte_of[sign] for sign in name)
        if byte and (self.sentencepiece or self.decode(id_) != name):
            return bytes.fromhex(byte[1])
        if len(name) == 1 and name < "\u0100" and self.decode(id_) in ("", "\ufffd"):
            return name.encode("latin-1")  # a byte by itself, as ByT5 writes it
        if own and self.sentencepiece:
            text = name.replace("▁", " ")
        else:
            # The token before settles whether a space stands between, and what `##` means.
            first = id_ if before is None else before
            alone, both = self.decode(first), self.decode(first, id_)
            text = both[len(alone) :] if both.startswith(alone) else self.decode(id_)
        return (text.lstrip(" ") if before is None else text).encode()

    def decode(self, *ids: int) -> str:
        """What the ids decode to by themselves."""
        if ids not in self.decoded:
            text = self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
            self.decoded[ids] = text
        return self.decoded[ids]


def _characters(pieces: Sequence[bytes]) -> tuple[str, tuple[Span, ...], tuple[bool, ...]]:
    """The text of UTF-8 pieces, each piece's place in it, and which hold parts of characters."""
    text = []
    place_of: list[Span] = []  # of each byte: its character's
    first: list[bool] = []  # of each byte: whether its character begins with it
    broken: list[bool] = []
    at = 0
    for character in b"".join(pieces).decode(errors="surrogateescape"):
        lost = "\udc80" <= character <= "\udcff"
        shown = f"<0x{ord(character) - 0xDC00:02X}>" if lost else character
        size = 1 if lost else len(character.encode())
        text.append(shown)
        place_of += [(at, at + len(shown))] * size
        first += [True] + [False] * (size - 1)
        broken += [lost] * size
        at += len(shown)
    places, partial = [], []
    start = 0
    for piece in pieces:
        stop = start + len(piece)
        here = place_of[start - 1][1] if start else 0
        places.append((place_of[start][0], place_of[stop - 1][1]) if piece else (here, here))
        ends = stop == len(first) or first[stop]
        whole = not piece or (first[start] and ends and not any(broken[start:stop]))
        partial.append(not whole)
        start = stop
    return "".join(text), tuple(places), tuple(partial)


def _letters(character: str) -> str:
    """A character without case, accents and compatibility forms."""
    plain = unicodedata.normalize("NFKD", character).casefold()
    return "".join(one for one in plain if not unicodedata.combining(one))


def _laid_over(text: str, decoded: Spans, fold: Callable[[str], str]) -> tuple[Span, ...] | None:
    """The places in the text given, or None where the decoded tokens do not spell it.

    White space counts for nothing, and special tokens may be written in the text or not.
    """
    reader = _Reader(text, fold)
    found: list[Span] = []  # of each character decoded, its place in the text
    places = []
    for (start, stop), name, special in zip(
        decoded.places, decoded.names, decoded.special, strict=True
    ):
        absent = special and not reader.comes_to(name)
        for character in decoded.text[len(found) : stop]:
            place = reader.here if absent else reader.read(character)
            if place is None:
                return None
            found.append(place)
        held = [place for place in found[start:stop] if place[0] < place[1]]
        places.append((held[0][0], held[-1][1]) if held else reader.here)
    return tuple(places) if reader.at_end() else None


class _Reader:
    """Reads through a text, its characters folded, and says where in the text it is."""

    def __init__(self, text: str, fold: Callable[[str], str]) -> None:
        self.fold = fold
        self.key = [(one, at) for at, character in enumerate(text) for one in fold(character)]
        self.used = 0  # of the key
        self.here = (0, 0)  # the end of what was read

    def comes_to(self, word: str) -> bool:
        """Whether the word comes next, white space aside."""
        at = self._past_space()
        folded = "".join(map(self.fold, word))
        return folded == "".join(one for one, _ in self.key[at : at + len(folded)])

    def read(self, character: str) -> Span | None:
        """The place of the character that comes next, or None where another one does."""
        at = []
        for one in self.fold(character):
            space = one.isspace()
            if not space:
                self.used = self._past_space()
            come = self.key[self.used][0] if self.used < len(self.key) else ""
            if come == one or (space and come.isspace()):
                at.append(self.key[self.used][1])
                self.used += 1
                self.here = (at[-1] + 1, at[-1] + 1)
            elif not space:
                return None
        return (at[0], at[-1] + 1) if at else self.here

    def at_end(self) -> bool:
        """Whether nothing is left but white space."""
        return self._past_space() == len(self.key)

    def _past_space(self) -> int:
        at = self.used
        while at < len(self.key) and self.key[at][0].isspace():
            at += 1
        return at

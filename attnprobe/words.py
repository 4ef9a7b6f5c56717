"""Tokens as a person reads them, and the words that they make up.

A text is cut at the word boundaries of Unicode's UAX #29, as `regex` finds them, with four rules
of our own on top:

- A URL (`https://…`, `www.…`) and an e-mail address are one word, without the mark that ends the
  sentence after them.
- Single letters each with a full stop are one word: `U.S.`, `e.g.`, `J.R.R.`
- White space is a word of its own only where tokens hold nothing else, and then a run of it is one
  word. The one space before a word belongs to the word, also where it has a token to itself.
- A special token written in the text is cut out first.

Then words that share a token are one word, for a token cannot be divided: where GPT-2 has one token
for `!!!` or `://`, that is one word, and three for a tokenizer that has one for each mark.

What follows from UAX #29: `don't`, `l'homme`, `3.14`, `1,000`, `foo_bar`, `a.b` are one word;
punctuation and symbols stand alone, so `50%` is `50` and `%`, `$5` is `$` and `5`, and `well-known`
is three words; an emoji is one with its joiners, skin tone and variation selector, and so is a
flag; combining marks stay with their letter. A Chinese character and a hiragana letter is each a
word, a run of katakana is one, and so are Korean letters between spaces. Thai, Lao, Khmer and
Burmese, which only a dictionary could part, are cut into written characters (a letter with its
marks). A token that holds several of these makes one word of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import regex
from transformers import PreTrainedTokenizerBase

from attnprobe.errors import InputError
from attnprobe.spans import SPACE_MARKS, Span, Spans, locate

Kind = Literal["word", "space", "special"]
By = Literal["token", "word"]

# Each alternative ends where UAX #29 has a boundary. Possessive runs and look-behinds keep the
# search linear in the text. The first two are most of a text, and the quickest to find.
_SEGMENT = regex.compile(
    r"""
      [\s\x1c-\x1f]+
    | [A-Za-z]++ (?=\s)
    | (?: (?<![A-Za-z0-9+.-]) [A-Za-z] [A-Za-z0-9+.-]*+ :// | (?<!\w) www\. )   # a URL
          [\p{L}\p{M}\p{N}\-._~:/?\#\[\]@!$&'()*+,;=%]* [\p{L}\p{M}\p{N}/\#=&~%+\-$*@_] \b
    | (?<![\w.+-]) [\w.+-]++ @ [\w-]++ (?: \. [\w-]++ )+ \b                     # an e-mail address
    | (?<!\w) (?: \p{L}\p{M}*+ \. ){2,} \b                                      # U.S.
    | \p{RI}{2} [\p{WB=Extend}\p{WB=Format}\p{WB=ZWJ}]*+   # a flag; \b would count all before it
    | .+? \b
    """,
    regex.VERBOSE | regex.DOTALL | regex.WORD,
)

_UNSEEN = regex.compile(r"\p{Default_Ignorable_Code_Point}+")

_COMBINING = regex.compile(r"\p{M}")

_MARKS = {at: 0x2400 + at for at in range(0x20)} | {
    ord("\n"): "⏎",
    ord("\t"): "⇥",
    0x7F: "␡",
    **{at: f"<U+{at:04X}>" for at in range(0x80, 0xA0)},
    0x85: "⏎",
    0x2028: "⏎",
    0x2029: "⏎",
}


@dataclass(frozen=True)
class Word:
    """One word, run of white space, or special token.

    `span` tells where `text` stands in the text of its `Words`, as `(start, stop)` in characters
    from 0; it is empty for what is not written there, such as a `[CLS]` that the tokenizer added.
    """

    text: str
    """As written, without the white space around it; for kind `space`, the white space itself."""
    label: str
    """`text` for a table or picture: never empty, line breaks and tabs visible, and so is white
    space that stands alone: `␣`, `⏎`, `⇥`."""
    space: str
    """What stands before it in the text and belongs to no word: white space, dropped characters."""
    span: Span
    tokens: tuple[int, ...]
    """Its tokens' positions in the text's own token list, from 0, without gaps. A token that is the
    one space before the word is among them."""
    kind: Kind


@dataclass(frozen=True)
class Words:
    """A text by token and by word.

    Each token belongs to exactly one word. `word.space + word.text` over all words whose span is
    not empty, and then `tail`, is `text` again.
    """

    text: str
    """The text given; what the ids decode to where none was, or where they do not spell it."""
    tokens: tuple[str, ...]
    """Each token as read: the characters it stands for, without the white space around them."""
    shared: tuple[bool, ...]
    """Where a token holds only part of a character; its neighbours then show the same one."""
    words: tuple[Word, ...]
    word_of: tuple[int, ...]
    """Each token's word, as an index of `words`."""
    tail: str
    """What stands after the last word: white space or dropped characters, without tokens."""

    def labels(self, by: By) -> list[str]:
        """What tables and pictures call each token or word.

        Raises:
            InputError: an unknown `by`.
        """
        if by not in ("token", "word"):
            raise InputError(f"by must be 'token' or 'word', got {by!r}")
        return list(self.tokens) if by == "token" else [word.label for word in self.words]


def read(
    tokenizer: PreTrainedTokenizerBase | None,
    ids: Sequence[int],
    text: str | None = None,
    offsets: Sequence[Span] | None = None,
) -> Words:
    """The tokens and words of one text.

    Args:
        tokenizer: any of transformers', fast or slow; None for a bare model: each id is a word.
        ids: the token ids that the model was given, without padding.
        text: what they were made of. None takes what they decode to, special tokens included.
        offsets: the tokenizer's own for these ids of this text, where they are at hand: it then
            need not be asked again.

    Tokens show the characters of the text: no `Ġ`, `▁` or `##` but those written in it. Tokens that
    share a character all show it. White space alone shows as `␣`, `⏎`, `⇥`; an unknown token as the
    tokenizer writes it (`[UNK]`), while its word shows the text; an id that the tokenizer does not
    know as `<id 50300>`, and bytes that form no character as `<0xAC>`. Special tokens and unknown
    ids are each a word of kind `special`.

    Time and memory are linear in the text, but for a search (a logarithm) for each token.

    Raises:
        InputError: an id below 0 or above 32 bits; a text with a lone surrogate; a text without a
            tokenizer.
    """
    if tokenizer is None:
        if text is not None:
            raise InputError("without a tokenizer there is no telling which token is where in text")
        return _bare(ids)
    placed = locate(tokenizer, ids, text, offsets)
    trimmed = [_trimmed(placed.text, place) for place in placed.places]
    tokens = tuple(_token(placed, at, place) for at, place in enumerate(trimmed))
    words = _words(placed, trimmed, tokens)
    end = max((word.span[1] for word in words if word.span[0] < word.span[1]), default=0)
    return Words(
        text=placed.text,
        tokens=tokens,
        shared=_shared(trimmed, placed),
        words=words,
        word_of=tuple(at for at, word in enumerate(words) for _ in word.tokens),
        tail=placed.text[end:],
    )


def visible(text: str) -> str:
    """Text in one line: line breaks, tabs and control characters as marks.

    White space alone becomes marks too (`␣`), characters that are never seen, alone, their code
    points (`<U+200D>`), and a combining mark without its letter stands on a circle.
    """
    if text.isascii() and text.isprintable() and not text.isspace():
        return text  # as most are
    marked = text.translate(_MARKS)
    if text.isspace():
        return "".join("␣" if one.isspace() else one for one in marked)
    if _UNSEEN.fullmatch(text):
        return "".join(f"<U+{ord(one):04X}>" for one in text)
    return f"◌{marked}" if _COMBINING.match(text) else marked


def _bare(ids: Sequence[int]) -> Words:
    words = []
    at = 0
    for number, id_ in enumerate(ids):
        name = str(int(id_))
        space = " " if number else ""
        start = at + len(space)
        at = start + len(name)
        words.append(Word(name, name, space, (start, at), (number,), "word"))
    tokens = tuple(word.text for word in words)
    alone = (False,) * len(tokens)
    return Words(" ".join(tokens), tokens, alone, tuple(words), tuple(range(len(tokens))), "")


def _trimmed(text: str, place: Span) -> Span:
    """The place without the white space at its ends, unless there is nothing else."""
    start, stop = place
    held = text[start:stop]
    size = len(held.strip())
    if not size or size == len(held):
        return place
    start += len(held) - len(held.lstrip())
    return start, start + size


def _token(placed: Spans, at: int, place: Span) -> str:
    name = placed.names[at]
    if placed.special[at] or placed.unknown[at]:
        return name
    if place[0] < place[1]:
        return visible(placed.text[slice(*place)])
    return visible(name.strip(SPACE_MARKS).removeprefix("##")) or "␣"


def _shared(places: list[Span], placed: Spans) -> tuple[bool, ...]:
    """Tokens whose places overlap, and those that hold a part of a character by themselves."""
    shared = list(placed.partial)
    before = None
    for at, (start, stop) in enumerate(places):
        if start == stop:
            continue
        if before is not None and places[before][1] > start:
            shared[before] = shared[at] = True
        before = at
    return tuple(shared)


# Words


@dataclass(slots=True)
class _Group:
    """Tokens that will be one word, and the segments they reach over."""

    tokens: list[int]
    kind: Kind
    first: int = -1
    """A segment's index; -1 for tokens that stand for no text."""
    last: int = -1


def _words(placed: Spans, places: list[Span], tokens: tuple[str, ...]) -> tuple[Word, ...]:
    segments = list(_segments(placed.text, places, placed.special))
    words = []
    end = 0
    groups = _groups(placed, places, segments)
    _give_spaces(groups, placed.text, places)
    for group in groups:
        if not group.tokens:
            continue
        if group.kind == "word" and group.first >= 0:
            start, stop = segments[group.first][0], segments[group.last][1]
        else:
            start, stop = places[group.tokens[0]][0], places[group.tokens[-1]][1]
        text = placed.text[start:stop]
        label = visible(text) or "".join(tokens[at] for at in group.tokens)
        if group.kind == "special" and not text:
            text = label
        space = ""
        if start < stop:
            space, end = placed.text[end:start], stop
        words.append(Word(text, label, space, (start, stop), tuple(group.tokens), group.kind))
    return tuple(words)


def _segments(text: str, places: list[Span], special: tuple[bool, ...]) -> Iterator[Span]:
    """The stretches of the text between boundaries, special tokens left out."""
    # A special token that is not written in the text parts nothing.
    cuts = [
        place for place, cut in zip(places, special, strict=True) if cut and place[0] < place[1]
    ]
    begin = 0
    for start, stop in [*cuts, (len(text), len(text))]:
        for match in _SEGMENT.finditer(text[begin:start]):
            left, right = match.span()
            yield begin + left, begin + right
        begin = stop


def _groups(placed: Spans, places: list[Span], segments: list[Span]) -> list[_Group]:
    """Tokens in groups: those whose segments touch are together, with all that lies between."""
    starts = [start for start, _ in segments]
    groups: list[_Group] = []
    for at, (start, stop) in enumerate(places):
        if placed.special[at]:
            groups.append(_Group([at], "special"))
            continue
        held = placed.text[start:stop]
        blank = held.isspace() if held else not placed.names[at].strip(SPACE_MARKS + " ")
        first = last = -1
        if held:
            first = last = bisect_right(starts, start) - 1
            if stop > segments[first][1]:
                last = bisect_right(starts, stop - 1) - 1
        _add(groups, _Group([at], "space" if blank else "word", first, last))
    return groups


def _give_spaces(groups: list[_Group], text: str, places: list[Span]) -> None:
    """Move a token that is the one space before a word to that word.

    Most tokens hold the space before them, and where the vocabulary lacks such a one, the space
    that stands alone is still part of what comes next. So is the `▁` put before a text.
    """
    for group, after in pairwise(groups):
        if group.kind == "space" and after.kind == "word":
            start, stop = places[group.tokens[-1]]
            if places[after.tokens[0]][0] == stop and text[start:stop] in ("", " "):
                after.tokens.insert(0, group.tokens.pop())


def _add(groups: list[_Group], new: _Group) -> None:
    """Put a group at the end, together with those before it that share a segment with it."""
    while new.first >= 0:
        # Tokens without text may stand in between; a special token parts words.
        at = len(groups) - 1
        while at >= 0 and groups[at].first < 0 and groups[at].kind != "special":
            at -= 1
        if at < 0 or groups[at].last < new.first:
            break
        earliest, *between = groups[at:]
        del groups[at:]
        for group in (*between, new):
            earliest.tokens += group.tokens
        earliest.first = min(earliest.first, new.first)
        earliest.last = max(earliest.last, new.last)
        if new.kind == "word":
            earliest.kind = "word"
        new = earliest
    groups.append(new)

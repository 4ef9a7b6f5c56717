"""A stretch of a long text, with what stands before and after it folded into one word each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.recompute import Attention, Shown
from attnprobe.records import Capture, whole
from attnprobe.words import Word, Words

Span = tuple[int, int] | None
"""(start, stop): a text's words from `start`, counted from 0, to before `stop`. None: the whole."""

_ROWS = 512  # of what is folded, at a time


@dataclass(frozen=True, eq=False)
class Stretch:
    """The words of one text that are shown, or all of them.

    To what stands before goes the sum of what its tokens get, so that rows still sum to 1. In a
    causal model what stands after is left out, for no word of the stretch attends to it; in others
    it is folded as well. What is folded has a row, the mean of its tokens': see `to_words`.
    """

    cap: Capture
    text: int
    start: int  # in tokens
    stop: int
    words: Words
    before: int  # 1 where something is folded, else 0
    after: int
    title: str  # which words; empty for the whole text

    @classmethod
    def of(cls, cap: Capture, text: int, span: Span) -> Stretch:
        """The stretch from one word to before another.

        Raises:
            InputError: no such text, or no such words; a capture of cross attention.
        """
        words = cap.words_of(text)
        count, tokens = len(words.words), len(words.tokens)
        if span is None:
            return cls(cap, text, 0, tokens, words, 0, 0, "")
        if cap.part == "cross":
            raise InputError("cross attention is between two texts, of which span cuts none")
        if not isinstance(span, Sequence) or isinstance(span, str) or len(span) != 2:
            raise InputError(f"expected span=(start, stop), positions of words, got {span!r}")
        first, end = (whole(one, "span") for one in span)
        if not 0 <= first < end <= count:
            raise InputError(
                f"span {first}:{end} is out of range: the text has {count:,} words, numbered from "
                f"0, and a span goes from one of them to before a later one, at most {count}"
            )
        start, stop = words.words[first].tokens[0], words.words[end - 1].tokens[-1] + 1
        before, after = int(start > 0), int(stop < tokens and not cap.causal)
        folded = _folded(words, first, end, bool(before), bool(after))
        title = f"words {first:,} to {end - 1:,} of {count:,}"
        return cls(cap, text, start, stop, folded, before, after, title)

    def shown(self, layer: int, heads: list[int], *, cross: bool = False) -> Shown:
        """The weights of some heads of one layer, by token; `cross` as for `Attention.of`."""
        own = slice(self.start, self.stop)
        found = self._rows(layer, heads, own, cross)
        if not self.title:
            return found.shown
        rows = [self._fold(found.weights)]
        allowed = [self._fold(found.allowed)]
        if self.before:
            first = rows[0].new_zeros(len(heads), 1, rows[0].shape[-1])
            first[..., 0] = 1.0
            if found.terms.sinks is not None or not self.cap.causal:
                first = self._mean(layer, heads, slice(0, self.start))
            rows, allowed = [first, *rows], [first.amax(0) > 0, *allowed]
        if self.after:
            last = self._mean(layer, heads, slice(self.stop, self._tokens))
            rows, allowed = [*rows, last], [*allowed, last.amax(0) > 0]
        return Shown(
            torch.cat(rows, 1), torch.cat(allowed), self.words, self.words, found.terms.sinks
        )

    @property
    def _tokens(self) -> int:
        return len(self.cap.words_of(self.text).tokens)

    def _rows(self, layer: int, heads: list[int], rows: slice, cross: bool = False) -> Attention:
        return Attention.of(self.cap, layer, heads, self.text, only=rows, cross=cross, holds=4)

    def _fold(self, x: Tensor) -> Tensor:
        """From all keys to those shown: (…, T) -> (…, n), sums of numbers, or whether any is."""
        before, own, after = (
            x[..., : self.start],
            x[..., self.start : self.stop],
            x[..., self.stop :],
        )
        ends = [
            one.any(-1, keepdim=True) if x.dtype == torch.bool else one.sum(-1, keepdim=True)
            for one in (before, after)
        ]
        return torch.cat([*ends[: self.before], own, *ends[1 : 1 + self.after]], -1)

    def _mean(self, layer: int, heads: list[int], rows: slice) -> Tensor:
        """The mean of some rows, (h, 1, n), which are never held at once."""
        blocks = [
            slice(start, min(start + _ROWS, rows.stop))
            for start in range(rows.start, rows.stop, _ROWS)
        ]
        sums = [self._fold(self._rows(layer, heads, one).weights).sum(1) for one in blocks]
        mean: Tensor = torch.stack(sums).sum(0)[:, None] / (rows.stop - rows.start)
        return mean


def _folded(words: Words, first: int, end: int, before: bool, after: bool) -> Words:
    """The words from `first` to before `end`, with one that stands for those before and after."""
    start, stop = words.words[first].tokens[0], words.words[end - 1].tokens[-1] + 1
    shift = start - int(before)
    kept = [
        replace(one, tokens=tuple(token - shift for token in one.tokens))
        for one in words.words[first:end]
    ]
    tokens = list(words.tokens[start:stop])
    shared = list(words.shared[start:stop])
    if before:
        kept.insert(0, _stand_in(first, "word", "before", 0))
        tokens.insert(0, _called(start, "token", "before"))
        shared.insert(0, False)
    if after:
        kept.append(_stand_in(len(words.words) - end, "word", "after", len(tokens)))
        tokens.append(_called(len(words.tokens) - stop, "token", "after"))
        shared.append(False)
    word_of = tuple(at for at, one in enumerate(kept) for _ in one.tokens)
    return replace(
        words, tokens=tuple(tokens), shared=tuple(shared), words=tuple(kept), word_of=word_of
    )


def _stand_in(count: int, what: str, where: str, token: int) -> Word:
    label = _called(count, what, where)
    return Word(label, label, " ", (0, 0), (token,), "special")


def _called(count: int, what: str, where: str) -> str:
    return f"⋯ {count:,} {what}{'' if count == 1 else 's'} {where}"

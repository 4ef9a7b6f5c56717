"""Tokens and words as the labels of a picture: in one line, of a known width."""

from __future__ import annotations

import re
import unicodedata
from itertools import accumulate

from attnprobe.words import By, Words

# They would turn around what stands after them, so that a label shows what the text does not hold.
_OVERRIDES = re.compile("[\u202a-\u202e\u2066-\u2069]")


def labels_of(words: Words, by: By, columns: int) -> list[str]:
    """One text's tokens or words, none wider than some columns (see `columns_of`).

    Bidirectional overrides stand as their code points, `<U+202E>`.
    """
    return [_shortened(without_overrides(label), columns) for label in words.labels(by)]


def without_overrides(text: str) -> str:
    """Text with its bidirectional overrides as their code points."""
    return _OVERRIDES.sub(_code_point, text)


def columns_of(label: str) -> int:
    """How many columns of a terminal a label takes, with two for a Chinese character."""
    return sum(_columns(one) for one in label)


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _code_point(match: re.Match[str]) -> str:
    return f"<U+{ord(match[0]):04X}>"


def _shortened(label: str, columns: int) -> str:
    if columns_of(label) <= columns:
        return label
    ends = accumulate(_columns(one) for one in label)
    return f"{label[: sum(end < columns for end in ends)]}…"

"""Passages → texts of at most so many tokens, read by token, word and class, and put in batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import regex
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from attnprobe.errors import InputError
from attnprobe.heads import punctuation
from attnprobe.loading.encoding import Batch, padded
from attnprobe.records import LanguageModel
from attnprobe.spans import Span
from attnprobe.sweeping.shards import Passage, boundary
from attnprobe.words import Words, read

CLASSES = (
    *("first", "word", "capitalised", "continuation"),
    *("number", "punctuation", "symbol", "space", "special"),
)
"""The classes of tokens: of each, the first that holds.

| class | tokens |
|---|---|
| `first` | the text's first token, whatever it is: many heads rest there (a sink) |
| `special` | special tokens, and ids that the tokenizer does not know |
| `space` | white space alone |
| `punctuation` | of a word of nothing but Unicode's punctuation (P) |
| `symbol` | of a word without letters and digits: `$`, `+`, an emoji |
| `number` | of a word with digits (N) and without letters |
| `continuation` | a later token of a word with letters |
| `capitalised` | the first token of a word that begins with an upper- or title-case letter |
| `word` | the first token of any other word |

They are told by Unicode's properties alone, so they hold for any language and need no tagger.
"""

STEP = 32
"""Texts are padded to a multiple of so many tokens. What a text is padded to so hangs on the text
alone, not on the batch it is in: kernels then round in the same way whatever the batch size."""

_PUNCTUATION = regex.compile(r"\p{P}+")
_LETTER, _DIGIT = regex.compile(r"\p{L}"), regex.compile(r"\p{N}")
_CAPITAL = regex.compile(r"\P{L}*[\p{Lu}\p{Lt}]")


@dataclass(frozen=True, eq=False)
class Text:
    """What the model is run on: a stretch of a passage, of T tokens.

    Attributes:
        name: what it is called where it is named.
        text: as written.
        ids: (T,) int64, as the tokenizer gives them, with the special tokens that it adds.
        words: how it is read.
        punctuation: (T,) bool, as `head_stats` has it.
        classes: (T,) the class of each token, as a number in `CLASSES`.
        ends: (T,) bool, where the last token of a word with letters or digits stands.
    """

    name: str
    text: str
    ids: Tensor
    words: Words
    punctuation: Tensor
    classes: Tensor
    ends: np.ndarray

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        text: str,
        ids: list[int],
        offsets: list[Span] | None,
    ) -> Text:
        """Read a text: what `cut` gives."""
        words = read(tokenizer, ids, text, offsets)
        marks = torch.tensor(punctuation(words))
        classes, ends = _classes(words)
        return cls(name, text, torch.tensor(ids), words, marks, classes, ends)

    @property
    def padded_to(self) -> int:
        """How many tokens it is padded to, where the model takes as many."""
        return -(-len(self.ids) // STEP) * STEP


def _classes(words: Words) -> tuple[Tensor, np.ndarray]:
    """The class of each token, and which are the last of a word with letters or digits."""
    found = [0] * len(words.tokens)
    ends = np.zeros(len(found), bool)
    number = {name: at for at, name in enumerate(CLASSES)}
    for word in words.words:
        first, later = _kinds(word.text) if word.kind == "word" else (word.kind, word.kind)
        ends[word.tokens[-1]] = later in ("continuation", "number")
        for at in word.tokens:
            found[at] = number[later]
        found[word.tokens[0]] = number[first]
    found[0] = number["first"]
    return torch.tensor(found), ends


def _kinds(text: str) -> tuple[str, str]:
    """The class of a word's first token, and of its others."""
    if text.islower():  # most words
        return "word", "continuation"
    if _LETTER.search(text):
        return "capitalised" if _CAPITAL.match(text) else "word", "continuation"
    if _DIGIT.search(text):
        return "number", "number"
    kind = "punctuation" if _PUNCTUATION.fullmatch(text) else "symbol"
    return kind, kind


def cut(
    tokenizer: PreTrainedTokenizerBase, passage: Passage, tokens: int
) -> Iterator[tuple[str, str, list[int], list[Span] | None]]:
    """Cut a passage into texts of at most `tokens` tokens: their names, texts, ids and, of a fast
    tokenizer, offsets.

    A text is about as long as it may be, and ends before white space where there is some.
    """
    left, number = passage.text, 0
    by_token = 4.0  # characters, to begin with
    while left:
        end, ids, offsets = _longest(tokenizer, left, tokens, by_token)
        text, left = left[:end], left[end:]
        by_token = end / max(len(ids), 1)
        if ids and not text.isspace():
            yield f"{passage.name}, text {number}" if number else passage.name, text, ids, offsets
            number += 1


def _longest(
    tokenizer: PreTrainedTokenizerBase, left: str, tokens: int, by_token: float
) -> tuple[int, list[int], list[Span] | None]:
    """How long a beginning of at most `tokens` tokens, and at least nine in ten of them where a few
    attempts find it, is, and its ids and offsets.

    Raises:
        InputError: one character is more.
    """
    fits: tuple[int, list[int], list[Span] | None] = (0, [], None)
    fast = getattr(tokenizer, "is_fast", False)
    above = len(left) + 1  # too long
    guess = max(int(0.96 * tokens * by_token), 1)  # most fit at once
    for attempt in count():
        end = len(left) if guess >= len(left) else boundary(left, guess, paragraphs=False)
        if end <= fits[0] or (fits[0] and attempt > 5):
            break
        encoded = tokenizer(left[:end], return_offsets_mapping=fast, verbose=False)
        ids = list(encoded["input_ids"])
        if len(ids) > tokens:
            above = end
            if end == 1:
                raise InputError(f"tokens={tokens}, and {left[0]!r} alone is {len(ids)}: give more")
        else:
            fits = end, ids, encoded.get("offset_mapping")
            if end == len(left) or len(ids) > 0.9 * tokens:
                break
        guess = int(0.97 * end * tokens / max(len(ids), 1))
        guess = max(min(guess, above - 1), 1)
    return fits


def batches(texts: Sequence[Text], size: int) -> Iterator[list[Text]]:
    """Texts that are padded to one length, the longest first, at most `size` at a time."""
    by_length: dict[int, list[Text]] = {}
    for text in texts:
        by_length.setdefault(text.padded_to, []).append(text)
    for _, same in sorted(by_length.items(), reverse=True):
        for start in range(0, len(same), size):
            yield same[start : start + size]


def batch_of(lm: LanguageModel, texts: Iterable[Text], tokens: int) -> Batch:
    """Texts of one padded length, filled up on the right: what a model's forward takes."""
    several = list(texts)
    return padded(
        lm,
        [text.ids.tolist() for text in several],
        tuple(text.text for text in several),
        tuple(text.words for text in several),
        "right",
        max(min(text.padded_to, tokens) for text in several),
    )

"""A next word, as a person writes it → the one token that stands for it."""

from __future__ import annotations

from dataclasses import dataclass

import regex
from transformers import PreTrainedTokenizerBase

from attnprobe.errors import InputError
from attnprobe.records import whole
from attnprobe.spans import refuse_surrogates

_SPACED = regex.compile(
    r"[[\p{L}\p{N}]--[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]",
    regex.V1,
)
"""What a word begins with before which people write a space."""

_OPEN = regex.compile(r"[\s\p{Ps}\p{Pi}]\Z")
"""What a text ends with behind which people write none."""


@dataclass(frozen=True)
class NextToken:
    """One token of the vocabulary: its id, and how it reads in a text."""

    id: int
    text: str

    def __str__(self) -> str:
        return f"{self.text!r} (id {self.id})" if self.text else f"id {self.id}"

    @property
    def word(self) -> str | int:
        """How it reads, or its id where there is no telling: what frames hold."""
        return self.text or self.id


def next_token(
    tokenizer: PreTrainedTokenizerBase | None, word: str | int, context: str, vocabulary: int
) -> NextToken:
    """The token that a text would go on with, if its next word were this.

    A word that begins with a letter or digit is taken with the space before it, where that is one
    token: "park" is " park", as in "the park". It is taken as it stands where it is one token only
    so; where it begins with white space itself, or with anything but a letter or digit; where
    the text ends with white space or an opening bracket; and in scripts without spaces.

    Args:
        tokenizer: the model's; None where it has none.
        word: the word, or a token id.
        context: the text that goes on.
        vocabulary: how many ids the model has logits for.

    Raises:
        InputError: an id that the model has no logit for; a word that is not one token (the message
            shows its tokens); a word without a tokenizer.
    """
    if not isinstance(word, str):
        number = whole(word, "a token id")
        if not 0 <= number < vocabulary:
            raise InputError(
                f"token id {number} is out of range: the model has 0 to {vocabulary - 1}"
            )
        return NextToken(number, "" if tokenizer is None else _reading(tokenizer, number))
    if tokenizer is None:
        raise InputError(f"a bare model has no word {word!r}: give its token id, a whole number")
    if not word:
        raise InputError("the next word is empty: give a word, or a token id")
    refuse_surrogates(word)
    spaced = _SPACED.match(word) is not None and not _OPEN.search(context)
    readings = [f" {word}", word] if spaced else [word]
    tokens = {reading: _tokens(tokenizer, reading) for reading in readings}
    for reading, ids in tokens.items():
        if len(ids) == 1 and ids[0] < vocabulary and _knows(tokenizer, ids[0], reading):
            return NextToken(ids[0], reading)
    shown = " or ".join(
        " + ".join(str(NextToken(one, _reading(tokenizer, one))) for one in ids)
        for ids in tokens.values()
    )
    raise InputError(
        f"{word!r} is not one token here but {shown}, and a logit is of one: give one of them, as "
        "text or as its id"
    )


def _tokens(tokenizer: PreTrainedTokenizerBase, piece: str) -> list[int]:
    """The ids of a piece of text as they are within a text.

    Behind a line break, with which no tokenizer merges a word: some put a space of their own before
    what begins a text.
    """
    before, both = (
        list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        for text in ("\n", f"\n{piece}")
    )
    if both[: len(before)] == before:
        return both[len(before) :]
    return list(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])


def _reading(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """How one token reads within a text, with the space before it, if it has one."""
    before = list(tokenizer("\n", add_special_tokens=False, verbose=False)["input_ids"])
    return str(tokenizer.decode([*before, token])).removeprefix(str(tokenizer.decode(before)))


def _knows(tokenizer: PreTrainedTokenizerBase, token: int, reading: str) -> bool:
    return bool(token != tokenizer.unk_token_id or reading == tokenizer.unk_token)

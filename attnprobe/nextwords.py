"""A next word, as a person writes it → the token id that a model has a logit for."""

from __future__ import annotations

from attnprobe.errors import InputError
from attnprobe.records import LanguageModel, whole
from attnprobe.spans import refuse_surrogates


def next_word(lm: LanguageModel, word: str | int) -> int:
    """The id of the one token that stands for a next word.

    A word is taken with the space before it where that is one token, else as it stands: "park" is
    " park", as in "the park". One that begins with white space is taken as it stands.

    Args:
        lm: the model, with its tokenizer.
        word: the word, or a token id, which needs no tokenizer.

    Raises:
        InputError: a word of several tokens (the message shows them) or of none; a word without a
            tokenizer; an id outside the vocabulary.
    """
    vocabulary = getattr(getattr(lm.model, "config", None), "vocab_size", None)
    if not isinstance(word, str):
        number = whole(word, "a token id")
        if number < 0 or (vocabulary is not None and number >= vocabulary):
            raise InputError(
                f"token id {number} is out of range: the model's vocabulary has ids 0 to "
                f"{'…' if vocabulary is None else vocabulary - 1}"
            )
        return number
    if lm.tokenizer is None:
        raise InputError(f"a bare model knows no word {word!r}: give its token id")
    if not word:
        raise InputError("the next word is empty: give a word, or a token id")
    refuse_surrogates(word)
    readings = [word] if word[0].isspace() else [f" {word}", word]
    read = [
        lm.tokenizer(one, add_special_tokens=False, verbose=False)["input_ids"] for one in readings
    ]
    for ids in read:
        if len(ids) == 1 and ids[0] != lm.tokenizer.unk_token_id:
            return int(ids[0])
    shown = " + ".join(f"{lm.tokenizer.decode([one])!r} ({one})" for one in read[0])
    raise InputError(
        f"{word!r} is not one token but {shown or 'none'}, and a logit is of one: give one of "
        "them, as text or as its id"
    )

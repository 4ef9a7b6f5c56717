"""The weights and scores of a capture, computed from query and key when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.formula import scores as dot_products
from attnprobe.formula import tiles
from attnprobe.masks import MaskRule
from attnprobe.records import AttentionCall, Capture
from attnprobe.words import Words

By = Literal["token", "word"]
Which = int | Sequence[int] | None
"""One layer or head, several, or all of them."""


def weights(
    cap: Capture, layer: int, head: int | None = None, *, by: By = "token", text: int = 0
) -> Tensor:
    """The attention weights of one layer, over one text's own tokens or words.

    Args:
        cap: what `capture` returned.
        layer: from 0.
        head: from 0; None for all.
        by: "token", or "word": see `to_words`.
        text: which text of a batch.

    Returns:
        (T, S) float64, or (H, T, S) for all heads; T and S are the text's tokens, without padding,
        or its words. Rows sum to 1, and the future is exactly 0 where the model is causal.

    Raises:
        InputError: layer, head or text out of range (the message says the range); an unknown `by`.
    """
    heads = chosen(head, cap.call(layer).heads, "head")
    found = Attention.of(cap, layer, heads, text).weights
    if by == "word":
        found = to_words(found, cap.words_of(text))
    elif by != "token":
        raise InputError(f"by must be 'token' or 'word', got {by!r}")
    return found if head is None else found[0]


def scores(cap: Capture, layer: int, head: int | None = None, *, text: int = 0) -> Tensor:
    """The scores of one layer by token, scaled and masked with -inf; as `weights` otherwise."""
    heads = chosen(head, cap.call(layer).heads, "head")
    found = Attention.of(cap, layer, heads, text)
    masked = found.scores.masked_fill(~found.allowed, -torch.inf)
    return masked if head is None else masked[0]


def to_words(by_token: Tensor, words: Words) -> Tensor:
    """From tokens to words, both ways: (…, T, T) -> (…, N, N).

    From a query word to a key word goes the mean, over the query word's tokens, of the sum over the
    key word's tokens (Clark, Khandelwal, Levy & Manning 2019, *What Does BERT Look At?*, section
    4.1): so rows still sum to 1. A word's weight on itself holds what its later tokens put on its
    earlier ones; what stands after the word stays exactly 0 in a causal model.
    """
    of = torch.tensor(words.word_of, device=by_token.device)
    count = len(words.words)
    lead, tokens = by_token.shape[:-2], by_token.shape[-1]
    by_key = by_token.new_zeros(*lead, tokens, count).index_add_(-1, of, by_token)
    by_both = by_token.new_zeros(*lead, count, count).index_add_(-2, of, by_key)
    return by_both / torch.bincount(of, minlength=count)[:, None]


def chosen(which: Which, count: int, what: str) -> list[int]:
    """The numbers that an argument names: one, several, or all of them for None.

    Raises:
        InputError: one of them is out of range, or there is none.
    """
    if which is None:
        which = range(count)
    numbers = [which] if isinstance(which, int | np.integer) else which
    if isinstance(numbers, str) or not isinstance(numbers, Sequence) or not numbers:
        raise InputError(f"expected a {what}, a list of them, or None for all; got {which!r}")
    for number in numbers:
        whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if not whole or not 0 <= number < count:
            raise InputError(
                f"{what} {number!r} is out of range: there are {count}, numbered 0 to {count - 1}"
            )
    return [int(number) for number in numbers]


class Attention:
    """Scores and weights of some heads of one layer among one text's own tokens, all float64.

    Attributes:
        query, key, value: (h, T, D or Dv): key and value of the head that serves each query head.
        allowed: (T, T) bool, where a query may attend.
        scores: (h, T, T), scaled, not masked.
        weights: (h, T, T).
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, scaling: float
    ) -> None:
        self.query, self.key, self.value = query.double(), key.double(), value.double()
        self.scaling = scaling
        self.allowed = rule.allowed(keys=rule.keys, device=query.device)[0, 0]
        self.scores = dot_products(query[None], key[None], scaling)[0]
        self.weights = torch.zeros_like(self.scores)
        for tile in tiles(query[None], key[None], value[None], rule, scaling):
            self.weights[:, tile.start : tile.stop, : tile.weights.shape[-1]] = tile.weights[0]

    @classmethod
    def of(cls, cap: Capture, layer: int, heads: Sequence[int], text: int) -> Attention:
        """Some heads of one layer of a capture, over one text.

        Raises:
            InputError: layer or text out of range; no rule for the mask; a term that the formula
                does not hold.
        """
        call = cap.call(layer)
        at = cap.positions(text)
        if call.expected_mask is None:
            raise InputError("the mask was given whole by the caller: it follows no known rule")
        if call.terms:
            raise InputError(
                f"the formula here has no {', '.join(call.terms)}: the weights would be wrong"
            )
        # Padding is at either end: a text's tokens are one stretch, and its diagonal stays one.
        stretch = slice(int(at[0]), int(at[-1]) + 1)
        key_heads = key_heads_of(call, heads)
        return cls(
            call.query[text, list(heads), stretch],
            call.key[text, key_heads, stretch],
            call.value[text, key_heads, stretch],
            call.expected_mask.within(len(at)),
            call.expected_scaling,
        )


def key_heads_of(call: AttentionCall, heads: Sequence[int]) -> list[int]:
    """The key/value head that serves each of some heads: each serves H/Hkv in a row."""
    return [head // (call.heads // call.key.shape[1]) for head in heads]

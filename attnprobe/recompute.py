"""The weights and scores of a capture, computed from query and key when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnprobe.checking.basis import basis_of
from attnprobe.errors import InputError
from attnprobe.formula import capped
from attnprobe.formula import scores as dot_products
from attnprobe.masks import Rule
from attnprobe.memory import need
from attnprobe.outputs import weights as softmax_weights
from attnprobe.records import AttentionCall, Capture, captured, several, whole
from attnprobe.terms import Terms
from attnprobe.words import By, Words

Which = int | Sequence[int] | None
"""One layer or head, several, or all of them."""


def weights(
    cap: Capture, layer: int, head: Which = None, *, by: By = "token", text: int = 0
) -> Tensor:
    """The attention weights of one layer, over one text's own tokens or words.

    Args:
        cap: what `capture` returned.
        layer: from 0.
        head: from 0; one, several, or None for all.
        by: "token", or "word": see `to_words`.
        text: which text of a batch.

    Returns:
        (T, S) float64 for one head, else (H, T, S); T and S are the text's tokens, without padding,
        or its words. Rows sum to 1, and the future is exactly 0 where the model is causal.

    Raises:
        InputError: layer, head or text out of range (the message says the range); an unknown `by`;
            a model that does not compute the formula in this layer, so that the weights would not
            be its own (the message says why).
    """
    heads = chosen(head, captured(cap).call(layer).heads, "head")
    holds = 1.3 if by == "token" else 4
    found, _ = Attention.of(cap, layer, heads, text, cross=True, holds=holds).shown.by(by)
    return found if head is None or several(head) else found[0]


def scores(cap: Capture, layer: int, head: Which = None, *, text: int = 0) -> Tensor:
    """The scores of one layer by token, scaled and masked with -inf; as `weights` otherwise."""
    heads = chosen(head, captured(cap).call(layer).heads, "head")
    found = Attention.of(cap, layer, heads, text, cross=True, holds=3)
    masked = found.scores.masked_fill(~found.allowed, -torch.inf)
    return masked if head is None or several(head) else masked[0]


def to_words(by_token: Tensor, words: Words, key_words: Words | None = None) -> Tensor:
    """From tokens to words, both ways: (…, T, S) -> (…, N, M), with M = N but in cross attention.

    From a query word to a key word goes the mean, over the query word's tokens, of the sum over the
    key word's tokens (Clark, Khandelwal, Levy & Manning 2019, *What Does BERT Look At?*, section
    4.1): so rows still sum to 1. A word's weight on itself holds what its later tokens put on its
    earlier ones; what stands after the word stays exactly 0 in a causal model.
    """
    by_key = to_key_words(by_token, key_words or words)  # (…, T, M)
    of = torch.tensor(words.word_of, device=by_token.device)
    count, lead, keys = len(words.words), by_token.shape[:-2], by_key.shape[-1]
    by_both = by_token.new_zeros(*lead, count, keys).index_add_(-2, of, by_key)
    return by_both.div_(torch.bincount(of, minlength=count)[:, None])


def to_key_words(by_token: Tensor, words: Words) -> Tensor:
    """From key tokens to key words alone, by the sum: (…, S) -> (…, M)."""
    of = torch.tensor(words.word_of, device=by_token.device)
    return by_token.new_zeros(*by_token.shape[:-1], len(words.words)).index_add_(-1, of, by_token)


def chosen(which: Which, count: int, what: str) -> list[int]:
    """The numbers that an argument names: one, several, or all of them for None.

    Raises:
        InputError: one of them is out of range or no whole number, or there is none to choose.
    """
    if not count:
        raise InputError(f"this capture holds no {what} to choose from")
    if which is None:
        return list(range(count))
    some: Any = which if several(which) and not isinstance(which, str | bytes) else [which]
    numbers = [whole(one, what) for one in some]
    if not numbers:
        raise InputError(f"expected a {what}, a list of them, or None for all; got {which!r}")
    for number in numbers:
        if not 0 <= number < count:
            raise InputError(
                f"{what} {number} is out of range: there are {count}, numbered 0 to {count - 1}"
            )
    return numbers


@dataclass(frozen=True, eq=False)
class Shown:
    """Weights of some heads to show, (h, N, M) float64, where they may lie, and how it is read.

    Attributes:
        weights: (h, N, M), a row for each query.
        allowed: (N, M) bool.
        words, key_words: of the queries and of the keys.
        sinks: the model's, where it has some: then rows sum to less than 1.
    """

    weights: Tensor
    allowed: Tensor
    words: Words
    key_words: Words
    sinks: Tensor | None

    def by(self, by: By) -> tuple[Tensor, Tensor]:
        """`weights` and `allowed`, by token, as they are, or by word.

        Raises:
            InputError: an unknown `by`.
        """
        self.words.labels(by)
        if by == "token":
            return self.weights, self.allowed
        allowed = to_words(self.allowed.double(), self.words, self.key_words) > 0
        return to_words(self.weights, self.words, self.key_words), allowed


class Attention:
    """Scores and weights of some heads of one layer among one text's own tokens, all float64.

    Attributes:
        words: how the text is read.
        key_words: how what it attends to is read: the text itself, but in cross attention.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rule: Rule,
        scaling: float,
        terms: Terms,
        words: Words,
        key_words: Words,
        rows: slice = slice(None),
    ) -> None:
        """Of query (h, T, D), and key and value (g, S, D or Dv), of which each serves h/g heads."""
        self._operands, self._rule, self.key_words = (query, key, value), rule, key_words
        self.scaling, self.terms, self.words, self._rows = scaling, terms, words, rows

    @cached_property
    def weights(self) -> Tensor:
        """(h, T, T), or, where only some rows were asked for, (h, t, T); in cross attention, as the
        others, (h, T, S)."""
        query, key, _ = self._operands
        return softmax_weights(query, key, self._rule, self.scaling, self.terms, rows=self._rows)

    @cached_property
    def query(self) -> Tensor:
        """(h, T, D)."""
        return self._operands[0].double()

    @cached_property
    def key(self) -> Tensor:
        """Of the key head that serves each query head, (h, T, D)."""
        return self._by_head(self._operands[1])

    @cached_property
    def value(self) -> Tensor:
        """Of the key head that serves each query head, (h, T, Dv)."""
        return self._by_head(self._operands[2])

    def _by_head(self, x: Tensor) -> Tensor:
        return x.double().repeat_interleave(len(self._operands[0]) // len(x), 0)

    @cached_property
    def allowed(self) -> Tensor:
        """Where a query may attend, (T, T) bool, or (t, T) for the rows asked for."""
        query = self._operands[0]
        first, last, _ = self._rows.indices(query.shape[1])
        found = self._rule.allowed(first, last, keys=self._rule.keys, device=query.device)
        return found[0].any(0)

    @cached_property
    def raw(self) -> Tensor:
        """q·k, (h, T, T)."""
        return dot_products(self.query[None], self.key[None], 1.0)[0]

    @cached_property
    def scores(self) -> Tensor:
        """(h, T, T): scaled, capped and with bias where the model has these; not masked."""
        found = capped(self.raw * self.scaling, self.terms)
        bias = self.terms.bias_of(0, *found.shape[-2:])
        return found if bias is None else found + bias[0]

    @property
    def sink(self) -> Tensor | None:
        """What each query gives to the sink, (h, T); None where the model has none."""
        return None if self.terms.sinks is None else 1 - self.weights.sum(-1)

    def refuse_terms(self, view: str) -> None:
        """Refuse a model with further terms, for a view that computes the plain formula itself.

        Raises:
            InputError: it has a softcap, a bias or sinks.
        """
        more = [name for name, term in vars(self.terms).items() if term is not None]
        if more:
            raise InputError(
                f"{view} computes softmax(q·k·scaling + M) in the page, and this model adds "
                f"{' and '.join(more)}: use walkthrough, table or attention_view"
            )

    @property
    def shown(self) -> Shown:
        """What views show of it."""
        return Shown(self.weights, self.allowed, self.words, self.key_words, self.terms.sinks)

    @classmethod
    def of(
        cls,
        cap: Capture,
        layer: int,
        heads: Sequence[int],
        text: int,
        *,
        cross: bool = False,
        only: slice = slice(None),
        holds: float = 4,
        instead: str | None = None,
    ) -> Attention:
        """Some heads of one layer of a capture, over one text.

        Args:
            cap: what `capture` returned.
            layer, heads: from 0.
            text: which text of a batch.
            cross: whether who asks can show cross attention, whose keys are another text's.
            only: of which of the text's tokens, a stretch, the weights are asked for.
            holds: how many float64 numbers who asks will hold at a time for each head, query and
                key: the weights, and what is made of them.
            instead: what asks for less; fewer heads by default.

        Raises:
            InputError: layer or text out of range; more memory than `attnprobe.memory` allows; the
                model does not compute the formula there; cross attention for who cannot show it.
        """
        if cap.part == "cross" and not cross:
            raise InputError(
                "cross attention is between two texts: weights, scores, table, head_view and "
                "model_view show it"
            )
        call = cap.call(layer)
        at, keys_at = cap.positions(text), cap.key_positions(text)
        basis = basis_of(call)
        reason = basis.departure
        if call.key.shape[2] != (cap.source or cap).input_ids.shape[1]:
            reason = f"it attends to {call.key.shape[2]} keys, not to the tokens alone"
        if call.query.shape[2] != cap.input_ids.shape[1]:
            reason = f"it attends from {call.query.shape[2]} queries, not from the tokens alone"
        if reason:
            raise InputError(
                f"layer {layer}'s weights would not be the model's own: {reason}. See ap.verify"
            )
        # Padding is at either end: a text's tokens are one stretch, and its diagonal stays one.
        rows, keys = (slice(int(some[0]), int(some[-1]) + 1) for some in (at, keys_at))
        first, last, _ = only.indices(len(at))
        pairs = (last - first) * len(keys_at)
        if instead is None:
            instead = f"head={heads[0]}, or fewer heads" if len(heads) > 1 else ""
        need(
            8 * holds * (len(heads) + 0.5) * pairs,  # the half is for masks
            f"{len(heads)} head{'s' * (len(heads) > 1)} of layer {layer} over {last - first:,} × "
            f"{len(keys_at):,} tokens, and what is made of the weights,",
            " or ".join(filter(None, (instead, "a shorter text"))),
            call.query.device,
        )
        key_heads: list[int] | slice = slice(None)  # of all heads, none need be taken several times
        if list(heads) != list(range(call.heads)):
            key_heads = key_heads_of(call, heads)
        return cls(
            call.query[text, list(heads), rows],
            call.key[text, key_heads, keys],
            call.value[text, key_heads, keys],
            basis.rule.within(text, heads, rows, keys),
            call.expected_scaling,
            basis.terms.within(text, heads, rows, keys),
            cap.words_of(text),
            cap.key_words_of(text),
            only,
        )


def key_heads_of(call: AttentionCall, heads: Sequence[int]) -> list[int]:
    """The key/value head that serves each of some heads: each serves H/Hkv in a row."""
    return [head // (call.heads // call.key.shape[1]) for head in heads]

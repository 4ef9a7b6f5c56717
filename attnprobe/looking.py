"""Which words a word looks at, and which look at it: `attended` and `attended_by`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.projections import value_norms
from attnprobe.recompute import Attention, Which, chosen, to_key_words, to_words
from attnprobe.records import AttentionCall, Capture, captured, whole
from attnprobe.words import Words

How = Literal["mean", "max", "rollout"]
Weigh = Literal["weight", "value"]

_ONE_WORD = "how='mean' of one word, which asks for its rows alone"

_Group = tuple[list[int], list[int], np.ndarray]  # queries, keys, and their weights

_NAMES = {"weight": "weight", "value": "value_share"}  # of the column, by `weigh`


def attended(
    cap: Capture,
    word: str | int | None = None,
    *,
    top: int = 5,
    layer: Which = None,
    head: Which = None,
    how: How = "mean",
    weigh: Weigh = "weight",
    skip_first: bool = False,
    nth: int = 0,
    text: int = 0,
) -> pd.DataFrame:
    """Which words a word looks at, strongest first: itself, past ones, and, where the model is not
    causal, later ones.

    Args:
        cap: what `capture` returned.
        word: a word of the text, or its position among the words, from 0; None for each in turn.
        top: how many rows for each word.
        layer: from 0; one, several, or None for all.
        head: from 0; one, several, or None for all.
        how: over layers and heads, "mean", "max" (which need not sum to 1), or "rollout" (Abnar &
            Zuidema 2020, *Quantifying Attention Flow in Transformers*): the product, over all
            layers up to `layer` (one, or None for the last), of ½·(mean over heads) + ½·identity.
        weigh: "weight", or "value": each weight times ‖v·W_O‖, the length of what it brings, as
            shares that sum to 1 in each head (Kobayashi, Kuribayashi, Yokoi & Inui 2020,
            *Attention is Not Only a Weight*). A large weight on a tiny value moves nothing.
        skip_first: leave out the first token's word, which soaks up attention in GPT-2, and divide
            by what is left. The column is then called `weight_without_first`.
        nth: which occurrence of a word that the text holds several times, from 0.
        text: which text of a batch.

    Returns:
        Columns query_pos, query, key_pos, key, and weight, value_share or weight_without_first;
        positions count words.

    Raises:
        InputError: the word is not in the text (the message lists near ones); an option out of its
            range; "value" of a model whose W_O is not known; weights that would not be the model's
            own.
    """
    words = captured(cap).words_of(text)
    queries = _positions(words, word, nth)
    only = queries[0] if word is not None and how != "rollout" else None
    matrix = _combined(cap, layer, head, how, weigh, text, only)  # (N, N), or (1, N)
    name = _NAMES[weigh]
    first = words.word_of[0]
    if skip_first:
        matrix = matrix.clone()
        matrix[:, first] = 0.0
        matrix = matrix / matrix.sum(-1, keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)
        name = f"{name}_without_first"
    weights = matrix.cpu().numpy()
    groups = []
    for at in queries:
        seen = range(at + 1) if cap.causal else range(len(words.words))
        keys = [key for key in seen if not (skip_first and key == first)]
        groups.append(([at] * len(keys), keys, weights[at if only is None else 0, keys]))
    return _strongest(words, name, top, groups)


def attended_by(
    cap: Capture,
    word: str | int | None = None,
    *,
    top: int = 5,
    layer: Which = None,
    head: Which = None,
    how: How = "mean",
    weigh: Weigh = "weight",
    nth: int = 0,
    text: int = 0,
) -> pd.DataFrame:
    """Which words look at a word, strongest first: itself and later ones; as `attended` otherwise.

    Weights are those of each looking word's own row, so they need not sum to 1.
    """
    words = captured(cap).words_of(text)
    keys = _positions(words, word, nth)
    matrix = _combined(cap, layer, head, how, weigh, text)  # (N, N)
    weights = matrix.cpu().numpy()
    groups = []
    for at in keys:
        seeing = list(range(at if cap.causal else 0, len(words.words)))
        groups.append((seeing, [at] * len(seeing), weights[seeing, at]))
    return _strongest(words, _NAMES[weigh], top, groups)


def _positions(words: Words, word: str | int | None, nth: int) -> list[int]:
    return list(range(len(words.words))) if word is None else [position(words, word, nth)]


def position(words: Words, word: str | int, nth: int = 0) -> int:
    """A word's position among the words of its text.

    Raises:
        InputError: it is not there (the message lists near ones), or not nth times.
    """
    read = [one.label for one in words.words]
    if not isinstance(word, str):
        return chosen(whole(word, "a word's position"), len(read), "word")[0]
    nth = whole(nth, "nth")
    asked = {word, word.strip()} - {""}  # as it stands in the text, or as tables show it
    found = [at for at, one in enumerate(words.words) if asked & {one.text, one.label}]
    if not found and word.isdecimal():  # on a command line, a position is text as well
        return chosen(int(word), len(read), "word")[0]
    if not found:
        near = difflib.get_close_matches(word.strip(), dict.fromkeys(read), n=5, cutoff=0.5)
        hint = f"near ones: {', '.join(near)}" if near else f"its words: {' | '.join(read[:20])}"
        hint += ". A position among the words, from 0, does as well"
        raise InputError(f"{word!r} is not a word of the text; {hint}")
    if not 0 <= nth < len(found):
        times = f"{len(found)} time{'' if len(found) == 1 else 's'}"
        raise InputError(f"{word!r} occurs {times}; nth counts from 0, got {nth}")
    return found[nth]


def _combined(
    cap: Capture,
    layer: Which,
    head: Which,
    how: How,
    weigh: Weigh,
    text: int,
    only: int | None = None,
) -> Tensor:
    """One matrix over words, (N, N), from those of the chosen layers and heads; of one word's row
    alone, (1, N), no other is computed."""
    if how not in ("mean", "max", "rollout"):
        raise InputError(f"how must be 'mean', 'max' or 'rollout', got {how!r}")
    if weigh not in tuple(_NAMES):  # which may be of any type, and have no hash
        raise InputError(f"weigh must be 'weight' or 'value', got {weigh!r}")
    words = cap.words_of(text)
    layers = chosen(layer, cap.layers, "layer")
    by_layer = [(one, chosen(head, cap.call(one).heads, "head")) for one in layers]
    if how == "rollout":
        if head is not None or weigh == "value":
            raise InputError("rollout mixes the weights of all heads: leave out head and weigh")
        if layer is not None and len(layers) != 1:
            raise InputError("rollout goes from the first layer to one: give one layer, or none")
        return to_words(_rollout(cap, layers[-1], text), words)
    total: Tensor | None = None
    for one, heads in by_layer:
        if only is None:
            by_head = to_words(_weighed(cap, one, heads, weigh, text), words)  # (h, N, N)
        else:
            tokens = words.words[only].tokens
            rows = slice(tokens[0], tokens[-1] + 1)
            by_token = _weighed(cap, one, heads, weigh, text, rows)  # (h, t, T)
            by_head = to_key_words(by_token, words).mean(1, keepdim=True)  # (h, 1, N)
        layers_own = by_head.amax(0) if how == "max" else by_head.mean(0) / len(layers)
        if total is None:
            total = layers_own
        else:
            total = torch.maximum(total, layers_own) if how == "max" else total + layers_own
    assert total is not None
    return total


def _weighed(
    cap: Capture,
    layer: int,
    heads: list[int],
    weigh: Weigh,
    text: int,
    rows: slice = slice(None),
) -> Tensor:
    """The weights of some heads, or the shares of what they bring, (h, T, T) or fewer rows."""
    attention = Attention.of(cap, layer, heads, text, only=rows, holds=5)
    if weigh == "weight":
        return attention.weights
    shares = value_shares(cap.call(layer), heads, attention)
    if isinstance(shares, str):
        raise InputError(f"weigh='value' needs W_O, but {shares}; use weigh='weight'")
    return shares


def value_shares(call: AttentionCall, heads: list[int], attention: Attention) -> Tensor | str:
    """Each weight times ‖v·W_O‖, as shares that sum to 1 in each row (or are 0), (h, T, T).

    Args:
        call: the attention call.
        heads: which heads.
        attention: those heads' weights and values.

    Returns:
        The shares; or, as text, why W_O is not known.
    """
    away = "the layer's weights are offloaded" if call.offloaded else ""
    norms = away or value_norms(call, heads, attention.value)  # (h, T)
    if isinstance(norms, str):
        return norms
    lengths = attention.weights * norms[:, None]  # (h, T, T)
    return lengths / lengths.sum(-1, keepdim=True).clamp(min=torch.finfo(lengths.dtype).tiny)


def _rollout(cap: Capture, last: int, text: int) -> Tensor:
    flow: Tensor | None = None
    for layer in range(last + 1):
        heads = chosen(None, cap.call(layer).heads, "head")
        mean = Attention.of(cap, layer, heads, text, holds=2, instead=_ONE_WORD).weights.mean(
            0
        )  # (T, T)
        step = (mean + torch.eye(len(mean), dtype=mean.dtype, device=mean.device)) / 2
        flow = step if flow is None else step @ flow
    assert flow is not None
    return flow


def _strongest(words: Words, name: str, top: int, groups: Iterable[_Group]) -> pd.DataFrame:
    """The rows of each group with the largest weights, in one frame."""
    top = whole(top, "top")
    if top < 1:
        raise InputError(f"top must be at least 1, got {top}")
    kept = []
    for group in groups:
        order = np.argsort(-group[2], kind="stable")[:top]
        kept.append([np.asarray(one)[order] for one in group])
    queries, keys, weights = (np.concatenate(one) for one in zip(*kept, strict=True))
    read = np.array([one.label for one in words.words], object)
    queries, keys = queries.astype(np.int64), keys.astype(np.int64)  # also where there is none
    return pd.DataFrame(
        {
            "query_pos": queries,
            "query": read[queries],
            "key_pos": keys,
            "key": read[keys],
            name: weights,
        }
    ).infer_objects()

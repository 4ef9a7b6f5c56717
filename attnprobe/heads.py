"""What each head does, in numbers: `head_stats`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import regex
import torch
from torch import Tensor

from attnprobe.looking import value_shares
from attnprobe.recompute import Attention, Which, chosen
from attnprobe.records import Capture, captured
from attnprobe.words import Words

MASSES = (
    *("first", "previous", "two_before", "same", "next"),
    *("punctuation", "duplicate", "induction"),
)
"""The kinds of keys that `head_stats` sums weights over."""

BASIC = ("entropy", "entropy_share", "largest", "distance", "distance_without_first")
"""What needs no kind of key."""

COUNTED = MASSES[-3:]
"""Those that some texts have no, or few, rows for: their rows are counted."""

DIAGONALS = {"previous": 1, "two_before": 2, "same": 0, "next": -1}
"""The masses on one key, so many tokens before the query."""

_PUNCTUATION = regex.compile(r"\p{P}+")


def head_stats(
    cap: Capture, layer: Which = None, head: Which = None, *, text: Which = None
) -> pd.DataFrame:
    """What each head does, by token: a row for each layer and head.

    A row of weights is one query token i of one text: a[j] ≥ 0 for the n keys j that it may attend
    to, summing to 1. Positions count the text's own tokens from 0; padding and masked keys are in
    no row. All rows of all chosen texts count alike, but for those that a column leaves out; a
    column without any row is NaN.

    | column | what it is: the mean over rows of … | rows |
    |---|---|---|
    | `rows` | (how many rows there are) | |
    | `entropy` | -Σ a[j]·ln a[j], in nats | all |
    | `entropy_share` | the same, of its maximum ln n | n > 1 |
    | `largest` | max a[j] | n > 1 |
    | `distance` | Σ a[j]·abs(i - j), in tokens | all |
    | `distance_without_first` | Σ a[j]·abs(i - j) / Σ a[j], over j > 0 | Σ a[j] > 0 over j > 0 |
    | the masses below | Σ a[j] over the keys named | may attend to such a key, and to another |
    | `value_…` | the same masses, of shares a[j]·‖v[j]·W_O‖ that sum to 1 | the same |
    | `…_rows` | (how many rows the mass before it has) | |
    | `variability` | see below | all |

    n is i + 1 in a causal model, at most the window where there is one, and the text's length in a
    bidirectional one. So the first row of a causal model, which sees itself only, has entropy and
    distance 0 and no mass.

    | mass | keys |
    |---|---|
    | `first` | j = 0; a sink, in many causal models (Xiao et al. 2024) |
    | `previous`, `two_before` | j = i - 1; j = i - 2 |
    | `same` | j = i |
    | `next` | j = i + 1: NaN in a causal model |
    | `punctuation` | tokens of nothing but Unicode's punctuation (P), special tokens left out |
    | `duplicate` | j < i with the token id of i (Wang et al. 2023) |
    | `induction` | 0 < j < i with the token id of i at j - 1 (Olsson et al. 2022) |

    In a bidirectional model, too, `duplicate` and `induction` are of earlier tokens only: what a
    row gives to later equal ones is in neither. `distance` adds both ways up.

    `variability` is Vig & Belinkov's (2019, *Analyzing the Structure of Attention in a Transformer
    Language Model*): how much weights hang on content rather than on position,

        Σ abs(a_x[i, j] - ā[i, j]) / (2 Σ a_x[i, j])

    over texts x and all i and j, with the mean ā over the texts that hold both positions; where
    only one does, i and j are left out. With K texts it goes from 0 (each position gets the same
    in every text) to 1 - 1/K. Of one text it is NaN.

    The entropy and the sum over punctuation are as in Clark, Khandelwal, Levy & Manning 2019,
    *What Does BERT Look At?*; the distance is Vig & Belinkov's; the lengths by value are Kobayashi,
    Kuribayashi, Yokoi & Inui's (2020, *Attention is Not Only a Weight*), scaled in each row to sum
    to 1.

    Of a capture made inside of `edit`, queries, keys and values are as changed, and these weights
    are computed from them by the unchanged formula.

    Args:
        cap: what `capture` returned.
        layer: from 0; one, several, or None for all.
        head: from 0; one, several, or None for all.
        text: which texts of a batch; one, several, or None for all.

    Returns:
        The columns layer, head, rows and those above: whole numbers int64, the rest float64.
        `frame.attrs["reasons"]` says why columns are NaN: under "value" where W_O is not known,
        under "variability" where there is one text. Weights are held for one layer and text at a
        time.

    Raises:
        InputError: a layer, head or text out of range; weights that would not be the model's own.
    """
    texts = chosen(text, len(captured(cap)), "text")
    read = [(one, _Tokens.of(cap, one)) for one in texts]
    reasons: dict[str, str] = {}
    parts = [
        _of_layer(cap, one, chosen(head, cap.call(one).heads, "head"), read, reasons)
        for one in chosen(layer, cap.layers, "layer")
    ]
    if len(texts) == 1:
        reasons["variability"] = "it compares texts, and there is one"
    frame = pd.concat(parts, ignore_index=True)
    frame.attrs["reasons"] = reasons
    return frame


@dataclass(frozen=True, eq=False)
class _Tokens:
    """What the kinds of keys of one text hang on: its T tokens' ids, and which are punctuation."""

    ids: Tensor
    punctuation: Tensor

    @classmethod
    def of(cls, cap: Capture, text: int) -> _Tokens:
        words = cap.words_of(text)
        ids = cap.input_ids[text, cap.positions(text)]
        return cls(ids, torch.tensor(punctuation(words), device=ids.device))

    def kinds(self) -> Iterator[tuple[str, Tensor]]:
        """For each mass, which keys j it is over for each query i, (T, T) bool."""
        at = torch.arange(len(self.ids), device=self.ids.device)
        back = at[:, None] - at  # i - j
        for name, distance in DIAGONALS.items():
            yield name, back == distance
        yield "first", (at == 0).expand_as(back)
        yield "punctuation", self.punctuation.expand_as(back)
        yield from zip(("duplicate", "induction"), copies(self.ids), strict=True)


def punctuation(words: Words) -> list[bool]:
    """Which tokens are of the kind `punctuation`."""
    return [
        _PUNCTUATION.fullmatch(token) is not None and words.words[word].kind != "special"
        for token, word in zip(words.tokens, words.word_of, strict=True)
    ]


def copies(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The keys of `duplicate` and of `induction` for each query: (…, T) -> (…, T, T) bool."""
    at = torch.arange(ids.shape[-1], device=ids.device)
    earlier = at < at[:, None]
    equal = (ids[..., :, None] == ids[..., None, :]) & earlier
    return equal, equal.roll(1, dims=-1) & earlier  # what rolls round has j = i


def with_a_choice(named: Tensor, open_: Tensor) -> Tensor:
    """The rows that count for a mass: of those that may attend to `named` keys of its kind, and to
    `open_` keys in all, those that may attend to such a key, and to another."""
    return (named > 0) & (named < open_)


class _Mean:
    """A mean over rows, head by head, as they come."""

    def __init__(self, heads: int) -> None:
        self.total = self.rows = torch.zeros(heads, dtype=torch.float64)

    def add(self, values: Tensor, counts: Tensor) -> None:
        """Values, (h, T), and which of them count, (T,) or (h, T) bool."""
        self.total = self.total.to(values) + values.where(counts, 0.0).sum(-1)
        self.rows = self.rows.to(values) + counts.expand_as(values).sum(-1)

    @property
    def mean(self) -> np.ndarray:
        """(h,); NaN without any row."""
        found: np.ndarray = (self.total / self.rows).cpu().numpy()
        return found

    @property
    def count(self) -> np.ndarray:
        """(h,) int64."""
        found: np.ndarray = self.rows.long().cpu().numpy()
        return found


def _of_layer(
    cap: Capture,
    layer: int,
    heads: list[int],
    read: Sequence[tuple[int, _Tokens]],
    reasons: dict[str, str],
) -> pd.DataFrame:
    """The rows of one layer; adds to `reasons` why columns of it are NaN."""
    names = [*BASIC, *MASSES, *(f"value_{name}" for name in MASSES)]
    means = {name: _Mean(len(heads)) for name in names}
    for text, tokens in read:
        attention = Attention.of(cap, layer, heads, text, holds=4)
        shares = value_shares(cap.call(layer), heads, attention)
        if isinstance(shares, str):
            reasons["value"] = shares
        for name, values, counts in _basic(attention):
            means[name].add(values, counts)
        for name, keys in tokens.kinds():
            counts = with_a_choice((keys & attention.allowed).sum(-1), attention.allowed.sum(-1))
            means[name].add(_mass(attention.weights, keys), counts)
            if not isinstance(shares, str):
                means[f"value_{name}"].add(_mass(shares, keys), counts)
    columns: dict[str, Any] = {"layer": layer, "head": heads, "rows": means["entropy"].count}
    for name in names:
        columns[name] = means[name].mean
        if name in COUNTED:
            columns[f"{name}_rows"] = means[name].count
    columns["variability"] = _variability(cap, layer, heads, [text for text, _ in read])
    return pd.DataFrame(columns)


def _basic(attention: Attention) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The columns `BASIC`: a name, a value for each row, (h, T), and which rows count, (T,)."""
    weights = attention.weights  # (h, T, T)
    keys = attention.allowed.sum(-1)  # (T,)
    every, several = keys > 0, keys > 1
    entropy = torch.special.entr(weights).sum(-1)  # (h, T)
    yield "entropy", entropy, every
    yield "entropy_share", entropy / keys.double().log(), several
    yield "largest", weights.amax(-1), several
    at = torch.arange(len(keys), device=keys.device)
    moved = weights * (at[:, None] - at).abs()
    yield "distance", moved.sum(-1), every
    rest = weights[..., 1:].sum(-1)
    yield "distance_without_first", moved[..., 1:].sum(-1) / rest, rest > 0


def _mass(weights: Tensor, keys: Tensor) -> Tensor:
    """Each row's sum over its keys of a kind: (h, T, T), (T, T) -> (h, T)."""
    return torch.einsum("hij,ij->hi", weights, keys.to(weights))


def _variability(cap: Capture, layer: int, heads: list[int], texts: list[int]) -> np.ndarray:
    """Vig & Belinkov's, (h,); texts are gone through twice, so that one is held at a time."""
    if len(texts) == 1:
        return np.full(len(heads), np.nan)
    compared = sorted(len(cap.positions(text)) for text in texts)[-2]  # what two texts hold

    def weights() -> Iterator[tuple[slice, Tensor]]:
        for text in texts:
            found = Attention.of(cap, layer, heads, text, holds=4).weights[:, :compared, :compared]
            yield slice(found.shape[-1]), found

    total = cap.calls[0].query.new_zeros(len(heads), compared, compared, dtype=torch.float64)
    held = torch.zeros_like(total[0])
    for part, found in weights():
        total[:, part, part] += found
        held[part, part] += 1
    mean = total / held
    apart = sum((found - mean[:, part, part]).abs().sum((1, 2)) for part, found in weights())
    assert isinstance(apart, Tensor)
    variability: np.ndarray = (apart / (2 * total.sum((1, 2)))).cpu().numpy()
    return variability

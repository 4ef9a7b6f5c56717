"""What the rows of a batch hang on beside the weights: M, the kinds of keys, which rows count.

All of it is the same in every layer of one mask, so it is made once a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnprobe.heads import BASIC, DIAGONALS, MASSES, copies, with_a_choice
from attnprobe.masks import MaskRule, Rule
from attnprobe.sweeping.texts import CLASSES, Text

HIDDEN = -1e30
"""Added to the score of a hidden key: exp is 0, and 0 times the score is 0, as with -inf it is not.
"""


PUNCTUATION, ALL = len(CLASSES), len(CLASSES) + 1
"""Which flags of a key, after those for its class, say that it is punctuation, and that it is
there."""

FLAGS = 16
"""How many flags there are, unused ones with them: products with 16 columns take a third of the
time of those with 11."""


@dataclass(frozen=True, eq=False)
class Reading:
    """The texts of a batch, filled up on the right: B texts, T tokens.

    Attributes:
        real: (B, T) bool, where a token stands.
        flags: (B, T, F) float32, of each key: one for its class, `PUNCTUATION`, `ALL`.
        classes: (B, T, C) float64, of each query: one for its class.
        copies: for `duplicate` and `induction` the text, query and key of each pair, (3, pairs),
            the texts in order, and the queries within a text.
    """

    texts: Sequence[Text]
    real: Tensor
    flags: Tensor
    classes: Tensor
    copies: dict[str, Tensor]

    @classmethod
    def of(cls, texts: Sequence[Text], padding: Tensor) -> Reading:
        """Of texts, and where their tokens stand in the batch, (B, T) bool."""
        device, length = padding.device, padding.shape[1]

        def filled(rows: list[Tensor], filler: int) -> Tensor:
            stretch = [torch.nn.functional.pad(rows[0], (0, length - len(rows[0])), value=filler)]
            return pad_sequence([*stretch, *rows[1:]], True, filler).to(device)

        one_hot = torch.nn.functional.one_hot(
            filled([one.classes for one in texts], len(CLASSES)), len(CLASSES) + 1
        )[..., :-1]
        marks = filled([one.punctuation.long() for one in texts], 0)
        flags = torch.cat([one_hot, marks[..., None], padding[..., None]], -1).float()
        ids = filled([one.ids for one in texts], -1)
        pairs = [(found & padding[:, :, None]).nonzero().T for found in copies(ids)]
        return cls(
            texts,
            padding,
            torch.nn.functional.pad(flags, (0, FLAGS - flags.shape[-1])),
            one_hot.double(),
            dict(zip(("duplicate", "induction"), pairs, strict=True)),
        )


@dataclass(frozen=True, eq=False)
class Copies:
    """The pairs of a query and an equal key, or the one after it, in a tile.

    Attributes:
        places: the texts, rows and keys, counted from the tile's first, (pairs,) each.
        rows: the rows, counted through the batch, (pairs,).
    """

    places: tuple[Tensor, Tensor, Tensor]
    rows: Tensor


class Plan:
    """A batch under one mask.

    Attributes:
        open: (B, H or 1, T) how many keys each row may attend to; 0 for padding.
        causal: whether no row reaches beyond itself.
    """

    def __init__(self, reading: Reading, rule: Rule, limit: int) -> None:
        """`limit` is the most tokens of any text of the corpus, N."""
        self.reading, self.limit = reading, limit
        self.length = reading.real.shape[1]
        if isinstance(rule, MaskRule) and rule.causal:
            # What fills up on the right stands after every token: causality hides it.
            rule = replace(rule, padding=None)
        self.rule = rule
        allowed = rule.allowed(keys=self.length, device=reading.real.device)
        self.causal = isinstance(rule, MaskRule) and rule.causal
        self._allowed = allowed & reading.real[:, None, :, None]  # (B, H or 1, T, T)
        self.open = self._allowed.sum(-1)
        self._added: dict[tuple[int, torch.dtype], Tensor] = {}
        self._copies: dict[tuple[int, ...], dict[str, Copies]] = {}

    def reach(self, stop: int) -> int:
        """How many keys the rows before `stop` can see at most."""
        return min(self.rule.reach(stop), self.length)

    def added(self, start: int, stop: int, dtype: torch.dtype) -> tuple[int, Tensor | None]:
        """M for some rows: from which key on, and (B or 1, H or 1, t, keys): 0, or `HIDDEN`."""
        first, reach = min(self.rule.open_to(start), self.reach(stop)), self.reach(stop)
        if first == reach:
            return first, None
        if (start, dtype) not in self._added:
            device = self.reading.real.device
            allowed = self.rule.allowed(start, stop, keys=reach, first=first, device=device)
            added = torch.zeros(allowed.shape, dtype=dtype, device=device)
            self._added[start, dtype] = added.masked_fill_(~allowed, HIDDEN)
        return first, self._added[start, dtype]

    def copies(self, texts: slice, start: int, stop: int) -> dict[str, Copies]:
        """`Reading.copies` of some texts and rows."""
        where = (texts.start, texts.stop, start, stop)
        if where not in self._copies:
            self._copies[where] = {
                kind: self._within(pairs, texts, start, stop)
                for kind, pairs in self.reading.copies.items()
            }
        return self._copies[where]

    def _within(self, pairs: Tensor, texts: slice, start: int, stop: int) -> Copies:
        text, row, key = pairs
        here = (texts.start <= text) & (text < texts.stop) & (start <= row) & (row < stop)
        text, row, key = text[here], row[here], key[here]
        return Copies((text - texts.start, row - start, key), text * self.length + row)

    @cached_property
    def counted(self) -> Tensor:
        """Which rows count for each of `BASIC` and `MASSES`, (S, B, H or 1, T) bool; for
        `distance_without_first`, those that may."""
        every, several = self.open > 0, self.open > 1
        basic = dict.fromkeys(BASIC, every) | {"entropy_share": several, "largest": several}
        masses = {name: with_a_choice(self._named(name), self.open) for name in MASSES}
        return torch.stack([*(basic[name] for name in BASIC), *(masses[name] for name in MASSES)])

    def _named(self, kind: str) -> Tensor:
        """How many keys of a kind each row may attend to, (B, H or 1, T)."""
        if kind == "first":
            return self._allowed[..., 0].long()
        if kind == "punctuation":
            return self._of_class[..., PUNCTUATION].long()
        named = torch.zeros_like(self.open)
        if kind in DIAGONALS:
            back = DIAGONALS[kind]
            rows = slice(max(back, 0), self.length + min(back, 0))
            named[..., rows] = self._allowed.diagonal(-back, -2, -1).long()
            return named
        text, query, key = self.reading.copies[kind]
        found = self._allowed[text, :, query, key].long()  # (pairs, H or 1)
        by_row = named.transpose(1, 2).flatten(0, 1)  # (B·T, H or 1)
        by_row = by_row.index_add(0, text * self.length + query, found)
        return by_row.view(len(named), self.length, -1).transpose(1, 2)

    @cached_property
    def _of_class(self) -> Tensor:
        """How many keys with each flag each row may attend to, (B, H or 1, T, F)."""
        return self._allowed.float() @ self.reading.flags[:, None]

    @cached_property
    def logs(self) -> Tensor:
        """ln of how many keys each row may attend to, (B, H or 1, T) float64; 1 for less than 2."""
        return torch.where(self.open > 1, self.open, math.e).double().log()

    @cached_property
    def cells(self) -> np.ndarray:
        """How many pairs of a row and a key that it may attend to there are at each distance, from
        a key N - 1 tokens before it to one as far after it, (H or 1, 2N - 1) int64."""
        by_place = self._allowed.sum(0).cpu().numpy()  # (H or 1, T, T)
        at = np.arange(self.length)
        where = (at - at[:, None] + self.limit - 1).ravel()  # j - i
        size = 2 * self.limit - 1
        counts = [np.bincount(where, one.ravel(), minlength=size) for one in by_place]
        return np.stack(counts).astype(np.int64)

    @cached_property
    def uniform(self) -> np.ndarray:
        """The sum over rows of the share of each class among the keys that they may attend to, by
        class of the query, (H or 1, C, C): the masses that uniform weights would give."""
        share = self._of_class[..., : len(CLASSES)].double() / self.open.clamp(min=1)[..., None]
        found: np.ndarray = torch.einsum("bhtk,btq->hqk", share, self.reading.classes).cpu().numpy()
        return found

    @cached_property
    def class_rows(self) -> np.ndarray:
        """How many rows are of each class, (H or 1, C) int64."""
        seen = (self.open > 0).double()
        rows: np.ndarray = torch.einsum("bht,btq->hq", seen, self.reading.classes).cpu().numpy()
        return rows.astype(np.int64)

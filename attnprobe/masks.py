"""M, the mask, built anew from facts: padding, causality, window, cache offset.

Pure tensors: nothing here knows transformers. A mask is kept as a rule and made a tile of rows at a
time, so that no (T, S) tensor need exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

MASKED_BELOW = -1e4
"""An additive mask entry at or below this hides its key.

Models write -inf, the dtype's lowest number (-65504 in float16), or, in old checkpoints, -10000.
exp(-10000) is 0 in every dtype up to float64.
"""


class Allowing(Protocol):
    """Which keys each query of a call may attend to."""

    def allowed(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        keys: int | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """See `MaskRule.allowed`."""


class Rule(Allowing, Protocol):
    """Which keys each query of a call may attend to: `MaskRule`, or `GivenMask`."""

    @property
    def keys(self) -> int:
        """S, the number of keys."""

    def allowed(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        keys: int | None = None,
        first: int = 0,
        device: torch.device | None = None,
    ) -> Tensor:
        """See `MaskRule.allowed`."""

    def reach(self, stop: int) -> int:
        """See `MaskRule.reach`."""

    def open_to(self, start: int) -> int:
        """See `MaskRule.open_to`."""

    def within(self, text: int, heads: Sequence[int], rows: slice, keys: slice) -> Rule:
        """The rule of some heads among one text's own tokens: stretches of queries and keys."""


@dataclass(frozen=True, eq=False)
class MaskRule:
    """Which keys each query may attend to.

    Query `i` stands at position `offset + i` among the keys. It may attend to key `j` if all hold:
    `padding[b, j]`; `j <= offset + i`, where `causal`; `j > offset + i - window`, where there is a
    window (so that a window of 1 is the word itself); `j <= offset + i + ahead`, where a window has
    two sides; and `i` and `j` stand in the same chunk, counted from a text's first token, where the
    attention is chunked.

    Attributes:
        queries: T, the number of queries.
        keys: S, the number of keys.
        causal: no query sees a later key.
        window: how many keys back a query sees, itself included; None for all.
        padding: (B, S) bool, True where a token stands; None where nothing is padded.
        offset: how many keys stand before the first query, as when a cache holds them.
        ahead: how many keys ahead a query sees at most; None for all.
        chunk: the size of a chunk; None where attention is not chunked.
    """

    queries: int
    keys: int
    causal: bool = True
    window: int | None = None
    padding: Tensor | None = None
    offset: int = 0
    ahead: int | None = None
    chunk: int | None = None

    def reach(self, stop: int) -> int:
        """How many keys, from the first, the queries before `stop` can see at most."""
        return min(self.keys, self.offset + stop) if self.causal else self.keys

    def open_to(self, start: int) -> int:
        """How many keys, from the first, every query from `start` on may attend to for sure: of
        these no mask need be made."""
        if self.padding is not None or (self.window, self.ahead, self.chunk) != (None, None, None):
            return 0
        return max(self.reach(start + 1), 0)

    def same_as(self, other: object) -> bool:
        """Whether another rule is this one, fact by fact: then no entry need be compared."""
        if not isinstance(other, MaskRule):
            return False
        mine, others = (replace(one, padding=None) for one in (self, other))
        if self.padding is None or other.padding is None:
            return vars(mine) == vars(others) and self.padding is other.padding
        return vars(mine) == vars(others) and torch.equal(self.padding, other.padding)

    def within(self, text: int, heads: Sequence[int], rows: slice, keys: slice) -> MaskRule:
        """The same rule among one text's own tokens, when padding and cache are left out."""
        queries, seen = rows.stop - rows.start, keys.stop - keys.start
        return replace(self, queries=queries, keys=seen, padding=None, offset=0)

    def allowed(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        keys: int | None = None,
        first: int = 0,
        device: torch.device | None = None,
    ) -> Tensor:
        """Rows `start` to `stop` of the mask, over the first `keys` keys: by default, those that
        the rows can reach; without those before `first`.

        Returns:
            (B or 1, 1, stop - start, keys - first) bool, True where a query may attend.
        """
        stop = self.queries if stop is None else stop
        keys = self.reach(stop) if keys is None else keys
        device = self.padding.device if self.padding is not None else device
        key_pos = torch.arange(first, keys, device=device)
        query_pos = torch.arange(start, stop, device=device)[:, None] + self.offset
        shape = (stop - start, keys - first)
        allowed = torch.ones(shape, dtype=torch.bool, device=key_pos.device)  # (t, K)
        if self.causal:
            allowed &= key_pos <= query_pos
        if self.window is not None:
            allowed &= key_pos > query_pos - self.window
        if self.ahead is not None:
            allowed &= key_pos <= query_pos + self.ahead
        by_text = allowed[None, None]  # (1, 1, t, K)
        if self.chunk is not None:
            begin = self._first_tokens(key_pos.device)  # (B or 1, 1, 1, 1)
            key_chunk, query_chunk = (
                (key_pos - begin) // self.chunk,
                (query_pos - begin) // self.chunk,
            )
            by_text = by_text & (key_chunk == query_chunk)
        if self.padding is None:
            return by_text
        return by_text & self.padding[:, None, None, first:keys]  # (B, 1, t, K)

    def _first_tokens(self, device: torch.device) -> Tensor:
        """Where each text's first token stands, (B or 1, 1, 1, 1)."""
        if self.padding is None:
            return torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        return self.padding.int().argmax(-1)[:, None, None, None]


@dataclass(frozen=True, eq=False)
class GivenMask:
    """A mask as a model passed it, where nothing is known that it could be built from.

    Attributes:
        mask: (B or 1, H or 1, T or 1, S), boolean (True: may attend) or additive.
        queries: T, the number of queries.
    """

    mask: Tensor
    queries: int

    @property
    def keys(self) -> int:
        """S, the number of keys."""
        return self.mask.shape[-1]

    def allowed(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        keys: int | None = None,
        first: int = 0,
        device: torch.device | None = None,
    ) -> Tensor:
        """As `MaskRule.allowed`, (B or 1, H or 1, stop - start, keys - first): by default over all
        keys."""
        stop = self.queries if stop is None else stop
        rows = self.mask if self.mask.shape[-2] == 1 else self.mask[:, :, start:stop]
        shown = rows[..., first:keys].expand(-1, -1, stop - start, -1)
        return shown if shown.dtype == torch.bool else shown > MASKED_BELOW

    def within(self, text: int, heads: Sequence[int], rows: slice, keys: slice) -> GivenMask:
        """The mask of some heads among one text's own tokens: stretches of queries and keys."""
        return GivenMask(part(self.mask, text, heads, rows, keys), rows.stop - rows.start)

    def reach(self, stop: int) -> int:
        """As `MaskRule.reach`: any of the keys."""
        return self.keys

    def open_to(self, start: int) -> int:
        """As `MaskRule.open_to`: of a mask that was given, nothing is sure."""
        return 0

    @property
    def bias(self) -> Tensor | None:
        """What an additive mask adds where it hides nothing; None if that is 0 everywhere."""
        if self.mask.dtype == torch.bool:
            return None
        seen = self.mask.masked_fill(self.mask <= MASKED_BELOW, 0.0)
        return seen if seen.any() else None


def part(mask: Tensor, text: int, heads: Sequence[int], rows: slice, keys: slice) -> Tensor:
    """Some heads and one text's own tokens of a mask or bias, (1, h or 1, t or 1, s).

    `mask` is (B or 1, H or 1, T or 1, S).
    """
    one = mask[text : text + 1] if mask.shape[0] > 1 else mask
    some = one[:, list(heads)] if one.shape[1] > 1 else one
    own = some[:, :, rows] if some.shape[2] > 1 else some
    return own[..., keys]


def additive(allowed: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """M as it stands in softmax(QKᵀ/√d_k + M)V: 0 where a query may attend, -inf elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(
        ~allowed, -torch.inf
    )


def disagreement(passed: Tensor, allowed: Tensor) -> Tensor:
    """Where a mask that a model passed differs from the rebuilt one, (B, H or 1, t, K) bool.

    Args:
        passed: boolean (True: may attend) or additive, broadcastable to `allowed`.
        allowed: what `MaskRule.allowed` gives.

    An additive entry that neither is 0 nor hides its key counts as a difference where the query
    may attend. Rows in which no key is allowed have no meaning and never differ.
    """
    if passed.dtype == torch.bool:
        differs = passed != allowed
    else:
        differs = torch.where(allowed, passed != 0, ~(passed <= MASKED_BELOW))
    return differs & allowed.any(-1, keepdim=True)

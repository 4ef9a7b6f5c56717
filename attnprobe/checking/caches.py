"""The `cache` check: what a cache gives back, against what the forward before it had.

The kernel is given this forward's own keys and values, and before them those that a cache kept.
These have to be, bit for bit, what the kernel of the same layer was given in the forward before:
a cache rounds nothing. It may leave out tokens from which a window has moved on (from the front),
and tokens that were taken back (from the end), and it may put the texts in another order, as beam
search does: then in the same order in every layer, keys and values alike.

Nothing is copied: what is compared are the keys and values that the calls hold anyway.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.checking.report import Row
from attnprobe.records import WRITTEN, AttentionCall, Cached

_UNSEEN = "the forward before is not among these calls: what the cache held is taken as it is"
_NO_REACH = "{} tokens have left the cache, and how far this layer looks back is not known"


def cache_rows(calls: Sequence[AttentionCall]) -> list[Row]:
    """A row for each call that went on from a cache; none where no forward did.

    The error is the largest difference, or 1 where there are other keys and values than should be;
    the bound is 0.
    """
    rows: list[Row] = []
    steps: dict[int, list[AttentionCall]] = {}
    latest: dict[tuple[int, str, int], AttentionCall] = {}
    for call in calls:
        steps.setdefault(call.step, []).append(call)
    for own in steps.values():
        over = [(call, call.cache) for call in own if call.cache is not None]
        continued = [
            _continued(call, cache, latest.get((cache.number, call.part, call.layer)), steps)
            for call, cache in over
            if cache.past
        ]
        order = _order([one for one in continued if isinstance(one, _Continued)])
        rows += [one if isinstance(one, Row) else _compared(one, order) for one in continued]
        latest |= {(cache.number, call.part, call.layer): call for call, cache in over}
    return rows


@dataclass(frozen=True, eq=False)
class _Continued:
    """A call over a cache, the call before it, and where in both the cached tokens stand.

    `note` says what the cache did to the tokens, and `doubt` why it may have been wrong to.
    """

    call: AttentionCall
    before: AttentionCall
    here: slice
    there: slice
    note: str = ""
    doubt: str = ""

    @property
    def texts(self) -> tuple[int, int]:
        """How many texts the call has, and the one before."""
        return len(self.call.key), len(self.before.key)

    def pairs(self, text: int, other: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """A text's cached keys and values, (Hkv, s, D), and those of a text of the call before."""
        for name in ("key", "value"):
            here, there = getattr(self.call, name)[text], getattr(self.before, name)[other]
            yield name, here[:, self.here], there[:, self.there]

    def same(self, text: int, other: int) -> bool:
        return all(torch.equal(here, there) for _, here, there in self.pairs(text, other))


def _continued(
    call: AttentionCall, cache: Cached, before: AttentionCall | None, steps: Collection[int]
) -> _Continued | Row:
    """Where a call's cached tokens stand in the call before; or the row that says what is wrong.

    `past` counts the tokens that went by, so each token has one position in both calls, though
    some have left the cache, or were taken back.
    """
    if cache.inexact:
        return _row(call, cache.inexact)
    if before is None or before.cache is None:
        return _row(call, _UNSEEN)
    if before.written:  # in place, so that the record of it changed as well
        return _wrong(call, f"the keys and values of step {before.step} were written into since")
    if call.written:
        return _row(call, WRITTEN)
    if call.kind == "cross":
        keys, held = call.key.shape[2], before.key.shape[2]
        if keys != held:
            return _wrong(call, f"the cache holds {keys} keys of the encoder's, it held {held}")
        return _Continued(call, before, slice(0, keys), slice(0, keys))
    end = before.cache.past + before.query.shape[2]
    if cache.past > end:
        if any(step not in steps for step in range(before.step + 1, call.step)):
            return _row(call, _UNSEEN)
        return _wrong(call, f"the cache holds {cache.past} tokens, the forward before left {end}")
    first, held_from = cache.past - call.first_key, before.cache.past - before.first_key
    if first < held_from:
        return _wrong(
            call, f"the cache holds tokens from {first} on, it held them from {held_from}"
        )
    there = slice(first - held_from, first - held_from + call.first_key)
    note = f"the last {end - cache.past} tokens were taken back" if cache.past < end else ""
    doubt = ""
    if first > held_from:
        rule = call.expected_mask
        if rule is None or not call.facts_known:
            doubt = _NO_REACH.format(first)
        elif rule.window is None or first > max(cache.past - rule.window + 1, 0):
            return _wrong(
                call, f"{first} tokens have left the cache, and some are still to be seen"
            )
    return _Continued(call, before, slice(call.first_key), there, note, doubt)


def _order(continued: Sequence[_Continued]) -> list[int]:
    """Which text of the forward before each text of this one goes on from.

    Where some layers are damaged the others tell, so it is what most layers hold; without any, or
    where texts are alike, each goes on from itself.
    """
    sizes = [one.texts for one in continued]
    if not continued or len(set(sizes)) > 1:
        return []
    texts, others = sizes[0]
    own = list(range(texts))
    if texts == others and all(one.same(text, text) for one in continued for text in own):
        return own
    order = []
    for text in own:
        votes = [sum(one.same(text, other) for one in continued) for other in range(others)]
        best = max(votes)
        alike = text < others and votes[text] == best
        order.append(text if alike else votes.index(best))
    return order


def _compared(one: _Continued, order: Sequence[int]) -> Row:
    if not order:
        return _wrong(one.call, "the layers' caches hold different numbers of texts")
    for text, other in enumerate(order):
        if not one.same(text, other):
            return _difference(one, text, other)
    if one.doubt:
        return _row(one.call, one.doubt)
    notes = [one.note] if one.note else []
    if list(order) != list(range(one.texts[1])):
        notes.append(f"the texts go on from {', '.join(map(str, order))} of the step before")
    return Row("cache", one.call.layer, None, 0.0, 0.0, "; ".join(notes), one.call.part)


def _difference(one: _Continued, text: int, other: int) -> Row:
    """The row of a layer that gives back other keys or values, with the first place."""
    worst, reason = 0.0, ""
    for name, here, there in one.pairs(text, other):
        differs = here != there
        if not differs.any():
            continue
        head, position = differs.any(-1).nonzero()[0].tolist()
        reason = reason or (
            f"not the {name}s of step {one.before.step}, first in text {text}, key head {head}, at "
            f"key {position}"
        )
        worst = max(
            worst, float((here.double() - there.double()).abs().nan_to_num(torch.inf).max())
        )
    return _wrong(one.call, reason, worst)


def _row(call: AttentionCall, reason: str) -> Row:
    return Row("cache", call.layer, None, reason=reason, part=call.part)


def _wrong(call: AttentionCall, reason: str, error: float = 1.0) -> Row:
    """A mismatch; but in cross attention of a model type that is not known, whose keys may not be
    the encoder's alone (T5Gemma 2's), a difference of which nothing is known."""
    known = call.kind == "self" or call.facts_known
    reason = f"in step {call.step}: {reason}"
    if not known:
        reason = f"whether the keys are the encoder's alone is not known: {reason}"
    return Row("cache", call.layer, None, error, 0.0 if known else math.nan, reason, call.part)

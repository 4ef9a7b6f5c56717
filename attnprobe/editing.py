"""Change one term of the formula, or one head, and run the model on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from attnprobe.effects.changes import Change, HeadOutput, Scale, Weights, one_of
from attnprobe.effects.sites import Part, Where
from attnprobe.errors import InputError
from attnprobe.hooks import replaced, replacing
from attnprobe.models import as_language_model
from attnprobe.records import Capture, UnseenAttention, seeded, several, whole


@contextmanager
def edit(
    lm: object,
    *,
    part: Part | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[tuple[int, int]] | None = None,
    positions: Iterable[int] | None = None,
    scale: Scale | None = None,
    mask: Literal["none"] | None = None,
    window: int | None = None,
    drop: Iterable[int] | None = None,
    temperature: float | None = None,
    weights: Weights | None = None,
    query: Capture | None = None,
    key: Capture | None = None,
    value: Capture | None = None,
    head_output: HeadOutput | None = None,
    reference: Capture | None = None,
    seed: int = 0,
    kernel: Literal["formula"] | None = None,
) -> Iterator[None]:
    """Run every forward or generate of a model inside the block with a change to its attention.

    What to change may be named together, but for `query`, `key` and `value`, which go alone or with
    one another; where, by `layers` or `heads` and `positions`: everywhere by default. Where the
    formula changes, it is computed here, in float64, rounded to the model's dtype; what the change
    does not concern is the output of the model's own kernel, bit for bit. A `probe` or `capture`
    inside the block sees what the change made. After the block the model is as before.

    Args:
        lm: a model, what `load` returns, or a (model, tokenizer) pair.
        part: of an encoder-decoder, which attention; all three by default.
        layers: which layers, from 0.
        heads: which heads, as (layer, head) pairs. Of key and value, the key head that serves one.
        positions: which tokens, from 0 at a text's first: queries, and of key and value, keys.
        scale: the factor on q·k: "none" or "1/d_k" in place of 1/√d_k, wherever a model multiplies
            by that; a number, on the query and key that its kernel gets; or a function of the call.
        mask: "none": every word sees the future; padding stays hidden. In `generate` it asks for
            use_cache=False.
        window: how many keys back a word sees at most, itself included; in self-attention.
        drop: positions of keys that no word sees. A word left without any gets an output of 0.
        temperature: what all that stands in the softmax is divided by.
        weights: "uniform" over what a word sees; all on the "previous" key that it sees, or the
            "first"; or a function of some rows of weights, (B, H, t, K) float64, to as many.
        query, key, value: another capture's in their place (activation patching), token by token,
            where both have it. That capture holds one text, or as many as the model runs on.
        head_output: the heads' output before W_O: "zero"; the "mean" over all tokens of
            `reference`; "resample": for each position a token of `reference`, drawn by `seed`, the
            same one in all heads; or another capture's, as for query.
        reference: what `mean` and `resample` are taken from.
        seed: of `resample`.
        kernel: "formula": softmax(QKᵀ/√d_k + M)V, computed here, in the model's kernel's place.

    Raises:
        InputError: an unknown option; where without what; a head that is not there, or a part,
            layer or position (these when the block ends, if the model ran: no change goes unmade in
            silence); a capture of other shapes; an edit inside another; when the block ends: the
            model ran, but in other threads only, which are not changed.
        ModelError: out of the forward: attention that the formula here does not hold for, or whose
            M is not known where the mask is to change; a mask that opens a cache's past; a backward
            pass through what was computed here. When the block ends: attention to be changed that
            ran unseen.
    """
    one_of("part", part, ("encoder", "decoder", "cross"))
    if layers is not None and heads is not None:
        raise InputError("give layers, or heads as (layer, head) pairs; not both")
    where = Where(
        part, _numbers(layers, "layer"), heads_by_layer(heads), _numbers(positions, "position")
    )
    change = Change(
        *(where, scale, mask, window, _numbers(drop, "position"), temperature, weights),
        *(query, key, value, head_output, reference, seeded(seed), kernel),
    )
    change.refuse_nonsense()
    if change.changes_nothing and any(one is not None for one in (part, layers, heads, positions)):
        raise InputError("where to change something is said, but not what: see the options of edit")
    if part == "cross" and (mask is not None or window is not None):
        raise InputError("mask and window are of self-attention: cross attention has neither")
    with changed(lm, change) as unseen:
        yield
    where.refuse_absent(unseen)
    change.refuse_missed()


@contextmanager
def changed(lm: object, change: Change) -> Iterator[list[UnseenAttention]]:
    """As `edit`, for a change that is made; yields what could not be seen, and ran as it was."""
    model = as_language_model(lm).model
    if replacing(model):
        raise InputError("this model is being edited already: give all changes to one edit")
    patch = change.patch if change.operands else None
    with replaced(model, change.handle, patch) as unseen:
        yield unseen


def _numbers(given: Iterable[int] | None, what: str) -> frozenset[int] | None:
    """Whole numbers from 0; None for all of them.

    Raises:
        InputError: something else, or nothing.
    """
    if given is None:
        return None
    if isinstance(given, str | bytes) or not several(given):
        raise InputError(f"expected a list of numbers for {what}s, got {given!r}")
    found = frozenset(whole(one, what) for one in given)
    if not found or min(found) < 0:
        raise InputError(f"expected at least one {what}, from 0; got {sorted(found)}")
    return found


def heads_by_layer(given: Iterable[tuple[int, int]] | None) -> dict[int, frozenset[int]] | None:
    """(layer, head) pairs as heads by layer; None for all of them.

    Raises:
        InputError: something else, or nothing.
    """
    if given is None:
        return None
    pairs = list(given) if several(given) else [given]
    by_layer: dict[int, set[int]] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"expected (layer, head) pairs for heads, got {pair!r}")
        layer, head = whole(pair[0], "layer"), whole(pair[1], "head")
        if min(layer, head) < 0:
            raise InputError(f"layers and heads are numbered from 0, got {tuple(pair)}")
        by_layer.setdefault(layer, set()).add(head)
    if not by_layer:
        raise InputError("expected at least one (layer, head) pair, got none")
    return {layer: frozenset(heads) for layer, heads in by_layer.items()}

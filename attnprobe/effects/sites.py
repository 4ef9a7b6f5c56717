"""Where a change holds: layers, heads and positions of a forward, and of another capture's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from attnprobe.errors import InputError, ModelError
from attnprobe.keeping import on_device
from attnprobe.records import AttentionCall, Capture, UnseenAttention

Part = Literal["encoder", "decoder", "cross"]
Axis = Literal["query", "key"]


class Sites(Protocol):
    """Where a change holds."""

    def of(self, call: AttentionCall, axis: Axis) -> Tensor | None:
        """(B or 1, T or S or 1, H) bool; None for nowhere in a call."""


@dataclass(frozen=True, eq=False)
class Where:
    """Layers, heads by layer, and positions; None for all of them.

    What forwards met is gathered: `ran`, the layers of the part; `others`, whether another part
    ran; `reached`, the positions of those that were named.
    """

    part: Part | None = None
    layers: frozenset[int] | None = None
    heads: Mapping[int, frozenset[int]] | None = None
    positions: frozenset[int] | None = None
    ran: set[int] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)

    def of(self, call: AttentionCall, axis: Axis) -> Tensor | None:
        """See `Sites.of`.

        Raises:
            InputError: the layer has no such head.
        """
        if self.part is not None and call.part != self.part:
            self.others.add(call.part)
            return None
        self.ran.add(call.layer)
        if any(some is not None and call.layer not in some for some in (self.layers, self.heads)):
            return None
        device = call.query.device
        heads = torch.ones(1, 1, call.heads, dtype=torch.bool, device=device)
        if self.heads is not None:
            chosen = sorted(self.heads[call.layer])
            if chosen[-1] >= call.heads:
                raise InputError(
                    f"head {chosen[-1]} is out of range: layer {call.layer} has {call.heads} "
                    f"heads, numbered 0 to {call.heads - 1}"
                )
            heads[:] = False
            heads[..., chosen] = True
        if self.positions is None:
            return heads
        here = positions_of(call, axis)
        self.reached.update(self.positions.intersection(here.flatten().tolist()))
        positions = torch.tensor(sorted(self.positions), device=device)
        return torch.isin(here, positions)[..., None] & heads

    def refuse_absent(self, unseen: Sequence[UnseenAttention]) -> None:
        """Refuse what no forward met, if one ran, and layers that ran unseen: nothing was changed.

        Raises:
            InputError: a part, layer or position that was not met.
            ModelError: a layer that ran unseen.
        """
        named = (self.layers or frozenset()) | frozenset(self.heads or ())
        for one in unseen:
            if one.layer in named or not named:
                raise ModelError(f"layer {one.layer} was not edited: {one}")
        absent = sorted(named - self.ran)
        if absent and self.ran:
            raise InputError(
                f"layer {absent[0]} was not edited: the attention layers that ran are numbered "
                f"{min(self.ran)} to {max(self.ran)}"
            )
        if self.others and not self.ran:
            parts = " and ".join(sorted(filter(None, self.others)))
            raise InputError(
                f"part {self.part!r} was not edited: what ran "
                f"{f'was of {parts}' if parts else 'is no encoder-decoder, and has no parts'}"
            )
        missed = sorted((self.positions or frozenset()) - self.reached)
        if missed and self.ran:
            raise InputError(f"position {missed[0]} was not edited: no text that ran has it")


@dataclass(frozen=True, eq=False)
class ByText:
    """A place for each text of a batch, to try as many changes in one forward."""

    texts: Sequence[Where]

    def of(self, call: AttentionCall, axis: Axis) -> Tensor | None:
        """See `Sites.of`."""
        found = [one.of(call, axis) for one in self.texts]
        if all(one is None for one in found):
            return None
        shape = (1, getattr(call, axis).shape[2], call.heads)
        nowhere = torch.zeros(1, 1, 1, dtype=torch.bool, device=call.query.device)
        rows = []
        for text, one in enumerate(found):
            own = nowhere if one is None else one[text : text + 1] if len(one) > 1 else one
            rows.append(own.expand(shape))
        return torch.cat(rows)  # (B, T or S, H)


def positions_of(call: AttentionCall, axis: Axis) -> Tensor:
    """The position of each query or key among its text's own tokens, (B or 1, T or S) int64.

    Padding before a text has positions below 0.

    Raises:
        ModelError: a cache has let go of tokens that it held before, so that positions of keys are
            not known.
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    device = call.query.device
    rule = call.expected_mask if call.kind == "self" else None  # else it is the keys' padding
    padding = rule.padding if rule is not None else None
    gone = call.kind == "self" and call.past > call.first_key
    if gone and (axis == "key" or padding is not None):
        raise ModelError(
            f"layer {call.layer}: the cache holds {call.first_key} of {call.past} tokens, so the "
            "positions of its keys are not known: generate with use_cache=False"
        )
    if axis == "query":
        places = torch.arange(call.past, call.past + queries, device=device)
    else:
        places = torch.arange(keys, device=device)
    if padding is None:
        return places[None]
    return places - padding.int().argmax(-1, keepdim=True)


def by_key_head(sites: Tensor, key_heads: int) -> Tensor:
    """From heads to the key heads that serve them: (…, H) bool -> (…, Hkv) bool."""
    return sites.view(*sites.shape[:-1], key_heads, -1).any(-1)


def aligned(call: AttentionCall, cap: Capture, name: str) -> tuple[Tensor, Tensor]:
    """Another capture's query, key, value or head output, at the places of a call's own.

    Args:
        call: the call of the model that runs.
        cap: the other capture: of one text, which then stands for each, or of as many.
        name: the field of `AttentionCall`.

    Returns:
        (B or 1, heads, T or S, D), or (B or 1, T, H, Dv) of the head output; and where the other
        capture has that position, (B or 1, T or S) bool.

    Raises:
        InputError: it has or kept no such layer, or one of other heads or sizes; or as many texts
            as neither one nor B.
    """
    found = cap.call_like(call)
    if found is None:
        raise InputError(f"the other capture has no layer {call.layer} to take the {name} from")
    other, own = on_device(found, call.query.device), getattr(call, name, None)
    tokens = 1 if name == "head_output_model" else 2  # the axis of tokens
    theirs: Tensor = getattr(other, name)
    sizes = [size for axis, size in enumerate(theirs.shape) if axis not in (0, tokens)]
    wanted = (call.heads, call.value.shape[-1]) if own is None else (own.shape[1], own.shape[3])
    if tuple(sizes) != wanted or len(theirs) not in (1, len(call.query)):
        raise InputError(
            f"layer {call.layer}: the other capture's {name} is of {len(theirs)} texts and "
            f"{sizes[0]} heads of size {sizes[1]}; the model runs on {len(call.query)} texts and "
            f"{wanted[0]} heads of size {wanted[1]}"
        )
    axis: Axis = "query" if name in ("query", "head_output_model") else "key"
    here, there = positions_of(call, axis), positions_of(other, axis)  # (B or 1, T), (b or 1, t)
    texts = max(len(here), len(there), len(theirs))
    # Padding is at either end, so a text's own tokens are one stretch.
    first = there[:, :1]
    ends = _tokens(other, axis).expand(len(there), -1)  # (b or 1, t) bool
    last = there.masked_fill(~ends, -1).amax(-1, keepdim=True)
    has = (here >= 0) & (here <= last)  # (B or 1, T)
    at = (here - first).clamp(0, theirs.shape[tokens] - 1).expand(texts, -1)
    shape = [1] * theirs.dim()
    shape[0], shape[tokens] = at.shape
    index = at.view(shape).expand(
        texts, *(-1 if axis == tokens else size for axis, size in enumerate(theirs.shape[1:], 1))
    )
    return theirs.expand(texts, -1, -1, -1).gather(tokens, index), has


def _tokens(call: AttentionCall, axis: Axis) -> Tensor:
    """Where a token stands, not padding, among a call's queries or keys, (B or 1, T or S) bool."""
    count = getattr(call, axis).shape[2]
    rule = call.expected_mask
    if call.kind == "cross" or rule is None or rule.padding is None:
        return torch.ones(1, count, dtype=torch.bool, device=call.query.device)
    return rule.padding[:, -count:] if axis == "query" else rule.padding

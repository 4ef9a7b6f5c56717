"""What a capture keeps of a forward's calls, and on which device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.models import device_named
from attnprobe.records import AttentionCall, Capture, LeftOut, whole

Record = TypeVar("Record")
Move = Callable[[Tensor], Tensor]

OWN = (
    "query",
    "key",
    "value",
    "hidden_states",
    "head_output_model",
    "weights_model",
    "attention_output",
)
"""The tensors of a call that no other call has; masks and biases may be shared by all layers."""


def with_tensors(record: Record, move: Move) -> Record:
    """A dataclass with another tensor for each of its tensors, also of dataclasses within it."""
    changes: dict[str, Any] = {}
    for one in fields(record):  # type: ignore[arg-type]
        value = getattr(record, one.name)
        if isinstance(value, Tensor):
            changes[one.name] = move(value)
        elif is_dataclass(value):
            changes[one.name] = with_tensors(value, move)
    return replace(record, **changes)  # type: ignore[type-var]


def on_device(call: AttentionCall, device: torch.device) -> AttentionCall:
    """A call with all its tensors on a device; its module stays where it is."""
    return with_tensors(call, lambda tensor: tensor.to(device))


@dataclass(eq=False)
class Keeper:
    """Takes a forward's calls as they come, and keeps those of some layers.

    Attributes:
        layers: which; None for all.
        device: where their tensors go; None for where they are.
        kept: the calls kept so far.
        left_out: what is to be said of the others.
    """

    layers: frozenset[int] | None
    device: torch.device | None
    kept: list[AttentionCall] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    _shared: dict[tuple[object, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: Sequence[int] | None, device: str | torch.device | None) -> Keeper:
        """What keeps these layers, on this device.

        Raises:
            InputError: layers that are no whole numbers from 0, or none; a device that does not
                exist.
        """
        chosen = None if layers is None else frozenset(_numbers(layers))
        return cls(chosen, None if device is None else device_named(device))

    def take(self, call: AttentionCall) -> None:
        """Keep a call, or note that it was not kept."""
        if self.layers is not None and call.layer not in self.layers:
            self.left_out.append(LeftOut(call.layer, call.part))
        else:
            self.kept.append(call if self.device is None else self._moved(call))

    def finished(self, cap: Capture) -> Capture:
        """The capture of the forward, with the calls that were kept.

        Raises:
            InputError: a layer to keep that no part of the model has.
        """
        there = {one.layer for some in (self.kept, self.left_out, cap.unseen) for one in some}
        missing = sorted((self.layers or frozenset()) - there)
        if missing:
            last = max(there)
            raise InputError(
                f"layer {missing[0]} is out of range: the model has {last + 1} attention layers, "
                f"numbered 0 to {last}"
            )
        cap = replace(cap, calls=tuple(self.kept), left_out=tuple(self.left_out))
        if self.device is None:
            return cap
        device = self.device
        to = {name: getattr(cap, name).to(device) for name in ("input_ids", "padding", "output")}
        target = cap.target and with_tensors(cap.target, lambda tensor: tensor.to(device))
        return replace(cap, **to, target=target)  # what the model is run on again stays with it

    def _moved(self, call: AttentionCall) -> AttentionCall:
        own = [getattr(call, name) for name in OWN]

        def move(tensor: Tensor) -> Tensor:
            mine = any(tensor is one for one in own)
            return tensor.to(self.device) if mine else self._moved_once(tensor)

        return with_tensors(call, move)

    def _moved_once(self, tensor: Tensor) -> Tensor:
        """A copy for all the calls that share a tensor, as they do a mask.

        The tensor itself is held as well: else another could take its place in memory.
        """
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._shared:
            self._shared[key] = (tensor, tensor.to(self.device))
        return self._shared[key][1]


def _numbers(layers: object) -> list[int]:
    if isinstance(layers, str) or not isinstance(layers, Sequence | range | set | frozenset):
        raise InputError(f"expected a list of layers to keep, got {layers!r}")
    numbers = [whole(one, "a layer") for one in layers]
    if not numbers or min(numbers) < 0:
        raise InputError(f"expected at least one layer to keep, counted from 0; got {layers!r}")
    return numbers

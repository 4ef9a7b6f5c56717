"""What a model's own code does to q·k before softmax: the scale, the mask and the bias in it.

Pure tensors. Scores are followed as `scaling`·q·k with what was added and what was hidden, so that
M and the scale can be told of a computation of which only the steps were seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnprobe.masks import MASKED_BELOW

ROUNDINGS_BEFORE, ROUNDINGS_AFTER = 6, 3
"""How often scores may be rounded before a bias is added, and from then on: what the bounds of
`attnprobe.rounding` charge own code for."""


class UnfollowedError(Exception):
    """Why a computation could not be followed any further."""


@dataclass(frozen=True, eq=False)
class Scores:
    """A product q·k, and what has become of it.

    Attributes:
        query: (…, T, D).
        key: (…, S, D).
        lead: the axes of the product before T and S.
        shape: of the scores as they stand, (…, T, S).
        scaling: the factor on q·k.
        added: what was added, each with as many axes as the scores.
        hidden: where the scores were replaced by numbers that hide a key; bool.
        blank: where they were replaced by other numbers, so that they must be hidden yet; bool.
        before: how often they were rounded before a bias was added.
        after: how often from then on.
        versions: torch's counts of how often query and key were written into.
    """

    query: Tensor
    key: Tensor
    lead: torch.Size
    shape: torch.Size
    scaling: float = 1.0
    added: tuple[Tensor, ...] = ()
    hidden: Tensor | None = None
    blank: Tensor | None = None
    before: int = 1
    after: int = 0
    versions: tuple[int, ...] = ()

    def times(self, factor: float) -> Scores:
        """All of it times a number."""
        if self.hidden is not None:
            raise UnfollowedError("it scales its scores after it masked them")
        added = tuple(one.double() * factor for one in self.added)
        return replace(self.rounded(), scaling=self.scaling * factor, added=added)

    def plus(self, other: Tensor, sign: float = 1.0) -> Scores:
        """A mask or a bias added."""
        other = self._with_axes(other)
        if sign != 1.0:
            other = other.double() * sign
        is_bias = bool(((other != 0) & (other > MASKED_BELOW)).any())
        found = replace(self, added=(*self.added, other))
        return replace(found, after=found.after + 1) if is_bias else found

    def gated(self, gate: Tensor) -> Scores:
        """Multiplied by a tensor of 0 and 1."""
        gate = self._with_axes(gate)
        off = gate == 0
        if not bool((off | (gate == 1)).all()):
            raise UnfollowedError("it multiplies its scores by a tensor")
        added = tuple(torch.where(off, 0.0, one) for one in self.added)
        return replace(self, added=added, blank=_either(self.blank, off))

    def filled(self, where: Tensor, value: float) -> Scores:
        """Replaced by a number where a bool tensor says so."""
        if where.dtype != torch.bool:
            raise UnfollowedError("it fills its scores where a tensor says that is not boolean")
        where = self._with_axes(where)
        if value <= MASKED_BELOW:
            return replace(self, hidden=_either(self.hidden, where))
        return replace(self, blank=_either(self.blank, where))

    def reshaped(self, shape: torch.Size) -> Scores:
        """The axes before T and S put in another way."""
        if shape[-2:] != self.shape[-2:]:
            raise UnfollowedError("it reshapes its scores beyond telling queries and keys")
        hidden, blank = (
            None if one is None else regrouped(one, self.shape, shape)
            for one in (self.hidden, self.blank)
        )
        added = tuple(regrouped(one, self.shape, shape) for one in self.added)
        return replace(self, shape=shape, added=added, hidden=hidden, blank=blank)

    def rounded(self) -> Scores:
        """Stored once more."""
        if self.after:
            return replace(self, after=self.after + 1)
        return replace(self, before=self.before + 1)

    def parts(self) -> tuple[Tensor | None, Tensor | None]:
        """Where keys are hidden, bool, and the bias on the others, float64; None for neither.

        Raises:
            UnfollowedError: scores that are not hidden are not q·k; or they were rounded too often;
                or biases cancel each other, so that their sum does not bound the rounding of each.
        """
        hidden, biases = self.hidden, []
        for one in self.added:
            gone = one <= MASKED_BELOW
            if gone.any():
                hidden = _either(hidden, gone)
            shown = one.masked_fill(gone, 0.0)
            if shown.any():
                biases.append(shown.double())
        nothing = torch.zeros((), dtype=torch.float64)
        bias = sum(biases, start=nothing) if biases else None
        if self.blank is not None and (hidden is None or bool((self.blank & ~hidden).any())):
            raise UnfollowedError("it replaces scores by numbers that hide nothing")
        if self.before > ROUNDINGS_BEFORE or self.after > ROUNDINGS_AFTER:
            raise UnfollowedError("it rounds its scores more often than the bounds allow for")
        if bias is not None and not torch.equal(
            bias.abs(), sum(map(torch.abs, biases), start=nothing)
        ):
            raise UnfollowedError("it adds biases that cancel each other")
        return hidden, bias

    def _with_axes(self, tensor: Tensor) -> Tensor:
        """A tensor with as many axes as the scores."""
        return tensor[(None,) * (len(self.shape) - tensor.dim())]


def regrouped(tensor: Tensor, old: torch.Size, new: torch.Size) -> Tensor:
    """A tensor that goes with scores of one shape, for the same scores in another: the axes before
    the last two are split or merged."""
    last = tensor.shape[-2:]
    if all(size == 1 for size in tensor.shape[:-2]):
        return tensor.reshape(*(1,) * (len(new) - 2), *last)
    return tensor.expand(*old[:-2], *last).reshape(*new[:-2], *last)


def _either(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one | other


def changed(
    step: str,
    first: Tensor,
    scores: Scores,
    operands: tuple[Any, ...],
    options: dict[str, Any],
) -> Scores:
    """Scores after an elementwise step."""
    leads = operands[0] is first
    other = operands[1] if leads and len(operands) > 1 else operands[0]
    number = number_of(other)
    match step:
        case "mul" if number is not None:
            return scores.times(number)
        case "mul" if isinstance(other, Tensor):
            return scores.gated(other)
        case "div" if number and leads and "rounding_mode" not in options:
            return scores.times(1 / number)
        case "add" | "sub" if (leads or step == "add") and options.get("alpha", 1) == 1:
            addend = other if isinstance(other, Tensor) else first.new_tensor(other)
            return scores.plus(addend, -1.0 if step == "sub" else 1.0)
        case "masked_fill" if leads:
            return scores.filled(other, _largest(operands[2]))
        case "where" if leads:
            return scores.filled(~other, _largest(operands[2]))
        case "where" if operands[1] is first:
            return scores.filled(~other, _largest(operands[2]))
        case "where":
            return scores.filled(other, _largest(operands[1]))
        case "maximum" if number is not None and number <= MASKED_BELOW:
            return scores  # this raises only what is hidden
        case "clamp" if set(options) == {"min"} and _largest(options["min"]) <= MASKED_BELOW:
            return scores
        case "dropout" if options.get("training", True) is False:
            return scores
    raise UnfollowedError(f"its scores go through {step}")


def cast(scores: Scores, before: Tensor, after: Tensor) -> Scores:
    """Scores in another dtype."""
    was, now = (torch.finfo(one.dtype).eps for one in (before, after))
    if now <= was:
        return scores
    if now > torch.finfo(scores.query.dtype).eps:
        raise UnfollowedError(f"it casts its scores to {after.dtype}")
    return scores.rounded()


def number_of(value: Any) -> float | None:
    """A number, or what a tensor of a single one holds."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _largest(value: Any) -> float:
    return float(value.max() if isinstance(value, Tensor) else value)

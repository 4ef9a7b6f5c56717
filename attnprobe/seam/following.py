"""See attention that a model computes by plain torch calls: followed from q·k to weights · V.

Some models ask transformers for no kernel. While one of their attention modules runs, every torch
function passes through a `TorchFunctionMode` here, which follows tensors from a product through
elementwise steps to softmax, and on to the product with the values. What was seen between says the
scale, the mask and the bias. Nothing is changed and no step is guessed: what cannot be followed is
refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attnprobe.rounding import OWN
from attnprobe.seam.folding import (
    begun,
    factors,
    heads_of,
    kernel_arguments,
    may_be_scores,
    tensors_in,
    texts_and_heads,
)
from attnprobe.seam.scoring import Scores, UnfollowedError, cast, changed, number_of

Seen = tuple[Tensor, Tensor | None]
Found = Callable[[str, dict[str, Any], Callable[[], Seen]], Seen]
"""Gets the kernel's name, its arguments as at transformers' seam, and what gives the output
(B, T, H, Dv) and the weights; returns what is to stand for them."""

PRODUCTS = frozenset({"matmul", "bmm", "mm", "einsum", "baddbmm"})
CASTS = frozenset(
    {"to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone"}
)
REGROUPINGS = frozenset({"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"})
BY_THE_FIRST = frozenset({"type_as", "expand_as", "view_as", "reshape_as"})
"""Functions that take of their second tensor its shape or dtype only."""
LIKE = ("new_", "zeros_like", "ones_like", "full_like", "empty_like")
"""How functions begin that take of a tensor its shape or dtype only."""
SAME_NAME = {
    **{"multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub"},
    **{"max": "maximum", "clip": "clamp"},
}


@dataclass(frozen=True, eq=False)
class _Softmaxed:
    """What has come of the softmax of scores; `scores` is None where it could not be followed."""

    number: int
    scores: Scores | None
    reason: str = ""
    dropout: float = 0.0

    def lost(self, reason: str) -> _Softmaxed:
        return self if self.scores is None else replace(self, scores=None, reason=reason)


State = Scores | _Softmaxed | str
"""Of a tensor that is followed: what it is; or, in words, why it is followed no further."""


class Following(TorchFunctionMode):
    """Follows what attention modules compute while they run; see `start` and `stop`.

    Args:
        found: gets each attention that was followed to its end.
        refused: gets, of each that was not, the reason.
    """

    def __init__(self, found: Found, refused: Callable[[str], None]) -> None:
        super().__init__()
        self.found, self.refused = found, refused
        self._pauses = 0
        self._running: list[tuple[int | None, int | None]] = []  # texts and heads of the modules
        self._traces: dict[int, tuple[Tensor, State]] = {}  # the tensor, so that its id stays its
        self._waiting: dict[int, str] = {}  # softmaxes that no product has used, and why not
        self._softmaxes = 0

    def start(self, module: nn.Module, texts: int | None) -> None:
        """A module begins to run, on a batch of so many texts."""
        self._running.append((texts, heads_of(module)))
        if len(self._running) == 1:
            self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """The module that began last has ended."""
        if len(self._running) == 1:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            for reason in self._waiting.values():
                self.refused(reason)
            self._traces.clear()
            self._waiting.clear()
        self._running.pop()

    def close(self) -> None:
        """End what an exception left running."""
        if self._running:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._running.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow nothing in the block."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._pauses:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__  # of an attribute, such as mT
        if name == "scaled_dot_product_attention":
            return self._fused(func, args, kwargs)
        if name in PRODUCTS:
            return self._product(name, func, args, kwargs)
        given = tensors_in((args, kwargs))
        traced = [(one, state) for one in given if (state := self._state(one)) is not None]
        output = func(*args, **kwargs)
        if name == "softmax" and not traced and given[0].dim() > 3:
            self.refused("its softmax is of what no product was seen to make")
        if traced and not name.startswith(LIKE):
            with torch.no_grad():
                self._go_on(name, traced, (*args, *kwargs.values()), kwargs, output)
        return output

    def _state(self, tensor: Tensor) -> State | None:
        return self._traces.get(id(tensor), (None, None))[1]

    def _set(self, tensor: Tensor, state: State) -> None:
        self._traces[id(tensor)] = (tensor, state)

    def _go_on(
        self,
        name: str,
        traced: list[tuple[Tensor, State]],
        operands: tuple[Any, ...],
        options: dict[str, Any],
        output: Any,
    ) -> None:
        """Note what a function made of tensors that are followed."""
        first, state = traced[0]
        if name in BY_THE_FIRST and first is not operands[0]:
            return
        if isinstance(output, Tensor):
            in_place = output is operands[0] and (name.endswith("_") or options.get("inplace"))
            others = {id(one) for one, _ in traced} - {id(first)}
            try:
                if others and name not in BY_THE_FIRST:
                    raise UnfollowedError(f"its {name} brings two products together")
                follow = self._weigh if isinstance(state, _Softmaxed) else self._score
                step = SAME_NAME.get(name.rstrip("_"), name.rstrip("_"))
                new = follow(step, first, state, operands, options, output)  # type: ignore[arg-type]
            except UnfollowedError as error:
                new = _lost([state for _, state in traced], str(error))
            if in_place:
                self._lose_views_of(output, name)
            self._set(output, new)
        else:  # several tensors, or sizes; or None, as of an assignment into the first operand
            for one in tensors_in(operands)[:1] if output is None else tensors_in(output):
                self._set(one, _lost([state for _, state in traced], f"it goes through {name}"))

    def _lose_views_of(self, tensor: Tensor, name: str) -> None:
        """A tensor was written into: what shares its memory is no longer what it was."""
        place = tensor.untyped_storage().data_ptr()
        for one, state in list(self._traces.values()):
            if one is not tensor and one.untyped_storage().data_ptr() == place:
                self._set(one, _lost([state], f"{name} writes into a view of it"))

    def _score(
        self,
        step: str,
        first: Tensor,
        state: Scores | str,
        operands: tuple[Any, ...],
        options: dict[str, Any],
        output: Tensor,
    ) -> State:
        """What a step makes of scores."""
        if "softmax" in step or step == "logsumexp":
            return self._softmax(step, first, state, operands, options)
        if isinstance(state, str):
            raise UnfollowedError(state)
        if step in REGROUPINGS:
            return state.reshaped(output.shape)
        if output.shape != state.shape:
            raise UnfollowedError(f"its scores go through {step}")
        if step in CASTS:
            return cast(state, first, output)
        return changed(step, first, state, operands, options)

    def _softmax(
        self,
        step: str,
        first: Tensor,
        state: Scores | str,
        operands: tuple[Any, ...],
        options: dict[str, Any],
    ) -> _Softmaxed:
        self._softmaxes += 1
        number = self._softmaxes
        if first.dim() > 2:  # else it may be of a router, whose softmax meets no values
            self._waiting[number] = "its softmax was followed to no product with values"
        if isinstance(state, str):
            return _Softmaxed(number, None, state)
        axis = options.get("dim", operands[1] if len(operands) > 1 else None)
        if step != "softmax" or axis not in (-1, first.dim() - 1):
            return _Softmaxed(number, None, f"its {step} is not a softmax over keys")
        return _Softmaxed(number, state)

    def _weigh(
        self,
        step: str,
        first: Tensor,
        state: _Softmaxed,
        operands: tuple[Any, ...],
        options: dict[str, Any],
        output: Tensor,
    ) -> State:
        """What a step makes of weights."""
        if step in REGROUPINGS and output.shape[-2:] == first.shape[-2:]:
            return state
        if step in CASTS and output.shape == first.shape:
            return state
        if step == "dropout":
            on = options.get("training", operands[2] if len(operands) > 2 else True)
            rate = options.get("p", operands[1] if len(operands) > 1 else 0.5)
            return replace(state, dropout=float(rate)) if on else state
        if step == "masked_fill" and output is not first and number_of(operands[2]) == 0.0:
            gone = first.nan_to_num(0.0).masked_fill(~operands[1], 0.0)
            if not gone.any():
                return state
        raise UnfollowedError(f"its weights go through {step} after softmax")

    def _product(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A product of two tensors: of query and key, of weights and values, or neither."""
        output = func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        weights = [one for one in map(self._state, given) if isinstance(one, _Softmaxed)]
        with torch.no_grad():
            try:
                left, right = factors(name, args, kwargs)
                if weights:
                    return self._weighted(name, left, right, output)
                if may_be_scores(left, right):
                    self._set(output, begun(name, left, right, given[0], kwargs, output))
            except UnfollowedError as error:
                for one in weights:
                    self._waiting.pop(one.number, None)
                    self.refused(one.reason or str(error))
                self._set(output, str(error))
        return output

    def _weighted(self, name: str, weights: Tensor, value: Tensor, output: Tensor) -> Tensor:
        """The product of weights and values: an attention that was followed to its end."""
        state = self._state(weights)
        if not isinstance(state, _Softmaxed) or self._state(value) is not None:
            raise UnfollowedError("its values are made of scores themselves")
        if state.scores is None or name == "baddbmm":
            raise UnfollowedError(state.reason or "its values come in by baddbmm")
        sizes = texts_and_heads(state.scores.lead, *self._running[-1])
        arguments = kernel_arguments(state.scores, sizes, value, weights.shape[:-2])
        # A copy: models write into their output afterwards.
        by_head = output.clone().reshape(*sizes, *output.shape[-2:]).transpose(1, 2)
        seen = by_head, weights.reshape(*sizes, *weights.shape[-2:])
        self._waiting.pop(state.number, None)
        return self._handed(OWN, arguments | {"dropout": state.dropout}, seen, output)

    def _fused(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """torch's own fused attention, called where transformers' seam is not asked."""
        output = func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = (given[name] for name in names[:3])
        mask = given.get("attn_mask")
        if query.dim() != 4:
            self.refused(f"its query has {query.dim()} axes, not (B, H, T, D)")
            return output
        arguments = {
            **{"query": query, "key": key, "value": value},
            "attention_mask": mask if mask is None else mask[(None,) * (4 - mask.dim())],
            "is_causal": given.get("is_causal", False),
            "scaling": given.get("scale"),
            "dropout": given.get("dropout_p", 0.0),
        }
        return self._handed("sdpa", arguments, (output.clone().transpose(1, 2), None), output)

    def _handed(self, kernel: str, arguments: dict[str, Any], seen: Seen, output: Tensor) -> Tensor:
        """Hand on what was found; the model's own output, or what is to stand for it."""
        given, _ = self.found(kernel, arguments, lambda: seen)
        if given is seen[0]:
            return output
        return given.transpose(1, 2).reshape(output.shape).to(output.dtype)


def _lost(states: list[State], reason: str) -> State:
    """What becomes of followed tensors in a step that cannot be followed."""
    weights = next((one for one in states if isinstance(one, _Softmaxed)), None)
    if weights is not None:
        return weights.lost(reason)
    return next((one for one in states if isinstance(one, str)), reason)

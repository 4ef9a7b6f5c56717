"""See attention that a model computes by plain torch calls: followed from q·k to weights · V.

Some models ask transformers for no kernel. While one of their attention modules runs, every torch
function passes through a `TorchFunctionMode` here, which follows tensors from a product through
elementwise steps to softmax, and on to the product with the values. What was seen between says the
scale, the mask and the bias. Nothing is changed and no step is guessed: what cannot be followed is
refused, with the reason.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from attnprobe.masks import MASKED_BELOW
from attnprobe.rounding import OWN
from attnprobe.scoring import Scores, UnfollowedError, regrouped

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
SAME_NAME = {"multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub"}
SAME_NAME |= {"max": "maximum", "clip": "clamp"}
NAMES_OF_SOFTMAX = frozenset({"softmax", "Softmax", "logsumexp", "scaled_dot_product_attention"})


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


@functools.cache
def computes_softmax(cls: type) -> bool:
    """Whether a module's own code, or a function that it calls from its file, names a softmax."""
    own = [one for one in cls.__mro__ if not one.__module__.startswith("torch.")]
    if issubclass(cls, PreTrainedModel):
        return False
    methods = [value for one in own for value in vars(one).values() if inspect.isfunction(value)]
    for method in map(inspect.unwrap, methods):
        names = set(method.__code__.co_names)
        called = [method.__globals__.get(name) for name in names]
        for one in filter(inspect.isfunction, called):
            if one.__module__ == method.__module__:
                names |= set(one.__code__.co_names)
        if not names.isdisjoint(NAMES_OF_SOFTMAX):
            return True
    return False


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
        self._running.append((texts, _heads_of(module)))
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
        given = _tensors((args, kwargs))
        traced = [(one, state) for one in given if (state := self._state(one)) is not None]
        output = func(*args, **kwargs)
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
            in_place = output is operands[0]
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
            for one in _tensors(operands)[:1] if output is None else _tensors(output):
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
            return _cast(state, first, output)
        return _changed(step, first, state, operands, options)

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
        if step == "masked_fill" and output is not first and _number(operands[2]) == 0.0:
            gone = first.nan_to_num(0.0).masked_fill(~operands[1], 0.0)
            if not gone.any():
                return state
        raise UnfollowedError(f"its weights go through {step} after softmax")

    def _product(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A product of two tensors: of query and key, of weights and values, or neither."""
        output = func(*args, **kwargs)
        given = _tensors((args, kwargs))
        weights = [one for one in map(self._state, given) if isinstance(one, _Softmaxed)]
        with torch.no_grad():
            try:
                left, right = _factors(name, args, kwargs)
                if weights:
                    return self._weighted(name, left, right, output)
                if _may_be_scores(left, right):
                    self._set(output, _begun(name, left, right, given[0], kwargs, output))
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
        sizes = _texts_and_heads(state.scores.lead, *self._running[-1])
        arguments = _arguments(state.scores, sizes, value, weights.shape[:-2])
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


def _begun(
    name: str, left: Tensor, right: Tensor, base: Tensor, options: dict[str, Any], output: Tensor
) -> Scores:
    """A product of query and key; baddbmm adds it to something, both with a factor."""
    key = right.transpose(-1, -2)
    scores = Scores(left, key, output.shape[:-2], output.shape, versions=_versions(left, key))
    if name != "baddbmm":
        return scores
    scores = replace(scores, scaling=float(options.get("alpha", 1)))
    beta = float(options.get("beta", 1))
    if beta and base.any():
        return scores.plus(base if beta == 1 else base.double() * beta)
    return scores


def _changed(
    step: str,
    first: Tensor,
    scores: Scores,
    operands: tuple[Any, ...],
    options: dict[str, Any],
) -> Scores:
    """Scores after an elementwise step."""
    leads = operands[0] is first
    other = operands[1] if leads and len(operands) > 1 else operands[0]
    number = _number(other)
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


def _cast(scores: Scores, before: Tensor, after: Tensor) -> Scores:
    """Scores in another dtype."""
    was, now = (torch.finfo(one.dtype).eps for one in (before, after))
    if now <= was:
        return scores
    if now > torch.finfo(scores.query.dtype).eps:
        raise UnfollowedError(f"it casts its scores to {after.dtype}")
    return scores.rounded()


def _factors(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The two factors of a product, as matmul takes them."""
    given = _tensors((args, kwargs))
    if name == "einsum":
        return _of_einsum(args[0], given)
    left, right = given[1:3] if name == "baddbmm" else given[:2]
    return left, right


def _of_einsum(equation: Any, given: list[Tensor]) -> tuple[Tensor, Tensor]:
    """…ij,…jk->…ik is matmul as it stands, …id,…jd->…ij with the second factor transposed."""
    inputs, _, output = str(equation).replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    if len(given) == 2 and first[:-2] == second[:-2] == output[:-2] and first[-2] == output[-2]:
        if (first[-1], output[-1]) == (second[-2], second[-1]):
            return given[0], given[1]
        if (first[-1], output[-1]) == (second[-1], second[-2]):
            return given[0], given[1].transpose(-1, -2)
    raise UnfollowedError(f"it multiplies by einsum {equation}")


def _may_be_scores(left: Tensor, right: Tensor) -> bool:
    """Whether a product may be of queries and keys: not with a weight, and for each text."""
    if isinstance(left, nn.Parameter) or isinstance(right, nn.Parameter):
        return False
    return min(left.dim(), right.dim()) > 2 or left.dim() == right.dim() == 2


def _texts_and_heads(lead: torch.Size, texts: int | None, heads: int | None) -> tuple[int, int]:
    """B and H, from the axes of scores before T and S."""
    if len(lead) == 2 and texts in (None, lead[0]) and heads in (None, lead[1]):
        return lead[0], lead[1]
    if len(lead) == 1:
        texts = lead[0] // heads if texts is None and heads else texts
        if texts and lead[0] % texts == 0 and heads in (None, lead[0] // texts):
            return texts, lead[0] // texts
    raise UnfollowedError(
        f"its scores have axes {tuple(lead)} before queries and keys, which are not those of "
        f"{texts or 'the'} texts and {heads or 'their'} heads"
    )


def _arguments(
    scores: Scores, sizes: tuple[int, int], value: Tensor, lead: torch.Size
) -> dict[str, Any]:
    """What the attention was computed of, by the names that transformers' kernels have for it."""
    if scores.versions != _versions(scores.query, scores.key):
        raise UnfollowedError("it writes into its query or key after it multiplied them")
    query, key = (_in(value.dtype, one) for one in (scores.query, scores.key))
    by_head = torch.Size((*sizes, *scores.shape[-2:]))
    hidden, bias = (
        None if one is None else regrouped(one, scores.shape, by_head) for one in scores.parts()
    )
    keys = scores.shape[-1]
    return {
        "query": _by_head(query, scores.lead, sizes),
        "key": _by_head(key, scores.lead, sizes),
        "value": _by_head(value, lead, sizes),
        "scaling": scores.scaling,
        "attention_mask": None if hidden is None else ~hidden.expand(*hidden.shape[:-1], keys),
        "position_bias": None if bias is None else bias.expand(*bias.shape[:-1], keys),
        "is_causal": False,
    }


def _by_head(tensor: Tensor, lead: torch.Size, sizes: tuple[int, int]) -> Tensor:
    """(B, H, …), or (B, 1, …) where one key head serves all."""
    if tensor.dim() == 4 and tensor.shape[0] == sizes[0] and tensor.shape[1] in (1, sizes[1]):
        return tensor
    return tensor.expand(*lead, *tensor.shape[-2:]).reshape(*sizes, *tensor.shape[-2:])


def _in(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """A tensor in the dtype of the values, from which it was cast up."""
    if tensor.dtype == dtype:
        return tensor
    narrow = tensor.to(dtype)
    if torch.finfo(dtype).eps < torch.finfo(tensor.dtype).eps or not torch.equal(
        narrow.to(tensor.dtype), tensor
    ):
        raise UnfollowedError(f"its scores are made in {tensor.dtype}, its values in {dtype}")
    return narrow


def _heads_of(module: nn.Module) -> int | None:
    """A module's own number of heads, by the names in use."""
    names = ("num_attention_heads", "num_heads", "n_heads", "n_head")
    found = (getattr(module, name, None) for name in names)
    return next((one for one in found if isinstance(one, int)), None)


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(0 if one.is_inference() else one._version for one in tensors)


def _lost(states: list[State], reason: str) -> State:
    """What becomes of followed tensors in a step that cannot be followed."""
    weights = next((one for one in states if isinstance(one, _Softmaxed)), None)
    if weights is not None:
        return weights.lost(reason)
    return next((one for one in states if isinstance(one, str)), reason)


def _number(value: Any) -> float | None:
    """A number, or what a tensor of a single one holds."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _largest(value: Any) -> float:
    return float(value.max() if isinstance(value, Tensor) else value)


def _tensors(given: Any) -> list[Tensor]:
    """The tensors among arguments, in order, those within lists too."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = tuple(given.values())
    return (
        [one for some in given for one in _tensors(some)] if isinstance(given, tuple | list) else []
    )

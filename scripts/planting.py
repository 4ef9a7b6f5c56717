"""Put wrong attention into a model: at transformers' seam, or under a model's own torch calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from mutant_models import Kind
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import AttentionInterface
from wrong_attention import UNCHANGED, Asked, Mutant, Output, additive, by_hand, file_of


@contextmanager
def installed(mutant: Mutant, kind: Kind, model: nn.Module, seed: int) -> Iterator[None]:
    """Have the model run with the mutant in the block."""
    memory: dict[Any, Any] = {}

    def mutated(kernel: Callable[..., Output], name: str) -> Callable[..., Output]:
        def right(asked: Asked) -> Output:
            given = (asked.query, asked.key, asked.value, asked.mask)
            return kernel(asked.module, *given, **asked.rest)

        def run(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any
        ) -> Output:
            numbers = memory.setdefault("layers", {})
            layer = numbers.setdefault(module, len(numbers))
            given = (module, query, key, value, mask, rest, kind, layer, seed)
            return mutant.change(right, Asked(*given, name == "eager", memory))  # type: ignore

        return run

    file, kernels = file_of(model), AttentionInterface._global_mapping
    with ExitStack() as stack:
        if mutant is UNCHANGED:
            pass
        elif mutant.place == "before":
            stack.enter_context(mutant.change(kind, model))
        elif kind.own:
            stack.enter_context(OwnCode(mutant, kind, seed))
        elif mutant.place == "model":
            asking = Asking(file.ALL_ATTENTION_FUNCTIONS, mutated)
            stack.enter_context(mock.patch.object(file, "ALL_ATTENTION_FUNCTIONS", asking))
        else:
            eager = mutated(file.eager_attention_forward, "eager")
            stack.enter_context(mock.patch.object(file, "eager_attention_forward", eager))
            fused = mutated(kernels["sdpa"], "sdpa")
            stack.enter_context(mock.patch.dict(kernels, sdpa=fused))
        yield


@dataclass(frozen=True)
class Asking:
    """Stands for what a modeling file asks for kernels: what it asks of them is changed."""

    kernels: AttentionInterface
    mutated: Callable[[Callable[..., Output], str], Callable[..., Output]]

    def get_interface(self, name: str, default: Callable[..., Output]) -> Callable[..., Output]:
        """The kernel, given what it is not to be given."""
        return self.mutated(self.kernels.get_interface(name, default), name)


class OwnCode(TorchFunctionMode):
    """Changes attention that a model computes by plain torch calls: its softmax, and the product
    before and after it."""

    def __init__(self, mutant: Mutant, kind: Kind, seed: int) -> None:
        super().__init__()
        self.mutant, self.kind, self.seed = mutant, kind, seed
        self.memory: dict[Any, Any] = {}
        self.operands: tuple[Tensor, ...] = ()  # of the product that came last
        self.asked: Asked | None = None  # between softmax and the product with the values
        self.layers = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass every function on but those of attention."""
        output = func(*args, **kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "softmax":
            self.asked = self._ask(args[0])
            weights = self._run(torch.zeros_like(self.asked.key[..., :1]))[1]
            assert weights is not None
            return weights.to(output.dtype)
        if name in ("matmul", "bmm", "baddbmm") and self.asked is None:
            given = kwargs or {}  # BLOOM gives them by name
            self.operands = (*args, *(given[one] for one in ("batch1", "batch2") if one in given))
        elif name in ("matmul", "bmm"):
            value = self._by_head(args[1])
            return self._run(value)[0].transpose(1, 2).reshape(output.shape)
        return output

    def _run(self, value: Tensor) -> Output:
        asked = replace(self.asked, value=value)  # type: ignore[type-var]
        if value.shape[-1] > 1:
            self.asked = None
        return self.mutant.change(by_hand, asked)  # type: ignore[no-any-return]

    def _ask(self, scores: Tensor) -> Asked:
        """What the model asks of itself, from the scores that it gives softmax."""
        query, turned = (self._by_head(one) for one in self.operands[-2:])
        key = turned.transpose(-1, -2)
        rest = {"scaling": 1.0 if self.kind.scale == "none" else query.shape[-1] ** -0.5}
        if len(self.operands) == 3:  # BLOOM's product adds the bias at once
            rest["position_bias"] = self._by_head(self.operands[0])
        layer, self.layers = self.layers, self.layers + 1
        mask = additive(scores > -5e3, query.dtype)  # the lowest number, or GPT's -10000
        given = (None, query, key, key, mask, rest, self.kind, layer, self.seed)
        return Asked(*given, True, self.memory)

    def _by_head(self, tensor: Tensor) -> Tensor:
        """(B·H, …) as (B, H, …)."""
        return tensor if tensor.dim() == 4 else tensor.unflatten(0, (2, -1))

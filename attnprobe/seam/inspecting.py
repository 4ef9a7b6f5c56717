"""What the code of a module's class says of it: whether it computes attention, and of what."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

NAMES_OF_SOFTMAX = frozenset({"softmax", "Softmax", "logsumexp", "scaled_dot_product_attention"})


def arguments_of(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """A forward's arguments by name, those gathered in **kwargs among them."""
    names = _parameters(forward_of(type(module)))[1:] if args else ()
    return dict(zip(names, args, strict=False)) | kwargs


@functools.cache
def _parameters(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    """A module class's own forward, under transformers' decorators."""
    forward: Callable[..., Any] = inspect.unwrap(cls.forward)
    return forward


def asking(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Which modules' forwards ask for an attention kernel."""
    modules = list(modules)
    kinds = {one for one in {*map(type, modules)} if asks_for_kernel(forward_of(one))}
    return {one for one in modules if type(one) in kinds}


@functools.cache
def asks_for_kernel(forward: Callable[..., Any]) -> bool:
    """Whether a module's forward asks for an attention kernel: its code names the registry."""
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def torchs_attention(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Which modules are torch's own attention, in one piece. Those within an encoder layer are left
    out, since hooks would send it down another path."""
    modules = list(modules)
    layers = [one for one in modules if isinstance(one, nn.TransformerEncoderLayer)]
    inside = {part for layer in layers for part in layer.modules()}
    return {one for one in modules if isinstance(one, nn.MultiheadAttention) and one not in inside}


@functools.cache
def computes_softmax(cls: type) -> bool:
    """Whether a module's own code, or a function that it calls from its file, names a softmax."""
    own = [one for one in cls.__mro__ if not one.__module__.startswith("torch.")]
    # Hyper-connections mix streams of one token by a softmax, which is no attention (DeepSeek V4).
    if issubclass(cls, PreTrainedModel) or "HyperConnection" in cls.__name__:
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

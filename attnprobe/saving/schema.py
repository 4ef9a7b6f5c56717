"""Records ↔ JSON, as the annotations of their fields say: a new field needs no line here.

A dataclass is an object of its fields, a tuple a list, a tensor the name of one in the safetensors
file. Of a union of dataclasses, `is` says which. A number that JSON has no name for is text: "nan",
"inf", "-inf". Whoever changes a record raises `attnprobe.saving.captures.VERSION`.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from attnprobe.biases import Bias, ByDistance, ByKey
from attnprobe.records import dtype_name
from attnprobe.saving.parsing import shown
from attnprobe.saving.reading import DamagedError
from attnprobe.saving.tensors import DTYPES, Store, taken

NOT_SAVED = {"module", "parent", "lm"}
"""Fields that hold the model, or a part of it: None in what is read again."""

_ONE_OF = {Bias: (ByKey, ByDistance)}
"""The dataclasses that a protocol stands for."""

_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES.values()}


@functools.cache
def saved_fields(record: type) -> dict[str, Any]:
    """The fields of a dataclass that are saved, and what each holds."""
    hints = get_type_hints(record)
    names = (one.name for one in fields(record))
    return {name: hints[name] for name in names if name not in NOT_SAVED}


def packed(value: Any, store: Store, at: str) -> Any:
    """JSON for a record or a part of one; its tensors go to the store under names that begin so."""
    match value:
        case Tensor():
            return store.put(value, at)
        case torch.dtype():
            return dtype_name(value)
        case float() if not math.isfinite(value):
            return str(value)
        case tuple():
            return [packed(one, store, _inside(at, number)) for number, one in enumerate(value)]
        case dict():
            return {name: packed(one, store, _inside(at, name)) for name, one in value.items()}
        case _ if is_dataclass(value):
            kind: Any = type(value)
            named = {"is": kind.__name__} if kind in _ONE_OF[Bias] else {}
            return named | {
                name: packed(getattr(value, name), store, _inside(at, name))
                for name in saved_fields(kind)
            }
    return value


def unpacked(told: Any, kind: Any, tensors: Mapping[str, Tensor], at: str = "") -> Any:
    """The record, or part of one, of this annotation that `packed` made this JSON of.

    Raises:
        DamagedError: it was not that; the message says where.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Tensor:
        try:
            return taken(tensors, told)
        except DamagedError as error:
            raise DamagedError(f"{at}: {error}") from None
    if origin in (Union, types.UnionType):
        return unpacked(told, _arm(told, inner, at), tensors, at)
    if is_dataclass(kind):
        return _record(told, kind, tensors, at)
    if origin is tuple:
        return _tuple(told, inner, tensors, at)
    if origin is dict:
        items = _expected(told, dict, "an object", at).items()
        return {name: unpacked(one, inner[1], tensors, _inside(at, name)) for name, one in items}
    return _plain(told, kind, at)


def _inside(at: str, name: object) -> str:
    return f"{at}.{name}" if at else str(name)


def _expected(told: Any, kind: type, what: str, at: str) -> Any:
    if type(told) is not kind:
        raise DamagedError(f"{at}: expected {what}, got {shown(told)}")
    return told


def _arm(told: Any, arms: tuple[Any, ...], at: str) -> Any:
    """Which of a union's annotations this JSON is of."""
    some = [one for arm in arms for one in _ONE_OF.get(arm, (arm,))]
    if told is None and type(None) in some:
        return type(None)
    some = [one for one in some if one is not type(None)]
    if len(some) == 1:
        return some[0]
    if isinstance(told, dict) and "tensor" in told and Tensor in some:
        return Tensor
    name = told.get("is") if isinstance(told, dict) else None
    for one in some:
        if name == getattr(one, "__name__", None) and is_dataclass(one):
            return one
    names = ", ".join(one.__name__ for one in some)
    raise DamagedError(f"{at}: expected one of {names}; got {shown(told)}")


def _record(told: Any, kind: Any, tensors: Mapping[str, Tensor], at: str) -> Any:
    told = _expected(told, dict, f"the fields of {kind.__name__}", at)
    hints = saved_fields(kind)
    names = set(hints) | ({"is"} if kind in _ONE_OF[Bias] else set())
    if set(told) != names:
        odd = shown(sorted(set(told) ^ names))
        raise DamagedError(f"{at}: expected the fields of {kind.__name__}; {odd} lack or are more")
    given = {
        name: unpacked(told[name], hint, tensors, _inside(at, name)) for name, hint in hints.items()
    }
    away = {one.name: None for one in fields(kind) if one.name in NOT_SAVED}
    return kind(**given, **away)


def _tuple(told: Any, inner: tuple[Any, ...], tensors: Mapping[str, Tensor], at: str) -> Any:
    told = _expected(told, list, "a list", at)
    kinds = [inner[0]] * len(told) if inner[1:] == (...,) else list(inner)
    if len(kinds) != len(told):
        raise DamagedError(f"{at}: expected {len(kinds)} values, got {shown(told)}")
    parts = zip(told, kinds, strict=True)
    return tuple(
        unpacked(one, kind, tensors, _inside(at, number))
        for number, (one, kind) in enumerate(parts)
    )


def _plain(told: Any, kind: Any, at: str) -> Any:
    """A number, text, truth value, dtype or one of some words."""
    if kind is type(None):
        if told is not None:
            raise DamagedError(f"{at}: expected null, got {shown(told)}")
        return None
    if kind is float:
        if told in ("nan", "inf", "-inf") or type(told) is int:
            return float(told)  # JSON need not tell 1 from 1.0
        found: float = _expected(told, float, "a number", at)
        if not math.isfinite(found):
            raise DamagedError(f"{at}: expected a number, got one too large for float64")
        return found
    if kind is torch.dtype:
        if not isinstance(told, str) or told not in _DTYPES:
            raise DamagedError(f"{at}: expected a dtype, got {shown(told)}")
        return _DTYPES[told]
    if get_origin(kind) is Literal:
        if type(told) is not str or told not in get_args(kind):
            words = ", ".join(map(repr, get_args(kind)))
            raise DamagedError(f"{at}: expected one of {words}; got {shown(told)}")
        return told
    found_plain = _expected(told, kind, f"a value of type {kind.__name__}", at)
    if kind is int and not -(2**63) <= found_plain < 2**63:
        raise DamagedError(f"{at}: expected a whole number of 64 bits, got {shown(found_plain)}")
    return found_plain

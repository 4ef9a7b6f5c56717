"""Tensors in a safetensors file: each stored once, and read only where the file adds up.

The format is safetensors' own: eight bytes with the size of the header, the header as JSON, and the
numbers, little-endian. It is written as a stream, without a copy of all of it in memory, and read
into memory of its own, as a file that is mapped would crash the process if another shortened it.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.saving.parsing import parsed, shown
from attnprobe.saving.reading import DamagedError, filled

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
"""safetensors' names of dtypes; those of others are refused."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

LARGEST_HEADER = 16 * 2**20

MOST_AXES = 8


@dataclass(eq=False)
class Store:
    """Tensors to be written, each memory once, however many share it.

    Where an axis is repeated in memory that is not there (stride 0, as of a mask that is the same
    for all heads), one of its rows is stored.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    _names: dict[tuple[object, ...], str] = field(default_factory=dict)

    def put(self, tensor: Tensor, name: str) -> dict[str, Any]:
        """Take a tensor in; gives what stands for it in JSON.

        Raises:
            InputError: a dtype or layout that is not stored.
        """
        if tensor.layout is not torch.strided or tensor.dtype not in NAMES or tensor.is_meta:
            raise InputError(f"{name} cannot be saved: it is a {tensor.dtype} on {tensor.device}")
        core = tensor.detach()
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            core = core.narrow(axis, 0, 1) if size > 1 and stride == 0 else core
        memory = core.untyped_storage().data_ptr(), core.storage_offset(), core.device
        key = (*memory, core.dtype, core.shape, core.stride(), core.is_neg(), core.is_conj())
        name = self._names.setdefault(key, name)
        self.tensors[name] = core
        found: dict[str, Any] = {"tensor": name}
        if core.shape != tensor.shape:
            found["shape"] = list(tensor.shape)
        order = sorted(range(core.dim()), key=core.stride().__getitem__, reverse=True)
        if not core.is_contiguous() and order != sorted(order):
            found["order"] = order  # kept, as products may round otherwise with another
        return found

    def write(self, file: BinaryIO) -> str:
        """Write them all; gives the file's SHA-256."""
        assert sys.byteorder == "little"
        # The widest first, so that each begins at a multiple of its size.
        tensors = sorted(self.tensors.items(), key=lambda one: -one[1].element_size())
        header, end = {}, 0
        for name, one in tensors:
            begin, end = end, end + one.numel() * one.element_size()
            header[name] = {
                "dtype": NAMES[one.dtype],
                "shape": list(one.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        digest = hashlib.sha256()
        for part in (len(text).to_bytes(8, "little"), text):
            file.write(part)
            digest.update(part)
        for _, one in tensors:
            numbers = _bytes_of(one.cpu().resolve_conj().resolve_neg().contiguous())
            file.write(numbers)
            digest.update(numbers)
        return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    found: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(found)


@dataclass(frozen=True)
class _Entry:
    """One tensor of a header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def header_of(file: BinaryIO, size: int) -> tuple[bytes, list[_Entry]]:
    """The first bytes of a file, and the tensors they tell of, in the order of their numbers.

    Raises:
        DamagedError: what they tell does not add up, or is not what this module writes.
    """
    if size < 8:
        raise DamagedError("it is too short to be a safetensors file")
    start = bytes(filled(file, memoryview(bytearray(8))))
    length = int.from_bytes(start, "little")
    if length > min(LARGEST_HEADER, size - 8):
        raise DamagedError(f"its header would take {length:,} bytes of {size:,}")
    text = bytes(filled(file, memoryview(bytearray(length))))
    told = parsed(text)
    told.pop("__metadata__", None)
    entries = sorted(
        (_entry(name, one) for name, one in told.items()), key=lambda one: (one.begin, one.end)
    )
    reached = 0
    for one in entries:
        if one.begin != reached:
            raise DamagedError(f"tensor {shown(one.name)} begins at {one.begin}, not at {reached}")
        reached = one.end
    if 8 + length + reached != size:
        raise DamagedError(
            f"it has {size:,} bytes, and its header tells of {8 + length + reached:,}"
        )
    return start + text, entries


def _entry(name: str, told: Any) -> _Entry:
    where = f"tensor {shown(name)}"
    if not isinstance(told, dict) or set(told) != {"dtype", "shape", "data_offsets"}:
        raise DamagedError(f"{where}: expected dtype, shape and data_offsets, got {shown(told)}")
    dtype, shape, offsets = told["dtype"], told["shape"], told["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DamagedError(f"{where}: dtype is one of {', '.join(DTYPES)}; got {shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > MOST_AXES:
        raise DamagedError(f"{where}: expected a shape of sizes, got {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise DamagedError(f"{where}: expected where it begins and ends, got {shown(offsets)}")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != needed:
        raise DamagedError(
            f"{where}: its shape {shown(shape)} takes {shown(needed)} bytes, and it has "
            f"{shown(offsets[1] - offsets[0])}"
        )
    return _Entry(name, DTYPES[dtype], tuple(shape), offsets[0], offsets[1])


def _are_sizes(given: Any) -> bool:
    return isinstance(given, list) and all(type(one) is int and 0 <= one < 2**63 for one in given)


def read(file: BinaryIO, size: int, digest: str) -> dict[str, Tensor]:
    """The tensors of a file of `size` bytes whose SHA-256 is `digest`.

    Raises:
        DamagedError: it is another file, or a damaged one.
    """
    start, entries = header_of(file, size)
    seen = hashlib.sha256(start)
    found = {}
    for one in entries:
        raw = torch.empty(one.end - one.begin, dtype=torch.uint8)
        seen.update(filled(file, _bytes_of(raw)))
        if one.dtype == torch.bool and bool((raw > 1).any()):
            raise DamagedError(f"tensor {shown(one.name)} holds what is neither True nor False")
        found[one.name] = raw.view(one.dtype).view(one.shape)
    if seen.hexdigest() != digest:
        raise DamagedError("its numbers are not those that were saved: its SHA-256 is another")
    return found


def taken(tensors: Mapping[str, Tensor], told: Any) -> Tensor:
    """The tensor that `Store.put` made this JSON of.

    Raises:
        DamagedError: it was not that.
    """
    if not isinstance(told, dict) or not set(told) <= {"tensor", "shape", "order"}:
        raise DamagedError(f"expected a tensor's name, got {shown(told)}")
    name = told.get("tensor")
    if not isinstance(name, str) or name not in tensors:
        raise DamagedError(f"there is no tensor {shown(name)}")
    core = tensors[name]
    order, shape = told.get("order"), told.get("shape", list(core.shape))
    if order is not None:
        if not _are_sizes(order) or sorted(order) != list(range(core.dim())):
            raise DamagedError(f"expected an order of {core.dim()} axes, got {shown(order)}")
        back = [order.index(axis) for axis in range(core.dim())]
        core = core.permute(order).contiguous().permute(back)
    if not _are_sizes(shape) or len(shape) != core.dim():
        raise DamagedError(f"expected {core.dim()} sizes, got {shown(shape)}")
    if any(own not in (1, size) for own, size in zip(core.shape, shape, strict=True)):
        raise DamagedError(f"{shown(list(core.shape))} cannot be repeated to {shown(shape)}")
    return core.expand(shape)

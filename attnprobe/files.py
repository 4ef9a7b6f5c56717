"""Files that are whole or not there, and the paths of folders."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from attnprobe.errors import InputError


@contextmanager
def replacing(path: Path, beside: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write that takes this name only when all of it has reached the disk.

    After an exception nothing is left of it, and what had the name before still has it.

    Args:
        path: the name in the end.
        beside: the name until then, in the same folder; one that no other has by default.
    """
    temporary = beside or path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file, or a folder's list of names, reach the disk, where the system can do so."""
    with suppress(PermissionError):  # Windows opens no folders
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def folder_path(given: object, expected: str) -> Path:
    """The path of a folder; `expected` says of which, for the message.

    Raises:
        InputError: it is no path.
    """
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise InputError(f"expected {expected}, got {given!r}")
    return Path(path)

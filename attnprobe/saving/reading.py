"""Reading what a stranger may have written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


class DamagedError(Exception):
    """Why a file is not what it should be; who reads it says which file it is."""


@contextmanager
def regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A file to read, and its size in bytes; a pipe or a device would never end.

    Raises:
        DamagedError: it is no regular file.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(path, flags)
    with os.fdopen(number, "rb") as file:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError("it is not a regular file")
        yield file, status.st_size


def filled(file: BinaryIO, into: memoryview) -> memoryview:
    """Read as many bytes as there is room for.

    Raises:
        DamagedError: the file ends before.
    """
    done = 0
    while done < len(into):
        count = file.readinto(into[done:])  # type: ignore[attr-defined]
        if not count:
            raise DamagedError(f"it ends {len(into) - done} bytes too early")
        done += count
    return into

"""Ctrl-C in the middle: hooks go in and out whole, and what it left half-way is told apart."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the block's end: half of the hooks, put in or taken out, would stay."""
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()  # the one that Ctrl-C reaches
    if not main or not callable(before):  # not callable: ignored, deadly, or not Python's
        yield
        return
    came: list[tuple[int, Any]] = []
    signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


def modules_around() -> set[nn.Module]:
    """The modules whose call is under way in this thread, by its stack, around that of the module
    that calls this in a hook."""
    found = []
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is nn.Module._call_impl.__code__:
            found.append(frame.f_locals["self"])
    return set(found[1:])

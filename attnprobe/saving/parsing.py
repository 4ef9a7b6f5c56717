"""JSON from a stranger: no duplicate names, no NaN, no more of it than memory is given for."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from attnprobe.saving.reading import DamagedError

MOST_VALUES = 2**22
"""How many values JSON may hold: each takes up to about 100 bytes of memory, however short."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxdict = 4
_short.maxlevel = 3


def shown(value: object) -> str:
    """A value in short, for a message."""
    return _short.repr(value)


def parsed(data: bytes) -> dict[str, Any]:
    """The object that this JSON is.

    Raises:
        DamagedError: it is no JSON object in UTF-8, or has too many values.
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise DamagedError(f"it holds more than {MOST_VALUES:,} values")
    try:
        found = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise DamagedError(f"it is not JSON in UTF-8: {shown(str(error))}") from None
    if not isinstance(found, dict):
        raise DamagedError(f"expected a JSON object, got {shown(found)}")
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")

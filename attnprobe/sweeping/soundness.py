"""Whether a sweep's files are what was written: checksums, and what a manifest must hold."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from attnprobe.errors import InputError

NOTES = "shard.json"

_SEAL = "checksum"

_BEGUN: dict[str, Any] = {
    "complete": bool,
    "model": {"name": str, "dtype": str},
    "settings": {"tokens": int, "value": bool, "pairs": int, "verify": int | None},
    "corpus": {},
}
_COMPLETE = _BEGUN | {
    "corpus": {
        "sha256": str,
        **{"documents": int, "texts": int, "tokens": int},
        "skipped": {"count": int},
    },
    "damaged": {"count": int, "named": list},
    "left_out": {},
    "verification": {"texts": int, "verified": int, "mismatch": int, "not_checked": int},
    "tables": {},
}
"""What is looked up in a manifest: types, by name."""


def sha256_of(content: bytes) -> str:
    """In hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def sealed(notes: dict[str, Any], files: dict[str, str]) -> bytes:
    """A shard's notes, with the sha256 of its other files, and of all that together."""
    notes = notes | {"files": files}
    return json.dumps(notes | {_SEAL: sha256_of(json.dumps(notes).encode())}).encode()


def unsealed(place: Path) -> dict[str, Any] | None:
    """A shard's notes; None where they, or a file that they name, are not what was written."""
    try:
        notes = json.loads((place / NOTES).read_bytes())
        if not isinstance(notes, dict) or notes.pop(_SEAL, "") != sha256_of(
            json.dumps(notes).encode()
        ):
            return None
        whole = all(
            sha256_of((place / name).read_bytes()) == wanted
            for name, wanted in notes["files"].items()
        )
    except (OSError, ValueError, RecursionError):
        return None
    return notes if whole else None


def parsed(file: Path) -> dict[str, Any]:
    """What a manifest says.

    Raises:
        InputError: it cannot be read, or holds something else.
        FileNotFoundError, NotADirectoryError: there is none.
    """
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} is damaged: {error}. {_AGAIN}") from None
    complete = isinstance(content, dict) and content.get("complete") is True
    wrong = _unlike(content, _COMPLETE if complete else _BEGUN, "")
    if wrong:
        raise InputError(f"{file} is damaged: {wrong}. {_AGAIN}")
    found: dict[str, Any] = content
    return found


_AGAIN = "Delete the folder and run the sweep again"


def _unlike(content: Any, wanted: Any, name: str) -> str:
    """Where something is not of a type, or, of an object, does not hold what it should."""
    what = name or "it"
    if not isinstance(wanted, dict):
        fits = isinstance(content, wanted) and (wanted is bool or not isinstance(content, bool))
        return "" if fits else f"{what} is {content!r:.60}"
    if not isinstance(content, dict):
        return f"expected an object, and {what} is {content!r:.60}"
    for key, value in wanted.items():
        own = f"{name}.{key}" if name else key
        wrong = _unlike(content[key], value, own) if key in content else f"it has no {own}"
        if wrong:
            return wrong
    return ""


def checked(file: Path, wanted: str) -> bytes:
    """The content of a table of a finished sweep.

    Raises:
        InputError: it is gone, cannot be read, or is not what the manifest has the sha256 of.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise InputError(
            f"there is no {file}: the sweep was finished, and it is gone. {_AGAIN}"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    if sha256_of(content) != wanted:
        raise InputError(
            f"{file} is damaged: it is not the table that was written, by the sha256 in the "
            f"manifest. {_AGAIN}"
        )
    return content

"""`save` and `load_capture`: a capture in a folder.

`capture.json` says everything but the tensors, and names the safetensors file beside it that holds
them, with its size and SHA-256. Each saving gives that file a name that no other had, and the JSON
comes last: so whoever reads finds the capture that was there, or the new one, and never a half.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnprobe.errors import InputError
from attnprobe.files import folder_path, replacing, sync
from attnprobe.loading.encoding import encode
from attnprobe.models import as_language_model
from attnprobe.records import AttentionCall, Capture, LanguageModel, captured, writes
from attnprobe.saving.origins import origin_of, refuse_other
from attnprobe.saving.parsing import parsed, shown
from attnprobe.saving.reading import DamagedError, filled, regular
from attnprobe.saving.schema import packed, unpacked
from attnprobe.saving.soundness import refuse_unsound
from attnprobe.saving.tensors import Store, read

FORMAT = "attnprobe capture"
VERSION = 1
"""Raised with every change to what is saved: see `attnprobe.saving.schema`."""

JSON = "capture.json"
LARGEST_JSON = 32 * 2**20
"""In bytes: room for the words of some hundred thousand tokens."""

_TENSORS = re.compile(r"capture-[0-9a-f]{16}\.safetensors")
_TRIES = 5


def save(cap: Capture, path: str | os.PathLike[str]) -> None:
    """Write a capture to a folder, all but the model: safetensors and JSON, no pickle.

    What the calls share, as a mask, is written once. A capture that is there already is replaced
    when the new one is complete, and stays as it was if anything goes wrong. A folder that holds
    other files and no capture is refused. What tells the model from others goes along: its class,
    and hashes of its config and of a sample of each weight.

    Args:
        cap: what `capture` returned.
        path: the folder, which is made if it is not there.

    Raises:
        InputError: no capture; no place for it, by its path or on the disk; a folder of other
            files; tensors of a kind that is not stored, or more words than a reader takes.
    """
    folder = folder_path(path, "a folder's path")
    cap = captured(cap)
    if cap.lm is not None:
        cap = replace(cap, origin=origin_of(cap.lm))
    store = Store()
    told = packed(replace(cap, calls=tuple(map(_with_writes, cap.calls))), store, "")
    try:
        refuse_unsound(cap)
        known = (folder / JSON).exists() and not (folder / JSON).is_file()
        if known or (folder.exists() and not folder.is_dir()):
            raise InputError(f"cannot write {folder}: expected a folder for the capture")
        if (
            folder.exists()
            and not (folder / JSON).exists()
            and any(map(_foreign, folder.iterdir()))
        ):
            raise InputError(
                f"{folder} holds other files and no capture: expected a new folder, an empty one, "
                "or one with a capture to replace"
            )
        folder.mkdir(exist_ok=True)
        _write(folder, store, told)
    except DamagedError as error:
        raise InputError(f"this capture cannot be saved: {error}") from None
    except (OSError, UnicodeEncodeError) as error:
        raise InputError(f"cannot write {folder}: {error}") from None


def _foreign(file: Path) -> bool:
    """Whether a file is none that a save makes, one that was killed as it wrote included."""
    return not file.name.removeprefix(".").startswith("capture")


def load_capture(path: str | os.PathLike[str], lm: object = None) -> Capture:
    """Read a capture that `save` wrote.

    Nothing of the files is run, and nothing is believed that does not add up: sizes are held
    against the files' own before any memory is taken, and contents against their SHA-256. That
    tells damage, not intent: who made the files may have put anything into them, and the checks
    that need no model then speak of what is in them.

    Args:
        path: the folder.
        lm: the model that it was made of, as `capture` takes it. Without it the checks
            `projection`, `merge` and `logits` are not made, nor what else asks the model.

    Returns:
        The capture, on the CPU.

    Raises:
        InputError: no such capture; one that is damaged, foreign, or of a newer attnprobe; an `lm`
            that it was not made of.
    """
    folder = folder_path(path, "a folder's path")
    model = None if lm is None else as_language_model(lm)
    try:
        cap = _read(folder)
    except DamagedError as error:
        raise InputError(f"cannot read the capture in {folder}: {error}") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"cannot read {error.filename or folder}: {reason}") from None
    return cap if model is None else _with_model(cap, model)


def _with_writes(call: AttentionCall) -> AttentionCall:
    """With -1 for the number of writes where there were some since, else 0."""
    if call.cache is None:
        return call
    return replace(call, cache=replace(call.cache, writes=-int(call.written)))


def _write(folder: Path, store: Store, told: Any) -> None:
    before = _tensors_of(folder / JSON)
    name = f"capture-{secrets.token_hex(8)}.safetensors"
    try:
        with replacing(folder / name) as file:
            digest = store.write(file)
            size = file.tell()
        content = {
            "format": FORMAT,
            "version": VERSION,
            "tensors": {"file": name, "size": size, "sha256": digest},
            "capture": told,
        }
        text = _text(content | {"sha256": _digest(content)})
        if len(text) > LARGEST_JSON:
            raise DamagedError(f"its words take {len(text):,} bytes, more than {LARGEST_JSON:,}")
        parsed(text)  # as whoever reads it will
        with replacing(folder / JSON) as file:
            file.write(text)
    except BaseException:
        (folder / name).unlink(missing_ok=True)
        raise
    sync(folder.absolute().parent)
    if before is not None and before != name:
        (folder / before).unlink(missing_ok=True)


def _text(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _digest(content: dict[str, Any]) -> str:
    """The SHA-256 of all but itself."""
    return hashlib.sha256(_text({k: v for k, v in content.items() if k != "sha256"})).hexdigest()


def _tensors_of(path: Path) -> str | None:
    """The file of tensors that a capture there names; None if there is none to be read."""
    try:
        return str(_json_of(path)["tensors"]["file"])
    except (OSError, DamagedError):
        return None


def _json_of(path: Path) -> dict[str, Any]:
    """What the JSON says, once it is known to be whole and of this version."""
    with regular(path) as (file, size):
        if size > LARGEST_JSON:
            raise DamagedError(f"{JSON} has {size:,} bytes, more than {LARGEST_JSON:,}")
        told = parsed(bytes(filled(file, memoryview(bytearray(size)))))
    if told.get("format") != FORMAT:
        raise DamagedError(f"{JSON} is not of a capture: its format is {shown(told.get('format'))}")
    version = told.get("version")
    if type(version) is not int or version < 1:
        raise DamagedError(f"{JSON} tells no version, but {shown(version)}")
    if version > VERSION:
        raise DamagedError(
            f"it was written by a newer attnprobe, in format {shown(version)}, and this one reads "
            f"{VERSION}: install the newer one"
        )
    if set(told) != {"format", "version", "tensors", "capture", "sha256"}:
        raise DamagedError(f"{JSON} holds {shown(sorted(told))}")
    if told["sha256"] != _digest(told):
        raise DamagedError(f"{JSON} is not as it was saved: its SHA-256 is another")
    where = told["tensors"]
    if not isinstance(where, dict) or set(where) != {"file", "size", "sha256"}:
        raise DamagedError(f"{JSON}: expected file, size and sha256, got {shown(where)}")
    if not isinstance(where["file"], str) or not _TENSORS.fullmatch(where["file"]):
        raise DamagedError(f"{JSON} names no file of its own, but {shown(where['file'])}")
    return told


def _read(folder: Path) -> Capture:
    for left in reversed(range(_TRIES)):
        told = _json_of(folder / JSON)
        try:
            return _built(folder, told)
        except FileNotFoundError:  # replaced by another saving, or lost
            if not left or _json_of(folder / JSON) == told:
                raise
    raise AssertionError


def _built(folder: Path, told: dict[str, Any]) -> Capture:
    where = told["tensors"]
    with regular(folder / where["file"]) as (file, size):
        if size != where["size"]:
            raise DamagedError(
                f"{where['file']} has {size:,} bytes, and was saved with {shown(where['size'])}"
            )
        try:
            tensors = read(file, size, where["sha256"])
        except DamagedError as error:
            raise DamagedError(f"{where['file']}: {error}") from None
    try:
        cap: Capture = unpacked(told["capture"], Capture, tensors)
        refuse_unsound(cap)
    except DamagedError as error:
        raise DamagedError(f"{JSON}: {error}") from None
    return replace(cap, calls=tuple(map(_counted, cap.calls)))


def _counted(call: AttentionCall) -> AttentionCall:
    """With the number of writes to its own tensors; see `_with_writes`."""
    if call.cache is None:
        return call
    now = writes(call.key, call.value) + min(call.cache.writes, 0)
    return replace(call, cache=replace(call.cache, writes=now))


def _with_model(cap: Capture, lm: LanguageModel) -> Capture:
    """With its model, from which each call's module comes and what the model is run on again."""
    refuse_other(cap.origin, lm)
    modules = dict(lm.model.named_modules())
    parents = {child: one for one in modules.values() for child in one.children()}
    calls = []
    for call in cap.calls:
        module = modules.get(call.name)
        if module is None:
            raise InputError(f"the model has no module {call.name!r}, and the capture has")
        calls.append(replace(call, module=module, parent=parents.get(module)))
    inputs = cap.inputs if cap.part else _inputs(cap, lm)
    return replace(cap, lm=lm, origin=None, calls=tuple(calls), inputs=inputs)


def _inputs(cap: Capture, lm: LanguageModel) -> dict[str, torch.Tensor]:
    """What the model makes of the capture's ids, which is refused where it cannot run on them."""
    ids, target = (
        None
        if side is None
        else [row[here].tolist() for row, here in zip(side.input_ids, side.padding, strict=True)]
        for side in (cap, cap.target)
    )
    left = any(not bool(side.padding[:, 0].all()) for side in (cap, cap.target) if side)
    return encode(lm, ids, target, "left" if left else "right").inputs

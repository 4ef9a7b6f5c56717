"""The folder that a sweep writes: shards, tables and a manifest, each in full or not at all.

parts/000012/   a shard: sums.safetensors, pairs.parquet, and shard.json with the sha256 of each
                and of itself; gone when all are merged
manifest.json   what was run on what, whether it is complete, and the sha256 of each table
*.parquet       the tables
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from attnprobe.errors import AttnprobeError, InputError
from attnprobe.files import folder_path, replacing, sync
from attnprobe.records import counted
from attnprobe.sweeping.measuring import Measured
from attnprobe.sweeping.shards import Shard
from attnprobe.sweeping.soundness import NOTES, parsed, sealed, sha256_of, unsealed
from attnprobe.sweeping.tallies import Tally

_SPOOL = ".stdin"
_SUMS, _PAIRS = "sums.safetensors", "pairs.parquet"


class Folder:
    """A sweep's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = path / "parts"
        self.manifest_file = path / "manifest.json"
        self._made: list[Path] | None = None

    @classmethod
    def at(cls, path: object) -> Folder:
        """The folder that a user names.

        Raises:
            InputError: it is no path.
        """
        return cls(folder_path(path, "the path of a sweep's folder"))

    @property
    def spool(self) -> Path:
        """Where standard input is kept while it is read."""
        return self.path / _SPOOL

    def open(self) -> None:
        """Make the folder, and clear away what a killed sweep left half-written.

        Raises:
            AttnprobeError: it cannot be made or written to.
            InputError: it holds other files, and no sweep.
        """
        with self.writing():
            missing = [one for one in (self.path, *self.path.parents) if not one.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            if not self.manifest_file.exists():
                if {one.name for one in self.path.iterdir()} - {_SPOOL, ".manifest.json.part"}:
                    raise InputError(
                        f"{self.path} holds other files, and no sweep: give a new or an empty "
                        "folder"
                    )
                self._made = missing
            for left in (*self.path.glob(".*.part"), *self.parts.glob(".*")):
                _remove(left)

    def undo(self) -> None:
        """Remove what was made since `open`, of a sweep that is refused; not one begun before."""
        if self._made is None:
            return
        shutil.rmtree(self.parts, ignore_errors=True)
        for file in (self.spool, self.manifest_file):
            file.unlink(missing_ok=True)
        for made in self._made:
            with suppress(OSError):  # another has put something there
                made.rmdir()
        self._made = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Say what is kept where the disk is full, or what cannot be written.

        Raises:
            AttnprobeError: instead of OSError.
        """
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise AttnprobeError(
                    f"the disk is full: cannot write to {self.path}. "
                    f"{counted(len(self.finished()), 'shard')} finished and readable (read_sweep); "
                    "make room and run the same again to go on from there"
                ) from error
            raise AttnprobeError(
                f"cannot write to {self.path}: {reason}. Give a folder that can be written"
            ) from error

    # The manifest

    def manifest(self) -> dict[str, Any] | None:
        """What the manifest says; None where there is none.

        Raises:
            InputError: it is damaged.
        """
        try:
            return parsed(self.manifest_file)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write_manifest(self, content: dict[str, Any]) -> None:
        """Write the manifest.

        Raises:
            AttnprobeError: it cannot be written.
        """
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        self.write(self.manifest_file.name, text.encode())

    def write(self, name: str, content: bytes) -> None:
        """Write a file in full or not at all.

        Raises:
            AttnprobeError: it cannot be written.
        """
        beside = self.path / f".{name}.part"  # as `open` knows what a killed sweep left
        with self.writing(), replacing(self.path / name, beside) as file:
            file.write(content)

    # Shards

    def finished(self) -> list[int]:
        """The numbers of the shards that are there and whole, in order."""
        return [one for one in self.present() if self.notes(one) is not None]

    def present(self) -> list[int]:
        """The numbers of the shards that are there, whole or damaged, in order."""
        return sorted(int(one.name) for one in self.parts.glob("*") if one.name.isdecimal())

    def holds(self, shard: Shard) -> bool:
        """Whether a shard is finished. One that is damaged is not: it is told, and removed.

        Raises:
            InputError: one of its number is, and of other documents.
        """
        place = self.place(shard.number)
        if not place.exists():
            return False
        notes = self.notes(shard.number)
        if notes is None:
            warnings.warn(
                f"{place} is damaged: its files are not those that were written; it is computed "
                "again",
                stacklevel=2,
            )
            with self.writing():
                _remove(place)
            return False
        if notes["sha256"] != shard.sha256:
            name = shard.passages[0].name if shard.passages else shard.damaged[0][0]
            raise InputError(
                f"the corpus is not the one that {self.path} was begun with: it differs at {name}, "
                "or not far behind. Give the same corpus, or another folder"
            )
        return True

    def place(self, number: int) -> Path:
        """Where a shard is."""
        return self.parts / f"{number:06}"

    def keep(self, shard: Shard, found: Measured) -> None:
        """Write what a shard came to; of two that do so at once, one does.

        Raises:
            AttnprobeError: it cannot be written.
        """
        beside = self.parts / f".{shard.number:06}.{os.getpid()}"
        notes = {
            "sha256": shard.sha256,
            "documents": shard.documents,
            "passages": len(shard.passages),
            "characters": shard.characters,
            "texts": found.texts,
            "tokens": found.tokens,
            "damaged": shard.damaged + found.damaged,
            "left_out": found.left_out,
            "value_left_out": found.value_left_out,
            "verified": [asdict(one) for one in found.verified],
        }
        arrays = {
            f"{layer}/{one.name}": np.ascontiguousarray(getattr(tally, one.name))
            for layer, tally in sorted(found.tallies.items())
            for one in fields(tally)
        }
        with self.writing():
            try:
                beside.mkdir(parents=True)
                sums = save(arrays)
                _write(beside / _SUMS, sums)
                found.pairs.write(beside / _PAIRS)
                sync(beside / _PAIRS)
                files = {_SUMS: sha256_of(sums), _PAIRS: sha256_of((beside / _PAIRS).read_bytes())}
                _write(beside / NOTES, sealed(notes, files))
                sync(beside)
                if not self.place(shard.number).exists():
                    beside.rename(self.place(shard.number))
                sync(self.parts)
            finally:
                shutil.rmtree(beside, ignore_errors=True)

    def notes(self, number: int) -> dict[str, Any] | None:
        """What is said of a finished shard; None where it is damaged."""
        return unsealed(self.place(number))

    def tallies(self, number: int) -> dict[int, Tally]:
        """The tallies of a finished shard, by layer."""
        by_layer: dict[int, dict[str, np.ndarray]] = {}
        for name, array in load_file(self.place(number) / _SUMS).items():
            layer, _, which = name.partition("/")
            by_layer.setdefault(int(layer), {})[which] = array
        return {layer: Tally(**arrays) for layer, arrays in by_layer.items()}

    def pair_files(self, numbers: list[int]) -> list[Path]:
        """The word pairs of some finished shards."""
        return [self.place(number) / _PAIRS for number in numbers]

    def drop_parts(self) -> None:
        """Remove the shards: they are merged."""
        shutil.rmtree(self.parts, ignore_errors=True)
        self.spool.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write(file: Path, content: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())

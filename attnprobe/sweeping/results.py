"""Shards merged into tables, and `read_sweep`."""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import dataclass
from functools import cached_property
from importlib import util
from pathlib import Path
from typing import Any

import pandas as pd

from attnprobe.errors import InputError
from attnprobe.records import counted
from attnprobe.sweeping.folder import Folder
from attnprobe.sweeping.frames import frame_of
from attnprobe.sweeping.pairs import most_frequent
from attnprobe.sweeping.soundness import checked
from attnprobe.sweeping.sources import NAMED
from attnprobe.sweeping.tallies import Tally

TABLES = ("heads", "histograms", "distances", "classes", "pairs")


@dataclass(frozen=True, eq=False)
class Sweep:
    """What a sweep found: a folder of Parquet files, each read when it is asked for.

    Attributes:
        path: the folder.
        manifest: what was run on what: model, revision, tokenizer, dtype, versions, settings, the
            corpus and its sha256, what was damaged or left out, the verdicts of `verify`, and
            whether the sweep is complete. Of one that is not, the tables are of what is finished.
    """

    path: Path
    manifest: dict[str, Any]

    @cached_property
    def heads(self) -> pd.DataFrame:
        """A row for each layer and head, with the columns of `head_stats`, but `variability`, which
        needs each text twice: means over all rows of the corpus; and for each, `…_rows`, `…_std`
        (of the rows, not of their mean), `…_p10`, `…_median` and `…_p90`, the last three from the
        histograms: right to a bin, as if the rows of a bin lay evenly in it. A bin is 0.01 wide for
        shares and masses, ln(N)/100 nats for the entropy, and (N^(1/100) - 1)·(1 + distance) tokens
        for distances, N the most tokens of a text: 0.055 nats and 5.7 % of 1 + distance at 256. So
        of masses that are all 1e-7 the median here is 0.005."""
        return self._table("heads")

    @cached_property
    def histograms(self) -> pd.DataFrame:
        """layer, head, statistic, low, high, count: how many rows there are from low to high."""
        return self._table("histograms")

    @cached_property
    def distances(self) -> pd.DataFrame:
        """layer, head, distance (of the key before the query, in tokens; below 0, after it), weight
        (the sum of all weights over that distance), cells (how many these are), mean (of them) and
        share (of all weight)."""
        return self._table("distances")

    @cached_property
    def classes(self) -> pd.DataFrame:
        """layer, head, query_class, key_class, rows (queries of that class), mass (what they give
        to keys of that class, their mean) and uniform (what uniform weights would give them). The
        classes are those of `attnprobe.sweeping.texts.CLASSES`."""
        return self._table("classes")

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """layer, head, query, key, count: how often the row of a word's last token was largest at a
        token of the other word, the most frequent first. Only the row of a word's last token
        counts, and only of words with letters or digits; the key may be any word, and is that of
        the token with the largest weight, whatever the sum over its word. Rows that are largest at
        their text's first token are left out."""
        return self._table("pairs")

    def _table(self, name: str) -> pd.DataFrame:
        if self.manifest["complete"]:
            file = self.path / f"{name}.parquet"
            return pd.read_parquet(io.BytesIO(checked(file, self.manifest["tables"].get(name))))
        found = Merged(Folder(self.path)).table(name, self.manifest["settings"])
        assert isinstance(found, pd.DataFrame)
        return found

    def __repr__(self) -> str:
        corpus, state = self.manifest["corpus"], ""
        if not self.manifest["complete"]:
            state = ", unfinished"
            if corpus["passages"] and not corpus["documents"]:  # none of them has come to its end
                state += ", in the first document"
        documents = counted(corpus["documents"], "document")
        return (
            f"Sweep({self.path}: {self.manifest['model']['name']} over {documents}, "
            f"{counted(corpus['tokens'], 'token')}{state})"
        )


def read_sweep(path: str | os.PathLike[str]) -> Sweep:
    """Read what `sweep` wrote; of a sweep that was stopped, what is finished.

    Returns:
        A `Sweep`: `.heads`, `.histograms`, `.distances`, `.classes` and `.pairs` are DataFrames,
        `.manifest` a dictionary. Quantiles in `.heads` are right to a bin of the histograms, and no
        better: see `Sweep.heads`. Each table is a Parquet file in the folder as well, for any other
        library.

    Raises:
        InputError: not a path, or no sweep there; its manifest is damaged; no pyarrow. A table that
            is gone, or has not the sha256 that the manifest says, is refused when it is asked for.
            Of a sweep that was stopped, a damaged shard is left out, with a warning.
    """
    need_pyarrow()
    folder = Folder.at(path)
    manifest = folder.manifest()
    if manifest is None:
        what = "expected a folder, got a file" if folder.path.is_file() else "no manifest.json"
        raise InputError(f"there is no sweep in {path}: {what}. Give the folder that sweep wrote")
    if not manifest["complete"]:
        merged = Merged(folder)
        manifest |= merged.summary
        if merged.damaged:
            warnings.warn(
                f"{counted(len(merged.damaged), 'shard')} in {folder.parts}: damaged and left out, "
                f"{folder.place(merged.damaged[0]).name} first; the same sweep run again computes "
                "what is damaged again",
                stacklevel=2,
            )
    return Sweep(folder.path, manifest)


def need_pyarrow() -> None:
    """Refuse to begin what could not be written.

    Raises:
        InputError: no pyarrow.
    """
    if util.find_spec("pyarrow") is None:
        raise InputError(
            "a sweep is Parquet, which needs pyarrow: pip install 'attnprobe[parquet]'"
        )


class Merged:
    """The finished shards of a folder, added up in their order."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.tallies: dict[int, Tally] = {}
        self.counts = dict.fromkeys(("documents", "passages", "characters", "texts", "tokens"), 0)
        left_out: dict[str, str] = {}
        value_left_out: dict[str, str] = {}
        self.verified: list[dict[str, Any]] = []
        damaged: list[list[str]] = []
        count = 0
        self.numbers: list[int] = []
        self.damaged: list[int] = []  # shards, never merged
        for number in folder.present():
            notes = folder.notes(number)
            if notes is None:
                self.damaged.append(number)
                continue
            self.numbers.append(number)
            for name in self.counts:
                self.counts[name] += notes[name]
            left_out |= notes["left_out"]
            value_left_out |= notes["value_left_out"]
            self.verified += notes["verified"]
            count += len(notes["damaged"])
            damaged += notes["damaged"][: NAMED - len(damaged)]
            for layer, tally in folder.tallies(number).items():
                if layer in self.tallies:
                    self.tallies[layer].add(tally)
                else:
                    self.tallies[layer] = tally
        for left in left_out:
            self.tallies.pop(int(left), None)
        self.left_out = left_out
        self.summary: dict[str, Any] = {
            "corpus": self.counts | {"shards": len(self.numbers)},
            "damaged": {
                "count": count,
                "named": [{"name": name, "reason": reason} for name, reason in damaged],
            },
            "left_out": {f"layer {one}": why for one, why in left_out.items()},
            "value_left_out": {f"layer {one}": why for one, why in value_left_out.items()},
            "verification": self._verdicts(),
        }

    def _verdicts(self) -> dict[str, Any]:
        verdicts = [one["verdict"] for one in self.verified]
        ratios = [one["ratio"] for one in self.verified if one["ratio"] == one["ratio"]]
        return {
            "texts": len(verdicts),
            **{name: verdicts.count(name) for name in ("verified", "mismatch", "not_checked")},
            "worst_ratio": max(ratios, default=None),
            "not_verified": [one for one in self.verified if one["verdict"] != "verified"][:NAMED],
        }

    def table(self, name: str, settings: dict[str, Any]) -> pd.DataFrame:
        """One of `TABLES`."""
        limit = settings["tokens"]
        if name == "pairs":
            left_out = {int(layer) for layer in self.left_out}
            pairs: pd.DataFrame = most_frequent(
                self.folder.pair_files(self.numbers), settings["pairs"], left_out
            ).to_pandas()
            return pairs
        parts = [
            frame_of(name, layer, tally, limit, settings["value"])
            for layer, tally in sorted(self.tallies.items())
        ]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def parquet(frame: pd.DataFrame) -> bytes:
    """A table as a Parquet file."""
    content = io.BytesIO()
    frame.to_parquet(content, index=False, compression="zstd")
    return content.getvalue()

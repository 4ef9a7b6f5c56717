"""`sweep`: what every head does over a whole corpus."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from attnprobe.errors import AttnprobeError, InputError, ModelError, NonFiniteError
from attnprobe.hooks import refuse_replaced
from attnprobe.models import as_language_model
from attnprobe.records import LanguageModel, counted, whole
from attnprobe.sweeping.engines import Progress, by_ray, here, need_ray
from attnprobe.sweeping.folder import Folder
from attnprobe.sweeping.identity import about_of, begun
from attnprobe.sweeping.measuring import Settings
from attnprobe.sweeping.results import TABLES, Merged, Sweep, need_pyarrow, parquet, read_sweep
from attnprobe.sweeping.shards import Shard, shards
from attnprobe.sweeping.soundness import checked, sha256_of
from attnprobe.sweeping.sources import Corpus, Source, source

TOKENS = 256
"""The most tokens of a text, where the model takes as many."""


def sweep(
    lm: object,
    corpus: Corpus,
    out: str | os.PathLike[str],
    *,
    tokens: int | None = None,
    batch_size: int = 16,
    field: str = "text",
    value: bool = False,
    pairs: int = 100,
    verify: int | None = None,
    engine: Literal["local", "ray"] = "local",
    workers: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Sweep:
    """Gather, over a whole corpus, what `head_stats` says of a text: in a folder of Parquet files.

    Each shard is written with its sha256: one that was damaged since is computed again, with a
    warning, and never merged.

    Weights exist a tile at a time while the model runs, and are not kept; what is kept are counts,
    sums and histograms in float64, whose size does not hang on the corpus. A row's own numbers are
    computed in float32, or in float64 for a model in float64. Killed at any moment, the same call
    goes on after the last finished shard (some 16,000 tokens), and with the same batch_size the
    result is the same, bit for bit.

    Args:
        lm: what `load` returns, or a (model, tokenizer) pair; no encoder-decoder.
        corpus: a `.txt` file (one document), a `.jsonl` file (an object a line) or a `.parquet`
            file (a row a document), a folder of such (the manifest counts and names the files of
            other kinds in it, which are skipped); "-" for standard input, or an open file, of
            one text; a split of `datasets`, or any iterator of texts or of mappings.
        out: a new or empty folder, or that of the same sweep, to go on with.
        tokens: the most tokens of a text; 256, or the model's own limit, by default. What is longer
            is cut into texts of their own, that do not see each other: between words, near the
            limit, and, every 16,384 characters, before that.
        batch_size: texts at a time. It moves no count, and no mean by more than about 1e-13, by the
            order of the sums; beyond that by what a kernel may round in another way in another
            batch, which on a CPU, where a text is padded alike in any, was never seen. It may be
            another one when a sweep goes on.
        field: of JSON objects, Parquet rows and mappings, where the text is.
        value: gather the masses by value too; costs about a third more.
        pairs: how many word pairs of each head to keep, the most frequent; 0 for none. Of each word
            with letters or digits the row of its last token counts, with the token of the largest
            weight in it; rows that are largest at the text's first token are left out.
        verify: check the output of one text in so many, drawn by a checksum of the text, against
            the formula; the verdicts go into the manifest.
        engine: "local", in this process; or "ray", by Ray Data, on Ray's cluster or a new local
            one; the folder must be one that all its machines see.
        workers: with "ray", how many actors; each holds the model once. They change nothing, bit
            for bit.
        progress: called after each batch.

    Returns:
        What `read_sweep(out)` returns; its quantiles are right to a bin (see `Sweep.heads`). A
        document that cannot be read, an empty one, and a text for which the model gives NaN are
        counted and named in the manifest, and the rest goes on. A layer in which the model does not
        compute the formula is left out by name.

    Raises:
        InputError: a corpus that is not there or of another kind; a folder of another sweep, or of
            another corpus; a finished sweep of which a table is damaged; options out of range; no
            tokenizer; an encoder-decoder; an edit that is open on the model; no pyarrow, or no Ray.
            Nothing that this call wrote is left, but for shards that are finished.
        ModelError: no layer could be measured.
        NonFiniteError: NaN or infinity in the model's weights.
        AttnprobeError: the folder cannot be written to, or the disk is full; what is finished
            stays.
    """
    model = as_language_model(lm)
    folder = Folder.at(out)
    need_pyarrow()
    refuse_replaced(model.model, "sweep")
    settings = _settings(model, tokens, batch_size, value, pairs, verify)
    if engine not in ("local", "ray"):
        raise InputError(f"engine must be 'local' or 'ray', got {engine!r}")
    if whole(workers, "workers") < 1 or (engine == "local" and workers != 1):
        raise InputError(f"got workers={workers}: one with engine='local', 1 or more with 'ray'")
    if engine == "ray":
        need_ray()
    folder.open()
    about = about_of(model, settings, field)
    try:
        before = begun(folder, about)
        with folder.writing():
            opened = source(corpus, field, folder.spool)
        follow = _Following(opened, folder, progress)
        if before is not None and before["complete"]:
            return _finished(folder, before, follow)
        folder.write_manifest(about | {"complete": False, "corpus": {}})
        run = here if engine == "local" else by_ray
        run(model, follow.unfinished(), settings, folder, follow.progress, workers)
        return _finish(folder, about, follow)
    except (InputError, ModelError):
        if not folder.present():  # what is finished stays
            folder.undo()
        raise


class _Following:
    """Goes through the corpus, and sums up what has gone by."""

    def __init__(
        self, opened: Source, folder: Folder, show: Callable[[Progress], None] | None
    ) -> None:
        self.opened, self.folder = opened, folder
        self.progress = Progress(opened.total, show)
        self.count = 0
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of the shards so far."""
        return self._digest.hexdigest()

    def shards(self) -> Iterator[Shard]:
        """The corpus, shard by shard."""
        for shard in shards(self.opened.documents):
            self._digest.update(shard.sha256.encode())
            self.count += 1
            yield shard

    def unfinished(self) -> Iterator[Shard]:
        """Those that are not finished, in order."""
        for shard in self.shards():
            if self.folder.holds(shard):
                self.progress.skip(shard)
            else:
                yield shard


def _settings(
    lm: LanguageModel,
    tokens: int | None,
    batch_size: int,
    value: bool,
    pairs: int,
    verify: int | None,
) -> Settings:
    config = getattr(lm.model, "config", None)
    if lm.tokenizer is None:
        raise InputError("a sweep reads texts: give a (model, tokenizer) pair")
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(lm.model).__name__} is an encoder-decoder, which needs a target for each text; "
            "a sweep is of models that read one text"
        )
    most = getattr(config, "max_position_embeddings", None)
    most = most if isinstance(most, int) and most > 0 else None
    if tokens is None:
        tokens = min(TOKENS, most or TOKENS)
    least = {"tokens": (tokens, 8), "batch_size": (batch_size, 1), "pairs": (pairs, 0)}
    least |= {} if verify is None else {"verify": (verify, 1)}
    for name, (number, smallest) in least.items():
        if whole(number, name) < smallest:
            raise InputError(f"{name} must be at least {smallest}, got {number}")
    if most is not None and tokens > most:
        raise InputError(f"tokens={tokens}, and the model takes at most {most}")
    for name, weight in lm.model.named_parameters():
        if not weight.is_meta and not torch.isfinite(weight).all():
            raise NonFiniteError(f"the model's weight {name} holds NaN or infinity")
    return Settings(tokens, value, pairs, verify, batch_size)


def _finished(folder: Folder, before: dict[str, Any], follow: _Following) -> Sweep:
    """A sweep that was finished before: its tables as they are, or, where one of them is damaged
    and the shards are still there, merged again.

    Raises:
        InputError: it is of another corpus; a table is damaged or gone, and the shards are gone.
    """
    for _ in follow.shards():
        pass
    if follow.sha256 != before["corpus"]["sha256"]:
        folder.spool.unlink(missing_ok=True)
        raise InputError(
            f"{folder.path} holds a finished sweep of another corpus: give another folder"
        )
    try:
        for table in TABLES:
            checked(folder.path / f"{table}.parquet", before["tables"].get(table))
    except InputError:
        if folder.finished() != list(range(follow.count)):
            folder.spool.unlink(missing_ok=True)
            raise
        return _finish(folder, before, follow)
    folder.drop_parts()
    return read_sweep(folder.path)


def _finish(folder: Folder, about: dict[str, Any], follow: _Following) -> Sweep:
    """Merge the shards, write tables and manifest, and only then let go of the shards."""
    opened = follow.opened
    numbers = folder.present()
    if numbers != list(range(follow.count)):
        raise AttnprobeError(
            f"{folder.path} holds {counted(len(numbers), 'finished shard')}, and the corpus has "
            f"{follow.count}: give the same corpus, or another folder"
        )
    merged = Merged(folder)
    if merged.damaged:
        raise AttnprobeError(
            f"{counted(len(merged.damaged), 'shard')} in {folder.parts}: damaged "
            "while the sweep ran. Run the same again, and what is damaged is computed again"
        )
    if not merged.tallies:
        folder.undo()
        reasons = {f"{layer}: {reason}" for layer, reason in merged.summary["left_out"].items()}
        if reasons:
            raise ModelError(f"no layer could be measured: {min(reasons)}")
        raise InputError(f"the corpus {opened.name} holds no text: {_damage(merged)}")
    tables = {}
    for table in TABLES:
        with folder.writing():
            content = parquet(merged.table(table, about["settings"]))
        folder.write(f"{table}.parquet", content)
        tables[table] = sha256_of(content)
    corpus = {"name": opened.name, "sha256": follow.sha256, "skipped": opened.skipped_files}
    corpus |= merged.summary["corpus"]
    found = {"complete": True, "corpus": corpus, "tables": tables}
    folder.write_manifest(about | merged.summary | found)
    folder.drop_parts()
    return read_sweep(folder.path)


def _damage(merged: Merged) -> str:
    damaged = merged.summary["damaged"]
    if not damaged["count"]:
        return "it has no documents"
    first = damaged["named"][0]
    number = counted(damaged["count"], "document")
    return f"of {number} damaged the first is {first['name']}: {first['reason']}"

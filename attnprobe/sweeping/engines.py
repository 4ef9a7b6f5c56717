"""Who computes the shards: this process, or Ray's workers."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

import torch

from attnprobe.errors import AttnprobeError, InputError
from attnprobe.records import LanguageModel
from attnprobe.sweeping.folder import Folder
from attnprobe.sweeping.measuring import Settings, Show, measure
from attnprobe.sweeping.shards import Shard


@dataclass(eq=False)
class Progress:
    """How far a sweep is.

    Attributes:
        total: how much corpus there is, in bytes, rows or items; None where nothing tells.
        done: how much of it is behind.
        documents, tokens: how many have been measured, in this run and before.
        seconds: since this run began.
        tokens_now: how many tokens were measured in this run.
    """

    total: int | None
    show: Callable[[Progress], None] | None
    done: float = 0.0
    documents: int = 0
    tokens: int = 0
    tokens_now: int = 0
    began: float = field(default_factory=time.monotonic)
    skipped: float = 0.0

    @property
    def seconds(self) -> float:
        """Since this run began."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float | None:
        """About how many seconds are left; None where nothing tells."""
        now = self.done - self.skipped
        if self.total is None or now <= 0:
            return None
        return self.seconds * (self.total - self.done) / now

    def skip(self, shard: Shard) -> None:
        """Count a shard that was finished before."""
        self.documents += shard.documents
        self.done += shard.size
        self.skipped += shard.size
        self._tell()

    def within(self, shard: Shard) -> Show:
        """What counts a batch of a shard: its tokens, and how much of the shard it is."""
        return lambda tokens, part: self.worked(0, tokens, shard.size * part)

    def finish(self, shard: Shard) -> None:
        """Count a shard's documents."""
        self.worked(shard.documents, 0, 0)

    def worked(self, documents: int, tokens: int, size: float) -> None:
        """Count a shard that another process has computed."""
        self.documents += documents
        self.tokens += tokens
        self.tokens_now += tokens
        self.done += size
        self._tell()

    def _tell(self) -> None:
        if self.show is not None:
            self.show(self)


def here(
    lm: LanguageModel,
    shards: Iterable[Shard],
    settings: Settings,
    folder: Folder,
    progress: Progress,
    workers: int,
) -> None:
    """Compute the shards one after another, in this process."""
    for shard in shards:
        found = measure(lm, shard, settings, progress.within(shard))
        folder.keep(shard, found)
        progress.finish(shard)


def by_ray(
    lm: LanguageModel,
    shards: Iterable[Shard],
    settings: Settings,
    folder: Folder,
    progress: Progress,
    workers: int,
) -> None:
    """Compute the shards by Ray Data: actors that each hold the model, and take the next shard.

    The shards wait in files, so that neither this process nor Ray holds the corpus. A shard is
    written under its number by whoever computes it: what Ray computes again, when a worker was
    lost, is skipped or written once.
    """
    ray = _started(workers)
    queue = folder.path / ".queue"
    shutil.rmtree(queue, ignore_errors=True)
    try:
        with folder.writing():
            queue.mkdir()
            waiting = [_put(queue, shard) for shard in shards]
        if not waiting:
            return
        given = ray.put(lm)
        data = ray.data.from_items(waiting, override_num_blocks=min(len(waiting), _BLOCKS))
        done = data.map_batches(
            Worker,
            fn_constructor_args=(given, settings, str(folder.path), torch.get_num_threads()),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(waiting))),
            num_cpus=1,
        )
        for row in done.iter_rows():
            if row["error"]:
                raise AttnprobeError(row["error"])
            progress.worked(row["documents"], row["tokens"], row["size"])
    finally:
        shutil.rmtree(queue, ignore_errors=True)


_BLOCKS = 1000
"""In how many tasks Ray does all shards at most."""


def _put(queue: Path, shard: Shard) -> dict[str, Any]:
    """Keep a shard in a file until its turn comes."""
    file = queue / f"{shard.number:06}.pickle"
    file.write_bytes(pickle.dumps(shard))
    return {"file": str(file), "number": shard.number}


class Worker:
    """One of Ray's actors: holds the model, and computes shards."""

    def __init__(self, given: Any, settings: Settings, folder: str, threads: int) -> None:
        import ray

        torch.set_num_threads(threads)  # with others, kernels round in another way
        self.lm = ray.get(given)
        self.settings, self.folder = settings, Folder(Path(folder))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        """Compute one shard, unless it is there: a batch of one row."""
        (file,) = batch["file"]
        shard = pickle.loads(Path(file).read_bytes())  # noqa: S301 (our own, of this run)
        tokens, error = 0, ""
        try:
            if not self.folder.holds(shard):
                found = measure(self.lm, shard, self.settings, lambda tokens, part: None)
                tokens = found.tokens
                self.folder.keep(shard, found)
        except AttnprobeError as failed:
            error = str(failed)
        row = {"documents": shard.documents, "tokens": tokens, "size": shard.size, "error": error}
        return {name: [one] for name, one in row.items()}


def need_ray() -> None:
    """Refuse to begin what could not be computed.

    Raises:
        InputError: no Ray.
    """
    if util.find_spec("ray") is None:
        raise InputError("engine='ray' needs Ray: pip install 'attnprobe[ray]'")


def _started(workers: int) -> Any:
    """Ray, connected to the cluster of RAY_ADDRESS, or to a new one on this machine.

    Raises:
        InputError: a cluster with fewer processors than workers, which would wait for ever.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "local")
        options = {"num_cpus": workers, "include_dashboard": False} if address == "local" else {}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    processors = ray.cluster_resources().get("CPU", 0)
    if processors < workers:
        raise InputError(f"workers={workers}, and Ray has {processors:g} processors: give fewer")
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray

"""One process of `bench.py`: runs some ways to look into a model, and says what they took.

It is given one JSON object and prints one. It imports attnprobe only for attnprobe's own ways, so
that it also runs in the environments of others, whose requirements clash.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench_ways import Run, Shape, prepared
from torch import Tensor


def seconds(run: Run, ids: Tensor) -> float:
    """How long one run takes; what it keeps is gone before the next."""
    gc.collect()
    start = time.perf_counter()
    kept = run(ids)
    taken = time.perf_counter() - start
    del kept
    return taken


def times(shape: Shape, ways: list[str], rounds: int, limit: float) -> dict[str, Any]:
    """Each way beside a plain forward, in turns: in every round first one, then the other.

    A way that has taken `limit` seconds gets no further round, but each gets one.
    """
    models: dict[str, Any] = {}
    ids, base = shape.ids(), prepared(shape, "plain", models)
    found: dict[str, Any] = {}
    runs = {way: prepared(shape, way, models) for way in ways}
    seconds(base, ids)
    for way, run in list(runs.items()):  # warm; and without those that do not fit into memory
        try:
            seconds(run, ids)
            found[way] = {"plain": [], "own": []}
        except (MemoryError, RuntimeError) as error:
            found[way] = {"failed": _too_large(error)}
            del runs[way]
    for _ in range(rounds):
        for way, run in runs.items():
            if sum(found[way]["own"]) < limit:
                found[way]["plain"].append(seconds(base, ids))
                found[way]["own"].append(seconds(run, ids))
    return {way: one if "failed" in one else _summed(**one) for way, one in found.items()}


def _summed(plain: list[float], own: list[float]) -> dict[str, Any]:
    ratios = [mine / base for mine, base in zip(own, plain, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "rounds": len(ratios),
        "seconds": statistics.median(own),
        "plain_seconds": statistics.median(plain),
    }


def memory(shape: Shape, way: str) -> dict[str, Any]:
    """The most that one run makes resident, and the bytes of the tensors it keeps."""
    run, ids = prepared(shape, way, {}), shape.ids()
    run(ids[:, :8])  # so that what it imports and prepares once is there
    gc.collect()
    before = _storages()
    Path("/proc/self/clear_refs").write_text("5")  # forget the high water so far
    try:
        kept = run(ids)
    except (MemoryError, RuntimeError) as error:
        return {"failed": _too_large(error)}
    peak = _high_water()
    gc.collect()
    held = sum(size for at, size in _storages().items() if at not in before)
    del kept
    return {"peak": peak, "held": held}


def _storages() -> dict[int, int]:
    """The bytes of every tensor's storage, each once."""
    tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
    found = [one.untyped_storage() for one in tensors if one.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def _high_water() -> int:
    """The most resident memory that this process had, in bytes, as Linux tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _too_large(error: Exception) -> str:
    """What is said of a way that did not fit; any other error is one."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "too large"
    raise error


def done(job: dict[str, Any]) -> dict[str, Any]:
    """What came of each way of a job."""
    shape = Shape(**job["shape"])
    gc.freeze()  # a collection need not look through all that was imported: a third of a second
    try:
        with torch.no_grad():
            if job["what"] == "time":
                return times(shape, job["ways"], job["rounds"], job["limit"])
            return {way: memory(shape, way) for way in job["ways"]}
    finally:
        gc.unfreeze()


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    resource.setrlimit(resource.RLIMIT_DATA, (job["bytes"], job["bytes"]))
    print(json.dumps(done(job)))


if __name__ == "__main__":
    main()

"""Captures and views by the thousand in one process: what stays, counted; `make long-run`.

Of memory: what the process holds (resident), and the tensors and Python objects alive after a
collection. Of the rest: forward hooks, open files, threads, and open interceptions of the seam.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from transformers.modeling_utils import AttentionInterface

import attnprobe as ap

TEXT = "The children were playing in the green park, and the old man looked at them from the house"
VIEWS = ("head_view", "model_view", "neuron_view", "attention_view")


def counts(model: torch.nn.Module) -> dict[str, int]:
    """What is there now, after a collection."""
    gc.collect()
    process = psutil.Process()
    alive = gc.get_objects()
    hooks = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )
    return {
        "memory, MB": process.memory_info().rss // 2**20,
        "tensors": sum(type(one) in (torch.Tensor, torch.nn.Parameter) for one in alive),
        "objects": len(alive),
        "hooks": hooks,
        "files": process.num_fds(),
        "threads": threading.active_count(),
        "seam open": int(AttentionInterface.get_interface.__name__ != "get_interface"),
    }


def capture(lm: Any, number: int) -> None:
    """One capture, used as a user would: verified now and then, and else looked at."""
    cap = ap.capture(lm, f"{TEXT} number {number}")
    ap.weights(cap, layer=number % len(cap.calls))
    if number % 20 == 0:
        assert ap.verify(cap).passed
    if number % 20 == 10:
        with ap.edit(lm, scale="none"), ap.probe(lm):
            ap.capture(lm, TEXT)


def view(lm: Any, number: int, folder: Path) -> None:
    """One view, saved over the one before."""
    cap = ap.capture(lm, f"{TEXT} number {number}")
    draw = getattr(ap, VIEWS[number % len(VIEWS)])
    places = {"layer": 0, "head": 0} if number % len(VIEWS) == 2 else {}
    draw(cap, **places).save(folder / "view.html")


def run(captures: int, views: int) -> list[tuple[str, dict[str, int]]]:
    """What is there before and on the way: after a tenth, which warms caches up, and at the end."""
    lm = ap.load("bundled")
    found = [("before", counts(lm.model))]
    with TemporaryDirectory() as folder:
        for number in range(max(captures, 20)):
            capture(lm, number)
            if number + 1 in (captures // 10, captures // 2):
                found.append((f"{number + 1} captures", counts(lm.model)))
        found.append((f"{captures} captures", counts(lm.model)))
        for number in range(views):
            view(lm, number, Path(folder))
            if number + 1 in (views // 10, views // 2):
                found.append((f"and {number + 1} views", counts(lm.model)))
        found.append((f"and {views} views", counts(lm.model)))
    return found


def table(found: list[tuple[str, dict[str, int]]]) -> str:
    names = list(found[0][1])
    rows = [
        f"| {after} | {' | '.join(f'{one[name]:,}' for name in names)} |" for after, one in found
    ]
    return "\n".join([f"| after | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captures", type=int, default=1000)
    parser.add_argument("--views", type=int, default=200)
    parser.add_argument("--markdown", type=Path, help="write the page here as well")
    given = parser.parse_args()
    start = time.perf_counter()
    shown = table(run(given.captures, given.views))
    took = f"{time.perf_counter() - start:.0f} s, torch {torch.__version__}, one thread of a CPU"
    print(f"{shown}\n\n{took}")
    if given.markdown is not None:
        heading = "# A long run\n\nMade by `make long-run`: one process, what is there after"
        given.markdown.write_text(f"{heading}\n\n{shown}\n\n{took}.\n", encoding="utf-8")


if __name__ == "__main__":
    main()

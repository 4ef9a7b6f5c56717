"""What it takes to look into a model: time beside a plain forward, memory, and what is kept.

`make bench` writes docs/benchmarks.md; `make bench-peers` first makes an environment for each of
the other libraries, whose requirements clash with each other's. Every time is a ratio to a plain
forward that ran just before it in the same process; every memory is of a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_page import page, tables

ROOT = Path(__file__).parents[1]
WORKER = str(ROOT / "scripts" / "bench_worker.py")
THREADS = 2

OWN = {
    "plain": "a plain forward, sdpa",
    "plain eager": "a plain forward, eager",
    "output attentions": "`output_attentions=True`, eager",
    "hooks": "forward hooks that keep q, k, v and z",
    "capture": "attnprobe `capture`",
    "capture and weights": "attnprobe `capture`, and all weights, a layer at a time",
    "products": "a plain forward, and the products that `output` needs, alone",
    "verify output": 'attnprobe `verify(lm, ids, checks=["output"])`',
    "verify all": "attnprobe `verify(lm, ids)`, every check",
}
PEERS = {
    "transformer-lens": {
        "bridge all": "TransformerLens bridge, everything, eager",
        "bridge attention": "TransformerLens bridge, q k v scores pattern z, eager",
    },
    "nnsight": {
        "nnsight hooks": "nnsight, q k v z",
        "nnsight weights": "nnsight, q k v z and weights, eager",
    },
    "torchlens": {
        "torchlens trace": "torchlens `trace`, eager",
        "torchlens softmax": "torchlens `record` of softmax, eager",
    },
}

# What is freed goes back at once: else the C library's own threshold, which moves with what it has
# seen, lets the peak of a plain forward alone swing by 170 MB.
STEADY = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}

BASE = {"layers": 4, "heads": 4, "width": 256, "vocabulary": 1000, "tokens": 256, "texts": 1}
GROWN = ("plain", "capture", "capture and weights", "verify output")

FOLDER = ROOT / "attnprobe" / "bundled"
LOAD = f"""
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({str(FOLDER)!r}).eval()
tokenizer = AutoTokenizer.from_pretrained({str(FOLDER)!r})
with torch.no_grad():
    model(**tokenizer("The children were playing in the green park", return_tensors="pt"))
"""
STARTS = {
    "Python alone": ["-c", "pass"],
    "`import attnprobe`": ["-c", "import attnprobe"],
    "`attnprobe --help`": ["-m", "attnprobe", "--help"],
    "`import torch, transformers`": ["-c", "import torch, transformers"],
    "the same, and `import attnprobe`": ["-c", "import torch, transformers, attnprobe"],
    "load the bundled model, and one forward, without attnprobe": ["-c", LOAD],
    "`attnprobe verify` of the bundled model": ["-m", "attnprobe", "verify"],
}


@dataclass(frozen=True)
class Plan:
    """What to run, and how often.

    Attributes:
        sizes: of the model: layers, heads, width, vocabulary.
        texts: (tokens, texts) of each batch.
        rounds: how often each way is timed.
        limit: seconds after which a way gets no further round.
        bytes: the most memory that one process may take; what does not fit is “too large”.
        base, factors: of the second table: sizes, and what each is multiplied by in turn.
        starts: which starts are timed.
        apart: whether each worker is a process of its own.
        peers: the other libraries to run, where they are installed.
    """

    sizes: dict[str, int]
    texts: tuple[tuple[int, int], ...]
    rounds: int
    limit: float
    bytes: int
    base: dict[str, int]
    factors: tuple[int, ...]
    starts: tuple[str, ...]
    apart: bool = True
    peers: tuple[str, ...] = tuple(PEERS)


FULL = Plan(
    sizes={"layers": 12, "heads": 12, "width": 768, "vocabulary": 50257},
    texts=((128, 1), (512, 1), (1024, 1), (128, 8), (2048, 1)),  # a run may be cut short
    rounds=7,
    limit=120.0,
    bytes=10 * 2**30,
    base=BASE,
    factors=(2, 4),
    starts=tuple(STARTS),
)
SMALL = {"layers": 2, "heads": 3, "width": 30, "vocabulary": 101}
QUICK = replace(
    FULL,
    sizes=SMALL,
    texts=((16, 1),),
    rounds=2,
    base=SMALL | {"tokens": 16, "texts": 1},
    factors=(2,),
    starts=("Python alone", "`import attnprobe`"),
    apart=False,
    peers=(),
)


# Running


@dataclass
class Runner:
    """Runs workers, and says on stderr where it stands."""

    plan: Plan
    begun: float = field(default_factory=time.monotonic)

    def say(self, what: str) -> None:
        """Where it stands, with the seconds since it began."""
        print(f"bench: {time.monotonic() - self.begun:6.0f} s  {what}", file=sys.stderr, flush=True)

    def work(
        self, what: str, ways: list[str], shape: dict[str, int], python: str = sys.executable
    ) -> dict[str, Any]:
        """What a worker found; where it failed, what one for each way did."""
        place = f"{shape['texts']} × {shape['tokens']} tokens"
        self.say(f"{what}, {place}: {', '.join(ways)}")
        job = {"what": what, "ways": ways, "shape": shape, "threads": THREADS}
        job |= {"rounds": self.plan.rounds, "limit": self.plan.limit, "bytes": self.plan.bytes}
        if not self.plan.apart:
            from bench_worker import done as work_here

            return work_here(job)
        own = environment() | (STEADY if what == "memory" else {})
        done = subprocess.run(
            [python, WORKER, json.dumps(job)], capture_output=True, text=True, env=own
        )
        if done.returncode:
            if len(ways) > 1:  # one that does not fit may have taken the others with it
                return {way: self.work(what, [way], shape, python)[way] for way in ways}
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            self.say(f"failed: {last}")
            return {way: {"failed": "failed"} for way in ways}
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def environment() -> dict[str, str]:
    """What a worker's or a start's process gets."""
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(THREADS)}
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    return os.environ | own | quiet


def rows(
    runner: Runner, ways: dict[str, str], tokens: int, texts: int, python: str = sys.executable
) -> Iterator[dict[str, Any]]:
    """A row for each way: what it took beside a plain forward of the same Python."""
    shape = runner.plan.sizes | {"tokens": tokens, "texts": texts}
    timed = runner.work("time", list(ways), shape, python)
    memory = {
        way: runner.work("memory", [way], shape, python)[way] for way in {"plain": "", **ways}
    }
    for way, name in ways.items():
        found = beside(timed[way], memory[way], memory["plain"])
        yield {"way": name, "tokens": tokens, "texts": texts} | found


def beside(timed: Any, memory: Any, plain: Any) -> dict[str, Any]:
    """The numbers of one row; `peak` is what a process took at most beyond a plain forward's."""
    failed = timed.get("failed") or memory.get("failed")
    if failed:
        return {"failed": failed}
    return timed | {"held": memory["held"], "peak": memory["peak"] - plain["peak"]}


def growth(runner: Runner) -> Iterator[dict[str, Any]]:
    """How time and memory grow with each size of a small model, one at a time."""
    base = runner.plan.base
    shapes = [("", base)] + [
        (f"{factor} × {name}", base | {name: base[name] * factor})
        for name in ("tokens", "layers", "heads", "texts")
        for factor in runner.plan.factors
    ]
    for name, shape in shapes:
        if "heads" in name:  # each of the same size, so that the model is wider
            shape = shape | {"width": base["width"] * shape["heads"] // base["heads"]}
        timed = runner.work("time", list(GROWN), shape)
        memory = runner.work("memory", list(GROWN), shape)
        for way in GROWN:
            taken = {key: timed[way][key] for key in ("seconds", "ratio")}
            held = memory[way]["held"]
            yield {"size": name, "shape": shape, "way": OWN[way], **taken, "held": held}


def starts(runner: Runner) -> list[dict[str, Any]]:
    """Seconds from nothing, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in runner.plan.starts}
    for turn in range(runner.plan.rounds):
        runner.say(f"start-up, {turn + 1} of {runner.plan.rounds}")
        for name in taken:
            command = [sys.executable, *STARTS[name]]
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, env=environment())
            taken[name].append(time.perf_counter() - start)
    return [
        {"start": name, "seconds": statistics.median(all_), "least": min(all_), "most": max(all_)}
        for name, all_ in taken.items()
    ]


def peer_python(peer: str) -> Path:
    return ROOT / f".venv-peers-{peer}" / "bin" / "python"


def peer_version(peer: str) -> str:
    """Its version in its own environment; empty where it is not there."""
    if not peer_python(peer).exists():
        return ""
    code = f"from importlib.metadata import version; print(version({peer!r}))"
    done = subprocess.run([peer_python(peer), "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """The machine, without its name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("attnprobe", "torch", "transformers")},
        "load": os.getloadavg()[0],
    }


def measured(runner: Runner) -> Iterator[dict[str, Any]]:
    """What goes into the JSON and onto the page, again after each part: a run may be cut short."""
    plan = runner.plan
    found: dict[str, Any] = {
        "machine": machine(),
        "sizes": plan.sizes,
        "base": plan.base,
        "rounds": plan.rounds,
        "limit": plan.limit,
        "bytes": plan.bytes,
        "threads": THREADS,
        "peers": {peer: peer_version(peer) for peer in plan.peers},
        "rows": [],
        "starts": [],
        "growth": [],
    }
    found["starts"] = starts(runner)
    found["growth"] = list(growth(runner))
    for tokens, texts in plan.texts:
        found["rows"] += rows(runner, OWN, tokens, texts)
        for peer, installed in found["peers"].items():
            if installed:
                python = str(peer_python(peer))
                found["rows"] += rows(runner, PEERS[peer], tokens, texts, python)
        found["machine"]["load_after"] = os.getloadavg()[0]
        yield found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it works")
    parser.add_argument("--rounds", type=int, help="how often each way is timed")
    parser.add_argument("--limit", type=float, help="seconds, then a way gets no further round")
    parser.add_argument("--tokens", type=int, nargs="+", help="one text of each of these lengths")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--markdown", type=Path, help="write the page here")
    given = parser.parse_args(arguments)
    plan = QUICK if given.quick else FULL
    changes = {name: getattr(given, name) for name in ("rounds", "limit") if getattr(given, name)}
    if given.tokens:
        changes["texts"] = tuple((tokens, 1) for tokens in given.tokens)
    for found in measured(Runner(replace(plan, **changes))):
        if given.json:
            given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
        if given.markdown:
            given.markdown.write_text(page(found), encoding="utf-8")
    print(tables(found))


if __name__ == "__main__":
    main()

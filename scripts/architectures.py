"""Verify a small random model of every model type in transformers, and write what came of it.

`python scripts/architectures.py` makes docs/architectures.md anew: for each type of transformers'
causal, masked and sequence-to-sequence language models, what `ap.capture` and `ap.verify` say of
it, under sdpa and under eager. Each type runs in a process of its own, forked, so that one that
hangs or dies harms only itself; so this needs an operating system that forks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import transformers
from architecture_trial import CHECKS, TASKS, Trial, trial

KERNELS = ("sdpa", "eager")
SECONDS, BYTES = 90, 12 << 30
"""What one type may take."""

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"

WORST_FIRST = ("crash", "mismatch", "not_checked", "unsupported", "verified", "no_kernel")

MARKS = {"verified": "✓", "mismatch": "✗", "not_checked": "–"}


@dataclass(frozen=True)
class Entry:
    """A model type in one task, and its trial under each kernel."""

    task: str
    kind: str
    trials: dict[str, Trial]

    @property
    def worst(self) -> Trial:
        """The trial that decides what is said of the type."""
        return min(self.trials.values(), key=lambda one: WORST_FIRST.index(one.state))

    @property
    def terms(self) -> list[str]:
        """The terms met under any kernel."""
        return sorted({term for one in self.trials.values() for term in one.terms})

    def mark(self, check: str) -> str:
        """How a check came out over layers and kernels: ✓, ✗ or –, or ✓ and – both."""
        verdicts = {
            verdict
            for one in self.trials.values()
            for verdict in one.checks.get(check, {}).get("verdicts", ())
        }
        if check == "weights" and "verified" in verdicts:
            verdicts -= {"not_checked"}  # only eager gives its weights
        return (
            "✗" if "mismatch" in verdicts else "".join(MARKS[one] for one in sorted(verdicts)[::-1])
        )


def running(wanted: Sequence[tuple[str, str]], jobs: int) -> Iterator[Entry]:
    """Try each (task, type), several at a time, as they end."""
    queue, at_work = list(wanted), {}
    context = multiprocessing.get_context("fork")
    while queue or at_work:
        while queue and len(at_work) < jobs:
            task, kind = queue.pop(0)
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(theirs, task, kind))
            process.start()
            theirs.close()
            at_work[mine] = (task, kind, process, time.monotonic() + SECONDS)
        ready = wait(list(at_work), timeout=1)
        for pipe, (task, kind, process, deadline) in list(at_work.items()):
            if pipe in ready or time.monotonic() > deadline:
                del at_work[pipe]
                yield Entry(task, kind, result(pipe, process, pipe in ready))


def result(pipe: Connection, process: BaseProcess, ready: bool) -> dict[str, Trial]:
    """What a process has to say, and its end."""
    try:
        if ready:
            return pipe.recv()  # type: ignore[no-any-return]
        return {"sdpa": Trial("crash", f"took over {SECONDS} s")}
    except EOFError:
        process.join()
        return {"sdpa": Trial("crash", f"died with exit code {process.exitcode}")}
    finally:
        process.kill()
        process.join()
        pipe.close()


def work(pipe: Connection, task: str, kind: str) -> None:
    """The process of one type: quiet, and within its memory."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    pipe.send({kernel: trial(task, kind, kernel) for kernel in KERNELS})


def page(entries: Sequence[Entry]) -> str:
    """The page of all entries, in Markdown."""
    lines = [
        "# Attention architectures",
        "",
        f"Every model type of transformers {transformers.__version__}'s causal, masked and "
        "sequence-to-sequence language models: a small random one, with sharp attention, captured "
        "and verified under sdpa (where the model has it) and eager. Made by "
        "`make architectures`.",
        "",
        *totals(entries),
        "",
        "✓ verified, ✗ mismatch, – not checked, ✓– some layers or kernels each; empty: no capture.",
    ]
    for task in TASKS:
        own = [one for one in entries if one.task == task]
        lines += ["", f"## {task}", "", *table(own)] if own else []
    return "\n".join(lines) + "\n"


def totals(entries: Sequence[Entry]) -> list[str]:
    """Lines that count the states by task, and the reasons."""
    tasks = [task for task in TASKS if any(one.task == task for one in entries)]
    lines = [f"| state | {' | '.join(tasks)} | all |", "|---" * (len(tasks) + 2) + "|"]
    for state in WORST_FIRST[::-1]:
        counts = Counter(one.task for one in entries if one.worst.state == state)
        if counts:
            cells = [str(counts[task]) for task in tasks] + [str(counts.total())]
            lines.append(f"| {state} | {' | '.join(cells)} |")
    reasons = Counter(
        one.worst.reason.split(":")[0] for one in entries if one.worst.state == "unsupported"
    )
    lines += ["", "Why types are unsupported:", ""]
    lines += [f"- {reason}: {count}" for reason, count in sorted(reasons.items())]
    own_mask = sum(one.worst.state == "verified" and "–" in one.mark("mask") for one in entries)
    lines += ["", f"Verified types whose mask follows a rule of their own: {own_mask}."]
    return lines


def table(entries: Sequence[Entry]) -> list[str]:
    """A row for each type."""
    heads = ["type", "state", "kernels", *CHECKS, "terms", "reason"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in sorted(entries, key=lambda entry: entry.kind):
        kernels = [name for name, run in one.trials.items() if run.state != "no_kernel"]
        cells = [
            f"`{one.kind}`",
            one.worst.state,
            ", ".join(kernels),
            *(one.mark(check) for check in CHECKS),
            ", ".join(one.terms),
            one.worst.reason.replace("|", "\\|"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def as_json(entries: Sequence[Entry]) -> dict[str, Any]:
    """Everything, by task and type."""
    return {
        f"{one.task}/{one.kind}": {kernel: asdict(run) for kernel, run in one.trials.items()}
        for one in sorted(entries, key=lambda entry: (entry.task, entry.kind))
    }


def main() -> int:
    """Run all types, or some; write the page, or print it where it is not of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", help="some model types, with commas between them")
    parser.add_argument("--tasks", default=",".join(TASKS), help="some of causal,masked,seq2seq")
    parser.add_argument("--jobs", type=int, default=2, help="how many types at a time")
    parser.add_argument("--json", type=Path, help="write everything known of each call here")
    options = parser.parse_args()
    kinds = options.types.split(",") if options.types else None
    wanted = [
        (task, kind)
        for task in options.tasks.split(",")
        for kind in sorted(TASKS[task])
        if kinds is None or kind in kinds
    ]
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    entries = []
    for number, one in enumerate(running(wanted, options.jobs), 1):
        entries.append(one)
        told = "" if one.worst.state == "verified" else f": {one.worst.reason[:150]}"
        line = f"{number}/{len(wanted)} {one.task} {one.kind} {one.worst.state}{told}"
        print(line, file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps(as_json(entries), indent=1), encoding="utf-8")
    if len(wanted) == sum(map(len, TASKS.values())):
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(entries), encoding="utf-8")
    else:
        print(page(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every mutant on every kind of attention it applies to: how far beyond its bound is it found?

`python scripts/mutants.py` prints the table; with `--markdown docs/mutants.md` it is written
there. `tests/test_mutants.py` asserts what it holds.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from mutant_models import KINDS, SEAM, Kind, captured, made
from planting import installed
from torch import nn
from wrong_attention import PLACED, UNCHANGED, Mutant, mutants_of

from attnprobe.verification import CHECKS, verify

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAGE = Path(__file__).parents[1] / "docs" / "mutants.md"
COLUMNS = [(kernel, dtype) for kernel in SEAM for dtype in DTYPES]
Column = tuple[str, torch.dtype]

TELLING = {
    "kernel": ("weights", "output"),
    "model": ("mask", "weights", "output"),
    "before": ("projection",),
}
"""By a mutant's place, the checks that are to find it: each by itself, not by what it does to
later layers or to the logits."""


@dataclass(frozen=True)
class Found:
    """What `verify` says of a model that runs with a mutant.

    Attributes:
        state: "caught" if it is a mismatch; "told" if it is none, but is said not to be checked;
            "passed".
        ratio: of error to bound, the largest finite one of what mismatches (of all, where nothing
            does); infinite where there is none.
        checks: those that mismatch.
    """

    state: str
    ratio: float
    checks: frozenset[str]


def found(mutant: Mutant, kind: Kind, model: nn.Module, seed: int) -> Found:
    """Run a kind's model with a mutant, capture and verify it."""
    with installed(mutant, kind, model, seed):
        cap = captured(kind, model, seed)
    report = verify(cap, checks=CHECKS if mutant is UNCHANGED else TELLING[mutant.place])
    bad = [row for row in report.rows if row.verdict == "mismatch"]
    compared = bad or [row for row in report.rows if row.verdict != "not_checked"]
    ratios = [row.ratio for row in compared if row.check != "mask" and math.isfinite(row.ratio)]
    # Only eager gives its weights, so those may be unchecked without a word.
    unchecked = {row.check for row in report.rows if row.verdict == "not_checked"} - {"weights"}
    state = "caught" if bad else "told" if unchecked else "passed"
    return Found(state, max(ratios, default=math.inf), frozenset(row.check for row in bad))


def may_be_told(mutant: Mutant, kind: Kind) -> bool:
    """Whether attnprobe does not know enough of a kind to call the mutant a mismatch.

    Of some types it is not known whether their config says all of the scale and the mask, of some
    classes not what they do to query and key: reports say so.
    """
    unknown = {"model": not kind.facts, "before": not kind.projected, "kernel": False}
    return unknown[mutant.place]


@dataclass(frozen=True)
class Line:
    """A mutant on a kind: what was found, by kernel and dtype, over seeds."""

    kind: Kind
    mutant: Mutant
    runs: dict[Column, list[Found]]

    @property
    def every(self) -> list[Found]:
        """All runs."""
        return [one for runs in self.runs.values() for one in runs]

    @property
    def wrong(self) -> int:
        """How many runs are judged wrongly."""
        if self.mutant is UNCHANGED:
            return sum(one.state == "caught" or one.ratio > 1 for one in self.every)
        right = {"caught"} | ({"told"} if may_be_told(self.mutant, self.kind) else set())
        return sum(one.state not in right for one in self.every)

    @property
    def told(self) -> bool:
        """Whether it is not caught everywhere, as reports say."""
        told = any(one.state == "told" for one in self.every)
        return told and self.mutant is not UNCHANGED

    @property
    def checks(self) -> str:
        """The checks that found it in every run that caught it."""
        caught = [one.checks for one in self.every if one.state == "caught"]
        common = frozenset.intersection(*caught) if caught else frozenset()
        return ", ".join(name for name in CHECKS if name in common)

    def cell(self, column: Column) -> str:
        """The least ratio of a column's runs; of the unchanged model, the largest."""
        runs = self.runs.get(column, [])
        if not runs:
            return ""
        if self.mutant is UNCHANGED:
            return f"{max(one.ratio for one in runs):.2f}"
        if any(one.state == "passed" for one in runs):
            return "MISSED"
        if any(one.state == "told" for one in runs):
            return "–"
        return number(min(one.ratio for one in runs))


def number(ratio: float) -> str:
    """A ratio to two digits; ∞ where no error may be, as in a mask or a weight of the future."""
    return "∞" if math.isinf(ratio) else f"{ratio:.1f}" if ratio < 10 else f"{ratio:.2g}"


def lines(kinds: Iterable[Kind], seeds: Sequence[int], turns: bool = False) -> Iterator[Line]:
    """Run everything, kind by kind; by turns, each mutant under one kernel only."""
    for kind in kinds:
        columns = [(kernel, dtype) for kernel, dtype in COLUMNS if kernel in kind.kernels]
        models = {(column, seed): made(kind, *column, seed) for column in columns for seed in seeds}
        for turn, mutant in enumerate((UNCHANGED, *mutants_of(kind))):
            one = kind.kernels[turn % len(kind.kernels)]
            runs = {
                column: [found(mutant, kind, models[column, seed], seed) for seed in seeds]
                for column in columns
                if not turns or mutant is UNCHANGED or column[0] == one
            }
            yield Line(kind, mutant, runs)


def summary(table: Sequence[Line]) -> list[list[str]]:
    """A row for each mutant: on how many kinds it is caught, or told, and the least ratios."""
    rows = []
    for mutant in (UNCHANGED, *(Mutant(*one) for one in PLACED)):
        own = [line for line in table if line.mutant == mutant]
        told = sum(line.told for line in own)
        cells = []
        for column in COLUMNS:
            of = [one for line in own for one in line.runs.get(column, [])]
            if mutant is UNCHANGED:
                cells.append(f"{max((one.ratio for one in of), default=0):.2f}")
            else:
                caught = [one.ratio for one in of if one.state == "caught"]
                cells.append(number(min(caught)) if caught else "")
        if own:
            counts = [str(len(own) - told), str(told or "")]
            rows.append([mutant.name, mutant.place, *counts, *cells])
    return rows


def detail(table: Sequence[Line]) -> list[list[str]]:
    """A row for each mutant on each kind."""
    return [
        [line.kind.name, line.mutant.name, line.mutant.place, *map(line.cell, COLUMNS), line.checks]
        for line in table
    ]


COLUMN_NAMES = [f"{kernel} {str(dtype).removeprefix('torch.')}" for kernel, dtype in COLUMNS]
SUMMARY = ["mutant", "where", "kinds", "told", *COLUMN_NAMES]
DETAIL = ["kind", "mutant", "where", *COLUMN_NAMES, "found by"]

LEGEND = """Each number is the least ratio of error to bound over {seeds}: above 1 is a mismatch,
that is, the mutant is found. Of `no change`, the model as it is, it is the largest of all checks:
at most 1, or it were a false alarm. ∞: where no error may be (an entry of a mask, a weight of the
future). –: told, no mismatch, but reported as not checked, as it is not known whether the config
says all of the type's scale and mask (`model`), or what the class does to query and key (`before`).

`kernel`: the kernel computes otherwise than it was asked to. `model`: the model asks a right kernel
for the wrong thing; the model's own code is not told apart from what it computes. `before`: query
or key are made wrongly. Scores have a standard deviation of about 2. A mutant counts as found only
if the checks of its own place find it: `weights` and `output`, those and `mask`, `projection`."""


def text(header: list[str], rows: list[list[str]]) -> str:
    """A table for a terminal."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table for a page."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def page(table: Sequence[Line], seeds: str) -> str:
    """docs/mutants.md."""
    return "\n\n".join(
        [
            "# Mutants",
            f"Attention that is wrong on purpose, on {len({line.kind for line in table})} kinds of "
            f"attention of transformers {transformers.__version__}, and how far beyond its bound "
            "`attnprobe.verify` finds it. Made by `make mutants`.",
            LEGEND.format(seeds=seeds),
            f"## Over all kinds\n\n{markdown(SUMMARY, summary(table))}",
            f"## Kind by kind\n\n{markdown(DETAIL, detail(table))}\n",
        ]
    )


def main() -> int:
    """Run all kinds, or some; print or write the tables; 1 if anything is judged wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kinds", help="some model types, with commas between them")
    parser.add_argument("--markdown", type=Path, help="write the tables here, in Markdown")
    options = parser.parse_args()
    wanted = options.kinds.split(",") if options.kinds else [kind.type for kind in KINDS]
    transformers.logging.set_verbosity_error()
    table = []
    for line in lines([kind for kind in KINDS if kind.type in wanted], range(options.seeds)):
        table.append(line)
        if line.mutant is UNCHANGED:
            print(line.kind.name, file=sys.stderr, flush=True)
    seeds = f"{options.seeds} seeds" if options.seeds > 1 else "one seed"
    if options.markdown:
        options.markdown.write_text(page(table, seeds), encoding="utf-8")
    else:
        parts = [text(DETAIL, detail(table)), text(SUMMARY, summary(table))]
        print(*parts, LEGEND.format(seeds=seeds), sep="\n\n")
    wrong = [line for line in table if line.wrong]
    for line in wrong:
        print(f"JUDGED WRONGLY: {line.kind.name}: {line.mutant.name} ({line.mutant.place})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

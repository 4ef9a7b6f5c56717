"""The tables and the page of `bench.py`, made of nothing but the numbers it writes as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

GOALS = """\
## Goals, and what limits them

| ratio to a plain forward, or MB | 128 tokens | 512 | 1,024 |
| --- | ---: | ---: | ---: |
| `capture` | ≤ 1.01 | ≤ 1.01 | ≤ 1.02 |
| `capture`, and all weights | ≤ 1.03 | ≤ 1.06 | ≤ 1.10 |
| `verify(lm, ids, checks=["output"])` | ≤ 1.06 | ≤ 1.12 | ≤ 1.20 |
| `verify(lm, ids)`, every check | ≤ 3 | ≤ 3.5 | ≤ 4 |
| peak of `verify(lm, ids, checks=["output"])` | ≤ 15 MB | ≤ 30 MB | ≤ 60 MB |

A capture pays a fixed time for each layer, whatever its size, 1 to 3 ms: opening the probe, the
facts of the layer, its record. The rest is what hooks that keep tensors cost as well.

Every check runs the model three times: as it is, with the formula in place of every attention, and
with each attention moved by its bound, which measures what the bound is worth at the logits. That
alone is 3. In shares of a forward of 128 tokens, on one thread: the projections again, in float64,
0.42, of which the products alone are 0.27; `output` 0.16; `merge` 0.13; the formula in place of the
attentions 0.23; comparing the logits 0.08. So 3 and 3.5 are below what these checks can take.

`output` is three products of each tile below the diagonal, two in float64 and, for the bound, one
in float32, with a softmax between them. The row “the products that `output` needs, alone” is a
forward and these, without a mask, a bound or a comparison: what is above a goal there, no such
check can meet. Where it was profiled (two cores of an AMD EPYC), they ran at two thirds of the 90
GFLOP/s that a large float64 product reaches: of a tile of 64 rows, what is read of keys and values
weighs more. What the check takes beside them is the passes over output and bound, number by number,
and, at 128 tokens, the many small calls of torch themselves.
"""
"""What was aimed at, and what stands in the way where it is missed, from profiles."""


def tables(found: dict[str, Any]) -> str:
    """Every table, under a heading each."""
    return "\n".join(f"## {name}\n\n{text}" for name, text in _sections(found))


def page(found: dict[str, Any]) -> str:
    """docs/benchmarks.md."""
    sizes, machine = found["sizes"], found["machine"]
    size = f"{sizes['layers']} layers, {sizes['heads']} heads, {sizes['width']} wide"
    threads, rounds, limit = found["threads"], found["rounds"], found["limit"]
    versions = ", ".join(f"{name} {one}" for name, one in machine["versions"].items())
    peers = "".join(f", {name} {one}" for name, one in found["peers"].items() if one)
    absent = [name for name, one in found["peers"].items() if not one]
    missing = f"Not installed here, so not run: {', '.join(absent)}.\n" if absent else ""
    cores = f"{machine['cores']} cores, no GPU"
    loads = [f"{machine[name]:.1f}" for name in ("load", "load_after")]
    return f"""# Benchmarks

What it takes to look into a model, beside running it. Written by `make bench`, of one run of
`scripts/bench.py`; `make bench-peers` first installs the other libraries, an environment each.

The model is a random GPT-2 of {size}, with {sizes["vocabulary"]:,} tokens
in its vocabulary and as many positions as the texts need, in float32, on {threads} threads.
**Time** is a ratio to a plain forward (sdpa) of the same ids in the same process, which ran just
before: the median of up to {rounds} such pairs, with the least and the most; a way that had
taken {limit:.0f} s got no further round. The first row is a plain forward beside another: how far
that moves is noise. **Peak** is what a process of its own held resident at most, less what that of
a plain forward did, where what is freed goes back at once (`MALLOC_MMAP_THRESHOLD_`): the library's
own code is in it. **Kept** is the bytes of the tensors that are
there afterwards, each storage once, the logits among them (a plain forward's are all that it
keeps). What would take more than {found["bytes"] / 2**30:.0f} GB is “too large”.

What is kept differs, so these are not races: attnprobe keeps for each layer query, key, value, the
heads' output, the module's input and output, and computes weights from them; `output_attentions`
keeps the weights and the cache; the bridge's “everything” and torchlens' `trace` keep every step
of the model. The verification computes in float64 and bounds the rounding error of each number.

{tables(found)}
{GOALS}
## The machine

{machine["processor"]}, {cores}; {machine["system"]}, Python {machine["python"]},
{versions}{peers}.
{missing}The load average was {loads[0]} before and {loads[1]} after the run, whose own is
up to {threads}: above that, others used the machine as well.
"""


def _sections(found: dict[str, Any]) -> Iterable[tuple[str, str]]:
    batches = dict.fromkeys((row["texts"], row["tokens"]) for row in found["rows"])
    for texts, tokens in batches:
        several = "1 text" if texts == 1 else f"{texts} texts"
        own = [row for row in found["rows"] if (row["texts"], row["tokens"]) == (texts, tokens)]
        head = ("", "time", "least – most", "rounds", "seconds", "peak", "kept")
        yield f"{several} of {tokens:,} tokens", _table(head, map(_row, own))
    if found["starts"]:
        head = ("", "seconds", "least – most")
        cells = ((one["start"], *_seconds(one)) for one in found["starts"])
        yield "Start-up", "Each in a process of its own, in turns.\n\n" + _table(head, cells)
    if found["growth"]:
        yield "How time and memory grow", _growth(found)


def _growth(found: dict[str, Any]) -> str:
    base = found["base"]
    sizes = f"{base['layers']} layers, {base['heads']} heads, {base['width']} wide"
    head = ("", *dict.fromkeys(row["way"] for row in found["growth"]))
    small = f"{sizes}, {base['texts']} × {base['tokens']} tokens"
    grown = {row["size"]: row["shape"] for row in found["growth"]}
    return (
        f"A small model ({small}), and one size of it at a time larger. Seconds, the ratio to a "
        "plain forward of that size, and what is kept. More heads are of the same size, so that "
        f"the model is wider.\n\n{_table(head, (_grown(found, size) for size in grown))}"
    )


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    if "failed" in row:
        return (row["way"], row["failed"], "", "", "", "", "")
    return (
        row["way"],
        f"{row['ratio']:.2f} ×",
        f"{row['least']:.2f} – {row['most']:.2f}",
        str(row["rounds"]),
        f"{row['seconds']:.3g}",
        _bytes(row["peak"]),
        _bytes(row["held"]),
    )


def _grown(found: dict[str, Any], size: str) -> tuple[str, ...]:
    own = [row for row in found["growth"] if row["size"] == size]
    cells = (f"{row['seconds']:.3g} s, {row['ratio']:.2f} ×, {_bytes(row['held'])}" for row in own)
    return (size or "as it is", *cells)


def _seconds(one: dict[str, Any]) -> tuple[str, str]:
    return f"{one['seconds']:.2f}", f"{one['least']:.2f} – {one['most']:.2f}"


def _bytes(size: float) -> str:
    mega = size / 2**20
    return f"{mega:,.1f} MB" if abs(mega) < 10 else f"{mega:,.0f} MB"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

"""Reports and tables as text, as JSON and as a page of HTML, and files written in full or not."""

from __future__ import annotations

import errno
import html
import io
import json
import math
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnprobe.checking.report import Row, VerificationReport, ratio_text
from attnprobe.errors import AttnprobeError
from attnprobe.files import replacing

if TYPE_CHECKING:
    import pandas as pd

_UNCUT = 10_000
_COLUMNS = ("check", "layer", "head", "error", "bound", "ratio", "verdict", "reason")


def report_text(
    report: VerificationReport, text: str, width: int | None = None, target: str | None = None
) -> str:
    """A report to read: what was run, a table by check and layer, the worst head, the verdict.

    `width` is that of the terminal; None for as wide as it gets. `target` is what an
    encoder-decoder's decoder was given.
    """
    lines = [
        f"model  {report.model} in {report.dtype}, {report.kernel} kernel",
        f"text   {_visible(text)} ({report.tokens} tokens)",
    ]
    if target is not None:
        lines.append(f"target {_visible(target)}")
    if report.rows_left_out:
        lines.append(f"       {report.rows_left_out} query rows have no key, and are left out")
    cells = _by_layer(report)
    lines += ["", _grid(_COLUMNS[:-1], (row[:-1] for row in cells), _COLUMNS[1:6], width), ""]
    for check, layer, *_, verdict, reason in cells:
        if reason:
            at = f", layer {layer}" if layer[-1:].isdigit() else ""
            lines.append(f"{check}{at}: {verdict}: {reason}")
    worst = _worst_head(report)
    if worst is not None:
        part = f"{worst.part} " if worst.part else ""
        lines.append(
            f"worst head: {part}layer {worst.layer}, head {worst.head} ({worst.check}): error "
            f"{worst.error:.1e} is {ratio_text(worst.ratio)} of its bound {worst.bound:.1e}"
        )
    return "\n".join([*lines, report.summary])


def report_json(report: VerificationReport, text: str, target: str | None = None) -> str:
    """A report as one JSON object."""
    given = {"text": text} | ({} if target is None else {"target": target})
    return json.dumps(given | report.to_dict(), allow_nan=False)


def report_page(report: VerificationReport, text: str, target: str | None = None) -> str:
    """A report as a page that stands alone: no script, no network; every text escaped."""
    given = "\n".join(
        f"<blockquote>{html.escape(one)}</blockquote>" for one in (text, target) if one is not None
    )
    return page(
        f"Attention of {report.model}",
        f"{given}\n{report._repr_html_()}\n"
        f"<h2>By check and layer: the worst head</h2>\n{by_layer_html(report)}",
    )


def by_layer_html(report: VerificationReport) -> str:
    """A report's worst head of each check and layer, as a table of HTML; every text escaped."""
    import pandas as pd

    layers = pd.DataFrame(_by_layer(report), columns=list(_COLUMNS))
    with pd.option_context("display.max_colwidth", None):  # else pandas cuts the reasons
        table: str = layers.to_html(index=False, border=0)
    return table


def page(title: str, body: str) -> str:
    """A page that stands alone around a body of HTML; the title is text and is escaped."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 95em; padding: 0 1em; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ border-bottom: 1px solid #ccc; padding: 0.2em 0.8em; text-align: left; }}
</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
{body}
</body>
</html>
"""


def frame_csv(frame: pd.DataFrame) -> str:
    """A table as comma-separated values."""
    return frame.to_csv(index=False, lineterminator="\n").rstrip("\n")


def frame_json(frame: pd.DataFrame) -> str:
    """A table as a JSON list with an object a row; null for what JSON has no number for."""
    records = [
        {name: None if _is_odd(value) else value for name, value in record.items()}
        for record in frame.to_dict("records")
    ]
    return json.dumps(records, allow_nan=False)


def frame_parquet(frame: pd.DataFrame) -> bytes:
    """A table as a Parquet file."""
    content = io.BytesIO()
    frame.to_parquet(content, index=False)
    return content.getvalue()


def frame_text(frame: pd.DataFrame, width: int | None = None) -> str:
    """A table to read; `width` is that of the terminal, None for as wide as it gets."""
    numbers = list(frame.select_dtypes("number").columns)
    return _grid(list(frame.columns), _cells(frame), numbers, width)


def effects_text(frame: pd.DataFrame, width: int | None = None) -> str:
    """What `term_effects` returned, to read: a table of the numbers, and below it each term's
    formula and note, which would make the table too wide. `width` is as for `frame_text`."""
    longest = max(map(len, frame["term"]))
    lines = [
        f"{term:<{longest}}  {formula}" + (f"  ({note})" if note else "")
        for term, formula, note in zip(frame["term"], frame["formula"], frame["note"], strict=True)
    ]
    numbers = frame.drop(columns=["formula", "note"])
    table = frame_text(numbers)
    if width is not None and max(map(len, table.splitlines())) > width:
        table = _narrow(numbers, width)
    return "\n".join([table, "", *lines])


def stats_text(frame: pd.DataFrame, width: int | None = None) -> str:
    """What `head_stats` returned, to read: the columns that hold a number, without counts and
    shares by value, and what is left out. `width` is as for `frame_text`."""
    more = [name for name in frame.columns if name.startswith("value_") or name.endswith("_rows")]
    shown = frame.drop(columns=more).dropna(axis=1, how="all")
    table = frame_text(shown)
    if width is not None and max(map(len, table.splitlines())) > width:
        table = _narrow(shown.astype({"layer": str}), width)
    return f"{table}\n\n{len(frame.columns) - len(shown.columns)} more columns: --format csv"


def _narrow(frame: pd.DataFrame, width: int) -> str:
    """A table whose first column is as wide as its longest word, and whose names are in lines, so
    that no word need be broken."""
    names = [name.replace("_", "_\n") for name in frame.columns]
    rows = _cells(frame)
    longest = max(len(word) for first, *_ in rows for word in first.split())
    rows = [["\n".join(wrap(first, longest)), *rest] for first, *rest in rows]
    return _grid(names, rows, names[1:], width)


def _cells(frame: pd.DataFrame) -> list[list[str]]:
    return [
        [f"{cell:.4g}" if isinstance(cell, float) else _visible(str(cell)) for cell in row]
        for row in frame.itertuples(index=False)
    ]


def write(out: Path, content: str | bytes) -> None:
    """Write a file in full or not at all.

    Raises:
        AttnprobeError: it cannot be written.
    """
    try:
        out = out.resolve()  # a link stays one
        if not out.name or (out.exists() and not os.access(out, os.W_OK)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise AttnprobeError(f"cannot write {out}: {error.strerror}") from error
    # Short, as the name itself may be too long; and no other process's or thread's.
    beside = out.with_name(f".attnprobe.{os.getpid()}.{threading.get_native_id()}")
    try:
        with replacing(out, beside) as file:
            file.write(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise AttnprobeError(f"cannot write {out}: {error.strerror}") from error


def _by_layer(report: VerificationReport) -> list[tuple[str, ...]]:
    """For each check and layer the cells of its worst head.

    A check that no layer got, for one reason, has one row.
    """
    lines: dict[tuple[str, ...], None] = {}
    for row in report.by_layer().rows:
        layer = "" if row.layer is None else f"{row.part} {row.layer}".strip()
        head = "" if row.head is None else str(row.head)
        numbers = (f"{row.error:.1e}", f"{row.bound:.1e}", ratio_text(row.ratio))
        if row.verdict == "not_checked":
            numbers = ("", "", "")
            reasons = {one.reason for one in report.rows if one.check == row.check}
            layer = "all" if layer and len(reasons) == 1 else layer
        lines[row.check, layer, head, *numbers, row.verdict.replace("_", " "), row.reason] = None
    return list(lines)


def _worst_head(report: VerificationReport) -> Row | None:
    compared = [row for row in report.rows if row.head is not None and row.verdict != "not_checked"]
    return max(compared, key=lambda row: row.ratio, default=None)


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _visible(text: str) -> str:
    """The text with line ends and control characters written out, so that it keeps to its line."""
    return text if text.isprintable() else repr(text)[1:-1]


def _grid(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str], width: int | None
) -> str:
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        grid.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))  # Text: a token such as [red] is no markup
    console = Console(file=io.StringIO(), width=width or _UNCUT, color_system=None)
    with console.capture() as captured:
        console.print(grid)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")

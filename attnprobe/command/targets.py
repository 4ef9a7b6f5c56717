"""Where the command's output goes: a terminal, a file of a known kind, a browser."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

from attnprobe.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

PAGE = (".html", ".htm")
PICTURES = (".svg", ".png", ".pdf")


class Format(StrEnum):
    """How a table is written."""

    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"
    TABLE = "table"


_FORMATS = {
    ".csv": Format.CSV,
    ".json": Format.JSON,
    ".parquet": Format.PARQUET,
    ".txt": Format.TABLE,
}


def check_file(out: Path | None, suffixes: tuple[str, ...] = PAGE) -> None:
    """Refuse, before any work, a file that could not be written, or whose name ends otherwise.

    Raises:
        InputError: there is no such folder, or none to write to; it is no file; its name ends in
            none of `suffixes`.
    """
    if out is None:
        return
    try:
        if not out.parent.is_dir():
            raise InputError(f"cannot write {out}: there is no folder {out.parent}")
        if out.exists() and not out.is_file():
            raise InputError(f"cannot write {out}: it is not a file")
        if not os.access(out.resolve().parent, os.W_OK):
            raise InputError(f"cannot write {out}: nothing may be written to {out.parent}")
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from None
    if suffixes and out.suffix.lower() not in suffixes:
        # Of a page's two endings the second is for old systems.
        known = suffixes[0] if suffixes == PAGE else ", ".join(suffixes)
        raise InputError(f"--out: expected a name in {known}, got {out.name}")


def check_table(out: Path | None, format: Format | None) -> Format | None:
    """The same for a table; give the format to write, which a name's ending says if nothing else.

    Raises:
        InputError: as `check_file`; a name that says no format, or another one; parquet for a
            terminal, or without pyarrow.
    """
    if out is not None and format is None:
        check_file(out, tuple(_FORMATS))
        format = _FORMATS[out.suffix.lower()]
    elif out is not None and _FORMATS.get(out.suffix.lower(), format) is not format:
        raise InputError(f"--format {format} does not go with a name like {out.name}")
    if format is Format.PARQUET:
        if out is None:
            raise InputError("parquet is not for a terminal: name a file with --out")
        if util.find_spec("pyarrow") is None:
            raise InputError("parquet needs pyarrow: pip install 'attnprobe[parquet]'")
    check_file(out, ())
    return format


def give_table(
    frame: pd.DataFrame,
    format: Format | None,
    out: Path | None,
    as_text: Callable[[pd.DataFrame, int | None], str] | None = None,
) -> None:
    """Print a table, or write it; `as_text` makes what a person reads, for a width or none."""
    from attnprobe.command import printing

    as_text = as_text or printing.frame_text
    content: str | bytes
    match format:
        case Format.CSV:
            content = printing.frame_csv(frame)
        case Format.JSON:
            content = printing.frame_json(frame)
        case Format.TABLE | None:
            content = as_text(frame, terminal_width() if out is None else None)
        case Format.PARQUET:
            content = printing.frame_parquet(frame)
    if out is None:
        print(content)
    else:
        printing.write(out, content if isinstance(content, bytes) else content + "\n")


def check_table_or_picture(out: Path | None, format: Format | None) -> Format | None:
    """As `check_table`, for what may be drawn as well: a picture's name asks for no format.

    Raises:
        InputError: as `check_table`; a format with the name of a picture, or a name of neither.
    """
    if out is None or (format is not None and out.suffix.lower() not in PICTURES):
        return check_table(out, format)
    if format is not None:
        raise InputError(f"--format {format} does not go with a name like {out.name}")
    check_file(out, (*_FORMATS, *PICTURES))
    return None if out.suffix.lower() in PICTURES else check_table(out, None)


def check_shown(out: Path | None, look: bool, suffixes: tuple[str, ...] = PAGE) -> None:
    """Refuse, before any work, a picture that nobody would see; else as `check_file`."""
    if out is None and not look:
        raise InputError(
            f"a picture is not for a terminal: name a file in {suffixes[0]} with --out, or look at "
            "it in a browser with --open"
        )
    check_file(out, suffixes)


def give_shown(content: str | bytes, out: Path | None, look: bool, suffix: str) -> None:
    """Write a page or a picture, and open it in a browser where that is asked for.

    Without `out` it goes to a file in a new temporary folder, which nobody else may read; its name
    is printed.
    """
    from attnprobe.command import printing

    given = out is not None
    out = out or Path(tempfile.mkdtemp(prefix="attnprobe-")) / f"attention{suffix}"
    printing.write(out, content)
    if not given:
        print(f"written to {out}")
    if look and not webbrowser.open(out.resolve().as_uri()):
        print(f"attnprobe: found no browser; open {out} in one", file=sys.stderr)


def terminal_width() -> int | None:
    """How many columns standard output has, if it is a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@contextmanager
def progress(label: str = "verifying") -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while the block runs, if stderr is a terminal; `label` stands at first."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:  # where rich before 15 prints an empty line for a bar it hides
        yield lambda *_: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)

        def show(label: str, done: int, total: int) -> None:
            bar.update(task, description=label, completed=done, total=total)

        yield show

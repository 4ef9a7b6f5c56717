"""The command `attnprobe`.

Exit codes: 0 verified, or a table was given; 1 mismatch; 2 bad input, an unusable model, or a
verification that could not check what it must; 70 a bug in attnprobe; 130 interrupted; 141 the
reader of a pipe went away. Whatever imports torch is imported inside the commands: `--help` must
not wait for it.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnprobe.errors import AttnprobeError, InputError

if TYPE_CHECKING:
    import pandas as pd

    from attnprobe.records import Capture

SENTENCE = "The children were playing in the green park"

_VERDICTS = {"verified": 0, "mismatch": 1, "not_checked": 2}
_BAD_INPUT, _BUG, _INTERRUPTED, _READER_GONE = 2, 70, 130, 141

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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

Text = Annotated[str, typer.Argument(help="The text to run the model on.")]
Model = Annotated[str, typer.Option(help="bundled, a folder, a .gguf file, or an id on the hub.")]
Dtype = Annotated[str, typer.Option(help="float32, float16, bfloat16, float64 or auto.")]
Attn = Annotated[
    str | None, typer.Option(help="The attention kernel: sdpa, eager, … If not given, the model's.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, …")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
Layer = Annotated[int | None, typer.Option(help="Counted from 0; all if not given.")]
Head = Annotated[int | None, typer.Option(help="Counted from 0; all if not given.")]
FormatOption = Annotated[
    Format | None,
    typer.Option("--format", help="How to write the table; else as the name in --out ends."),
]
Out = Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from attnprobe import __version__

        print(f"attnprobe {__version__}")
        raise typer.Exit


@app.callback()
def attnprobe(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    """See, and prove, what the attention of a Hugging Face model computes."""


@app.command()
def verify(
    text: Text = SENTENCE,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
    checks: Annotated[str | None, typer.Option(help="Some checks: output,mask,…")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write an HTML page of the report.")] = None,
) -> None:
    """Check that the model computed softmax(QKᵀ/√d_k + M)V, layer by layer and head by head.

    Exit code 0: verified. 1: mismatch. 2: bad input, or it could not be checked.
    """
    with _exits():
        _check_target(out, (".html", ".htm"))
        names = _checks(checks)
        cap = _capture(text, model, revision, dtype, attn, device)
        from attnprobe import printing
        from attnprobe.verification import verify

        with _progress() as progress:
            report = verify(cap, names, progress=progress)
        if out is not None:
            printing.write(out, printing.report_page(report, text))
        if as_json:
            print(printing.report_json(report, text))
        else:
            print(printing.report_text(report, text, _terminal_width()))
    raise typer.Exit(_VERDICTS[report.verdict])


@app.command()
def table(
    text: Text = SENTENCE,
    layer: Layer = None,
    head: Head = None,
    by_word: Annotated[bool, typer.Option("--by-word", help="By word, not by token.")] = False,
    format: FormatOption = None,
    out: Out = None,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
) -> None:
    """Show score and weight of every query and each key that it may attend to."""
    with _exits():
        format = _check_target(out, format=format)
        cap = _capture(text, model, revision, dtype, attn, device)
        from attnprobe.tables import table

        _give(table(cap, layer, head, by="word" if by_word else "token"), format, out)


@app.command()
def words(
    text: Text = SENTENCE,
    word: Annotated[
        str | None, typer.Option(help="One word of the text; all if not given.")
    ] = None,
    layer: Layer = None,
    head: Head = None,
    top: Annotated[int, typer.Option(help="How many words each looks at.")] = 5,
    nth: Annotated[int, typer.Option(help="Which of the word's occurrences, from 0.")] = 0,
    how: Annotated[str, typer.Option(help="Over heads: mean, max or rollout.")] = "mean",
    weigh: Annotated[
        str, typer.Option(help="By weight, or by value: weight × ‖v·W_O‖.")
    ] = "weight",
    skip_first: Annotated[bool, typer.Option(help="Leave out the first word's share.")] = False,
    reverse: Annotated[bool, typer.Option(help="Instead, the words that look at it.")] = False,
    format: FormatOption = None,
    out: Out = None,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
) -> None:
    """Show which past words a word looks at, strongest first: in one head, or over many."""
    with _exits():
        if word is None and nth:
            raise InputError("--nth goes with --word: it says which of the word's occurrences")
        if reverse and skip_first:
            raise InputError("--skip-first does not go with --reverse")
        format = _check_target(out, format=format)
        cap = _capture(text, model, revision, dtype, attn, device)
        from attnprobe.looking import attended, attended_by

        options: dict[str, Any] = {"top": top, "layer": layer, "head": head, "nth": nth}
        options |= {"how": how, "weigh": weigh}
        if reverse:
            frame = attended_by(cap, word, **options)
        else:
            frame = attended(cap, word, skip_first=skip_first, **options)
        _give(frame, format, out)


@app.command()
def walk(
    word: Annotated[str, typer.Option(help="A word of the text.")],
    layer: Annotated[int, typer.Option(help="Counted from 0.")],
    head: Annotated[int, typer.Option(help="Counted from 0.")],
    text: Text = SENTENCE,
    nth: Annotated[int, typer.Option(help="Which of the word's occurrences, from 0.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write an HTML page instead.")] = None,
    model: Model = "bundled",
    dtype: Dtype = "float32",
    attn: Attn = None,
    device: Device = "cpu",
    revision: Revision = None,
) -> None:
    """Walk through the formula for one word in one head, step by step."""
    with _exits():
        _check_target(out, (".html", ".htm"))
        cap = _capture(text, model, revision, dtype, attn, device)
        from attnprobe import printing
        from attnprobe.walking import walkthrough

        walked = walkthrough(cap, word, layer, head, nth=nth)
        if out is None:
            print(walked)
        else:
            printing.write(out, printing.page(f"attnprobe walk: {word}", walked._repr_html_()))


def main() -> None:
    """Run the command line; the entry point of the script `attnprobe`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller: print into nothing
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (open to the end)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # tokens on an ASCII terminal
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        app()
    except Exception as error:  # noqa: BLE001  (a crash must not leave with 1: that is a mismatch)
        # transformers' lazy imports wrap whatever interrupts them in an error of their own.
        if _interrupted(error):
            sys.exit(_INTERRUPTED)
        traceback.print_exc()
        sys.exit(_BUG)


def _interrupted(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _exits() -> Iterator[None]:
    """Turn what ends a command early into a message and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except AttnprobeError as error:
        print(f"attnprobe: {error}", file=sys.stderr)
        raise typer.Exit(_BAD_INPUT) from None
    except BrokenPipeError:
        # What is still buffered goes nowhere, else Python complains about it on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_READER_GONE) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print("attnprobe: cannot write the output: no space is left", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_BAD_INPUT) from None


def _checks(names: str | None) -> list[str] | None:
    """The names in `--checks`, looked at before a model is loaded in vain."""
    if names is None:
        return None
    from attnprobe.verification import CHECKS

    chosen = [name.strip() for name in names.split(",")]
    unknown = [name for name in chosen if name not in CHECKS]
    if unknown:
        raise InputError(f"unknown check {unknown[0]!r}; the checks are {', '.join(CHECKS)}")
    return chosen


def _capture(
    text: str, model: str, revision: str | None, dtype: str, attn: str | None, device: str
) -> Capture:
    from attnprobe.capturing import capture
    from attnprobe.models import load

    lm = load(model, revision=revision, dtype=dtype, attn=attn, device=device)
    return capture(lm, text)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while the block runs, if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("verifying", total=None)

        def show(label: str, done: int, total: int) -> None:
            bar.update(task, description=label, completed=done, total=total)

        yield show


def _give(frame: pd.DataFrame, format: Format | None, out: Path | None) -> None:
    from attnprobe import printing

    content: str | bytes
    match format:
        case Format.CSV:
            content = printing.frame_csv(frame)
        case Format.JSON:
            content = printing.frame_json(frame)
        case Format.TABLE | None:
            content = printing.frame_text(frame, _terminal_width() if out is None else None)
        case Format.PARQUET:
            content = printing.frame_parquet(frame)
    if out is None:
        print(content)
    else:
        printing.write(out, content if isinstance(content, bytes) else content + "\n")


def _terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _check_target(
    out: Path | None, suffixes: tuple[str, ...] = (), format: Format | None = None
) -> Format | None:
    """Refuse, before any work, a file that could not be written; give the format to write.

    Without a format, a name's ending says it; a name that says none is refused.
    """
    if out is not None and format is None and not suffixes:
        format = _FORMATS.get(out.suffix.lower())
        if format is None:
            raise InputError(f"--out: expected a name in {', '.join(_FORMATS)}, got {out.name}")
    if format is Format.PARQUET:
        if out is None:
            raise InputError("parquet is not for a terminal: name a file with --out")
        if util.find_spec("pyarrow") is None:
            raise InputError("parquet needs pyarrow: pip install 'attnprobe[parquet]'")
    if out is None:
        return format
    try:
        if not out.parent.is_dir():
            raise InputError(f"cannot write {out}: there is no folder {out.parent}")
        if out.exists() and not out.is_file():
            raise InputError(f"cannot write {out}: it is not a file")
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}") from None
    if suffixes and out.suffix.lower() not in suffixes:
        raise InputError(f"--out writes a page: expected a name in {suffixes[0]}, got {out.name}")
    return format

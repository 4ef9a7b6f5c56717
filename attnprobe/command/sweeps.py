"""What the command `sweep` reads, shows while it runs, and says in the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnprobe.errors import InputError

if TYPE_CHECKING:
    from attnprobe.sweeping.engines import Progress


class Engine(StrEnum):
    """Who computes a sweep."""

    LOCAL = "local"
    RAY = "ray"


def every_of(verify: str | None) -> int | None:
    """The number in `every=100`, or in `100`.

    Raises:
        InputError: it is none, or less than 1.
    """
    if verify is None:
        return None
    number = verify.removeprefix("every=")
    if not (number.isascii() and number.isdigit() and int(number)):
        raise InputError(f"--verify: expected every=100 or the like, got {verify!r}")
    return int(number)


@contextmanager
def sweep_progress() -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr while the block runs, if stderr is a terminal: documents, tokens, tokens a
    second, and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    from attnprobe.records import counted

    console = Console(stderr=True)
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None)

        def show(now: Progress) -> None:
            speed = now.tokens_now / max(now.seconds, 1e-9)
            left = "" if now.left is None else f", {_duration(now.left)} left"
            documents = counted(now.documents, "document")
            label = f"{documents}, {now.tokens:,} tokens, {speed:,.0f}/s{left}"
            bar.update(task, description=label, completed=now.done, total=now.total)

        yield show


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"


@contextmanager
def going_on(out: Path) -> Iterator[None]:
    """On Ctrl-C in the block, say on stderr how to go on with what is there."""
    try:
        yield
    except KeyboardInterrupt:
        if (out / "manifest.json").is_file():
            print(
                f"attnprobe: stopped; the same command goes on from there: {out} holds what is "
                "finished",
                file=sys.stderr,
            )
        raise


def sweep_text(manifest: dict[str, Any], out: Path) -> str:
    """What a finished sweep went through, and where its tables are."""
    from attnprobe.records import counted

    corpus, damaged = manifest["corpus"], manifest["damaged"]
    lines = [
        f"model   {manifest['model']['name']} in {manifest['model']['dtype']}",
        f"corpus  {counted(corpus['documents'], 'document')}, {counted(corpus['texts'], 'text')} "
        f"of at most {manifest['settings']['tokens']} tokens, {counted(corpus['tokens'], 'token')}",
    ]
    if skipped := corpus["skipped"]["count"]:
        lines.append(f"skipped {counted(skipped, 'file')} of other kinds")
    if damaged["count"]:
        lines.append(f"damaged {damaged['count']}, left out:")
        lines += [f"        {_line(one)}" for one in damaged["named"][:_SHOWN]]
        if damaged["count"] > _SHOWN:
            lines.append(f"        … and others: see {out / 'manifest.json'}")
    lines += [f"left out {layer}: {why}" for layer, why in manifest["left_out"].items()]
    checked = manifest["verification"]
    if manifest["settings"]["verify"] is not None:
        counts = ", ".join(
            f"{checked[name]} {name.replace('_', ' ')}"
            for name in ("verified", "mismatch", "not_checked")
        )
        lines.append(f"output  of {counted(checked['texts'], 'text')} checked: {counts}")
    return "\n".join([*lines, f"written to {out}"])


_SHOWN = 5


def _line(damage: dict[str, str]) -> str:
    text = f"{damage['name']}: {damage['reason']}"
    return text if text.isprintable() else repr(text)[1:-1]

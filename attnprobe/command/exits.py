"""How the command leaves: its exit codes, and what turns an error into one of them."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from attnprobe.errors import AttnprobeError

VERDICTS = {"verified": 0, "mismatch": 1, "not_checked": 2}
BAD_INPUT, BUG, INTERRUPTED, READER_GONE = 2, 70, 130, 141


@contextmanager
def exits() -> Iterator[None]:
    """Turn what ends a command early into a message and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except AttnprobeError as error:
        print(f"attnprobe: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    except BrokenPipeError:
        # What is still buffered goes nowhere, else Python complains about it on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(READER_GONE) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print("attnprobe: cannot write the output: no space is left", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BAD_INPUT) from None


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Print what the block warns of as notes on stderr, without the lines of code it came from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", UserWarning)
        yield
    for note in dict.fromkeys(str(one.message) for one in caught):
        print(f"attnprobe: note: {note}", file=sys.stderr)


def interrupted(error: BaseException | None) -> bool:
    """Whether an error comes of Ctrl-C: transformers' lazy imports wrap whatever ends them."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False

"""The kinds of pictures that the command draws: what draws each, and which options it takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from attnprobe.command.targets import PAGE, PICTURES
from attnprobe.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from attnprobe.records import Capture

Options = Mapping[str, Any]
"""Options by the name of the parameter that they set."""


@dataclass(frozen=True)
class Kind:
    """One kind of picture.

    Attributes:
        draw: from a capture, the options and the ending of the file's name to the file's content.
        takes: the options that apply.
        suffixes: how the file's name may end; the first is that of a temporary file.
    """

    draw: Callable[[Capture, Options, str], str | bytes]
    takes: tuple[str, ...]
    suffixes: tuple[str, ...] = PAGE

    def refuse_others(self, name: str, options: Options) -> None:
        """Refuse options that were given and do not apply.

        Raises:
            InputError: there is one; the message says what applies.
        """
        others = [one for one in options if one not in self.takes]
        if others:
            applies = ", ".join(map(_written, self.takes))
            raise InputError(
                f"{_written(others[0])} does not go with --kind {name}: it takes {applies}"
            )


def kind_of(name: str) -> Kind:
    """The kind of this name.

    Raises:
        InputError: there is none; the message says which there are.
    """
    if name not in KINDS:
        raise InputError(f"unknown kind {name!r}; the kinds are {', '.join(KINDS)}")
    return KINDS[name]


def _written(option: str) -> str:
    return "--by-word" if option == "by" else f"--{option}"


def span_of(written: str) -> tuple[int, int]:
    """The stretch of words that `--span 100:160` names.

    Raises:
        InputError: it is not two whole numbers with a colon between.
    """
    found = re.fullmatch(r"(\d+):(\d+)", written)
    if found is None:
        raise InputError(f"expected --span START:STOP, positions of words from 0, got {written!r}")
    return int(found[1]), int(found[2])


def _view(function: str, *takes: str) -> Kind:
    """A kind that a function of attnprobe draws, which returns a `View`."""
    return Kind(partial(_page, function), takes)


def _page(function: str, cap: Capture, options: Options, _suffix: str) -> str:
    import attnprobe

    try:
        page: str = getattr(attnprobe, function)(cap, **options).html
    except InputError as error:
        raise InputError(_as_options(str(error))) from None
    return page


def _as_options(message: str) -> str:
    """What a function says of its parameters, said of the command's options."""
    message = message.replace("by='word'", "--by-word").replace("Or raise", "In Python, raise")
    message = message.replace("; or attention_view", "; or use --kind attention")
    message = message.replace("span=(start, stop)", "--span START:STOP")
    return re.sub(r"layer=(\d+), head=(\d+)", r"--layer \1 --head \2", message)


def _heatmap(cap: Capture, options: Options, suffix: str) -> bytes:
    """One head's heat map where a layer and a head are chosen, else a grid of them."""
    import matplotlib as mpl

    from attnprobe.views.plots import heatmap, heatmap_grid, picture

    mpl.use("agg")  # draws into files, and looks for no screen
    one = options["layer"] is not None and options["head"] is not None
    return picture((heatmap if one else heatmap_grid)(cap, **options), suffix.removeprefix("."))


def effect_picture(frame: pd.DataFrame, suffix: str, value: str | None = None) -> bytes:
    """What `effect_map` draws of a frame, as the content of a file whose name ends so."""
    import matplotlib as mpl

    from attnprobe.views.effects import effect_map
    from attnprobe.views.plots import picture

    mpl.use("agg")
    return picture(effect_map(frame, value=value), suffix.removeprefix("."))


KINDS = {
    "head": _view("head_view", "layer", "head", "by"),
    "model": _view("model_view", "layer", "head", "by"),
    "neuron": _view("neuron_view", "layer", "head"),
    "attention": _view("attention_view", "layer", "head", "by", "span"),
    "heatmap": Kind(_heatmap, ("layer", "head", "by", "span"), PICTURES),
    "walk": _view("walkthrough_view", "word", "layer", "head", "nth", "lang"),
}
"""By the name that `--kind` gives."""

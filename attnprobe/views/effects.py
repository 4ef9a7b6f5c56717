"""What heads and positions do to a number, as a picture: `effect_map`."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from attnprobe.errors import InputError
from attnprobe.views.colours import SIGNED
from attnprobe.views.plots import LONGEST, LONGEST_NAME, shortened, warn_of

if TYPE_CHECKING:  # matplotlib is slow to import, and only for who draws
    from matplotlib.axes import Axes

    from attnprobe.views.drawing import Sheet

MEANINGS = {
    "restored": ("share of the logit difference that is restored", "restored (1: all of it)"),
    "effect": ("what silencing each head changes", "change"),
    "contribution": ("what each head adds to the logit", "contribution (logits)"),
}
"""What each column that is drawn by itself means: in the title, and beside the scale."""

LINE = 46
"""The longest line of a title, in characters: what fits above the smallest picture."""

METRICS = {"loss": "loss", "logit": "logit", "logit_difference": "logit difference"}


def effect_map(frame: pd.DataFrame, *, value: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw a number for each layer and head, or each layer and position, around 0.

    A row for each layer, the first at the top; orange above 0, blue below, as far on either side.
    What the frame has no number for is hatched. Units, model and metric come from `frame.attrs`,
    where there are any: a frame that was read from a file is drawn without them.

    Args:
        frame: what `head_effects` or `patch_effects` returned, or any frame with the columns layer
            and head, or layer and position (then token, if there is one, for labels), and a column
            of numbers. Rows without a layer or a head, such as a contribution of an MLP, are left
            out.
        value: the column to draw; restored, effect or contribution by default.
        ax: matplotlib's Axes to draw in, as for `heatmap`.

    Returns:
        The Axes drawn in: `effect_map(…).figure.savefig("heads.svg")` saves it.

    Raises:
        InputError: a frame without such columns, or with several rows for one place; numbers that
            are infinite, or all missing; an `ax` that is none.
    """
    from matplotlib.axes import Axes

    if ax is not None and not isinstance(ax, Axes):
        raise InputError(f"ax must be one of matplotlib's Axes, or None; got {ax!r}")
    grid = _Grid.of(frame, value)
    layers, columns, lacking = _sheets(grid)
    warn_of(lacking)
    return _draw(grid, layers, columns, ax)


@dataclass(frozen=True, eq=False)
class _Grid:
    """A number for each layer and head or position, (layers, columns) float64, NaN for none."""

    cells: np.ndarray
    layers: list[int]
    by: Literal["head", "position"]
    labels: list[str]  # of the columns
    title: list[str]  # its lines
    unit: str

    @classmethod
    def of(cls, frame: pd.DataFrame, value: str | None) -> _Grid:
        by = _by(frame)
        value = _value(frame, value)
        placed = frame[frame[["layer", by]].notna().all(axis=1)]
        if placed.duplicated(["layer", by]).any():
            raise InputError(
                f"the frame has several rows for one layer and {by}: choose one of each"
            )
        wide = placed.pivot_table(index="layer", columns=by, values=value, dropna=False)
        cells = wide.to_numpy(np.float64, na_value=np.nan)
        if not np.isfinite(cells).any() or np.isinf(cells).any():
            raise InputError(f"expected numbers in {value!r}, got none, or infinity")
        labels = [str(one) for one in wide.columns]
        if by == "position" and "token" in placed:
            tokens = placed.drop_duplicates(by).set_index(by)["token"]
            labels = [str(tokens[one]) for one in wide.columns]
        title, unit = _said(frame, by, value)
        return cls(cells, [int(one) for one in wide.index], by, labels, title, unit)


def _by(frame: object) -> Literal["head", "position"]:
    """What the columns of the picture are."""
    if not isinstance(frame, pd.DataFrame):
        raise InputError(f"expected a frame, as head_effects gives it; got {type(frame).__name__}")
    if "layer" in frame and "head" in frame and "position" not in frame:
        return "head"
    if "layer" in frame and "position" in frame and "head" not in frame:
        return "position"
    raise InputError(
        "expected a frame with the columns layer and either head or position, as head_effects and "
        f"patch_effects give it; got {', '.join(map(str, frame.columns))}"
    )


def _value(frame: pd.DataFrame, value: str | None) -> str:
    """The column that is drawn."""
    if value is None:
        known = [name for name in MEANINGS if name in frame]
        if not known:
            raise InputError(
                f"the frame has none of the columns {', '.join(MEANINGS)}: name the one to draw, "
                f"value=…; it has {', '.join(map(str, frame.columns))}"
            )
        return known[0]
    if value not in frame or not pd.api.types.is_numeric_dtype(frame[value]):
        raise InputError(
            f"the frame has no column {value!r} of numbers; it has "
            f"{', '.join(map(str, frame.columns))}"
        )
    return value


def _said(frame: pd.DataFrame, by: str, value: str) -> tuple[list[str], str]:
    """The title, and what stands beside the scale."""
    what, unit = MEANINGS.get(value, (f"{value} by layer and {by}", value))
    metric, counted = (frame.attrs.get(name) for name in ("metric", "unit"))
    if value == "effect" and metric in METRICS:
        what = f"what silencing each head changes in the {METRICS[metric]}"
        unit = f"change ({counted})"
    elif value == "restored":
        what = f"{what}, by layer and {by}"
    name = shortened(str(frame.attrs.get("model", "")), LONGEST_NAME)
    return [*filter(None, [name]), *wrap(what, LINE)], unit


def _sheets(grid: _Grid) -> tuple[Sheet, Sheet, list[str]]:
    """The labels of rows and columns, and the characters in them that no font has."""
    from attnprobe.views import drawing, fonts

    letters = fonts.legible([*grid.title, *grid.labels])
    lines = len(grid.title)
    title = "\n".join(letters.texts[:lines])
    labels = [shortened(label, LONGEST) for label in letters.texts[lines:]]
    vmax = float(np.nanmax(np.abs(grid.cells))) or 1.0
    unit = "token" if grid.by == "position" else "head"
    numbers = [str(one) for one in grid.layers]
    rows, columns = (
        drawing.Sheet(title, what, texts, letters.families, vmax)
        for what, texts in (("layer", numbers), (unit, labels))
    )
    return rows, columns, letters.lacking


def _draw(grid: _Grid, rows: Sheet, columns: Sheet, ax: Axes | None) -> Axes:
    """The cells, their labels, and the scale; in a figure of its own where `ax` is None."""
    from matplotlib.colors import LinearSegmentedColormap

    from attnprobe.views import drawing

    high, wide = grid.cells.shape
    given = ax
    if ax is None:
        width, height = (
            max(least, min(0.4 * count, 7.0), min(0.15 * count, 16.0))
            for count, least in ((wide, 3.4), (high, 2.4))
        )
        below = columns.width(72 * width / wide) / 72
        ax = drawing.new_figure(width + 1.9, height + below + 1.0, layout="compressed").subplots()
    else:
        width, height = _sides(ax)
    clear = (1.0, 1.0, 1.0, 0.0)
    colours = LinearSegmentedColormap.from_list("signed", SIGNED["light"], bad=clear)
    ax.add_patch(drawing.hatched((-0.5, -0.5), wide, high, "no number"))
    ax.grid(visible=False)
    image = ax.imshow(
        np.ma.masked_invalid(grid.cells),
        cmap=colours,
        vmin=-rows.vmax,
        vmax=rows.vmax,
        aspect="auto",
        origin="upper",
        interpolation="nearest",
    )
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02, fraction=0.15 / width, aspect=height / 0.15)
    bar.set_label(grid.unit)
    if np.isnan(grid.cells).any():
        drawing.explain_hatched(bar, drawing.hatched((0, 0), 1, 1, "no number"))
    ax.set_ylabel(rows.unit)
    ax.set_xlabel(columns.unit)
    ax.set_title(rows.title, fontsize=drawing.LARGEST, **rows.literal)
    if given is not None:  # the scale has taken its room
        drawing.lay_out(ax)
        width, height = _sides(ax)
    drawing.label_rows(ax, rows, 72 * height / high)
    drawing.label_columns(ax, columns, 72 * width / wide)
    return ax


def _sides(ax: Axes) -> tuple[float, float]:
    """Width and height, in inches."""
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi

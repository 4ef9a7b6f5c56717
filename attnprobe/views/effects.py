"""What heads and positions do to a number, as a picture: `effect_map`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from attnprobe.errors import InputError
from attnprobe.views.captions import MEANINGS, STATISTICS, Caption, caption_of, folded
from attnprobe.views.colours import SIGNED
from attnprobe.views.plots import LONGEST, shortened, warn_of

if TYPE_CHECKING:  # matplotlib is slow to import, and only for who draws
    from matplotlib.axes import Axes

    from attnprobe.views.drawing import Sheet

ACROSS = 10.5
"""Characters of a title to an inch, in its largest letters, though they be capitals."""

DETAILS = 8.0
"""The size of what stands below the title, in points."""

FARTHEST = 1e300
"""The farthest from 0 that a colour scale goes."""

APART = {"attention bias": "b_O", "mlp": "mlp"}
"""The parts of a layer that are no heads, and what their columns are called."""


def effect_map(frame: pd.DataFrame, *, value: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw a number for each layer and head, or each layer and position.

    A row for each layer, the first at the top; orange above 0, blue below, as far on either side;
    what never goes below 0, a statistic or a role's score, from light to dark, as weights are.
    What the frame has no number for is hatched. What stands above (model, metric, words, text, the
    unchanged model's numbers) and the units come from `frame.attrs`, where there are any: a frame
    that was read from a file is drawn without them.

    Args:
        frame: what `head_effects`, `patch_effects`, `head_stats` or `head_roles` returned, the
            frame of `logit_contributions`, or any frame with the columns layer and head, or layer
            and position (then token, if there is one, for labels), and a column of numbers. A
            layer's attention bias (b_O) and mlp, by the column part, stand apart; other rows
            without a layer or a head are left out, and the picture names those of
            `logit_contributions`.
        value: the column to draw; restored, effect or contribution by default; of a frame of
            statistics, name one.
        ax: matplotlib's Axes to draw in, as for `heatmap`.

    Returns:
        The Axes drawn in: `effect_map(…).figure.savefig("heads.svg")` saves it.

    Raises:
        InputError: a frame without such columns, or with several rows for one place; layers, heads
            or positions that are no whole numbers from 0; a column of no real numbers, or of some
            beyond ±`FARTHEST`, or all missing; an `ax` that is none.
    """
    from matplotlib.axes import Axes

    if ax is not None and not isinstance(ax, Axes):
        raise InputError(f"ax must be one of matplotlib's Axes, or None; got {ax!r}")
    grid = _Grid.of(frame, value)
    layers, columns, said, lacking = _sheets(grid)
    warn_of(lacking)
    return _draw(grid, layers, columns, said, ax)


@dataclass(frozen=True, eq=False)
class _Grid:
    """A number for each layer and head or position, (layers, columns) float64, NaN for none.

    The last `apart` columns are those of a layer's other parts, behind an empty one.
    """

    cells: np.ndarray
    layers: list[int]
    by: Literal["head", "position"]
    labels: list[str]  # of the columns
    apart: int
    signed: bool  # whether numbers below 0 have a meaning
    caption: Caption

    @classmethod
    def of(cls, frame: pd.DataFrame, value: str | None) -> _Grid:
        by = _by(frame)
        value = _value(frame, value)
        for name in ("layer", by):
            _refuse_unplaced(frame, name)
        placed, others, left_out = _split(frame, by)
        wide = _wide(placed, by, value)
        labels = [str(one) for one in wide.columns]
        if by == "position" and "token" in placed:
            tokens = placed.drop_duplicates(by).set_index(by)["token"]
            labels = [str(tokens[one]) for one in wide.columns]
        apart = 0
        if not others.empty:
            rest = _wide(others, "part", value)
            apart = len(rest.columns)
            labels += ["", *(APART[one] for one in rest.columns)]
            wide = pd.concat([wide, pd.DataFrame({"": np.nan}, wide.index), rest], axis=1)
            wide = wide.sort_index()
        cells = wide.to_numpy(np.float64, na_value=np.nan)
        if not np.isfinite(cells).any() or np.isinf(cells).any():
            raise InputError(f"expected numbers in {value!r}, got none, or infinity")
        if np.nanmax(np.abs(cells)) > FARTHEST:
            raise InputError(f"{value!r} holds numbers beyond ±{FARTHEST:g}: too large to draw")
        caption = caption_of(frame, by, value, left_out)
        numbers = [int(one) for one in wide.index]
        return cls(cells, numbers, by, labels, apart, value not in STATISTICS, caption)

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The first column of each block of them, and how many it has."""
        count = self.cells.shape[1]
        if not self.apart:
            return [(0, count)]
        return [(0, count - self.apart - 1), (count - self.apart, self.apart)]

    @property
    def lacks(self) -> bool:
        """Whether a place has no number."""
        return any(np.isnan(self.cells[:, at : at + count]).any() for at, count in self.blocks)


def _split(frame: pd.DataFrame, by: str) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """The rows of heads or positions, those of a layer's other parts, and the names of parts that
    neither holds."""
    layered, here = frame["layer"].notna(), frame[by].notna()
    apart = pd.Series(data=False, index=frame.index)
    if by == "head" and "part" in frame:
        apart = layered & ~here & frame["part"].isin(list(APART))
    drawn = (layered & here) | apart
    left_out = [] if "part" not in frame else [str(one) for one in frame["part"][~drawn].unique()]
    return frame[layered & here], frame[apart], left_out


def _wide(rows: pd.DataFrame, column: str, value: str) -> pd.DataFrame:
    """A row for each layer, and a column for each of what `column` holds."""
    if rows.duplicated(["layer", column]).any():
        raise InputError(
            f"the frame has several rows for one layer and {column}: choose one of each"
        )
    return rows.pivot_table(index="layer", columns=column, values=value, dropna=False)


def _refuse_unplaced(frame: pd.DataFrame, name: str) -> None:
    """Refuse layers, heads or positions that are none; missing ones pass.

    Raises:
        InputError: there is one.
    """
    found = frame[name].dropna().convert_dtypes()  # 1.0 is 1, as in a file with missing ones
    if not found.empty and not (pd.api.types.is_integer_dtype(found.dtype) and (found >= 0).all()):
        shown = ", ".join(map(repr, frame[name].dropna().unique()[:5].tolist()))
        raise InputError(f"expected whole numbers from 0 in {name!r}, got {shown}")


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
        value = known[0]
    if value not in frame or not _is_real(frame[value]):
        raise InputError(
            f"the frame has no column {value!r} of numbers; of numbers it has "
            f"{', '.join(str(name) for name in frame if _is_real(frame[name]))}"
        )
    return value


def _is_real(column: pd.Series) -> bool:
    types = pd.api.types
    others = types.is_bool_dtype(column) or types.is_complex_dtype(column)
    return types.is_numeric_dtype(column) and not others


def _sheets(grid: _Grid) -> tuple[Sheet, Sheet, Caption, list[str]]:
    """The labels of rows and columns, what stands above, and the characters that no font has."""
    from attnprobe.views import drawing, fonts

    said = grid.caption
    letters = fonts.legible([*said.heading, *said.details, *grid.labels])
    texts = iter(letters.texts)
    heading, details = ([next(texts) for _ in part] for part in (said.heading, said.details))
    labels = [shortened(label, LONGEST) for label in texts]
    vmax = float(np.nanmax(np.abs(grid.cells))) or 1.0
    unit = "token" if grid.by == "position" else "head"
    numbers = [str(one) for one in grid.layers]
    rows, columns = (
        drawing.Sheet("", what, texts, letters.families, vmax)
        for what, texts in (("layer", numbers), (unit, labels))
    )
    return rows, columns, Caption(heading, details, said.unit), letters.lacking


def _draw(grid: _Grid, rows: Sheet, columns: Sheet, said: Caption, ax: Axes | None) -> Axes:
    """The cells, their labels, the scale and what stands above; in a figure of its own where `ax`
    is None."""
    from matplotlib.colors import Colormap, LinearSegmentedColormap

    from attnprobe.views import drawing

    high, wide = grid.cells.shape
    given = ax
    if ax is None:
        width, height = (
            max(least, min(0.4 * count, 7.0), min(0.15 * count, 16.0))
            for count, least in ((wide, 3.4), (high, 2.4))
        )
        title = _titled(said, width + 1.0)
        above = sum(size / 48 * len(text.splitlines()) for text, size in title)
        below = columns.width(72 * width / wide) / 72
        figure = drawing.new_figure(width + 1.9, height + below + above + 0.6, layout="compressed")
        ax = figure.subplots()
    else:
        width, height = _sides(ax)
        title = _titled(said, width)
    clear = (1.0, 1.0, 1.0, 0.0)
    colours: Colormap = drawing.COLOURS
    if grid.signed:
        colours = LinearSegmentedColormap.from_list("signed", SIGNED["light"], bad=clear)
    for at, count in grid.blocks:
        ax.add_patch(drawing.hatched((at - 0.5, -0.5), count, high, "no number"))
    ax.grid(visible=False)
    image = ax.imshow(
        np.ma.masked_invalid(grid.cells),
        cmap=colours,
        vmin=-rows.vmax if grid.signed else 0.0,
        vmax=rows.vmax,
        aspect="auto",
        origin="upper",
        interpolation="nearest",
    )
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02, fraction=0.15 / width, aspect=height / 0.15)
    bar.set_label(said.unit)
    if grid.lacks:
        drawing.explain_hatched(bar, drawing.hatched((0, 0), 1, 1, "no number"))
    ax.set_ylabel(rows.unit)
    ax.set_xlabel(columns.unit)
    _entitle(ax, title, rows)
    if given is not None:  # the scale has taken its room
        drawing.lay_out(ax)
        width, height = _sides(ax)
    drawing.label_rows(ax, rows, 72 * height / high)
    drawing.label_columns(ax, columns, 72 * width / wide)
    if grid.apart:
        ticks = zip(ax.xaxis.get_major_ticks(), ax.get_xticklabels(), strict=True)
        for tick, label in ticks:  # none below the empty column
            tick.tick1line.set_visible(bool(label.get_text()))
    return ax


def _titled(said: Caption, width: float) -> Sequence[tuple[str, float]]:
    """The heading, and the details below it, in lines for so many inches; and their sizes."""
    from attnprobe.views import drawing

    return [
        (folded(text, int(max(2.0, width) * ACROSS * drawing.LARGEST / size)), size)
        for text, size in ((said.heading, drawing.LARGEST), (said.details, DETAILS))
    ]


def _entitle(ax: Axes, title: Sequence[tuple[str, float]], sheet: Sheet) -> None:
    """Put the details above the cells, and the heading above the details."""
    (heading, large), (details, small) = title
    pad = 6.0
    if details:
        note = ax.annotate(
            details,
            (0.5, 1.0),
            (0.0, 5.0),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=small,
            color="#57606a",
            **sheet.literal,
        )
        pad += 7.0 + 72 * note.get_window_extent().height / ax.figure.dpi
    ax.set_title(heading, fontsize=large, pad=pad, **sheet.literal)


def _sides(ax: Axes) -> tuple[float, float]:
    """Width and height, in inches."""
    box = ax.get_window_extent()
    return box.width / ax.figure.dpi, box.height / ax.figure.dpi

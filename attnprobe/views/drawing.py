"""Matrices of weights drawn by matplotlib; `plots` says what is drawn and what it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.colorbar import Colorbar
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from attnprobe.views.labels import columns_of

# From nearly white to a dark violet in even steps of lightness, so that it holds for the
# colour-blind and in grey. What magma has beyond that is too dark to tell apart.
COLOURS = ListedColormap(
    colormaps["magma_r"](np.linspace(0.0, 0.85, 256)),
    name="weights",
    bad=(1.0, 1.0, 1.0, 0.0),  # masked: transparent, and not black where a PDF viewer blurs it
)

LARGEST, SMALLEST = 10.0, 5.0  # label, in points
GAP, SCALE = 0.12, 4.0  # between the panels of a grid, and the longest scale, in inches


@dataclass(frozen=True, eq=False)
class Panel:
    """One head's weights, (N, N) float64, and where a query may attend, (N, N) bool."""

    weights: np.ndarray
    allowed: np.ndarray


@dataclass(frozen=True)
class Sheet:
    """What all panels of a picture share.

    Attributes:
        title: what is shown.
        unit: "token" or "word".
        labels: the N tokens or words.
        families: font families that draw them.
        vmax: the weight at the dark end of the scale.
    """

    title: str
    unit: str
    labels: list[str]
    families: list[str]
    vmax: float

    @property
    def literal(self) -> dict[str, Any]:
        """How to draw text that is data: `$x$` is no formula."""
        return {"family": self.families, "parse_math": False, "usetex": False}

    def points(self, cell: float) -> float:
        """The size of the labels beside cells of so many points."""
        return min(max(SMALLEST, 0.8 * cell), LARGEST)

    def step(self, cell: float) -> int:
        """Label each one of so many, that labels do not meet."""
        return ceil(1.1 * self.points(cell) / cell)

    def width(self, cell: float) -> float:
        """About how many points the widest label takes beside cells of so many points."""
        return 0.65 * self.points(cell) * max(map(columns_of, self.labels))


class _Figure(Figure):
    """A figure whose text stays text in SVG: it can be found, copied and read aloud."""

    def draw(self, renderer: RendererBase) -> None:
        with rc_context({"svg.fonttype": "none"}):
            super().draw(renderer)


def new_figure(width: float, height: float, layout: Literal["compressed", "none"]) -> Figure:
    """A figure of pyplot's: a notebook shows it, and so does `plt.show()`."""
    from matplotlib import pyplot  # not where an `ax` is given: it may choose a backend

    return pyplot.figure(FigureClass=_Figure, figsize=(width, height), layout=layout)


def _side(ax: Axes) -> float:
    """The shorter side, in inches."""
    box = ax.get_window_extent()
    return float(min(box.width, box.height) / ax.figure.dpi)


def lay_out(ax: Axes) -> None:
    """Let the layout of a figure that has one make room, so that sizes are known."""
    figure = ax.get_figure(root=True)
    engine = figure.get_layout_engine() if figure is not None else None
    if figure is not None and engine is not None:
        engine.execute(figure)


def draw_one(panel: Panel, sheet: Sheet, ax: Axes | None) -> Axes:
    """A heat map with labels, title and scale; in a figure of its own where `ax` is None."""
    count = len(sheet.labels)
    given = ax is not None
    if ax is None:
        side = max(2.4, min(0.4 * count, 6.0), min(0.15 * count, 16.0))
        margin = sheet.width(72 * side / count) / 72
        figure = new_figure(side + margin + 1.7, side + margin + 1.0, layout="compressed")
        ax = figure.subplots()
    else:
        side = _side(ax)
    image = _cells(ax, panel, sheet.vmax)
    tall = min(side, SCALE)
    _explain(image, [panel], ax=ax, shrink=tall / side, aspect=tall / 0.15, anchor=(0.0, 1.0))
    ax.set_ylabel(f"query {sheet.unit}")
    ax.set_xlabel(f"key {sheet.unit}")
    ax.set_title(sheet.title, **sheet.literal)
    _label(ax, sheet, 72 * side / count)
    if given:  # the scale has taken its room, and so does the layout of a figure that has one
        lay_out(ax)
        _label(ax, sheet, 72 * _side(ax) / count)
    return ax


def draw_grid(
    panels: Sequence[Sequence[Panel]], sheet: Sheet, layers: Sequence[int], heads: Sequence[int]
) -> np.ndarray:
    """A row of small heat maps for each layer, labelled at the left and below, with one scale.

    Returns:
        (layers, heads) array of Axes.
    """
    count = len(sheet.labels)
    side = min(max(1.3, 0.1 * count), 2.6, max(1.0, 24 / len(heads)))
    cell = 72 * side / count
    figure, grid = axes_grid(len(layers), len(heads), side, sheet.width(cell) / 72)
    for axes, across in zip(grid, panels, strict=True):
        for ax, panel in zip(axes, across, strict=True):
            image = _cells(ax, panel, sheet.vmax)
            ax.set(xticks=[], yticks=[])
    for ax, layer in zip(grid[:, 0], layers, strict=True):
        label_rows(ax, sheet, cell)
        ax.set_ylabel(f"layer {layer}")
    for ax, head in zip(grid[0], heads, strict=True):
        ax.set_title(f"head {head}", fontsize=LARGEST)
    for ax in grid[-1]:
        label_columns(ax, sheet, cell)
    _finish_grid(figure, grid, sheet, image, [panel for across in panels for panel in across])
    return grid


def axes_grid(rows: int, columns: int, side: float, label: float) -> tuple[Figure, np.ndarray]:
    """A figure of axes of so many inches, (rows, columns), with room at the left and below.

    Placed by arithmetic: matplotlib's layout takes seconds for a hundred axes.
    """
    wide, high = columns * (side + GAP) - GAP, rows * (side + GAP) - GAP
    left, bottom = label + 0.8, label + 0.45
    width, height = left + wide + 1.3, bottom + high + 0.8
    figure = new_figure(width, height, layout="none")
    return figure, figure.subplots(
        rows,
        columns,
        squeeze=False,
        gridspec_kw={
            "left": left / width,
            "right": (left + wide) / width,
            "bottom": bottom / height,
            "top": (bottom + high) / height,
            "wspace": GAP / side,
            "hspace": GAP / side,
        },
    )


def _finish_grid(
    figure: Figure, grid: np.ndarray, sheet: Sheet, image: AxesImage, panels: Sequence[Panel]
) -> None:
    """The title, the axes' names and the scale, which all panels share."""
    width, height = figure.get_size_inches()
    first, last = grid[0, 0].get_position(), grid[-1, -1].get_position()
    middle = (first.x0 + last.x1) / 2
    figure.suptitle(sheet.title, x=middle, y=1 - 0.15 / height, va="top", **sheet.literal)
    figure.supxlabel(f"key {sheet.unit}", x=middle, y=0.1 / height)
    figure.supylabel(f"query {sheet.unit}", x=0.1 / width, y=(first.y1 + last.y0) / 2)
    tall = min(first.y1 - last.y0, SCALE / height)
    scale = figure.add_axes((last.x1 + 0.15 / width, first.y1 - tall, 0.15 / width, tall))
    _explain(image, panels, cax=scale)


def _cells(ax: Axes, panel: Panel, vmax: float) -> AxesImage:
    count = len(panel.weights)
    # Masked cells are transparent, and show what lies below them.
    ax.add_patch(hatched((-0.5, -0.5), count, count))
    ax.grid(visible=False)
    return ax.imshow(
        np.ma.masked_array(panel.weights, ~panel.allowed),
        cmap=COLOURS,
        vmin=0.0,
        vmax=vmax,
        aspect="equal",
        origin="upper",
        interpolation="auto",
    )


def hatched(
    corner: tuple[float, float], width: float, height: float, label: str = "masked"
) -> Rectangle:
    """What stands where there is no number."""
    return Rectangle(
        corner,
        width,
        height,
        facecolor="#eef1f5",
        edgecolor="#b4bcc8",
        hatch="////",
        linewidth=0,
        zorder=-1,
        label=label,
    )


def _explain(image: AxesImage, panels: Sequence[Panel], **where: Any) -> None:
    """The scale beside the cells, pointed where weights go beyond it; below it, what is masked."""
    beyond = any((panel.weights > image.norm.vmax).any() for panel in panels)
    bar = image.figure.colorbar(image, extend="max" if beyond else "neither", **where)
    bar.set_label("weight")
    if not all(panel.allowed.all() for panel in panels):
        explain_hatched(bar, hatched((0, 0), 1, 1))


def explain_hatched(bar: Colorbar, patch: Rectangle) -> None:
    """Below a scale, what is hatched."""
    bar.ax.legend(
        handles=[patch],
        loc="upper left",
        bbox_to_anchor=(0.0, -0.04),
        borderpad=0,
        borderaxespad=0,
        frameon=False,
        handlelength=1.1,
    )


def _label(ax: Axes, sheet: Sheet, cell: float) -> None:
    label_rows(ax, sheet, cell)
    label_columns(ax, sheet, cell)


def label_rows(ax: Axes, sheet: Sheet, cell: float) -> None:
    """Labels at the left, as many as do not meet."""
    step = sheet.step(cell)
    at = range(0, len(sheet.labels), step)
    ax.set_yticks(at, sheet.labels[::step], fontsize=sheet.points(cell), **sheet.literal)


def label_columns(ax: Axes, sheet: Sheet, cell: float) -> None:
    """Labels below, turned if they are wider than their cells; a single character stays upright."""
    step, size = sheet.step(cell), sheet.points(cell)
    shown = sheet.labels[::step]
    ax.set_xticks(range(0, len(sheet.labels), step), shown, fontsize=size, **sheet.literal)
    if sheet.width(cell) > step * cell:
        for tick, label in zip(ax.get_xticklabels(), shown, strict=True):
            tick.set_rotation(0 if len(label) == 1 else 90)

"""A still picture as PNG, for where neither scripts run nor SVG is shown."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from PIL import Image

from attnprobe.views import fonts

SHARPNESS = 1.5
"""Pixels of the PNG for each of the SVG, a side."""

COLOURS = 128
"""In the PNG: lines upon lines have thousands, which nobody sees and a notebook would keep."""

_STEP = re.compile(r"([ML])(\S+) ([^ML ]+)")
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def as_png(svg: str) -> bytes:
    """Draw an SVG picture that is made of `rect`, `path` and `text`, as still pictures are.

    Paths are of `M` and `L` with absolute numbers, strokes and sizes in pixels.

    Raises:
        KeyError: it holds another element.
    """
    root = ElementTree.fromstring(svg)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    figure = Figure(figsize=(width / 72, height / 72), dpi=72 * SHARPNESS)  # a point is a pixel
    ax = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    ax.set_axis_off()
    labels = fonts.legible([one.text or "" for one in root if _tag(one) == "text"])
    texts = iter(labels.texts)
    fixed = ["DejaVu Sans Mono"] if root.get("font-family") == "monospace" else []  # matplotlib's
    for order, element in enumerate(root):
        inherited = {**root.attrib, **element.attrib, "zorder": str(order)}
        if _tag(element) == "text":
            _text(ax, inherited, next(texts), [*fixed, *labels.families])
        else:
            _DRAWN[_tag(element)](ax, inherited, width, height)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    file = io.BytesIO()
    drawn.quantize(COLOURS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def _tag(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _text(ax: Axes, given: dict[str, str], text: str, families: list[str]) -> None:
    ax.text(
        float(given["x"]),
        float(given["y"]),
        text,
        fontsize=float(given["font-size"]),
        ha=_ANCHORS[given.get("text-anchor", "start")],
        va="baseline",
        color=given.get("fill", "black"),
        family=families,
        parse_math=False,
        usetex=False,
        zorder=float(given["zorder"]),
    )


def _path(ax: Axes, given: dict[str, str], width: float, height: float) -> None:
    steps = _STEP.findall(given["d"])
    path = Path(
        [(float(x), float(y)) for _, x, y in steps],
        [Path.MOVETO if step == "M" else Path.LINETO for step, _, _ in steps],
    )
    patch = PathPatch(
        path,
        facecolor="none",
        edgecolor=given["stroke"],
        linewidth=float(given["stroke-width"]),
        alpha=float(given.get("stroke-opacity", 1)),
        zorder=float(given["zorder"]),
    )
    ax.add_patch(patch)


def _rect(ax: Axes, given: dict[str, str], width: float, height: float) -> None:
    x, y, wide, high = (
        _length(given.get(name, "0"), whole)
        for name, whole in (("x", width), ("y", height), ("width", width), ("height", height))
    )
    patch = Rectangle(
        (x, y),
        wide,
        high,
        facecolor=given.get("fill", "black"),
        alpha=float(given.get("fill-opacity", 1)),
        linewidth=0,
        zorder=float(given["zorder"]),
    )
    ax.add_patch(patch)


def _length(given: str, whole: float) -> float:
    """Pixels, from a number or a percentage of the picture's side."""
    return float(given[:-1]) / 100 * whole if given.endswith("%") else float(given)


_DRAWN: dict[str, Callable[[Axes, dict[str, str], float, float], None]] = {
    "path": _path,
    "rect": _rect,
}

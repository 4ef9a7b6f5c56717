"""Weights as pictures for notebooks and papers: `heatmap` of one head, `heatmap_grid` of many."""

from __future__ import annotations

import io
import math
import warnings
from typing import TYPE_CHECKING

import numpy as np

from attnprobe.errors import InputError
from attnprobe.recompute import Which, chosen
from attnprobe.records import Capture, captured
from attnprobe.stretch import Span, Stretch
from attnprobe.words import By

_DOTS = 150  # an inch, of a picture in dots

if TYPE_CHECKING:  # matplotlib is slow to import, and only for who draws
    from matplotlib.axes import Axes

    from attnprobe.views.drawing import Panel, Sheet

LONGEST, LONGEST_NAME = 24, 48
"""Characters of a label, and of a model's name: of longer ones, beginning and end are shown."""

PICTURE_BYTES = 500_000_000
"""The most that the weights in one picture may take."""


def heatmap(
    cap: Capture,
    layer: int,
    head: int,
    *,
    by: By = "token",
    text: int = 0,
    span: Span = None,
    vmax: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw one head's weights: a row for each query, a column for each key.

    Darker is more. What the mask hides is hatched, so that it is not taken for a weight of 0. Where
    many words share the attention, `vmax=0.2` or so shows more of it. Labels are as large as the
    cells let them be; where they would meet, every other or every few are shown.

    A figure made here keeps text as text in SVG; one of yours asks
    `plt.rcParams["svg.fonttype"]`.

    Args:
        cap: what `capture` returned.
        layer: from 0.
        head: from 0.
        by: "token" or "word" (see `attnprobe.recompute.to_words`).
        text: which text of a batch.
        span: (start, stop), the words to show, counted from 0, `stop` left out; None for all. What
            stands before them is one word `⋯`, which gets what all of it gets, so that rows sum to
            1. So is what stands after, in a model that is not causal.
        vmax: the weight at the dark end of the scale; None for the largest one shown. In a causal
            model that is 1, for the first word sees itself only.
        ax: matplotlib's Axes to draw in, best of a figure whose `layout="constrained"` makes room
            for labels; None for a new figure of pyplot's, large enough for them.

    Returns:
        The Axes drawn in: `heatmap(…).figure.savefig("head.svg")` saves it, or as `.png`, `.pdf`.

    Raises:
        InputError: layer, head, text or span out of range; an unknown `by`; a `vmax` that is not
            above 0; an `ax` that is none; weights of more than `PICTURE_BYTES`.
    """
    from matplotlib.axes import Axes

    from attnprobe.views import drawing

    if ax is not None and not isinstance(ax, Axes):
        raise InputError(f"ax must be one of matplotlib's Axes, or None; got {ax!r}")
    layers, heads = _chosen(cap, [layer], [head])
    stretch = Stretch.of(cap, text, span)
    panels = _panels(stretch, layers, heads, by)
    sheet, lacking = _sheet(stretch, panels, f"layer {layer}, head {head}", by, vmax)
    warn_of(lacking)
    return drawing.draw_one(panels[0][0], sheet, ax)


def heatmap_grid(
    cap: Capture,
    layer: Which = None,
    head: Which = None,
    *,
    by: By = "token",
    text: int = 0,
    span: Span = None,
    vmax: float | None = None,
) -> np.ndarray:
    """Draw many heads in one figure: a row for each layer, a column for each head, one scale.

    Args:
        cap: what `capture` returned.
        layer: from 0; one, several, or None for all.
        head: from 0; one, several, or None for all.
        by, text, span, vmax: as for `heatmap`.

    Returns:
        (layers, heads) array of matplotlib's Axes, as `plt.subplots` gives them:
        `grid[0, 0].figure.savefig("heads.pdf")` saves the figure.

    Raises:
        InputError: as `heatmap`; layers with different numbers of heads.
    """
    from attnprobe.views import drawing

    layers, heads = _chosen(cap, layer, head)
    stretch = Stretch.of(cap, text, span)
    panels = _panels(stretch, layers, heads, by)
    sheet, lacking = _sheet(stretch, panels, "", by, vmax)
    warn_of(lacking)
    return drawing.draw_grid(panels, sheet, layers, heads)


def picture(drawn: Axes | np.ndarray, format: str) -> bytes:
    """What `heatmap` or `heatmap_grid` drew, as the content of a file; its figure is closed.

    `format` is as matplotlib names it: svg, png, pdf.
    """
    from matplotlib import pyplot

    axes: Axes = drawn.flat[0] if isinstance(drawn, np.ndarray) else drawn
    figure = axes.get_figure(root=True)
    assert figure is not None
    content = io.BytesIO()
    figure.savefig(content, format=format, dpi=_DOTS)
    pyplot.close(figure)
    return content.getvalue()


def _chosen(cap: Capture, layer: Which, head: Which) -> tuple[list[int], list[int]]:
    layers = chosen(layer, captured(cap).layers, "layer")
    counts = sorted({cap.call(one).heads for one in layers})
    if len(counts) > 1:
        raise InputError(
            f"the layers have {' and '.join(map(str, counts))} heads: choose layers that have as "
            "many heads as one another"
        )
    return layers, chosen(head, counts[0], "head")


def _panels(stretch: Stretch, layers: list[int], heads: list[int], by: By) -> list[list[Panel]]:
    """A row of panels for each layer.

    Raises:
        InputError: they would take more than `PICTURE_BYTES`.
    """
    from attnprobe.views.drawing import Panel

    needed = 8 * len(layers) * len(heads) * len(stretch.words.labels(by)) ** 2
    if needed > PICTURE_BYTES:
        raise InputError(
            f"the picture would hold {needed / 1e6:,.0f} MB of weights, more than "
            f"{PICTURE_BYTES / 1e6:,.0f} MB. Choose fewer layers and heads, by='word', or a span"
        )
    rows = []
    for layer in layers:
        weights, allowed = stretch.shown(layer, heads).by(by)  # (h, N, N), (N, N)
        where = allowed.cpu().numpy()
        rows.append([Panel(one, where) for one in weights.cpu().numpy()])
    return rows


def _sheet(
    stretch: Stretch, panels: list[list[Panel]], which: str, by: By, vmax: float | None
) -> tuple[Sheet, list[str]]:
    """What the panels share, and the characters in it that no font has."""
    from attnprobe.views import drawing, fonts

    if vmax is None:
        vmax = max(float(panel.weights.max()) for row in panels for panel in row)
    elif not (isinstance(vmax, int | float) and math.isfinite(vmax) and vmax > 0):
        raise InputError(f"vmax must be a weight above 0, got {vmax!r}")
    name = shortened(stretch.cap.model_name, LONGEST_NAME)
    heading = ", ".join(filter(None, (name, which)))
    letters = fonts.legible([heading, *stretch.words.labels(by)])
    heading, *labels = letters.texts
    shown = ", ".join(filter(None, (f"attention weights by {by}", stretch.title)))
    title = "\n".join(filter(None, (heading, shown)))
    labels = [shortened(label, LONGEST) for label in labels]
    return drawing.Sheet(title, by, labels, letters.families, vmax), letters.lacking


def shortened(label: str, longest: int) -> str:
    """A label, or beginning and end of a longer one."""
    if len(label) <= longest:
        return label
    return f"{label[: longest // 2]}…{label[1 - longest // 2 :]}"


def warn_of(lacking: list[str]) -> None:
    """Say once which characters are shown as code points."""
    if lacking:
        named = ", ".join(f"{one} (U+{ord(one):04X})" for one in lacking[:10])
        more = f" and {len(lacking) - 10} more" if len(lacking) > 10 else ""
        warnings.warn(
            f"no installed font that matplotlib can use has {named}{more}: the picture shows code "
            "points. Install one that has them, such as Noto Sans CJK or Noto Emoji",
            stacklevel=3,
        )

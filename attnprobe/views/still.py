"""A still picture of attention, for where scripts do not run: SVG, the strongest weights only.

It holds no other elements than `attnprobe.views.raster` knows.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.views.labels import columns_of

LINES = 3_000
"""The most lines in a picture, the strongest weights; more only where the weakest are equal."""

_STEP = 18  # pixels from a word to the next
_LEVELS = 10  # of opacity

# Characters that XML does not know; a picture that holds one is not drawn at all.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, eq=False)
class Panel:
    """Lines from queries on the left to keys on the right, for heads one upon another.

    `weights` is (h, N, N); `colours` has one for each head; the rest is in pixels.
    """

    title: str
    x: float
    y: float
    width: float
    height: float
    weights: Tensor
    colours: Sequence[str]


def one_panel(
    title: str,
    labels: Sequence[str],
    label_width: int,
    weights: Tensor,
    colours: Sequence[str],
    *,
    key_labels: Sequence[str] = (),
) -> str:
    """A text twice, and between them the lines of some heads: weights are (h, N, N).

    With `key_labels`, M of them, another text at the right: weights are (h, N, M).
    """
    height = max(len(labels), len(key_labels)) * _STEP
    panel = Panel(title, label_width, 24, 130, height, weights, colours)
    return _picture(
        [panel],
        _both_sides(labels, label_width, 24, key_labels),
        2 * label_width + 130,
        height + 30,
    )


def _both_sides(
    labels: Sequence[str], label_width: int, top: int, key_labels: Sequence[str] = ()
) -> str:
    """The words to the left and right of a panel that begins at some height."""
    columns = (
        ("end", label_width - 6, labels),
        ("start", label_width + 136, key_labels or labels),
    )
    return "".join(
        f'<text x="{x}" y="{top + 4 + (at + 0.5) * _STEP}" text-anchor="{anchor}">'
        f"{escaped(label)}</text>"
        for anchor, x, some in columns
        for at, label in enumerate(some)
    )


def grid(weights: Tensor, titles: Sequence[Sequence[str]], colours: Sequence[str]) -> str:
    """A small panel for each layer, in rows, and head: weights are (L, h, N, N).

    `titles` has one for each panel, by row, and `colours` one for each row.
    """
    rows, columns, size = weights.shape[:3]
    width, height = max(40, 900 // columns), max(40, min(4 * size, 160))
    panels = [
        Panel(
            titles[row][column],
            column * width + 4,
            row * (height + 24) + 18,
            width - 12,
            height,
            weights[row, column, None],
            colours[row : row + 1],
        )
        for row in range(rows)
        for column in range(columns)
    ]
    return _picture(panels, "", columns * width, rows * (height + 24))


def heads_and_words(
    weights: Tensor, titles: Sequence[str], colours: Sequence[str], labels: Sequence[str]
) -> str:
    """A small panel for each head, in its colour, and below the first one large: (h, N, N)."""
    side, across = 76, min(len(titles), 9)
    panels = [
        Panel(
            title,
            at % across * (side + 12) + 6,
            at // across * (side + 26) + 20,
            side,
            side,
            weights[at, None],
            colours[at : at + 1],
        )
        for at, title in enumerate(titles)
    ]
    top = -(-len(titles) // across) * (side + 26) + 30
    label_width = 10 * max(map(columns_of, labels)) + 10
    height = len(labels) * _STEP
    panels.append(Panel(titles[0], label_width, top, 130, height, weights[:1], colours[:1]))
    width = max(across * (side + 12), 2 * label_width + 136)
    return _picture(panels, _both_sides(labels, label_width, top), width, top + height + 6)


def lines_of_text(text: str) -> str:
    """Text as it would stand on a terminal."""
    lines = text.splitlines()
    drawn = "".join(
        f'<text x="8" y="{(at + 1) * _STEP}" xml:space="preserve">{escaped(line)}</text>'
        for at, line in enumerate(lines)
    )
    width = 9 * max(map(len, lines)) + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{(len(lines) + 1) * _STEP}" font-family="monospace" font-size="13">'
        f'<rect width="100%" height="100%" fill="white"/>{drawn}</svg>'
    )


def _picture(panels: Sequence[Panel], words: str, width: int, height: int) -> str:
    everything = torch.cat([panel.weights.flatten() for panel in panels])
    least = float(everything.topk(min(LINES, len(everything))).values[-1])
    drawn = "".join(_drawn(panel, max(least, 1 / _LEVELS / 2)) for panel in panels)
    return svg(drawn + words, width, height)


def svg(inside: str, width: int, height: int) -> str:
    """A picture of SVG elements on white, in pixels."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" stroke-width="1.5">'
        f'<rect width="100%" height="100%" fill="white"/>{inside}</svg>'
    )


def _drawn(panel: Panel, least: float) -> str:
    """A panel's lines of weights of at least `least`: a path for each head and opacity."""
    x, step = panel.x, panel.height / max(panel.weights.shape[-2:])
    paths = [
        f'<text x="{x + panel.width / 2:g}" y="{panel.y - 8:g}" text-anchor="middle" '
        f'font-size="11">{escaped(panel.title)}</text>'
    ]
    for head, colour in enumerate(panel.colours):
        kept = (panel.weights[head] >= least).nonzero()  # (lines, 2)
        levels = (panel.weights[head][tuple(kept.T)] * _LEVELS).ceil().clamp(max=_LEVELS)
        for level in range(1, _LEVELS + 1):
            pairs = kept[levels == level].tolist()
            lines = "".join(
                f"M{x:g} {panel.y + (query + 0.5) * step:.1f}"
                f"L{x + panel.width:g} {panel.y + (key + 0.5) * step:.1f}"
                for query, key in pairs
            )
            if pairs:
                opacity = level / _LEVELS / math.sqrt(len(panel.colours))
                paths.append(
                    f'<path stroke="{colour}" stroke-opacity="{opacity:.2g}" d="{lines}"/>'
                )
    return "".join(paths)


def escaped(text: str) -> str:
    """Text that may stand in SVG and shows as itself."""
    return html.escape(_NO_XML.sub("\ufffd", text))

"""A still picture of strips of coloured cells, one under another, for where scripts do not run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attnprobe.views.colours import blended, ink_on
from attnprobe.views.labels import columns_of
from attnprobe.views.still import escaped, svg

CELLS = 64
"""The most cells of a strip that a picture shows."""

_LABEL, _ROW, _CELL = 230, 40, 50  # pixels: the term beside a strip, a strip, the narrowest column
_COLUMN = 7.5  # pixels of a letter of a label, at most, with few exceptions
_MASK = (
    '<pattern id="masked" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="2" height="6" fill="#d5dae1"/></pattern>'
)


@dataclass(frozen=True)
class Strip:
    """Numbers as cells.

    `term` and `note` stand beside them; the colours `stops` go from `-high`, or 0 where no number
    is `signed`, to `high`; `masked` says which cells are hatched.
    """

    term: str
    note: str
    values: Sequence[float]
    high: float
    stops: Sequence[str]
    masked: Sequence[bool]
    signed: bool = True


def strips_picture(
    heading: Sequence[str],
    labels: Sequence[str],
    current: int,
    strips: Sequence[Strip],
    below: Sequence[Strip],
    ending: str,
) -> str:
    """An SVG picture.

    Args:
        heading: lines of text at the top.
        labels: of the columns of `strips`; number `current` is marked.
        strips: with a cell for each label, and its number in it.
        below: strips of any number of narrow cells.
        ending: a line of text at the end.
    """
    widths = [max(_CELL, round(_COLUMN * columns_of(one)) + 8) for one in labels]
    top = 20 * len(heading) + 8
    parts = [_words(6, 20 * at + 18, line, 14 - at) for at, line in enumerate(heading)]
    x = _LABEL
    for at, (label, width) in enumerate(zip(labels, widths, strict=True)):
        if at == current:
            parts.append(
                f'<rect x="{x}" y="{top}" width="{width - 2}" height="20" fill="#dcebfd"/>'
            )
        parts.append(_words(x + width / 2 - 1, top + 15, label, 12, "middle"))
        x += width
    y = top + 24
    for strip in strips:
        parts.append(_row(strip, y, widths, numbers=True))
        y += _ROW
    narrow = max((len(strip.values) for strip in below), default=0)
    each = [max(5, min(16, (x - _LABEL) // max(narrow, 1)))] * narrow
    for strip in below:
        parts.append(_row(strip, y, each, numbers=False))
        y += _ROW
    parts.append(_words(6, y + 14, ending, 12))
    widest = max(columns_of(line) for line in (*heading, ending))
    width = max(x, _LABEL + sum(each), round(8.5 * widest)) + 6
    return svg(f"<defs>{_MASK}</defs>{''.join(parts)}", width, y + 24)


def number(value: float) -> str:
    """A number of three digits, as the page writes it."""
    if math.isinf(value):
        return "−∞" if value < 0 else "∞"
    if math.isnan(value):
        return "–"
    small = value != 0 and not 1e-3 <= abs(value) < 1e5
    return (f"{value:.1e}".replace("e-0", "e-") if small else f"{value:.3g}").replace("-", "−")


def _row(strip: Strip, y: int, widths: Sequence[int], *, numbers: bool) -> str:
    low = -strip.high if strip.signed else 0.0
    scale = f"{number(low)} … {number(strip.high)}"
    parts = [
        _words(6, y + 13, strip.term, 13, weight="bold"),
        _words(_LABEL - 8, y + 13, scale, 10, "end"),
        _words(6, y + 28, strip.note, 11, fill="#5b6470"),
    ]
    x = _LABEL
    for value, masked, width in zip(strip.values, strip.masked, widths, strict=True):
        place = (value - low) / ((strip.high - low) or 1.0)
        colour = blended(strip.stops, place if math.isfinite(place) else 0.5)
        fill, ink = ("url(#masked)", "#1b1f24") if masked else (colour, ink_on(colour))
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width - 2}" height="{_ROW - 10}" fill="{fill}"/>'
        )
        if numbers:
            parts.append(_words(x + width / 2 - 1, y + 19, number(value), 11, "middle", ink))
        x += width
    return "".join(parts)


def _words(
    x: float,
    y: float,
    text: str,
    size: int,
    anchor: str = "start",
    fill: str = "#1b1f24",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{escaped(text)}</text>'
    )

"""Colours: as many as are asked for, no two the same; and of cells that show a number."""

from __future__ import annotations

from collections.abc import Sequence
from colorsys import hls_to_rgb

# d3.schemeCategory10, which BertViz uses: where ten are enough, pictures look as people know them.
_CATEGORY_10 = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)

# Of cells, from the least number to the largest, on a light and on a dark page. Blue and orange
# differ for the colour-blind too; the middle, and the least weight, are near the page's own colour.
SIGNED = {
    "light": ("#1f63a8", "#f5f6f8", "#c05a00"),
    "dark": ("#62adff", "#262b33", "#ff9c3d"),
}
WEIGHTS = {
    "light": ("#f5f6f8", "#a48fd0", "#41197f"),
    "dark": ("#262b33", "#7a60ba", "#dccbff"),
}

_LIGHTNESSES = (0.46, 0.60, 0.74)  # neighbours in hue differ in lightness


def colours(count: int) -> list[str]:
    """`count` distinct colours, as `#rrggbb`."""
    if count <= len(_CATEGORY_10):
        return list(_CATEGORY_10[:count])
    return [
        _hex(*hls_to_rgb(at / count, _LIGHTNESSES[at % len(_LIGHTNESSES)], 0.75))
        for at in range(count)
    ]


def blended(stops: Sequence[str], at: float) -> str:
    """The colour at 0 to 1 along `#rrggbb` stops that stand evenly apart."""
    place = min(max(at, 0.0), 1.0) * (len(stops) - 1)
    start = min(int(place), len(stops) - 2)
    parts = zip(_parts(stops[start]), _parts(stops[start + 1]), strict=True)
    return _hex(*(low + (high - low) * (place - start) for low, high in parts))


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on `#rrggbb`: a contrast of at least 4.5 (WCAG 2)."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in _parts(colour)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if luminance > 0.179 else "#ffffff"


def _parts(colour: str) -> list[float]:
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def _hex(red: float, green: float, blue: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in (red, green, blue))

"""As many colours as are asked for, no two the same."""

from __future__ import annotations

from colorsys import hls_to_rgb

# d3.schemeCategory10, which BertViz uses: where ten are enough, pictures look as people know them.
_CATEGORY_10 = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)

_LIGHTNESSES = (0.46, 0.60, 0.74)  # neighbours in hue differ in lightness


def colours(count: int) -> list[str]:
    """`count` distinct colours, as `#rrggbb`."""
    if count <= len(_CATEGORY_10):
        return list(_CATEGORY_10[:count])
    return [_hex(at / count, _LIGHTNESSES[at % len(_LIGHTNESSES)]) for at in range(count)]


def _hex(hue: float, lightness: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in hls_to_rgb(hue, lightness, 0.75))

"""How a statistic of heads is spread over the rows of a corpus: `histogram_grid`."""

from __future__ import annotations

import numpy as np
import pandas as pd

from attnprobe.errors import InputError
from attnprobe.recompute import Which
from attnprobe.records import several, whole
from attnprobe.views.captions import STATISTICS

COLUMNS = ("layer", "head", "statistic", "low", "high", "count")

_SIDE = 1.3  # of a panel, in inches
_COLOUR = "#7b3294"


def histogram_grid(
    frame: pd.DataFrame, statistic: str, layer: Which = None, head: Which = None
) -> np.ndarray:
    """Draw a statistic's histogram for each head: a row for each layer, a column for each head.

    Each bar is the share of the head's rows in that bin; each panel is as high as its highest bar,
    and says how high that is. Distances stand on a logarithmic scale, ln(1 + distance).

    Args:
        frame: `read_sweep(…).histograms`.
        statistic: one of those in the frame, as `head_stats` calls them: "entropy", "first", …
        layer: from 0; one, several, or None for all.
        head: from 0; one, several, or None for all.

    Returns:
        (layers, heads) array of matplotlib's Axes: `grid[0, 0].figure.savefig("entropy.svg")` saves
        the figure.

    Raises:
        InputError: a frame without these columns; a statistic, layer or head that it does not
            hold, or without any row.
    """
    expected = (
        f"expected a frame with the columns {', '.join(COLUMNS)}, as read_sweep(…).histograms"
    )
    if not isinstance(frame, pd.DataFrame):
        raise InputError(f"{expected}; got {type(frame).__name__}")
    missing = [name for name in COLUMNS if name not in frame]
    if missing:
        raise InputError(f"{expected} has them; there is no {missing[0]}")
    of_all = frame[frame["statistic"] == statistic]
    if of_all.empty:
        held = ", ".join(map(str, frame["statistic"].unique()))
        raise InputError(f"the frame holds no statistic {statistic!r}; it has {held}")
    layers, heads = _held(of_all["layer"], layer), _held(of_all["head"], head)
    chosen = of_all[of_all["layer"].isin(layers) & of_all["head"].isin(heads)]
    edges = np.union1d(chosen["low"], chosen["high"])
    counts = {
        (layer, head): np.histogram(own["low"], edges, weights=own["count"])[0]
        for layer in layers
        for head in heads
        for own in [chosen[(chosen["layer"] == layer) & (chosen["head"] == head)]]
    }
    if not any(one.any() for one in counts.values()):
        raise InputError(f"no row of these heads counts for {statistic!r}")
    return _draw(counts, edges, statistic, layers, heads)


def _held(column: pd.Series, which: Which) -> list[int]:
    """Of the numbers in a column those that are asked for."""
    held = sorted({int(one) for one in column})
    if which is None:
        return held
    numbers = [whole(one, str(column.name)) for one in (which if several(which) else [which])]
    for number in numbers:
        if number not in held:
            raise InputError(f"the frame holds no {column.name} {number}; it has {held}")
    return numbers


def _draw(
    counts: dict[tuple[int, int], np.ndarray],
    edges: np.ndarray,
    statistic: str,
    layers: list[int],
    heads: list[int],
) -> np.ndarray:
    from attnprobe.views import drawing

    figure, grid = drawing.axes_grid(len(layers), len(heads), _SIDE, 0.2)
    shares = {place: own / own.sum() for place, own in counts.items() if own.any()}
    for row, layer in enumerate(layers):
        for column, head in enumerate(heads):
            ax = grid[row, column]
            if (layer, head) in shares:
                own = shares[layer, head]
                ax.stairs(own, edges, fill=True, color=_COLOUR, linewidth=1.0)
                ax.set_ylim(0.0, 1.15 * own.max())
                where = {"transform": ax.transAxes, "va": "top", "fontsize": 7.0}
                ax.text(0.03, 0.98, f"{own.max():.0%}", **where)
            else:
                ax.text(0.5, 0.5, "no rows", ha="center", va="center", transform=ax.transAxes)
            if statistic.startswith("distance"):
                ax.set_xscale("function", functions=(np.log1p, np.expm1))
                ticks = [one for one in (0, 3, 15, 63, 255, 1023, 4095) if one <= edges[-1]]
                ax.set_xticks(ticks, [str(one) for one in ticks], fontsize=drawing.SMALLEST)
            ax.set(yticks=[])  # a margin at the sides: a bar at 0 must not lie under the frame
            ax.tick_params(labelsize=7.0, labelbottom=row == len(layers) - 1)
    for ax, layer in zip(grid[:, 0], layers, strict=True):
        ax.set_ylabel(f"layer {layer}")
    for ax, head in zip(grid[0], heads, strict=True):
        ax.set_title(f"head {head}", fontsize=drawing.LARGEST)
    _, unit = STATISTICS.get(statistic, ("", ""))
    named = statistic.replace("_", " ")
    middle = (grid[0, 0].get_position().x0 + grid[0, -1].get_position().x1) / 2
    title = f"{named} of each row of weights: shares of the rows\n(the number: of the highest bar)"
    figure.suptitle(title, x=middle, fontsize=drawing.LARGEST)
    figure.supxlabel(unit or named, x=middle, fontsize=drawing.LARGEST)
    return grid

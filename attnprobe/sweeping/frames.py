"""The tables of one layer, from its tallies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from attnprobe.sweeping.tallies import BINS, Tally, edges, names
from attnprobe.sweeping.texts import CLASSES

QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}


def frame_of(name: str, layer: int, tally: Tally, limit: int, by_value: bool) -> pd.DataFrame:
    """A layer's rows of heads, histograms, distances or classes.

    Args:
        name: which of them.
        layer: from 0.
        tally: the layer's.
        limit: N, the most tokens of a text.
        by_value: whether there are columns of the masses by value.
    """
    match name:
        case "heads":
            return _heads(layer, tally, limit, by_value)
        case "histograms":
            return _histograms(layer, tally, limit)
        case "distances":
            return _distances(layer, tally, limit)
        case _:
            return _classes(layer, tally)


def _heads(layer: int, tally: Tally, limit: int, by_value: bool) -> pd.DataFrame:
    heads = len(tally.rows)
    columns: dict[str, Any] = {
        "layer": np.full(heads, layer),
        "head": np.arange(heads),
        "rows": tally.rows[:, 0],
    }
    for at, name in enumerate(names(by_value)):
        if at >= tally.rows.shape[1]:  # by value, of a layer whose W_O is not known
            columns[name] = np.full(heads, np.nan)
            continue
        rows, bins = tally.rows[:, at], tally.bins[:, at]
        count = np.where(rows > 0, rows, np.nan)
        mean = columns[name] = tally.sums[:, at] / count
        columns[f"{name}_rows"] = rows
        spread = tally.squares[:, at] / count - mean**2
        columns[f"{name}_std"] = np.sqrt(np.maximum(spread, 0.0))
        for label, share in QUANTILES.items():
            found = [quantile(one, edges(name, limit), share) for one in bins]
            columns[f"{name}_{label}"] = np.array(found)
    return pd.DataFrame(columns)


def quantile(counts: np.ndarray, bounds: np.ndarray, share: float) -> float:
    """The value that a share of all rows is below, as if the rows of a bin lay evenly in it; NaN
    without any."""
    total = counts.sum()
    if not total:
        return float("nan")
    below = np.concatenate([[0], np.cumsum(counts)])
    wanted = share * total
    at = min(int(np.searchsorted(below, wanted, side="left")), len(counts))
    at = max(at, 1)
    part = (wanted - below[at - 1]) / (below[at] - below[at - 1])
    return float(bounds[at - 1] + part * (bounds[at] - bounds[at - 1]))


def _histograms(layer: int, tally: Tally, limit: int) -> pd.DataFrame:
    all_names = names(tally.rows.shape[1] > len(names(False)))
    low, high = (
        np.stack([edges(name, limit)[part] for name in all_names])
        for part in (slice(BINS), slice(1, None))
    )
    head, at, number = tally.bins.nonzero()
    return pd.DataFrame(
        {
            "layer": np.full(len(head), layer),
            "head": head,
            "statistic": np.array(all_names, object)[at],
            "low": low[at, number],
            "high": high[at, number],
            "count": tally.bins[head, at, number],
        }
    )


def _distances(layer: int, tally: Tally, limit: int) -> pd.DataFrame:
    head, place = tally.cells.nonzero()
    order = np.lexsort((-place, head))
    head, place = head[order], place[order]
    weight, cells = tally.distances[head, place], tally.cells[head, place]
    return pd.DataFrame(
        {
            "layer": np.full(len(head), layer),
            "head": head,
            "distance": limit - 1 - place,
            "weight": weight,
            "cells": cells,
            "mean": weight / cells,
            "share": weight / tally.distances.sum(-1)[head],
        }
    )


def _classes(layer: int, tally: Tally) -> pd.DataFrame:
    kept: Sequence[np.ndarray] = (
        (tally.class_rows[:, :, None] > 0) & (tally.class_rows[:, None, :] > 0)
    ).nonzero()
    head, query, key = kept
    rows = tally.class_rows[head, query]
    labels = np.array(CLASSES, object)
    return pd.DataFrame(
        {
            "layer": np.full(len(head), layer),
            "head": head,
            "query_class": labels[query],
            "key_class": labels[key],
            "rows": rows,
            "mass": tally.classes[head, query, key] / rows,
            "uniform": tally.uniform[head, query, key] / rows,
        }
    )

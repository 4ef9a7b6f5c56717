"""Histograms of a statistic, head by head, from the numbers of a sweep."""

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

import attnprobe as ap

mpl.use("agg")
from matplotlib import pyplot as plt

EDGES = {"entropy": [0.0, 0.5, 1.5, 2.0], "distance": [0.0, 1.0, 3.0, 7.0]}
COUNTS = {
    (0, 0): [1, 0, 3],
    (0, 1): [2, 2, 4],
    (0, 2): [0, 0, 9],
    (2, 0): [5, 4, 1],
    (2, 1): [0, 0, 0],
    (2, 2): [1, 1, 1],
}


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def frame():
    rows = [
        (layer, head, name, low, high, count)
        for (layer, head), counts in COUNTS.items()
        for name, edges in EDGES.items()
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]
    return pd.DataFrame(rows, columns=["layer", "head", "statistic", "low", "high", "count"])


@pytest.mark.parametrize("statistic", EDGES)
def test_each_panel_holds_the_shares_of_its_heads_rows(frame, statistic):
    grid = ap.histogram_grid(frame.sample(frac=1, random_state=1), statistic)
    assert grid.shape == (2, 3)
    for row, layer in enumerate((0, 2)):
        for head in range(3):
            counts = np.array(COUNTS[layer, head])
            drawn = grid[row, head].patches
            if not counts.any():
                assert not drawn
                assert "no rows" in [one.get_text() for one in grid[row, head].texts]
                continue
            values, edges, _ = drawn[0].get_data()
            np.testing.assert_allclose(values, counts / counts.sum())
            np.testing.assert_array_equal(edges, EDGES[statistic])
            highest = f"{counts.max() / counts.sum():.0%}"
            assert highest in [one.get_text() for one in grid[row, head].texts]
            assert grid[row, head].get_ylim()[1] > values.max()
    figure = grid[0, 0].figure
    assert figure.get_suptitle().startswith(f"{statistic} of each row of weights")
    assert (
        figure.get_supxlabel() == f"{statistic} ({'nats' if statistic == 'entropy' else 'tokens'})"
    )
    assert [ax.get_ylabel() for ax in grid[:, 0]] == ["layer 0", "layer 2"]
    assert [ax.get_title() for ax in grid[0]] == ["head 0", "head 1", "head 2"]


def test_some_layers_and_heads(frame):
    grid = ap.histogram_grid(frame, "entropy", 2, [2, 0])
    assert grid.shape == (1, 2)
    assert ap.histogram_grid(frame, "entropy", np.array(2), np.array([2, 0])).shape == (1, 2)
    np.testing.assert_allclose(grid[0, 0].patches[0].get_data().values, [1 / 3] * 3)
    np.testing.assert_allclose(grid[0, 1].patches[0].get_data().values, [0.5, 0.4, 0.1])


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        ({}, {"statistic": "height"}, "no statistic 'height'; it has entropy, distance"),
        ({}, {"layer": 1}, "no layer 1"),
        ({}, {"head": [0, 3]}, "no head 3"),
        ({}, {"head": "a"}, "whole number for head"),
        ({}, {"layer": 2, "head": 1}, "no row of these heads counts for 'entropy'"),
        ({"columns": "low"}, {}, "there is no low"),
    ],
)
def test_what_the_frame_does_not_hold_is_refused(frame, change, options, says):
    with pytest.raises(ap.InputError, match=says):
        ap.histogram_grid(
            frame.drop(**change) if change else frame, **{"statistic": "entropy"} | options
        )


def test_what_is_no_frame_is_refused():
    with pytest.raises(ap.InputError, match="got int"):
        ap.histogram_grid(5, "entropy")

"""Which heads are named, why, and in which order."""

from __future__ import annotations

import math

import pandas as pd
import pytest

import attnprobe as ap
from attnprobe import heads, remarks


def stats(*rows: dict[str, float]) -> pd.DataFrame:
    """Statistics of so many heads of layer 3: nothing large, but for what is given."""
    plain: dict[str, float] = dict.fromkeys((*heads.BASIC, *heads.MASSES), 0.3)
    plain |= {f"{name}_rows": 7 for name in heads.COUNTED}
    return pd.DataFrame(
        [{"layer": 3, "head": at} | plain | {"entropy": 0.9} | row for at, row in enumerate(rows)]
    )


def named(frame: pd.DataFrame) -> list[tuple[int, int, str]]:
    return list(remarks.remarkable(frame).itertuples(index=False, name=None))


EXTREMES = [
    "sharpest: entropy 0.12 nats",
    "most even: entropy 0.87 of its maximum",
    "looks farthest: 4.6 tokens away, the first token left out",
]


def test_large_masses_come_first_by_size_then_the_extremes():
    frame = stats(
        {"first": 0.7},
        {"entropy": 0.12345, "punctuation": 0.51},
        {"entropy_share": 0.87},
        {"distance_without_first": 4.56, "previous": 0.99, "induction": 0.6},
    )
    assert named(frame) == [
        (
            3,
            3,
            "mostly the previous token: 0.99; the token after an equal earlier one: 0.60 "
            f"(over 7 tokens); {EXTREMES[2]}",
        ),
        (3, 0, "first token: 0.70"),
        (3, 1, f"punctuation: 0.51 (over 7 tokens); {EXTREMES[0]}"),
        (3, 2, EXTREMES[1]),
    ]


def test_the_two_with_the_most_are_named_and_the_others_counted():
    frame = stats(*({"first": mass} for mass in (0.6, 0.9, 0.5, 0.8, 0.7)))
    found = [row for row in named(frame) if "first token:" in row[2]]
    assert [(row[1], row[2].split(";")[0]) for row in found] == [
        (1, "first token: 0.90 (4 heads are above 0.5)"),
        (3, "first token: 0.80 (4 heads are above 0.5)"),
    ]


def test_a_single_token_is_counted_as_one():
    frame = stats({"duplicate": 1.0, "duplicate_rows": 1})
    assert named(frame)[0][2].startswith("equal earlier tokens: 1.00 (over 1 token);")


@pytest.mark.parametrize("name", heads.MASSES)
def test_every_mass_has_words(name):
    frame = stats({name: 0.5}, {name: 0.75})
    assert [row[1] for row in named(frame) if "0.75" in row[2]] == [1]
    assert not [row for row in named(frame) if "0.50" in row[2]]


def test_what_is_nan_is_no_reason(gpt2):
    frame = stats(dict.fromkeys((*heads.BASIC, *heads.MASSES), math.nan), {"entropy": 1.0})
    assert {row[1] for row in named(frame)} == {1}
    found = remarks.remarkable(ap.head_stats(ap.capture(gpt2(), [7])))  # it sees itself only
    assert found.empty
    assert found.dtypes.astype(str).tolist()[:2] == ["int64", "int64"]

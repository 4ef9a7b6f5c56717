"""The heads worth looking at, each with its reason in words, out of `head_stats`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from attnprobe.heads import COUNTED

_Head = dict[Any, Any]  # a row of `head_stats`, by column

LEAST = 0.5
"""A mass above this is a reason to look at a head: most of its attention goes there."""

OF_EACH = 2
"""How many heads are named for each reason: those with the most."""

SIGNS = {
    "previous": "mostly the previous token",
    "next": "mostly the next token",
    "same": "mostly the token itself",
    "two_before": "mostly the token two before",
    "induction": "the token after an equal earlier one",
    "duplicate": "equal earlier tokens",
    "punctuation": "punctuation",
    "first": "first token",
}
"""What a large mass means in words, by column."""


def remarkable(stats: pd.DataFrame) -> pd.DataFrame:
    """The heads worth looking at, most telling first.

    Named are the `OF_EACH` heads with the most of each mass in `SIGNS`, where it is above `LEAST`,
    ordered by it; and after them the sharpest head (of the least entropy), the most even one (whose
    entropy is nearest to its maximum), and the one that looks farthest, the first token left out.

    Args:
        stats: what `head_stats` returned.

    Returns:
        Columns layer, head (int64) and why; a head has one row, with all its reasons.
    """
    heads = stats.to_dict("records")
    reasons: dict[tuple[int, int], list[str]] = {}
    signs = sorted(_signs(heads), key=lambda sign: -sign[0])
    for head, why in [*((head, why) for _, head, why in signs), *_extremes(heads)]:
        reasons.setdefault((head["layer"], head["head"]), []).append(why)
    rows = [(*place, "; ".join(why)) for place, why in reasons.items()]
    return pd.DataFrame(rows, columns=["layer", "head", "why"]).astype(
        {"layer": "int64", "head": "int64"}
    )


def _signs(heads: list[_Head]) -> Iterator[tuple[float, _Head, str]]:
    """Each large mass, its head, and the reason in words."""
    for name, means in SIGNS.items():
        above = sorted((one for one in heads if one[name] > LEAST), key=lambda one: -one[name])
        for head in above[:OF_EACH]:
            notes = []
            if name in COUNTED:
                count = head[f"{name}_rows"]
                notes.append(f"over {count} token{'' if count == 1 else 's'}")
            if len(above) > OF_EACH:
                notes.append(f"{len(above)} heads are above {LEAST}")
            more = f" ({'; '.join(notes)})" if notes else ""
            yield head[name], head, f"{means}: {head[name]:.2f}{more}"


def _extremes(heads: list[_Head]) -> Iterator[tuple[_Head, str]]:
    """The heads that go farthest in what has no threshold, and the reason in words."""
    choosing = [one for one in heads if not math.isnan(one["entropy_share"])]
    if choosing:
        sharpest = min(choosing, key=lambda one: one["entropy"])
        yield sharpest, f"sharpest: entropy {sharpest['entropy']:.2g} nats"
        even = max(choosing, key=lambda one: one["entropy_share"])
        yield even, f"most even: entropy {even['entropy_share']:.2f} of its maximum"
    far = [one for one in heads if not math.isnan(one["distance_without_first"])]
    if far:
        farthest = max(far, key=lambda one: one["distance_without_first"])
        how_far = f"{farthest['distance_without_first']:.1f} tokens away"
        yield farthest, f"looks farthest: {how_far}, the first token left out"

"""Attention as a tidy pandas frame, by token or by word: `table`; and as a heat map: `styled`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from pandas.io.formats.style import Styler

from attnprobe.errors import InputError
from attnprobe.recompute import Attention, Which, chosen
from attnprobe.records import Capture, captured, whole
from attnprobe.words import By

TABLE_BYTES = 500_000_000
"""The largest frame that `table` makes unless told otherwise, in bytes."""

COLUMNS = (
    *("text", "layer", "head", "query_pos", "query", "key_pos", "key"),
    *("score_raw", "score", "masked", "weight", "sink"),
)

WEIGHTS = {"weight", "share", "future", "top1"} | {
    f"{name}{skipped}" for name in ("weight", "value_share") for skipped in ("", "_without_first")
}
"""The columns that `styled` colours: between 0 and 1, but for a share, which may be negative."""

_SINK = "<sink>"  # the last column of a wide table, where the model has sinks

_ROW_BYTES = 45  # what one row of the columns below takes, categories aside


def table(
    cap: Capture,
    layer: Which = None,
    head: Which = None,
    *,
    by: By = "token",
    text: Which = None,
    future: bool = False,
    wide: bool = False,
    max_bytes: int = TABLE_BYTES,
) -> pd.DataFrame:
    """A row for each text, layer, head, query, and key that the query may attend to.

    Args:
        cap: what `capture` returned.
        layer: from 0; one, several, or None for all.
        head: from 0; one, several, or None for all.
        by: "token" or "word" (see `attnprobe.recompute.to_words`).
        text: which texts of a batch, from 0; None for all.
        future: rows also for keys that the mask hides.
        wide: instead, the matrix of weights of one layer, head and text: a row a query, a column a
            key. A token or word that occurs again is numbered from 2, as in `the (2)`. Where the
            model has sinks, the last column is `<sink>`.
        max_bytes: the largest frame to make.

    Returns:
        Columns text, layer, head, query_pos, query, key_pos, key, then by token score_raw (q·k),
        score (scaled, and with what else the model adds), masked and weight, by word masked and
        weight; sink, what the query gives to no key, where the model has sinks. Positions count the
        text's own tokens, or words, from 0; query and key are categories; scores and weights are
        float64.

    Raises:
        InputError: a layer, head or text out of range; `wide` of more than one head; a frame that
            would take more than `max_bytes`.
    """
    texts = chosen(text, len(captured(cap)), "text")
    layers = chosen(layer, cap.layers, "layer")
    heads = [(one, chosen(head, cap.call(one).heads, "head")) for one in layers]
    count = sum(len(some) for _, some in heads)
    if wide:
        if len(texts) * count != 1:
            raise InputError("wide shows one text, layer and head: give text, layer and head")
        _refuse_size(8 * _pairs(cap, texts, by, future=True), max_bytes)
        return _wide(cap, layers[0], heads[0][1][0], by, texts[0])
    rows = count * _pairs(cap, texts, by, future)
    _refuse_size(_ROW_BYTES * rows, max_bytes)
    frames = [_long(cap, one, heads, by, future) for one in texts]
    return frames[0] if len(frames) == 1 else _stacked(frames)


def _pairs(cap: Capture, texts: list[int], by: By, future: bool) -> int:
    """How many pairs of a query and a key one head's table holds, over some texts."""
    lengths = [
        (len(cap.words_of(text).labels(by)), len(cap.key_words_of(text).labels(by)))
        for text in texts
    ]
    return sum(n * (n + 1) // 2 if cap.causal and not future else n * m for n, m in lengths)


def _refuse_size(needed: int, max_bytes: int) -> None:
    if needed > whole(max_bytes, "max_bytes"):
        raise InputError(
            f"the table would take about {needed:,} bytes, more than max_bytes ({max_bytes:,}). "
            "Choose a layer and a head, or raise max_bytes"
        )


def _long(
    cap: Capture, text: int, heads: list[tuple[int, list[int]]], by: By, future: bool
) -> pd.DataFrame:
    parts = [_of_layer(cap, text, layer, some, by, future) for layer, some in heads]
    columns: dict[str, Any] = {
        name: np.concatenate([part[name] for part in parts]) for name in parts[0]
    }
    by_role = {"query": cap.words_of(text).labels(by), "key": cap.key_words_of(text).labels(by)}
    categories = pd.Index(list(dict.fromkeys(by_role["query"] + by_role["key"])))
    for role, labels in by_role.items():
        codes = categories.get_indexer(pd.Index(labels))
        columns[role] = pd.Categorical.from_codes(codes[columns[f"{role}_pos"]], categories)
    columns["text"] = np.full(len(columns["layer"]), text, np.int16)
    order = [name for name in COLUMNS if name in columns]
    return pd.DataFrame({name: columns[name] for name in order}, copy=False)


def _of_layer(
    cap: Capture, text: int, layer: int, heads: list[int], by: By, future: bool
) -> dict[str, np.ndarray]:
    """The columns of one layer, but for the labels: a row a head and pair."""
    attention = Attention.of(cap, layer, heads, text, cross=True, holds=5.5)
    weights, allowed = attention.shown.by(by)  # (h, N, N), (N, N)
    values = {"weight": weights}
    if by == "token":  # a word has no score of its own
        values = {"score_raw": attention.raw, "score": attention.scores, **values}
    if attention.sink is not None:
        values["sink"] = (1 - weights.sum(-1, keepdim=True)).expand_as(weights)
    pairs = (torch.ones_like(allowed) if future else allowed).nonzero(as_tuple=True)
    query_pos, key_pos = (at.cpu().numpy().astype(np.int32) for at in pairs)
    masked = ~allowed[pairs].cpu().numpy()
    count = len(heads)
    return {
        "layer": np.full(len(masked) * count, layer, np.int16),
        "head": np.repeat(np.array(heads, np.int16), len(masked)),
        "query_pos": np.tile(query_pos, count),
        "key_pos": np.tile(key_pos, count),
        "masked": np.tile(masked, count),
        **{
            name: value[:, pairs[0], pairs[1]].flatten().cpu().numpy()
            for name, value in values.items()
        },
    }


def _stacked(frames: list[pd.DataFrame]) -> pd.DataFrame:
    """One frame of several texts', their categories united."""
    united = pd.Index(
        dict.fromkeys(label for frame in frames for label in frame["query"].cat.categories)
    )
    return pd.concat(
        [
            frame.assign(
                query=frame["query"].cat.set_categories(united),
                key=frame["key"].cat.set_categories(united),
            )
            for frame in frames
        ],
        ignore_index=True,
    )


def _wide(cap: Capture, layer: int, head: int, by: By, text: int) -> pd.DataFrame:
    attention = Attention.of(cap, layer, [head], text, cross=True, holds=2.5)
    found, _ = attention.shown.by(by)
    labels = told_apart(cap.words_of(text).labels(by))
    keys = told_apart(cap.key_words_of(text).labels(by))
    frame = pd.DataFrame(
        found[0].cpu().numpy(),
        index=pd.Index(labels, name="query"),
        columns=pd.Index(keys, name="key"),
    )
    return frame if attention.sink is None else frame.assign(**{_SINK: 1 - frame.sum(axis=1)})


def told_apart(labels: Sequence[str]) -> list[str]:
    """Labels with a number behind each that occurred before: `the`, `cat`, `the (2)`."""
    taken = set(labels)
    seen: dict[str, int] = {}
    result = []
    for label in labels:
        number = seen.get(label, 0) + 1
        while number > 1 and f"{label} ({number})" in taken:  # a text may hold `the (2)` itself
            number += 1
        seen[label] = number
        result.append(label if number == 1 else f"{label} ({number})")
    return result


def styled(frame: pd.DataFrame, *, digits: str = ".3f") -> Styler:
    """A frame with its weights as a heat map: the number in the cell, and behind it its colour.

    Takes what `table`, `attended`, `attended_by`, `term_effects` and a walkthrough's `steps` give;
    colours every column that holds weights or shares, or the whole of a `wide` table. The colour is
    laid over the notebook's own background, light or dark, and the text keeps the notebook's own
    colour. `digits` is how Python formats each number.

    Raises:
        InputError: it is no frame.
    """
    if not isinstance(frame, pd.DataFrame):
        raise InputError(f"expected a frame, got {type(frame).__name__}")
    shown = [name for name in frame.columns if name in WEIGHTS]
    if (frame.index.name, frame.columns.name) == ("query", "key"):  # a wide table: weights all over
        shown = list(frame.columns)
    elif not frame.index.is_unique:
        frame = frame.reset_index(drop=True)
    numbers = frame.select_dtypes("float").columns
    styler = frame.style.format(escape="html").format(f"{{:{digits}}}", subset=numbers)
    styler = styler.format_index(escape="html", axis="index")
    styler = styler.format_index(escape="html", axis="columns")
    return styler.map(_shade, subset=pd.Index(shown))


def _shade(weight: Any) -> str:
    share = min(max(float(weight), 0.0), 1.0)
    return f"background-color: rgba(70, 130, 220, {0.75 * share:.3f})"

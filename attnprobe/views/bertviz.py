"""BertViz from a capture: `head_view`, `model_view` and `neuron_view`.

The pages draw with BertViz's own scripts; `attnprobe.views.scripts` says what is changed in them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.recompute import Attention, Which
from attnprobe.records import Capture
from attnprobe.views.colours import colours
from attnprobe.views.labels import columns_of
from attnprobe.views.page import View
from attnprobe.views.scripts import STEPS, UNPACK_NEURONS, UNPACK_WEIGHTS, bertviz_page
from attnprobe.views.selection import Selection, refuse_size
from attnprobe.views.still import grid, one_panel
from attnprobe.words import By

HEAD_LINES = 120_000
"""The most lines that `head_view` draws unless told otherwise: 12 heads at 100 tokens."""

MODEL_LINES = 360_000
"""The most lines that `model_view` draws unless told otherwise: 12 × 12 heads at 50 tokens."""

NEURON_LINES = 120_000
"""The most lines and cells that `neuron_view` draws unless told otherwise: about 120 tokens."""

_DIGITS = 6  # of queries and keys: the page computes scores and weights from them

_COLUMN = 0.6  # how wide a letter is, as a part of its size, at most, with few exceptions
_INSTEAD = "; or attention_view, which is made for long texts"

_WIDEST = 32  # labels, in columns
_WIDEST_DETAIL = 18  # in the model view, where a detail of two columns of labels must fit in


def head_view(
    cap: Capture,
    layer: Which = None,
    head: Which = None,
    *,
    by: By = "token",
    text: int = 0,
    max_lines: int = HEAD_LINES,
) -> View:
    """BertViz's head view: a text twice, and a line from each word to each that it looks at.

    Args:
        cap: what `capture` returned.
        layer: from 0; one, several, or None for all. The first one is shown first.
        head: from 0; one, several, or None for all; each has a colour.
        by: "token" or "word" (see `attnprobe.recompute.to_words`).
        text: which text of a batch.
        max_lines: the most lines to draw at a time, for one layer.

    Returns:
        A `View`: shows itself in a notebook, and saves itself as a page. Its weights are rounded
        to four decimals.

    Raises:
        InputError: layer, head or text out of range; more lines than `max_lines`.
    """
    picked = Selection.of(cap, layer, head, by, text, _WIDEST)
    refuse_size(
        picked,
        "head_view",
        lambda _, heads, n: heads * picked.pairs(n),
        max_lines,
        instead=_INSTEAD,
    )
    weights = picked.weights()  # (L, h, N, N)
    label_width = _label_width(picked.labels + picked.key_labels, size=15, least=110)
    by_head = colours(len(picked.heads))
    params = {
        **_weights_params(picked, weights),
        "layer": None,
        "heads": None,
        "colours": by_head,
        "label_width": label_width,
    }
    body = '<div id="view">Layer: <select id="layer"></select><div id="vis"></div></div>'
    title = f"Head view: {picked.title}"
    drawn = bertviz_page(
        title,
        "Hover a word to see where it looks, or what looks at it. "
        "Click a coloured box to hide its head, double-click to see it alone.",
        body,
        params,
        UNPACK_WEIGHTS,
        "head_view.js",
        min_width=max(115 + 2 * label_width, 20 * len(picked.heads)),
    )
    still = one_panel(
        f"layer {picked.layers[0]}",
        picked.labels,
        label_width,
        weights[0],
        by_head,
        key_labels=picked.key_labels,
    )
    longest = max(len(picked.labels), len(picked.key_labels))
    return View(title, drawn, round(22.5 * longest) + 110, still)


def model_view(
    cap: Capture,
    layer: Which = None,
    head: Which = None,
    *,
    by: By = "token",
    text: int = 0,
    max_lines: int = MODEL_LINES,
) -> View:
    """BertViz's model view: a small picture for each layer and head; click one to enlarge it.

    Args:
        cap: what `capture` returned.
        layer: from 0; one, several, or None for all; each has a colour.
        head: from 0; one, several, or None for all.
        by: "token" or "word" (see `attnprobe.recompute.to_words`).
        text: which text of a batch.
        max_lines: the most lines to draw, over all layers and heads.

    Returns:
        A `View`, as `head_view` does.

    Raises:
        InputError: layer, head or text out of range; more lines than `max_lines`.
    """
    picked = Selection.of(cap, layer, head, by, text, _WIDEST_DETAIL)
    refuse_size(
        picked,
        "model_view",
        lambda layers, heads, n: layers * heads * picked.pairs(n),
        max_lines,
        instead=_INSTEAD,
    )
    weights = picked.weights()  # (L, h, N, N)
    total = cap.call(picked.layers[0]).heads
    by_layer = colours(len(picked.layers))
    params = {
        **_weights_params(picked, weights),
        "display_mode": "light",
        "total_heads": total,
        "colours": by_layer,
        "label_width": _label_width(picked.labels + picked.key_labels, size=13, least=80),
    }
    title = f"Model view: {picked.title}"
    drawn = bertviz_page(
        title,
        "Click a head to enlarge it, then hover a word on its left.",
        '<div id="view"><div id="vis"></div></div>',
        params,
        UNPACK_WEIGHTS,
        "model_view.js",
        min_width=970,
    )
    thumbnails = len(picked.layers) * (7 * 12 / total * len(picked.labels) + 10) + 38
    detail = 18 * len(picked.labels) + 55
    still = grid(
        weights,
        [[f"{layer}.{head}" for head in picked.heads] for layer in picked.layers],
        by_layer,
    )
    return View(title, drawn, round(max(thumbnails, detail)) + 70, still)


def neuron_view(
    cap: Capture, layer: Which, head: Which, *, text: int = 0, max_lines: int = NEURON_LINES
) -> View:
    """BertViz's neuron view: how a query and each key, number by number, make a score and a weight.

    Args:
        cap: what `capture` returned.
        layer: from 0; one, several, or None for all.
        head: from 0; one, several, or None for all.
        text: which text of a batch; shown by token, as words have no query or key.
        max_lines: the most lines and cells to draw at a time, for one layer and head.

    Returns:
        A `View`, as `head_view` does. It holds queries and keys, rounded to six digits; the page
        computes the scores q·k·scaling from them, and the weights from the scores.

    Raises:
        InputError: layer, head or text out of range; layers with different head sizes; more lines
            than `max_lines`.
    """
    picked = Selection.of(cap, layer, head, "token", text, _WIDEST)
    size = _head_size(picked)
    refuse_size(
        picked, "neuron_view", lambda _, __, n: n * (7 * n + 3 * size), max_lines, by_word=False
    )
    label_width = _label_width(picked.labels, size=15, least=120)
    found = [picked.attention(one) for one in picked.layers]
    for one in found:
        one.refuse_terms("neuron_view")
    params = {**_neuron_params(picked, found), "label_width": label_width}
    title = f"Neuron view: {picked.title}"
    body = (
        '<div id="view"><span class="dropdown-label">Layer: </span><select id="layer"></select> '
        '<span class="dropdown-label">Head: </span><select id="att_head"></select>'
        '<div id="vis"></div></div>'
    )
    drawn = bertviz_page(
        title,
        "Hover a word on the left; its + shows how its query meets each key. q ∙ k is shown scaled "
        f"({_read(params['scaling'])}), and Softmax is made of what is shown.",
        body,
        params,
        UNPACK_NEURONS,
        "neuron_view.js",
        min_width=780 + 2 * label_width,
    )
    still = one_panel(
        f"layer {picked.layers[0]}, head {picked.heads[0]}",
        picked.labels,
        label_width,
        found[0].weights[:1],
        colours(1),
    )
    return View(title, drawn, 26 * len(picked.labels) + 170, still)


def _weights_params(picked: Selection, weights: Tensor) -> dict[str, Any]:
    """What the head and the model view share; `UNPACK_WEIGHTS` says how weights are packed."""
    rounded = (weights * STEPS).round().int()  # (L, h, N, N)
    lower = picked.cap.source is None and not torch.triu(rounded, 1).any()
    kept = torch.ones_like(rounded[0, 0], dtype=torch.bool)
    packed = rounded[..., kept.tril() if lower else kept]  # (L, h, pairs)
    return {
        "attention": [
            {
                "attn": packed.tolist(),
                "lower": lower,
                "left_text": picked.labels,
                "right_text": picked.key_labels,
            }
        ],
        "default_filter": "0",
        "root_div_id": "view",
        "include_layers": picked.layers,
        "include_heads": picked.heads,
    }


def _neuron_params(picked: Selection, found: list[Attention]) -> dict[str, Any]:
    shown = {
        "left_text": picked.labels,
        "right_text": picked.labels,
        "queries": [_rounded(one.query) for one in found],
        "keys": [_rounded(one.key) for one in found],
    }
    return {
        "attention": {"all": shown},
        "default_filter": "all",
        "root_div_id": "view",
        "bidirectional": not picked.cap.causal,
        "display_mode": "light",
        "layer": 0,
        "head": 0,
        "include_layers": picked.layers,
        "include_heads": picked.heads,
        "scaling": [one.scaling for one in found],
        "allowed": [
            ["".join("01"[key] for key in row) for row in one.allowed.tolist()] for one in found
        ],
    }


def _read(numbers: list[float]) -> str:
    return " or ".join(f"× {number:.4g}" for number in dict.fromkeys(numbers))


def _head_size(picked: Selection) -> int:
    sizes = {picked.cap.call(layer).query.shape[-1] for layer in picked.layers}
    if len(sizes) > 1:
        raise InputError(
            f"the layers' heads have sizes {' and '.join(map(str, sorted(sizes)))}: "
            "choose layers with heads of the same size"
        )
    return sizes.pop()


def _rounded(vectors: Tensor) -> list[Any]:
    """Queries or keys as nested lists: (h, T, D)."""
    return [
        [[float(f"{number:.{_DIGITS}g}") for number in vector] for vector in head]
        for head in vectors.tolist()
    ]


def _label_width(labels: list[str], *, size: int, least: int) -> int:
    """How many pixels the widest label takes at a font size."""
    widest = max(columns_of(label) for label in labels)
    return max(least, round(widest * _COLUMN * size) + size)

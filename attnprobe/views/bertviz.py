"""BertViz from a capture: `head_view`, `model_view` and `neuron_view`.

The pages draw with BertViz's own scripts. What is changed in them stands below, piece by piece;
each piece is looked for, so that a release of BertViz that is written differently is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.recompute import By, Which
from attnprobe.records import Capture
from attnprobe.views.colours import colours
from attnprobe.views.labels import columns_of
from attnprobe.views.libraries import Patch, bertviz
from attnprobe.views.page import View, bertviz_page
from attnprobe.views.selection import Selection, pairs, refuse_size

HEAD_LINES = 120_000
"""The most lines that `head_view` draws unless told otherwise: 12 heads at 100 tokens."""

MODEL_LINES = 360_000
"""The most lines that `model_view` draws unless told otherwise: 12 × 12 heads at 50 tokens."""

NEURON_LINES = 120_000
"""The most lines and cells that `neuron_view` draws unless told otherwise: about 120 tokens."""

_STEPS = 10_000  # weights stand in the page as whole numbers of this part of 1
_DIGITS = 6  # of queries and keys: the page computes scores and weights from them

_COLUMN = 0.6  # how wide a letter is, as a part of its size, at most, with few exceptions
_WIDEST = 32  # labels, in columns
_WIDEST_DETAIL = 18  # in the model view, where a detail of two columns of labels must fit in

# A row holds only the keys up to the query where nothing stands after it, so that no line is drawn
# for what is masked; BertViz reads a row's missing end as 0 once it is patched.
_UNPACK = f"""for (const shown of window.bertviz_params.attention) {{
  shown.attn = shown.attn.map(layer => layer.map(head => {{
    let at = 0;
    return shown.left_text.map((_, query) => {{
      const keys = shown.lower ? query + 1 : shown.right_text.length;
      at += keys;
      return head.slice(at - keys, at).map(weight => weight / {_STEPS});
    }});
  }}));
}}"""

# The weights are the softmax of the scores that the page shows, made from the numbers it shows.
_UNPACK_NEURONS = """{
  const params = window.bertviz_params, shown = params.attention.all;
  const softmax = (scores, allowed) => {
    const highest = Math.max(...scores.filter((_, key) => allowed[key] === "1"));
    const parts = scores.map((x, key) => allowed[key] === "1" ? Math.exp(x - highest) : 0);
    const sum = parts.reduce((x, y) => x + y, 0);
    return parts.map(x => x / sum);
  };
  const dot = (query, key) => query.reduce((sum, x, at) => sum + x * key[at], 0);
  shown.attn = shown.queries.map((heads, layer) => heads.map((queries, head) =>
    queries.map((query, at) => softmax(
      shown.keys[layer][head].map(key => dot(query, key) * params.scaling[layer]),
      params.allowed[layer][at]))));
}"""

_PARAMS: Patch = (
    "const params = PYTHON_PARAMS; // HACK: PYTHON_PARAMS is a template marker that is replaced "
    "by actual params.",
    "const params = window.bertviz_params;",
)

_HEAD_PATCHES: list[Patch] = [
    _PARAMS,
    ("d3.scaleOrdinal(d3.schemeCategory10)", "d3.scaleOrdinal(params['colours'])"),
    ("const BOXWIDTH = 110;", "const BOXWIDTH = params['label_width'];"),
    # Rows without their masked end.
    ("return mat[0].map(", "return mat[mat.length - 1].map("),
    ("return row[i];", "return row[i] || 0;"),
    ("return d[index];", "return d[index] || 0;"),
    (
        'checkbox.on("click", function (d, i) {',
        """checkboxContainer.selectAll("text")
            .data(params['include_heads'])
            .enter()
            .append("text")
            .text(d => d)
            .attr("x", (d, i) => (i + .5) * CHECKBOX_SIZE)
            .attr("y", top + 14)
            .attr("text-anchor", "middle")
            .attr("font-size", "11px")
            .attr("pointer-events", "none");

        checkbox.on("click", function (d, i) {""",
    ),
]

_MODEL_PATCHES: list[Patch] = [
    _PARAMS,
    ("LAYER_COLORS = d3.schemeCategory10;", "LAYER_COLORS = params['colours'];"),
    ("LAYER_COLORS[config.layers[layer] % 10]", "LAYER_COLORS[layer]"),
    ("const DETAIL_WIDTH = 300;", "const DETAIL_WIDTH = 140 + 2 * params['label_width'];"),
    ("const DETAIL_BOX_WIDTH = 80;", "const DETAIL_BOX_WIDTH = params['label_width'];"),
]

_NEURON_PATCHES: list[Patch] = [
    ("const BOXWIDTH = TEXT_SIZE * 8;", "const BOXWIDTH = params['label_width'];"),
    ("dotProduct / Math.sqrt(config.vectorSize)", "dotProduct * params['scaling'][config.layer]"),
    (
        'layerSelect.append($("<option />").val(i).text(i));',
        "layerSelect.append($(\"<option />\").val(i).text(params['include_layers'][i]));",
    ),
    (
        'headSelect.append($("<option />").val(i).text(i));',
        "headSelect.append($(\"<option />\").val(i).text(params['include_heads'][i]));",
    ),
]


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
    refuse_size(picked, "head_view", lambda _, heads, n: heads * pairs(n, cap.causal), max_lines)
    label_width = _label_width(picked.labels, size=15, least=110)
    params = {
        **_weights_params(picked),
        "layer": None,
        "heads": None,
        "colours": colours(len(picked.heads)),
        "label_width": label_width,
    }
    body = '<div id="view">Layer: <select id="layer"></select><div id="vis"></div></div>'
    title = f"Head view: {picked.title}"
    page = bertviz_page(
        title,
        "Hover a word to see where it looks, or what looks at it. "
        "Click a coloured box to hide its head, double-click to see it alone.",
        body,
        params,
        _UNPACK,
        bertviz("head_view.js", _HEAD_PATCHES),
        min_width=max(115 + 2 * label_width, 20 * len(picked.heads)),
    )
    return View(title, page, round(22.5 * len(picked.labels)) + 110)


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
        lambda layers, heads, n: layers * heads * pairs(n, cap.causal),
        max_lines,
    )
    total = cap.call(picked.layers[0]).heads
    params = {
        **_weights_params(picked),
        "display_mode": "light",
        "total_heads": total,
        "colours": colours(len(picked.layers)),
        "label_width": _label_width(picked.labels, size=13, least=80),
    }
    title = f"Model view: {picked.title}"
    page = bertviz_page(
        title,
        "Click a head to enlarge it, then hover a word on its left.",
        '<div id="view"><div id="vis"></div></div>',
        params,
        _UNPACK,
        bertviz("model_view.js", _MODEL_PATCHES),
        min_width=970,
    )
    thumbnails = len(picked.layers) * (7 * 12 / total * len(picked.labels) + 10) + 38
    detail = 18 * len(picked.labels) + 55
    return View(title, page, round(max(thumbnails, detail)) + 70)


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
    refuse_size(picked, "neuron_view", lambda _, __, n: n * (7 * n + 3 * size), max_lines)
    label_width = _label_width(picked.labels, size=15, least=120)
    title = f"Neuron view: {picked.title}"
    body = (
        '<div id="view"><span class="dropdown-label">Layer: </span><select id="layer"></select> '
        '<span class="dropdown-label">Head: </span><select id="att_head"></select>'
        '<div id="vis"></div></div>'
    )
    page = bertviz_page(
        title,
        "Hover a word on the left; its + shows how its query meets each key.",
        body,
        {**_neuron_params(picked), "label_width": label_width},
        _UNPACK_NEURONS,
        bertviz("neuron_view.js", _NEURON_PATCHES),
        min_width=780 + 2 * label_width,
    )
    return View(title, page, 26 * len(picked.labels) + 170)


def _weights_params(picked: Selection) -> dict[str, Any]:
    """What the head and the model view have in common; `_UNPACK` says how weights are packed."""
    rounded = torch.stack([picked.weights(layer) for layer in picked.layers])  # (L, h, N, N)
    rounded = (rounded * _STEPS).round().int()
    lower = not torch.triu(rounded, 1).any()
    kept = torch.ones_like(rounded[0, 0], dtype=torch.bool)
    packed = rounded[..., kept.tril() if lower else kept]  # (L, h, pairs)
    return {
        "attention": [
            {
                "attn": packed.tolist(),
                "lower": lower,
                "left_text": picked.labels,
                "right_text": picked.labels,
            }
        ],
        "default_filter": "0",
        "root_div_id": "view",
        "include_layers": picked.layers,
        "include_heads": picked.heads,
    }


def _neuron_params(picked: Selection) -> dict[str, Any]:
    found = [picked.attention(layer) for layer in picked.layers]
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

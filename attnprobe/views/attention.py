"""`attention_view`: attnprobe's own page, for texts that are too long for BertViz."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnprobe.recompute import Shown, Which
from attnprobe.records import Capture
from attnprobe.stretch import Span
from attnprobe.views.colours import colours
from attnprobe.views.page import View, own_page, packed
from attnprobe.views.selection import Selection, pairs, refuse_size
from attnprobe.views.still import grid, heads_and_words
from attnprobe.words import By

WEIGHTS = 40_000_000
"""The most weights in a page unless told otherwise: six layers of 12 heads at 1,024 tokens."""

_FINE_WEIGHTS = 250_000  # up to so many, a page is small whatever it holds
_FINE, _COARSE = 65_000, 127  # levels of a weight, in 16 bits and in 8
_REST_STEPS = 3000
_NOTHING = 65535  # code of a rest of 0
_MOST_LABELS = 80  # of a still picture
_WIDEST = 40  # labels, in columns

_HINT = (
    "A row of a matrix is a query, a column a key; the future is masked where the model is causal."
)
_BODY = """<div id="controls"></div>
<div id="main">
<div id="heads"></div>
<div><div id="matrix-box"><canvas id="matrix"></canvas><canvas id="mark"></canvas></div>
<div id="readout" aria-live="polite"></div></div>
<div id="lists"></div>
</div>
<div id="frame"><div id="text" tabindex="0" aria-label="the text"><div id="words"></div></div>
<canvas id="arcs"></canvas></div>
<div id="keys"><kbd>←</kbd> <kbd>→</kbd> word, <kbd>↑</kbd> <kbd>↓</kbd> head,
<kbd>Page up</kbd> <kbd>Page down</kbd> layer, <kbd>a</kbd> arcs of all heads or of one,
<kbd>t</kbd> tokens or words, <kbd>f</kbd> the first token, <kbd>l</kbd> layout of the text,
<kbd>/</kbd> search, <kbd>Esc</kbd> nothing chosen. Shift and a click on a head adds its arcs.
</div>"""


def attention_view(
    cap: Capture,
    layer: Which = None,
    head: Which = None,
    *,
    by: By = "token",
    text: int = 0,
    span: Span = None,
    max_weights: int = WEIGHTS,
) -> View:
    """A page for long texts: every head small, one as a matrix, and the text with arcs and numbers.

    Hover or click a word to see what it attends to and what attends to it. The page changes between
    layers, tokens and words, and hides the first token, or scales the others to sum to 1 without
    it. By word, the first is the word that holds the first token, as for `attended`.

    Args:
        cap: what `capture` returned.
        layer: from 0; one, several, or None for all. The first one is shown first.
        head: from 0; one, several, or None for all; each has a colour.
        by: "token" or "word" (see `attnprobe.recompute.to_words`), to begin with.
        text: which text of a batch.
        span: (start, stop), the words to show, counted from 0, `stop` left out; None for all. What
            stands before them is one word `⋯`, which gets what all of it gets, so that rows sum to
            1; it is then the first. So is what stands after, in a model that is not causal.
        max_weights: the most weights that the page may hold.

    Returns:
        A `View`: shows itself in a notebook, and saves itself as a page. Of up to 250,000 weights
        it holds each to within 0.00002; of more, to within √weight / 127, and says so beside each
        number.

    Raises:
        InputError: layer, head, text or span out of range; an unknown `by`; more weights than
            `max_weights`.
    """
    picked = Selection.of(cap, layer, head, by, text, _WIDEST, span)
    by_token = Selection.of(cap, picked.layers, picked.heads, "token", text, _WIDEST, span)
    refuse_size(
        by_token,
        "attention_view",
        lambda layers, heads, n: layers * heads * pairs(n, cap.causal),
        max_weights,
        what="weights",
        by_word=False,
        shorter="a text, or a span=(start, stop) of one,",
    )
    words = Selection.of(cap, picked.layers, picked.heads, "word", text, _WIDEST, span)
    by_head = colours(len(picked.heads))
    weights, first_layer = _weights(by_token)
    data = {
        **weights,
        "tokens": by_token.labels,
        "words": words.labels,
        "word_of": list(picked.stretch.words.word_of),
        "by": by,
        "layer_numbers": picked.layers,
        "heads": picked.heads,
        "colours": by_head,
    }
    title = f"Attention view: {picked.title}"
    height = 480 + max(320, min(520, 26 * len(picked.labels) + 60))
    header = f"<header>{html.escape(title)}. {_HINT}</header>"
    parts = ("attention_data", "attention_draw")
    drawn = own_page(title, "attention", f"{header}\n{_BODY}", data, parts=parts)
    return View(title, drawn, height, _still(picked, first_layer.by(by)[0], by_head))


def _still(picked: Selection, shown: Tensor, by_head: list[str]) -> str:
    """The picture of one layer, (h, N, N): its heads, and the first of them with its words."""
    titles = [f"{picked.layers[0]}.{one}" for one in picked.heads]
    if len(picked.labels) > _MOST_LABELS:
        return grid(shown[None], [titles], by_head[:1])
    return heads_and_words(shown, titles, by_head, picked.labels)


def _weights(picked: Selection) -> tuple[dict[str, Any], Shown]:
    """Weights by token as codes, and what each query leaves to other keys than the first.

    And the first layer's, as they are.

    Code 0 stands for what is masked, and code c for a weight of ((c - 1) / levels)²: the steps are
    finer where weights are small. Of a causal model only the keys up to the query are held.
    """
    size = len(picked.labels)
    causal = picked.cap.causal
    total = len(picked.layers) * len(picked.heads) * pairs(size, causal)
    levels, kind = (_FINE, np.uint16) if total <= _FINE_WEIGHTS else (_COARSE, np.uint8)
    kept = torch.ones(size, size, dtype=torch.bool)
    kept = kept.tril() if causal else kept
    weights, rests = [], []
    first = picked.shown(picked.layers[0])
    for layer in picked.layers:
        found = first if layer == picked.layers[0] else picked.shown(layer)
        codes = (found.weights.sqrt() * levels).round().int() + 1  # (h, T, T)
        codes = codes.where(found.allowed, 0)[..., kept.to(codes.device)]  # (h, pairs)
        weights.append(packed(codes.cpu().numpy().astype(kind)))
        rests.append(packed(_rest_codes(found.weights)))
    packing = {"levels": levels, "rest_steps": _REST_STEPS, "lower": causal}
    return {"weights": weights, "rests": rests, **packing}, first


def _rest_codes(weights: Tensor) -> np.ndarray:
    """What each query leaves to other keys than the first, to 1 part in 6,000: (h, T) uint16."""
    rest = weights[..., 1:].sum(-1)  # (h, T)
    codes = (-_REST_STEPS * rest.clamp(min=1e-9).log()).round().clamp(0, _NOTHING - 1)
    return codes.where(rest > 0, _NOTHING).cpu().numpy().astype(np.uint16)

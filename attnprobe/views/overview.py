"""Everything about one text on one page: `report_view`."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from attnprobe.checking.report import VerificationReport
from attnprobe.command.printing import by_layer_html, report_text
from attnprobe.errors import InputError
from attnprobe.heads import head_stats
from attnprobe.looking import attended
from attnprobe.records import Capture, captured
from attnprobe.remarks import LEAST, remarkable
from attnprobe.verification import verify
from attnprobe.views.attention import attention_view
from attnprobe.views.bertviz import head_view, model_view, neuron_view
from attnprobe.views.labels import labels_of, without_overrides
from attnprobe.views.page import View, beside, page
from attnprobe.views.plots import heatmap, picture
from attnprobe.views.still import lines_of_text
from attnprobe.views.walk import walkthrough_view
from attnprobe.words import visible

LINES = 40_000
"""The most lines that one view on the page draws: it holds several, and is to open at once."""

WEIGHTS, WALK_BYTES = 1_500_000, 1_500_000
"""The most weights of the attention view, and bytes of the walkthrough, on the page."""

MAP_WORDS = 50
"""The most words of a heat map on the page."""

_TOP, _TOP_WITHOUT_FIRST, _MAPS = 3, 2, 2
_LABEL = 32  # columns that a word may take in a table


def report_view(
    cap: Capture, verification: VerificationReport | None = None, *, text: int = 0
) -> View:
    """One page about a text: the verdict and the checks, which words each word attends to, the
    heads worth looking at (see `attnprobe.remarks`), heat maps, and the views.

    What would take long to draw (see `LINES` and `MAP_WORDS`), and what cannot be said of this
    model, is left out, with a sentence that says so.

    Args:
        cap: what `capture` returned.
        verification: what `verify(cap)` returned; None to verify now.
        text: which text of a batch the page is about. The verification is of all of them.

    Returns:
        A `View`: shows itself in a notebook, and saves itself as a page. Figures are rounded to
        three decimals or fewer.

    Raises:
        InputError: there is no such text; no capture.
    """
    if captured(cap).part == "cross":
        raise InputError("a report is of one text, and cross attention of two: use head_view")
    read = cap.words_of(text)
    verification = verify(cap) if verification is None else verification
    subject = _Subject(cap, text)
    written = "\n".join(visible(line) for line in without_overrides(read.text).split("\n"))
    which = f", text {text} of {len(cap)}" if len(cap) > 1 else ""
    title = f"Attention of {without_overrides(verification.model) or 'a model'}"
    body = "\n".join(
        [
            f"<main>\n<h1>{html.escape(title)}</h1>",
            f"<blockquote>{html.escape(written)}</blockquote>",
            f'<p class="hint">{len(read.tokens)} tokens, {len(read.words)} words{which}; '
            "layers, heads and positions count from 0.</p>",
            f'<p class="verdict {verification.verdict}">{html.escape(verification.summary)}</p>',
            _checks(verification),
            *(section.html(subject) for section in _SECTIONS),
            "</main>",
        ]
    )
    drawn = page(title, beside("common.css") + beside("overview.css"), body, ())
    return View(title, drawn, 900, lines_of_text(report_text(verification, read.text)))


@dataclass(frozen=True, eq=False)
class _Subject:
    """What the page is about, and what its sections share.

    Raises:
        InputError: by each of its properties, where the model's weights are not known.
    """

    cap: Capture
    text: int

    @cached_property
    def stats(self) -> pd.DataFrame:
        return head_stats(self.cap, text=self.text)

    @cached_property
    def remarkable(self) -> pd.DataFrame:
        return remarkable(self.stats)

    @cached_property
    def best(self) -> list[tuple[int, int]]:
        """Layers and heads worth looking at, best first; the first head where none is."""
        found = self.remarkable[["layer", "head"]].itertuples(index=False, name=None)
        return list(found) or [(0, 0)]


@dataclass(frozen=True)
class _Section:
    """A heading, a sentence on how to read what is below it, and what draws that, in HTML."""

    heading: str
    hint: str
    draw: Callable[[_Subject], str]

    def html(self, subject: _Subject) -> str:
        """The section; where it cannot be drawn, a sentence that says why."""
        try:
            drawn = f'<p class="hint">{html.escape(self.hint)}</p>\n{self.draw(subject)}'
        except InputError as error:
            drawn = f'<p class="left-out">Left out: {html.escape(str(error))}.</p>'
        return f"<section>\n<h2>{html.escape(self.heading)}</h2>\n{drawn}\n</section>"


def _checks(verification: VerificationReport) -> str:
    how = f"{verification.kernel} kernel in {verification.dtype}; the worst of each check:"
    return (
        f'<section>\n<h2>What was checked</h2>\n<p class="hint">{html.escape(how)}</p>\n'
        f'<div class="wide checks">{by_layer_html(verification.by_check())}</div>\n'
        "<details><summary>The worst of each check and layer</summary>\n"
        f'<div class="wide checks">{by_layer_html(verification)}</div></details>\n</section>'
    )


def _words(subject: _Subject) -> str:
    """A row for each word: what it looks at most, over all heads."""
    cap, text = subject.cap, subject.text
    labels = labels_of(cap.words_of(text), "word", _LABEL)
    plain = _by_query(attended(cap, top=_TOP, text=text), len(labels))
    rest = _by_query(attended(cap, top=_TOP_WITHOUT_FIRST, text=text, skip_first=True), len(labels))
    rows = []
    for label, most, others in zip(labels, plain, rest, strict=True):
        cells = [
            _cell(labels, found, at)
            for found, count in ((most, _TOP), (others, _TOP_WITHOUT_FIRST))
            for at in range(count)
        ]
        rows.append(f"<tr><td>{_label(label)}</td>{''.join(cells)}</tr>")
    return (
        '<div class="wide"><table class="words">\n<thead><tr><th>word</th>'
        f'<th colspan="{_TOP}">looks most at</th>'
        f'<th colspan="{_TOP_WITHOUT_FIRST}">with the first word left out</th></tr></thead>\n'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _by_query(frame: pd.DataFrame, count: int) -> list[list[tuple[int, float]]]:
    """For each word the keys and weights that `attended` found, strongest first."""
    found: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    weights = frame[frame.columns[-1]]
    for query, key, weight in zip(frame["query_pos"], frame["key_pos"], weights, strict=True):
        found[query].append((key, weight))
    return found


def _cell(labels: list[str], found: list[tuple[int, float]], at: int) -> str:
    if at >= len(found):
        return "<td></td>"
    key, weight = found[at]
    shade = f"background: rgba(70, 130, 220, {0.75 * weight:.3f})"
    return f'<td style="{shade}">{_label(labels[key])}<span class="weight">{weight:.3f}</span></td>'


def _label(label: str) -> str:
    return f"<bdi>{html.escape(label)}</bdi>"


def _heads(subject: _Subject) -> str:
    with pd.option_context("display.max_colwidth", None):
        best = subject.remarkable.to_html(index=False, border=0)
        every = subject.stats.dropna(axis="columns", how="all").to_html(
            index=False, border=0, float_format="{:.3f}".format
        )
    return (
        f'<div class="wide">{best}</div>\n<details><summary>Every head in numbers</summary>\n'
        f'<div class="wide">{every}</div></details>'
    )


def _maps(subject: _Subject) -> str:
    count = len(subject.cap.words_of(subject.text).words)
    if count > MAP_WORDS:
        raise InputError(
            f"a heat map of {count} words, more than {MAP_WORDS}, takes long to draw; ap.heatmap "
            "does it"
        )
    drawn = []
    for layer, head in subject.best[:_MAPS]:
        svg = picture(heatmap(subject.cap, layer, head, by="word", text=subject.text), "svg")
        data = base64.b64encode(svg).decode()
        name = f"Attention weights by word, layer {layer}, head {head}"
        drawn.append(f'<img alt="{name}" src="data:image/svg+xml;base64,{data}">')
    return f'<div class="pictures">{"".join(drawn)}</div>'


def _attention_view(subject: _Subject) -> str:
    layer, _ = subject.best[0]
    view = attention_view(subject.cap, layer, text=subject.text, by="word", max_weights=WEIGHTS)
    return view._repr_html_()


def _walkthrough(subject: _Subject) -> str:
    layer, head = subject.best[0]
    view = walkthrough_view(subject.cap, None, layer, head, text=subject.text, max_bytes=WALK_BYTES)
    return view._repr_html_()


def _head_view(subject: _Subject) -> str:
    layer, _ = subject.best[0]
    layers = [layer, *(one for one in range(subject.cap.layers) if one != layer)]
    view = head_view(subject.cap, layers, by="word", text=subject.text, max_lines=LINES)
    return view._repr_html_()


def _model_view(subject: _Subject) -> str:
    return model_view(subject.cap, by="word", text=subject.text, max_lines=LINES)._repr_html_()


def _neuron_view(subject: _Subject) -> str:
    layer, head = subject.best[0]
    view = neuron_view(subject.cap, layer, head, text=subject.text, max_lines=LINES)
    return view._repr_html_()


_SECTIONS = (
    _Section(
        "Which words each word looks at",
        "The mean over all layers and heads. Many models park attention on the first word; the "
        "last columns leave it out and share its part among the others.",
        _words,
    ),
    _Section(
        "Heads worth looking at",
        "Named are the heads with the most weight on one kind of token, where it is above "
        f"{LEAST}: a mean over the tokens that have such a token to look at, and another. Then the "
        "sharpest, the most even and the farthest looking head.",
        _heads,
    ),
    _Section(
        "Heat maps",
        "Of the first heads above, by word: a row for each word that looks, a column for each that "
        "is looked at.",
        _maps,
    ),
    _Section(
        "Attention view",
        "All heads of the layer of the first head above, by word or token. Hover a word.",
        _attention_view,
    ),
    _Section(
        "The formula, step by step",
        "In the first head above: from query and keys to the head's output. Choose a word.",
        _walkthrough,
    ),
    _Section("Head view", "By word. Choose a layer; hover a word.", _head_view),
    _Section("Model view", "By word, every layer and head.", _model_view),
    _Section("Neuron view", "By token, of the first head above.", _neuron_view),
)

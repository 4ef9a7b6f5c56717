"""The page with everything about a text, drawn by a real browser without a network."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from browser import Tab, opened
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

import attnprobe as ap

TEXT = "The children were playing in the green park, and the children saw the park."
HOSTILE = (
    "</script><script>window.ran = 1</script> <img src=x onerror=window.ran=1> </iframe>"
    '"onmouseover="window.ran=1 &lt;b&gt; a\u2028b x\u202egpj.exe ]]> $x$'
)
SIZES = {
    "vocab_size": 101,
    "hidden_size": 60,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 70,
    "initializer_range": 0.5,
}


@pytest.fixture(scope="module")
def bundled():
    return ap.load("bundled")


@pytest.fixture(scope="module")
def cap(bundled):
    return ap.capture(bundled, TEXT)


@pytest.fixture(scope="module")
def report(cap):
    return ap.report_view(cap)


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page; it must not fail, or ask for anything."""
    contexts, tabs = [], []

    def open_(view: ap.View | str, dark: bool = False) -> Tab:
        file = tmp_path / f"{len(tabs)}.html"
        file.write_text(view if isinstance(view, str) else view.html, encoding="utf-8")
        contexts.append(opened(browser, file))
        tabs.append(contexts[-1].__enter__())
        if dark:
            tabs[-1].page.emulate_media(color_scheme="dark")
        return tabs[-1]

    yield open_
    for context in contexts:
        context.__exit__(None, None, None)
    assert [tab.errors + tab.requests for tab in tabs] == [[]] * len(tabs)


def section(tab: Tab, heading: str):
    return tab.page.locator("section", has=tab.page.get_by_role("heading", name=heading))


def rows(table) -> list[list[str]]:
    """The cells of a table's body."""
    return table.locator("tbody tr").evaluate_all(
        "all => all.map(row => [...row.cells].map(cell => cell.textContent))"
    )


def left_out(view: ap.View) -> list[str]:
    return re.findall("Left out: ([^<]*)", view.html)


def test_the_page_is_drawn_offline_with_all_its_parts(cap, report, show):
    tab = show(report)
    headings = tab.page.locator("h2").all_text_contents()
    assert headings == [
        "What was checked",
        "Which words each word looks at",
        "Heads worth looking at",
        "Heat maps",
        "Attention view",
        "The formula, step by step",
        "Head view",
        "Model view",
        "Neuron view",
    ]
    assert tab.page.locator("blockquote").text_content() == TEXT
    assert tab.page.locator(".verdict").text_content() == ap.verify(cap).summary
    assert left_out(report) == []
    widths = "all => Promise.all(all.map(one => one.decode().then(() => one.naturalWidth)))"
    assert min(tab.page.locator(".pictures img").evaluate_all(widths)) > 300
    attention, walk, *frames = tab.page.frames[1:]
    for frame in (attention, walk):
        frame.wait_for_function("document.documentElement.dataset.ready === 'yes'")
    assert attention.locator(".head").count() == 6
    assert walk.locator("#sentence").text_content().split() == TEXT.split()
    assert [frame.locator("svg").count() for frame in frames] == [1, 1, 1]
    frames[0].locator("#left text").nth(3).hover()  # and it is alive
    assert frames[0].locator("line[visibility='visible']").count() == 6 * 4


def test_the_page_is_small_and_alone(report):
    assert len(report.html) < 3_000_000
    assert report.html.count("Content-Security-Policy") == 6  # the page, and each frame in it


def test_words_and_weights_are_the_captures(cap, report, show):
    table = section(show(report), "Which words").locator("table")
    labels = cap.words_of(0).labels("word")
    plain = ap.attended(cap, top=3)
    rest = ap.attended(cap, top=2, skip_first=True)
    for at, cells in enumerate(rows(table)):
        assert cells[0] == labels[at]
        for shown, frame, name in (
            (cells[1:4], plain, "weight"),
            (cells[4:], rest, "weight_without_first"),
        ):
            mine = frame[frame["query_pos"] == at]
            wanted = [
                f"{key}{weight:.3f}" for key, weight in zip(mine["key"], mine[name], strict=True)
            ]
            assert [cell for cell in shown if cell] == wanted
    assert len(rows(table)) == len(labels)


def test_heads_are_those_of_the_statistics(cap, report, show):
    part = section(show(report), "Heads worth")
    stats = ap.head_stats(cap)
    best = rows(part.locator("table").first)
    assert best[0][:2] == ["0", "0"]
    assert best[0][2].startswith(f"mostly the previous token: {stats['previous'][0]:.2f};")
    assert f"sharpest: entropy {stats['entropy'].min():.2g} nats" in best[0][2]
    numbers = part.locator("details table")
    names = numbers.locator("thead th").all_text_contents()
    assert "variability" not in names  # of one text there is none
    shown = rows(numbers)
    assert len(shown) == 24
    for name in ("entropy", "induction", "value_first", "distance_without_first"):
        wanted = [f"{one:.3f}" for one in stats[name]]
        assert [row[names.index(name)] for row in shown] == wanted


def test_views_and_maps_are_of_the_first_heads(cap, report, show):
    tab = show(report)
    names = tab.page.locator(".pictures img").evaluate_all("all => all.map(one => one.alt)")
    assert names[0] == "Attention weights by word, layer 0, head 0"
    attention, walk, head, model, neuron = tab.page.frames[1:]
    assert attention.evaluate("DATA.layer_numbers") == [0]
    assert "Layer 0, head 0" in walk.locator("main").text_content()
    for frame in (head, model):
        drawn = frame.evaluate("bertviz_params.attention[0].attn")
        wanted = torch.stack([ap.weights(cap, layer, by="word") for layer in range(4)])
        size = wanted.shape[-1]
        full = [
            [[row + [0.0] * (size - len(row)) for row in head] for head in layer] for layer in drawn
        ]
        assert (torch.tensor(full, dtype=torch.float64) - wanted).abs().max() < 1e-4
    assert "layer 0, head 0" in neuron.locator("header").text_content()


def test_hostile_text_shows_as_itself_and_runs_nothing(bundled, show):
    cap = ap.capture(bundled, HOSTILE)
    cap = replace(cap, lm=replace(cap.lm, name="</title><img src=x onerror=window.ran=1>"))
    view = ap.report_view(cap)
    for page in (view, f"<!DOCTYPE html><meta charset=utf-8><body>{view._repr_html_()}"):
        tab = show(page)
        main = next(one for one in tab.page.frames if one.locator("main").count())
        shown = main.locator("blockquote").text_content()
        assert shown == HOSTILE.replace("\u202e", "<U+202E>").replace("\u2028", "⏎")
        assert "</title><img src=x onerror=window.ran=1>" in main.locator("h1").text_content()
        assert [one.evaluate("window.ran") for one in tab.page.frames] == [None] * len(
            tab.page.frames
        )
        assert main.locator("blockquote *, h1 *, .words img, .words script").count() == 0
        labels = main.locator(".words tbody td:first-child").all_text_contents()
        assert {"script", "window.ran", "onerror"} <= set(labels)
        assert "\u202e" not in main.locator("main").inner_text()


def test_it_can_be_read_in_the_dark(report, show):
    tab = show(report, dark=True)

    def contrast(selector: str) -> float:
        """Of the text against what lies behind it, by WCAG's formula."""
        return tab.page.locator(selector).first.evaluate(
            """element => {
                const parts = colour => colour.match(/[\\d.]+/g).map(Number);
                const blend = (over, under) => over.slice(0, 3).map(
                    (one, at) => one * (over[3] ?? 1) + under[at] * (1 - (over[3] ?? 1)));
                const layers = [];
                for (let one = element; one; one = one.parentElement)
                    layers.unshift(parts(getComputedStyle(one).backgroundColor));
                const ground = layers.reduce((under, over) => blend(over, under), [255, 255, 255]);
                const ink = blend(parts(getComputedStyle(element).color), ground);
                const light = colour => colour
                    .map(one => one / 255)
                    .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
                    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
                const [low, high] = [light(ground), light(ink)].sort((a, b) => a - b);
                return (high + 0.05) / (low + 0.05);
            }"""
        )

    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 29)"
    for selector in ("h1", "p.hint", ".verdict", "blockquote", "th", "summary", ".words td", "td"):
        assert contrast(selector) > 4.5, selector
    assert contrast(".words td[style]") > 4.5  # the first one is as dark as it gets: weight 1
    filters = [
        one.evaluate("getComputedStyle(document.documentElement).filter")
        for one in tab.page.frames[3:]
    ]
    assert all("invert" in one for one in filters)
    grounds = [
        one.evaluate("getComputedStyle(document.body).backgroundColor")
        for one in tab.page.frames[1:3]
    ]
    assert grounds == ["rgb(21, 24, 29)"] * 2


def test_what_is_too_long_to_draw_is_left_out_with_a_sentence(bundled, show):
    cap = ap.capture(bundled, " ".join(TEXT.split() * 12))
    view = ap.report_view(cap)
    sentences = left_out(view)
    assert len(sentences) == 4  # the attention view and the walkthrough are made for long texts
    assert "a heat map of 192 words, more than 50" in sentences[0]
    assert all("lines (bundled" in one and "What fits: " in one for one in sentences[1:])
    tab = show(view)
    assert len(rows(section(tab, "Which words").locator("table"))) == 192
    assert tab.page.locator("iframe").count() == 2


def test_weights_that_are_not_the_models_are_not_shown(cap):
    calls = [replace(call, scaling=2 * call.scaling) for call in cap.calls]
    view = ap.report_view(replace(cap, calls=tuple(calls)), ap.verify(cap))
    sentences = left_out(view)
    assert len(sentences) == 8
    assert all("weights would not be the model&#x27;s own" in one for one in sentences)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: BertModel(BertConfig(**SIZES)), ""),
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), ""),
        (
            lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES, pad_token_id=2)),
            "k_norm has no weight of size",
        ),
    ],
)
def test_other_models_have_a_page_too(make, reason, show):
    torch.manual_seed(0)
    cap = ap.capture(make().eval(), [[5, 17, 23], [8, 5, 42, 5, 99]])
    view = ap.report_view(cap, text=1)
    assert left_out(view) == []
    assert "5 tokens, 5 words, text 1 of 2" in view.html
    tab = show(view)
    assert tab.page.locator("blockquote").text_content() == "8 5 42 5 99"
    names = section(tab, "Heads worth").locator("details thead th").all_text_contents()
    assert ("value_first" in names) == (not reason)
    assert ("next" in names) == (not cap.causal)
    assert reason in view.html


def test_one_token_has_a_page(bundled, show):
    view = ap.report_view(ap.capture(bundled, "a"))
    assert left_out(view) == []
    assert len(show(view).page.frames) == 6


def test_the_picture_for_where_nothing_may_run_is_the_report_in_words(cap, report, show):
    tab = show(f"<!DOCTYPE html><meta charset=utf-8><body>{report._repr_html_()}")
    tab.page.evaluate("document.querySelectorAll('style, iframe').forEach(one => one.remove())")
    picture = tab.page.locator("img")
    assert picture.is_visible()
    assert picture.evaluate("one => one.decode().then(() => one.naturalWidth)") > 300
    assert ap.verify(cap).summary.split(";")[0] in report.still


def test_no_figure_is_left_open(cap):
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    ap.report_view(cap)
    assert pyplot.get_fignums() == before


def test_what_is_not_there_is_refused(cap, tmp_path: Path):
    with pytest.raises(ap.InputError, match="text 1 is out of range"):
        ap.report_view(cap, text=1)
    with pytest.raises(ap.InputError, match="expected a capture"):
        ap.report_view("bundled")

"""The views, drawn by a real browser without a network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from browser import Tab, opened
from samples import HOSTILE, IDS

import attnprobe as ap
from attnprobe.views import libraries
from attnprobe.views.colours import colours
from attnprobe.views.labels import columns_of

ROUNDING = 0.5e-4 * (1 + 1e-6)


@pytest.fixture
def cap(gpt2):
    return ap.capture(gpt2(), IDS)


def shown_weights(tab: Tab, filter_: str = "0") -> torch.Tensor:
    """What BertViz was given, with the masked ends of rows put back, (layers, heads, N, N)."""
    layers = tab.page.evaluate(f"bertviz_params.attention[{filter_!r}].attn")
    size = len(layers[0][0])
    return torch.tensor(
        [[[row + [0.0] * (size - len(row)) for row in head] for head in layer] for layer in layers],
        dtype=torch.float64,
    )


def all_weights(cap: ap.Capture, **options) -> torch.Tensor:
    return torch.stack([ap.weights(cap, layer, **options) for layer in range(cap.layers)])


def visible_lines(tab: Tab, within: str = "svg") -> int:
    """How many lines can be seen: not hidden, and not transparent."""
    return tab.page.evaluate(
        """within => [...document.querySelectorAll(within + " line")].filter(line =>
            getComputedStyle(line).visibility === "visible" &&
            getComputedStyle(line.parentNode).opacity !== "0" &&
            +line.getAttribute("stroke-opacity") > 0).length""",
        within,
    )


def opacities(tab: Tab, selector: str) -> list[float]:
    return tab.page.eval_on_selector_all(
        selector, "all => all.map(one => +getComputedStyle(one).opacity)"
    )


def texts(tab: Tab, selector: str) -> list[str]:
    return tab.page.eval_on_selector_all(selector, "all => all.map(one => one.textContent)")


# head_view


def test_head_view_draws_the_captures_weights(cap, show):
    tab = show(ap.head_view(cap))
    assert (shown_weights(tab) - all_weights(cap)).abs().max() <= ROUNDING
    assert texts(tab, "#left text") == texts(tab, "#right text") == [str(one) for one in IDS]
    assert texts(tab, "#layer option") == ["0", "1", "2"]
    assert tab.page.locator("svg line").count() == 6 * 11 * 12 / 2  # nothing for what is masked


def test_head_view_shows_a_hovered_words_lines_both_ways(cap, show):
    tab = show(ap.head_view(cap, layer=1, head=[2, 4]))
    weights = (ap.weights(cap, 1)[[2, 4]] * 1e4).round() / 1e4  # (2, T, T)
    assert visible_lines(tab) == (weights > 0).sum()
    tab.page.locator("#left text").nth(6).hover()
    assert visible_lines(tab) == (weights[:, 6] > 0).sum()
    assert opacities(tab, "#right .attentionBoxes > g:first-child rect") == pytest.approx(
        weights[0, 6].tolist()
    )
    tab.page.locator("#right text").nth(3).hover()
    assert visible_lines(tab) == (weights[:, :, 3] > 0).sum()
    assert opacities(tab, "#left .attentionBoxes > g:first-child rect") == pytest.approx(
        weights[0, :, 3].tolist()
    )


def test_head_view_changes_layer_and_hides_heads(cap, show):
    tab = show(ap.head_view(cap, layer=[2, 0], head=[5, 1, 3]))
    assert texts(tab, "#layer option") == ["2", "0"]
    assert texts(tab, "svg > g:last-of-type text") == ["5", "1", "3"]
    expected = torch.stack([ap.weights(cap, layer)[[5, 1, 3]] for layer in (2, 0)])
    assert (shown_weights(tab) - expected).abs().max() <= ROUNDING
    before = visible_lines(tab)
    tab.page.locator("svg > g:last-of-type rect").nth(0).click()
    assert 0 < visible_lines(tab) < before
    tab.page.select_option("#layer", "0")
    drawn = "+document.querySelectorAll('.headAttention')[1].querySelectorAll('line')[3].__data__"
    expected = float(ap.weights(cap, 0, 1)[2, 0])
    assert tab.page.evaluate(drawn) == pytest.approx(expected, abs=ROUNDING)


def test_head_view_by_word(show):
    cap = ap.capture(ap.load("bundled"), "The unbelievable children don't play")
    tab = show(ap.head_view(cap, by="word"))
    assert texts(tab, "#left text") == ["The", "unbelievable", "children", "don't", "play"]
    assert (shown_weights(tab) - all_weights(cap, by="word")).abs().max() <= ROUNDING


def test_head_view_of_a_model_that_looks_ahead(bidirectional, show):
    tab = show(ap.head_view(bidirectional))
    assert (shown_weights(tab) - all_weights(bidirectional)).abs().max() <= ROUNDING
    assert tab.page.locator("svg line").count() == 6 * 11 * 11


def test_head_view_of_one_text_of_a_padded_batch(gpt2, show):
    cap = ap.capture(gpt2(), [IDS, IDS[:4]])
    tab = show(ap.head_view(cap, text=1))
    assert texts(tab, "#left text") == ["5", "17", "23", "8"]
    assert (shown_weights(tab) - all_weights(cap, text=1)).abs().max() <= ROUNDING


def test_one_token(gpt2, show):
    cap = ap.capture(gpt2(), [7])
    assert show(ap.head_view(cap)).page.locator("svg line").count() == 6
    assert show(ap.model_view(cap)).page.locator("svg line").count() == 18
    assert shown_weights(show(ap.neuron_view(cap, 0, 0)), "all").tolist() == [[[[1.0]]]]


# model_view


def test_model_view_draws_the_captures_weights(cap, show):
    tab = show(ap.model_view(cap, layer=[0, 2], head=[1, 5]))
    expected = torch.stack([ap.weights(cap, layer)[[1, 5]] for layer in (0, 2)])
    assert (shown_weights(tab) - expected).abs().max() <= ROUNDING
    assert tab.page.locator("svg line").count() == 4 * 11 * 12 / 2
    assert texts(tab, "svg > text") == ["Heads", "1", "5", "Layers", "0", "2"]


def test_model_view_enlarges_a_clicked_head_and_shows_a_hovered_words_lines(bidirectional, show):
    tab = show(ap.model_view(bidirectional))
    tab.page.locator("#attn_background_1_3 ~ rect").click()
    assert texts(tab, "svg > text.detail") == ["Layer 1, Head 3"]
    assert texts(tab, "text.token") == [str(one) for one in IDS] * 2
    shown = (ap.weights(bidirectional, 1, 3) * 1e4).round()  # (T, T)
    assert visible_lines(tab, ".detail") == (shown > 0).sum()
    tab.page.locator("text.token").nth(4).hover()
    assert visible_lines(tab, ".detail") == (shown[4] > 0).sum()


# neuron_view


def numbers(tab: Tab, selector: str) -> torch.Tensor:
    found = tab.page.eval_on_selector_all(selector, "all => all.map(one => +one.dataset.value)")
    return torch.tensor(found, dtype=torch.float64)


def expand(tab: Tab, query: int) -> None:
    """Show the queries and keys, with one query's products."""
    tab.page.locator("#collapsed #leftText > g").nth(query).locator("rect").nth(1).click()
    tab.page.locator("#expanded #leftText text").nth(query).hover()


@pytest.mark.parametrize("model", ["cap", "bidirectional", "grouped"])
def test_neuron_view_weights_are_the_softmax_of_its_scores(model, request, show):
    cap = request.getfixturevalue(model)
    tab = show(ap.neuron_view(cap, 1, 5))
    expected = ap.weights(cap, 1, 5)
    assert (shown_weights(tab, "all")[0, 0] - expected).abs().max() < 1e-4
    expand(tab, 7)
    allowed = expected[7] > 0
    scores = numbers(tab, "#dotproducts rect")[allowed]
    assert (scores - ap.scores(cap, 1, 5)[7][allowed]).abs().max() < 1e-3
    shown = torch.tensor(opacities(tab, "#expanded #rightText .highlight"), dtype=torch.float64)
    assert torch.allclose(shown[allowed], torch.softmax(scores, 0), atol=1e-6)
    assert not shown[~allowed].any()


def test_neuron_view_shows_query_and_key_and_their_products(grouped, show):
    tab = show(ap.neuron_view(grouped, 0, 4))
    query, key = grouped.calls[0].query[0, 4].double(), grouped.calls[0].key[0, 2].double()
    expand(tab, 6)
    shown = numbers(tab, "#queries .element").view(11, 10)
    assert torch.allclose(shown, query, rtol=1e-5, atol=0)
    assert torch.allclose(numbers(tab, "#keys .element").view(11, 10), key, rtol=1e-5, atol=0)
    products = numbers(tab, "#product .element").view(11, 10)
    assert torch.allclose(products, query[6] * key, rtol=1e-4, atol=0)


def test_neuron_view_changes_layer_and_head(cap, show):
    tab = show(ap.neuron_view(cap, [0, 2], [1, 4]))
    assert texts(tab, "#layer option") == ["0", "2"]
    assert texts(tab, "#att_head option") == ["1", "4"]
    tab.page.select_option("#layer", label="2")
    tab.page.select_option("#att_head", label="4")
    tab.page.locator("#collapsed #leftText text").nth(9).hover()
    assert visible_lines(tab, "#collapsed") == (ap.weights(cap, 2, 4)[9] > 0).sum()


# Every view


def every_view(cap: ap.Capture) -> list[ap.View]:
    return [ap.head_view(cap), ap.model_view(cap), ap.neuron_view(cap, 0, [0, 3])]


def test_views_on_one_page_do_not_meet(cap, bidirectional, show):
    views = [ap.head_view(cap), ap.head_view(bidirectional, head=0), *every_view(cap)[1:]]
    tab = show(
        "<!DOCTYPE html><meta charset=utf-8><body>" + "".join(view._repr_html_() for view in views)
    )
    frames = tab.page.frames[1:]
    assert [frame.locator("svg").count() for frame in frames] == [1] * 4
    seen = [frame.locator("line[visibility='visible']") for frame in frames[:2]]
    frames[0].locator("#left text").nth(2).hover()
    assert [lines.count() for lines in seen] == [18, 0]
    frames[1].locator("#left text").nth(2).hover()
    assert seen[1].count() == 11


def test_a_still_picture_is_left_where_nothing_may_run(cap, show):
    for view in every_view(cap):
        tab = show(f"<!DOCTYPE html><meta charset=utf-8><body>{view._repr_html_()}")
        picture = tab.page.locator("img")
        assert not picture.is_visible()
        # What JupyterLab and others take out of a notebook that is not trusted.
        tab.page.evaluate("document.querySelectorAll('style, iframe').forEach(one => one.remove())")
        assert picture.is_visible()
        assert picture.evaluate("one => one.decode().then(() => one.naturalWidth)") > 300
        assert len(view.still) < 200_000


def test_the_still_picture_holds_the_strongest_weights(cap):
    still = ap.head_view(cap, layer=1, head=3).still
    assert still.count("M") == (ap.weights(cap, 1, 3) >= 0.05).sum()
    assert ap.model_view(cap).still.count("M") == (all_weights(cap) >= 0.05).sum()


def test_hostile_text_shows_as_itself_and_runs_nothing(gpt2, show):
    cap = ap.capture(gpt2(), IDS)
    words = replace(cap.words[0], tokens=tuple(HOSTILE))
    cap = replace(cap, words=(words,), lm=replace(cap.lm, name="</title><img src=x>"))
    expected = [one.replace("\u202e", "<U+202E>") for one in HOSTILE]
    for view in every_view(cap):
        for page in (view, f"<!DOCTYPE html><meta charset=utf-8><body>{view._repr_html_()}"):
            tab = show(page)
            frame = tab.page.frames[-1]
            if "Model" in view.title:
                frame.locator("#attn_background_0_0 ~ rect").click()
            seen = frame.locator("svg text").all_text_contents()
            whole = [one for one in expected if columns_of(one) <= 18]
            assert set(whole) <= set(seen)
            assert frame.evaluate("window.ran") is None
            assert frame.locator("img, svg svg").count() == 0
            ElementTree.fromstring(view.still)
            assert "</title><img src=x>" in frame.locator("header").text_content()


def test_a_page_may_not_fetch(cap, browser, tmp_path):
    ap.head_view(cap).save(tmp_path / "view.html")
    with opened(browser, tmp_path / "view.html") as tab:
        tab.page.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://a.b/'}))")
        tab.page.wait_for_timeout(100)
        assert "violates the following Content Security Policy" in tab.errors[0]


def test_the_browser_tells_what_a_page_does(browser, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(
        "<img src='http://a.b/c'><script>console.error('one'); alert('two'); throw 'three'</script>"
    )
    with opened(browser, file) as tab:
        tab.page.wait_for_timeout(100)
        assert tab.requests == ["http://a.b/c"]
        assert {"one", "two", "three"} <= set(tab.errors)


def test_long_words_are_cut_and_wide_ones_have_room(gpt2, show):
    cap = ap.capture(gpt2(), IDS[:3])
    words = replace(cap.words[0], tokens=("x" * 10_000, "漢字" * 8, "e\u0301" * 20))
    tab = show(ap.head_view(replace(cap, words=(words,))))
    assert texts(tab, "#left text") == ["x" * 31 + "…", "漢字" * 8, "e\u0301" * 20]
    boxes = tab.page.eval_on_selector_all("#left text", "all => all.map(one => one.getBBox().x)")
    assert min(boxes) >= 0


def test_as_many_colours_as_heads_and_layers(gpt2, show):
    for count in (1, 10, 12, 32, 64):
        assert len(set(colours(count))) == count
    cap = ap.capture(gpt2(n_layer=12, n_head=12), IDS[:2])
    strokes = "all => new Set(all.map(one => one.getAttribute('stroke'))).size"
    for view in (ap.head_view(cap), ap.model_view(cap)):
        assert show(view).page.eval_on_selector_all("svg line", strokes) == 12


def test_save_writes_in_full_or_not_at_all(cap, tmp_path):
    view = ap.head_view(cap, 0, 0)
    view.save(tmp_path / "view.html")
    assert (tmp_path / "view.html").read_text(encoding="utf-8") == view.html
    with pytest.raises(ap.AttnprobeError, match="cannot write"):
        view.save(Path(tmp_path / "missing" / "view.html"))
    assert [one.name for one in tmp_path.iterdir()] == ["view.html"]
    for name in ("", None, 3):
        with pytest.raises(ap.InputError, match="expected the name of a file"):
            view.save(name)


def test_save_follows_a_link_and_leaves_what_may_not_be_written(cap, tmp_path, monkeypatch):
    view = ap.head_view(cap, 0, 0)
    (tmp_path / "link.html").symlink_to(tmp_path / "view.html")
    view.save(tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "view.html").read_text(encoding="utf-8") == view.html
    (tmp_path / "view.html").write_text("before")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as for who is not root
    with pytest.raises(ap.AttnprobeError, match=r"cannot write .*: Permission denied"):
        view.save(tmp_path / "view.html")
    assert (tmp_path / "view.html").read_text() == "before"


# What is refused


@pytest.mark.parametrize("name", ["head_view", "model_view", "neuron_view", "attention_view"])
def test_what_is_no_capture_is_refused(name):
    with pytest.raises(ap.InputError, match="expected a capture"):
        getattr(ap, name)("text", 0, 0)


def test_a_limit_of_nothing_is_refused(cap):
    with pytest.raises(ap.InputError, match="max_lines must be at least 1, got 0"):
        ap.head_view(cap, max_lines=0)


def test_too_many_lines_are_refused_with_what_fits(gpt2):
    cap = ap.capture(gpt2(), list(range(1, 61)))  # 60 tokens: 1,830 pairs
    with pytest.raises(ap.InputError, match=r"10,980 lines .*at most 5 heads; or .* 57 tokens"):
        ap.head_view(cap, max_lines=10_000)
    with pytest.raises(ap.InputError, match=r"32,940 lines .*at most 2 layers; or at most 4 heads"):
        ap.model_view(cap, max_lines=22_000)
    with pytest.raises(ap.InputError, match=r"model_view .*layer=0, head=0; or"):
        ap.model_view(cap, max_lines=2_000)
    with pytest.raises(ap.InputError, match=r"27,000 lines .*fits: a text of at most 51 tokens\."):
        ap.neuron_view(cap, 0, 0, max_lines=20_000)
    assert ap.head_view(cap, head=[0, 1, 2, 3, 4], max_lines=10_000)
    assert ap.model_view(cap, layer=0, head=0, max_lines=2_000)


def test_a_text_of_fewer_words_than_tokens_may_fit_by_word():
    cap = ap.capture(ap.load("bundled"), "unbelievable incomprehensible")
    words = cap.words[0]
    assert len(words.words) == 2 < len(words.tokens)
    with pytest.raises(ap.InputError, match=r"by='word' \(2 words\)"):
        ap.head_view(cap, max_lines=6 * 3)
    assert ap.head_view(cap, by="word", max_lines=6 * 3)
    with pytest.raises(ap.InputError, match="fits: a text of at most"):  # it has no words
        ap.neuron_view(cap, 0, 0, max_lines=300)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "layer 3 is out of range: there are 3"),
        ({"head": [0, 6]}, "head 6 is out of range: there are 6"),
        ({"head": []}, "expected a head, a list of them, or None"),
        ({"text": 1}, "text 1 is out of range"),
        ({"by": "letter"}, "by must be 'token' or 'word', got 'letter'"),
    ],
)
def test_what_is_not_there_is_refused(cap, options, message):
    for view in (ap.head_view, ap.model_view):
        with pytest.raises(ap.InputError, match=message):
            view(cap, **options)


def test_a_script_that_the_patches_do_not_fit_is_refused():
    for script in ("nothing", "const A = 1; const A = 1;"):
        with pytest.raises(
            ap.AttnprobeError, match=r"holds 'const A = 1;' \d times, expected once"
        ):
            libraries.patched(script, [("const A = 1;", "")], "head_view.js of bertviz")


def test_nan_is_refused(cap):
    call = replace(cap.calls[1], query=torch.full_like(cap.calls[1].query, torch.nan))
    broken = replace(cap, calls=(cap.calls[0], call, cap.calls[2]))
    for view in (ap.head_view, ap.model_view, lambda cap: ap.neuron_view(cap, 1, 0)):
        with pytest.raises(ap.NonFiniteError, match="layer 1"):
            view(broken)

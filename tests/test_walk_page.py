"""The walkthrough's page: what it computes, how it is steered, and what it says."""

from __future__ import annotations

import re
from dataclasses import replace
from string import Formatter
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from browser import Tab, contrasts
from samples import HOSTILE, IDS
from test_walking import two_words_one_head

import attnprobe as ap
from attnprobe.views.colours import SIGNED, WEIGHTS, blended, ink_on
from attnprobe.views.messages import LANGUAGES, MESSAGES, messages_in

COLUMNS = {
    "raw": "score_raw",
    "score": "score",
    "masked": "masked_score",
    "weight": "weight",
    "brought": "weighted_norm",
    "share": "share",
}
EIGHT = "The unbelievable children were playing in the park"


@pytest.fixture
def cap(gpt2):
    return ap.capture(gpt2(), IDS)


@pytest.fixture(scope="module")
def eight():
    """8 words of 14 tokens: the second has 6, the last has 2."""
    return ap.capture(ap.load("bundled"), EIGHT)


def strip(tab: Tab, name: str) -> np.ndarray:
    """The numbers that a strip's cells stand for."""
    tab.page.wait_for_selector(f"tr[data-name={name}] td")
    return np.array(
        tab.page.eval_on_selector_all(
            f"tr[data-name={name}] td", "all => all.map(one => one.dataset.value)"
        ),
        dtype=float,
    )


def texts(tab: Tab, selector: str) -> list[str]:
    tab.page.wait_for_selector("td")
    return tab.page.eval_on_selector_all(selector, "all => all.map(one => one.textContent)")


def check(tab: Tab, walk: ap.Walkthrough) -> None:
    """The page shows what `walkthrough` computes: both in float64, added in any order."""
    for name, column in COLUMNS.items():
        expected = walk.steps[column].to_numpy()
        largest = np.abs(expected[np.isfinite(expected)]).max()
        np.testing.assert_allclose(strip(tab, name), expected, rtol=1e-9, atol=1e-12 * largest)
    largest = walk.output.abs().max().item()
    np.testing.assert_allclose(strip(tab, "o"), walk.output, rtol=1e-9, atol=1e-12 * largest)
    np.testing.assert_array_equal(strip(tab, "o_model"), walk.output_model)


def slide(tab: Tab, what: str, index: int) -> None:
    tab.page.locator(f"#{what}").fill(str(index))


def hover(tab: Tab, name: str, place: int) -> list[str]:
    """The numbers of a cell's calculation, line by line."""
    tab.page.locator(f"tr[data-name={name}] td").nth(place).hover()
    return texts(tab, "#calculation .numbers")


# What it computes


@pytest.mark.parametrize("model", ["cap", "bidirectional", "grouped"])
def test_every_step_is_the_walkthroughs(model, request, show):
    cap = request.getfixturevalue(model)
    tab = show(ap.walkthrough_view(cap))
    check(tab, ap.walkthrough(cap, 10, 0, 0))
    for word, layer, head in ((3, 1, 5), (0, 1, 2), (7, 0, 2)):
        slide(tab, "layer", layer)
        slide(tab, "head", head)
        tab.page.locator("#sentence button").nth(word).click()
        check(tab, ap.walkthrough(cap, word, layer, head))
        assert texts(tab, "label output") == [str(layer), str(head)]


def test_keys_choose_word_head_and_layer(cap, show):
    tab = show(ap.walkthrough_view(cap, 4, [2, 0], [5, 1, 3]))
    check(tab, ap.walkthrough(cap, 4, 2, 5))
    place = {"word": 4, "head": 0, "layer": 0}
    for key, what, step in (
        ("ArrowRight", "word", 1),
        ("ArrowRight", "word", 1),
        ("ArrowLeft", "word", -1),
        ("ArrowDown", "head", 1),
        ("ArrowDown", "head", 1),
        ("ArrowDown", "head", 0),  # there is none
        ("ArrowUp", "head", -1),
        ("PageDown", "layer", 1),
        ("PageUp", "layer", -1),
        ("PageUp", "layer", 0),
        ("PageDown", "layer", 1),
    ):
        tab.page.keyboard.press(key)
        place[what] += step
        walk = ap.walkthrough(cap, place["word"], [2, 0][place["layer"]], [5, 1, 3][place["head"]])
        check(tab, walk)
    assert texts(tab, "label output") == ["0", "1"]


def test_a_slider_keeps_its_own_keys(cap, show):
    tab = show(ap.walkthrough_view(cap, 4))
    tab.page.locator("#head").focus()
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("ArrowUp")
    check(tab, ap.walkthrough(cap, 4, 0, 2))


def test_the_first_view_is_of_what_was_asked(cap, show):
    check(show(ap.walkthrough_view(cap, "8", 2, [4, 1])), ap.walkthrough(cap, "8", 2, 4))
    repeated = ap.capture(cap.lm.model, [5, 17, 5, 8])
    check(show(ap.walkthrough_view(repeated, "5", nth=1)), ap.walkthrough(repeated, 2, 0, 0))


def test_the_last_word_is_no_special_token(eight, show):
    words = eight.words[0]
    special = replace(words.words[-1], kind="special")
    cap = replace(eight, words=(replace(words, words=(*words.words[:-1], special)),))
    check(show(ap.walkthrough_view(cap, layer=0, head=0)), ap.walkthrough(cap, "the", 0, 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(gpt2, show, dtype):
    cap = ap.capture(gpt2(dtype=dtype), IDS)
    tab = show(ap.walkthrough_view(cap, 6, 1, 2))
    check(tab, ap.walkthrough(cap, 6, 1, 2))
    assert str(dtype).removeprefix("torch.") in texts(tab, "header p")[0]


def test_one_text_of_a_padded_batch(gpt2, show):
    cap = ap.capture(gpt2(), [IDS, IDS[3:7]])
    tab = show(ap.walkthrough_view(cap, text=1))
    assert texts(tab, "#sentence button") == ["8", "4", "42", "99"]
    check(tab, ap.walkthrough(cap, 3, 0, 0, text=1))
    tab.page.keyboard.press("ArrowLeft")
    check(tab, ap.walkthrough(cap, 2, 0, 0, text=1))


def test_a_scaling_that_is_no_root_says_so(gpt2, show):
    cap = ap.capture(gpt2(scale_attn_weights=False), IDS)
    view = ap.walkthrough_view(cap)
    tab = show(view)
    check(tab, ap.walkthrough(cap, 10, 0, 0))
    assert texts(tab, "tr[data-name=score] .term") == ["q·k · s"]
    assert texts(tab, "tr[data-name=score] .note") == ["scaled: × 1"]
    assert "q·k · s" in view.still
    assert "√d_k" not in view.still


def test_layers_with_heads_of_other_sizes(cap, show):
    call = cap.calls[1]
    smaller = replace(
        call,
        query=call.query[..., :7],
        key=call.key[..., :7],
        value=call.value[..., :4],
        head_output_model=call.head_output_model[..., :4],
    )
    cap = replace(cap, calls=(cap.calls[0], smaller, cap.calls[2]))
    tab = show(ap.walkthrough_view(cap, 5))
    tab.page.locator("tr[data-name=o] td").nth(9).focus()
    tab.page.keyboard.press("PageDown")
    check(tab, ap.walkthrough(cap, 5, 1, 0))
    assert len(strip(tab, "o")) == 4
    assert texts(tab, "#calculation h2") == ["Component 3 of the head's output"]


def test_each_key_head_is_held_once(grouped, show):
    tab = show(ap.walkthrough_view(grouped))
    shapes = """DATA.layers.map(({query, key, value, output}) =>
        [query, key, value, output].map(one => one.shape))"""
    held = [[6, 11, 10], [3, 11, 10], [3, 11, 10], [6, 11, 10]]
    tab.page.wait_for_selector("td")
    assert tab.page.evaluate(shapes) == [held] * 2
    assert tab.page.evaluate("DATA.allowed.length") == 1
    tab = show(ap.walkthrough_view(grouped, 6, 1, [5, 2, 4]))
    assert tab.page.evaluate(shapes)[0][:2] == [[3, 11, 10], [2, 11, 10]]
    for head in (5, 2, 4):
        check(tab, ap.walkthrough(grouped, 6, 1, head))
        tab.page.keyboard.press("ArrowDown")


# What it shows


def test_tokens_stand_under_their_words_and_strips_under_the_tokens(eight, show):
    tab = show(ap.walkthrough_view(eight, "unbelievable", 0, 0))
    assert texts(tab, "#sentence button") == texts(tab, "th.word") == EIGHT.split()
    assert texts(tab, "th.token span") == list(eight.words[0].tokens)
    assert texts(tab, "#sentence") == [EIGHT]
    assert (
        "is 6 tokens; its query is that of the last one, “\u2068able\u2069”"
        in texts(tab, "#several")[0]
    )
    check(tab, ap.walkthrough(eight, "unbelievable", 0, 0))
    for numbers in (False, True):
        if numbers:
            tab.page.locator("#numbers").click()
        sides = (
            "all => all.map(one => one.getBoundingClientRect()).map(one => [one.left, one.right])"
        )
        tokens = tab.page.eval_on_selector_all("#tokens th.token", sides)
        for name in COLUMNS:
            assert tab.page.eval_on_selector_all(f"tr[data-name={name}] td", sides) == tokens
        words = tab.page.eval_on_selector_all("th.word", sides)
        spans = [(one.tokens[0], one.tokens[-1]) for one in eight.words[0].words]
        assert words == [[tokens[first][0], tokens[last][1]] for first, last in spans]
    assert texts(tab, "th.token.query span") == ["able"]
    assert len(texts(tab, "th.token.current")) == 6


def test_masked_cells_are_minus_infinity(grouped, show):
    tab = show(ap.walkthrough_view(grouped, 6, 0, 0))  # a window of 4: keys 3 to 6
    seen = [3 <= key <= 6 for key in range(11)]
    assert texts(tab, "tr[data-name=masked] td") == ["" if one else "−∞" for one in seen]
    for name in ("masked", "weight", "brought", "share"):
        hidden = tab.page.eval_on_selector_all(
            f"tr[data-name={name}] td",
            "all => all.map(one => getComputedStyle(one).backgroundImage.includes('repeating'))",
        )
        assert hidden == [not one for one in seen]
    assert not tab.page.locator("tr[data-name=score] td.masked").count()
    assert hover(tab, "masked", 8)[2].endswith(" + (−∞) = −∞")
    assert "this token may not be seen" in texts(tab, "#calculation .how")[2]
    assert hover(tab, "weight", 8)[3].endswith(" = 0")
    assert texts(tab, "#calculation .how")[2] != hover(tab, "weight", 5)[2]


def test_a_model_that_looks_ahead_masks_nothing(bidirectional, show):
    tab = show(ap.walkthrough_view(bidirectional, 2, 1, 3))
    assert np.isfinite(strip(tab, "masked")).all()
    assert (strip(tab, "weight") > 0).all()
    assert not tab.page.locator("td.masked").count()


def test_numbers_are_printed_when_asked_for(cap, show):
    tab = show(ap.walkthrough_view(cap, 10, 1, 2))
    assert set(texts(tab, "td")) == {""}
    tab.page.locator("#numbers").click()
    assert tab.page.get_attribute("#numbers", "aria-pressed") == "true"
    shown = [float(one.replace("−", "-")) for one in texts(tab, "tr[data-name=score] td")]
    assert shown == pytest.approx(strip(tab, "score"), rel=0.005)
    tab.page.locator("#numbers").click()
    assert set(texts(tab, "td")) == {""}


def test_the_calculation_by_hand(show):
    """q = (2, 0, 0, 0), k = (ln 3, 0, 0, 0); the weights are ¼ and ¾, o = (7, 0, ¾, 0)."""
    tab = show(ap.walkthrough_view(two_words_one_head()))
    assert hover(tab, "share", 1) == [
        "q·k = |q| · |k| · cos θ = 2 × 1.099 × 1 = 2.197",
        "2.197 × 0.5 = 1.099",
        "1.099 + 0 = 1.099",
        "e^(1.099 − 1.099) / 1.33333 = 0.75",
        "a·|v| = 0.75 × 8 = 6",
        "(a·v)·o / |o|² = 42 / 49.56 = 0.8474",
    ]
    assert hover(tab, "raw", 0) == ["q·k = |q| · |k| · cos θ = 2 × 9 × 0 = 0"]
    output, model = hover(tab, "o", 0)
    assert output == "o[0] = Σ a·v[0] = 0.75 × 8 (\u20688\u2069) + 0.25 × 4 (\u20687\u2069) = 7"
    assert model.startswith("7; |7 − 7| = ")
    assert float(model.split(" = ")[1].replace("−", "-")) < 1e-7  # ln 3 in float32
    assert "the model, which ran in float32" in texts(tab, "header p")[0]
    tab.page.locator("tr[data-name=masked] td").nth(0).focus()  # while the mouse rests elsewhere
    assert texts(tab, "#calculation .numbers")[-1] == "0 + 0 = 0"
    assert hover(tab, "score", 1)[-1] == "2.197 × 0.5 = 1.099"
    tab.page.mouse.move(600, 5)
    assert texts(tab, "#calculation .numbers")[-1] == "0 + 0 = 0"


def test_the_calculation_follows_the_numbers(cap, show):
    tab = show(ap.walkthrough_view(cap, 9, 1, [4, 5]))
    walk = ap.walkthrough(cap, 9, 1, 4)
    step = walk.steps.iloc[3]
    lines = hover(tab, "share", 3)
    results = [float(line.split(" = ")[-1].replace("−", "-")) for line in lines]
    expected = [step[column] for column in COLUMNS.values()]
    assert results == pytest.approx(expected, rel=1e-3)
    numbers = re.findall(r"[−\d.e]+", lines[0].split("cos θ = ")[1])
    parts = [step.query_norm, step.key_norm, step.cosine, step.score_raw]
    assert [float(one.replace("−", "-")) for one in numbers] == pytest.approx(parts, rel=1e-3)
    terms = hover(tab, "o", 7)[0]
    assert "(6 more: " in terms  # 10 keys are seen, 4 are written out
    tab.page.keyboard.press("ArrowDown")  # the same cell, of another head
    other = ap.walkthrough(cap, 9, 1, 5).output[7].item()
    shown = texts(tab, "#calculation .numbers")[0].split(" = ")[-1]
    assert float(shown.replace("−", "-")) == pytest.approx(other, rel=1e-3)


def test_what_the_model_got_wrong_shows(cap, show):
    call = cap.calls[1]
    wrong = call.head_output_model.clone()
    wrong[0, 6, 2, 5] += 0.25
    cap = replace(cap, calls=(cap.calls[0], replace(call, head_output_model=wrong), cap.calls[2]))
    tab = show(ap.walkthrough_view(cap, 6, 1, 2))
    assert texts(tab, "#difference")[0].endswith(" 0.25")
    assert hover(tab, "o_model", 5)[1].endswith(" = 0.25")


def test_every_strip_says_its_scale_and_its_sum(cap, show):
    tab = show(ap.walkthrough_view(cap, 8, 0, 1))
    steps = ap.walkthrough(cap, 8, 0, 1).steps
    titles = tab.page.eval_on_selector_all(".scale", "all => all.map(one => one.title)")
    scales = dict(zip([*COLUMNS, "o", "o_model"], titles, strict=True))
    assert scales["weight"] == "colours: 0 to 1"
    assert scales["share"] == "colours: −1 to 1"
    most = f"{steps.score_raw.abs().max():.3g}"
    assert scales["raw"] == f"colours: −{most} to {most}"
    assert texts(tab, ".scale")[0] == f"−{most}{most}"
    assert scales["score"] == scales["masked"] != scales["raw"]
    assert scales["o"] == scales["o_model"]
    assert texts(tab, "tr[data-name=weight] .note") == ["weights a, summing to 1"]
    assert texts(tab, "tr[data-name=score] .note") == ["scaled: × 0.3162 = 1/√10"]


def test_colours_are_centred_on_zero(show):
    tab = show(ap.walkthrough_view(two_words_one_head()))
    tab.page.wait_for_selector("tr[data-name=weight] td")
    back = "all => all.map(one => getComputedStyle(one).backgroundColor)"
    first, second = tab.page.eval_on_selector_all("tr[data-name=raw] td", back)
    assert (first, second) == ("rgb(245, 246, 248)", "rgb(192, 90, 0)")  # 0, and the largest
    quarter, _ = tab.page.eval_on_selector_all("tr[data-name=weight] td", back)
    expected = [int(blended(WEIGHTS["light"], 0.25)[at : at + 2], 16) for at in (1, 3, 5)]
    shown = [int(one) for one in re.findall(r"\d+", quarter)]
    assert shown == pytest.approx(expected, abs=1)


def test_long_texts_scroll_under_labels_that_stay(gpt2, show):
    cap = ap.capture(gpt2(), [7, *range(1, 60)])
    tab = show(ap.walkthrough_view(cap, layer=0, head=0))
    inside = """one => {
        const box = one.getBoundingClientRect();
        return box.left >= document.querySelector("#tokens .label").offsetWidth
            && box.right <= innerWidth;
    }"""
    label = tab.page.locator("tr[data-name=weight] .label")
    query = tab.page.locator("th.token.query")
    assert query.text_content() == "5959"
    assert query.evaluate(inside)
    assert label.bounding_box()["x"] < 20
    tab.page.locator("#sentence button").first.click()
    assert query.text_content() == "70"
    assert query.evaluate(inside)
    tab.page.locator("#sentence button").last.click()
    tab.page.locator("#sentence button").nth(30).click()  # out of sight: with what it looks at
    assert tab.page.locator("th.token").nth(20).evaluate(inside)
    assert query.evaluate(inside)
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


# Keyboard and screen readers


def test_every_control_can_be_reached_and_has_a_name(cap, show):
    tab = show(ap.walkthrough_view(cap, 5))
    tab.page.wait_for_selector("td")
    reached = []
    for _ in range(13):
        tab.page.keyboard.press("Tab")
        reached.append(
            tab.page.evaluate(
                """() => {
                    const one = document.activeElement;
                    return one.closest("tr")?.dataset.name || one.id || one.textContent;
                }"""
            )
        )
    strips = [*COLUMNS, "o", "o_model"]
    assert reached == ["layer", "head", "numbers", "theme", "42", *strips]
    snapshot = tab.page.locator("main").aria_snapshot()
    for role in ('slider "Layer', 'slider "Head', 'radio "42" [checked]', 'button "Numbers"'):
        assert role in snapshot
    for name in strips:
        cell = tab.page.locator(f"tr[data-name={name}] td").nth(5)
        value = strip(tab, name)[5]
        read = cell.get_attribute("aria-label").split(": ")[-1].replace("−", "-")
        assert float(read) == pytest.approx(value, rel=1e-3)


def test_arrows_go_along_a_strip_that_has_the_focus(cap, show):
    tab = show(ap.walkthrough_view(cap, 5, 1, 2))
    focus = (
        "() => [document.activeElement.parentNode.dataset.name, document.activeElement.cellIndex]"
    )
    tab.page.locator("tr[data-name=weight] td").nth(3).focus()
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.evaluate(focus) == ["weight", 5]
    tab.page.keyboard.press("Tab")  # the next strip, in the same column
    assert tab.page.evaluate(focus) == ["brought", 5]
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.evaluate(focus) == ["brought", 4]
    check(tab, ap.walkthrough(cap, 5, 1, 2))
    tab.page.locator("#sentence .current").focus()
    tab.page.keyboard.press("ArrowRight")
    check(tab, ap.walkthrough(cap, 6, 1, 2))
    assert tab.page.evaluate("document.activeElement.textContent") == "99"


def test_text_reads_well_in_light_and_dark(eight, show):
    tab = show(ap.walkthrough_view(eight, "unbelievable", lang="en"))
    tab.page.locator("#numbers").click()
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = "rgb(21, 24, 29)"
    for expected in ("rgb(255, 255, 255)", dark, dark):  # as it opens, by the button, by the system
        assert tab.page.evaluate(paper) == expected
        for head in (0, 3, 5):
            slide(tab, "head", head)
            found = contrasts(tab.page)
            assert len(found) > 150
            assert [one for one in found if one[1] < 4.5] == []
        if expected == dark:
            tab.page.evaluate("delete document.documentElement.dataset.theme")
            tab.page.emulate_media(color_scheme="dark")
        else:
            tab.page.locator("#theme").click()


def test_ink_reads_on_every_colour():
    def luminance(colour):
        parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    for stops in (*SIGNED.values(), *WEIGHTS.values()):
        for at in np.linspace(0, 1, 101):
            colour = blended(stops, at)
            dark, light = sorted([luminance(colour), luminance(ink_on(colour))])
            assert (light + 0.05) / (dark + 0.05) >= 4.5
        assert (blended(stops, 0), blended(stops, 1)) == (stops[0], stops[-1])


# Languages


def test_every_message_is_there_in_every_language():
    for name, row in MESSAGES.items():
        assert len(row) == len(LANGUAGES), name
        assert all(one.strip() for one in row), name
        fields = [{field for _, field, _, _ in Formatter().parse(one) if field} for one in row]
        assert fields == [fields[0]] * len(LANGUAGES), name
    assert messages_in("zh-TW") == messages_in("zh-Hant")


HEADLINES = {
    "en": "Layer 0, head 1: where “\u2068unbelievable\u2069” looks",
    "zh-Hant": "第 0 層、第 1 頭：「\u2068unbelievable\u2069」關注哪些詞",
    "zh-TW": "第 0 層、第 1 頭：「\u2068unbelievable\u2069」關注哪些詞",
    "ja": "第 0 層、ヘッド 1：「\u2068unbelievable\u2069」が注目する先",
}


@pytest.mark.parametrize("lang", HEADLINES)
def test_the_page_speaks(eight, show, lang):
    view = ap.walkthrough_view(eight, "unbelievable", 0, 1, lang=lang)
    tab = show(view)
    assert texts(tab, "#headline") == [HEADLINES[lang]]
    assert tab.page.get_attribute("html", "lang") == lang.replace("zh-TW", "zh-Hant")
    _, messages = messages_in(lang)
    assert texts(tab, "h1") == [messages["title"]]
    assert view.title.startswith(messages["title"])
    for name in ("share", "o"):
        hover(tab, name, 4)
    seen = tab.page.locator("main").inner_text()
    assert "undefined" not in seen
    assert not re.search(r"\{\w+\}", seen)
    assert messages["raw"] in seen
    assert messages["raw"] in view.still
    check(tab, ap.walkthrough(eight, "unbelievable", 0, 1))


# Text is data


def test_hostile_text_shows_as_itself_and_runs_nothing(gpt2, show):
    cap = ap.capture(gpt2(), [*IDS, 9])
    words = cap.words[0]
    read = [replace(one, label=hostile) for one, hostile in zip(words.words, HOSTILE, strict=True)]
    words = replace(words, tokens=tuple(HOSTILE), words=tuple(read))
    cap = replace(cap, words=(words,), lm=replace(cap.lm, name="</title><img src=x>{word}"))
    view = ap.walkthrough_view(cap, 9)
    expected = [one.replace("\u202e", "<U+202E>") for one in HOSTILE]
    expected = [one if len(one) <= 24 else f"{one[:23]}…" for one in expected]
    for page in (view, f"<!DOCTYPE html><meta charset=utf-8><body>{view._repr_html_()}"):
        frame = show(page).page.frames[-1]
        frame.wait_for_selector("td")
        for selector in ("#sentence button", "th.word", "th.token span"):
            assert frame.locator(selector).all_text_contents() == expected
        for at in range(12):
            frame.locator("#sentence button").nth(at).click()
            frame.locator("tr[data-name=o] td").nth(1).hover()
        assert frame.evaluate("window.ran") is None
        assert frame.locator("img, svg, td script").count() == 0
        assert "</title><img src=x>{word}" in frame.locator("header p").text_content()
    drawn = [one.text for one in ElementTree.fromstring(view.still).iter() if one.text]
    assert {one.replace("\uffff", "\ufffd") for one in expected} <= set(drawn)


def test_two_on_one_page_do_not_meet(cap, grouped, show):
    views = [ap.walkthrough_view(cap, 3), ap.walkthrough_view(grouped, 6, 1, 2)]
    tab = show(
        "<!DOCTYPE html><meta charset=utf-8><body>" + "".join(view._repr_html_() for view in views)
    )
    one, other = tab.page.frames[1:]
    for frame in (one, other):
        frame.wait_for_selector("td")
    weights = "all => all.map(one => +one.dataset.value)"
    before = other.eval_on_selector_all("tr[data-name=weight] td", weights)
    one.locator("#head").fill("3")
    shown = one.eval_on_selector_all("tr[data-name=weight] td", weights)
    assert shown == pytest.approx(ap.walkthrough(cap, 3, 0, 3).steps.weight)
    assert before == other.eval_on_selector_all("tr[data-name=weight] td", weights)
    assert before == pytest.approx(ap.walkthrough(grouped, 6, 1, 2).steps.weight)


# The still picture


def test_the_still_picture_shows_the_same_strips(grouped, show):
    view = ap.walkthrough_view(grouped, 6, 1, [4, 0])
    steps = ap.walkthrough(grouped, 6, 1, 4).steps
    drawn = [one.text for one in ElementTree.fromstring(view.still).iter() if one.text]
    terms = ("q·k", "q·k / √d_k", "+ M", "a = softmax", "|a·v|", "(a·v)·o / |o|²")
    for term, column in zip(terms, COLUMNS.values(), strict=True):
        first = 3 + next(at for at, one in enumerate(drawn) if one.endswith(f"  {term}"))
        shown = [one.replace("−", "-").replace("∞", "inf") for one in drawn[first : first + 11]]
        assert [float(one) for one in shown] == pytest.approx(steps[column].tolist(), rel=0.05)
    assert drawn.count("−∞") == 7
    assert view.still.count('stroke="#c3cad3"') == 4 * 7
    assert len(view.still) < 40_000
    tab = show(f"<!DOCTYPE html><meta charset=utf-8><body>{view._repr_html_()}")
    tab.page.evaluate("document.querySelectorAll('style, iframe').forEach(one => one.remove())")
    assert (
        tab.page.locator("img").evaluate("one => one.decode().then(() => one.naturalWidth)") > 300
    )


def test_the_still_picture_of_a_long_text_ends_with_the_query(gpt2):
    cap = ap.capture(gpt2(), list(range(1, 61)))
    still = ap.walkthrough_view(cap, 40, 0, 0).still
    drawn = [one.text for one in ElementTree.fromstring(still).iter() if one.text]
    assert "Tokens 17 to 40 of 60 are drawn" in drawn
    assert "18" in drawn
    assert len(still) < 60_000
    early = ap.walkthrough_view(cap, 2, 0, 0).still
    assert "Tokens 0 to 23 of 60 are drawn" in early


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "layer 3 is out of range: there are 3"),
        ({"head": [0, 6]}, "head 6 is out of range: there are 6"),
        ({"text": 1}, "text 1 is out of range"),
        ({"word": "green"}, "'green' is not a word of the text"),
        ({"word": 11}, "word 11 is out of range"),
        ({"word": "5", "nth": 1}, "'5' occurs 1 time;"),
        ({"lang": "fr"}, "lang must be one of 'en', 'zh-Hant', 'ja', 'zh-TW', got 'fr'"),
        ({"max_bytes": "8 MB"}, "expected a whole number for max_bytes"),
    ],
)
def test_what_is_not_there_is_refused(cap, options, message):
    with pytest.raises(ap.InputError, match=message):
        ap.walkthrough_view(cap, **options)
    with pytest.raises(ap.InputError, match="expected a capture"):
        ap.walkthrough_view("a text")


def test_too_much_is_refused_with_what_fits(cap, grouped):
    # 3 layers × (6 queries, keys, values and outputs of 10) × 4 bytes × 11 tokens + 11 × 11 masks
    assert ap.walkthrough_view(cap, max_bytes=31_801)
    with pytest.raises(ap.InputError, match=r"31,801 bytes .*at most 2 layers; or at most 5 heads"):
        ap.walkthrough_view(cap, max_bytes=31_800)
    # 2 layers × (6 queries and outputs, 3 keys and values)
    assert ap.walkthrough_view(grouped, max_bytes=15_961)
    with pytest.raises(ap.InputError, match=r"15,961 bytes .* a text of at most 10 tokens\. Or"):
        ap.walkthrough_view(grouped, max_bytes=15_960)
    with pytest.raises(ap.InputError, match="What fits: layer=0, head=0; or a text of at most 1 "):
        ap.walkthrough_view(cap, max_bytes=3_000)


def test_layers_of_different_numbers_of_heads_are_refused(cap):
    call = cap.calls[1]
    fewer = replace(call, query=call.query[:, :2], key=call.key[:, :2], value=call.value[:, :2])
    with pytest.raises(ap.InputError, match="the layers have 2 and 6 heads: choose layers"):
        ap.walkthrough_view(replace(cap, calls=(cap.calls[0], fewer, cap.calls[2])))


def test_what_is_not_the_formula_is_refused(cap):
    call = replace(cap.calls[1], unheld=("cu_seq_lens_q",))
    with pytest.raises(ap.InputError, match=r"layer 1's weights would not be .*cu_seq_lens_q"):
        ap.walkthrough_view(replace(cap, calls=(cap.calls[0], call, cap.calls[2])))


@pytest.mark.parametrize("name", ["query", "key", "value", "head_output_model"])
def test_nan_is_refused(cap, name):
    call = cap.calls[1]
    call = replace(call, **{name: torch.full_like(getattr(call, name), torch.nan)})
    with pytest.raises(ap.NonFiniteError, match="layer 1"):
        ap.walkthrough_view(replace(cap, calls=(cap.calls[0], call, cap.calls[2])))

"""The page for long texts, drawn by a real browser without a network."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from browser import Tab, contrasts
from samples import HOSTILE, IDS

import attnprobe as ap
from attnprobe.stretch import Stretch
from attnprobe.views import attention

SENTENCE = "The unbelievable children weren't playing, and the unbelievable dog was playing"

# Every number of the page in the state it is in: [weight, how far it may be off], by head.
NUMBERS = """() => matrices.map((shown, head) => Array.from(shown.weights, (weight, cell) => [
  weight, errorOf(byTokens[head], shown, Math.floor(cell / shown.size), cell % shown.size,
    state.by === "word", state.first === "renormalised")]))"""


@pytest.fixture
def cap(gpt2):
    return ap.capture(gpt2(), IDS)


@pytest.fixture(scope="module")
def story():
    """The bundled model's capture of a sentence with words of several tokens, some twice."""
    return ap.capture(ap.load("bundled"), SENTENCE)


@pytest.fixture
def draw(show):
    """Opens views, and waits until they are drawn."""

    def open_(page: ap.View | str) -> Tab:
        tab = show(page)
        for frame in tab.page.frames:
            if isinstance(page, ap.View) or frame is not tab.page.main_frame:
                frame.wait_for_function("document.documentElement.dataset.ready === 'yes'")
        return tab

    return open_


def numbers(tab: Tab) -> tuple[torch.Tensor, torch.Tensor]:
    """What the page holds for the layer it shows, and how far it says that it may be off."""
    found = torch.tensor(tab.page.evaluate(NUMBERS), dtype=torch.float64)  # (h, N·N, 2)
    side = round(found.shape[1] ** 0.5)
    return found[..., 0].view(-1, side, side), found[..., 1].view(-1, side, side)


def choose(tab: Tab, **options: str) -> None:
    """Change menus, and wait for what follows."""
    for name, value in options.items():
        tab.page.select_option(f"#{name}", value)
    tab.page.evaluate("refresh()")


def assert_close(tab: Tab, expected: torch.Tensor, allowed: torch.Tensor, most: float) -> None:
    """The page's numbers are the expected ones within what it says, and masked where they are."""
    shown, error = numbers(tab)
    assert shown.shape == expected.shape
    assert ((shown == -1) == ~allowed).all()
    difference = (shown - expected)[:, allowed].abs()
    assert (difference <= error[:, allowed] + 1e-6).all()
    assert difference.max() <= most


@pytest.mark.parametrize("model", ["cap", "bidirectional", "grouped"])
@pytest.mark.parametrize(("fine", "most"), [(250_000, 3e-4), (0, 8e-3)])
def test_the_page_holds_the_captures_weights(fine, most, model, request, draw, monkeypatch):
    monkeypatch.setattr(attention, "_FINE_WEIGHTS", fine)
    cap = request.getfixturevalue(model)
    tab = draw(ap.attention_view(cap))
    for layer in range(cap.layers):
        choose(tab, layer=str(layer))
        weights = ap.weights(cap, layer)
        assert_close(tab, weights, ~torch.isinf(ap.scores(cap, layer)[0]), most)


def test_chosen_layers_and_heads(cap, draw):
    tab = draw(ap.attention_view(cap, layer=[2, 0], head=[5, 1]))
    assert tab.page.locator("#layer option").all_text_contents() == ["2", "0"]
    assert tab.page.locator(".head").all_text_contents() == ["head 5", "head 1"]
    allowed = torch.ones(11, 11).tril().bool()
    assert_close(tab, ap.weights(cap, 2)[[5, 1]], allowed, 3e-4)
    choose(tab, layer="1")
    assert_close(tab, ap.weights(cap, 0)[[5, 1]], allowed, 3e-4)


@pytest.mark.parametrize("fine", [250_000, 0])
def test_by_word(story, fine, draw, monkeypatch):
    monkeypatch.setattr(attention, "_FINE_WEIGHTS", fine)
    tab = draw(ap.attention_view(story, by="word"))
    expected = ap.weights(story, 0, by="word")
    size = expected.shape[-1]
    assert size < len(story.words[0].tokens)
    assert_close(tab, expected, torch.ones(size, size).tril().bool(), 0.02)
    assert tab.page.locator("#words span").all_text_contents() == story.words[0].labels("word")
    choose(tab, by="token")
    assert tab.page.locator("#words span").all_text_contents() == list(story.words[0].tokens)
    assert (numbers(tab)[0] - ap.weights(story, 0)).tril().abs().max() < 8e-3


@pytest.mark.parametrize("by", ["token", "word"])
@pytest.mark.parametrize("fine", [250_000, 0])
def test_without_the_first(story, by, fine, draw, monkeypatch):
    monkeypatch.setattr(attention, "_FINE_WEIGHTS", fine)
    tab = draw(ap.attention_view(story, layer=2, by=by))
    weights = ap.weights(story, 2, by=by)
    allowed = torch.ones_like(weights[0]).tril().bool()
    allowed[:, 0] = False
    choose(tab, first="hidden")
    assert_close(tab, weights, allowed, 0.02)
    rest = weights.clone()
    rest[..., 0] = 0.0
    choose(tab, first="renormalised")
    rest[:, 1:] /= rest[:, 1:].sum(-1, keepdim=True)
    assert_close(tab, rest, allowed, 0.2)  # what is left may be little, and then says so
    shown, error = numbers(tab)
    if fine:
        assert ((shown - rest).abs()[:, allowed] < 0.01).all()
    assert error.max() < 0.25


def test_without_the_first_as_attended_says_it(story, draw):
    tab = draw(ap.attention_view(story, layer=3, head=4, by="word"))
    choose(tab, first="renormalised")
    tab.page.locator("#words span").last.click()
    frame = ap.attended(story, len(story.words[0].words) - 1, layer=3, head=4, skip_first=True)
    assert rows(tab, 0)[:5] == [
        (position, word, pytest.approx(weight, abs=6e-3))
        for position, word, weight in zip(
            frame["key_pos"], frame["key"], frame["weight_without_first"], strict=True
        )
    ]


def test_a_first_word_of_several_tokens(draw):
    cap = ap.capture(ap.load("bundled"), "Unbelievable children play")
    assert cap.words[0].word_of.count(0) > 1
    tab = draw(ap.attention_view(cap, layer=1, by="word"))
    choose(tab, first="renormalised")
    rest = ap.weights(cap, 1, by="word")[:, 1:, 1:]
    expected = rest / rest.sum(-1, keepdim=True)
    shown, error = numbers(tab)
    gap = (shown[:, 1:, 1:] - expected).abs()[:, torch.ones(2, 2).tril().bool()]
    assert (gap <= error[:, 1:, 1:].amax((-1, -2))[:, None] + 1e-6).all()


# What hovering, clicking and keys show


def rows(tab: Tab, which: int) -> list[tuple[int, str, float]]:
    """One of the two lists: position, word, weight; 0 for weights that are too small to read."""
    found = tab.page.locator("#lists section").nth(which).locator("tr")
    cells = [one.locator("td").all_text_contents() for one in found.all()]
    return [
        (int(at), word, 0.0 if "<" in number else float(number.split(" ± ")[0]))
        for at, word, number, _ in cells
    ]


def strongest(weights: torch.Tensor, count: int = 10) -> list[tuple[int, float]]:
    order = sorted(range(len(weights)), key=lambda at: -weights[at])
    return [(at, float(weights[at])) for at in order if weights[at] > 1e-7][:count]


def test_hovering_a_word_shows_where_it_looks_with_numbers(cap, draw):
    tab = draw(ap.attention_view(cap, layer=1, head=3))
    weights = ap.weights(cap, 1, 3)
    tab.page.locator("#words span").nth(7).hover()
    assert tab.page.locator("#lists h2").all_text_contents() == [
        "“3” attends to",
        "“3” is attended to by",
    ]
    for which, vector in enumerate((weights[7], weights[:, 7])):
        expected = {at: weight for at, weight in strongest(vector, 11) if weight > 0.0015}
        shown = {at: weight for at, _, weight in rows(tab, which) if weight > 0.001}
        assert shown == pytest.approx(expected, abs=1e-3)
        assert all(word == str(IDS[at]) for at, word, _ in rows(tab, which))
    tab.page.locator("#readout").hover()
    assert tab.page.locator("#lists section").count() == 0


def test_hovering_a_cell_tells_its_weight(cap, draw):
    tab = draw(ap.attention_view(cap, layer=2, head=1))
    cell, margin = tab.page.evaluate("[plan.cell, plan.margin]")
    at = dict.fromkeys(((9, 2), (4, 4), (3, 8)))
    for query, key in at:
        place = {"x": margin + (key + 0.5) * cell, "y": margin + (query + 0.5) * cell}
        tab.page.locator("#mark").hover(position=place)
        at[query, key] = tab.page.locator("#readout").text_content()
    weights = ap.weights(cap, 2, 1)
    assert at[3, 8] == "Layer 2, head 1: “8” → “77”: masked"
    for (query, key), said in list(at.items())[:2]:
        assert said.startswith(f"Layer 2, head 1: “{IDS[query]}” → “{IDS[key]}”: ")
        shown = said.rsplit(": ", 1)[1].replace("< 0.001", "0")
        assert float(shown) == pytest.approx(float(weights[query, key]), abs=1e-3)


def test_keys_choose_word_head_layer_and_the_rest(story, draw):
    tab = draw(ap.attention_view(story))
    page = tab.page

    def state(*names):
        return [page.evaluate(f"state.{name}") for name in names]

    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "PageDown"):
        page.keyboard.press(key)
    page.wait_for_function("matrices.length && document.querySelector('#layer').value === '1'")
    assert state("chosen", "head", "layer") == [1, 1, 1]
    assert page.locator("#words .chosen").text_content() == story.words[0].tokens[1]
    for key in "tfla":
        page.keyboard.press(key)
    assert state("by", "first", "layout") == ["word", "hidden", "vertical"]
    assert page.evaluate("[...state.arcs]") == [0, 1, 2, 3, 4, 5]
    page.evaluate("refresh()")
    page.keyboard.press("/")
    page.keyboard.type("unbel")
    assert page.locator("#hits").text_content() == "2 found"
    twice = [at for at, one in enumerate(story.words[0].labels("word")) if one == "unbelievable"]
    for expected in (twice[1], twice[0], twice[1]):  # the next after the chosen one, and around
        page.keyboard.press("Enter")
        assert state("chosen") == [expected]
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert state("chosen") == [None]


def test_a_chosen_word_stays_when_tokens_become_words(story, draw):
    tab = draw(ap.attention_view(story))
    of = list(story.words[0].word_of)
    token = of.index(3) + 1
    assert of[token] == 3  # the second token of a word
    tab.page.locator("#words span").nth(token).click()
    tab.page.keyboard.press("t")
    tab.page.wait_for_function("spans.by === 'word'")
    assert tab.page.locator("#words .chosen").text_content() == story.words[0].labels("word")[3]


# What is drawn


# Chromium warns of canvases that are read again and again, but for those that are made for it.
COPY = """canvas => {
    const copy = document.createElement("canvas");
    Object.assign(copy, {width: canvas.width, height: canvas.height});
    const context = copy.getContext("2d", {willReadFrequently: true});
    context.drawImage(canvas, 0, 0);
    return context;
}"""


def pixel(tab: Tab, query: int, key: int) -> list[int]:
    """The colour in the middle of a cell of the large matrix."""
    return tab.page.evaluate(
        f"""([query, key]) => {{
            const context = ({COPY})(document.getElementById("matrix"));
            const at = one => (plan.margin + (one + .5) * plan.cell) * window.devicePixelRatio;
            return [...context.getImageData(at(key), at(query), 1, 1).data];
        }}""",
        [query, key],
    )


def test_the_matrix_shows_weights_and_what_is_masked(cap, draw):
    tab = draw(ap.attention_view(cap, layer=0, head=2))
    weights = ap.weights(cap, 0, 2)
    colour = [int(tab.page.evaluate("DATA.colours[0]")[at : at + 2], 16) for at in (1, 3, 5)]
    assert pixel(tab, 0, 0) == [*colour, 255]  # the first word sees itself only
    assert pixel(tab, 2, 7) == [0xE4, 0xE8, 0xEE, 255]
    for query, key in ((5, 1), (8, 8), (10, 3)):
        share = float(weights[query, key]) ** 0.5
        expected = [255 + (one - 255) * share for one in colour]
        assert pixel(tab, query, key)[:3] == pytest.approx(expected, abs=3)


def test_arcs_are_those_of_the_shown_heads_and_word(cap, draw):
    tab = draw(ap.attention_view(cap, layer=1))
    inked = f"""() => {{
        const context = ({COPY})(document.getElementById("arcs"));
        const {{data}} = context.getImageData(0, 0, context.canvas.width, context.canvas.height);
        return data.filter((one, at) => at % 4 === 3 && one > 0).length; }}"""
    weights = ap.weights(cap, 1)
    assert tab.page.evaluate("arcs.length") == (weights[0] >= 0.05).sum()
    alone = tab.page.evaluate(inked)
    assert alone > 100
    tab.page.locator("#head-4").click(modifiers=["Shift"])
    assert tab.page.evaluate("arcs.length") == (weights[[0, 4]] >= 0.05).sum()
    assert tab.page.evaluate(inked) > alone
    assert {one[0] for one in tab.page.evaluate("arcs")} == {0, 4}
    tab.page.locator("#words span").nth(6).click()
    assert tab.page.evaluate("arcs.length") == (weights[[0, 4], 6] >= 0.005).sum()
    for layout in ("vertical", "wrapped", "horizontal"):
        choose(tab, layout=layout)
        assert tab.page.evaluate(inked) > 100
    tab.page.locator(".head input").nth(0).uncheck()
    tab.page.locator(".head input").nth(4).uncheck()
    assert tab.page.evaluate(inked) == 0


def test_a_long_text_scrolls_to_what_is_chosen(gpt2, draw):
    ids = np.random.default_rng(0).integers(1, 100, 400).tolist()
    cap = ap.capture(gpt2(n_positions=400), ids)
    tab = draw(ap.attention_view(cap, layer=0))
    assert tab.page.evaluate("state.layout") == "wrapped"
    for layout in ("horizontal", "vertical", "wrapped"):
        choose(tab, layout=layout)
        for _ in range(2):
            tab.page.keyboard.press("Escape")
        tab.page.keyboard.press("ArrowLeft")  # the last word
        inside = tab.page.evaluate("""() => {
            const word = spans[399].getBoundingClientRect();
            const box = document.getElementById("text").getBoundingClientRect();
            return word.left >= box.left && word.right <= box.right
                && word.top >= box.top && word.bottom <= box.bottom; }""")
        assert inside, layout
    # A pixel that stands for several weights shows the largest.
    largest = tab.page.evaluate("""() => {
        const picture = matrixPicture(matrices[0], "#000000", 40).getContext("2d");
        return Array.from(picture.getImageData(0, 0, 40, 40).data.filter((_, at) => at % 4 === 0));
    }""")
    weights = ap.weights(cap, 0, 0)
    pooled = weights.view(40, 10, 40, 10).amax((1, 3))
    shown = 1 - torch.tensor(largest, dtype=torch.float64).view(40, 40) / 255
    below = torch.ones(40, 40).tril(-1).bool()
    assert (shown - pooled.sqrt())[below].abs().max() < 0.02


def test_as_many_colours_as_heads(gpt2, draw):
    cap = ap.capture(gpt2(n_head=12), IDS[:4])
    tab = draw(ap.attention_view(cap))
    assert len(set(tab.page.evaluate("DATA.colours"))) == 12


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(cap, scheme, draw):
    tab = draw(ap.attention_view(cap))
    tab.page.emulate_media(color_scheme=scheme)
    tab.page.locator("#words span").nth(5).click()
    found = contrasts(tab.page)
    assert len(found) > 60
    assert [one for one in found if one[1] < 4.5] == []
    paper = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, paper[4:-1].split(","))) < 3 * 128
    assert dark == (scheme == "dark")
    assert pixel(tab, 2, 7)[0] == (0x2A if dark else 0xE4)
    tab.page.locator("#theme").click()
    paper = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 3 * 128) != dark


def test_hostile_text_shows_as_itself_and_runs_nothing(gpt2, draw):
    cap = ap.capture(gpt2(), IDS)
    words = replace(cap.words[0], tokens=tuple(HOSTILE[: len(IDS)]))
    cap = replace(cap, words=(words,), lm=replace(cap.lm, name="</title><img src=x>"))
    view = ap.attention_view(cap)
    for page in (view, f"<!DOCTYPE html><meta charset=utf-8><body>{view._repr_html_()}"):
        frame = draw(page).page.frames[-1]
        for at in range(len(IDS)):
            frame.locator("#words span").nth(at).click()
        shown = frame.locator("#words span").all_text_contents()
        assert shown == [one.replace("\u202e", "<U+202E>") for one in HOSTILE[: len(IDS)]]
        assert frame.evaluate("window.ran") is None
        assert frame.locator("img, svg").count() == 0
        assert "</title><img src=x>" in frame.locator("header").text_content()
    ElementTree.fromstring(view.still)


def test_two_on_one_page_do_not_meet(cap, bidirectional, draw):
    views = [ap.attention_view(cap), ap.attention_view(bidirectional)]
    tab = draw(
        "<!DOCTYPE html><meta charset=utf-8><body>" + "".join(view._repr_html_() for view in views)
    )
    frames = tab.page.frames[1:]
    frames[1].locator("#words span").nth(2).click()
    assert [frame.locator("#lists section").count() for frame in frames] == [0, 2]
    assert [frame.evaluate("DATA.lower") for frame in frames] == [True, False]


def test_one_token_and_one_text_of_a_batch(gpt2, draw):
    tab = draw(ap.attention_view(ap.capture(gpt2(), [7])))
    assert numbers(tab)[0].tolist() == [[[1.0]]] * 6
    choose(tab, first="renormalised")
    assert numbers(tab)[0].tolist() == [[[-1.0]]] * 6
    cap = ap.capture(gpt2(), [IDS, IDS[:4]])
    tab = draw(ap.attention_view(cap, text=1))
    assert_close(tab, ap.weights(cap, 0, text=1), torch.ones(4, 4).tril().bool(), 3e-4)


# Size


def test_pages_are_small(gpt2):
    fixed = len(ap.attention_view(ap.capture(gpt2(), [7]), 0, 0).html)
    ids = np.random.default_rng(0).integers(1, 100, 1024)
    wide = gpt2(n_layer=12, n_head=12, n_embd=120, n_positions=128, initializer_range=0.2)
    view = ap.attention_view(ap.capture(wide, ids[:128].tolist()))
    assert len(view.html) - fixed < 1_000_000
    long = gpt2(n_layer=1, n_head=12, n_embd=120, n_positions=1024, initializer_range=0.2)
    view = ap.attention_view(ap.capture(long, ids.tolist()))
    assert len(view.html) - fixed < 4_000_000
    assert len(view.still) < 200_000


def test_more_than_a_page_can_hold_is_refused(cap):
    message = r"1,188 weights \(.*max_weights \(1,000\).*at most 2 layers; or at most 5 heads"
    with pytest.raises(ap.InputError, match=message):
        ap.attention_view(cap, max_weights=1_000)
    assert ap.attention_view(cap, layer=[0, 1], max_weights=1_000)
    with pytest.raises(ap.InputError, match="attention_view, which is made for long texts"):
        ap.head_view(cap, max_lines=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "layer 3 is out of range: there are 3"),
        ({"head": [0, 6]}, "head 6 is out of range: there are 6"),
        ({"text": 1}, "text 1 is out of range"),
        ({"by": "letter"}, "by must be 'token' or 'word', got 'letter'"),
    ],
)
def test_what_is_not_there_is_refused(cap, options, message):
    with pytest.raises(ap.InputError, match=message):
        ap.attention_view(cap, **options)


def test_nan_is_refused(cap):
    call = replace(cap.calls[1], query=torch.full_like(cap.calls[1].query, torch.nan))
    broken = replace(cap, calls=(cap.calls[0], call, cap.calls[2]))
    with pytest.raises(ap.NonFiniteError, match="layer 1"):
        ap.attention_view(broken)


def test_a_text_from_right_to_left_stands_so(draw):
    cap = ap.capture(ap.load("bundled"), "كان الأطفال يلعبون في الحديقة")
    tab = draw(ap.attention_view(cap, layer=0, head=0, by="word"))
    for layout in ("horizontal", "wrapped"):
        choose(tab, layout=layout)
        lefts = tab.page.locator("#words span").evaluate_all(
            "all => all.map(one => one.getBoundingClientRect().x)"
        )
        assert lefts == sorted(lefts, reverse=True)
        # Arcs go by the places of words within the text, as it is scrolled.
        places = tab.page.evaluate("""places.map(one =>
            one.x + document.getElementById("text").getBoundingClientRect().x)""")
        assert places == pytest.approx(lefts, abs=0.01)
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.evaluate("state.chosen") == 0
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.evaluate("state.chosen") == 1
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.evaluate("state.chosen") == 0


def test_a_number_without_a_margin_is_right_to_its_last_digit(story, draw):
    tab = draw(ap.attention_view(story))
    every = """matrices.flatMap((one, head) => { state.head = head;
        return Array.from(one.weights, (_, cell) =>
            numberOf(Math.floor(cell / one.size), cell % one.size)); })"""
    for layer in range(4):
        choose(tab, layer=str(layer))
        shown = tab.page.evaluate(every)
        for said, weight in zip(shown, ap.weights(story, layer).flatten().tolist(), strict=True):
            if said == "masked":
                assert weight == 0
            elif said == "< 0.001":
                assert 0 < weight < 0.00102
            else:
                assert abs(float(said) - weight) <= 0.0005 + 0.00003


def test_the_still_picture_has_the_heads_and_the_words(story):
    still = ElementTree.fromstring(ap.attention_view(story, layer=2, head=[1, 5, 3]).still)
    said = [one.text for one in still.iter() if one.text]
    assert said[:4] == ["2.1", "2.5", "2.3", "2.1"]
    assert said[4:] == [*story.words[0].tokens] * 2


@pytest.mark.parametrize("by", ["token", "word"])
def test_a_span_shows_its_words_and_what_stands_before_them_as_one(story, draw, by):
    tab = draw(ap.attention_view(story, 1, [2, 0], by=by, span=(2, 7)))
    expected, allowed = Stretch.of(story, 0, (2, 7)).shown(1, [2, 0]).by(by)
    found, off = numbers(tab)
    assert (found[:, ~allowed] == -1).all()
    assert ((found - expected).abs() <= off + 1e-12)[:, allowed].all()
    assert "words 2 to 6 of 12" in tab.page.inner_text("header")
    assert "⋯ 2 words before" in ap.attention_view(story, 1, by="word", span=(2, 7)).html

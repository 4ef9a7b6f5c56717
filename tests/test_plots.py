import dataclasses
import io
from itertools import pairwise
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

import attnprobe as ap
from attnprobe.views import drawing, fonts, plots

mpl.use("agg")
from matplotlib import pyplot as plt

TEXTS = [[5, 17, 23, 5, 99, 42, 8, 71, 2], [3, 60, 11, 72]]
SENTENCE = "The children were playing unbelievably in the green park."
HOSTILE = [
    "$x$",
    "$",
    r"$\frac{$",
    "a_b",
    "<b>",
    "</svg>",
    "&amp;",
    "%s",
    "\\",
    "'\"",
    "\x01\uffff",
]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def sentence():
    return ap.capture(ap.load("bundled"), SENTENCE)


@pytest.fixture
def cap(gpt2):
    return ap.capture(gpt2(), TEXTS)


def relabelled(cap, labels, name=""):
    """The capture of one text with other tokens to show, and another name of its model."""
    words = dataclasses.replace(cap.words[0], tokens=tuple(labels))
    lm = dataclasses.replace(cap.lm, name=name)
    return dataclasses.replace(cap, words=(words,), lm=lm)


def masked_by(cap, **facts):
    """The capture with another rule for its masks, as if the model had gone by it."""
    rule = dataclasses.replace(cap.calls[0].expected_mask, **facts)
    calls = tuple(
        dataclasses.replace(call, expected_mask=rule, mask=rule.allowed(keys=rule.keys))
        for call in cap.calls
    )
    return dataclasses.replace(cap, calls=calls)


def cells(ax):
    (image,) = ax.images
    return image.get_array()


def texts(ticks):
    return [tick.get_text() for tick in ticks]


def scale(figure):
    """The Axes of the one colour bar."""
    (bar,) = (one.colorbar for ax in figure.axes for one in ax.images if one.colorbar is not None)
    return bar.ax


def saved(figure, format):
    file = io.BytesIO()
    figure.savefig(file, format=format)
    return file.getvalue()


def overlapping(figure, ax):
    """Labels of an axis that meet the one before."""
    figure.canvas.draw()
    boxes = [tick.get_window_extent() for tick in ax.get_yticklabels()]
    found = [(low, high) for high, low in pairwise(boxes) if low.y1 > high.y0]
    boxes = [tick.get_window_extent() for tick in ax.get_xticklabels()]
    return found + [(left, right) for left, right in pairwise(boxes) if left.x1 > right.x0]


# What is drawn


@pytest.mark.parametrize("by", ["token", "word"])
def test_cells_are_the_weights_and_the_future_is_masked(sentence, by):
    found = cells(ap.heatmap(sentence, 1, 3, by=by))
    wanted = ap.weights(sentence, 1, 3, by=by).numpy()
    np.testing.assert_array_equal(found.data, wanted)
    np.testing.assert_array_equal(found.mask, np.triu(np.ones_like(wanted, bool), 1))


@pytest.mark.parametrize("text", [0, 1])
def test_each_text_of_a_batch_is_drawn_without_its_padding(cap, text):
    ax = ap.heatmap(cap, 2, 4, text=text)
    np.testing.assert_array_equal(cells(ax).data, ap.weights(cap, 2, 4, text=text))
    assert texts(ax.get_yticklabels()) == [str(one) for one in TEXTS[text]]


def test_labels_titles_and_scale_say_what_is_shown(sentence):
    ax = ap.heatmap(sentence, 1, 3, by="word")
    words = [word.label for word in sentence.words_of(0).words]
    assert texts(ax.get_xticklabels()) == texts(ax.get_yticklabels()) == words
    assert ax.get_yticks().tolist() == ax.get_xticks().tolist() == list(range(len(words)))
    assert ax.yaxis_inverted()  # the first word is at the top
    assert ax.get_title() == "bundled, layer 1, head 3\nattention weights by word"
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("query word", "key word")
    assert scale(ax.figure).get_ylabel() == "weight"
    assert texts(scale(ax.figure).get_legend().get_texts()) == ["masked"]


def test_a_window_is_masked_and_an_encoder_has_nothing_to_explain(cap):
    mask = cells(ap.heatmap(masked_by(cap, window=3), 0, 0)).mask
    queries, keys = np.indices((9, 9))
    np.testing.assert_array_equal(mask, (keys > queries) | (keys <= queries - 3))
    ax = ap.heatmap(masked_by(cap, causal=False), 0, 0)
    assert not cells(ax).mask.any()
    assert scale(ax.figure).get_legend() is None


def test_masked_cells_are_hatched_and_a_weight_of_0_is_not():
    sheet = drawing.Sheet("", "token", ["a", "b"], ["sans-serif"], 1.0)
    panel = drawing.Panel(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([[True, False], [True] * 2]))
    ax = drawing.draw_one(panel, sheet, None)
    ax.figure.canvas.draw()
    pixels = np.asarray(ax.figure.canvas.buffer_rgba())[::-1]  # from below, as positions are

    def colours(row, column):
        (x0, y0), (x1, y1) = ax.transData.transform(
            [(column - 0.4, row + 0.4), (column + 0.4, row - 0.4)]
        )
        cell = pixels[round(y0) : round(y1), round(x0) : round(x1), :3]
        return {tuple(one) for one in cell.reshape(-1, 3).tolist()}

    nothing = tuple(drawing.COLOURS(0.0, bytes=True)[:3])
    assert colours(1, 0) == {nothing}
    assert len(colours(0, 1)) > 3
    assert nothing not in colours(0, 1)


def test_the_colours_darken_evenly_so_they_hold_in_grey():
    rgb = drawing.COLOURS(np.linspace(0, 1, 51))[:, :3]
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    lightness = np.where(
        luminance > 0.008856, 116 * np.cbrt(luminance) - 16, 903.3 * luminance
    )  # CIE L*, 0 to 100
    steps = -np.diff(lightness)
    assert lightness[0] > 95
    assert lightness[-1] < 15
    assert steps.min() > 0.75 * steps.mean()
    assert steps.max() < 1.5 * steps.mean()


def test_the_scale_ends_at_the_largest_weight_or_at_vmax(cap):
    encoder = masked_by(cap, causal=False)
    ax = ap.heatmap(encoder, 2, 4)
    assert ax.images[0].get_clim() == (0.0, ap.weights(encoder, 2, 4).max())
    assert ax.images[0].colorbar.extend == "neither"
    ax = ap.heatmap(cap, 2, 4, vmax=0.25)
    assert ax.images[0].get_clim() == (0.0, 0.25)
    assert ax.images[0].colorbar.extend == "max"
    assert ap.heatmap(cap, 2, 4, vmax=2).images[0].colorbar.extend == "neither"


# Where it is drawn


def test_draws_in_the_ax_given_and_leaves_the_rest_alone(sentence):
    figure = Figure(figsize=(9, 4))
    left, right = figure.subplots(1, 2)
    before = dict(mpl.rcParams)
    assert ap.heatmap(sentence, 0, 0, ax=right) is right
    figure.canvas.draw()
    assert dict(mpl.rcParams) == before
    assert not left.images
    assert plt.get_fignums() == []


def test_makes_one_figure_of_pyplots_where_no_ax_is_given(sentence):
    before = dict(mpl.rcParams)
    ax = ap.heatmap(sentence, 0, 0)
    assert isinstance(ax, Axes)
    assert plt.get_fignums() == [ax.figure.number]
    for format in ("png", "svg", "pdf"):
        saved(ax.figure, format)
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("count", [1, 2, 8, 30, 64])
def test_labels_are_all_there_and_never_meet(gpt2, count):
    cap = ap.capture(gpt2(), [list(range(count))])
    ax = ap.heatmap(cap, 0, 0)
    assert texts(ax.get_xticklabels()) == [str(one) for one in range(count)]
    assert overlapping(ax.figure, ax) == []
    assert ax.get_yticklabels()[0].get_fontsize() >= 7
    assert max(ax.figure.get_size_inches()) < 13


@pytest.mark.parametrize("layout", [None, "constrained"])
def test_labels_are_thinned_where_they_would_meet(gpt2, layout):
    cap = relabelled(ap.capture(gpt2(), [list(range(64))]), [f"word{at}" for at in range(64)])
    figure = plt.figure(figsize=(4, 4), layout=layout)
    ax = ap.heatmap(cap, 0, 0, ax=figure.subplots())
    shown = ax.get_yticks().tolist()
    assert 8 < len(shown) < 64
    assert texts(ax.get_yticklabels()) == [f"word{at}" for at in shown]
    assert overlapping(figure, ax) == []


def test_labels_turn_where_they_are_wider_than_a_cell(cap):
    one = ap.capture(cap.lm, [TEXTS[1]])
    ax = ap.heatmap(relabelled(one, ["a", "b", "of", "to"]), 0, 0)
    assert [tick.get_rotation() for tick in ax.get_xticklabels()] == [0, 0, 0, 0]
    ax = ap.heatmap(relabelled(one, ["a", "unbelievably", "of", "中"]), 0, 0)
    assert [tick.get_rotation() for tick in ax.get_xticklabels()] == [0, 90, 90, 0]


def test_long_labels_are_shown_by_their_ends(cap):
    one = ap.capture(cap.lm, [TEXTS[1]])
    ax = ap.heatmap(relabelled(one, ["https://example.org/a/long/path", *"abc"], "n" * 99), 0, 0)
    assert ax.get_yticklabels()[0].get_text() == "https://exam…g/long/path"[:13] + "a/long/path"
    assert ax.get_title().startswith("n" * 24 + "…" + "n" * 23 + ", layer 0")


# Saved


def test_saves_as_png_svg_and_pdf(sentence):
    figure = ap.heatmap(sentence, 1, 3, by="word").figure
    with Image.open(io.BytesIO(saved(figure, "png"))) as image:
        assert image.format == "PNG"
        assert image.size == tuple(int(100 * side) for side in figure.get_size_inches())
    pdf = saved(figure, "pdf")
    assert pdf.startswith(b"%PDF-")
    assert pdf.endswith(b"%%EOF\n")
    words = {word.label for word in sentence.words_of(0).words}
    assert words | {"weight", "masked"} <= set(svg_texts(saved(figure, "svg")))


def svg_texts(svg):
    root = ElementTree.fromstring(svg)
    return ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("draw", [ap.heatmap, lambda cap, layer, head: ap.heatmap_grid(cap)[0, 0]])
def test_texts_are_data(gpt2, draw):
    cap = relabelled(ap.capture(gpt2(), [list(range(len(HOSTILE)))]), HOSTILE, name="$a$ & <i>")
    literal = [*HOSTILE[:-1], "<U+0001><U+FFFF>"]
    ax = draw(cap, 1, 1)
    assert texts(ax.get_yticklabels()) == literal
    found = svg_texts(saved(ax.figure, "svg"))
    assert [one for one in found if one in literal][: len(literal)]
    assert set(literal) <= set(found)
    assert any(one.startswith("$a$ & <i>") for one in found)
    for format in ("png", "pdf"):
        assert saved(ax.figure, format)
    assert not any(tick.get_parse_math() for tick in ax.get_yticklabels() + ax.get_xticklabels())


def test_tex_is_not_asked_about_texts(cap):
    with mpl.rc_context({"text.usetex": True}):
        ax = ap.heatmap(cap, 0, 0)
    assert not any(text.get_usetex() for text in [ax.title, *ax.get_yticklabels()])


def test_warns_once_of_what_no_font_has(cap, monkeypatch):
    monkeypatch.setattr(fonts, "_installed", lambda region: iter(()))
    one = relabelled(ap.capture(cap.lm, [TEXTS[1]]), ["中", "文", "中", "a"])
    for draw in (lambda: ap.heatmap(one, 0, 0), lambda: ap.heatmap_grid(one)[0, 0]):
        with pytest.warns(UserWarning, match=r"中 \(U\+4E2D\), 文 \(U\+6587\): the pict") as said:
            ax = draw()
        assert len(said) == 1
        assert said[0].filename == __file__
        assert texts(ax.get_yticklabels()) == ["<U+4E2D>", "<U+6587>", "<U+4E2D>", "a"]


# The grid


def test_grid_has_every_head_with_one_scale(sentence):
    grid = ap.heatmap_grid(sentence, by="word")
    assert grid.shape == (sentence.layers, sentence.calls[0].heads)
    for (layer, head), ax in np.ndenumerate(grid):
        wanted = ap.weights(sentence, layer, head, by="word")
        np.testing.assert_array_equal(cells(ax).data, wanted)
        assert ax.images[0].get_clim() == (0.0, 1.0)
    figure = grid[0, 0].figure
    assert len(figure.axes) == grid.size + 1
    assert scale(figure).get_ylabel() == "weight"
    assert figure.get_suptitle() == "bundled\nattention weights by word"
    assert (figure.get_supylabel(), figure.get_supxlabel()) == ("query word", "key word")
    words = [word.label for word in sentence.words_of(0).words]
    assert texts(grid[1, 0].get_yticklabels()) == texts(grid[-1, 2].get_xticklabels()) == words
    assert texts(grid[1, 1].get_yticklabels()) == texts(grid[1, 1].get_xticklabels()) == []


def test_grid_of_chosen_layers_and_heads(cap):
    grid = ap.heatmap_grid(cap, [2, 0], 5, text=1, vmax=0.5)
    assert grid.shape == (2, 1)
    np.testing.assert_array_equal(cells(grid[0, 0]).data, ap.weights(cap, 2, 5, text=1))
    assert [ax.get_ylabel() for ax in grid[:, 0]] == ["layer 2", "layer 0"]
    assert grid[0, 0].get_title() == "head 5"
    assert grid[1, 0].images[0].get_clim() == (0.0, 0.5)


@pytest.mark.parametrize("count", [8, 64])
def test_grids_parts_never_meet(gpt2, count):
    cap = relabelled(
        ap.capture(gpt2(), [list(range(count))]), ["unbelievably", *["word"] * (count - 1)]
    )
    grid = ap.heatmap_grid(cap)
    figure = grid[0, 0].figure
    assert overlapping(figure, grid[-1, 0]) == []
    below, left = grid[-1, 0], grid[0, 0]
    assert figure._supxlabel.get_window_extent().y1 < min(
        tick.get_window_extent().y0 for tick in below.get_xticklabels()
    )
    assert left.yaxis.label.get_window_extent().x1 < min(
        tick.get_window_extent().x0 for tick in left.get_yticklabels()
    )
    assert figure._supylabel.get_window_extent().x1 < left.yaxis.label.get_window_extent().x0
    legend = scale(figure).get_legend().get_window_extent()
    assert legend.x1 < figure.bbox.x1
    assert figure._suptitle.get_window_extent().y0 > left.title.get_window_extent().y1


# Refusals


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((3, 0), {}, "layer 3 is out of range"),
        ((0, 6), {}, "head 6 is out of range"),
        ((0, None), {}, "expected a whole number for head, got None"),
        ((0, 0), {"text": 2}, "text 2 is out of range"),
        ((0, 0), {"by": "letter"}, "by must be 'token' or 'word', got 'letter'"),
        ((0, 0), {"vmax": 0}, "vmax must be a weight above 0, got 0"),
        ((0, 0), {"vmax": float("nan")}, "vmax must be"),
        ((0, 0), {"vmax": float("inf")}, "vmax must be"),
        ((0, 0), {"ax": np.array([None])}, "ax must be one of matplotlib's Axes"),
    ],
)
def test_refuses_what_it_cannot_draw(cap, arguments, options, said):
    with pytest.raises(ap.InputError, match=said):
        ap.heatmap(cap, *arguments, **options)
    assert plt.get_fignums() == []


def test_grid_refuses_too_many_weights_and_unlike_layers(cap, monkeypatch):
    call = cap.calls[1]
    some = {name: getattr(call, name)[:, :3] for name in ("query", "key", "value")}
    fewer = dataclasses.replace(call, **some)
    unlike = dataclasses.replace(cap, calls=(cap.calls[0], fewer, cap.calls[2]))
    with pytest.raises(ap.InputError, match="the layers have 3 and 6 heads"):
        ap.heatmap_grid(unlike)
    assert ap.heatmap_grid(unlike, 1).shape == (1, 3)
    monkeypatch.setattr(plots, "PICTURE_BYTES", 8 * 81 * 18 - 1)
    with pytest.raises(ap.InputError, match="Choose fewer layers and heads"):
        ap.heatmap_grid(cap)
    assert ap.heatmap_grid(cap, [0, 1]).shape == (2, 6)


def test_weights_of_half_precision_are_drawn_in_float64(gpt2):
    cap = ap.capture(gpt2(dtype=torch.bfloat16), TEXTS)
    assert cells(ap.heatmap(cap, 0, 0)).dtype == np.float64


@pytest.mark.parametrize("vmax", ["x", 0, float("nan")])
def test_a_scale_that_ends_nowhere_is_refused(cap, vmax):
    with pytest.raises(ap.InputError, match="vmax must be a weight above 0, got"):
        ap.heatmap(cap, 0, 0, vmax=vmax)

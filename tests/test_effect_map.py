"""Pictures of effects: what is drawn, what is said of it, and which frames are refused."""

import io
from itertools import pairwise

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import attnprobe as ap
from attnprobe.views import fonts
from attnprobe.views.colours import SIGNED
from attnprobe.views.plots import picture

mpl.use("agg")
from matplotlib import pyplot as plt


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def by_head(**attrs):
    """3 layers of 5 heads, shuffled: layer + head/10, but of head 4 the other way round."""
    rows = [(layer, head, layer + head / 10) for layer in range(3) for head in range(5)]
    frame = pd.DataFrame(rows, columns=["layer", "head", "effect"]).sample(frac=1, random_state=0)
    frame.loc[frame["head"] == 4, "effect"] *= -1
    frame.attrs = attrs
    return frame


def by_position(tokens):
    rows = [
        (layer, at, token, 0.1 * layer - 0.01 * at)
        for layer in range(2)
        for at, token in enumerate(tokens)
    ]
    return pd.DataFrame(rows, columns=["layer", "position", "token", "restored"])


def cells(ax):
    (image,) = ax.images
    return image.get_array()


def texts(ticks):
    return [tick.get_text() for tick in ticks]


def title(ax):
    """In one line; no-break spaces stay."""
    return ax.get_title().replace("\n", " ")


def details(ax):
    """What stands between title and cells, each paragraph that is one line."""
    return [line for one in ax.texts for line in one.get_text().splitlines()]


def bar(ax):
    (image,) = ax.images
    return image.colorbar.ax


# What is drawn


def test_cells_are_the_values_whatever_the_order_of_rows():
    ax = ap.effect_map(by_head())
    layers, heads = np.indices((3, 5))
    np.testing.assert_allclose(cells(ax), (layers + heads / 10) * np.where(heads == 4, -1, 1))
    assert texts(ax.get_yticklabels()) == ["0", "1", "2"]
    assert texts(ax.get_xticklabels()) == ["0", "1", "2", "3", "4"]
    assert ax.yaxis_inverted()
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("layer", "head")


def test_colours_go_as_far_on_either_side_of_0():
    ax = ap.effect_map(by_head())
    assert ax.images[0].get_clim() == (-2.4, 2.4)
    ends = [mpl.colors.to_hex(ax.images[0].cmap(at)) for at in (0.0, 1.0)]
    assert ends == [SIGNED["light"][0], SIGNED["light"][2]]
    nothing = by_head().assign(effect=0.0)
    assert ap.effect_map(nothing).images[0].get_clim() == (-1.0, 1.0)


def test_positions_are_labelled_by_their_tokens():
    ax = ap.effect_map(by_position(["The", "$x$", "日", "The"]))
    assert texts(ax.get_xticklabels()) == ["The", "$x$", "日", "The"]
    assert ax.get_xlabel() == "token"
    assert not any(tick.get_parse_math() for tick in ax.get_xticklabels())
    np.testing.assert_allclose(cells(ax)[1], [0.1, 0.09, 0.08, 0.07])
    bare = by_position(["a", "b"]).drop(columns="token")
    assert texts(ap.effect_map(bare).get_xticklabels()) == ["0", "1"]


def test_title_and_scale_say_what_is_shown():
    attrs = {"model": "some model", "metric": "logit_difference", "unit": "logits"}
    ax = ap.effect_map(by_head(**attrs))
    assert title(ax) == "some model what silencing each head changes in the logit difference"
    assert details(ax) == []
    assert bar(ax).get_ylabel() == "change (logits)"
    attrs |= {"target": " house", "against": 13, "how": "resample", "seed": 3}
    ax = ap.effect_map(by_head(**attrs, unchanged=-0.12345, texts=3, text="One\ntext"))
    assert title(ax).endswith("changes in the logit of '\xa0house' less that of id 13")
    assert details(ax) == [
        "“One⏎text” and 2 more",
        "silenced: its output is another token's (seed 3)",
        "unchanged: -0.1235 logits",
    ]
    ax = ap.effect_map(by_head())  # read from a file: nothing is known but the columns
    assert ax.get_title() == "what silencing each head changes"
    ax = ap.effect_map(by_position(["a", "b"]))
    assert title(ax) == "share of the logit difference that is restored, by layer and position"
    assert bar(ax).get_ylabel() == "restored (1: all of it)"
    ax = ap.effect_map(by_head().rename(columns={"effect": "gain"}), value="gain")
    assert ax.get_title() == "gain by layer and head"
    assert bar(ax).get_ylabel() == "gain"


def contributions(**others):
    """Those of `by_head`, and of some more parts, each a number or one by layer."""
    frame = by_head().rename(columns={"effect": "contribution"}).assign(part="head")
    rows = [
        (part, layer, pd.NA, one)
        for part, given in others.items()
        for layer, one in (given.items() if isinstance(given, dict) else [(pd.NA, given)])
    ]
    rest = pd.DataFrame(rows, columns=["part", "layer", "head", "contribution"])
    frame = pd.concat([frame.astype({"contribution": object}), rest])
    return frame.astype({"layer": "Int64", "head": "Int64", "contribution": "float64"})


def test_a_layers_other_parts_stand_apart_from_its_heads():
    others = {"mlp": {1: -99.0, 0: 7.0}, "attention bias": {0: 1.5, 1: 2.5, 2: 3.5}}
    ax = ap.effect_map(contributions(embedding=50.0, **others))
    heads = cells(ap.effect_map(by_head()))
    np.testing.assert_array_equal(cells(ax)[:, :5], heads)
    assert np.ma.getmaskarray(cells(ax))[:, 5].all()
    np.testing.assert_array_equal(cells(ax)[:, 6], [1.5, 2.5, 3.5])
    np.testing.assert_array_equal(cells(ax)[:2, 7], [7.0, -99.0])
    assert texts(ax.get_xticklabels()) == ["0", "1", "2", "3", "4", "", "b_O", "mlp"]
    assert title(ax) == "what each head, attention bias (b_O) and MLP adds to the logit"
    assert details(ax) == ["not drawn: embedding"]
    assert texts(bar(ax).get_legend().get_texts()) == ["no number"]  # of layer 2's MLP
    hatched = [(patch.get_x(), patch.get_width()) for patch in ax.patches]
    assert hatched == [(-0.5, 5), (5.5, 2)]  # and not between them


def test_nothing_stands_apart_where_there_are_heads_alone():
    ax = ap.effect_map(contributions(embedding=50.0))
    np.testing.assert_array_equal(cells(ax), cells(ap.effect_map(by_head())))
    assert title(ax) == "what each head adds to the logit"
    assert bar(ax).get_legend() is None


def test_a_logit_taken_apart_is_drawn_with_its_words():
    cap = ap.capture(ap.load("bundled"), "The children were playing in the green park")
    found = ap.logit_contributions(cap, "house", against="garden", after="green")
    ax = ap.effect_map(found.frame)
    frame = found.frame.set_index("part")["contribution"]
    np.testing.assert_array_equal(cells(ax)[:, :6].ravel(), frame["head"])
    np.testing.assert_array_equal(cells(ax)[:, 7], frame["attention bias"])
    np.testing.assert_array_equal(cells(ax)[:, 8], frame["mlp"])
    assert bar(ax).get_legend() is None
    assert title(ax).endswith("MLP adds to the logit of '\xa0house' less that of '\xa0garden'")
    assert details(ax) == [
        "“The children were playing in the green park”",
        "after 'green' (token 6)",
        f"all parts add up to {found.logit_model:.4g} logits",
        "not drawn: embedding, position, final norm bias",
    ]


def test_what_was_not_measured_is_hatched_and_not_0():
    frame = by_head()
    ax = ap.effect_map(frame[(frame["layer"] != 1) | (frame["head"] == 3)])
    mask = np.ma.getmaskarray(cells(ax))
    assert mask[1].tolist() == [True, True, True, False, True]
    assert not mask[[0, 2]].any()
    assert texts(bar(ax).get_legend().get_texts()) == ["no number"]
    assert bar(ap.effect_map(frame)).get_legend() is None


def test_draws_what_is_measured():
    lm = ap.load("bundled")
    frame = ap.head_effects(lm, "The children were playing")
    ax = ap.effect_map(frame)
    np.testing.assert_array_equal(cells(ax), frame["effect"].to_numpy().reshape(4, 6))
    assert ax.get_title() == "bundled\nwhat silencing each head changes in the loss"
    assert details(ax) == [
        "“The children were playing”",
        "silenced: its output is zero",
        f"unchanged: {frame.attrs['unchanged']:.4g} nats",
    ]
    assert bar(ax).get_ylabel() == "change (nats)"
    pair = ("The old man shook", "The old woman shook", "his", "her")
    frame = ap.patch_effects(lm, *pair, by="head")
    ax = ap.effect_map(frame)
    np.testing.assert_array_equal(cells(ax), frame["restored"].to_numpy().reshape(4, 6))
    assert details(ax) == [
        "patched: the heads' outputs, clean into corrupt",
        "logit of '\xa0his' less that of '\xa0her':",
        "2.402 after the clean “The old man shook”",
        "-1.742 after the corrupt “The old woman shook”",
    ]


# Where it is drawn


def test_draws_in_the_ax_given_and_makes_no_figure():
    left, right = Figure(figsize=(9, 4), layout="constrained").subplots(1, 2)
    before = dict(mpl.rcParams)
    assert ap.effect_map(by_head(), ax=right) is right
    assert dict(mpl.rcParams) == before
    assert not left.images
    assert plt.get_fignums() == []


@pytest.mark.parametrize("count", [1, 4, 40, 300])
def test_labels_and_title_stay_within_the_picture_and_never_meet(count):
    ax = ap.effect_map(by_position([f"word{at}" for at in range(count)]))
    ax.figure.canvas.draw()
    boxes = [tick.get_window_extent() for tick in ax.get_xticklabels()]
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))
    title, whole = ax.title.get_window_extent(), ax.figure.bbox
    assert title.x0 >= 0
    assert title.x1 <= whole.x1
    assert min(box.y0 for box in boxes) >= 0
    assert max(ax.figure.get_size_inches()) < 20


SAID = {
    "metric": "logit",
    "target": "EXTRAORDINARILYLONG",
    "unit": "logits",
    "how": "mean",
    "unchanged": 2.5,
}
LENGTHY = [
    "THE CAT SAT ON THE MAT AND " * 20,
    "word" * 50,
    "many short words " * 20,
    "孩子們在公園裡玩" * 30,
]


@pytest.mark.parametrize("text", LENGTHY)
def test_what_is_said_stays_within_the_picture_and_lines_never_meet(text):
    ax = ap.effect_map(by_head(model="A/NAME-IN-CAPITALS-" * 5, text=text, **SAID))
    ax.figure.canvas.draw()
    (note,) = ax.texts
    below, above = note.get_window_extent(), ax.title.get_window_extent()
    whole = ax.figure.bbox
    assert ax.get_window_extent().y1 < below.y0 < below.y1 < above.y0 < above.y1 <= whole.y1
    assert min(below.x0, above.x0) >= 0
    assert max(below.x1, above.x1) <= whole.x1
    assert ax.get_window_extent().height > 100


def test_two_pictures_in_one_figure_keep_what_they_say_apart():
    left, right = Figure(figsize=(9, 4), layout="constrained").subplots(1, 2)
    for ax in (left, right):
        ap.effect_map(by_head(model="some model", text="many short words " * 20, **SAID), ax=ax)
    left.figure.canvas.draw()
    for one, other in ((left.title, right.title), (left.texts[0], right.texts[0])):
        assert one.get_window_extent().x1 < other.get_window_extent().x0


@pytest.mark.parametrize(("format", "begins"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_saves_as_a_picture(format, begins):
    assert picture(ap.effect_map(by_head()), format).startswith(begins)


def test_text_stays_text_in_svg():
    file = io.BytesIO()
    ap.effect_map(by_position(["</svg>", "b"])).figure.savefig(file, format="svg")
    assert b">&lt;/svg&gt;</text>" in file.getvalue()


def test_warns_once_of_what_no_font_has(monkeypatch):
    monkeypatch.setattr(fonts, "_installed", lambda region: iter(()))
    with pytest.warns(UserWarning, match=r"中 \(U\+4E2D\): the picture") as said:
        ap.effect_map(by_position(["中", "a"]))
    assert len(said) == 1
    assert said[0].filename == __file__


# What is refused


@pytest.mark.parametrize(
    ("frame", "options", "said"),
    [
        ([1, 2], {}, "expected a frame, as head_effects gives it; got list"),
        (by_head().drop(columns="head"), {}, "either head or position.*got layer, effect"),
        (by_head().assign(position=0), {}, "either head or position"),
        (by_head().rename(columns={"effect": "x"}), {}, "none of the columns restored, effect"),
        (
            by_head(),
            {"value": "loss"},
            "no column 'loss' of numbers; of numbers it has layer",
        ),
        (by_position(["a"]), {"value": "token"}, "no column 'token' of numbers"),
        (pd.concat([by_head(), by_head()]), {}, "several rows for one layer and head"),
        (by_head().assign(effect=np.nan), {}, "expected numbers in 'effect', got none"),
        (by_head().assign(effect=np.inf), {}, "or infinity"),
        (by_head()[:0], {}, "expected numbers in 'effect', got none"),
        (by_head(), {"ax": 3}, "ax must be one of matplotlib's Axes"),
        (by_head().assign(effect="1"), {}, "no column 'effect' of numbers"),
        (by_head().assign(effect=1j), {}, "no column 'effect' of numbers"),
        (by_head().assign(effect=True), {"value": "effect"}, "no column 'effect' of numbers"),
        (by_head().assign(effect=1e308), {}, "beyond ±1e\\+300"),
        (by_head().assign(layer="a"), {}, "whole numbers from 0 in 'layer', got 'a'"),
        (by_head().assign(layer=0.5), {}, "whole numbers from 0 in 'layer', got 0.5"),
        (by_head().assign(layer=-1), {}, "whole numbers from 0 in 'layer', got -1"),
        (by_head().assign(head=1j), {}, "whole numbers from 0 in 'head', got 1j"),
        (by_head().assign(head=True), {}, "whole numbers from 0 in 'head', got True"),
        (by_head().assign(head=np.inf), {}, "whole numbers from 0 in 'head', got inf"),
        (by_position(["a"]).assign(position=0.5), {}, "whole numbers from 0 in 'position'"),
        (contributions(mlp={0: 1e301}), {}, "beyond ±1e\\+300"),
    ],
)
def test_says_which_frames_it_cannot_draw(frame, options, said):
    with pytest.raises(ap.InputError, match=said):
        ap.effect_map(frame, **options)
    assert plt.get_fignums() == []

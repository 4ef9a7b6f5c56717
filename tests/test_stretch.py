"""A stretch of a text: the weights of some of its words, with what stands around them folded."""

from itertools import chain

import matplotlib as mpl
import numpy as np
import pytest
from samples import IDS, gpt_oss, mistral

import attnprobe as ap
from attnprobe.stretch import Stretch

mpl.use("agg")
from matplotlib import pyplot as plt

TEXT = "The unbelievable children weren't playing, and the unbelievable dog was playing"


@pytest.fixture(scope="module")
def story():
    """Words of several tokens, by a causal model."""
    return ap.capture(ap.load("bundled"), TEXT)


def groups_of(words, span, causal):
    """The tokens of each word that is shown, those around the span as one word each."""
    first, end = span
    tokens = [list(one.tokens) for one in words.words]
    before, after = (list(chain(*some)) for some in (tokens[:first], tokens[end:]))
    shown = [before, *tokens[first:end], after]
    return [one for one in (shown[:-1] if causal else shown) if one]


def folded(weights, groups):
    """The mean, over each group's rows, of the sum over each group's keys: (h, n, n)."""
    made = np.zeros((len(weights), len(groups), len(groups)))
    for i, queries in enumerate(groups):
        for j, keys in enumerate(groups):
            made[:, i, j] = weights[:, queries][:, :, keys].sum(-1).mean(-1)
    return made


SPANS = [(0, 3), (2, 7), (4, 5), (3, 11), (0, 11)]


def check(cap, span, layer=1):
    words = cap.words_of(0)
    whole = ap.weights(cap, layer).numpy()
    stretch = Stretch.of(cap, 0, span)
    heads = list(range(len(whole)))
    shown = stretch.shown(layer, heads)
    by_word = groups_of(words, span, cap.causal)
    first, end = (words.words[at].tokens for at in (span[0], span[1] - 1))
    by_token = [[one] for one in range(first[0], end[-1] + 1)]
    if first[0]:
        by_token.insert(0, list(range(first[0])))
    if not cap.causal and end[-1] + 1 < whole.shape[-1]:
        by_token.append(list(range(end[-1] + 1, whole.shape[-1])))
    for by, groups in (("token", by_token), ("word", by_word)):
        weights, allowed = shown.by(by)
        np.testing.assert_allclose(weights, folded(whole, groups), atol=1e-14)
        if cap.call(layer).terms.sinks is None:
            np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-12)
        assert len(stretch.words.labels(by)) == len(groups)
        assert (weights.amax(0) > 0).equal(allowed)
    return stretch


@pytest.mark.parametrize("span", SPANS)
def test_a_stretch_is_the_whole_folded(story, span):
    stretch = check(story, span)
    own = [one.label for one in story.words_of(0).words][slice(*span)]
    assert stretch.words.labels("word")[stretch.before :] == own


@pytest.mark.parametrize("span", SPANS)
def test_a_stretch_of_a_bidirectional_text_folds_what_stands_after_as_well(bidirectional, span):
    stretch = check(bidirectional, span)
    assert stretch.after == (span[1] < len(IDS))


@pytest.mark.parametrize("span", SPANS)
def test_a_stretch_of_windowed_attention(span):
    check(ap.capture(mistral(window=4), IDS), span)


@pytest.mark.parametrize("span", SPANS)
def test_a_stretch_where_sinks_take_a_share(span):
    cap = ap.capture(gpt_oss(), IDS)
    check(cap, span)
    assert ap.weights(cap, 1).sum(-1).min() < 0.9


def test_what_is_folded_says_how_much_it_is(story, bidirectional):
    assert Stretch.of(story, 0, (2, 5)).words.labels("word")[0] == "⋯ 2 words before"
    assert Stretch.of(story, 0, (1, 5)).words.labels("word")[0] == "⋯ 1 word before"
    tokens = sum(len(one.tokens) for one in story.words_of(0).words[:2])
    assert Stretch.of(story, 0, (2, 5)).words.labels("token")[0] == f"⋯ {tokens} tokens before"
    both = Stretch.of(bidirectional, 0, (2, 5)).words.labels("token")
    assert (both[0], both[-1]) == ("⋯ 2 tokens before", "⋯ 6 tokens after")


def test_without_a_span_nothing_is_folded(story):
    stretch = Stretch.of(story, 0, None)
    assert stretch.words is story.words_of(0)
    assert stretch.title == ""
    assert stretch.shown(1, [2]).weights[0].equal(ap.weights(story, 1, 2))


@pytest.mark.parametrize(
    ("span", "says"),
    [
        ((3, 3), "span 3:3 is out of range"),
        ((-1, 3), "span -1:3 is out of range"),
        ((0, 99), "has 12 words"),
        ((1.0, 3), "whole number for span"),
        (5, "expected span=\\(start, stop\\)"),
        ("0:3", "expected span=\\(start, stop\\)"),
        ((1, 2, 3), "expected span=\\(start, stop\\)"),
    ],
)
@pytest.mark.parametrize("view", [ap.heatmap, ap.attention_view])
def test_a_span_that_is_none_is_refused(story, view, span, says):
    with pytest.raises(ap.InputError, match=says):
        view(story, 1, 2, span=span)


@pytest.mark.parametrize("by", ["token", "word"])
def test_a_heat_map_of_a_span_shows_its_words_and_says_which(story, by):
    ax = ap.heatmap(story, 1, 2, by=by, span=(2, 7))
    expected, allowed = Stretch.of(story, 0, (2, 7)).shown(1, [2]).by(by)
    drawn = ax.get_images()[0].get_array()
    np.testing.assert_array_equal(drawn.filled(0.0), expected[0])
    np.testing.assert_array_equal(~drawn.mask, allowed)
    assert "words 2 to 6 of 12" in ax.get_title()
    labels = [one.get_text() for one in ax.get_yticklabels()]
    assert labels == Stretch.of(story, 0, (2, 7)).words.labels(by)
    grid = ap.heatmap_grid(story, [0, 1], [2, 1], by=by, span=(2, 7))
    drawn = grid[1, 0].get_images()[0].get_array().filled(0.0)
    np.testing.assert_allclose(drawn, expected[0], atol=1e-15)
    plt.close("all")

"""Roles of heads by repeated random tokens, against plain loops over the weights."""

import matplotlib as mpl
import numpy as np
import pytest
import torch
from samples import mistral

import attnprobe as ap

mpl.use("agg")
from matplotlib import pyplot as plt

from attnprobe import roles

N, TEXTS = 7, 3


@pytest.fixture(scope="module")
def lm():
    return ap.load("bundled")


def drawn(lm, monkeypatch, **options):
    """What `head_roles` gives, and the ids that it ran the model on."""
    seen = []
    own = roles.capture

    def watched(given, ids):
        seen.append(ids)
        return own(given, ids)

    monkeypatch.setattr(roles, "capture", watched)
    return ap.head_roles(lm, **options), seen[0]


@pytest.mark.parametrize("first", [True, False, 17])
@pytest.mark.parametrize("make", [lambda lm: lm, lambda _: mistral(window=9)])
def test_scores_are_the_mean_weights_of_their_rows(lm, make, first, monkeypatch):
    model = make(lm)
    frame, ids = drawn(model, monkeypatch, tokens=N, texts=TEXTS, seed=3, first=first)
    cap = ap.capture(model, ids)
    skip = ids.shape[1] - 2 * N
    for row in frame.itertuples():
        sums = dict.fromkeys(("previous", "duplicate", "induction"), 0.0)
        for text in range(TEXTS):
            weights = ap.weights(cap, row.layer, row.head, text=text)
            for i in range(2 * N):
                to = {"previous": i - 1, "duplicate": i - N, "induction": i - N + 1}
                rows = {"previous": 2 * N - 1, "duplicate": N, "induction": N}
                for name, j in to.items():
                    if (i >= 1) if name == "previous" else (i >= N):
                        sums[name] += float(weights[skip + i, skip + j]) / rows[name] / TEXTS
        for name, expected in sums.items():
            np.testing.assert_allclose(getattr(row, name), expected, rtol=1e-12)


def test_the_texts_are_different_random_tokens_twice(lm, monkeypatch):
    frame, ids = drawn(lm, monkeypatch, tokens=N, texts=TEXTS)
    start, copies = ids[:, 0], ids[:, 1:]
    assert (start == lm.tokenizer.bos_token_id).all()
    assert frame.attrs["first"] == lm.tokenizer.bos_token_id
    assert copies.shape == (TEXTS, 2 * N)
    assert copies[:, :N].equal(copies[:, N:])
    for row in copies[:, :N].tolist():
        assert len(set(row)) == N
        assert not set(row) & set(lm.tokenizer.all_special_ids)
    assert not copies[0].equal(copies[1])
    again, same = drawn(lm, monkeypatch, tokens=N, texts=TEXTS)
    assert same.equal(ids)
    assert again.equals(frame)
    _, other = drawn(lm, monkeypatch, tokens=N, texts=TEXTS, seed=1)
    assert not other.equal(ids)
    _, bare = drawn(lm, monkeypatch, tokens=N, texts=TEXTS, first=False)
    assert bare.equal(copies)


def test_ids_range_over_the_whole_vocabulary(monkeypatch):
    frame, ids = drawn(mistral(), monkeypatch, tokens=101, texts=2, first=False)
    assert ids[0, :101].sort().values.equal(torch.arange(101))
    assert (len(frame), frame.attrs["first"]) == (12, None)


def test_the_bundled_models_induction_and_previous_token_heads(lm):
    frame = ap.head_roles(lm).set_index(["layer", "head"])
    roles_of = frame.role[frame.role != ""].to_dict()
    assert roles_of == {(0, 0): "previous", (1, 0): "induction"}
    assert frame.induction[1, 0] > 0.9
    assert frame.attrs["threshold"] == 0.4
    assert (ap.head_roles(lm, threshold=0.97).role != "").sum() == 1
    assert set(ap.head_roles(lm, threshold=0.0).role) <= set(roles.ROLES)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": 1}, "tokens ≥ 2"),
        ({"texts": 0}, "texts ≥ 1"),
        ({"tokens": 2.0}, "whole number for tokens"),
        ({"tokens": 128}, "at most 256"),
        ({"seed": "a"}, "whole number for seed"),
        ({"first": "a"}, "whole number for first"),
        ({"first": 10**6}, "vocabulary"),
        ({"threshold": "high"}, "threshold from 0 to 1"),
        ({"threshold": True}, "threshold from 0 to 1"),
        ({"threshold": 2}, "threshold from 0 to 1"),
        ({"threshold": float("nan")}, "threshold from 0 to 1"),
    ],
)
def test_options_out_of_their_range_are_refused(lm, options, says):
    with pytest.raises(ap.InputError, match=says):
        ap.head_roles(lm, **options)


def test_a_vocabulary_too_small_and_a_bidirectional_model_are_refused(bidirectional):
    with pytest.raises(ap.InputError, match="102 different tokens, got 101"):
        ap.head_roles(mistral(), tokens=102)
    with pytest.raises(ap.InputError, match="expected a causal model"):
        ap.head_roles(bidirectional.lm.model, tokens=4)


@pytest.mark.parametrize("value", ["induction", "entropy", "value_previous"])
def test_a_map_of_a_statistic_goes_from_0_up_and_says_what_it_is(lm, value):
    frame = ap.head_roles(lm) if value == "induction" else ap.head_stats(ap.capture(lm, "a b c d"))
    ax = ap.effect_map(frame, value=value)
    image = ax.get_images()[0]
    wide = frame.pivot_table(index="layer", columns="head", values=value)
    np.testing.assert_array_equal(image.get_array().filled(np.nan), wide.to_numpy())
    assert image.norm.vmin == 0.0
    assert image.norm.vmax == frame[value].max()
    said = {"induction": "behind equal", "entropy": "entropy of the weights"}
    assert said.get(value, "by value, of the token before") in ax.get_title().replace("\n", " ")
    plt.close("all")

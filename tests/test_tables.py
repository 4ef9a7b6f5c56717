import numpy as np
import pytest
import torch

import attnprobe as ap

TEXTS = [[5, 17, 23, 5, 99, 42, 8, 71, 2], [3, 60, 11, 72]]


def expected_weights(cap, layer, head, ids):
    """One text's weights from the model's own query and key, in plain numpy."""
    at = cap.positions(ids).numpy()
    call = cap.calls[layer]
    query, key = (x[ids, head].double().numpy()[at] for x in (call.query, call.key))
    scores = query @ key.T / np.sqrt(query.shape[1])
    scores[np.triu_indices(len(at), 1)] = -np.inf
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return scores, e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("text", [0, 1])
def test_weights_and_scores_equal_numpy(gpt2, side, text):
    cap = ap.capture(gpt2(), TEXTS, padding_side=side)
    scores, weights = expected_weights(cap, 2, 4, text)
    np.testing.assert_allclose(ap.weights(cap, 2, 4, text=text), weights, rtol=1e-12)
    np.testing.assert_allclose(ap.scores(cap, 2, 4, text=text), scores, rtol=1e-12)
    whole = ap.weights(cap, 2, text=text)
    assert whole.shape == (6, len(TEXTS[text]), len(TEXTS[text]))
    assert torch.equal(whole[4], ap.weights(cap, 2, 4, text=text))
    torch.testing.assert_close(whole.sum(-1), torch.ones_like(whole.sum(-1)), rtol=1e-14, atol=0)
    assert whole.triu(1).abs().sum() == 0


def test_table_has_a_row_for_each_past_pair(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    frame = ap.table(cap, 2, 4, text=0)
    assert list(frame.columns) == [
        "layer",
        "head",
        "query_pos",
        "query",
        "key_pos",
        "key",
        "score",
        "weight",
    ]
    assert len(frame) == 9 * 10 // 2
    assert (frame.key_pos <= frame.query_pos).all()
    scores, weights = expected_weights(cap, 2, 4, 0)
    at = (frame.query_pos, frame.key_pos)
    np.testing.assert_allclose(frame.weight, weights[at], rtol=1e-12)
    np.testing.assert_allclose(frame.score, scores[at], rtol=1e-12)
    assert frame.key[frame.key_pos == 4].unique().tolist() == ["99"]


def test_table_of_all_layers_and_heads(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    frame = ap.table(cap, text=1)
    assert len(frame) == 3 * 6 * 4 * 5 // 2
    sums = frame.groupby(["layer", "head", "query_pos"]).weight.sum()
    assert len(sums) == 3 * 6 * 4
    np.testing.assert_allclose(sums, 1, rtol=1e-14)
    assert len(ap.table(cap, head=5)) == 3 * 45


def test_attended_is_the_strongest_keys_first(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    frame = ap.attended(cap, "42", layer=1, head=2, top=3)
    _, weights = expected_weights(cap, 1, 2, 0)
    order = np.argsort(-weights[5, :6])[:3]
    assert frame.key_pos.tolist() == order.tolist()
    assert frame.key.tolist() == [str(TEXTS[0][at]) for at in order]
    np.testing.assert_allclose(frame.weight, weights[5, order], rtol=1e-12)
    assert set(frame.query_pos) == {5}


def test_attended_by_default_is_the_mean_over_all_heads(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    frame = ap.attended(cap, "42", top=99)
    every = [expected_weights(cap, n, h, 0)[1][5, :6] for n in range(3) for h in range(6)]
    assert len(frame) == 6  # itself and what stands before it; never the future
    np.testing.assert_allclose(frame.weight, np.mean(every, 0)[frame.key_pos], rtol=1e-12)
    assert frame.weight.is_monotonic_decreasing


def test_a_word_that_occurs_twice(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    assert set(ap.attended(cap, "5", layer=0).query_pos) == {0}
    assert set(ap.attended(cap, "5", layer=0, nth=1).query_pos) == {3}
    with pytest.raises(ap.InputError, match="occurs 2 times; nth counts from 0, got 2"):
        ap.attended(cap, "5", nth=2)


def test_a_word_that_is_not_there_lists_near_ones():
    cap = ap.capture(ap.load("bundled"), "The children were playing in the green park")
    with pytest.raises(ap.InputError, match=r"'playin' is not a token.*near ones:.*playing"):
        ap.attended(cap, "playin")
    with pytest.raises(ap.InputError, match=r"its tokens: The \| children"):
        ap.attended(cap, "xylophone")


@pytest.mark.parametrize("call", [ap.table, ap.weights, ap.scores])
def test_out_of_range_says_the_range(gpt2, call):
    cap = ap.capture(gpt2(), TEXTS)
    with pytest.raises(ap.InputError, match=r"layer 3 is out of range.* 3 .*0 to 2"):
        call(cap, 3, 0)
    with pytest.raises(ap.InputError, match="layer -1 is out of range"):
        call(cap, -1, 0)
    with pytest.raises(ap.InputError, match=r"head 6 is out of range: layer 1 has 6.*0 to 5"):
        call(cap, 1, 6)
    with pytest.raises(ap.InputError, match="text 2 is out of range: the capture holds 2"):
        call(cap, 1, 1, text=2)
    with pytest.raises(ap.InputError, match="top must be at least 1, got 0"):
        ap.attended(cap, "5", top=0)

import numpy as np
import pandas as pd
import pytest
import torch

import attnprobe as ap
from attnprobe import recompute

TEXT = "The children saw the dog, and the dog saw them unbelievably well"


@pytest.fixture(scope="module")
def cap():
    return ap.capture(ap.load("bundled"), TEXT)


@pytest.fixture(scope="module")
def matrices(cap):
    """Every head's weights by word, (layers, heads, N, N), by loops over the tokens' weights."""
    words = cap.words_of(0).words
    result = []
    for layer in range(cap.layers):
        by_token = ap.weights(cap, layer).numpy()
        result.append(by_loops(by_token, words))
    return np.array(result)


def by_loops(by_token, words):
    return np.array(
        [
            [
                [np.mean([sum(head[i, j] for j in k.tokens) for i in q.tokens]) for k in words]
                for q in words
            ]
            for head in by_token
        ]
    )


def at_of(cap, word, nth=0):
    return [at for at, one in enumerate(cap.words_of(0).words) if one.text == word][nth]


def test_one_heads_strongest_words_first(cap, matrices):
    frame = ap.attended(cap, "saw", layer=1, head=2, top=3)
    at = at_of(cap, "saw")
    row = matrices[1, 2, at, : at + 1]
    order = np.argsort(-row)[:3]
    assert frame.key_pos.tolist() == order.tolist()
    assert frame.key.tolist() == [cap.words_of(0).words[key].text for key in order]
    np.testing.assert_allclose(frame.weight, row[order], rtol=1e-12)
    assert set(frame.query_pos) == {at}
    assert set(frame["query"]) == {"saw"}


@pytest.mark.parametrize(
    ("layer", "head"), [(None, None), (2, None), ([0, 3], None), ([0, 3], [1, 4])]
)
@pytest.mark.parametrize("how", ["mean", "max"])
def test_over_many_heads(cap, matrices, layer, head, how):
    frame = ap.attended(cap, "dog", top=99, layer=layer, head=head, how=how)
    layers = range(len(matrices)) if layer is None else np.atleast_1d(layer)
    heads = range(matrices.shape[1]) if head is None else np.atleast_1d(head)
    at = at_of(cap, "dog")
    rows = np.array([matrices[n, h, at] for n in layers for h in heads])
    wanted = getattr(rows, how)(0)[: at + 1]
    assert len(frame) == at + 1  # itself and what stands before it; never the future
    np.testing.assert_allclose(frame.weight, wanted[frame.key_pos], rtol=1e-12)
    assert frame.weight.is_monotonic_decreasing
    if how == "mean":
        assert frame.weight.sum() == pytest.approx(1)


def test_rollout_by_loops(cap):
    flow = np.eye(cap.input_ids.shape[1])
    for layer in range(3):
        mean = ap.weights(cap, layer).numpy().mean(0)
        flow = (0.5 * mean + 0.5 * np.eye(len(mean))) @ flow
    at = at_of(cap, "well")
    wanted = by_loops(flow[None], cap.words_of(0).words)[0][at]
    frame = ap.attended(cap, "well", top=99, how="rollout", layer=2)
    np.testing.assert_allclose(frame.weight, wanted[frame.key_pos], rtol=1e-12)
    assert frame.weight.sum() == pytest.approx(1)
    with pytest.raises(ap.InputError, match="rollout goes from the first layer to one"):
        ap.attended(cap, "well", how="rollout", layer=[1, 2])
    with pytest.raises(ap.InputError, match="rollout mixes the weights of all heads"):
        ap.attended(cap, "well", how="rollout", head=1)


def test_by_value_is_the_length_of_what_each_brings(cap):
    call = cap.calls[1]
    weights = ap.weights(cap, 1, 4).numpy()
    out = call.module.c_proj.weight.detach().double().numpy()[4 * 32 : 5 * 32]  # W_O of head 4
    brought = call.value[0, 4].double().numpy() @ out
    shares = weights * np.linalg.norm(brought, axis=-1)
    shares /= shares.sum(-1, keepdims=True)
    at = at_of(cap, "dog", 1)
    wanted = by_loops(shares[None], cap.words_of(0).words)[0][at]
    frame = ap.attended(cap, "dog", nth=1, layer=1, head=4, weigh="value", top=99)
    np.testing.assert_allclose(frame.value_share, wanted[frame.key_pos], rtol=1e-12)
    assert frame.value_share.sum() == pytest.approx(1)
    assert not np.allclose(wanted, by_loops(weights[None], cap.words_of(0).words)[0][at])


def test_by_value_needs_a_known_w_o():
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        hidden_size=20,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=7,
        vocab_size=101,
    )
    other = ap.capture(GraniteForCausalLM(config).eval(), [5, 6, 7])
    with pytest.raises(ap.InputError, match=r"needs W_O, but what GraniteAttention does between"):
        ap.attended(other, "6", weigh="value")
    assert len(ap.attended(other, "6")) == 2


def test_every_word_in_turn(cap):
    count = len(cap.words_of(0).words)
    frame = ap.attended(cap, layer=1, top=3)
    assert frame.groupby("query_pos").size().tolist() == [min(3, at + 1) for at in range(count)]
    one = frame[frame.query_pos == 4].reset_index(drop=True)
    # A product of one row and one of many may differ in the last bit.
    pd.testing.assert_frame_equal(one, ap.attended(cap, 4, layer=1, top=3), rtol=1e-14, atol=0)
    frame = ap.attended_by(cap, layer=1, top=3)
    assert frame.groupby("key_pos").size().tolist() == [min(3, count - at) for at in range(count)]
    assert ap.styled(frame).to_html().count("rgba") > 3


def test_a_word_can_be_asked_for_as_it_is_shown():
    cap = ap.capture(ap.load("bundled"), "Hi\n\nthere")
    shown = [one.label for one in cap.words_of(0).words]
    at = next(number for number, label in enumerate(shown) if "⏎" in label)
    for word in (shown[at], cap.words_of(0).words[at].text, at, np.int64(at)):
        assert set(ap.attended(cap, word).query_pos) == {at}


def test_skip_first_renormalises_and_says_so(cap, matrices):
    frame = ap.attended(cap, "dog", layer=1, head=0, top=99, skip_first=True)
    at = at_of(cap, "dog")
    row = matrices[1, 0, at, 1 : at + 1]
    assert "weight" not in frame
    assert 0 not in set(frame.key_pos)
    np.testing.assert_allclose(
        frame.weight_without_first, (row / row.sum())[frame.key_pos - 1], rtol=1e-12
    )
    assert frame.weight_without_first.sum() == pytest.approx(1)


def test_skip_first_of_every_word_in_turn(cap):
    frame = ap.attended(cap, top=2, skip_first=True)
    count = len(cap.words_of(0).words)
    assert frame.query_pos.dtype == frame.key_pos.dtype == np.int64
    wanted = [at for at in range(count) for _ in range(min(2, at))]  # the first has none left
    assert frame.query_pos.tolist() == wanted
    assert ap.attended(cap, "The", skip_first=True).empty


def test_attended_by_is_a_column_of_what_comes_later(cap, matrices):
    frame = ap.attended_by(cap, "saw", layer=1, head=3, top=99)
    at = at_of(cap, "saw")
    count = len(matrices[1, 3])
    assert sorted(frame.query_pos) == list(range(at, count))
    assert set(frame.key_pos) == {at}
    np.testing.assert_allclose(frame.weight, matrices[1, 3, frame.query_pos, at], rtol=1e-12)
    assert frame.weight.is_monotonic_decreasing


def test_a_word_that_occurs_twice_or_by_position(cap):
    first, second = at_of(cap, "dog"), at_of(cap, "dog", 1)
    assert set(ap.attended(cap, "dog").query_pos) == {first}
    assert set(ap.attended(cap, "dog", nth=1).query_pos) == {second}
    assert set(ap.attended(cap, second).query_pos) == {second}
    with pytest.raises(ap.InputError, match="'dog' occurs 2 times; nth counts from 0, got 2"):
        ap.attended(cap, "dog", nth=2)
    with pytest.raises(ap.InputError, match="word 99 is out of range"):
        ap.attended(cap, 99)


def test_a_word_that_is_not_there_lists_near_ones(cap):
    with pytest.raises(ap.InputError, match=r"'childen' is not a word.*near ones: children"):
        ap.attended(cap, "childen")
    with pytest.raises(ap.InputError, match=r"its words: The \| children"):
        ap.attended(cap, "xylophone")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 0}, "top must be at least 1, got 0"),
        ({"top": True}, "a whole number for top, got True"),
        ({"nth": 1.0}, "a whole number for nth, got 1.0"),
        ({"text": None}, "a whole number for text, got None"),
        ({"layer": "1"}, "a whole number for layer, got '1'"),
        ({"how": "median"}, "'mean', 'max' or 'rollout', got 'median'"),
        ({"weigh": "length"}, "'weight' or 'value', got 'length'"),
        ({"layer": 4}, "layer 4 is out of range: there are 4, numbered 0 to 3"),
        ({"head": [0, 6]}, "head 6 is out of range"),
        ({"text": 1}, "text 1 is out of range"),
    ],
)
def test_bad_options(cap, options, message):
    with pytest.raises(ap.InputError, match=message):
        ap.attended(cap, "dog", **options)


def test_an_encoder_looks_both_ways():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=9,
        vocab_size=101,
        initializer_range=0.5,
    )
    cap = ap.capture(BertModel(config).eval(), [5, 6, 7, 8])
    frame = ap.attended(cap, "6", top=9)
    assert sorted(frame.key_pos) == [0, 1, 2, 3]
    assert len(ap.attended_by(cap, "6", top=9)) == 4


def test_a_position_may_be_said_as_text(cap):
    by_number = ap.attended(cap, 2)
    pd.testing.assert_frame_equal(ap.attended(cap, "2"), by_number)
    with pytest.raises(ap.InputError, match="word 99 is out of range"):
        ap.attended(cap, "99")


@pytest.mark.parametrize("weigh", ["weight", "value"])
@pytest.mark.parametrize("how", ["mean", "max"])
def test_one_word_alone_is_its_row_of_all(cap, weigh, how):
    every = ap.attended(cap, top=99, how=how, weigh=weigh)
    for at in range(len(cap.words_of(0).words)):
        own = ap.attended(cap, at, top=99, how=how, weigh=weigh)
        want = every[every.query_pos == at].sort_values("key_pos").reset_index(drop=True)
        pd.testing.assert_frame_equal(
            own.sort_values("key_pos").reset_index(drop=True), want, rtol=1e-12
        )


def test_of_one_word_only_its_own_rows_are_computed(cap, monkeypatch):
    asked = []
    own = recompute.softmax_weights

    def watched(*args, rows):
        asked.append(rows)
        return own(*args, rows=rows)

    monkeypatch.setattr(recompute, "softmax_weights", watched)
    at = at_of(cap, "unbelievably")
    tokens = cap.words_of(0).words[at].tokens
    assert len(tokens) > 1
    ap.attended(cap, "unbelievably")
    assert asked == [slice(tokens[0], tokens[-1] + 1)] * cap.layers


def test_a_number_may_be_a_tensor_without_axes(gpt2):
    cap = ap.capture(gpt2(), [5, 17, 23, 8])
    one = torch.tensor(1)
    assert torch.equal(ap.weights(cap, one, one), ap.weights(cap, 1, 1))
    assert torch.equal(ap.scores(cap, 1, np.array(2)), ap.scores(cap, 1, 2))
    assert ap.attended(cap, layer=one).equals(ap.attended(cap, layer=1))
    with pytest.raises(ap.InputError, match="expected a whole number for layer"):
        ap.table(cap, torch.tensor(1.5))
    for options in ({"layers": one}, {"heads": one}):
        with pytest.raises(ap.InputError), ap.edit(gpt2(), scale=1.0, **options):
            pass
    with pytest.raises(ap.InputError, match="expected a list of sizes"):
        ap.scale_variance(gpt2(), [5, 17], sizes=one)

import dataclasses
import time

import numpy as np
import pandas as pd
import pytest
import torch

import attnprobe as ap
from attnprobe.recompute import to_words
from attnprobe.tables import told_apart
from attnprobe.words import Word, Words

TEXTS = [[5, 17, 23, 5, 99, 42, 8, 71, 2], [3, 60, 11, 72]]
SENTENCE = "The children were playing unbelievably in the park, the green park."


def expected(cap, layer, head, text):
    """One text's q·k, scores and weights from the model's own query and key, in plain numpy."""
    at = cap.positions(text).numpy()
    call = cap.calls[layer]
    query, key = (x[text, head].double().numpy()[at] for x in (call.query, call.key))
    raw = query @ key.T
    scores = raw / np.sqrt(query.shape[1])
    masked = scores.copy()
    masked[np.triu_indices(len(at), 1)] = -np.inf
    e = np.exp(masked - masked.max(-1, keepdims=True))
    return raw, scores, masked, e / e.sum(-1, keepdims=True)


def by_word(weights, words):
    """Clark et al.'s rule by loops: the mean over the query's tokens of the sum over the key's."""
    return np.array(
        [
            [np.mean([sum(weights[i, j] for j in k.tokens) for i in q.tokens]) for k in words.words]
            for q in words.words
        ]
    )


@pytest.fixture(scope="module")
def sentence():
    return ap.capture(ap.load("bundled"), SENTENCE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("text", [0, 1])
def test_weights_and_scores_equal_numpy(gpt2, side, text):
    cap = ap.capture(gpt2(), TEXTS, padding_side=side)
    _, _, masked, weights = expected(cap, 2, 4, text)
    np.testing.assert_allclose(ap.weights(cap, 2, 4, text=text), weights, rtol=1e-12)
    np.testing.assert_allclose(ap.scores(cap, 2, 4, text=text), masked, rtol=1e-12)
    whole = ap.weights(cap, 2, text=text)
    assert whole.shape == (6, len(TEXTS[text]), len(TEXTS[text]))
    assert torch.equal(whole[4], ap.weights(cap, 2, 4, text=text))
    torch.testing.assert_close(whole.sum(-1), torch.ones_like(whole.sum(-1)), rtol=1e-14, atol=0)
    assert whole.triu(1).abs().sum() == 0


def test_weights_by_word_are_clarks(sentence):
    words = sentence.words_of(0)
    assert any(len(word.tokens) > 1 for word in words.words)
    found = ap.weights(sentence, 1, 3, by="word").numpy()
    np.testing.assert_allclose(found, by_word(expected(sentence, 1, 3, 0)[3], words), rtol=1e-12)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-14)
    assert np.triu(found, 1).sum() == 0


def test_a_words_own_later_tokens_count_for_itself():
    # Two words, the second of two tokens. Row 1 sees the first two tokens, row 2 all three.
    weights = torch.tensor([[1, 0, 0], [0.25, 0.75, 0], [0.5, 0.125, 0.375]]).double()
    words = Words(
        text="a bc",
        tokens=("a", "b", "c"),
        shared=(False,) * 3,
        words=(
            Word("a", "a", "", (0, 1), (0,), "word"),
            Word("bc", "bc", " ", (2, 4), (1, 2), "word"),
        ),
        word_of=(0, 1, 1),
        tail="",
    )
    # From "bc" to "a": (0.25 + 0.5) / 2; to itself (0.75 + 0) / 2 + (0.125 + 0.375) / 2.
    assert to_words(weights, words).tolist() == [[1, 0], [0.375, 0.625]]


def test_table_by_token_has_a_row_for_each_past_pair(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    frame = ap.table(cap, 2, 4, text=0)
    assert list(frame.columns) == [
        *("text", "layer", "head", "query_pos", "query", "key_pos", "key"),
        *("score_raw", "score", "masked", "weight"),
    ]
    assert len(frame) == 9 * 10 // 2
    assert (frame.key_pos <= frame.query_pos).all()
    assert not frame.masked.any()
    raw, scores, _, weights = expected(cap, 2, 4, 0)
    at = (frame.query_pos, frame.key_pos)
    np.testing.assert_allclose(frame.score_raw, raw[at], rtol=1e-12)
    np.testing.assert_allclose(frame.score, scores[at], rtol=1e-12)
    np.testing.assert_allclose(frame.weight, weights[at], rtol=1e-12)
    assert frame.key[frame.key_pos == 4].unique().tolist() == ["99"]


def test_table_with_the_future_says_what_is_masked(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    frame = ap.table(cap, 2, [4, 1], text=1, future=True)
    assert len(frame) == 2 * 16
    assert frame.masked.tolist() == (frame.key_pos > frame.query_pos).tolist()
    raw, _, _, weights = expected(cap, 2, 1, 1)
    one = frame[frame["head"] == 1]
    np.testing.assert_allclose(one.score_raw, raw.flatten(), rtol=1e-12)
    assert one.weight[one.masked].eq(0).all()
    np.testing.assert_allclose(one.weight, weights.flatten(), rtol=1e-12)


def test_table_of_all_texts_layers_and_heads(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    frame = ap.table(cap)
    assert len(frame) == 3 * 6 * (45 + 10)
    sums = frame.groupby(["text", "layer", "head", "query_pos"]).weight.sum()
    assert len(sums) == 3 * 6 * 13
    np.testing.assert_allclose(sums, 1, rtol=1e-14)
    assert set(frame["query"]) == {str(one) for text in TEXTS for one in text}
    assert len(ap.table(cap, [0, 2], [5], text=0)) == 2 * 45
    row = frame.query("text == 1 and layer == 2 and head == 5 and query_pos == 3 and key_pos == 1")
    assert row["query"].tolist() == ["72"]
    assert row.weight.item() == pytest.approx(expected(cap, 2, 5, 1)[3][3, 1], rel=1e-12)


def test_table_by_word(sentence):
    words = sentence.words_of(0)
    frame = ap.table(sentence, 1, 3, by="word")
    count = len(words.words)
    assert len(frame) == count * (count + 1) // 2
    assert "score" not in frame
    wanted = by_word(expected(sentence, 1, 3, 0)[3], words)
    np.testing.assert_allclose(frame.weight, wanted[frame.query_pos, frame.key_pos], rtol=1e-12)
    assert "unbelievably" in set(frame["query"])


def test_wide_is_the_matrix_with_repeats_told_apart(sentence):
    frame = ap.table(sentence, 1, 3, by="word", wide=True)
    assert frame.shape == (len(sentence.words_of(0).words),) * 2
    assert {"park", "park (2)", "the", "the (2)"} <= set(frame.index)
    assert frame.index.is_unique
    np.testing.assert_array_equal(frame, ap.weights(sentence, 1, 3, by="word"))
    assert (frame.index.name, frame.columns.name) == ("query", "key")
    with pytest.raises(ap.InputError, match=r"more than max_bytes \(99\)"):
        ap.table(sentence, 1, 3, wide=True, max_bytes=99)
    with pytest.raises(ap.InputError, match="wide shows one text, layer and head"):
        ap.table(sentence, 1, wide=True)


def test_labels_told_apart_never_meet_others():
    assert told_apart(["a", "b", "a", "a (2)", "a"]) == ["a", "b", "a (3)", "a (2)", "a (4)"]


def test_gpt2_smalls_table_is_small_and_quick(gpt2):
    """12 × 12 heads of 128 tokens: 1.2 million past pairs in under 100 MB."""
    model = gpt2(n_layer=12, n_head=12, n_embd=768, n_positions=128)
    cap = ap.capture(model, torch.arange(128) % 101)
    start = time.perf_counter()
    frame = ap.table(cap)
    print(f"{len(frame):,} rows in {time.perf_counter() - start:.2f} s")
    assert len(frame) == 144 * 128 * 129 // 2
    size = frame.memory_usage(deep=True).sum()
    print(f"{size / 1e6:.0f} MB")
    assert size < 100e6
    with pytest.raises(
        ap.InputError, match=r"about 53,498,880 bytes, more than max_bytes \(50,000,000\)"
    ):
        ap.table(cap, max_bytes=50_000_000)


@pytest.mark.parametrize("call", [ap.table, ap.weights, ap.scores])
def test_out_of_range_says_the_range(gpt2, call):
    cap = ap.capture(gpt2(), TEXTS)
    with pytest.raises(ap.InputError, match=r"layer 3 is out of range.* 3.*0 to 2"):
        call(cap, 3, 0)
    with pytest.raises(ap.InputError, match="layer -1 is out of range"):
        call(cap, -1, 0)
    with pytest.raises(
        ap.InputError, match=r"head 6 is out of range: there are 6, numbered 0 to 5"
    ):
        call(cap, 1, 6)
    with pytest.raises(ap.InputError, match="text 2 is out of range: "):
        call(cap, 1, 1, text=2)


@pytest.mark.parametrize("call", [ap.table, ap.weights])
def test_an_unknown_by_is_refused(gpt2, call):
    with pytest.raises(ap.InputError, match="'token' or 'word', got 'letter'"):
        call(ap.capture(gpt2(), TEXTS), 0, 0, by="letter")


def test_numbers_of_any_whole_kind_name_heads(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    assert ap.table(cap, np.int64(1), [np.int32(2)], text=0).equals(ap.table(cap, 1, [2], text=0))


def test_lists_of_heads_keep_their_axis(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    whole = ap.weights(cap, 1)
    assert torch.equal(ap.weights(cap, 1, [4, 2]), whole[[4, 2]])
    assert ap.weights(cap, 1, [3]).shape == (1, 9, 9)
    assert torch.equal(ap.scores(cap, 1, np.array([0, 1])), ap.scores(cap, 1)[:2])
    row = ap.table(cap).nlargest(1, "weight").iloc[0]
    assert ap.weights(cap, row["layer"], row["head"]).shape == (9, 9)


def test_a_model_that_computes_otherwise_gives_no_wrong_weights(gpt2):
    model = gpt2()
    model.transformer.h[1].attn.scaling *= 0.25
    cap = ap.capture(model, TEXTS)
    assert ap.weights(cap, 0).shape == (6, 9, 9)
    with pytest.raises(ap.InputError, match=r"not be the model's own: the model scales by 0\.0790"):
        ap.weights(cap, 1)


@pytest.mark.parametrize("what", [None, "text", 5])
@pytest.mark.parametrize("call", [ap.table, ap.attended, ap.attended_by])
def test_what_is_no_capture_is_refused(call, what):
    with pytest.raises(ap.InputError, match=r"expected a capture, what ap\.capture returns"):
        call(what)


def test_reprs_are_short(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    assert len(repr(cap)) < 100
    assert len(repr(cap.calls[0])) < 150


def test_terms_that_the_formula_does_not_hold_give_no_wrong_weights(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    calls = (dataclasses.replace(cap.calls[0], unheld=("cu_seq_lens_q",)), *cap.calls[1:])
    capped = dataclasses.replace(cap, calls=calls)
    for call in (ap.weights, ap.table, lambda *at: ap.walkthrough(capped, "5", 0, 0)):
        with pytest.raises(
            ap.InputError,
            match="would not be the model's own: the formula here has no cu_seq_lens_q",
        ):
            call(capped, 0, 0)


def test_an_empty_list_of_heads_is_refused(gpt2):
    with pytest.raises(ap.InputError, match=r"a list of them, or None for all; got \[\]"):
        ap.table(ap.capture(gpt2(), TEXTS), 0, [])


def test_styled_shows_number_and_colour(sentence):
    frame = ap.table(sentence, 1, 3, by="word", wide=True)
    page = ap.styled(frame).to_html()
    assert page.count("rgba(70, 130, 220") > len(frame)
    assert f"{frame.iloc[2, 1]:.3f}" in page
    long = ap.styled(ap.table(sentence, 0, 0)).to_html()
    assert "rgba(70, 130, 220, 0.750)" in long  # the first word looks at itself only: weight 1


def test_a_token_in_a_styled_frame_is_text():
    cap = ap.capture(ap.load("bundled"), "<img src=x onerror=alert(1)>")
    assert "<img" not in ap.styled(ap.table(cap, 0, 0, by="word")).to_html()
    assert "<img" not in ap.styled(ap.table(cap, 0, 0, by="word", wide=True)).to_html()


def test_frames_go_to_parquet_and_back(sentence, tmp_path):
    frame = ap.table(sentence, 1, by="word")
    frame.to_parquet(tmp_path / "frame.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "frame.parquet"), frame)


def test_layers_may_have_other_numbers_of_heads(gpt2):
    """As in OpenELM: all heads of each layer, and one that a layer lacks is refused."""
    cap = ap.capture(gpt2(), [5, 17, 23, 8])
    few = dataclasses.replace(
        cap.calls[1],
        query=cap.calls[1].query[:, :2],
        key=cap.calls[1].key[:, :2],
        value=cap.calls[1].value[:, :2],
    )
    for calls in ((cap.calls[0], few), (few, cap.calls[0])):
        some = tuple(dataclasses.replace(one, layer=layer) for layer, one in enumerate(calls))
        uneven = dataclasses.replace(cap, calls=some)
        counts = ap.table(uneven).groupby("layer")["head"].nunique()
        assert list(counts) == [one.heads for one in some]
        own = [ap.weights(uneven, layer).mean(0) for layer in (0, 1)]
        found = ap.attended(uneven, 3, top=1)
        best = (own[0] + own[1])[3] / 2
        assert found["weight"][0] == pytest.approx(float(best.max()))
        rollout = ap.attended(uneven, 3, how="rollout", top=4).sort_values("key_pos")["weight"]
        half = [(one + torch.eye(4)) / 2 for one in own]
        assert rollout.to_numpy() == pytest.approx((half[1] @ half[0])[3].numpy())
        with pytest.raises(ap.InputError, match="head 5 is out of range: there are 2"):
            ap.table(uneven, head=5)


def test_a_capture_without_calls_has_no_table(gpt2):
    empty = dataclasses.replace(ap.capture(gpt2(), [5, 17, 23]), calls=())
    for call in (ap.table, ap.attended, ap.head_stats, ap.attention_view):
        with pytest.raises(ap.InputError):
            call(empty)
    with pytest.raises(ap.InputError, match="no attention call"):
        ap.logit_contributions(empty, 5)

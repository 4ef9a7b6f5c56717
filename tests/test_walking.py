import math

import numpy as np
import pandas as pd
import pytest
import torch

import attnprobe as ap
from attnprobe.masks import MaskRule
from attnprobe.words import read

TEXT = "The children were playing in the green park"


def two_words_one_head():
    """d_k = 4. q₁·k₀ = 0, q₁·k₁ = 2·ln 3: over √4, softmax makes of 0 and ln 3 ¼ and ¾."""
    query, key, value = (
        torch.tensor([[rows]], dtype=torch.float32)
        for rows in (
            [[5, 5, 5, 5], [2, 0, 0, 0]],
            [[0, 9, 0, 0], [math.log(3), 0, 0, 0]],
            [[4, 0, 3, 0], [8, 0, 0, 0]],
        )
    )
    call = ap.AttentionCall(
        layer=0,
        name="by.hand",
        kind="self",
        kernel="sdpa",
        query=query,
        key=key,
        value=value,
        scaling=0.5,
        expected_scaling=0.5,
        mask=None,
        is_causal=True,
        expected_mask=MaskRule(2, 2),
        head_output_model=torch.tensor([[[[4.0, 0, 3, 0]], [[7.0, 0, 0.75, 0]]]]),
    )
    return ap.Capture(
        lm=None,
        texts=(None,),
        input_ids=torch.tensor([[7, 8]]),
        padding=torch.ones(1, 2, dtype=torch.bool),
        words=(read(None, [7, 8]),),
        calls=(call,),
        output=torch.zeros(1, 2, 3),
    )


def test_two_words_one_head_by_hand():
    walk = ap.walkthrough(two_words_one_head(), "8", 0, 0)
    assert walk.steps.key.tolist() == ["7", "8"]
    first, second = walk.steps.drop(columns="key").to_dict("records")
    ln3 = math.log(3)
    assert first == pytest.approx(
        {
            "key_pos": 0,
            "score_raw": 0.0,
            "query_norm": 2.0,
            "key_norm": 9.0,
            "cosine": 0.0,
            "score": 0.0,
            "mask": 0.0,
            "masked_score": 0.0,
            "weight": 0.25,
            "value_norm": 5.0,
            "weighted_norm": 1.25,
            # o = (7, 0, ¾, 0); ¼·v₀ = (1, 0, ¾, 0); (7 + 9/16) / (49 + 9/16)
            "share": (7 + 9 / 16) / (49 + 9 / 16),
        },
        rel=1e-6,
    )
    assert second == pytest.approx(
        {
            "key_pos": 1,
            "score_raw": 2 * ln3,
            "query_norm": 2.0,
            "key_norm": ln3,
            "cosine": 1.0,
            "score": ln3,
            "mask": 0.0,
            "masked_score": ln3,
            "weight": 0.75,
            "value_norm": 8.0,
            "weighted_norm": 6.0,
            "share": 42 / (49 + 9 / 16),
        },
        rel=1e-6,
    )
    totals = dict(zip(walk.totals["name"], walk.totals["value"], strict=True))
    assert totals["sum of the weights"] == pytest.approx(1)
    assert totals["sum of the shares"] == pytest.approx(1)
    assert totals["|o|, the size of the head's output"] == pytest.approx(math.sqrt(49 + 9 / 16))
    assert totals["largest |o - the model's own head output|"] < totals["bound on that difference"]
    # -(¼ ln ¼ + ¾ ln ¾); without /√4 the weights are 1/10 and 9/10
    assert totals["entropy of the weights with the scaling 0.5 (nats)"] == pytest.approx(0.562335)
    assert totals["entropy without it (nats)"] == pytest.approx(0.325083, rel=1e-5)
    assert totals["the most an entropy can be here, ln 2 (nats)"] == pytest.approx(math.log(2))


def test_the_first_word_sees_itself_only():
    steps = ap.walkthrough(two_words_one_head(), "7", 0, 0).steps
    assert steps["mask"].tolist() == [0.0, -math.inf]
    assert steps.masked_score[1] == -math.inf
    assert steps["weight"].tolist() == [1.0, 0.0]
    assert steps.score_raw[1] == pytest.approx(5 * math.log(3))  # it would have liked to look there


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model_in_plain_numpy(dtype):
    cap = ap.capture(ap.load("bundled", dtype=dtype), TEXT)
    walk = ap.walkthrough(cap, "playing", 2, 5)
    at = walk.steps.key[walk.steps["mask"] == 0].index[-1]
    call = cap.calls[2]
    query, key, value = (x[0, 5].double().numpy() for x in (call.query, call.key, call.value))
    raw = key @ query[at]
    score = raw / np.sqrt(32)
    e = np.exp(score[: at + 1] - score[: at + 1].max())
    weight = np.append(e / e.sum(), np.zeros(len(key) - at - 1))
    np.testing.assert_allclose(walk.steps.score_raw, raw, rtol=1e-12)
    np.testing.assert_allclose(walk.steps.score, score, rtol=1e-12)
    np.testing.assert_allclose(walk.steps.weight, weight, rtol=1e-12)
    np.testing.assert_allclose(
        walk.steps.query_norm * walk.steps.key_norm * walk.steps.cosine, raw, rtol=1e-12
    )
    np.testing.assert_allclose(walk.output.numpy(), weight @ value, rtol=1e-12, atol=1e-15)
    assert torch.equal(walk.output_model, call.head_output_model[0, at, 5].double())
    totals = dict(zip(walk.totals["name"], walk.totals["value"], strict=True))
    error = totals["largest |o - the model's own head output|"]
    assert 0 < error <= totals["bound on that difference"]
    assert totals["sum of the shares"] == pytest.approx(1)


def test_sizes_name_the_weights_columns():
    cap = ap.capture(ap.load("bundled"), TEXT)
    sizes = ap.walkthrough(cap, "playing", 2, 5).sizes.set_index("name")
    tokens = cap.input_ids.shape[1]
    assert sizes["shape"]["X"] == f"1 × {tokens} × 192"
    assert sizes["axes"]["Q"] == "texts × heads × tokens × head size"
    assert sizes["shape"]["Q"] == f"1 × 6 × {tokens} × 32"
    # The merged matrix holds W_Q, W_K, W_V side by side: head 5 of W_K is columns 192 + 160 on.
    assert sizes["source"]["K"] == "X·W + b; head 5: transformer.h.2.attn.c_attn.weight[:, 352:384]"


def test_the_page_shows_every_step_and_escapes_tokens():
    cap = ap.capture(ap.load("bundled"), "a <b>bold</b> word")
    walk = ap.walkthrough(cap, "word", 0, 1)
    page = walk._repr_html_()
    assert "<b>" not in page
    assert "&lt;" in page
    assert all(f"{number}. " in repr(walk) for number in (1, 2, 3))
    assert repr(walk).count("\n") > 20


def test_out_of_range_and_unknown_words():
    cap = two_words_one_head()
    with pytest.raises(
        ap.InputError, match=r"head 1 is out of range: there are 1, numbered 0 to 0"
    ):
        ap.walkthrough(cap, "7", 0, 1)
    with pytest.raises(ap.InputError, match="layer 2 is out of range"):
        ap.walkthrough(cap, "7", 2, 0)
    with pytest.raises(ap.InputError, match="'x9' is not a word of the text"):
        ap.walkthrough(cap, "x9", 0, 0)


def test_steps_can_be_styled():
    shown = ap.styled(ap.walkthrough(two_words_one_head(), "8", 0, 0).steps).to_html()
    assert "rgba(70, 130, 220, 0.187)" in shown  # ¼ of the weight, at ¾ of full colour
    assert isinstance(ap.walkthrough(two_words_one_head(), "8", 0, 0).steps, pd.DataFrame)

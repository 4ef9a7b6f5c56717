"""Softcap, bias and sinks: the formula with them, its bounds, and models that have them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import gpt_oss
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import attnprobe as ap
from attnprobe.checking.basis import basis_of
from attnprobe.checking.checks import BY_CALL
from attnprobe.formula import softmax, tiles
from attnprobe.masks import GivenMask, MaskRule
from attnprobe.outputs import attention
from attnprobe.rounding import arithmetic
from attnprobe.terms import Terms

IDS = [[5, 17, 23, 8, 4, 42, 99, 3, 77, 61, 12], [9, 9, 1, 2, 3, 4]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CAP, TOKENS, HEADS, SIZE = 7.0, 13, 6, 10


def operands(spread: float = 3.0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key = draw(2, HEADS, TOKENS, SIZE), draw(2, 3, TOKENS, SIZE)
    bias, sinks = draw(1, HEADS, TOKENS, TOKENS) * 2, draw(HEADS) * 2
    drawn = query * spread, key, draw(2, 3, TOKENS, 4), bias, sinks
    return [one.to(dtype) for one in drawn]


def by_loops(query, key, value, bias, sinks):
    """The formula with every term, one word at a time, causal."""
    query, key, value, bias, sinks = (
        one.double().numpy() for one in (query, key, value, bias, sinks)
    )
    output = np.zeros((2, HEADS, TOKENS, 4))
    for b, h, i in np.ndindex(2, HEADS, TOKENS):
        s = [
            CAP * math.tanh(query[b, h, i] @ key[b, h // 2, j] / math.sqrt(SIZE) / CAP)
            + bias[0, h, i, j]
            for j in range(i + 1)
        ]
        total = sum(map(math.exp, s)) + math.exp(sinks[h])
        output[b, h, i] = sum(math.exp(s[j]) / total * value[b, h // 2, j] for j in range(i + 1))
    return output


def test_a_cap_a_bias_and_a_sink_by_hand():
    # Scores 0 and 2·ln 3 are capped to 0 and c·tanh(2·ln 3 / c), with c = 2 that is 2·(4/5); a bias
    # of ln 3 - 8/5 makes it ln 3; beside a sink of ln 4 the shares are 1/8, 3/8 and 4/8.
    query, key, value = (
        torch.tensor([[rows]], dtype=torch.float64)
        for rows in ([[1, 0]], [[0, 5], [2 * math.log(3), 0]], [[8], [16]])
    )
    bias = torch.tensor([[[[0, math.log(3) - 8 / 5]]]], dtype=torch.float64)
    terms = Terms(2.0, bias, torch.tensor([math.log(4)], dtype=torch.float64))
    (tile,) = tiles(query, key, value, MaskRule(1, 2, causal=False), 1.0, terms)
    torch.testing.assert_close(tile.scores[0, 0, 0].tolist(), [0.0, math.log(3)])
    torch.testing.assert_close(tile.weights[0, 0, 0].tolist(), [1 / 8, 3 / 8])
    torch.testing.assert_close(tile.output.item(), 7.0)


@pytest.mark.parametrize("tile_bytes", [1, 10**4, 10**7])
def test_equals_loops_for_any_tile(tile_bytes):
    query, key, value, bias, sinks = operands()
    terms = Terms(CAP, bias, sinks)
    rule = MaskRule(TOKENS, TOKENS)
    found = tiles(query, key, value, rule, SIZE**-0.5, terms, tile_bytes=tile_bytes)
    output = torch.cat([tile.output for tile in found], 2)
    expected = torch.tensor(by_loops(query, key, value, bias, sinks))
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_each_term_tells():
    query, key, value, bias, sinks = operands()
    rule = MaskRule(TOKENS, TOKENS)
    whole = attention(query, key, value, rule, SIZE**-0.5, Terms(CAP, bias, sinks))
    for terms in (Terms(None, bias, sinks), Terms(CAP, None, sinks), Terms(CAP, bias, None)):
        assert (attention(query, key, value, rule, SIZE**-0.5, terms) - whole).abs().max() > 0.1


def test_weights_with_a_sink_sum_to_what_it_leaves():
    scores = torch.randn(3, 5, 7, dtype=torch.float64) * 9
    sinks = torch.tensor([-800.0, 0.0, 800.0], dtype=torch.float64)
    sums = softmax(scores, sinks.view(3, 1, 1)).sum(-1)
    torch.testing.assert_close(sums[0], torch.ones(5, dtype=torch.float64))
    assert ((sums[1] > 0) & (sums[1] < 1)).all()
    assert (sums[2] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.3, 3.0, 15.0])
def test_the_bound_holds_for_a_kernel_as_models_write_it(dtype, spread):
    query, key, value, bias, sinks = operands(spread, dtype)
    rule = MaskRule(TOKENS, TOKENS)
    keys, values = (one.repeat_interleave(2, 1) for one in (key, value))
    s = query @ keys.transpose(-1, -2) * SIZE**-0.5
    s = torch.tanh(s / CAP) * CAP + bias
    s = s + torch.where(rule.allowed(), 0.0, torch.finfo(dtype).min).to(dtype)
    beside = sinks.view(1, -1, 1, 1).expand(2, -1, TOKENS, 1)
    joined = torch.cat([s, beside], -1)
    joined = joined - joined.amax(-1, keepdim=True)
    weights = torch.softmax(joined, -1, dtype=dtype)[..., :-1]
    output = weights @ values
    (tile,) = tiles(
        *(query, key, value, rule, SIZE**-0.5, Terms(CAP, bias, sinks)),
        rounding=arithmetic(dtype, "eager"),
    )
    ratios = ((output.double() - tile.output).abs() / tile.output_bound).max()
    assert ratios <= 1
    assert (((weights.double() - tile.weights).abs() / tile.weights_bound).nan_to_num() <= 1).all()
    if dtype != torch.float32:
        assert ratios > 0.1  # and is not empty


# Models that have them


def gemma2(dtype=torch.float32, **options):
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=101,
        hidden_size=60,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        intermediate_size=70,
        sliding_window=4,
        query_pre_attn_scalar=7,
        attn_logit_softcapping=5.0,
        initializer_range=0.5,
        attn_implementation="eager",
        **options,
    )
    return Gemma2ForCausalLM(config).eval().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [gemma2, gpt_oss])
def test_models_with_a_cap_and_with_sinks_are_verified(make, dtype):
    report = ap.verify(ap.capture(make(dtype), IDS))
    assert report.passed, report
    by_check = {row.check: row.verdict for row in report.rows}
    assert by_check["mask"] == by_check["weights"] == by_check["output"] == "verified"
    assert by_check["logits"] == "verified" or dtype != torch.float32


def test_a_cap_that_the_model_forgets_to_pass_is_found(monkeypatch):
    model = gemma2()
    model.model.layers[1].self_attn.attn_logit_softcapping = None
    report = ap.verify(ap.capture(model, IDS), checks=["output"])
    assert report.verdict == "mismatch"
    bad = [row for row in report.rows if row.verdict == "mismatch"]
    assert {row.layer for row in bad} == {1}
    assert "the model caps scores at None, expected 5.0" in bad[0].reason


def test_weights_scores_and_tables_hold_the_terms():
    model = gemma2()
    cap = ap.capture(model, IDS)
    for layer in range(2):
        own = cap.calls[layer].weights_model[0].double()
        assert (ap.weights(cap, layer) - own).abs().max() < 1e-5
        scores = ap.scores(cap, layer)
        assert scores[torch.isfinite(scores)].abs().max() <= 5.0
        torch.testing.assert_close(torch.softmax(scores, -1), ap.weights(cap, layer))
    cap = ap.capture(gpt_oss(), IDS)
    own = cap.calls[0].weights_model[0].double()
    assert (ap.weights(cap, 0) - own).abs().max() < 1e-5
    left = 1 - ap.weights(cap, 0).sum(-1)  # what the sinks take
    assert left.min() > -1e-12
    assert left.max() > 0.5


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_of_an_unknown_types_own_is_taken_and_said_so(kernel, dtype):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=101,
        d_model=60,
        d_kv=10,
        d_ff=70,
        num_layers=2,
        num_heads=6,
        initializer_factor=1.0,
        attn_implementation=kernel,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval().to(dtype)
    ids = torch.tensor(IDS[:1])
    with torch.no_grad(), ap.probe(model) as calls:
        model(input_ids=ids, decoder_input_ids=ids[:, :7])
    assert {call.kind for call in calls} == {"self", "cross"}
    for known in calls:
        call = replace(known, facts_known=False, bias_known=False, expected_terms=Terms())
        rows = BY_CALL["output"](call)
        assert {row.verdict for row in rows} == {"verified"}, (call, rows)
        assert "a bias of its own" in basis_of(call).taken
        assert {row.verdict for row in BY_CALL["mask"](call)} == {"not_checked"}


def test_a_given_mask_is_a_rule():
    allowed = torch.rand(2, 1, 5, 7) < 0.6
    for mask in (allowed, torch.where(allowed, 0.0, torch.finfo(torch.float16).min)):
        given = GivenMask(mask, 5)
        assert torch.equal(given.allowed(), allowed)
        assert torch.equal(given.allowed(1, 3, keys=4), allowed[:, :, 1:3, :4])
        assert given.bias is None
    numbers = torch.randn(2, 3, 5, 7).masked_fill(~allowed, -torch.inf)
    given = GivenMask(numbers, 5)
    assert torch.equal(given.bias, numbers.masked_fill(~allowed, 0.0))
    own = given.within(1, [2, 0], slice(1, 4), slice(2, 6))
    assert torch.equal(own.mask, numbers[1:, [2, 0], 1:4, 2:6])


def test_weights_from_before_the_sinks_are_not_compared():
    cap = ap.capture(gpt_oss(), IDS)
    call = cap.calls[0]
    plain = tiles(call.query, call.key, call.value, call.expected_mask, call.expected_scaling)
    before = replace(call, weights_model=torch.cat([tile.weights for tile in plain], 2).float())
    report = ap.verify(replace(cap, calls=(before, cap.calls[1])), checks=["weights", "output"])
    reasons = {row.layer: row.reason for row in report.rows if row.check == "weights"}
    assert "before its sinks take their share" in reasons[0]
    assert reasons[1] == ""
    assert report.passed


def test_sinks_for_each_query_are_rows_of_their_own():
    query, key, value = operands()[:3]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, HEADS, TOKENS, 1, generator=generator, dtype=torch.float64)
    rule = MaskRule(TOKENS, TOKENS)
    each = attention(query, key, value, rule, SIZE**-0.5, Terms(sinks=rows))
    for at in (0, 5, 12):
        alone = attention(query, key, value, rule, SIZE**-0.5, Terms(sinks=rows[1, :, at, 0]))
        torch.testing.assert_close(each[1, at], alone[1, at])
    part = Terms(sinks=rows).within(1, [4, 2], slice(3, 8), slice(0, 9)).sinks
    assert torch.equal(part, rows[1:, [4, 2], 3:8])


@pytest.mark.parametrize("make", [gemma2, gpt_oss])
def test_tables_and_the_walkthrough_hold_the_terms(make):
    cap = ap.capture(make(), IDS)
    call = cap.calls[1]
    frame = ap.table(cap, layer=1, head=4, text=0)
    products = (call.query[0, 4].double() @ call.key[0, 2].double().T).numpy()
    assert np.allclose(frame["score_raw"], products[frame["query_pos"], frame["key_pos"]])
    walked = ap.walkthrough(cap, 6, 1, 4)
    mine = frame[frame["query_pos"] == 6]
    steps = walked.steps[walked.steps["mask"] == 0]
    for name in ("score_raw", "score", "weight"):
        assert np.allclose(steps[name], mine[name], rtol=1e-12), name
    largest = walked.totals.set_index("name")["value"]
    difference = largest["largest |o - the model's own head output|"]
    assert difference <= largest["bound on that difference"]
    if make is gpt_oss:
        left = 1 - mine["weight"].sum()
        assert np.allclose(mine["sink"], left)
        assert np.isclose(largest["the sink's share, beside the keys'"], left)
        wide = ap.table(cap, layer=1, head=4, text=0, wide=True)
        assert np.allclose(wide.sum(axis=1), 1)
        assert wide.columns[-1] == "<sink>"
    else:
        assert "sink" not in frame


def test_pages_that_compute_the_plain_formula_refuse_terms():
    cap = ap.capture(gemma2(), IDS)
    for view in (ap.walkthrough_view, lambda cap: ap.neuron_view(cap, 0, 0)):
        with pytest.raises(ap.InputError, match=r"in the page, and this model adds softcap: use"):
            view(cap)
    assert ap.attention_view(cap).html
    assert ap.head_view(ap.capture(gpt_oss(), IDS)).html  # rows sum to less than 1

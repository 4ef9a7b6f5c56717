import dataclasses
import gc
import json
import math
import weakref
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from samples import IDS, mistral
from transformers import BartConfig, BartForConditionalGeneration

import attnprobe as ap
from attnprobe.checking import checks, logits
from attnprobe.checking.report import COLUMNS, Row, VerificationReport
from attnprobe.verification import CHECKS

TEXTS = [[5, 17, 23, 5, 99, 42, 8, 71, 2], [3, 60, 11, 72]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def changed(cap, layer, **fields):
    """The capture with one call's record altered, as if the model had computed otherwise."""
    calls = list(cap.calls)
    calls[layer] = dataclasses.replace(calls[layer], **fields)
    return dataclasses.replace(cap, calls=tuple(calls))


def mismatches(report):
    frame = report.to_frame()
    bad = frame[frame.verdict == "mismatch"]
    return {(row.check, row.layer, row.head) for row in bad.itertuples()}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_right_model_is_verified(gpt2, kernel, dtype, side):
    cap = ap.capture(gpt2(kernel, dtype), TEXTS, padding_side=side)
    report = ap.verify(cap)
    frame = report.to_frame()
    assert list(frame.columns) == COLUMNS
    assert report.passed
    assert set(frame.check) == set(CHECKS) - {"cache"}
    assert frame[frame.verdict == "verified"].ratio.max() <= 1
    assert len(frame[frame.check == "output"]) == 3 * 6
    unchecked = set(frame[frame.verdict == "not_checked"].check)
    assert unchecked <= ({"weights"} if kernel == "sdpa" else {"logits"})
    if dtype == torch.float32:
        assert unchecked == ({"weights"} if kernel == "sdpa" else set())
    assert report.rows_left_out == (3 * 5 if side == "left" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_equal_those_of_plain_numpy(gpt2, dtype):
    """The largest ratio's error, recomputed for one head by a loop that knows only the formula."""
    cap = ap.capture(gpt2("sdpa", dtype), TEXTS[0])
    frame = ap.verify(cap, checks=["output"]).to_frame().set_index(["layer", "head"])
    call = cap.calls[1]
    query, key, value = (x[0, 4].double().numpy() for x in (call.query, call.key, call.value))
    errors = []
    for i in range(9):
        s = np.array([query[i] @ key[j] / math.sqrt(10) for j in range(i + 1)])
        w = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
        got = call.head_output_model[0, i, 4].double().numpy()
        errors += list(abs(got - w @ value[: i + 1]))
    reported = frame.loc[(1, 4), "error"]
    assert any(math.isclose(reported, error, rel_tol=1e-6, abs_tol=1e-14) for error in errors)


def test_some_checks_only(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    report = ap.verify(cap, checks=["output"])
    assert set(report.to_frame().check) == {"output"}
    assert report.passed
    assert (
        ap.verify(cap, checks=["mask", "logits"]).verdict == "not_checked"
    )  # output was not asked for
    for bad in (["outputs"], [], ["mask", "x"]):
        with pytest.raises(
            ap.InputError, match="projection, cache, mask, weights, output, merge, logits"
        ):
            ap.verify(cap, checks=bad)


def test_progress_is_told_layer_by_layer(gpt2):
    told = []
    ap.verify(ap.capture(gpt2(), TEXTS), progress=lambda *what: told.append(what))
    assert told == [("layer 0", 1, 4), ("layer 1", 2, 4), ("layer 2", 3, 4), ("logits", 4, 4)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_head_is_named(gpt2, dtype):
    cap = ap.capture(gpt2("eager", dtype), TEXTS)
    output = cap.calls[1].head_output_model.clone()
    slack = 400 if dtype == torch.float32 else 20  # the bound allows any exponential 20 ulp
    output[0, 6, 3, 2] += slack * torch.finfo(dtype).eps * output[0, 6].abs().max()
    found = mismatches(
        ap.verify(changed(cap, 1, head_output_model=output), checks=["output", "mask"])
    )
    assert found == {("output", 1, 3)}


def test_one_wrong_weight_is_named_also_in_the_future(gpt2):
    cap = ap.capture(gpt2("eager"), TEXTS)
    weights = cap.calls[2].weights_model.clone()
    weights[0, 5, 3, 7] = 1e-30
    assert mismatches(ap.verify(changed(cap, 2, weights_model=weights), checks=["weights"])) == {
        ("weights", 2, 5)
    }


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_projection_that_drops_its_bias_is_found(gpt2, name, dtype):
    model = gpt2("sdpa", dtype)
    part = ["query", "key", "value"].index(name) * 60
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.bias[part + 20 : part + 30] = 0.5  # head 2's own
    cap = ap.capture(model, TEXTS)
    assert ap.verify(cap, checks=["projection"]).to_frame().verdict.eq("verified").all()
    less = torch.tensor([0, 0, 0.5, 0, 0, 0], dtype=dtype).view(1, 6, 1, 1)
    tensor = getattr(cap.calls[1], name) - less  # a new one: a record that is written into is none
    assert ("projection", 1, 2) in mismatches(ap.verify(changed(cap, 1, **{name: tensor})))


def test_key_and_value_exchanged_is_a_wrong_projection(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    call = cap.calls[0]
    found = ap.verify(changed(cap, 0, key=call.value, value=call.key), checks=["projection"])
    assert len(mismatches(found)) == 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_merge_is_found(gpt2, dtype):
    cap = ap.capture(gpt2("sdpa", dtype), TEXTS)
    order = [1, 0, 2, 3, 4, 5]
    swapped = changed(cap, 2, head_output_model=cap.calls[2].head_output_model[:, :, order])
    assert mismatches(ap.verify(swapped, checks=["merge"])) == {("merge", 2, pd.NA)}


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_is_not_borrowed_from_the_model(gpt2, kernel, dtype):
    model = gpt2(kernel, dtype)
    model.transformer.h[1].attn.scaling = 60**-0.5
    report = ap.verify(ap.capture(model, TEXTS), checks=["output"])
    assert report.verdict == "mismatch"
    assert {layer for _, layer, _ in mismatches(report)} == {1}
    assert "the model scales by 0.129099, expected 0.316228" in set(report.to_frame().reason)


def test_the_mask_is_not_borrowed_from_the_model(gpt2):
    model = gpt2()
    model.transformer.h[1].attn.is_causal = False  # sdpa is then told to mask nothing
    report = ap.verify(ap.capture(model, TEXTS[0]))
    assert {("mask", 1), ("output", 1)} <= {found[:2] for found in mismatches(report)}
    assert "36 mask entries differ from the rule, first at query 0, key 1" in set(
        report.to_frame().reason
    )


def test_a_lost_mask_under_eager_is_found(gpt2):
    cap = ap.capture(gpt2("eager"), TEXTS[0])
    report = ap.verify(changed(cap, 0, mask=None), checks=["mask"])
    assert {found[:2] for found in mismatches(report)} == {("mask", 0)}


def test_logits_of_a_model_with_another_attention(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    other = ap.capture(gpt2(seed=1), TEXTS)
    assert (
        ap.verify(dataclasses.replace(cap, output=other.output), checks=["logits"]).verdict
        == "mismatch"
    )
    cap.lm.model.transformer.h[2].attn.scaling = 1.0  # the capture was made before: it still holds
    assert ap.verify(cap, checks=["logits", "output"]).passed
    again = ap.capture(cap.lm, TEXTS)
    found = mismatches(ap.verify(again, checks=["logits"]))
    assert {check for check, *_ in found} == {"logits"}


def test_how_far_three_outputs_spread_equals_plain_numpy():
    """Blocks of tokens without padding, with some, and with nothing else."""
    torch.manual_seed(0)
    given, own, moved = torch.randn(3, 2, 20, 31) * 1e-3 + torch.randn(2, 20, 31) + 50
    padding = torch.ones(2, 20, dtype=torch.bool)
    padding[1, 3:] = False
    found = logits._spread(given, own, moved, padding)
    g, o, m = (one[padding].double().numpy() for one in (given, own, moved))
    square = (m - o) ** 2
    spread = np.sqrt(np.maximum(square.mean(0), square.mean(-1).max()))
    np.testing.assert_allclose(found.error.numpy(), np.abs(g - o).max(0), rtol=1e-12)
    np.testing.assert_allclose(found.spread.numpy(), spread, rtol=1e-12)
    np.testing.assert_allclose(found.scale, o.std(-1, ddof=1).min(), rtol=1e-9)


def test_logits_are_not_checked_without_a_model(gpt2):
    cap = dataclasses.replace(ap.capture(gpt2(), TEXTS), lm=None)
    frame = ap.verify(cap, checks=["logits", "output"]).to_frame()
    assert frame[frame.check == "logits"].reason.tolist() == ["the capture has no model with it"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_operand_that_is_not_finite_leaves_nothing_to_compare_and_says_so(gpt2, bad):
    cap = ap.capture(gpt2("sdpa"), TEXTS[0])
    query = cap.calls[1].query.clone()
    query[0, 5, 2, 7] = bad
    report = ap.verify(changed(cap, 1, query=query), checks=["output"])
    frame = report.to_frame()
    wrong = frame[frame.verdict != "verified"]
    assert wrong[["layer", "head"]].values.tolist() == [[1, 5]]
    assert "NaN or infinity" in wrong.reason.item()
    assert not report.passed
    assert "NaN or infinity" in report.summary


def test_an_output_of_another_shape_is_refused_by_layer_and_shape(gpt2):
    cap = ap.capture(gpt2("sdpa"), TEXTS[0])
    output = cap.calls[2].head_output_model
    with pytest.raises(ap.InputError, match=r"layer 2: head_output_model is \(1, 5, 6, \d+\)"):
        ap.verify(changed(cap, 2, head_output_model=output[:, :5]), checks=["output"])


def test_no_check_at_all_is_refused(gpt2):
    with pytest.raises(ap.InputError, match="no check was given"):
        ap.verify(ap.capture(gpt2("sdpa"), TEXTS[0]), checks=[])


def test_what_is_not_a_number_is_a_mismatch(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    output = cap.calls[0].head_output_model.clone()
    output[0, 3, 1, 0] = math.nan
    report = ap.verify(changed(cap, 0, head_output_model=output), checks=["output"])
    assert mismatches(report) == {("output", 0, 1)}
    assert report.worst.ratio == math.inf
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["verdict"] == "mismatch"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"unheld": ("cu_seq_lens_q",)}, "the formula here has no cu_seq_lens_q"),
        ({"dropout": 0.1}, "dropout of 0.1 was on"),
    ],
)
def test_what_the_formula_does_not_hold_is_not_checked_and_does_not_pass(gpt2, fields, reason):
    report = ap.verify(changed(ap.capture(gpt2(), TEXTS), 1, **fields), checks=["output", "logits"])
    assert report.verdict == "not_checked"
    assert not report.passed
    assert report.summary.startswith("NOT CHECKED")
    assert reason in report.summary
    frame = report.to_frame()
    assert frame[(frame.check == "logits")].verdict.tolist() == ["not_checked"]


def test_a_callers_4d_mask_is_taken_as_it_is_and_not_checked(gpt2):
    model = gpt2()
    ids = torch.tensor(TEXTS[0])[None]
    mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    mask[0, 0, 7, 2:5] = False
    with torch.no_grad(), ap.probe(model) as calls:
        model(ids, attention_mask=mask)
    assert calls[0].expected_mask is None
    cap = replace(ap.capture(model, TEXTS[0]), calls=tuple(calls))
    report = ap.verify(cap, checks=["mask", "output"])
    assert report.passed
    assert "mask" in report.summary.split("not checked: ")[1]
    assert all("the mask came whole" in row.reason for row in report.rows if row.check == "mask")
    assert (ap.weights(cap, 1)[:, 7, 2:5] == 0).all()
    lost = replace(calls[1], mask=torch.ones_like(mask))  # the model went by another mask
    assert not ap.verify(replace(cap, calls=(calls[0], lost, calls[2])), checks=["output"]).passed


def rows(*verdicts):
    numbers = {"verified": (1.0, 2.0), "mismatch": (3.0, 2.0), "not_checked": (math.nan, math.nan)}
    return VerificationReport(
        tuple(Row(check, 0, None, *numbers[verdict], "why") for check, verdict in verdicts),
        "<b>model</b>",
        "sdpa",
        "float32",
        1,
        7,
        0,
    )


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([("output", "verified")], "verified"),
        ([("output", "verified"), ("weights", "not_checked")], "verified"),
        ([("output", "verified"), ("mask", "mismatch")], "mismatch"),
        ([("output", "verified"), ("output", "not_checked")], "not_checked"),
        ([("mask", "verified")], "not_checked"),
        ([("output", "not_checked"), ("merge", "mismatch")], "mismatch"),
        ([], "not_checked"),
    ],
)
def test_nothing_counts_as_verified_by_being_left_out(found, verdict):
    report = rows(*found)
    assert report.verdict == verdict
    assert report.passed == (verdict == "verified")
    assert repr(report).endswith(report.summary)


def test_ratio_and_verdict_at_the_edges():
    assert (Row("mask", 0, None, 0.0, 0.0).ratio, Row("mask", 0, None, 0.0, 0.0).verdict) == (
        0.0,
        "verified",
    )
    assert (Row("mask", 0, None, 1.0, 0.0).ratio, Row("mask", 0, None, 1.0, 0.0).verdict) == (
        math.inf,
        "mismatch",
    )
    assert Row("output", 0, 1, 2.0, 2.0).verdict == "verified"
    assert math.isnan(Row("output", 0, 1, reason="why").ratio)


def test_the_page_escapes_what_it_shows():
    page = rows(("output", "verified"))._repr_html_()
    assert "<b>model</b>" not in page
    assert "&lt;b&gt;model&lt;/b&gt;" in page


# What a newcomer's trial found: each of these was once judged wrongly.


def test_a_layer_that_goes_around_the_seam_does_not_pass_unseen(gpt2):
    model = gpt2()
    attention = model.transformer.h[1].attn

    def own_attention(hidden_states, *args, **kwargs):
        query, key, value = attention.c_attn(hidden_states).split(60, dim=2)
        return attention.c_proj((query @ key.transpose(1, 2) * 5).softmax(-1) @ value), None

    attention.forward = own_attention
    cap = ap.capture(model, TEXTS[0])
    assert [call.layer for call in cap.calls] == [0, 2]
    assert [(one.layer, one.name) for one in cap.unseen] == [(1, "transformer.h.1.attn")]
    report = ap.verify(cap)
    assert report.verdict == "not_checked"
    assert "transformer.h.1.attn computed its attention unseen" in report.summary
    with pytest.raises(ap.InputError, match=r"layer 1: transformer\.h\.1\.attn computed"):
        ap.weights(cap, 1)
    assert ap.weights(cap, 2).shape == (6, 9, 9)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_lost_between_two_parts_of_a_model_is_found(gpt2, side):
    def drop(module, args, kwargs):
        return args, dict(kwargs) | {"attention_mask": None}

    model = gpt2()
    model.transformer.register_forward_pre_hook(drop, with_kwargs=True)
    report = ap.verify(ap.capture(model, TEXTS, padding_side=side))
    assert report.verdict == "mismatch"
    assert ("mask", 0) in {found[:2] for found in mismatches(report)}


def test_the_summary_says_what_was_not_checked(gpt2):
    cap = ap.capture(gpt2(), TEXTS[0])
    assert ap.verify(cap).summary.endswith("; not checked: weights")
    assert "all 3 layers and 18 heads" in ap.verify(cap).summary
    unknown = changed(cap, 1, expected_mask=None)
    assert ap.verify(unknown).summary.endswith("; not checked: mask in 1 of 3, weights")
    cap.lm.model.config.num_hidden_layers = 5  # as in a hybrid: two layers without attention
    assert "3 attention layers and 18 heads (the model has 5 layers)" in ap.verify(cap).summary


def test_the_most_alarming_reason_is_shown():
    """A mask that differs from the rule before one of which nothing is known."""

    def mask(layer, error, bound, reason=""):
        return Row("mask", layer, None, error, bound, reason)

    differs = mask(2, 1.0, math.nan, "of a type not known: 7 mask entries differ")
    some = (mask(0, math.nan, math.nan, "came whole"), mask(1, 0.0, 0.0), differs)
    output = Row("output", 0, 0, 1.0, 2.0)
    report = replace(rows(), rows=(*some, output))
    assert differs.verdict == "not_checked"
    assert math.isnan(differs.ratio)
    assert report.passed
    assert report.by_check().rows == (differs, output)
    assert report.summary.endswith(
        "; not checked: mask in 2 of 3 (of a type not known: 7 mask entries differ)"
    )
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["rows"][2]["error"] == 1.0
    wrong = mask(3, 1.0, 0.0, "another")
    assert replace(report, rows=(*some, wrong)).by_check().rows == (wrong,)


def unknown_types():
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        Llama4ForCausalLM,
        Llama4TextConfig,
        ModernBertConfig,
        ModernBertModel,
    )

    common = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 3, "vocab_size": 99}
    clip = CLIPTextConfig(**common, intermediate_size=9, initializer_range=0.5)
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    modern = ModernBertConfig(
        **common, intermediate_size=9, local_attention=8, cls_token_id=0, sep_token_id=1, **ends
    )
    chunked = Llama4TextConfig(
        **common,
        num_key_value_heads=3,
        head_dim=8,
        intermediate_size=9,
        intermediate_size_mlp=9,
        num_local_experts=2,
        attention_chunk_size=8,
        **ends,
    )
    return [
        pytest.param(CLIPTextModel, clip, id="clip: causal though no language model"),
        pytest.param(ModernBertModel, modern, id="modernbert: a window to both sides"),
        pytest.param(Llama4ForCausalLM, chunked, id="llama4: attention in chunks"),
    ]


@pytest.mark.parametrize(("cls", "config"), unknown_types())
def test_rules_that_are_not_known_are_no_mismatch(cls, config):
    torch.manual_seed(0)
    cap = ap.capture(cls(config).eval(), [(7 * n) % 90 + 5 for n in range(21)])
    report = ap.verify(cap)
    rows = [row for row in report.rows if "has rules of its own is not known" in row.reason]
    assert report.verdict == "verified"
    if cls.__name__ == "CLIPTextModel":  # M is taken as it was passed, and said not to be checked
        assert {row.check for row in rows} == {"mask"}
        assert {row.verdict for row in rows} == {"not_checked"}
        assert {row.error for row in rows} == {1.0}
        assert "mask (whether clip_text_model has rules of its own is not known: " in report.summary
    else:
        assert not rows
        assert {row.verdict for row in report.rows if row.check == "mask"} == {"verified"}


def test_a_scale_that_is_not_known_is_never_borrowed(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    call = cap.calls[1]
    unknown = changed(cap, 1, scaling=2 * call.scaling, facts_known=False)
    report = ap.verify(unknown)
    assert report.verdict == "not_checked"
    rows = [row for row in report.rows if "has rules of its own is not known" in row.reason]
    assert {row.check for row in rows} == {"output", "logits"}
    with pytest.raises(ap.InputError, match="would not be the model's own"):
        ap.weights(unknown, 1)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_one_large_row_of_the_unembedding_is_no_mismatch(gpt2, scale):
    model = gpt2("sdpa", torch.bfloat16, tie_word_embeddings=False, vocab_size=2003)
    with torch.no_grad():
        model.lm_head.weight[7] *= scale
    report = ap.verify(ap.capture(model, TEXTS), checks=["output", "logits"])
    assert report.passed, report


def test_autocast_is_refused(gpt2):
    model = gpt2()
    for run in (ap.capture, ap.term_effects):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(ap.InputError, match="autocast is on"),
        ):
            run(model, TEXTS)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), ap.probe(model) as calls:
        model(torch.tensor(TEXTS[:1]))
    assert "autocast" in calls[0].unheld[0]


def test_an_adapter_on_a_projection_is_not_taken_for_the_projection(gpt2):
    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.weight, self.bias = base, base.weight, base.bias

        def forward(self, x):
            return self.base(x) * 1.5

    model = gpt2()
    attention = model.transformer.h[1].attn
    attention.c_attn = Adapter(attention.c_attn)
    frame = ap.verify(ap.capture(model, TEXTS)).to_frame()
    row = frame[(frame.check == "projection") & (frame.layer == 1)]
    assert row.verdict.tolist() == ["not_checked"]
    assert "Adapter: what it computes is not known" in row.reason.item()
    assert "mismatch" not in set(frame.verdict)


def test_a_bound_that_says_nothing_is_not_called_verified(gpt2):
    model = gpt2("eager", torch.bfloat16, initializer_range=2.0)
    report = ap.verify(ap.capture(model, TEXTS), checks=["output"])
    assert report.verdict == "not_checked"
    assert "may round these scores so far" in report.summary


def test_reduced_precision_inside_products_is_read_when_it_was_used(gpt2):
    model = gpt2()
    plain = ap.capture(model, TEXTS)
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        reduced = ap.capture(model, TEXTS)
        assert ap.verify(plain, checks=["output"]).passed
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert (plain.calls[0].operands, reduced.calls[0].operands) == (0.0, 2**-8)
    assert ap.verify(reduced, checks=["output"]).verdict != "mismatch"
    assert (
        ap.verify(plain, checks=["output"]).worst.bound
        < ap.verify(reduced, checks=["output"]).worst.bound
    )


def test_calls_of_a_static_cache_are_projected_from_their_own_place(gpt2):
    from transformers import StaticCache

    model = gpt2()
    cap = ap.capture(model, TEXTS[0])
    cache = StaticCache(config=model.config, max_cache_len=12)
    ids = torch.tensor(TEXTS[:1])
    with torch.no_grad(), ap.probe(model) as calls:
        model(ids[:, :4], cache=cache, use_cache=True)
        model(ids[:, 4:], cache=cache, use_cache=True)
    for some in (calls[:3], calls[3:]):
        report = ap.verify(
            dataclasses.replace(cap, calls=tuple(some)),
            checks=["projection", "mask", "output", "merge"],
        )
        assert report.passed, report


@pytest.mark.parametrize("what", [None, "text", []])
def test_what_is_no_capture_is_refused(what):
    with pytest.raises(ap.InputError, match=r"expected a capture, what ap\.capture returns"):
        ap.verify(what)


def test_a_mismatch_without_room_for_error_reads_well(gpt2):
    cap = changed(ap.capture(gpt2("eager"), TEXTS[0]), 0, mask=None)
    assert "∞" in repr(ap.verify(cap, checks=["mask"]))
    assert "inf" not in repr(ap.verify(cap, checks=["mask"]))


def test_one_word_and_heads_of_nothing_but_zeros_are_verified(gpt2):
    model = gpt2()
    assert ap.verify(ap.capture(model, [7])).passed
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[:, 120:130] = 0.0  # head 0's values
        model.transformer.h[1].attn.c_attn.bias[120:130] = 0.0
    assert ap.verify(ap.capture(model, TEXTS)).passed


def test_an_encoder_decoder_has_three_parts_each_with_its_layers():
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=101,
        d_model=60,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=6,
        decoder_attention_heads=5,
        encoder_ffn_dim=70,
        decoder_ffn_dim=50,
        init_std=0.5,
    )
    model = BartForConditionalGeneration(config).eval()
    target = [[3, 7, 61, 12], [9, 4, 8, 2, 6, 5]]
    cap = ap.capture(model, TEXTS, target=target)
    report = ap.verify(cap)
    assert report.passed, report
    assert "all 8 layers and 42 heads" in report.summary
    frame = report.to_frame()
    found = frame[frame.check == "output"].groupby("part").layer.agg(["nunique", "count"])
    assert found.loc[["encoder", "decoder", "cross"]].to_numpy().tolist() == [
        [2, 12],
        [3, 15],
        [3, 15],
    ]
    assert frame[frame.check == "mask"].verdict.eq("verified").all()
    assert [len(one.calls) for one in (cap.encoder, cap.decoder)] == [2, 3]
    assert [call.layer for call in cap.decoder.calls] == [0, 1, 2]
    assert ap.weights(cap.encoder, 1, text=1).shape == (6, len(TEXTS[1]), len(TEXTS[1]))
    weights = ap.weights(cap.decoder, 2, text=1)
    assert weights.shape == (5, 6, 6)
    assert (weights.triu(1) == 0).all()  # the decoder is causal, the encoder not
    assert ap.weights(cap.encoder, 1).triu(1).max() > 0
    assert ap.table(cap.decoder, 0, 0, text=0)["query"].unique().tolist() == ["3", "7", "61", "12"]
    assert "verify the whole" in ap.verify(cap.decoder).to_frame().reason.iloc[-1]
    with pytest.raises(ap.InputError, match=r"look at cap\.encoder or cap\.decoder"):
        ap.weights(cap, 0)
    with pytest.raises(ap.InputError, match="has no encoder and decoder"):
        _ = cap.decoder.encoder
    with pytest.raises(ap.InputError, match=r"capture\(lm, text, target=…\)"):
        ap.capture(model, TEXTS)
    with pytest.raises(ap.InputError, match="got 2 texts and 1 targets"):
        ap.capture(model, TEXTS, target=target[:1])


def test_a_target_is_for_encoder_decoders_only(gpt2):
    with pytest.raises(ap.InputError, match="has no decoder to give a target to"):
        ap.capture(gpt2(), TEXTS, target=TEXTS)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_model_is_verified_while_it_runs(gpt2, kernel):
    lm = gpt2(kernel)
    texts = [IDS, IDS[:7]]
    told = []
    streamed = ap.verify(lm, texts, padding_side="left", progress=lambda *one: told.append(one))
    report = ap.verify(ap.capture(lm, texts, padding_side="left"))
    pd.testing.assert_frame_equal(streamed.to_frame(), report.to_frame())
    assert str(streamed) == str(report)
    assert told == [*((f"layer {n}", n + 1, 4) for n in range(3)), ("logits", 4, 4)]


def test_of_a_model_that_is_verified_no_call_is_kept(gpt2, monkeypatch):
    model = gpt2(n_layer=7)
    alive = []

    def counted(call):
        alive.append(weakref.ref(call))
        gc.collect()
        assert sum(one() is not None for one in alive) <= 2
        return []

    monkeypatch.setitem(checks.BY_CALL, "output", counted)
    ap.verify(model, IDS, checks=["output"])
    assert len(alive) == 7


def test_what_goes_wrong_while_a_model_is_verified_leaves_nothing_behind(gpt2):
    model = gpt2()
    model.transformer.h[1].attn.c_attn.weight.data[3, 4] = math.nan
    with pytest.raises(ap.NonFiniteError, match=r"layer 1: the query.*h\.1\.attn\.c_attn\.weight"):
        ap.verify(model, IDS)
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ap.InputError, match=r"expected a text.*verify\(lm, text\)"):
        ap.verify(model)
    with pytest.raises(ap.InputError, match="go with a model"):
        ap.verify(ap.capture(gpt2(), IDS), IDS)


def test_eager_in_float64_has_a_softmax_of_float32(gpt2):
    """Llama's eager attention and its like cast to float32 within; linear layers do not."""
    llama = mistral().double()
    llama.set_attn_implementation("eager")
    assert ap.verify(ap.capture(llama, IDS)).passed
    report = ap.verify(ap.capture(gpt2("eager").double(), IDS))
    assert report.passed
    bounds = {row.check: row.bound for row in report.rows if row.verdict == "verified"}
    assert bounds["projection"] < 1e-10
    assert 1e-10 < bounds["weights"] < 1e-4

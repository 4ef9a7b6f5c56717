import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch

import attnprobe as ap
from attnprobe.report import COLUMNS, Row, VerificationReport
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
    assert set(frame.check) == set(CHECKS)
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
    frame = ap.verify(cap, ["output"]).to_frame().set_index(["layer", "head"])
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
    report = ap.verify(cap, ["output"])
    assert set(report.to_frame().check) == {"output"}
    assert report.passed
    assert ap.verify(cap, ["mask", "logits"]).verdict == "not_checked"  # output was not asked for
    for bad in (["outputs"], [], ["mask", "x"]):
        with pytest.raises(ap.InputError, match="projection, mask, weights, output, merge, logits"):
            ap.verify(cap, bad)


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
    found = mismatches(ap.verify(changed(cap, 1, head_output_model=output), ["output", "mask"]))
    assert found == {("output", 1, 3)}


def test_one_wrong_weight_is_named_also_in_the_future(gpt2):
    cap = ap.capture(gpt2("eager"), TEXTS)
    weights = cap.calls[2].weights_model.clone()
    weights[0, 5, 3, 7] = 1e-30
    assert mismatches(ap.verify(changed(cap, 2, weights_model=weights), ["weights"])) == {
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
    assert ap.verify(cap, ["projection"]).to_frame().verdict.eq("verified").all()
    tensor = getattr(cap.calls[1], name).clone()
    tensor[:, 2] -= 0.5
    assert ("projection", 1, 2) in mismatches(ap.verify(changed(cap, 1, **{name: tensor})))


def test_key_and_value_exchanged_is_a_wrong_projection(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    call = cap.calls[0]
    found = ap.verify(changed(cap, 0, key=call.value, value=call.key), ["projection"])
    assert len(mismatches(found)) == 6


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_merge_is_found(gpt2, dtype):
    cap = ap.capture(gpt2("sdpa", dtype), TEXTS)
    order = [1, 0, 2, 3, 4, 5]
    swapped = changed(cap, 2, head_output_model=cap.calls[2].head_output_model[:, :, order])
    assert mismatches(ap.verify(swapped, ["merge"])) == {("merge", 2, pd.NA)}


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_is_not_borrowed_from_the_model(gpt2, kernel, dtype):
    model = gpt2(kernel, dtype)
    model.transformer.h[1].attn.scaling = 60**-0.5
    report = ap.verify(ap.capture(model, TEXTS), ["output"])
    assert report.verdict == "mismatch"
    assert {layer for _, layer, _ in mismatches(report)} == {1}
    assert "the model scales by 0.129099, expected 0.316228" in set(report.to_frame().reason)


def test_the_mask_is_not_borrowed_from_the_model(gpt2):
    model = gpt2()
    model.transformer.h[1].attn.is_causal = False  # sdpa is then told to mask nothing
    report = ap.verify(ap.capture(model, TEXTS[0]))
    assert {("mask", 1), ("output", 1)} <= {found[:2] for found in mismatches(report)}
    assert "36 entries differ, first at query 0, key 1" in set(report.to_frame().reason)


def test_a_lost_mask_under_eager_is_found(gpt2):
    cap = ap.capture(gpt2("eager"), TEXTS[0])
    report = ap.verify(changed(cap, 0, mask=None), ["mask"])
    assert {found[:2] for found in mismatches(report)} == {("mask", 0)}


def test_logits_of_a_model_with_another_attention(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    other = ap.capture(gpt2(seed=1), TEXTS)
    assert (
        ap.verify(dataclasses.replace(cap, output=other.output), ["logits"]).verdict == "mismatch"
    )
    cap.lm.model.transformer.h[2].attn.scaling = 1.0  # the capture was made before: it still holds
    assert ap.verify(cap, ["logits", "output"]).passed
    again = ap.capture(cap.lm, TEXTS)
    found = mismatches(ap.verify(again, ["logits"]))
    assert {check for check, *_ in found} == {"logits"}


def test_logits_are_not_checked_without_a_model(gpt2):
    cap = dataclasses.replace(ap.capture(gpt2(), TEXTS), lm=None)
    frame = ap.verify(cap, ["logits", "output"]).to_frame()
    assert frame[frame.check == "logits"].reason.tolist() == ["the capture has no model with it"]


def test_what_is_not_a_number_is_a_mismatch(gpt2):
    cap = ap.capture(gpt2(), TEXTS)
    output = cap.calls[0].head_output_model.clone()
    output[0, 3, 1, 0] = math.nan
    report = ap.verify(changed(cap, 0, head_output_model=output), ["output"])
    assert mismatches(report) == {("output", 0, 1)}
    assert report.worst.ratio == math.inf
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["verdict"] == "mismatch"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"terms": ("softcap",)}, "the formula here has no softcap"),
        ({"dropout": 0.1}, "dropout of 0.1 was on"),
        ({"expected_mask": None}, "the mask was given whole by the caller"),
    ],
)
def test_what_the_formula_does_not_hold_is_not_checked_and_does_not_pass(gpt2, fields, reason):
    report = ap.verify(changed(ap.capture(gpt2(), TEXTS), 1, **fields), ["output", "logits"])
    assert report.verdict == "not_checked"
    assert not report.passed
    assert report.summary.startswith("NOT CHECKED")
    assert reason in report.summary
    frame = report.to_frame()
    assert frame[(frame.check == "logits")].verdict.tolist() == ["not_checked"]


def test_a_callers_4d_mask_is_said_to_be_the_callers(gpt2):
    model = gpt2()
    ids = torch.tensor(TEXTS[0])[None]
    mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    with torch.no_grad(), ap.probe(model) as calls:
        model(ids, attention_mask=mask)
    assert calls[0].expected_mask is None


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

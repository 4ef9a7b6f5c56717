"""Biases of real models: rebuilt from config and weights, and found where a model adds others."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LongT5Config,
    LongT5ForConditionalGeneration,
    MPNetConfig,
    MPNetForMaskedLM,
    MptConfig,
    MptForCausalLM,
    MT5Config,
    MT5ForConditionalGeneration,
    Pop2PianoConfig,
    Pop2PianoForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.mpt import modeling_mpt
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5.modeling_umt5 import UMT5Attention

import attnprobe as ap
from attnprobe.architecture.additions import adds_bias, bias_table
from attnprobe.checking.basis import basis_of

TEXTS = [[(7 * n) % 90 + 5 for n in range(19)], [(11 * n) % 90 + 5 for n in range(8)]]
TARGETS = [[(5 * n) % 90 + 5 for n in range(6)], [(13 * n) % 90 + 5 for n in range(13)]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
COMMON = {"vocab_size": 99, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
T5_SIZES = {"d_model": 60, "d_kv": 10, "d_ff": 70, "num_heads": 6, "num_layers": 2}
T5_SIZES |= {"num_decoder_layers": 2, "decoder_start_token_id": 2}
# Few buckets, so that texts of 19 reach those that grow by logarithm.
T5_SIZES |= {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 16}
SIZES = {"hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 6}
EXPERTS = {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}

MADE = {
    "bloom": lambda: (BloomForCausalLM, BloomConfig(**COMMON, hidden_size=60, n_layer=2, n_head=6)),
    "mpt": lambda: (
        MptForCausalLM,
        MptConfig(**COMMON, d_model=60, n_layers=2, n_heads=6, max_seq_len=64),
    ),
    "falcon": lambda: (
        FalconForCausalLM,
        FalconConfig(**COMMON, **SIZES, alibi=True, multi_query=False),
    ),
    "mpnet": lambda: (MPNetForMaskedLM, MPNetConfig(**COMMON, **SIZES, intermediate_size=70)),
    "t5": lambda: (T5ForConditionalGeneration, T5Config(**COMMON, **T5_SIZES)),
    "mt5": lambda: (MT5ForConditionalGeneration, MT5Config(**COMMON, **T5_SIZES)),
    "umt5": lambda: (UMT5ForConditionalGeneration, UMT5Config(**COMMON, **T5_SIZES)),
    "switch": lambda: (
        SwitchTransformersForConditionalGeneration,
        SwitchTransformersConfig(**COMMON, **T5_SIZES, **EXPERTS),
    ),
}
PAIRS = {"t5", "mt5", "umt5", "switch"}
EVERY = [(kind, "eager") for kind in MADE if kind != "falcon"]
EVERY += [(kind, "sdpa") for kind in ("falcon", "t5", "mt5", "umt5")]


def made(kind, kernel="eager", dtype=torch.float32):
    """A random model: sizes all different, scores and biases large."""
    torch.manual_seed(0)
    cls, config = MADE[kind]() if isinstance(kind, str) else kind
    model = cls._from_config(config, attn_implementation=kernel).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=2.0 if "relative_attention_bias" in name else 0.25)
    return model.to(dtype)


def captured(model, side="right"):
    pair = getattr(model.config, "is_encoder_decoder", False)
    return ap.capture(model, TEXTS, target=TARGETS if pair else None, padding_side=side)


def verdicts(report, check):
    return {row.verdict for row in report.rows if row.check == check}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "kernel"), EVERY)
def test_mask_and_bias_are_verified(kind, kernel, dtype):
    model = made(kind, kernel, dtype)
    for side in ("left", "right"):
        cap = captured(model, side)
        assert any(call.expected_terms.bias is not None for call in cap.calls)
        assert all(call.bias_known for call in cap.calls)
        report = ap.verify(cap, checks=["mask", "output"])
        assert verdicts(report, "mask") == {"verified"}, report
        assert "mismatch" not in verdicts(report, "output"), report
        assert report.passed or dtype != torch.float32, report


TWELVE = {
    "bloom": lambda: (
        BloomForCausalLM,
        BloomConfig(**COMMON, hidden_size=60, n_layer=1, n_head=12),
    ),
    "mpt": lambda: (
        MptForCausalLM,
        MptConfig(**COMMON, d_model=60, n_layers=1, n_heads=12, max_seq_len=300),
    ),
    "falcon": lambda: (
        FalconForCausalLM,
        FalconConfig(
            **COMMON
            | SIZES
            | {"hidden_size": 72, "num_attention_heads": 12, "num_hidden_layers": 1},
            **{"alibi": True, "multi_query": False},
        ),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", TWELVE)
def test_slopes_and_positions_that_a_model_rounds_are_within_their_unit(kind, dtype):
    """Twelve heads' slopes, such as √2/2, and positions past 256 are no bfloat16 numbers."""
    model = made(TWELVE[kind](), "sdpa" if kind == "falcon" else "eager", dtype)
    cap = ap.capture(model, [[(7 * n) % 90 + 5 for n in range(290)], TEXTS[0]])
    basis = basis_of(cap.calls[0])
    exact = cap.calls[0].expected_terms.bias.rows(0, 290, 290).expand(2, 12, 290, 290)
    assert not torch.equal(basis.added.double().expand_as(exact)[0, :, -1], exact[0, :, -1])
    report = ap.verify(cap, checks=["mask", "output"])
    assert verdicts(report, "mask") == {"verified"}, report
    assert "mismatch" not in verdicts(report, "output"), report
    # The long text's scores are in the hundreds: own code in half precision may round them away.
    assert report.passed or (dtype != torch.float32 and kind != "falcon"), report


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("kind", "kernel"), [one for one in EVERY if one[0] != "mpnet"])
def test_each_step_over_a_cache_is_verified(kind, kernel, beams):
    model = made(kind, kernel)
    ids = torch.tensor([TEXTS[0], [2] * 11 + TEXTS[1]])
    options = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "num_beams": beams}
    with ap.probe(model) as calls:
        model.generate(ids, attention_mask=(ids != 2).long(), **options)
    assert len({call.step for call in calls}) == 4 + (kind in PAIRS)  # an encoder goes first
    assert any(call.first_key for call in calls)
    report = ap.verify(calls, checks=["mask", "output"])
    assert report.passed, report
    assert verdicts(report, "mask") == {"verified"}


# Wrong biases, each of which a model is made to add


ALIBI_FUNCTIONS = {
    "bloom": (modeling_bloom, "build_alibi_tensor"),
    "mpt": (modeling_mpt, "build_mpt_alibi_tensor"),
    "falcon": (modeling_falcon, "build_alibi_tensor"),
}


def with_slopes_of_eight_heads(alibi):
    """The first six of eight heads' slopes, 1/2 to 1/64, in place of six heads' own."""
    factors = torch.tensor([2.0**n for n in (2 - 1, 4 - 2, 6 - 3, 8 - 4, 1 - 5, 3 - 6)])
    return (alibi.float() * factors.repeat(len(alibi) // 6)[:, None, None]).to(alibi.dtype)


ALIBI_MUTANTS = {
    "slopes of eight heads": with_slopes_of_eight_heads,
    "lost": torch.zeros_like,
    "negative": torch.neg,
    "one key on": lambda alibi: alibi.roll(1, -1),
    "twice": lambda alibi: 2 * alibi,
    "of the next head": lambda alibi: alibi.roll(1, 0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutant", ALIBI_MUTANTS)
@pytest.mark.parametrize("kind", ALIBI_FUNCTIONS)
def test_another_alibi_is_a_mismatch(kind, mutant, dtype, monkeypatch):
    model = made(kind, "sdpa" if kind == "falcon" else "eager", dtype)
    module, name = ALIBI_FUNCTIONS[kind]
    build, change = getattr(module, name), ALIBI_MUTANTS[mutant]
    monkeypatch.setattr(module, name, lambda *args, **rest: change(build(*args, **rest)))
    report = ap.verify(captured(model), checks=["mask", "output"])
    assert verdicts(report, "mask") == {"mismatch"}, report
    if (kind, mutant) != ("mpt", "one key on"):  # whole rows moved, which moves no weight
        assert "mismatch" in verdicts(report, "output")


def one_further(compute):
    def run(self, *args, past_seen_tokens=0, **rest):
        return compute(self, *args, past_seen_tokens=past_seen_tokens + 1, **rest)

    return run


def without_cache(compute):
    def run(self, *args, past_seen_tokens=0, **rest):
        return compute(self, *args, **rest)

    return run


def lost(compute):
    return lambda self, *args, **rest: 0 * compute(self, *args, **rest)


def other_sides(compute):
    """An encoder with one side, a decoder with two."""

    def run(self, *args, **rest):
        self.is_decoder = not self.is_decoder
        try:
            return compute(self, *args, **rest)
        finally:
            self.is_decoder = not self.is_decoder

    return run


def other_reach(compute):
    def run(self, *args, **rest):
        self.relative_attention_max_distance += 8
        try:
            return compute(self, *args, **rest)
        finally:
            self.relative_attention_max_distance -= 8

    return run


def buckets_one_off(compute):
    def run(self, *args, **rest):
        table = self.relative_attention_bias.weight
        kept = table.data
        table.data = kept.roll(1, 0)
        try:
            return compute(self, *args, **rest)
        finally:
            table.data = kept

    return run


LEARNED_MUTANTS = (one_further, lost, other_sides, other_reach, buckets_one_off)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutant", LEARNED_MUTANTS)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize(("kind", "cls"), [("t5", T5Attention), ("umt5", UMT5Attention)])
def test_another_learned_bias_is_a_mismatch(kind, cls, kernel, mutant, dtype, monkeypatch):
    model = made(kind, kernel, dtype)
    monkeypatch.setattr(cls, "compute_bias", mutant(cls.compute_bias))
    cap = captured(model)
    report = ap.verify(cap, checks=["mask", "output"])
    wrong = {(row.part, row.layer) for row in report.rows if row.verdict == "mismatch"}
    assert {row.part for row in report.rows} == {"encoder", "decoder", "cross"}
    assert {part for part, _ in wrong} == {"encoder", "decoder"}  # cross attention has none
    masks = {(row.part, row.layer) for row in report.rows if row.check == "mask"}
    assert wrong == {one for one in masks if one[0] != "cross"}
    assert "mismatch" in verdicts(report, "output")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_the_bias_of_the_other_stack_is_a_mismatch(kernel, dtype, monkeypatch):
    model = made("t5", kernel, dtype)
    first = model.encoder.block[0].layer[0].SelfAttention
    compute = T5Attention.compute_bias

    def of_the_encoder(self, *args, **rest):
        own, self.relative_attention_bias = (
            self.relative_attention_bias,
            first.relative_attention_bias,
        )
        try:
            return compute(self, *args, **rest)
        finally:
            self.relative_attention_bias = own

    monkeypatch.setattr(T5Attention, "compute_bias", of_the_encoder)
    report = ap.verify(captured(model), checks=["mask", "output"])
    assert {row.part for row in report.rows if row.verdict == "mismatch"} == {"decoder"}
    assert {row.layer for row in report.rows if row.verdict == "mismatch"} == {0, 1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bias_of_another_layer_is_a_mismatch(dtype, monkeypatch):
    model = made("umt5", "sdpa", dtype)
    layers = [block.layer[0].SelfAttention for block in model.encoder.block]
    layers[1].compute_bias = layers[0].compute_bias
    report = ap.verify(captured(model), checks=["mask", "output"])
    wrong = {(row.part, row.layer) for row in report.rows if row.verdict == "mismatch"}
    assert wrong == {("encoder", 1)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_that_the_bias_forgets_is_a_mismatch(dtype, monkeypatch):
    model = made("t5", "sdpa", dtype)
    monkeypatch.setattr(T5Attention, "compute_bias", without_cache(T5Attention.compute_bias))
    with ap.probe(model) as calls:
        model.generate(torch.tensor(TEXTS[:1]), max_new_tokens=3, do_sample=False)
    report = ap.verify(calls, checks=["mask"])
    wrong = [row for row in report.rows if row.verdict == "mismatch"]
    assert {row.part for row in wrong} == {"decoder"}
    assert all(row.reason.startswith(("in step 2", "in step 3")) for row in wrong)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", ["lost", "one further", "one side"])
def test_another_bias_of_mpnets_is_a_mismatch(change, dtype, monkeypatch):
    compute, buckets = MPNetEncoder.compute_position_bias, MPNetEncoder.relative_position_bucket
    if change == "lost":
        monkeypatch.setattr(
            MPNetEncoder, "compute_position_bias", lambda *args, **rest: 0 * compute(*args, **rest)
        )
    else:
        changed = {"one further": lambda n: n + 1, "one side": lambda n: n.clamp(max=0)}[change]
        monkeypatch.setattr(
            MPNetEncoder,
            "relative_position_bucket",
            staticmethod(lambda n, **rest: buckets(changed(n), **rest)),
        )
    report = ap.verify(captured(made("mpnet", dtype=dtype)), checks=["mask", "output"])
    assert verdicts(report, "mask") == {"mismatch"}
    assert "mismatch" in verdicts(report, "output")


def test_a_lost_mask_is_found_beside_a_right_bias(monkeypatch):
    def forget(module, args, kwargs):
        return args, kwargs | {"attention_mask": None}

    model = made("t5", "sdpa")
    model.get_encoder().register_forward_pre_hook(forget, with_kwargs=True)
    report = ap.verify(captured(model), checks=["mask"])
    wrong = [row for row in report.rows if row.verdict == "mismatch"]
    assert {row.part for row in wrong} == {"encoder"}
    assert "mask entries differ from the rule, first at query 0, key 8" in wrong[0].reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reason_says_where_and_by_how_much(dtype):
    # transformers' eager Falcon adds ALiBi twice: to the scores, and within the mask. Under sdpa
    # the same model adds it once, as Falcon was trained: (q·k + slope·position) / √d_k.
    report = ap.verify(captured(made("falcon", "eager", dtype)), checks=["mask", "output"])
    assert report.verdict == "mismatch"
    twice, once = 2 * 2**-2 / math.sqrt(10), 2**-2 / math.sqrt(10)
    reason = next(row.reason for row in report.rows if row.check == "mask")
    assert "another: head 0, query 1, key 1 gets " in reason
    got, want = (float(word) for word in reason.split("gets ")[1].split(", expected "))
    assert got == pytest.approx(twice, rel=2e-2)
    assert want == pytest.approx(once, rel=1e-5)


def test_mpt_is_held_to_its_config():
    # transformers' MPT reads of attn_config neither alibi nor alibi_bias_max.
    cls, config = MADE["mpt"]()
    for name, value in (("alibi_bias_max", 4), ("alibi", False)):
        changed = MptConfig(**{**config.to_dict(), "attn_config": {name: value}})
        report = ap.verify(captured(made((cls, changed))), checks=["mask"])
        assert verdicts(report, "mask") == {"mismatch"}
    scaled = MptConfig(**{**config.to_dict(), "attn_config": {"softmax_scale": 0.1}})
    assert ap.verify(captured(made((cls, scaled))), checks=["mask", "output"]).passed


def test_an_encoder_alone_is_verified():
    model = made((T5EncoderModel, T5Config(**COMMON, **T5_SIZES)), "sdpa")
    report = ap.verify(captured(model))
    assert report.passed
    assert verdicts(report, "mask") == {"verified"}


def test_a_bias_where_none_is_expected_is_a_mismatch():
    cap = captured(made("t5", "sdpa"))
    cross = next(call for call in cap.calls if call.kind == "cross")
    assert not cross.terms.bias.any()
    assert basis_of(cross).mask_difference == ""
    bias = cross.terms.bias.clone()
    bias[0, 4, 2, 3] = 0.5
    other = replace(cross, terms=replace(cross.terms, bias=bias))
    assert "head 4, query 2, key 3 gets 0.5, expected 0" in basis_of(other).mask_difference
    nan = replace(cross, terms=replace(cross.terms, bias=bias * math.nan))
    assert "gets nan" in basis_of(nan).mask_difference


@pytest.mark.parametrize(
    ("cls", "config", "kernel"),
    [
        (Pop2PianoForConditionalGeneration, Pop2PianoConfig, "eager"),
        (Pop2PianoForConditionalGeneration, Pop2PianoConfig, "sdpa"),
        (LongT5ForConditionalGeneration, LongT5Config, "eager"),
    ],
)
def test_types_that_are_not_known_in_all_are_held_to_their_bias(cls, config, kernel):
    model = made((cls, config(**COMMON, **T5_SIZES)), kernel)
    padding = torch.tensor([[1] * 11, [1] * 7 + [0] * 4])
    with torch.no_grad(), ap.probe(model) as calls:
        model(
            inputs_embeds=torch.randn(2, 11, 60),
            attention_mask=padding,
            decoder_input_ids=torch.tensor([TEXTS[1][:6], TEXTS[0][:6]]),
        )
    mine = [call for call in calls if call.kind == "self"]
    assert [call.in_encoder for call in mine][-2:] == [False, False]
    for call in mine:
        assert call.terms.bias.any()
        assert basis_of(call).taken == basis_of(call).mask_difference == ""
        wrong = replace(call, terms=replace(call.terms, bias=call.terms.bias.roll(1, 1)))
        assert "is another: head 0" in basis_of(wrong).taken


# Weights that are not at hand


@pytest.mark.parametrize("way", ["offloaded", "adapted"])
def test_a_bias_whose_weights_are_not_at_hand_is_taken_and_said_so(way):
    model = made("t5", "sdpa")
    if way == "adapted":
        model = get_peft_model(model, LoraConfig(target_modules=["relative_attention_bias"]))
    cap = captured(model)
    if way == "offloaded":
        from accelerate import cpu_offload

        cpu_offload(model, execution_device="cpu")
        cap = captured(model)
    report = ap.verify(cap, checks=["mask", "output"])
    assert report.passed
    reasons = {row.part: row.reason for row in report.rows if row.check == "mask"}
    assert "weights are offloaded or adapted" in reasons["encoder"]
    assert reasons["cross"] == ""


def test_weights_are_those_of_the_nearest_stack():
    model = made("t5")
    parents = {child: one for one in model.modules() for child in one.children()}
    for stack in (model.encoder, model.decoder):
        own = stack.block[0].layer[0].SelfAttention
        for block in stack.block:
            found = bias_table(block.layer[0].SelfAttention, parents)
            assert found is own.relative_attention_bias.weight
    each = made("umt5")
    parents = {child: one for one in each.modules() for child in one.children()}
    for block in each.decoder.block:
        own = block.layer[0].SelfAttention
        assert bias_table(own, parents) is own.relative_attention_bias.weight
    assert bias_table(nn.Identity(), {}) is None


@pytest.mark.parametrize(
    ("fields", "kind", "expected"),
    [
        ({"model_type": "bloom"}, "self", True),
        ({"model_type": "falcon", "alibi": False}, "self", False),
        ({"model_type": "falcon", "alibi": True}, "self", True),
        ({"model_type": "t5"}, "self", True),
        ({"model_type": "t5"}, "cross", False),
        ({"model_type": "mpt", "attn_config": SimpleNamespace(alibi=False)}, "self", False),
        ({"model_type": "llama"}, "self", False),
        ({}, "self", False),
    ],
)
def test_which_types_add_a_bias(fields, kind, expected):
    assert adds_bias(SimpleNamespace(**fields), kind) == expected

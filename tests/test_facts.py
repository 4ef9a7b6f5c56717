"""What configs say of scale, causality and reach, by golden values."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from attnprobe.architecture.additions import expected_terms
from attnprobe.architecture.facts import config_of, expected_scaling, index_of, is_causal, reach


def config(**fields):
    return SimpleNamespace(**fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1 / 4),
        ({"query_pre_attn_scalar": 25}, 1 / 5),
        ({"attention_multiplier": 0.3}, 0.3),
        ({"scale_attn_weights": False}, 1.0),
        ({"scale_attn_by_inverse_layer_idx": True}, 1 / 4 / 3),
        ({"model_type": "opt"}, 1.0),
        ({"model_type": "t5"}, 1.0),
        ({"model_type": "inkling_text"}, 1 / 16),
        ({"hidden_size": 24, "attention_hidden_size": 48}, 8**-0.5),
    ],
)
def test_the_scale_of_heads_of_16_in_layer_2(fields, expected):
    assert expected_scaling(config(**fields), 16, 2) == pytest.approx(expected, rel=1e-12)


def test_yarn_raises_the_scale_of_latent_attention_only():
    rope = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}
    raised = (0.1 * math.log(40) + 1) ** 2  # DeepSeek-V3's own: 1.3689² = 1.8738
    latent = config(rope_parameters=rope, kv_lora_rank=512)
    assert expected_scaling(latent, 16, 0) == pytest.approx(raised / 4)
    assert raised == pytest.approx(1.8738, rel=1e-4)
    assert expected_scaling(config(rope_parameters=rope), 16, 0) == 1 / 4
    default = config(rope_parameters=rope | {"rope_type": "default"}, kv_lora_rank=512)
    assert expected_scaling(default, 16, 0) == 1 / 4


KINDS = ["full_attention", "sliding_attention", "chunked_attention", "hybrid_sliding"]


@pytest.mark.parametrize(
    ("fields", "index", "causal", "expected"),
    [
        ({}, 0, True, {}),
        ({"sliding_window": 5}, 0, True, {"window": 5}),
        ({"sliding_window": 5, "use_sliding_window": False}, 0, True, {}),
        ({"sliding_window": None}, 0, True, {}),
        ({"sliding_window": 5}, 0, False, {"window": 6, "ahead": 5}),
        ({"sliding_window": 5, "attention_chunk_size": 8, "layer_types": KINDS}, 0, True, {}),
        ({"sliding_window": 5, "layer_types": KINDS}, 1, True, {"window": 5}),
        ({"attention_chunk_size": 8, "layer_types": KINDS}, 2, True, {"chunk": 8}),
        ({"sliding_window": 5, "layer_types": KINDS}, 3, True, {"window": 5}),
        ({"sliding_window": 5, "layer_types": KINDS}, 4, True, {}),  # past the list: none is said
    ],
)
def test_how_far_a_layer_sees(fields, index, causal, expected):
    assert reach(config(**fields), index, causal) == expected


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("llama", {}, True),
        ("gpt_neox", {}, True),  # has a field is_decoder, that says nothing
        ("bert", {}, False),
        ("bert", {"is_decoder": True}, True),
        ("bert-generation", {}, False),
        ("gemma3_text", {"use_bidirectional_attention": True}, False),
        ("gemma4_text", {"use_bidirectional_attention": "vision"}, True),
    ],
)
def test_which_architectures_are_causal(kind, fields, expected):
    made = AutoConfig.for_model(kind)
    for name, value in fields.items():
        setattr(made, name, value)
    assert is_causal(made, nn.Identity()) == expected


@pytest.mark.parametrize("decoder", [True, False])
def test_in_an_encoder_decoder_the_module_says_which_it_is_of(decoder):
    module = nn.Identity()
    module.is_decoder, module.is_causal = decoder, not decoder
    assert is_causal(AutoConfig.for_model("bart"), module) == decoder


def test_a_layer_is_numbered_by_itself_or_by_its_turn():
    module = nn.Identity()
    assert index_of(module, 4) == 4
    module.layer_idx = 7
    assert index_of(module, 4) == 7


def test_a_layer_of_its_own_config_has_that():
    layers = [config(sliding_window=3), config(sliding_window=None)]
    many = config(is_heterogeneous=True, per_layer_config=layers)
    assert config_of(nn.Identity(), many, 1) is layers[1]
    assert config_of(nn.Identity(), layers[0], 1) is layers[0]


def test_terms_come_from_config_and_weights():
    module = nn.Identity()
    assert expected_terms(module, config()).softcap is None
    assert expected_terms(module, config(attn_logit_softcapping=30.0)).softcap == 30.0
    module.sinks = nn.Parameter(torch.tensor([1.0, 2.0]))
    found = expected_terms(module, config()).sinks
    assert found.tolist() == [1.0, 2.0]
    assert not found.requires_grad


def test_gpt_neos_local_layers_have_a_window():
    layers = config(attention_layers=["global", "local"], window_size=4)
    assert reach(layers, 0, True) == {}
    assert reach(layers, 1, True) == {"window": 4}

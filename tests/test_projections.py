"""X → query, key, value and heads → W_O of each family, against loops, golden values, mutants."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    StaticCache,
)
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

import attnprobe as ap
from attnprobe.architecture import facts, rotary
from attnprobe.projections import projected, source, value_norms
from attnprobe.rounding import arithmetic, linear, rms_norm, scaled

TEXTS = [[(7 * n) % 90 + 5 for n in range(19)], [(11 * n) % 90 + 5 for n in range(8)]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ENCODERS = {"bert", "roberta", "distilbert", "albert"}
WIDE = ("gemma", "gemma2", "gemma3_text", "qwen3", "gpt_oss")  # heads of any size
GROUPED = {"llama", "mistral", "mixtral", "qwen2", "phi", "phi3", "cohere", *WIDE}
FAMILIES = sorted({"gpt2", "opt", "gpt_neox", *ENCODERS, *GROUPED})
THETA = {"rope_type": "default", "rope_theta": 10000.0}
OPTIONS = {
    "phi": {"partial_rotary_factor": 0.4},
    "gpt_neox": {"rope_parameters": THETA | {"partial_rotary_factor": 0.4}},
    "qwen3": {"attention_bias": True},
    "phi3": {"rope_parameters": THETA | {"partial_rotary_factor": 0.6}},
    "albert": {"embedding_size": 14},
    "distilbert": {"dim": 60, "n_heads": 6, "hidden_dim": 70},
    "opt": {"ffn_dim": 70, "word_embed_proj_dim": 60},
}


def small(kind, dtype=torch.float32, kernel="eager", most=64, **options):
    """A random model of a type: sizes all different, weights, biases and norms sharp."""
    torch.manual_seed(0)
    # The experts' grouped products want rows of 16 bytes.
    hidden, inner = (48, 72) if kind in ("mixtral", "gpt_oss") else (60, 70)
    settings = {
        "vocab_size": 99,
        "hidden_size": hidden,
        "num_attention_heads": 6,
        "num_hidden_layers": 2,
        "intermediate_size": inner,
        "max_position_embeddings": most,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        **({"num_key_value_heads": 3} if kind in GROUPED else {}),
        **({"head_dim": 14} if kind in WIDE else {}),
        **OPTIONS.get(kind, {}),
    }
    config = AutoConfig.for_model(kind, **settings | options)
    auto = AutoModelForMaskedLM if kind in ENCODERS else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=kernel).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.25)
            elif "bias" in name or "_norm" in name:
                weight.normal_(std=0.5)
    return model.to(dtype)


def attention(model, layer):
    """The attention module of one layer, whatever the family calls it."""
    kinds = ("SelfAttention", "Attention")
    found = [
        one
        for one in model.modules()
        if type(one).__name__.endswith(kinds) and not hasattr(one, "self")
    ]
    return found[layer]


def checked(cap, checks=("projection", "merge")):
    report = ap.verify(cap, checks=list(checks))
    return report.to_frame()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_is_verified(kind, dtype, side):
    frame = checked(ap.capture(small(kind, dtype), TEXTS, padding_side=side))
    print(kind, dtype, frame.groupby("check").ratio.max().to_dict())
    assert frame.verdict.eq("verified").all(), frame
    assert len(frame) == 2 * (6 + 1)
    assert frame.ratio.max() > 0.001  # the bound is no more than a thousand times the error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "cohere", "gemma3_text", "gpt_oss"])
def test_positions_in_the_thousands_are_verified(kind, dtype):
    model = small(kind, dtype, most=4096)
    with torch.no_grad(), ap.probe(model) as calls:
        for first in (1000, 2029):
            ids = torch.tensor(TEXTS[:1])
            model(ids, position_ids=torch.arange(first, first + 19)[None])
    cap = ap.capture(model, TEXTS[0])
    for step in (calls[:2], calls[2:]):
        frame = checked(dataclasses.replace(cap, calls=tuple(step)), ["projection"])
        print(kind, dtype, frame.ratio.max())
        assert frame.verdict.eq("verified").all()
    frame = checked(dataclasses.replace(calls_at(cap, calls[:2], calls[2])), ["projection"])
    assert frame.verdict.eq("mismatch").any()  # the positions of another step


def calls_at(cap, calls, other):
    """The capture with these calls, at the positions of another one."""
    moved = [dataclasses.replace(call, position_ids=other.position_ids) for call in calls]
    return dataclasses.replace(cap, calls=tuple(moved))


# Independent references: plain loops over heads, tokens and pairs, in numpy.


def numbers(tensor):
    return tensor.detach().double().numpy()


def turned(x, position, theta, size, pair_of):
    """One head's vector, its first `size` numbers turned pair by pair."""
    out = x.copy()
    for pair in range(size // 2):
        first, second = pair_of(pair, size)
        angle = position * theta ** (-2 * pair / size)
        out[first] = x[first] * math.cos(angle) - x[second] * math.sin(angle)
        out[second] = x[second] * math.cos(angle) + x[first] * math.sin(angle)
    return out


def halves(pair, size):
    return pair, pair + size // 2


def neighbours(pair, size):
    return 2 * pair, 2 * pair + 1


def normed(x, weight, eps):
    return x / math.sqrt(sum(one * one for one in x) / len(x) + eps) * weight


def by_loop(kind, module, x, position):
    """Query of head 4 and key of key head 2 (GPT-NeoX: head 4) of one token, and their sizes."""
    if kind == "gpt_neox":
        weight, bias = numbers(module.query_key_value.weight), numbers(module.query_key_value.bias)
        first = (120, 130)  # head 4's query stands at 4·30, its key after it
        query, key = (
            np.array([weight[row + at] @ x + bias[row + at] for at in range(10)]) for row in first
        )
        return turned(query, position, 1e4, 4, halves), turned(key, position, 1e4, 4, halves)
    size = module.head_dim
    query = np.array([numbers(module.q_proj.weight)[4 * size + at] @ x for at in range(size)])
    key = np.array([numbers(module.k_proj.weight)[2 * size + at] @ x for at in range(size)])
    if kind == "qwen3":
        query = query + numbers(module.q_proj.bias)[4 * size : 5 * size]
        key = key + numbers(module.k_proj.bias)[2 * size : 3 * size]
        query = normed(query, numbers(module.q_norm.weight), 1e-6)
        key = normed(key, numbers(module.k_norm.weight), 1e-6)
    if kind == "gemma3_text":
        query = normed(query, 1 + numbers(module.q_norm.weight), 1e-6)
        key = normed(key, 1 + numbers(module.k_norm.weight), 1e-6)
    pair_of = neighbours if kind == "cohere" else halves
    theta = 500000.0 if kind == "cohere" else 1e4
    return turned(query, position, theta, size, pair_of), turned(
        key, position, theta, size, pair_of
    )


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "qwen3", "cohere", "gemma3_text"])
def test_projections_equal_plain_loops(kind):
    cap = ap.capture(small(kind), TEXTS, padding_side="left")
    for text, token in ((0, 13), (1, 15)):  # of the second text, 11 places are padding
        position = token if text == 0 else token - 11
        call = cap.calls[1]
        made = projected(call)
        x = numbers(call.hidden_states[text, token])
        query, key = by_loop(kind, call.module, x, position)
        key_head = 4 if kind == "gpt_neox" else 2
        np.testing.assert_allclose(made["query"][0][text, 4, token], query, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(
            made["key"][0][text, key_head, token], key, rtol=1e-11, atol=1e-12
        )


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        # cos 1 = 0.5403023058681398, sin 1 = 0.8414709848078965: each by 3 and 1, or by 2 and 1;
        # cos 0.01 = 0.9999500004166653, sin 0.01 = 0.009999833334166664.
        (
            "halves",
            [
                *(-1.9841106485555497, 1.959900667496664),
                *(2.4623779024123159, 4.0197996683349945, 5.0),
            ],
        ),
        (
            "neighbours",
            [
                *(-1.1426396637476532, 1.9220755965441762),
                *(2.9598506679133293, 4.0297995016691612, 5.0),
            ],
        ),
    ],
)
def test_a_rotation_by_hand(pairs, expected):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64).view(1, 1, 1, 5)
    turning = rotary.frequencies(THETA | {"partial_rotary_factor": 0.8}, 5)
    assert turning.value.tolist() == [1.0, 0.01]
    positions, plain = torch.tensor([[1]]), arithmetic(torch.float64, "eager")
    y, bound = rotary.rotated((x, torch.zeros_like(x)), positions, turning, pairs, plain)
    np.testing.assert_allclose(y.flatten(), expected, rtol=1e-15)
    assert bound[..., 4].item() == 0  # what is not turned is as it was
    still, _ = rotary.rotated((x, 0 * x), 0 * positions, turning, pairs, plain)
    assert torch.equal(still, x)


SCALED = {
    "default": THETA,
    "partial": THETA | {"partial_rotary_factor": 0.5},
    "linear": THETA | {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "yarn cut": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "original_max_position_embeddings": 512,
    },
}


@pytest.mark.parametrize("held", DTYPES)
@pytest.mark.parametrize("kind", SCALED)
def test_frequencies_are_those_of_transformers(kind, held):
    """Every type, within its own bound, which is a few units of float32 or of the dtype held."""
    config = AutoConfig.for_model(
        "phi",
        hidden_size=6 * 64,
        num_attention_heads=6,
        partial_rotary_factor=SCALED[kind].get("partial_rotary_factor", 1.0),
        max_position_embeddings=SCALED[kind].get("original_max_position_embeddings", 512) * 32,
        rope_parameters=dict(SCALED[kind]),
    )
    model = PhiRotaryEmbedding(config)
    found = rotary.frequencies(SCALED[kind], 64, held)
    theirs = model.inv_freq.to(held).double()
    assert len(theirs) == len(found.value) == (16 if kind == "partial" else 32)
    assert (theirs - found.value).abs().le(found.error).all()
    unit = torch.finfo(held).eps
    assert found.error.le((80 if held == torch.float32 else 2) * unit * found.value + 1e-7).all()
    assert math.isclose(found.factor, model.attention_scaling, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        (THETA | {"rope_type": "longrope"}, "of type 'longrope' are not known"),
        (THETA | {"rope_type": "linear"}, "'linear' without factor are not known"),
        ({"rope_type": "default"}, "without rope_theta are not known"),
        (SCALED["yarn"] | {"factor": None}, "of type 'yarn' are not known"),
    ],
)
def test_other_types_are_not_known(parameters, reason):
    assert reason in rotary.frequencies(parameters, 10)


# Bounds: what float32, float16 and bfloat16 make of random numbers never leaves them.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_no_rounding_of_a_norm_leaves_its_bound(dtype, offset):
    generator = torch.Generator().manual_seed(3)
    for size, spread in ((3, 1e-3), (14, 1.0), (64, 30.0)):
        x = (spread * torch.randn(40, 5, size, generator=generator)).to(dtype)
        weight = torch.randn(size, generator=generator).to(dtype)
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        last = (wide * (1.0 + weight.float())).to(dtype)  # Gemma's order
        got = last if offset else weight * wide.to(dtype)
        exact = (x.double(), torch.zeros(x.shape, dtype=torch.float64))
        want, bound = rms_norm(exact, weight.double() + offset, 1e-6, arithmetic(dtype, "eager"))
        assert (got.double() - want).abs().le(bound).all()
        assert bound.le(8 * torch.finfo(dtype).eps * (size + 12) * (want.abs() + 1e-4)).all()


@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_an_error_before_a_norm_is_carried_through_it(eps):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(200, 7, generator=generator, dtype=torch.float64)
    off = 0.1 * torch.rand(200, 7, generator=generator, dtype=torch.float64)
    weight = torch.randn(7, generator=generator, dtype=torch.float64)
    plain = arithmetic(torch.float64, "eager")
    want, bound = rms_norm((x, off), weight, eps, plain)
    for signs in torch.randint(0, 2, (50, 1, 7), generator=generator) * 2 - 1:
        got, _ = rms_norm((x + signs * off, 0 * off), weight, eps, plain)
        assert (got - want).abs().le(bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_no_rounding_of_a_rotation_leaves_its_bound(dtype, pairs):
    generator = torch.Generator().manual_seed(5)
    positions = torch.tensor([[0, 1, 17, 300, 2047, 30000, 131071]])
    x = torch.randn(40, 3, 7, 12, generator=generator).to(dtype)
    frequency = 1.0 / (10000.0 ** (torch.arange(0, 10, 2).float() / 10))
    angle = (positions[..., None].float() * frequency)[:, None]  # (1, 1, 7, 5)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    a, b = (x[..., :5], x[..., 5:10]) if pairs == "halves" else (x[..., :10:2], x[..., 1:10:2])
    first, second = a * cos - b * sin, b * cos + a * sin
    joined = (first, second) if pairs == "halves" else torch.stack([first, second], -1).flatten(-2)
    got = torch.cat([*joined, x[..., 10:]] if pairs == "halves" else [joined, x[..., 10:]], -1)
    turning = rotary.frequencies(THETA | {"partial_rotary_factor": 10 / 12}, 12)
    exact = (x.double(), torch.zeros(x.shape, dtype=torch.float64))
    want, bound = rotary.rotated(exact, positions, turning, pairs, arithmetic(dtype, "eager"))
    error = (got.double() - want).abs()
    print(dtype, pairs, (error / bound).nan_to_num().amax((0, 1, 3)))
    assert error.le(bound).all()
    near = bound[:, :, :5].max().item()  # positions up to 2,047
    assert near < {torch.float32: 0.02, torch.float16: 0.03, torch.bfloat16: 0.15}[dtype]


def test_a_scale_is_rounded_twice():
    x = torch.randn(100, generator=torch.Generator().manual_seed(6)).half()
    want, bound = scaled((x.double(), x.double() * 0), 10**-0.5, arithmetic(torch.half, "sdpa"))
    error = ((x * 10**-0.5).double() - want).abs()
    assert error.le(bound).all()
    assert error.max() > 0.2 * bound.max()


# Mutants: each must be found in every dtype, and in the right layer.


def wrong_pairs(model, monkeypatch):
    monkeypatch.setattr(modeling_llama, "rotate_half", modeling_cohere.rotate_half)


def wrong_theta(model, monkeypatch):
    model.model.rotary_emb.inv_freq.pow_(1.1)  # θ^1.1


def one_position_on(model, monkeypatch):
    real = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: real(x, position_ids + 1)


def turned_backwards(model, monkeypatch):
    real = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: real(q, k, cos, -sin)
    )


def key_norm_dropped(model, monkeypatch):
    attention(model, 1).k_norm.forward = lambda x: x


def norm_without_its_one(model, monkeypatch):
    norm = attention(model, 1).q_norm
    norm.forward = lambda x: (norm._norm(x.float()) * norm.weight.float()).type_as(x)


def norm_over_all_heads(model, monkeypatch):
    norm = attention(model, 1).q_norm
    norm.forward = lambda x: norm.weight * functional.rms_norm(x, x.shape[-2:], eps=1e-6)


def without_bias(name):
    def mutant(model, monkeypatch):
        layer = getattr(attention(model, 1), name)
        layer.forward = lambda x: functional.linear(x, layer.weight)

    return mutant


def heads_in_another_order(name, order):
    def mutant(model, monkeypatch):
        layer = getattr(attention(model, 1), name)
        real = layer.forward
        layer.forward = lambda x: real(x).unflatten(-1, (len(order), -1))[..., order, :].flatten(-2)

    return mutant


def of_another_layer(name):
    def mutant(model, monkeypatch):
        getattr(attention(model, 1), name).forward = getattr(attention(model, 0), name).forward

    return mutant


def key_and_value_exchanged(model, monkeypatch):
    layer = attention(model, 1).qkv_proj
    real = layer.forward

    def forward(x):
        query, key, value = real(x).split([60, 30, 30], -1)
        return torch.cat([query, value, key], -1)

    layer.forward = forward


def not_interleaved(model, monkeypatch):
    layer = attention(model, 1).query_key_value
    real = layer.forward
    layer.forward = lambda x: real(x).unflatten(-1, (3, 6, 10)).transpose(-3, -2).flatten(-3)


def scaled_twice(model, monkeypatch):
    attention(model, 1).scaling = 10**-1.0


MUTANTS = [
    ("llama", wrong_pairs, "projection"),
    ("llama", wrong_theta, "projection"),
    ("llama", one_position_on, "projection"),
    ("llama", turned_backwards, "projection"),
    ("qwen3", key_norm_dropped, "projection"),
    ("gemma3_text", key_norm_dropped, "projection"),
    ("gemma3_text", norm_without_its_one, "projection"),
    ("qwen3", norm_over_all_heads, "projection"),
    ("qwen2", without_bias("q_proj"), "projection"),
    ("qwen2", without_bias("v_proj"), "projection"),
    ("opt", without_bias("out_proj"), "merge"),
    ("llama", heads_in_another_order("q_proj", [0, 2, 4, 1, 3, 5]), "projection"),
    ("mistral", heads_in_another_order("k_proj", [0, 2, 1]), "projection"),
    ("llama", heads_in_another_order("v_proj", [1, 2, 0]), "projection"),
    ("gemma", of_another_layer("q_proj"), "projection"),
    ("bert", of_another_layer("value"), "projection"),
    ("phi", of_another_layer("dense"), "merge"),
    ("distilbert", of_another_layer("out_lin"), "merge"),
    ("phi3", key_and_value_exchanged, "projection"),
    ("gpt_neox", not_interleaved, "projection"),
    ("opt", scaled_twice, "projection"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "mutant", "check"), MUTANTS)
def test_mutants_are_found(monkeypatch, kind, mutant, check, dtype):
    model = small(kind, dtype)
    assert checked(ap.capture(model, TEXTS)).verdict.eq("verified").all()
    mutant(model, monkeypatch)
    frame = checked(ap.capture(model, TEXTS))
    wrong = frame[frame.verdict == "mismatch"]
    assert set(wrong.check) == {check}
    everywhere = mutant.__name__ in (
        *("wrong_pairs", "wrong_theta", "one_position_on", "turned_backwards"),
    )
    assert set(wrong.layer) == ({0, 1} if everywhere else {1})
    assert wrong.ratio.max() > 1.3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bert", "albert"])
def test_w_o_outside_of_the_module_or_before_its_norm_is_watched(kind, dtype):
    model = small(kind, dtype)
    cap = ap.capture(model, TEXTS)
    call = cap.calls[1]
    dense = call.parent.output.dense if kind == "bert" else call.module.dense
    expected = dense(call.head_output_model.flatten(-2))
    assert torch.equal(call.attention_output, expected)
    dense.forward = lambda x: functional.linear(x, dense.weight)  # loses its bias
    frame = checked(ap.capture(model, TEXTS))
    assert set(frame[frame.verdict == "mismatch"].check) == {"merge"}
    assert not dense._forward_hooks


# What is not known is said to be so.


def a_linear_of_another_library(model):
    class Linear(nn.Linear):  # as peft's, by its name
        def forward(self, x):
            return super().forward(x) + 1

    layer = attention(model, 1).q_proj
    layer.__class__ = Linear
    return r"q_proj is a .*Linear: what it computes is not known"


def packed_weights(model):
    layer = attention(model, 1).v_proj
    whole = layer.weight.detach()
    layer.forward = lambda x: functional.linear(x, whole)
    layer.weight = nn.Parameter(whole.to(torch.int8), requires_grad=False)
    return r"the weight of .*v_proj is packed as torch\.int8"


def weights_of_another_kind(model):
    class Packed(torch.Tensor):
        pass

    layer = attention(model, 1).o_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Packed))
    return r"the weight of .*o_proj is packed, or not in memory"


@pytest.mark.parametrize(
    "change", [a_linear_of_another_library, packed_weights, weights_of_another_kind]
)
def test_layers_that_are_more_than_their_weight_are_not_checked(change):
    model = small("llama")
    reason = change(model)
    frame = checked(ap.capture(model, TEXTS))
    rows = frame[frame.layer == 1]
    assert set(rows.check) == {"projection", "merge"}
    assert rows.verdict.eq("not_checked").all()
    assert rows.reason.str.contains(reason).all()
    assert frame[frame.layer == 0].verdict.eq("verified").all()


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("phi", {"qk_layernorm": True}, "has k_layernorm, q_layernorm"),
        ("cohere", {"use_qk_norm": True}, "has k_norm, q_norm"),
        (
            "llama",
            {"rope_parameters": THETA | {"rope_type": "dynamic", "factor": 2.0}},
            "rotary positions of type 'dynamic' are not known",
        ),
    ],
)
def test_what_a_config_adds_is_not_checked(kind, options, reason):
    frame = checked(ap.capture(small(kind, **options), TEXTS), ["projection"])
    assert frame.verdict.eq("not_checked").all()
    assert frame.reason.str.contains(reason, regex=False).all()


def test_a_class_that_is_not_known_is_verified_or_not_checked_never_wrong():
    plain = ap.capture(small("granite", num_key_value_heads=3), TEXTS)
    assert checked(plain).verdict.eq("verified").all()
    gated = checked(ap.capture(small("olmo2", num_key_value_heads=3), TEXTS))
    own = gated[gated.check == "projection"]  # its norm is over all heads at once
    assert own.verdict.eq("not_checked").all()
    call = plain.calls[0]
    changed = dataclasses.replace(call, query=call.query + 1, attention_output=call.hidden_states)
    frame = checked(dataclasses.replace(plain, calls=(changed, plain.calls[1])))
    assert frame[frame.layer == 0].verdict.eq("not_checked").all()
    assert frame[frame.layer == 0].reason.str.contains("GraniteAttention does more than").all()
    assert "not known" in value_norms(call, [0], call.value[0, :1])
    assert source(call, "query", 0) == "what the kernel got from model.layers.0.self_attn"


def encoder_decoder(kind):
    """A small BART or T5: one layer to read with, two to write with."""
    sizes = {
        "bart": {
            "d_model": 60,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
            "encoder_ffn_dim": 70,
            "decoder_ffn_dim": 70,
        },
        "t5": {
            "d_model": 60,
            "d_kv": 14,
            "d_ff": 70,
            "num_layers": 1,
            "num_decoder_layers": 2,
            "num_heads": 6,
        },
    }
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(kind, vocab_size=99, **sizes[kind])).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.25)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_self_attention_of_an_encoder_decoder_is_verified_and_cross_attention_not_known(
    kind, dtype
):
    model = encoder_decoder(kind).to(dtype)
    with torch.no_grad(), ap.probe(model) as calls:
        model(torch.tensor(TEXTS[:1]), decoder_input_ids=torch.tensor([[5, 17, 23]]))
    cap = dataclasses.replace(ap.capture(small("opt"), TEXTS[0]), calls=tuple(calls))
    for call, frame in zip(calls, split_by_call(cap), strict=True):
        assert set(frame.verdict) == {"verified" if call.kind == "self" else "not_checked"}
    assert [call.kind for call in calls].count("self") == 3


def split_by_call(cap):
    return [checked(dataclasses.replace(cap, calls=(call,))) for call in cap.calls]


# Positions and caches.


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "qwen3"])
def test_each_step_of_writing_is_verified(kind):
    """A batch padded on the left, token by token over a cache: the new keys at their positions."""
    model = small(kind, kernel="sdpa")
    ids = torch.tensor([TEXTS[0][:8], [2] * 3 + TEXTS[1][:5]])
    with ap.probe(model) as calls:
        model.generate(
            ids,
            attention_mask=(ids != 2).long(),
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
        )
    assert len(calls) == 2 * 4
    assert calls[-1].query.shape[2] == 1
    cap = ap.capture(model, TEXTS)
    for frame in split_by_call(dataclasses.replace(cap, calls=tuple(calls))):
        assert frame.verdict.eq("verified").all(), frame


def test_positions_are_counted_from_the_cache_where_none_are_given():
    model = small("llama")
    cache = StaticCache(config=model.config, max_cache_len=24)
    ids = torch.tensor(TEXTS[:1])
    with torch.no_grad(), ap.probe(model) as calls:
        model(ids[:, :7], cache=cache, use_cache=True)
        model(ids[:, 7:], cache=cache, use_cache=True)
    assert calls[2].position_ids.tolist() == [list(range(7, 19))]
    cap = ap.capture(model, TEXTS)
    for frame in split_by_call(dataclasses.replace(cap, calls=tuple(calls))):
        assert frame.verdict.eq("verified").all(), frame


def test_several_positions_a_token_are_not_known():
    call = ap.capture(small("llama"), TEXTS).calls[0]
    assert facts.positions([{"position_ids": torch.zeros(3, 2, 19), "past": 0}], 2, 19) is None
    assert "more than one position" in projected(dataclasses.replace(call, position_ids=None))


def test_frequencies_rounded_with_the_model_are_taken_as_they_are_held():
    """`model.to(dtype)` rounds them too: angles are then far off, but not by the model's code."""
    model = small("llama", torch.bfloat16, most=4096)
    assert ap.capture(model, TEXTS).calls[0].frequency_dtype == torch.bfloat16
    kept = small("llama", torch.bfloat16, most=4096)
    kept.model.rotary_emb.inv_freq = small("llama").model.rotary_emb.inv_freq
    assert ap.capture(kept, TEXTS).calls[0].frequency_dtype == torch.float32
    positions = torch.arange(3000, 3019)[None]
    made = []
    for one in (model, kept):
        with torch.no_grad(), ap.probe(one) as calls:
            one(torch.tensor(TEXTS[:1]), position_ids=positions)
        cap = dataclasses.replace(ap.capture(one, TEXTS[0]), calls=tuple(calls))
        assert checked(cap).verdict.eq("verified").all()
        made.append(projected(calls[0])["query"][0])
    assert (made[0] - made[1]).abs().max() > 1


# What rests on W_O and on the words.


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt_neox"])
def test_values_are_weighed_by_w_o(kind):
    model = small(kind)
    cap = ap.capture(model, TEXTS[0])
    call = cap.calls[1]
    layer = {
        "llama": lambda: call.module.o_proj,
        "bert": lambda: call.parent.output.dense,
        "gpt_neox": lambda: call.module.dense,
    }[kind]()
    weight, head = numbers(layer.weight), 4
    value = numbers(call.value[0, head // (6 // call.value.shape[1])])
    lengths = [np.linalg.norm(weight[:, head * 10 : head * 10 + 10] @ one) for one in value]
    weights = ap.weights(cap, 1, head).numpy()[-1]
    shares = weights * lengths / (weights * lengths).sum()
    frame = ap.attended(cap, 18, layer=1, head=head, weigh="value", top=19)
    found = frame.set_index("key_pos").value_share
    np.testing.assert_allclose(found.sort_index(), shares, rtol=1e-10)


@pytest.mark.parametrize(
    ("kind", "name", "head", "words"),
    [
        (
            "llama",
            "query",
            4,
            "X·Wᵀ; head 4: model.layers.1.self_attn.q_proj.weight[40:50]; then turned by the "
            "token's position (rotary)",
        ),
        ("llama", "value", 4, "X·Wᵀ; head 2: model.layers.1.self_attn.v_proj.weight[20:30]"),
        (
            "qwen3",
            "key",
            5,
            "X·Wᵀ + b; head 2: model.layers.1.self_attn.k_proj.weight[28:42]; then its RMS norm, "
            "k_norm; then turned by the token's position (rotary)",
        ),
        (
            "opt",
            "query",
            3,
            "X·Wᵀ + b; head 3: model.decoder.layers.1.self_attn.q_proj.weight[30:40]; then times "
            "1/√d_k",
        ),
        (
            "gpt_neox",
            "value",
            2,
            "X·Wᵀ + b; head 2: gpt_neox.layers.1.attention.query_key_value.weight[80:90]",
        ),
        ("phi3", "value", 5, "X·Wᵀ; head 2: model.layers.1.self_attn.qkv_proj.weight[110:120]"),
        (
            "bert",
            "key",
            3,
            "X·Wᵀ + b; head 3: bert.encoder.layer.1.attention.self.key.weight[30:40]",
        ),
    ],
)
def test_words_for_where_a_tensor_comes_from(kind, name, head, words):
    call = ap.capture(small(kind), TEXTS[0]).calls[1]
    assert source(call, name, head) == words
    # The words are true: those rows of that weight give that head.
    place = words.split(": ")[1].split(";")[0]
    layer, rows = place.split(".weight[")
    first, last = map(int, rows.rstrip("]").split(":"))
    linear_layer = dict(ap.capture(small(kind), TEXTS[0]).lm.model.named_modules())[layer]
    bias = linear_layer.bias
    made, _ = linear(
        call.hidden_states[0],
        linear_layer.weight[first:last].T,
        None if bias is None else bias[first:last],
        call.rounding,
    )
    if "then" not in words:
        own = head // (6 // getattr(call, name).shape[1])
        torch.testing.assert_close(made.float(), getattr(call, name)[0, own])


def test_the_coarsest_frequencies_of_a_model_count():
    model = nn.ModuleList([nn.Module(), nn.Module(), nn.Module()])
    assert facts.frequency_dtype(model.modules()) == torch.float32
    for one, name, dtype in zip(
        model,
        ("inv_freq", "sliding_attention_inv_freq", "original_inv_freq"),
        (torch.float32, torch.float16, torch.bfloat16),
        strict=True,
    ):
        one.register_buffer(name, torch.ones(3, dtype=dtype))
    assert facts.frequency_dtype(model.modules()) == torch.float16


@pytest.mark.parametrize(
    ("order", "verdict"), [([0, 0, 1, 1, 2, 2], "verified"), ([0, 1, 2, 0, 1, 2], "mismatch")]
)
def test_key_heads_that_a_model_repeats_before_the_kernel(order, verdict):
    model = small("llama")
    for number in (0, 1):
        module = attention(model, number)
        module.num_key_value_groups = 1
        for layer in (module.k_proj, module.v_proj):
            real = layer.forward
            layer.forward = lambda x, real=real: (
                real(x).unflatten(-1, (3, 10))[..., order, :].flatten(-2)
            )
    cap = ap.capture(model, TEXTS)
    assert cap.calls[0].key.shape[1] == 6
    report = ap.verify(cap, checks=["projection", "output"])
    frame = report.to_frame()
    assert report.verdict == verdict
    assert set(frame[frame.check == "projection"].verdict) <= {"verified", verdict}
    assert set(frame[frame.verdict == "mismatch"].layer) in (set(), {0, 1})

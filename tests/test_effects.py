"""What each term is good for, against models that were changed by hand, with numpy and loops."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from samples import IDS
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPT2Model,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    ProphetNetConfig,
    ProphetNetForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import attnprobe as ap
from attnprobe.effects import formulas as effects
from attnprobe.effects.formulas import TERMS
from attnprobe.effects.predicting import Predictions, compared

SIZES = {"vocab_size": 101, "hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 6}
HEAD = 10  # d_k
WIDTH = 60  # the embedding's size
LONG = [(7 * at * at + 3 * at + 1) % 101 for at in range(130)]  # past one block of 64 tokens
NAMES = [term.name for term in TERMS]

# What a query is multiplied by to have each of these in place of 1/√d_k.
ON_QUERY = {
    "without /√d_k": HEAD**0.5,
    "divided by d_k": HEAD**-0.5,
    "divided by √d_model": (HEAD / WIDTH) ** 0.5,
    "uniform weights": 0.0,
}


def mistral():
    """2 layers, 6 heads of 10 on 3 key heads, a window of 4."""
    torch.manual_seed(0)
    config = MistralConfig(
        **SIZES,
        num_key_value_heads=3,
        head_dim=HEAD,
        intermediate_size=70,
        sliding_window=4,
        initializer_range=0.3,
    )
    return MistralForCausalLM(config).eval().double()


def opt():
    torch.manual_seed(0)
    config = OPTConfig(**SIZES, ffn_dim=70, word_embed_proj_dim=60, init_std=0.3, pad_token_id=0)
    return OPTForCausalLM(config).eval().double()


@pytest.fixture(params=["gpt2", "mistral", "opt"])
def model(request, gpt2):
    """One in float64, so that nothing but the last digits may differ."""
    make = {"mistral": mistral, "opt": opt}
    if request.param == "gpt2":
        return gpt2(dtype=torch.float64, n_positions=140)
    return make[request.param]()


def by_hand(model, term):
    """A copy of the model whose weights are such that it computes the changed formula."""
    changed = copy.deepcopy(model)
    changed.set_attn_implementation("eager")
    factor = ON_QUERY.get(term)
    with torch.no_grad():
        for name, module in changed.named_modules():
            if name.endswith("c_attn") and factor is not None:  # GPT-2's, columns q | k | v
                module.weight[:, :WIDTH] *= factor
                module.bias[:WIDTH] *= factor
            elif name.endswith("q_proj") and factor is not None:
                for parameter in module.parameters():
                    parameter *= factor
            elif (
                name.endswith(("attn.c_proj", "o_proj", "attn.out_proj")) and "no attention" in term
            ):
                module.weight.zero_()
    return changed


def run_by_hand(model, term, ids):
    """Logits (T, V) and weights, a list of (H, T, T) by layer, of one text."""
    changed = by_hand(model, term)
    inputs = {"input_ids": torch.tensor([ids])}
    if term == "without M":
        inputs["attention_mask"] = torch.zeros(1, 1, len(ids), len(ids), dtype=torch.float64)
        inputs["position_ids"] = torch.arange(len(ids))[None]
    with torch.no_grad():
        output = changed(**inputs, output_attentions=True)
    return output.logits[0].numpy(), [one[0].numpy() for one in output.attentions]


def log_softmax(logits):
    rest = logits - logits.max(-1, keepdims=True)
    return rest - np.log(np.exp(rest).sum(-1, keepdims=True))


def expected(model, term, texts):
    """One row of the frame, by loops."""
    window = getattr(model.config, "sliding_window", None)
    lists = {name: [] for name in ("entropy", "entropy_share", "future", "loss", "top1", "kl")}
    for ids in texts:
        logits, attentions = run_by_hand(model, term, ids)
        p = log_softmax(run_by_hand(model, "as it is", ids)[0])
        q = log_softmax(logits)
        for t in range(len(ids)):
            lists["kl"].append(sum(np.exp(p[t]) * (p[t] - q[t])))
            lists["top1"].append(float(p[t].argmax() == q[t].argmax()))
            if t + 1 < len(ids):
                lists["loss"].append(-q[t, ids[t + 1]])
        for weights in attentions if term != "no attention at all" else ():
            for row in (row for head in weights for row in enumerate(head)):
                i, a = row
                keys = len(ids) if term == "without M" else min(i + 1, window or len(ids))
                entropy = -sum(one * math.log(one) for one in a if one > 0)
                lists["entropy"].append(entropy)
                if keys > 1:
                    lists["entropy_share"].append(entropy / math.log(keys))
                lists["future"].append(a[i + 1 :].sum())
    means = {name: np.mean(one) if one else math.nan for name, one in lists.items()}
    return means | {"perplexity": math.exp(means["loss"])}


@pytest.mark.parametrize("term", NAMES)
def test_every_column_is_that_of_a_model_changed_by_hand(model, term):
    texts = [LONG[:70], IDS[:5]]
    row = ap.term_effects(model, texts).set_index("term").loc[term]
    wanted = expected(model, term, texts)
    # Eager attention is float64 throughout in GPT-2; the others' softmax is in float32.
    off = {"rtol": 1e-9, "atol": 1e-12}
    if model.config.model_type != "gpt2":
        off = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose([row[name] for name in wanted], list(wanted.values()), **off)
    if term in ("without /√d_k", "uniform weights", "without M", "no attention at all"):
        assert row["kl"] > 0.01  # the change is one that shows


def test_the_frame_names_its_terms_and_counts_what_it_is_over(gpt2):
    frame = ap.term_effects(gpt2(), [IDS, IDS[:5], LONG[:64]])
    assert list(frame.columns) == list(effects.COLUMNS)
    assert dict(zip(frame["term"], frame["formula"], strict=True)) == {
        "as it is": "softmax(QKᵀ/√d_k + M)V",
        "without /√d_k": "softmax(QKᵀ + M)V",
        "divided by d_k": "softmax(QKᵀ/d_k + M)V",
        "divided by √d_model": "softmax(QKᵀ/√d_model + M)V",
        "without M": "softmax(QKᵀ/√d_k)V",
        "uniform weights": "softmax(M)V",
        "no attention at all": "0",
    }
    assert frame.attrs == {"texts": 3, "tokens": 80, "predicted": 77}
    assert {str(frame[name].dtype) for name in effects.COLUMNS[2:-1]} == {"float64"}
    first = frame.iloc[0]
    assert (first["kl"], first["top1"], first["future"], first["note"]) == (0, 1, 0, "")
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]), rel=1e-12)


def test_uniform_weights_have_all_the_entropy_there_is(gpt2):
    row = ap.term_effects(gpt2(), IDS).set_index("term").loc["uniform weights"]
    assert row["entropy"] == pytest.approx(np.mean([math.log(n) for n in range(1, 12)]), rel=1e-12)
    assert row["entropy_share"] == pytest.approx(1, rel=1e-12)


def test_without_the_mask_half_of_uniform_weights_would_be_later_ones(gpt2):
    model = gpt2()
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, :WIDTH] = 0
            block.attn.c_attn.bias[:WIDTH] = 0
    row = ap.term_effects(model, IDS).set_index("term").loc["without M"]
    assert row["future"] == pytest.approx(5 / 11, rel=1e-12)  # (T - 1) / 2T
    assert row["entropy"] == pytest.approx(math.log(11), rel=1e-12)


def test_a_text_has_the_same_share_alone_and_among_others(model):
    texts = [IDS, LONG[:19], IDS[3:6]]
    numbers = list(effects.COLUMNS[5:9])
    together = ap.term_effects(model, texts)
    alone = [ap.term_effects(model, one) for one in texts]
    for name in ("loss", "kl", "top1"):
        count = "predicted" if name == "loss" else "tokens"
        weighed = sum(frame[name] * frame.attrs[count] for frame in alone)
        np.testing.assert_allclose(together[name], weighed / together.attrs[count], rtol=1e-12)
    again = ap.term_effects(model, texts[::-1])
    np.testing.assert_allclose(together[numbers], again[numbers], rtol=1e-12)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_leaves_the_model_as_it_was(gpt2, kernel, dtype):
    model, ids = gpt2(kernel, dtype), torch.tensor([IDS])
    before = model(ids).logits
    frame = ap.term_effects(model, IDS)
    assert torch.equal(model(ids).logits, before)
    assert frame["loss"].notna().all()


def test_progress_counts_every_run(gpt2):
    seen = []
    ap.term_effects(gpt2(), [IDS, IDS], progress=lambda *one: seen.append(one))
    assert seen == [(name, at, 14) for at, name in enumerate(NAMES * 2, 1)]


# Notes


def test_without_the_mask_the_note_says_what_the_loss_says(gpt2):
    said = {}
    for seed in range(4):
        frame = ap.term_effects(gpt2(seed=seed), LONG[:40]).set_index("term")
        row = frame.loc["without M"]
        lower = row["loss"] < frame.loc["as it is", "loss"]
        said[lower] = row["note"]
        seen = f"{row['future']:.0%} of the weights are on later tokens"
        assert row["note"] == (
            f"sees the answer: {seen}, and the loss falls"
            if lower
            else f"breaks: {seen}, and the loss does not fall"
        )
        others = frame.drop(index=["without M", "no attention at all"])
        assert (others["note"] == "").all()
    assert set(said) == {True, False}


def test_a_model_that_leaves_out_the_scale_says_so():
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=101,
        hidden_size=60,
        num_layers=2,
        num_heads=6,
        attention_types=[[["global"], 2]],
        initializer_range=0.3,
    )
    frame = ap.term_effects(GPTNeoForCausalLM(config).eval(), IDS).set_index("term")
    assert frame.loc["as it is", "formula"] == "softmax(QKᵀ + M)V"
    assert frame.loc["without M", "formula"] == "softmax(QKᵀ)V"
    assert frame.loc["without /√d_k", "note"] == "this is the model's own scale"
    assert frame.loc["without /√d_k", "kl"] < 1e-9
    assert frame.loc["divided by d_k", "kl"] > 1e-3


def test_scales_of_their_own_are_written_out(gpt2):
    by_layer = ap.term_effects(gpt2(scale_attn_by_inverse_layer_idx=True), IDS)
    assert by_layer.loc[0, "formula"] == "softmax(QKᵀ·c + M)V"
    assert by_layer.loc[0, "note"] == "c differs from layer to layer"


def test_of_sinks_the_entropy_is_that_of_what_keys_get():
    torch.manual_seed(0)
    config = GptOssConfig(
        **SIZES,
        head_dim=HEAD,
        num_key_value_heads=3,
        intermediate_size=20,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        initializer_range=0.5,
    )
    model = GptOssForCausalLM(config).eval()
    row = ap.term_effects(model, IDS).iloc[0]
    assert "sinks" in row["note"]
    _, weights = run_by_hand(model, "as it is", IDS)
    assert min(one.sum(-1).min() for one in weights) < 0.9
    rows = [a for one in weights for head in one for a in head]
    entropies = [-sum(x * math.log(x) for x in a if x > 0) for a in rows]
    assert row["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)


def test_what_is_not_finite_any_more_has_no_numbers(gpt2, monkeypatch):
    logits_of = effects.logits_of
    calls = []

    def overflowing(model, ids, **options):
        calls.append(1)
        return logits_of(model, ids, **options) / (0 if len(calls) == 3 else 1)  # the third run's

    monkeypatch.setattr(effects, "logits_of", overflowing)
    frame = ap.term_effects(gpt2(), IDS)
    wrong = frame["loss"].isna()
    assert list(frame["term"][wrong]) == ["divided by d_k"]
    assert frame.loc[2, ["perplexity", "top1", "kl"]].isna().all()
    assert frame.loc[2, "note"] == "what the model computes is not finite any more"
    assert frame.loc[2, "entropy"] > 0


def test_an_m_that_is_not_known_is_not_taken_away(gpt2, monkeypatch):
    monkeypatch.setattr("attnprobe.architecture.facts.mask_rule", lambda *_: None)
    frame = ap.term_effects(gpt2(), IDS).set_index("term")
    row = frame.loc["without M"]
    assert row["note"] == "not run: the model's M is not known"
    assert row.drop(["formula", "note"]).isna().all()
    assert frame["loss"].drop("without M").notna().all()


# Predictions


def test_predictions_by_hand():
    # Two tokens of a vocabulary of two: the model says 3:1 and 1:1, the other 1:3 and 1:1.
    own, given = (torch.tensor([[first, 1.0], [1.0, 1.0]]).log() for first in (3.0, 1 / 3))
    found = compared(torch.tensor([0, 1]), own, given)
    assert (found.tokens, found.known, found.same) == (2, 1, 1)
    assert found.loss == pytest.approx(math.log(4 / 3), rel=1e-6)
    assert found.kl == pytest.approx(0.75 * math.log(3) + 0.25 * math.log(1 / 3), rel=1e-6)
    assert found.means()["kl"] == pytest.approx(found.kl / 2)
    assert found.means()["top1"] == 0.5


def test_a_perplexity_past_all_numbers_is_infinite():
    assert Predictions(2, 1, 800.0, 1.0, 1).means()["perplexity"] == math.inf


# Refusals


def test_what_is_no_causal_language_model_is_refused_by_name(gpt2):
    bert = BertConfig(**SIZES, intermediate_size=70)
    t5 = T5Config(vocab_size=101, d_model=60, d_kv=10, d_ff=70, num_layers=2, num_heads=6)
    refused = {
        "BertForMaskedLM predicts no next token": BertForMaskedLM(bert),
        "GPT2Model predicts no next token": GPT2Model(gpt2().config),
        "T5ForConditionalGeneration is an encoder-decoder": T5ForConditionalGeneration(t5),
        "sees later tokens: expected a causal": BertLMHeadModel(bert),
    }
    for said, model in refused.items():
        with pytest.raises(ap.ModelError, match=said):
            ap.term_effects(model.eval(), IDS)


def test_texts_that_cannot_be_used_are_refused(gpt2):
    with pytest.raises(ap.InputError, match="text 1 has one token, and no next one"):
        ap.term_effects(gpt2(), [IDS, [5]])
    with pytest.raises(ap.InputError, match="dropout"):
        ap.term_effects(gpt2().train(), IDS)
    model = gpt2()
    with ap.edit(model, scale="none"), pytest.raises(ap.InputError, match="edited already"):
        ap.term_effects(model, IDS)


@pytest.fixture
def prophetnet():
    """Its second stream of attention is not seen."""
    torch.manual_seed(0)
    config = ProphetNetConfig(
        vocab_size=101,
        hidden_size=60,
        num_decoder_layers=2,
        num_decoder_attention_heads=6,
        decoder_ffn_dim=70,
        max_position_embeddings=40,
        is_decoder=True,
        is_encoder_decoder=False,
        add_cross_attention=False,
    )
    return ProphetNetForCausalLM(config).eval()


def test_attention_that_is_not_seen_is_not_left_as_it_is_in_silence(prophetnet):
    with pytest.raises(ap.ModelError, match=r"cannot be changed: .* unseen"):
        ap.term_effects(prophetnet, IDS)
    with pytest.raises(ap.ModelError, match=r"ProphetNetForCausalLM: .* unseen"):
        ap.scale_variance(prophetnet, IDS)


def test_an_edit_refuses_attention_that_ran_unseen(prophetnet):
    ids = torch.tensor([IDS])
    with (
        torch.no_grad(),
        pytest.raises(ap.ModelError, match=r"layer 1 was not edited: .* unseen: "),
        ap.edit(prophetnet, scale="none"),
    ):
        prophetnet(ids)
    with torch.no_grad(), ap.edit(prophetnet, layers=[0], scale="none"):  # a layer that is seen
        prophetnet(ids)


@pytest.mark.parametrize(("scale", "factor"), [("none", HEAD**0.5), ("1/d_k", HEAD**-0.5)])
def test_an_edit_takes_away_a_scale_that_the_query_brings_along(scale, factor):
    model, ids = opt(), torch.tensor([IDS])
    changed = by_hand(model, next(name for name, one in ON_QUERY.items() if one == factor))
    changed.set_attn_implementation("sdpa")  # eager has a softmax in float32
    with torch.no_grad():
        wanted = changed(ids).logits
        with ap.edit(model, scale=scale):
            found = model(ids).logits
        assert (model(ids).logits - wanted).abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


# The variance of q·k


def entropy(scores):
    weights = np.exp(scores - scores.max())
    weights = weights / weights.sum()
    return -sum(one * math.log(one) for one in weights if one > 0)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_heads_variance_is_that_over_its_pairs(model, layer):
    texts = [LONG[:70], IDS[:5]]
    window = getattr(model.config, "sliding_window", None)
    frame = ap.scale_variance(model, texts, sizes=[8])
    frame = frame[(frame["source"] == "model") & (frame["layer"] == layer)].set_index("head")
    caps = [ap.capture(model, ids) for ids in texts]
    before = HEAD**-0.5 if model.config.model_type == "opt" else 1.0  # in OPT's query
    for head in range(6):
        raw, lengths, entropies, unscaled = [], [], [], []
        for cap in caps:
            call = cap.calls[layer]
            served = head * call.key.shape[1] // 6
            q, k = call.query[0, head].numpy() / before, call.key[0, served].numpy()
            for i in range(len(q)):
                seen = [j for j in range(i + 1) if window is None or j > i - window]
                row = np.array([q[i] @ k[j] for j in seen])
                raw += list(row)
                lengths += [(q[i] @ q[i]) * (k[j] @ k[j]) for j in seen]
                entropies.append(entropy(row / HEAD**0.5))
                unscaled.append(entropy(row))
        found = frame.loc[head]
        assert (found["d_k"], found["pairs"]) == (HEAD, len(raw))
        wanted = {
            "variance": np.var(raw),
            "expected": np.mean(lengths) / HEAD,
            "ratio": np.var(raw) * HEAD / np.mean(lengths),
            "variance_scaled": np.var(raw) / HEAD,
            "entropy": np.mean(entropies),
            "entropy_unscaled": np.mean(unscaled),
        }
        np.testing.assert_allclose(
            [found[name] for name in wanted], list(wanted.values()), rtol=1e-8
        )


@pytest.mark.parametrize("seed", [0, 1])
def test_of_random_vectors_the_variance_is_d_k(gpt2, seed):
    frame = ap.scale_variance(gpt2(), IDS, seed=seed)
    drawn = frame[frame["source"] == "random"]
    assert list(drawn["d_k"]) == [8, 16, 32, 64, 128, 256, 512]
    assert drawn["layer"].isna().all()
    assert (drawn["pairs"] == 512**2).all()
    # Over 512 vectors a mean of squares is off by about √(2/512d), 2 % for d of 8.
    np.testing.assert_allclose(drawn["variance"] / drawn["d_k"], 1, atol=0.08)
    np.testing.assert_allclose(drawn["variance_scaled"], 1, atol=0.08)
    np.testing.assert_allclose(drawn["ratio"], 1, atol=0.02)
    # Scaled, softmax is as sharp in all sizes; unscaled, it sharpens as d_k grows.
    assert drawn["entropy"].max() - drawn["entropy"].min() < 0.1
    assert drawn["entropy_unscaled"].is_monotonic_decreasing
    assert drawn["entropy_unscaled"].iloc[-1] < 0.4 < 3 < drawn["entropy_unscaled"].iloc[0]


def test_the_random_vectors_hang_on_the_seed_alone(gpt2):
    one, again, other = (ap.scale_variance(gpt2(), IDS, sizes=[8, 4], seed=s) for s in (3, 3, 4))
    assert one.equals(again)
    assert list(one.tail(2)["d_k"]) == [8, 4]
    assert not np.isclose(one["variance"].iloc[-1], other["variance"].iloc[-1])


def test_both_ways_every_pair_counts(bidirectional):
    frame = ap.scale_variance(bidirectional.lm, IDS, sizes=[8])
    assert set(frame["pairs"][frame["source"] == "model"]) == {len(IDS) ** 2}


def test_sizes_that_are_none_are_refused(gpt2):
    for sizes in ([], [0], [2.5], 8, "8", [8, 2**14 + 1], [10**9]):
        with pytest.raises(ap.InputError, match="sizes"):
            ap.scale_variance(gpt2(), IDS, sizes=sizes)
    with pytest.raises(ap.InputError, match=r"from 1 to 16,384, got \[16385\]"):
        ap.scale_variance(gpt2(), IDS, sizes=[16385])


@pytest.mark.parametrize("seed", [2**70, 2**64, -(2**63) - 1, 0.5])
def test_seeds_that_are_none_are_refused(gpt2, seed):
    with pytest.raises(ap.InputError, match="seed"):
        ap.scale_variance(gpt2(), IDS, sizes=[8], seed=seed)


def test_seeds_may_be_any_that_torch_takes(gpt2):
    for seed in (2**64 - 1, -(2**63)):
        assert len(ap.scale_variance(gpt2(), IDS, sizes=[8], seed=seed)) == 19


@pytest.mark.parametrize("function", [ap.scale_variance, ap.term_effects])
@pytest.mark.parametrize("name", ["h.1.attn.c_attn.weight", "h.2.mlp.c_proj.bias"])
def test_a_weight_that_is_not_finite_is_named(gpt2, function, name):
    model = gpt2()
    with torch.no_grad():
        model.transformer.get_parameter(name).view(-1)[2] = math.nan
    with pytest.raises(ap.NonFiniteError, match=f"so does the weight transformer.{name}: 1 of"):
        function(model, IDS)


def test_the_variance_needs_attention_that_is_seen_and_one_text(gpt2):
    t5 = T5Config(vocab_size=101, d_model=60, d_kv=10, d_ff=70, num_layers=2, num_heads=6)
    with pytest.raises(ap.ModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        ap.scale_variance(T5ForConditionalGeneration(t5).eval(), IDS)

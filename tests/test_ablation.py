"""Each head silenced in turn, against a loop of single edits and models without the head."""

import copy

import induction
import numpy as np
import pandas as pd
import pytest
import torch
from samples import mistral
from transformers import BertConfig, BertForMaskedLM, GPT2Model

import attnprobe as ap
from attnprobe.effects import trials
from attnprobe.records import LanguageModel

TEXTS = [[5, 17, 23, 8, 4, 42, 99, 3, 77, 61, 12], [9, 31, 5, 60, 2, 71, 44]]
PAIRS = [(layer, head) for layer in range(3) for head in range(6)]


@pytest.fixture
def model(gpt2):
    return gpt2(dtype=torch.float64)  # whose rounding is far below any effect


@torch.no_grad()
def losses(model, ids):
    """-ln p of each next token of one text, by numpy."""
    logits = model(torch.tensor([ids])).logits[0].double().numpy()
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return [-logs[at, one] for at, one in enumerate(ids[1:])]


@torch.no_grad()
def last_logits(model, ids):
    return model(torch.tensor([ids])).logits[0, -1].double().numpy()


METRICS = {
    "loss": lambda model: np.mean([one for ids in TEXTS for one in losses(model, ids)]),
    "logit": lambda model: np.mean([last_logits(model, ids)[13] for ids in TEXTS]),
    "logit_difference": lambda model: np.mean(
        [last_logits(model, ids)[13] - last_logits(model, ids)[7] for ids in TEXTS]
    ),
}
WORDS = {"loss": {}, "logit": {"target": 13}, "logit_difference": {"target": 13, "against": 7}}


def forwards(model):
    """How many texts each forward of a model from now on runs, as they come."""
    counts = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: counts.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return counts


# What is measured


@pytest.mark.parametrize("metric", METRICS)
def test_a_silenced_head_is_as_one_without_its_rows_of_w_o(model, metric):
    frame = ap.head_effects(model, TEXTS, metric, **WORDS[metric])
    assert list(zip(frame["layer"], frame["head"], strict=True)) == PAIRS
    wanted = []
    for layer, head in PAIRS:
        without = copy.deepcopy(model)
        without.transformer.h[layer].attn.c_proj.weight.data[10 * head : 10 * head + 10] = 0
        wanted.append(METRICS[metric](without))
    np.testing.assert_allclose(frame["value"], wanted, rtol=1e-12, atol=1e-10)
    unchanged = METRICS[metric](model)
    np.testing.assert_allclose(frame["effect"], wanted - unchanged, rtol=1e-9, atol=1e-10)
    assert frame["effect"].abs().min() > 1e-4
    assert frame["effect"].nunique() == len(PAIRS)
    assert frame.attrs["unchanged"] == pytest.approx(unchanged, rel=1e-12)
    assert frame.attrs["unit"] == ("nats" if metric == "loss" else "logits")


def test_heads_that_share_keys_are_silenced_one_by_one():
    model = mistral().double()
    frame = ap.head_effects(model, TEXTS)
    wanted = []
    for layer, head in zip(frame["layer"], frame["head"], strict=True):
        without = copy.deepcopy(model)
        out = without.model.layers[layer].self_attn.o_proj
        out.weight.data[:, 10 * head : 10 * head + 10] = 0
        wanted.append(METRICS["loss"](without))
    assert len(wanted) == 12
    np.testing.assert_allclose(frame["value"], wanted, rtol=1e-9)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
def test_equals_a_loop_of_single_edits(gpt2, kernel, how):
    model = gpt2(kernel, torch.float64)
    frame = ap.head_effects(model, TEXTS, how=how, seed=3)
    reference = None if how == "zero" else ap.capture(model, TEXTS)
    wanted = []
    for pair in PAIRS:
        with ap.edit(model, heads=[pair], head_output=how, reference=reference, seed=3):
            wanted.append(METRICS["loss"](model))
    np.testing.assert_allclose(frame["value"], wanted, rtol=1e-12)
    assert frame.attrs["how"] == how


def test_another_reference_is_taken_where_one_is_given(model):
    other = ap.capture(model, [[1, 2, 3, 4, 5, 6]])
    frame = ap.head_effects(model, TEXTS, how="mean", reference=other, heads=[(1, 4)])
    with ap.edit(model, heads=[(1, 4)], head_output="mean", reference=other):
        wanted = METRICS["loss"](model)
    assert frame["value"].item() == pytest.approx(wanted, rel=1e-12)
    own = ap.head_effects(model, TEXTS, how="mean", heads=[(1, 4)])
    assert abs(frame["value"].item() - own["value"].item()) > 1e-4


def test_some_heads_are_as_among_all(model):
    every = ap.head_effects(model, TEXTS).set_index(["layer", "head"])
    some = ap.head_effects(model, TEXTS, heads=[(2, 1), (0, 5), (2, 1)]).set_index(
        ["layer", "head"]
    )
    pd.testing.assert_frame_equal(some, every.loc[[(0, 5), (2, 1)]], rtol=1e-10)


# How it runs


def test_many_heads_run_in_one_forward_and_texts_are_not_padded(model):
    counts, lengths = forwards(model), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    ap.head_effects(model, TEXTS)
    assert sorted(counts) == [1, 1, 1, 18, 18]  # a capture; unchanged; all heads
    assert set(lengths) == {11, 7}


def test_forwards_hold_no_more_than_a_budget_and_the_numbers_stay(model, monkeypatch):
    wanted = ap.head_effects(model, TEXTS[:1])
    numbers = 2 * 101 * 11 + 6 * 11 * (24 * 10 + 11)  # logits; activations and weights
    monkeypatch.setattr(trials, "BYTES_AT_ONCE", 8 * numbers * 5 + 1)
    counts, said = forwards(model), []
    frame = ap.head_effects(model, TEXTS[:1], progress=lambda *one: said.append(one))
    assert counts == [1, 1, 5, 5, 5, 3]
    assert said == [
        ("layer 0", 5, 18),
        ("layer 1", 10, 18),
        ("layer 2", 15, 18),
        ("layer 2", 18, 18),
    ]
    pd.testing.assert_frame_equal(frame, wanted, rtol=1e-10)
    monkeypatch.setattr(trials, "BYTES_AT_ONCE", 1)
    counts.clear()
    ap.head_effects(model, TEXTS[:1])
    assert counts == [1] * 20  # never more than a forward a head


def test_only_the_last_tokens_logits_are_made_where_no_more_count(model):
    widths = []
    model.lm_head.register_forward_hook(lambda _, args, output: widths.append(output.shape[1]))
    ap.head_effects(model, TEXTS, "logit", target=13)
    assert widths[1:] == [1] * 4  # the first is a capture's


def test_the_model_is_as_before_also_after_an_exception(model):
    before = last_logits(model, TEXTS[0])

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ap.head_effects(model, TEXTS, progress=stop)
    np.testing.assert_array_equal(last_logits(model, TEXTS[0]), before)
    hooks = [module._forward_pre_hooks or module._forward_hooks for module in model.modules()]
    assert not any(hooks)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((TEXTS, "perplexity"), {}, "metric is one of loss, logit, logit_difference; got 'perp"),
        ((TEXTS, "logit"), {}, "'logit' needs target"),
        ((TEXTS, "logit_difference"), {"target": 3}, "'logit_difference' needs against"),
        ((TEXTS,), {"target": 3}, "'loss' takes no target, got 3"),
        ((TEXTS, "logit"), {"target": 3, "against": 4}, "'logit' takes no against"),
        ((TEXTS, "logit"), {"target": 101}, "token id 101 is out of range: the model has 0 to 100"),
        ((TEXTS, "logit"), {"target": -1}, "token id -1 is out of range"),
        ((TEXTS, "logit"), {"target": "park"}, "a bare model has no word 'park'"),
        ((TEXTS,), {"how": "noise"}, "how is one of zero, mean, resample; got 'noise'"),
        ((TEXTS,), {"heads": [(3, 0)]}, "no head 0 in layer 3: the model has 3 layers of 6 heads"),
        ((TEXTS,), {"heads": [(0, 6)]}, "no head 6 in layer 0"),
        ((TEXTS,), {"heads": []}, "at least one"),
        (([[3, 5], [4]],), {}, "text 1 has one token.*give at least two"),
        (([[]],), {}, "no tokens"),
    ],
)
def test_says_what_it_cannot_measure(model, arguments, options, said):
    with pytest.raises(ap.InputError, match=said):
        ap.head_effects(model, *arguments, **options)


def test_a_reference_is_not_for_zero(model):
    with pytest.raises(ap.InputError, match="how='zero' takes no reference: give how='mean' or"):
        ap.head_effects(model, TEXTS, reference=ap.capture(model, TEXTS))


@pytest.mark.parametrize("seed", [2**70, -(2**63) - 1, 1.5, True])
def test_refuses_seeds_that_no_generator_takes(model, seed):
    with pytest.raises(ap.InputError, match="seed"):
        ap.head_effects(model, TEXTS, how="resample", seed=seed)


def test_a_weight_that_is_not_finite_is_named_though_only_one_text_meets_it(model):
    with torch.no_grad():
        model.transformer.wpe.weight[8] = np.nan  # a position of the first text alone
    with pytest.raises(ap.NonFiniteError, match=r"weight transformer\.wpe\.weight: 60 of"):
        ap.head_effects(model, TEXTS)


def test_the_frame_says_what_it_is_of(model):
    options = {"target": 13, "against": 7, "how": "resample", "seed": 5, "heads": [(0, 1)]}
    frame = ap.head_effects(model, TEXTS, "logit_difference", **options)
    said = {name: frame.attrs[name] for name in ("target", "against", "seed", "texts", "text")}
    ids = " ".join(map(str, TEXTS[0]))
    assert said == {"target": 13, "against": 7, "seed": 5, "texts": 2, "text": ids}
    frame = ap.head_effects(model, TEXTS[1], heads=[(0, 1)], seed=5)  # of which zero makes no use
    said = [frame.attrs[name] for name in ("target", "against", "seed", "texts")]
    assert said == [None, None, None, 1]


def test_refuses_an_edit_that_is_open(model):
    with ap.edit(model, scale=1.0), pytest.raises(ap.InputError, match="being edited already"):
        ap.head_effects(model, TEXTS)


def test_refuses_models_that_predict_no_next_word(gpt2):
    config = BertConfig(
        vocab_size=101,
        hidden_size=60,
        num_hidden_layers=1,
        num_attention_heads=6,
        intermediate_size=70,
    )
    with pytest.raises(ap.ModelError, match="BertForMaskedLM predicts no next token"):
        ap.head_effects(BertForMaskedLM(config).eval(), TEXTS)
    base = gpt2().transformer
    assert isinstance(base, GPT2Model)
    with pytest.raises(ap.ModelError, match="GPT2Model predicts no next token"):
        ap.head_effects(base, TEXTS)


# Next words


@pytest.fixture(scope="module")
def bundled():
    return ap.load("bundled")


def test_words_reach_the_metric(bundled):
    frame = ap.head_effects(
        bundled, "She went into the", "logit_difference", target="house", against="garden"
    )
    house, garden = (bundled.tokenizer(word)["input_ids"][0] for word in (" house", " garden"))
    ids = bundled.tokenizer("She went into the")["input_ids"]
    logits = last_logits(bundled.model, ids)
    assert frame.attrs["unchanged"] == pytest.approx(logits[house] - logits[garden], abs=1e-4)
    assert (frame.attrs["model"], frame.attrs["metric"]) == ("bundled", "logit_difference")
    assert (frame.attrs["target"], frame.attrs["against"]) == (" house", " garden")
    assert frame.attrs["text"] == "She went into the"
    named = LanguageModel(bundled.model, None, "")
    by_id = ap.head_effects(named, [ids], "logit_difference", target=house, against=garden)
    pd.testing.assert_frame_equal(frame, by_id)


# What is known of the bundled model


def test_without_its_induction_head_repeated_text_is_as_new():
    runs = induction.trial(draws=4, seed=1)
    ((_, first, second),) = runs["none"]
    ((heads, _, without),) = runs["induction heads"]
    assert heads == [(1, 0)]
    assert second < 0.5
    assert without > 10
    assert without > 0.6 * first
    for others, _, still in runs["others at random"]:
        assert len(others) == len(heads)
        assert still < second + 0.5

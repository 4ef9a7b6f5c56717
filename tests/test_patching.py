"""A clean run's activations in a corrupt run, against hooks of the tests' own."""

import numpy as np
import pandas as pd
import pytest
import torch
from samples import mistral as small_mistral
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

import attnprobe as ap
from attnprobe.effects import patching, trials
from attnprobe.loading.continuations import NextToken

CLEAN = [5, 17, 23, 8, 4, 42, 99, 3, 77, 61, 12]
CORRUPT = [5, 17, 23, 8, 60, 42, 99, 9, 77, 61, 12]  # the fifth token differs first
ANSWER, WRONG = 13, 34


@pytest.fixture
def model(gpt2):
    return gpt2(dtype=torch.float64)


@pytest.fixture
def mistral():
    return small_mistral(window=None).double()


@torch.no_grad()
def difference(model, ids):
    logits = model(torch.tensor([ids])).logits[0, -1]
    return float(logits[ANSWER] - logits[WRONG])


def into_w_o(model):
    """Each layer's W_O, whose input is its head outputs side by side."""
    if hasattr(model, "transformer"):
        return [block.attn.c_proj for block in model.transformer.h]
    return [layer.self_attn.o_proj for layer in model.model.layers]


def blocks(model):
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


def inputs_of(model, modules, ids):
    """What enters each module in one forward, (1, T, …)."""
    found = {}

    def keep(at, _, args, kwargs):
        found[at] = (args or (kwargs["hidden_states"],))[0].clone()

    hooks = [
        one.register_forward_pre_hook(
            lambda module, args, kwargs, at=at: keep(at, module, args, kwargs), with_kwargs=True
        )
        for at, one in enumerate(modules)
    ]
    difference(model, ids)
    for hook in hooks:
        hook.remove()
    return found


def patched(model, module, other, where):
    """The logit difference with another tensor at some places of what enters a module."""

    def put(_, args):
        own = args[0].clone()
        own[where] = other[where]
        return (own, *args[1:])

    hook = module.register_forward_pre_hook(put)
    found = difference(model, CORRUPT)
    hook.remove()
    return found


def run(model, **options):
    return ap.patch_effects(model, CLEAN, CORRUPT, ANSWER, WRONG, **options)


def check(frame, model, wanted):
    best, base = difference(model, CLEAN), difference(model, CORRUPT)
    np.testing.assert_allclose(frame["logit_difference"], wanted, rtol=1e-9, atol=1e-9)
    restored = (np.array(wanted) - base) / (best - base)
    np.testing.assert_allclose(frame["restored"], restored, rtol=1e-9, atol=1e-9)
    assert frame.attrs["clean"] == pytest.approx(best, rel=1e-10)
    assert frame.attrs["corrupt"] == pytest.approx(base, rel=1e-10)
    assert np.abs(restored).max() > 0.1


# What is patched


@pytest.mark.parametrize("kind", ["model", "mistral"])
@pytest.mark.parametrize("what", ["head_output", "residual"])
def test_one_position_of_one_layer_is_patched(kind, what, request):
    model = request.getfixturevalue(kind)
    modules = into_w_o(model) if what == "head_output" else blocks(model)
    source = inputs_of(model, modules, CLEAN)
    frame = run(model, what=what)
    wanted = [
        patched(model, module, source[layer], (0, at))
        for layer, module in enumerate(modules)
        for at in range(11)
    ]
    check(frame, model, wanted)
    assert frame["layer"].tolist() == [one for one in range(len(modules)) for _ in range(11)]
    assert frame["position"].tolist() == list(range(11)) * len(modules)
    assert frame["token"].tolist() == [str(one) for one in CORRUPT] * len(modules)
    assert (frame.loc[frame["position"] >= 4, "restored"].abs() > 1e-6).sum() > len(modules)


@pytest.mark.parametrize("kind", ["model", "mistral"])
def test_one_head_of_one_layer_is_patched(kind, request):
    model = request.getfixturevalue(kind)
    modules = into_w_o(model)
    source = inputs_of(model, modules, CLEAN)
    frame = run(model, by="head")
    wanted = [
        patched(model, module, source[layer], (0, slice(None), slice(10 * head, 10 * head + 10)))
        for layer, module in enumerate(modules)
        for head in range(6)
    ]
    check(frame, model, wanted)
    assert frame.columns.tolist() == ["layer", "head", "logit_difference", "restored"]
    assert frame["head"].tolist() == list(range(6)) * len(modules)
    assert frame["restored"].abs().min() > 1e-6


@pytest.mark.parametrize("what", ["head_output", "residual"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_stands_before_the_difference_restores_nothing_at_all(gpt2, dtype, what):
    frame = run(gpt2(dtype=dtype), what=what)
    before = frame["restored"][frame["position"] < 4]
    assert len(before) == 12
    assert (before == 0).all()
    assert not np.signbit(before).any()
    assert (frame["logit_difference"][frame["position"] < 4] == frame.attrs["corrupt"]).all()


def test_into_the_first_layer_only_a_token_that_differs_carries_anything(model):
    once = [*CLEAN[:7], CORRUPT[7], *CLEAN[8:]]
    frame = ap.patch_effects(model, CLEAN, once, ANSWER, WRONG, what="residual")
    first = frame[frame["layer"] == 0].set_index("position")["restored"]
    assert first[7] == pytest.approx(1.0, abs=1e-9)
    np.testing.assert_allclose(first.drop(7), 0.0, atol=1e-9)


def test_many_places_run_in_one_forward_within_a_budget(model, monkeypatch):
    counts, said = [], []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: counts.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    wanted = run(model)
    assert counts == [1, 1, 1, 1, 21]  # captures; their last tokens; 3 layers of 7 positions
    monkeypatch.setattr(trials, "BYTES_AT_ONCE", 1)
    frame = run(model, progress=lambda *one: said.append(one))
    assert counts[5:] == [1] * 25
    assert said[-1] == ("layer 2", 21, 21)
    pd.testing.assert_frame_equal(frame, wanted, rtol=1e-9)


@pytest.mark.parametrize("what", ["head_output", "residual"])
def test_the_model_is_as_before_also_after_an_exception(model, what):
    before = difference(model, CORRUPT)

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, what=what, progress=stop)
    head = model.lm_head.forward
    model.lm_head.forward = stop
    with pytest.raises(KeyboardInterrupt):
        run(model, what=what)
    model.lm_head.forward = head
    hooks = [module._forward_pre_hooks or module._forward_hooks for module in model.modules()]
    assert not any(hooks)
    assert difference(model, CORRUPT) == before


# What is refused


def test_texts_of_other_lengths_are_shown_side_by_side():
    lm = ap.load("bundled")
    said = r"got 4 and 6:\n  clean    She \| saw \| the \| dog\n  corrupt  She \| saw \| the \| "
    with pytest.raises(ap.InputError, match=said):
        ap.patch_effects(lm, "She saw the dog", "She saw the k ing", "house", "garden")


def test_nothing_to_restore_is_said_with_both_numbers(gpt2):
    model = gpt2()
    found = difference(model, CLEAN)
    said = f"nothing to restore: .* is {found:.4g} after the clean text and {found:.4g} after"
    with pytest.raises(ap.InputError, match=said):
        ap.patch_effects(model, CLEAN, CLEAN, ANSWER, WRONG)


def test_differences_that_rounding_makes_are_none():
    metric = trials.Metric("logit_difference", NextToken(0, ""), NextToken(1, ""))
    ends = torch.tensor([20.0, -3.0, 99.0]).expand(2, 1, 1, 3)
    unit = torch.finfo(torch.float32).eps * 20
    for off in (7, -7):
        with pytest.raises(ap.InputError, match="nothing to restore"):
            patching._refuse_no_better(1.0 + off * unit, 1.0, ends, metric)
    patching._refuse_no_better(1.0 + 9 * unit, 1.0, ends, metric)
    with pytest.raises(ap.InputError, match="must stand better"):
        patching._refuse_no_better(1.0 - 9 * unit, 1.0, ends, metric)


def test_an_answer_that_stands_better_after_the_corrupt_text_is_refused_with_both_numbers(model):
    best, base = difference(model, CLEAN), difference(model, CORRUPT)
    said = (
        rf"^the logit of id {ANSWER} less that of id {WRONG} is {base:.4g} after the clean text "
        rf"and {best:.4g} after the corrupt one.* Exchange the two texts, or the two words"
    )
    with pytest.raises(ap.InputError, match=said):
        ap.patch_effects(model, CORRUPT, CLEAN, ANSWER, WRONG)
    with pytest.raises(ap.InputError, match="Exchange"):
        ap.patch_effects(model, CLEAN, CORRUPT, WRONG, ANSWER)
    ap.patch_effects(model, CORRUPT, CLEAN, WRONG, ANSWER)


def test_the_example_of_the_readme_prefers_the_answer_and_then_the_wrong_word():
    texts = ("The old man shook", "The old woman shook")
    frame = ap.patch_effects(ap.load("bundled"), *texts, "his", "her")
    assert frame.attrs["clean"] == pytest.approx(2.402, abs=1e-3)
    assert frame.attrs["corrupt"] == pytest.approx(-1.742, abs=1e-3)
    words = {name: frame.attrs[name] for name in ("answer", "wrong", "clean_text", "corrupt_text")}
    assert tuple(words.values()) == (" his", " her", *texts)


def test_refuses_encoder_decoders_by_name():
    t5 = T5Config(vocab_size=101, d_model=60, d_kv=10, d_ff=70, num_layers=2, num_heads=6)
    with pytest.raises(ap.ModelError, match="T5ForConditionalGeneration is an encoder-decoder"):
        run(T5ForConditionalGeneration(t5).eval())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"by": "layer"}, "by is 'position' or 'head', got 'layer'"),
        ({"what": "mlp"}, "what is 'head_output' or 'residual', got 'mlp'"),
        ({"what": "residual", "by": "head"}, "the residual stream has no heads"),
    ],
)
def test_refuses_what_it_cannot_patch(model, options, said):
    with pytest.raises(ap.InputError, match=said):
        run(model, **options)


def test_refuses_texts_and_words_that_are_none(model):
    with pytest.raises(ap.InputError, match="clean is one text, got 2"):
        ap.patch_effects(model, [CLEAN, CLEAN], CORRUPT, ANSWER, WRONG)
    with pytest.raises(ap.InputError, match="token id 101 is out of range"):
        ap.patch_effects(model, CLEAN, CORRUPT, 101, WRONG)
    with ap.edit(model, scale=1.0), pytest.raises(ap.InputError, match="being edited already"):
        run(model)


def test_refuses_layers_that_are_one_module_and_models_that_see_later_words():
    config = AlbertConfig(
        vocab_size=101,
        embedding_size=20,
        hidden_size=60,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=70,
    )
    albert = AlbertForMaskedLM(config).eval()
    with pytest.raises(ap.ModelError, match="AlbertForMaskedLM sees later words"):
        run(albert)
    with pytest.raises(ap.ModelError, match="has not a block of its own for each layer"):
        patching._blocks(ap.capture(albert, CLEAN))

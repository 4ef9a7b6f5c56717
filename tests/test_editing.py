"""Edits against models that were built, weighed or masked so in the first place."""

import copy

import numpy as np
import pytest
import torch
from samples import IDS
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
)
from transformers.modeling_utils import AttentionInterface

import attnprobe as ap

OTHER = [5, 17, 23, 9, 40, 42, 98, 3, 7, 61, 12]
KERNELS = ["sdpa", "eager"]


@torch.no_grad()
def logits(model, ids=IDS, **options):
    return model(torch.tensor([ids]), **options).logits


def edited(model, ids=IDS, options=None, **change):
    with ap.edit(model, **change):
        return logits(model, ids, **(options or {}))


def assert_close(one, other):
    assert (one - other).abs().max() <= 2e-5 * other.abs().max()


def masked(hides, kernel="sdpa"):
    """A 4-D mask for 11 tokens, from a function of query and key."""
    seen = torch.tensor([[not hides(i, j) for j in range(11)] for i in range(11)])
    if kernel == "sdpa":
        return seen[None, None]
    return torch.zeros(1, 1, 11, 11).masked_fill(~seen, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_changed_is_bit_equal(gpt2, kernel):
    model = gpt2(kernel)
    assert torch.equal(edited(model), logits(model))


def test_the_model_is_as_before_after_an_edit(gpt2):
    model = gpt2()
    before, weights = logits(model), copy.deepcopy(model.state_dict())
    assert not torch.equal(edited(model, scale="none"), before)
    assert torch.equal(logits(model), before)
    assert all(torch.equal(weights[name], now) for name, now in model.state_dict().items())


def test_an_exception_leaves_nothing_behind(gpt2):
    model = gpt2()
    before, seam = logits(model), AttentionInterface.get_interface
    with pytest.raises(ZeroDivisionError), ap.edit(model, scale=lambda call: 1 / call.layer):
        logits(model)
    with pytest.raises(ap.InputError), ap.edit(model, weights=lambda rows: rows[:1, :1]):
        logits(model)
    assert AttentionInterface.get_interface is seam
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(logits(model), before)
    with ap.edit(model):  # not taken for open still
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_scaling_is_a_model_without_scaling(gpt2, kernel):
    without = gpt2(kernel, scale_attn_weights=False)
    assert_close(edited(gpt2(kernel), scale="none"), logits(without))


def test_a_scale_by_number_by_name_and_by_function(gpt2):
    model = gpt2()
    by_name = edited(model, scale="1/d_k")
    assert torch.equal(by_name, edited(model, scale=np.float64(0.1), window=10**30))
    assert torch.equal(by_name, edited(model, scale=0.1))  # heads of 10
    assert torch.equal(by_name, edited(model, scale=lambda call: 6 / call.query.shape[1] / 10))
    assert not torch.allclose(by_name, logits(model))


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_mask_is_a_mask_that_hides_nothing(gpt2, kernel):
    model = gpt2(kernel)
    nothing = masked(lambda i, j: False, kernel)
    assert_close(edited(model, mask="none"), logits(model, attention_mask=nothing))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_window(gpt2, kernel):
    model = gpt2(kernel)
    window = masked(lambda i, j: j > i or j <= i - 3, kernel)
    assert_close(edited(model, window=3), logits(model, attention_mask=window))


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropped_keys(gpt2, kernel):
    model = gpt2(kernel)
    without = masked(lambda i, j: j > i or j in (2, 7), kernel)
    assert_close(edited(model, drop=[2, 7]), logits(model, attention_mask=without))


def test_a_word_left_without_keys_gives_nothing(gpt2):
    model = gpt2()
    with ap.edit(model, drop=[0]):
        cap = ap.capture(model, IDS)
    assert not cap.calls[0].head_output_model[:, 0].any()
    assert cap.calls[0].head_output_model[:, 1:].any(-1).all()


def test_a_temperature_divides_the_scores(gpt2):
    model, cooler = gpt2(), gpt2()
    with torch.no_grad():
        for block in cooler.transformer.h:  # the query's third of W and b
            block.attn.c_attn.weight[:, :60] /= 2.5
            block.attn.c_attn.bias[:60] /= 2.5
    assert_close(edited(model, temperature=2.5), logits(cooler))


def test_a_temperature_divides_sinks_too():
    torch.manual_seed(0)
    config = GptOssConfig(
        **{"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 12},
        **{"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 32},
        **{"num_local_experts": 3, "num_experts_per_tok": 2, "initializer_range": 0.5},
        **{"sliding_window": 4, "attn_implementation": "eager", "pad_token_id": 0},
    )
    model = GptOssForCausalLM(config).eval()
    cooler = copy.deepcopy(model)
    with torch.no_grad():
        for layer in cooler.model.layers:
            layer.self_attn.scaling /= 2.5
            layer.self_attn.sinks /= 2.5
    assert_close(edited(model, temperature=2.5), logits(cooler))


def test_uniform_weights_are_those_of_no_query(gpt2):
    model, blind = gpt2(), gpt2()
    with torch.no_grad():
        for block in blind.transformer.h:
            block.attn.c_attn.weight[:, :60] = 0
            block.attn.c_attn.bias[:60] = 0
    assert_close(edited(model, weights="uniform"), logits(blind))


def test_all_weight_on_the_previous_or_the_first_key(gpt2):
    model = gpt2()
    previous = masked(lambda i, j: j != max(i - 1, 0))
    assert_close(edited(model, weights="previous"), logits(model, attention_mask=previous))
    first = masked(lambda i, j: j != 0)
    assert_close(edited(model, weights="first"), logits(model, attention_mask=first))


def test_a_function_of_the_weights_and_what_it_gets(gpt2):
    model = gpt2()
    rows = []

    def sharpen(weights):
        rows.append(weights)
        return (weights == weights.amax(-1, keepdim=True)).float()

    with ap.edit(model, weights=sharpen):
        cap = ap.capture(model, IDS)
    assert all(one.dtype == torch.float64 and one.shape[:2] == (1, 6) for one in rows)
    call = cap.calls[1]
    best = ap.weights(cap, layer=1).argmax(-1)  # of the query and key that this layer got
    want = torch.stack([call.value[0, head, best[head]] for head in range(6)], 1)  # (T, H, Dv)
    assert torch.equal(call.head_output_model[0], want)


@pytest.mark.parametrize("kernel", KERNELS)
def test_eager_returns_the_changed_weights(gpt2, kernel):
    model = gpt2(kernel)
    with ap.edit(model, weights="first", heads=[(1, 2)]), torch.no_grad():
        seen = model(torch.tensor([IDS]), output_attentions=kernel == "eager").attentions
    if kernel == "sdpa":
        assert seen is None
    else:
        plain = model(torch.tensor([IDS]), output_attentions=True).attentions
        assert torch.equal(seen[1][0, 2, :, 0], torch.ones(11))
        assert torch.equal(seen[1][:, :2], plain[1][:, :2])


def test_a_silenced_head_gives_exactly_nothing(gpt2):
    model, silent = gpt2(), gpt2()
    with torch.no_grad():
        silent.transformer.h[1].attn.c_proj.weight[40:50] = 0  # head 4's rows of W_O
    with ap.edit(model, heads=[(1, 4)], head_output="zero"):
        cap = ap.capture(model, IDS)
    plain = ap.capture(model, IDS)
    output = cap.calls[1].head_output_model
    assert not output[:, :, 4].any()
    rest = [0, 1, 2, 3, 5]
    assert torch.equal(output[:, :, rest], plain.calls[1].head_output_model[:, :, rest])
    assert_close(cap.output, logits(silent))


def test_a_head_gives_its_mean_over_a_reference(gpt2):
    model = gpt2()
    reference = ap.capture(model, [OTHER[:7], OTHER])
    with ap.edit(model, heads=[(0, 3)], head_output="mean", reference=reference):
        cap = ap.capture(model, IDS)
    heads = [ap.capture(model, ids).calls[0].head_output_model for ids in (OTHER[:7], OTHER)]
    want = torch.cat([one[0, :, 3] for one in heads]).mean(0)
    torch.testing.assert_close(cap.calls[0].head_output_model[0, :, 3], want.expand(11, -1))


def test_a_resampled_head_gives_what_it_gave_for_tokens_of_the_reference(gpt2):
    model = gpt2()
    reference = ap.capture(model, OTHER)
    found = []
    for seed in (1, 1, 2):
        with ap.edit(model, layers=[2], head_output="resample", reference=reference, seed=seed):
            found.append(ap.capture(model, IDS).calls[2].head_output_model[0])
    there = reference.calls[2].head_output_model[0]  # (T, H, Dv)
    drawn = [[i for i in range(11) if torch.equal(row, there[i])] for row in found[0]]
    assert sorted(at for (at,) in drawn) == list(range(11))  # each once: all heads of one token
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", ["query", "key", "value", "head_output"])
def test_a_patch_appears_in_the_capture(grouped, name):
    model = grouped.lm.model
    other = ap.capture(model, OTHER)
    with ap.edit(model, layers=[1], positions=[3, 8], **{name: other}):
        cap = ap.capture(model, IDS)
    field = "head_output_model" if name == "head_output" else name
    got, theirs, own = (getattr(one.calls[1], field)[0] for one in (cap, other, grouped))
    if name != "head_output":
        got, theirs, own = (one.transpose(0, 1) for one in (got, theirs, own))  # tokens first
    for position in range(11):
        want = theirs if position in (3, 8) else own
        assert torch.equal(got[position], want[position])
    assert ap.verify(cap, checks=["output"]).passed == (name != "head_output")


def test_a_patch_of_a_key_reaches_all_heads_that_it_serves(grouped):
    model = grouped.lm.model
    with ap.edit(model, heads=[(0, 3)], value=ap.capture(model, OTHER)):
        cap = ap.capture(model, IDS)
    same = (cap.calls[0].head_output_model == grouped.calls[0].head_output_model).all(-1)[0]
    assert same.all(0).tolist() == [True, True, False, False, True, True]


def test_everything_patched_is_the_other_text(gpt2):
    model = gpt2()
    other = ap.capture(model, OTHER)
    with ap.edit(model, query=other, key=other, value=other):
        cap = ap.capture(model, IDS)
    for got, theirs in zip(cap.calls, other.calls, strict=True):
        torch.testing.assert_close(got.head_output_model, theirs.head_output_model)


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_are_counted_from_each_texts_first_token(gpt2, side):
    model = gpt2()
    texts = [IDS, IDS[:6]]
    opposite = {"left": "right", "right": "left"}[side]
    other = ap.capture(model, [OTHER[:7], OTHER], padding_side=opposite)
    patch = {"head_output": other, "positions": [2, 5, 8], "layers": [1]}
    for change in ({"drop": [1]}, {"weights": "previous"}, {"weights": "first"}, patch):
        with ap.edit(model, **change):
            batch = ap.capture(model, texts, padding_side=side)
        for text, ids in enumerate(texts):
            own = dict(change)
            if "head_output" in own:
                own["head_output"] = ap.capture(model, [OTHER[:7], OTHER][text])
                own["positions"] = [one for one in own["positions"] if one < len(ids)]
            alone = edited(model, ids, **own)
            assert_close(batch.output[text, batch.positions(text)], alone[0])


@pytest.mark.parametrize("name", ["value", "head_output"])
def test_a_patch_holds_where_both_texts_have_the_position(gpt2, name):
    model = gpt2()
    with ap.edit(model, layers=[0], **{name: ap.capture(model, OTHER[:4])}):
        cap = ap.capture(model, IDS)
    field, axis = ("value", 2) if name == "value" else ("head_output_model", 1)
    got, own, theirs = (
        getattr(one.calls[0], field)
        for one in (cap, ap.capture(model, IDS), ap.capture(model, OTHER[:4]))
    )
    assert torch.equal(got.narrow(axis, 0, 4), theirs)
    assert torch.equal(got.narrow(axis, 4, 7), own.narrow(axis, 4, 7))


CHANGES = {
    "scale": {"scale": "none"},
    "window": {"window": 3},
    "drop": {"drop": [2]},
    "previous": {"weights": "previous"},
    "zero": {"heads": [(1, 1), (0, 2)], "head_output": "zero"},
    "resample": {"head_output": "resample", "reference": OTHER, "layers": [1]},
    "value": {"value": OTHER, "positions": [2, 12]},
    "head_output": {"head_output": OTHER, "positions": [7]},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_generation_with_a_cache_equals_one_without(gpt2, grouped, family, change):
    model = gpt2() if family == "gpt2" else grouped.lm.model
    given = [name for name in change if change[name] is OTHER]
    change = change | {name: ap.capture(model, OTHER) for name in given}
    ids = torch.tensor([IDS[:9], [0, 0, *IDS[4:]]])
    options = {"attention_mask": (ids != 0).long(), "max_new_tokens": 8, "do_sample": False}
    options |= {"pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    if family == "mistral":  # else the cache lets go of tokens, and positions are not known
        model.config.sliding_window = None
        model.generation_config.cache_implementation = None
    plain = model.generate(ids, **options)
    with ap.edit(model, **change):
        cached = model.generate(ids, **options)
        whole = model.generate(ids, **options | {"use_cache": False})
    assert torch.equal(cached.sequences, whole.sequences)
    for one, other in zip(cached.logits, whole.logits, strict=True):
        assert_close(one, other)
    assert not torch.allclose(cached.logits[0], plain.logits[0])


def test_the_formula_generates_what_the_kernel_does(gpt2):
    model = gpt2()
    options = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": 0}
    ids = torch.tensor([IDS])
    own = model.generate(ids, **options)
    with ap.edit(model, kernel="formula"), ap.probe(model) as calls:
        ours = model.generate(ids, **options)
    assert torch.equal(own, ours)
    assert own.shape == (1, 61)
    assert ap.verify(calls).passed


def test_attention_that_asks_for_no_kernel():
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=101, hidden_size=60, n_layer=2, n_head=6, initializer_range=0.5)
    model = BloomForCausalLM(config).eval()
    silent = copy.deepcopy(model)
    with torch.no_grad():
        silent.transformer.h[1].self_attention.dense.weight[:, 40:50] = 0
    assert_close(edited(model, heads=[(1, 4)], head_output="zero"), logits(silent))
    assert_close(edited(model, kernel="formula"), logits(model))
    with pytest.raises(ap.ModelError, match=r"by itself.*patch its head_output"):
        edited(model, value=ap.capture(model, OTHER))


def test_a_part_of_an_encoder_decoder():
    torch.manual_seed(0)
    config = BartConfig(
        **{"vocab_size": 101, "d_model": 60, "encoder_layers": 3, "decoder_layers": 2},
        **{"encoder_attention_heads": 6, "decoder_attention_heads": 6, "init_std": 0.5},
        **{"encoder_ffn_dim": 70, "decoder_ffn_dim": 80, "max_position_embeddings": 40},
    )
    model = BartForConditionalGeneration(config).eval()
    plain = ap.capture(model, IDS, target=OTHER[:7])
    for part, layer in (("encoder", 2), ("decoder", 1), ("cross", 0)):
        with ap.edit(model, part=part, heads=[(layer, 5)], head_output="zero"):
            cap = ap.capture(model, IDS, target=OTHER[:7])
        zeros = [
            (call.part, call.layer)
            for call in cap.calls
            if not call.head_output_model[:, :, 5].any()
        ]
        assert zeros == [(part, layer)]
        assert not torch.equal(cap.output, plain.output)
    for change in ({"drop": [1]}, {"weights": "first"}):
        with ap.edit(model, part="cross", **change):
            cap = ap.capture(model, IDS, target=OTHER[:7])
        call = cap.cross.call(1)
        first = call.value[:, :, 0].expand(7, -1, -1, -1).permute(1, 0, 2, 3)  # (B, T, H, Dv)
        assert torch.equal(call.head_output_model, first) == ("weights" in change)
    plain_cross = plain.cross.call(0).head_output_model
    for change in ({"window": 1}, {"mask": "none"}):  # of words among themselves
        with ap.edit(model, **change):
            cap = ap.capture(model, IDS, target=OTHER[:7])
            model.generate(torch.tensor([IDS]), max_new_tokens=3, use_cache=False)
        assert ap.verify(cap.cross, checks=["output"]).passed
        assert not torch.equal(cap.cross.call(0).head_output_model, plain_cross)


def test_half_precision_is_rounded_once(gpt2):
    model = gpt2(dtype=torch.bfloat16)
    with ap.edit(model, kernel="formula"):
        cap = ap.capture(model, IDS)
    assert cap.calls[2].head_output_model.dtype == torch.bfloat16
    assert ap.verify(cap, checks=["output"]).passed


def test_a_backward_pass_is_refused_not_wrong(gpt2):
    model = gpt2()
    with ap.edit(model, scale="none"):
        loss = model(torch.tensor([IDS])).logits.sum()
    with pytest.raises(ap.ModelError, match="without gradients"):
        loss.backward()
    with ap.edit(model, heads=[(0, 0)], head_output="zero"):  # the model's own kernel ran
        model(torch.tensor([IDS])).logits.sum().backward()
    grad = model.transformer.h[0].attn.c_proj.weight.grad
    assert not grad[:10].any()
    assert grad[10:].any()


def test_without_m_a_cache_is_refused(gpt2):
    model = gpt2()
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with ap.edit(model, mask="none"):
        assert model.generate(torch.tensor([IDS]), use_cache=False, **options).shape == (1, 14)
        with pytest.raises(ap.ModelError, match="use_cache=False"):
            model.generate(torch.tensor([IDS]), **options)


def test_positions_of_keys_that_a_cache_let_go_are_refused(grouped):
    model = grouped.lm.model
    with ap.edit(model, drop=[2]), pytest.raises(ap.ModelError, match=r"holds \d+ of \d+ tokens"):
        model.generate(torch.tensor([IDS]), max_new_tokens=3, do_sample=False, pad_token_id=0)


def test_an_unknown_mask_is_not_changed(gpt2):
    model = gpt2()
    whole = masked(lambda i, j: j > i)
    with pytest.raises(ap.ModelError, match="M is not known"):
        edited(model, options={"attention_mask": whole}, mask="none")
    assert_close(
        edited(model, options={"attention_mask": whole}, window=3), edited(model, window=3)
    )


WRONG = {
    "an unknown scale": ({"scale": "half"}, "scale is one of none, 1/d_k, a number; got 'half'"),
    "a scale that is no number": ({"scale": float("nan")}, "scale is one of"),
    "a scale of a function": ({"scale": lambda call: "x"}, "expected a number from scale"),
    "an unknown mask": ({"mask": "causal"}, "mask is one of none; got 'causal'"),
    "no window": ({"window": 0}, "at least 1, the word itself; got 0"),
    "no whole window": ({"window": 1.5}, "expected a whole number for window"),
    "a cold temperature": ({"temperature": 0}, "temperature above 0, got 0"),
    "unknown weights": ({"weights": "last"}, "weights is one of uniform, previous, first"),
    "weights of another shape": ({"weights": lambda rows: rows[..., 1:]}, "must return a tensor"),
    "an unknown output": ({"head_output": "none"}, "head_output is one of zero, mean"),
    "a mean of nothing": ({"head_output": "mean"}, "asks for reference="),
    "no capture": ({"value": torch.ones(3)}, "expected a capture"),
    "an unknown kernel": ({"kernel": "sdpa"}, "kernel is one of formula"),
    "an unknown part": ({"part": "middle"}, "part is one of encoder, decoder, cross"),
    "a bare pair": ({"heads": (1, 2), "head_output": "zero"}, r"expected \(layer, head\) pairs"),
    "a layer below 0": ({"layers": [-1], "scale": 1.0}, "from 0"),
    "a head below 0": ({"heads": [(0, -1)], "scale": 1.0}, "numbered from 0"),
    "a head that is not there": ({"heads": [(0, 6)], "scale": 1.0}, "head 6 is out of range"),
    "a layer that is not there": ({"layers": [3], "scale": 1.0}, "layer 3 was not edited.*0 to 2"),
    "no layer": ({"layers": [], "scale": 1.0}, "at least one layer"),
    "layers and heads": ({"layers": [0], "heads": [(1, 2)], "scale": 1.0}, "not both"),
    "where without what": ({"layers": [0]}, "where .* is said, but not what"),
    "a part that is not there": ({"part": "decoder", "scale": 1.0}, "no encoder-decoder, and has"),
    "a position that is not there": (
        {"positions": [3, 11], "head_output": "zero"},
        "position 11 was not edited",
    ),
    "a key that is not there": (
        {"drop": [2, 11]},
        "position 11 was not dropped: the last .* is 10",
    ),
    "a mask for cross attention": ({"part": "cross", "mask": "none"}, "are of self-attention"),
    "a window for cross attention": ({"part": "cross", "window": 2}, "are of self-attention"),
    "weights that are no numbers": ({"weights": lambda w: w * float("nan")}, "returned NaN"),
    "a text for layers": ({"layers": "12", "scale": 1.0}, "list of numbers for layers"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_what_makes_no_sense_is_refused(gpt2, change, message):
    model = gpt2()
    with pytest.raises(ap.InputError, match=message):
        edited(model, **change)


def test_changes_that_cannot_go_together(gpt2):
    model = gpt2()
    cap = ap.capture(model, OTHER)
    with pytest.raises(ap.InputError, match="query and value cannot change together"):
        edited(model, query=cap, value=cap, scale="none")
    with (
        ap.edit(model, scale="none"),
        pytest.raises(ap.InputError, match="being edited already"),
        ap.edit(model, window=3),
    ):
        pass


def test_a_capture_of_another_model_is_refused(gpt2):
    model, other = gpt2(), gpt2(n_head=5)
    with pytest.raises(ap.InputError, match=r"5 heads of size 12; the model runs.*6 heads of"):
        edited(model, value=ap.capture(other, IDS))
    with pytest.raises(ap.InputError, match="5 heads of size 12"):
        edited(model, head_output=ap.capture(other, IDS))
    with pytest.raises(ap.InputError, match="no head output of 6 heads"):
        edited(model, head_output="mean", reference=ap.capture(other, IDS))
    with pytest.raises(ap.InputError, match="no layer 2"):
        edited(model, value=ap.capture(gpt2(n_layer=2), IDS))
    with pytest.raises(ap.InputError, match="of 2 texts"):
        edited(model, value=ap.capture(model, [IDS, OTHER]))

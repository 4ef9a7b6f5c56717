"""What a cache gives back against what the step before had: right caches pass, damaged ones never.

Keys and values are damaged between two steps, as a wrong cache would have them.
"""

import copy
from dataclasses import replace

import pytest
import torch
from test_encoder_decoders import bart, made, t5
from test_families import small
from test_uses import IDS, LEFT, generated, reasons, verdicts
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache

import attnprobe as ap

STEP = 2


def layers_of(cache, kind):
    both = kind == "cross"
    return (
        cache.cross_attention_cache if both else getattr(cache, "self_attention_cache", cache)
    ).layers


def wrong(check, report):
    return {
        (row.part, row.layer)
        for row in report.rows
        if (row.check, row.verdict) == (check, "mismatch")
    }


def written(model, damage, kind="self", **options):
    """The calls of a generation in which `damage` changes the cache's layers before one step."""
    steps = []

    def before(module, args, kwargs):
        steps.append(1)
        if len(steps) == STEP + 1:
            cache = next(one for one in kwargs.values() if isinstance(one, Cache))
            damage(layers_of(cache, kind))

    hook = model.register_forward_pre_hook(before, with_kwargs=True)
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 2} | options
    with ap.probe(model) as calls:
        model.generate(IDS, **{"attention_mask": LEFT} | options)
    hook.remove()
    return calls


# Damage


def a_row_of_zeros(layers):
    layers[1].keys = layers[1].keys.index_fill(2, torch.tensor([1]), 0.0)


def one_number_of_a_value(layers):
    values = layers[1].values.clone()
    values[1, 2, 1, 5] *= 1 + 2**-20
    layers[1].values = values


def two_heads_swapped(layers):
    order = torch.arange(layers[1].keys.shape[1])
    order[:2] = torch.tensor([1, 0])
    layers[1].keys = layers[1].keys[:, order]


def another_layers_keys(layers):
    layers[1].keys = layers[0].keys.clone()


def values_for_keys(layers):
    layers[1].keys = layers[1].values.clone()


def one_off(layers):
    layers[1].keys, layers[1].values = layers[1].keys.roll(1, 2), layers[1].values.roll(1, 2)


def another_texts(layers):
    layers[1].keys, layers[1].values = layers[1].keys.flip(0), layers[1].values.flip(0)


def keys_alone_of_another_text(layers):
    for layer in layers:
        layer.keys = layer.keys.flip(0)


def rounded(layers):
    layers[1].values = layers[1].values.bfloat16().float()


DAMAGE = [
    *(a_row_of_zeros, one_number_of_a_value, two_heads_swapped, another_layers_keys),
    *(values_for_keys, one_off, another_texts, rounded),
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static"}, {"num_beams": 3}],
    ids=["dynamic", "static", "beams"],
)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_damaged_cache_is_found_with_its_layer_and_step(kind, options, damage):
    report = ap.verify(written(small(kind), damage, **options), checks=["cache"])
    rows = [row for row in report.rows if row.verdict == "mismatch"]
    assert {row.layer for row in rows} == {1}
    assert len(rows) == 1  # the steps after it go on from what the damaged one had
    assert rows[0].reason.startswith(f"in step {STEP}: not the ")
    assert f"of step {STEP - 1}, first in text" in rows[0].reason
    assert report.verdict == "mismatch"
    assert "most of all cache, layer 1: error" in report.summary


def test_the_place_and_the_size_of_a_difference():
    row = ap.verify(written(small("llama"), one_number_of_a_value), checks=["cache"]).worst
    assert row.reason == (
        f"in step {STEP}: not the values of step {STEP - 1}, first in text 1, key head 2, at key 1"
    )
    assert 0 < row.error < 1e-4
    assert row.bound == 0


def test_keys_and_values_have_to_be_of_the_same_texts():
    report = ap.verify(written(small("llama"), keys_alone_of_another_text), checks=["cache"])
    assert wrong("cache", report) == {("", 0), ("", 1)}


def lost(layers):
    layers[1].keys, layers[1].values = layers[1].keys[:, :, 1:], layers[1].values[:, :, 1:]


def doubled(layers):
    for name in ("keys", "values"):
        tensor = getattr(layers[1], name)
        setattr(layers[1], name, torch.cat([tensor[:, :, :1], tensor], 2))


def emptied(layers):
    layers[1].keys, layers[1].values = layers[1].keys[:, :, :0], layers[1].values[:, :, :0]


@pytest.mark.parametrize("damage", [lost, emptied])
def test_tokens_that_are_gone_though_no_window_moved_on_are_found(damage):
    calls = written(small("llama"), damage, attention_mask=torch.ones_like(IDS))
    assert wrong("cache", ap.verify(calls)) >= {("", 1)}
    row = next(row for row in ap.verify(calls, checks=["cache"]).rows if row.verdict == "mismatch")
    assert "have left the cache, and some are still to be seen" in row.reason


@pytest.mark.parametrize("layer", [0, 1])
def test_a_token_too_many_is_found(layer):
    options = {"attention_mask": torch.ones_like(IDS)}
    calls = written(small("llama"), lambda layers: doubled([None, layers[layer]]), **options)
    report = ap.verify(calls)
    assert report.verdict == "mismatch"
    if layer == 0:  # by which transformers counts what went by
        said = {row.reason for row in report.rows if row.check == "cache"}
        assert f"in step {STEP}: the cache holds 9 tokens, the forward before left 8" in said


def test_a_window_that_moves_on_too_soon_is_found():
    calls = generated(small("mistral"))  # of 5 tokens: four are kept, and three are too few
    call = calls[5]
    assert (call.layer, call.first_key, call.key.shape[2]) == (1, 4, 5)
    calls[5] = replace(call, key=call.key[:, :, 1:], value=call.value[:, :, 1:], first_key=3)
    report = ap.verify(calls, checks=["cache"])
    assert wrong("cache", report) == {("", 1)}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("factor", [0.0, 1 + 1e-7, 1.0])
def test_a_cache_that_is_written_into_in_place_is_found_in_its_step(kind, factor):
    """Also where no number changes: the record shares the memory, so it cannot tell."""

    def scale(layers):
        layers[1].values[:, :, 2] *= factor

    report = ap.verify(written(small(kind), scale))
    found = [(row.check, row.layer, row.verdict) for row in report.rows if row.layer == 1]
    wrong_rows = [row for row in report.rows if row.verdict == "mismatch"]
    assert [(row.check, row.layer) for row in wrong_rows] == [("cache", 1)]
    assert (
        wrong_rows[0].reason == "in step 2: the keys and values of step 1 were written into since"
    )
    for check in ("projection", "output"):  # of step 1, whose record is not what its kernel got
        assert found.count((check, 1, "not_checked")) == 1


def test_a_cache_that_is_written_into_after_the_last_step_does_not_pass():
    calls = generated(small("llama"))
    assert ap.verify(calls, checks=["cache", "output"]).passed
    calls[-1].key[0, 0, 0] += 1
    report = ap.verify(calls, checks=["cache", "output"])
    assert report.verdict == "not_checked"
    assert any("written into after it ran" in reason for reason in reasons(report, "output"))


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_damage_in_an_encoder_decoder(kind, damage):
    report = ap.verify(written(made(bart), damage, kind), checks=["cache"])
    part = {"self": "decoder", "cross": "cross"}[kind]
    assert wrong("cache", report) == {(part, 1)}


def test_cross_attention_of_a_type_that_is_not_known_is_no_mismatch():
    calls = written(made(lambda: t5(num_decoder_layers=2)), one_off, "cross")
    for call in calls:
        vars(call)["facts_known"] = False
    report = ap.verify(calls, checks=["cache", "output"])
    assert report.verdict == "verified"
    assert (
        "cache in 1 of 16 (whether the keys are the encoder's alone is not known" in report.summary
    )


# What is right


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"num_beams": 3}, {"do_sample": True}, {"prefill_chunk_size": 3}),
        *({"num_return_sequences": 3, "do_sample": True}, {"max_new_tokens": 12, "num_beams": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_right_cache_is_verified_in_every_step_and_layer(kind, cache, options):
    calls = generated(small(kind), cache_implementation=cache, **options)
    report = ap.verify(calls, checks=["cache"])
    assert verdicts(report, "cache") == {"verified"}
    assert len(report.rows) == 2 * (report.steps - 1)
    assert {row.error for row in report.rows} == {0.0}


@pytest.mark.parametrize("kind", [lambda: t5(num_decoder_layers=2), bart], ids=["t5", "bart"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_an_encoder_decoders_caches(kind, options):
    calls = written(made(kind), lambda _: None, **options)
    report = ap.verify(calls, checks=["cache"])
    assert verdicts(report, "cache") == {"verified"}
    layers = {(call.part, call.layer) for call in calls} - {("encoder", 0), ("encoder", 1)}
    assert len(report.rows) == 4 * len(layers)  # five forwards of the decoder


def test_the_order_of_beams_is_the_one_that_was_asked_for(monkeypatch):
    asked, right = [], DynamicCache.reorder_cache

    def reorder(self, order):
        asked.append(order.tolist())
        return right(self, order)

    monkeypatch.setattr(DynamicCache, "reorder_cache", reorder)
    calls = generated(small("llama"), num_beams=3, max_new_tokens=9)
    notes = [row.reason for row in ap.verify(calls, checks=["cache"]).rows if row.layer == 1]
    said = [
        [int(one) for one in note.split("from ")[1].split(" of")[0].split(", ")] if note else None
        for note in notes
    ]
    assert any(said)
    first = calls[0].key
    assert torch.equal(first[0], first[1])  # texts that are alike go on from themselves
    assert said[1:] == [None if order == [*range(6)] else order for order in asked[1 : len(said)]]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tokens_that_assisted_decoding_takes_back(kind):
    model, other = small(kind), small(kind)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.05 * torch.randn_like(weight)
    model.generation_config.eos_token_id = other.generation_config.eos_token_id = None
    options = {"assistant_model": other, "max_new_tokens": 9, "do_sample": False}
    with ap.probe(model) as calls:
        model.generate(IDS[:1], pad_token_id=2, **options)
    report = ap.verify(calls)
    assert report.passed, report
    assert verdicts(report, "cache") == {"verified"}
    assert any("tokens were taken back" in reason for reason in reasons(report, "cache"))


def test_two_generations_and_a_prefix_that_both_go_on_from():
    model = small("llama")
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 2}
    with torch.no_grad(), ap.probe(model) as calls:
        model.generate(IDS, **options)
        model.generate(IDS.flip(1), **options)
        cache = DynamicCache(config=model.config)
        model(IDS[:1, :4], cache=cache, use_cache=True)
        copied = copy.deepcopy(cache)
        for one in (cache, copied):
            model(IDS[:1, 4:], cache=one, use_cache=True)
    report = ap.verify(calls)
    assert report.passed, report
    rows = [row for row in report.rows if row.check == "cache" and row.layer == 0]
    assert [row.verdict for row in rows] == ["verified"] * 5 + ["not_checked"]
    assert "what the cache held is taken as it is" in rows[-1].reason


def test_two_caches_that_take_turns_are_told_apart():
    model = small("llama")
    caches = [DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=9)]
    with torch.no_grad(), ap.probe(model) as calls:
        for part in (slice(0, 3), slice(3, 4), slice(4, 7)):
            for cache, ids in zip(caches, IDS, strict=True):
                model(ids[None, part], cache=cache, use_cache=True)
    assert [call.cache.number for call in calls if call.layer == 0] == [0, 1] * 3
    report = ap.verify(calls, checks=["cache", "mask", "output"])
    assert report.passed, report
    assert verdicts(report, "cache") == {"verified"}


def test_what_came_before_the_calls_is_said_not_to_be_checked():
    calls = generated(small("llama"))
    some = calls[2:]
    assert type(some) is type(calls)
    rows = [row.verdict for row in ap.verify(some, checks=["cache"]).rows]
    assert rows == ["not_checked"] * 2 + ["verified"] * 4
    gap = calls[:2]
    gap.extend(calls[4:])  # without step 1
    rows = [row.verdict for row in ap.verify(gap, checks=["cache"]).rows]
    assert rows == ["not_checked"] * 2 + ["verified"] * 2


def test_a_quantized_cache_is_said_to_give_back_only_about_what_it_got():
    model = small("llama")
    with torch.no_grad(), ap.probe(model) as calls:
        cache = QuantizedCache("fp8", model.config)
        model(IDS[:, :5], cache=cache, use_cache=True)
        model(IDS[:, 5:], cache=cache, use_cache=True)
    assert not torch.equal(calls[2].key[:, :, :5], calls[0].key)
    report = ap.verify(calls)
    assert report.passed, report
    assert verdicts(report, "cache") == {"not_checked"}
    assert "a quantized cache" in reasons(report, "cache").pop()


def test_a_window_that_is_not_known_leaves_what_left_the_cache_unchecked():
    calls = generated(small("mistral"))
    for call in calls:
        vars(call)["facts_known"] = False
    report = ap.verify(calls, checks=["cache"])
    assert {row.reason for row in report.rows} == {
        f"{gone} tokens have left the cache, and how far this layer looks back is not known"
        for gone in (3, 4, 5)
    }


def test_where_no_cache_goes_on_the_check_is_left_out_unless_asked_for(gpt2):
    cap = ap.capture(gpt2(), [5, 17, 23])
    assert not [row for row in ap.verify(cap).rows if row.check == "cache"]
    [row] = ap.verify(cap, checks=["cache"]).rows
    assert row.verdict == "not_checked"
    assert row.reason == "no forward here goes on from a cache"
    calls = generated(small("llama"), use_cache=False)
    assert all(call.cache is None for call in calls)


def test_nothing_is_copied():
    calls = generated(small("llama"))
    held = {tensor.data_ptr() for call in calls for tensor in (call.key, call.value)}
    before = [(call.key.clone(), call.value.clone()) for call in calls]
    ap.verify(calls, checks=["cache"])
    assert {t.data_ptr() for call in calls for t in (call.key, call.value)} == held
    for call, (key, value) in zip(calls, before, strict=True):
        assert torch.equal(call.key, key)
        assert torch.equal(call.value, value)
    assert replace(calls[0], layer=3).cache == calls[0].cache

"""`capture(layers=…, device=…)`: what is kept is the model's own, and what is not is said."""

import dataclasses
import gc

import pytest
import torch
from samples import IDS
from test_encoder_decoders import SOURCES, TARGETS, bart, made, t5
from torch import Tensor

import attnprobe as ap
from attnprobe.keeping import Keeper, on_device
from attnprobe.projections import merged, output_weights, projected
from attnprobe.records import AttentionCall
from attnprobe.verification import CHECKS

BATCH = [IDS, IDS[:7]]
META = torch.device("meta")


def tensors(record):
    """Every tensor in a dataclass and in those within it, by path; written apart from the code."""
    found = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            found[field.name] = value
        elif dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{name}": one for name, one in tensors(value).items()}
    return found


def assert_same(call, other):
    """Two calls hold the same numbers, bit for bit."""
    ours, theirs = tensors(call), tensors(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (call.layer, call.name, call.part) == (other.layer, other.name, other.part)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("layers", [[1], [2, 0], range(3), {2}])
def test_what_is_kept_is_what_a_whole_capture_holds(gpt2, kernel, layers):
    model = gpt2(kernel)
    whole, some = ap.capture(model, BATCH), ap.capture(model, BATCH, layers=layers)
    assert [call.layer for call in some.calls] == sorted(layers)
    assert [one.layer for one in some.left_out] == [one for one in range(3) if one not in layers]
    for call in some.calls:
        assert_same(call, whole.call(call.layer))
    assert torch.equal(some.output, whole.output)
    assert some.layers == whole.layers == 3
    for layer in layers:
        assert torch.equal(ap.weights(some, layer, text=1), ap.weights(whole, layer, text=1))
        assert ap.table(some, layer).equals(ap.table(whole, layer))


def bytes_held(cap):
    """What the calls' tensors take, each storage once."""
    held = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for call in cap.calls
        for one in tensors(call).values()
    }
    return sum(held.values())


def test_a_layer_of_three_takes_a_third(gpt2):
    model = gpt2("eager")  # the mask, which the layers share, is counted in each
    whole, some = ap.capture(model, [IDS]), ap.capture(model, [IDS], layers=[2])
    mask = whole.calls[0].mask.untyped_storage().nbytes()
    assert 3 * (bytes_held(some) - mask) == pytest.approx(bytes_held(whole) - mask, rel=0.05)


def looks(cap):
    yield lambda: cap.call(1)
    yield lambda: ap.weights(cap, 1)
    yield lambda: ap.scores(cap, 1, 0)
    yield lambda: ap.table(cap, layer=1)
    yield lambda: ap.table(cap)
    yield lambda: ap.attended(cap, layer=1)
    yield lambda: ap.head_stats(cap)
    yield lambda: ap.head_view(cap)
    yield lambda: ap.attention_view(cap, layer=1)
    yield lambda: ap.heatmap(cap, layer=1, head=0)


def test_what_looks_at_a_layer_that_was_not_kept_says_so(gpt2):
    cap = ap.capture(gpt2(), IDS, layers=[0, 2])
    for look in looks(cap):
        with pytest.raises(ap.InputError, match=r"layer 1 was not kept: capture it"):
            look()
    with pytest.raises(ap.InputError, match="numbered 0 to 2"):
        cap.call(3)
    assert "2 attention calls, 1 not kept" in repr(cap)


def test_a_report_of_some_layers_does_not_read_as_one_of_all(gpt2):
    model = gpt2()
    report = ap.verify(ap.capture(model, BATCH, layers=[1]))
    assert not report.passed
    assert report.verdict == "not_checked"
    assert report.summary.startswith("NOT CHECKED: output: not kept, so not checked: layer 0, 2. ")
    assert "Of the others, 6 heads in 1 layer, the worst" in report.summary
    rows = {(row.layer, row.verdict) for row in report.rows if row.check == "output"}
    assert rows == {(1, "verified"), (0, "not_checked"), (2, "not_checked")}
    logits = report.rows[-1]
    assert (logits.check, logits.verdict) == ("logits", "not_checked")
    assert "layer 0, 2" in logits.reason
    alone = ap.verify(ap.capture(model, BATCH, layers=[1]), checks=["logits"])
    assert alone.verdict == "not_checked"
    assert ap.verify(ap.capture(model, BATCH, layers=[2, 1, 0])).passed


def test_a_mismatch_in_what_was_kept_stays_one(gpt2):
    cap = ap.capture(gpt2(), IDS, layers=[1])
    call = cap.calls[0]
    wrong = dataclasses.replace(call, head_output_model=call.head_output_model.flip(2))
    report = ap.verify(dataclasses.replace(cap, calls=(wrong,)))
    assert report.verdict == "mismatch"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([3], "layer 3 is out of range: the model has 3 attention layers, numbered 0 to 2"),
        ([], "at least one layer"),
        ([-1], "counted from 0"),
        ([True], "whole number"),
        (1, "a list of layers"),
        ("12", "a list of layers"),
    ],
)
def test_layers_that_are_not_there_are_refused(gpt2, layers, message):
    with pytest.raises(ap.InputError, match=message):
        ap.capture(gpt2(), IDS, layers=layers)


@pytest.mark.parametrize("device", ["meta", "nowhere", "cuda:77"])
def test_a_device_that_holds_nothing_is_refused(gpt2, device):
    with pytest.raises(ap.InputError, match=device):
        ap.capture(gpt2(), IDS, device=device)


def test_an_encoder_decoder_keeps_the_layers_of_each_part():
    model = made(bart)
    whole = ap.capture(model, SOURCES, target=TARGETS)
    some = ap.capture(model, SOURCES, target=TARGETS, layers=[2])
    assert [(call.part, call.layer) for call in some.calls] == [("decoder", 2), ("cross", 2)]
    assert some.decoder.layers == some.cross.layers == 3
    assert torch.equal(ap.weights(some.cross, 2), ap.weights(whole.cross, 2))
    with pytest.raises(ap.InputError, match="layer 0 was not kept"):
        ap.weights(some.decoder, 0)
    with pytest.raises(ap.InputError, match="no layer of the encoder was kept"):
        _ = some.encoder
    summary = ap.verify(some).summary
    assert "layer encoder 0, encoder 1, decoder 0, cross 0, decoder 1, cross 1" in summary


def test_an_edit_from_a_capture_of_some_layers(gpt2):
    model = gpt2()
    whole, some = ap.capture(model, IDS[::-1]), ap.capture(model, IDS[::-1], layers=[1])
    found = []
    for other in (whole, some):
        with ap.edit(model, layers=[1], positions=[3], value=other):
            found.append(ap.capture(model, IDS).output)
    assert torch.equal(*found)
    for change in ({"value": some}, {"head_output": some}):
        with (
            pytest.raises(ap.InputError, match="layer 2 was not kept"),
            ap.edit(model, layers=[2], **change),
        ):
            model(torch.tensor([IDS]))


# Another device: there is one here that computes, so a device without numbers stands for the other


@pytest.mark.parametrize(
    "cap",
    [
        pytest.param(lambda gpt2: ap.capture(gpt2("eager"), BATCH), id="padded, eager"),
        pytest.param(
            lambda gpt2: ap.capture(made(t5), SOURCES, target=TARGETS), id="a bias by distance"
        ),
    ],
)
def test_every_tensor_of_a_call_goes_to_the_device(gpt2, cap):
    for call in cap(gpt2).calls:
        moved = tensors(on_device(call, META))
        assert moved.keys() == tensors(call).keys()
        assert {one.device for one in moved.values()} == {META}
        assert moved["expected_mask.padding"].shape == call.expected_mask.padding.shape


def test_a_capture_goes_there_whole_but_for_what_the_model_is_run_on(gpt2):
    keeper = Keeper(None, META)
    whole = ap.capture(gpt2("eager"), BATCH)
    for call in whole.calls:
        keeper.take(call)
    cap = keeper.finished(whole)
    assert len(cap.calls) == 3
    assert {one.device for call in cap.calls for one in tensors(call).values()} == {META}
    assert {getattr(cap, one).device for one in ("output", "input_ids", "padding")} == {META}
    assert {one.device.type for one in cap.inputs.values()} == {"cpu"}


def test_what_the_layers_share_is_moved_once(gpt2):
    keeper = Keeper(None, META)
    for call in ap.capture(gpt2("eager"), BATCH).calls:
        assert call.mask is not None
        keeper.take(call)
    assert len({id(call.mask) for call in keeper.kept}) == 1
    assert len({id(call.key) for call in keeper.kept}) == 3


def test_the_layers_own_weights_are_met_where_the_call_is_kept(grouped):
    for call in grouped.calls:
        moved = on_device(call, META)
        made = projected(moved)
        assert not isinstance(made, str)
        products = [*made.values(), merged(moved), output_weights(moved)]
        for first, second in products:
            assert first.device == META
            assert second is None or second.device == META


def test_a_capture_on_the_models_own_device_is_the_same(gpt2):
    model = gpt2()
    there, whole = ap.capture(model, BATCH, device="cpu"), ap.capture(model, BATCH)
    for call, other in zip(there.calls, whole.calls, strict=True):
        assert_same(call, other)
    report = ap.verify(there)
    assert report.passed
    assert {row.check for row in report.rows} == set(CHECKS) - {"cache"}


# What is done with is let go at once, and not when Python next looks for cycles


def alive():
    """How many attention calls there are."""
    return sum(type(one) is AttentionCall for one in gc.get_objects())


@pytest.fixture
def without_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def generated(lm):
    with ap.probe(lm.model) as calls:
        lm.model.generate(torch.tensor([IDS]), max_new_tokens=3, do_sample=False)
    return ap.verify(calls).passed


@pytest.mark.parametrize(
    "use",
    [
        lambda lm: ap.capture(lm, IDS).layers,
        lambda lm: ap.verify(ap.capture(lm, IDS)).passed,
        lambda lm: ap.verify(lm, IDS).passed,
        lambda lm: len(ap.head_stats(ap.capture(lm, IDS))),
        lambda lm: len(ap.attention_view(ap.capture(lm, IDS)).html),
        lambda lm: len(ap.term_effects(lm, IDS)),
        lambda lm: len(ap.head_effects(lm, IDS)),
        generated,
    ],
)
@pytest.mark.usefixtures("without_gc")
def test_no_call_outlives_its_use(gpt2, use):
    lm = ap.LanguageModel(gpt2(), None)
    before = alive()
    assert use(lm)
    assert alive() == before


@pytest.mark.usefixtures("without_gc")
def test_verifying_a_model_holds_one_layer_at_a_time(gpt2):
    model, counts = gpt2(), []
    before = alive()
    for block in [*model.transformer.h, model.lm_head]:
        block.register_forward_pre_hook(lambda *_: counts.append(alive() - before))
    assert ap.verify(model, IDS, checks=["mask", "output"]).passed
    assert counts == [0] * (len(model.transformer.h) + 1)

"""Faults in the middle of a forward: after each, the model is as it was, bit for bit."""

import signal
import sys
import threading
from collections import Counter

import pytest
import torch
from test_hooks import IDS, hooks_of
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

import attnprobe as ap
from attnprobe.seam.interrupts import uninterrupted


class Stop(BaseException):
    """As KeyboardInterrupt, no Exception: torch calls no hooks of what it ends."""


def plain(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def capture(model):
    ap.capture(model, IDS)


def verify(model):
    ap.verify(model, IDS, checks=["output", "logits"])


def edit(model):
    with ap.edit(model, scale="none"):
        plain(model)


def generate(model):
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    with ap.probe(model):
        model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)


DEEDS = [capture, verify, edit, generate]


def state(model):
    """What a deed may not leave changed."""
    return (
        hooks_of(model),
        AttentionInterface.get_interface,
        PreTrainedModel.get_compiled_call,
        [sorted(vars(module)) for module in model.modules()],
        model.config.to_dict(),
        model.config._attn_implementation,
        model.training,
        signal.getsignal(signal.SIGINT),
        [weight.clone() for weight in model.parameters()],
        plain(model),
    )


def same(one, other):
    """Whether two states are the same, their tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def hooked(model, error):
    """Put a hook of the user's own into the middle of the model that raises; give its handle."""

    def fail(*_):
        raise error

    return model.transformer.h[1].mlp.register_forward_hook(fail)


@pytest.mark.parametrize("error", [RuntimeError("in a hook"), KeyboardInterrupt(), Stop()])
@pytest.mark.parametrize("deed", DEEDS)
def test_an_error_in_a_hook_of_the_users(gpt2, deed, error):
    model = gpt2()
    before = state(model)
    handle = hooked(model, error)
    with pytest.raises(type(error)):
        deed(model)
    handle.remove()
    assert same(state(model), before)


@pytest.mark.parametrize("error", [RuntimeError("in the forward"), KeyboardInterrupt()])
@pytest.mark.parametrize("deed", DEEDS)
def test_an_error_in_the_forward_of_an_attention(gpt2, monkeypatch, deed, error):
    model = gpt2()
    before = state(model)

    def fail(*_args, **_kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(model.transformer.h[1].attn.c_proj, "forward", fail)
        with pytest.raises(type(error)):
            deed(model)
    assert same(state(model), before)


def test_an_error_in_what_the_user_gave(gpt2):
    model = gpt2()
    before = state(model)

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ap.verify(model, IDS, progress=fail)
    with pytest.raises(KeyboardInterrupt), ap.edit(model, weights=fail):
        plain(model)
    with pytest.raises(KeyboardInterrupt):
        ap.head_effects(model, IDS[:1], progress=fail)
    assert same(state(model), before)


def interrupt_at(number, seen):
    """A tracer that sends Ctrl-C before the n-th line of attnprobe, or of the library that makes
    its `with` blocks, that runs for the first time; `seen` counts the lines."""

    def line(frame, event, _arg):
        at = (frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and at not in seen:
            seen[at] += 1
            if len(seen) == number:
                signal.raise_signal(signal.SIGINT)
        return line

    def call(frame, _event, _arg):
        name = frame.f_code.co_filename
        return line if "/attnprobe/" in name or name.endswith("/contextlib.py") else None

    return call


@pytest.mark.parametrize("deed", DEEDS)
def test_ctrl_c_at_any_line(gpt2, deed):
    """Of the lines around a forward each, of the others a share."""
    model = gpt2(n_layer=2)
    deed(model)
    before = state(model)
    all_lines = Counter()
    sys.settrace(interrupt_at(0, all_lines))
    deed(model)
    sys.settrace(None)
    around = ("hooks.py", "interrupts.py", "contextlib.py", "editing.py")
    chosen = [
        number
        for number, (name, _) in enumerate(all_lines, 1)
        if name.endswith(around) or number % 7 == 0
    ]
    assert len(chosen) > 100
    tracebacks = []
    for number in chosen:
        sys.settrace(interrupt_at(number, Counter()))
        try:
            deed(model)
        except KeyboardInterrupt as error:
            tracebacks.append(error.__traceback__)  # held, as notebooks do
        finally:
            sys.settrace(None)
        assert hooks_of(model) == 0
        assert AttentionInterface.get_interface is before[1]
    assert len(tracebacks) == len(chosen)
    assert same(state(model), before)


def test_a_probe_that_is_open_still_goes_on_after_ctrl_c(gpt2):
    """As in a notebook, where a generation is stopped and run again in one block."""
    model = gpt2()
    with ap.probe(model) as alone:
        plain(model)
    with ap.probe(model) as calls:
        for error in (KeyboardInterrupt(), Stop()):
            handle = hooked(model, error)
            with pytest.raises(type(error)):
                plain(model)
            handle.remove()
        plain(model)
    assert [(call.step, call.layer) for call in calls] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip
    for one, other in zip(calls[-3:], alone, strict=True):
        assert torch.equal(one.attention_output, other.attention_output)
        assert one.expected_mask.offset == 0
    report = ap.verify(calls[-3:])
    assert report.passed


def test_ctrl_c_within_attention_leaves_no_module_running(gpt2, monkeypatch):
    model = gpt2()

    def fail(*_args, **_kwargs):
        raise KeyboardInterrupt

    with ap.probe(model) as calls:
        with monkeypatch.context() as patch:
            patch.setattr(model.transformer.h[1].attn.c_proj, "forward", fail)
            with pytest.raises(KeyboardInterrupt):
                plain(model)
        plain(model)
    assert calls[1].attention_output is None  # of the forward that was stopped
    assert [call.layer for call in calls] == [0, 1, 0, 1, 2]
    assert not calls.unseen
    assert ap.verify(calls[2:]).passed


def test_followed_attention_goes_on_after_ctrl_c(monkeypatch):
    from test_following import modes, small, texts

    model = small("causal", "bloom")
    ids = torch.tensor([texts()[0]])
    with ap.probe(model) as calls:
        dense = model.transformer.h[1].self_attention.dense

        def fail(*_args, **_kwargs):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(dense, "forward", fail)
            with pytest.raises(KeyboardInterrupt):
                model(ids)
        with torch.no_grad():
            model(ids)
    assert modes() == []
    assert [call.layer for call in calls] == [0, 1, 0, 1]
    assert ap.verify(calls[2:]).passed


def test_an_edit_that_is_open_still_goes_on_after_ctrl_c(gpt2):
    model = gpt2()
    with ap.edit(model, scale="none"):
        wanted = plain(model)
    with ap.edit(model, scale="none"):
        handle = hooked(model, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            plain(model)
        handle.remove()
        assert torch.equal(plain(model), wanted)


# Ctrl-C waits


def test_ctrl_c_waits_for_the_end_of_a_block_and_then_comes():
    done = []

    def work():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append(True)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_the_users_is_called_with_what_came():
    came = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            assert came == []
        assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, None])
def test_where_ctrl_c_is_not_pythons_it_is_left_alone(handler):
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def look():
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    if handler is None:  # another thread than the main one
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert seen == [before]
        return
    signal.signal(signal.SIGINT, handler)
    try:
        look()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [handler]

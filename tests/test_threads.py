"""Threads: each sees and changes what it runs itself, on other models and on the same one."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import mistral
from test_hooks import IDS, hooks_of
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging

import attnprobe as ap

ROUNDS = 12
TEXT = "The children were playing in the green park"


@pytest.fixture(autouse=True)
def _switching_often():
    """Threads take turns every 10 µs, not every 5 ms: what can go wrong between two lines does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*runs: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own, at once; give what they return, or raise what one raised."""
    found: list[Any] = [None] * len(runs)
    errors: list[BaseException] = []
    ready = threading.Barrier(len(runs))

    def thread(at: int) -> None:
        ready.wait()
        try:
            found[at] = runs[at]()
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    threads = [threading.Thread(target=thread, args=(at,)) for at in range(len(runs))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if errors:
        raise errors[0]
    return found


def plain(model):
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def captured(model):
    cap = ap.capture(model, IDS)
    assert [call.layer for call in cap.calls] == list(range(len(cap.calls)))
    return torch.cat(
        [cap.output.flatten(), *(call.attention_output.flatten() for call in cap.calls)]
    )


def edited(model):
    with ap.edit(model, heads=[(1, 2)], head_output="zero"):
        return plain(model)


def unscaled(model):
    with ap.edit(model, scale="none"), ap.probe(model) as calls:
        logits = plain(model)
    return torch.cat([logits.flatten(), *(call.head_output_model.flatten() for call in calls)])


def generated(model):
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with ap.probe(model) as calls:
        ids = model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    assert [call.step for call in calls] == sorted(call.step for call in calls)
    return torch.cat([ids.flatten(), *(call.query.flatten() for call in calls)])


def verified(model):
    report = ap.verify(model, IDS)
    assert report.passed
    return torch.tensor([row.error for row in report.rows if row.verdict == "verified"])


DEEDS = [plain, captured, edited, unscaled, generated, verified]


def over_and_over(deed, model, wanted):
    def run():
        return [torch.equal(deed(model), wanted) for _ in range(ROUNDS)]

    return run


@pytest.mark.parametrize("models", ["one", "a model each"])
def test_each_thread_gets_what_it_would_alone(gpt2, models):
    """Plain forwards, captures, edits, generations and verifications, all at once."""
    seam = AttentionInterface.get_interface
    one = gpt2()
    given = [one if models == "one" else gpt2(seed=number) for number in range(len(DEEDS))]
    wanted = [deed(model) for deed, model in zip(DEEDS, given, strict=True)]
    assert len({float(one.double().sum()) for one in wanted}) == len(DEEDS)
    right = together(*map(over_and_over, DEEDS, given, wanted))
    assert right == [[True] * ROUNDS] * len(DEEDS)
    assert AttentionInterface.get_interface is seam
    assert [hooks_of(model) for model in given] == [0] * len(DEEDS)
    assert all("prepare_inputs_for_generation" not in vars(model) for model in given)


def test_attention_that_is_followed_is_of_one_thread_as_well():
    from test_following import small, texts

    model = small("causal", "bloom")
    ids = torch.tensor([texts()[0]])

    def followed():
        cap = ap.capture(model, ids)
        assert len(cap.calls) == 2
        return torch.cat([call.head_output_model.flatten() for call in cap.calls])

    wanted = followed()
    right = together(*[lambda: [torch.equal(followed(), wanted) for _ in range(ROUNDS)]] * 3)
    assert right == [[True] * ROUNDS] * 3
    assert hooks_of(model) == 0


def test_texts_through_one_tokenizer():
    lm = ap.load("bundled")
    texts = [f"{TEXT} {more}" for more in ("", "and sang", "until the sun went down")]
    wanted = [ap.capture(lm, text).output for text in texts]

    def run(text, logits):
        return lambda: [torch.equal(ap.capture(lm, text).output, logits) for _ in range(4)]

    assert together(*map(run, texts, wanted)) == [[True] * 4] * 3


def test_a_forward_of_another_thread_in_the_middle_of_an_edited_one(gpt2):
    """Not by chance: the other thread runs while this one stands between two layers."""
    model = gpt2()
    unchanged, alone = plain(model), edited(model)
    main = threading.get_ident()
    others = []

    def meanwhile(*_):
        if threading.get_ident() == main:
            others.extend(together(lambda: plain(model), lambda: captured(model)))

    wanted = captured(model)
    handle = model.transformer.h[1].mlp.register_forward_hook(meanwhile)
    with ap.probe(model) as calls:
        changed = edited(model)
    handle.remove()
    assert torch.equal(changed, alone)
    assert not torch.equal(changed, unchanged)
    assert torch.equal(others[0], unchanged)
    assert torch.equal(others[1], wanted)
    assert [(call.layer, call.step) for call in calls] == [(0, 0), (1, 0), (2, 0)]
    assert hooks_of(model) == 0


@pytest.mark.parametrize("block", [ap.probe, lambda model: ap.edit(model, scale="none")])
def test_a_block_whose_model_runs_in_another_thread_alone_is_refused(gpt2, block):
    """As where a main thread prints what a `generate` in a thread of its own streams."""
    model = gpt2()
    with (
        pytest.raises(ap.InputError, match="open it in the thread that runs the model"),
        block(model),
    ):
        together(lambda: plain(model))
    with block(model):
        pass
    with block(model):
        together(lambda: plain(model))
        plain(model)
    assert hooks_of(model) == 0


def test_an_exception_says_more_than_that_the_thread_was_another(gpt2):
    model = gpt2()

    def fail():
        with ap.probe(model):
            together(lambda: plain(model))
            raise RuntimeError("of the user's")

    with pytest.raises(RuntimeError, match="of the user's"):
        fail()


def test_one_thread_may_edit_while_another_does(gpt2):
    model = gpt2()
    with ap.edit(model, scale="none"):
        with pytest.raises(ap.InputError, match="edited already"), ap.edit(model, mask="none"):
            pass
        (found,) = together(lambda: edited(model))
        plain(model)
    assert torch.equal(found, edited(model))


def test_a_backward_pass_in_a_thread_of_torchs_is_of_the_edit(gpt2):
    """On a GPU the backward pass runs in other threads, and with it the layers that gradient
    checkpointing runs again: these are changed as well, so that the pass is refused."""
    model = gpt2()
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    embedded = model.transformer.wte(IDS).detach().requires_grad_()
    with ap.edit(model, scale="none"):
        loss = model(inputs_embeds=embedded, use_cache=False).logits.sum()
        with pytest.raises(ap.ModelError, match="backward"):
            together(loss.backward)


def test_files_beside_each_other(tmp_path):
    """Each file is written whole before it takes its name, and no thread takes another's."""
    view = ap.head_view(ap.capture(mistral(), IDS[0]), 0, 0)
    pages = [ap.View(f"{at}", f"{at}" * 100_000, 10, view.still) for at in range(4)]

    def save(at):
        def run():
            for _ in range(50):
                pages[at].save(tmp_path / f"{at}.html")
                assert (tmp_path / f"{at}.html").read_text() == pages[at].html

        return run

    together(*map(save, range(4)))
    assert sorted(one.name for one in tmp_path.iterdir()) == [f"{at}.html" for at in range(4)]


def test_loading_in_threads_leaves_transformers_talkative():
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    assert before[0] != logging.CRITICAL
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    try:
        names = together(*[lambda: [ap.load("bundled").name for _ in range(2)]] * 3)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (
            logging.WARNING,
            True,
        )
    finally:
        logging.set_verbosity(before[0])
    assert names == [["bundled"] * 2] * 3

"""Encoder-decoders: captured with a target, verified whole, looked at one part at a time."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import attnprobe as ap
from attnprobe.checking.basis import basis_of
from attnprobe.verification import CHECKS

SOURCES = [[5, 17, 23, 5, 9, 42, 8], [3, 3, 60, 11]]
TARGETS = [[4, 9, 77], [4, 8, 12, 71, 30]]
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "vocab_size": 99}
WORDS = ["the", "children", "play", "a", "dog", "sleeps"]


def t5(**config):
    sizes = {"d_model": 60, "d_kv": 10, "d_ff": 70, "num_heads": 6, "num_layers": 2}
    settings = ENDS | sizes | {"num_decoder_layers": 3, "decoder_start_token_id": 2}
    return T5ForConditionalGeneration, T5Config(**settings | config)


def bart():
    layers = {"encoder_layers": 2, "decoder_layers": 3, "d_model": 60}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 5}
    inner = {"encoder_ffn_dim": 70, "decoder_ffn_dim": 50, "max_position_embeddings": 64}
    config = BartConfig(**ENDS, **layers, **heads, **inner, decoder_start_token_id=2)
    return BartForConditionalGeneration, config


def made(kind, kernel="sdpa", dtype=torch.float32):
    torch.manual_seed(0)
    cls, config = kind()
    model = cls._from_config(config, attn_implementation=kernel).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.25)
    return model.to(dtype)


def tokenizer():
    vocabulary = {word: at for at, word in enumerate(["<s>", "</s>", "<pad>", "<unk>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>")


def verdicts(report, check):
    return {row.verdict for row in report.rows if row.check == check}


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [t5, bart])
def test_every_check_of_the_whole(kind, kernel):
    cap = ap.capture(made(kind, kernel), SOURCES, target=TARGETS)
    assert [(call.kind, call.in_encoder) for call in cap.calls] == (
        [("self", True)] * 2 + [("self", False), ("cross", False)] * 3
    )
    report = ap.verify(cap)
    assert report.passed, report
    assert {row.check for row in report.rows} == set(CHECKS) - {"cache"}
    assert verdicts(report, "output") == verdicts(report, "logits") == {"verified"}
    assert verdicts(report, "weights") == {"verified" if kernel == "eager" else "not_checked"}
    assert "mismatch" not in verdicts(report, "projection") | verdicts(report, "merge")
    if kind is bart:
        assert verdicts(report, "mask") == {"verified"}
    assert "the model has" not in report.summary  # its config counts one half's layers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [t5, bart])
def test_half_precision(kind, dtype):
    report = ap.verify(
        ap.capture(made(kind, dtype=dtype), SOURCES, target=TARGETS), checks=["output"]
    )
    assert report.verdict != "mismatch", report


@pytest.mark.parametrize("name", ["encoder_attention_mask", "attention_mask"])
def test_padding_that_the_decoder_was_not_given_is_seen_to_be_lost(name):
    def forget(module, args, kwargs):
        return args, kwargs | {name: None}

    model = made(bart)
    model.get_decoder().register_forward_pre_hook(forget, with_kwargs=True)
    cap = ap.capture(model, SOURCES, target=TARGETS)
    lost = "cross" if name.startswith("encoder") else "self"
    for call in cap.calls:
        entries = basis_of(call).mask_difference
        assert ("mask entries differ" in entries) == (call.kind == lost and not call.in_encoder)
    assert verdicts(ap.verify(cap), "mask") == {"mismatch", "verified"}


@pytest.mark.parametrize("part", ["encoder", "decoder"])
@pytest.mark.parametrize("kind", [t5, bart])
def test_a_parts_weights_are_the_models_own(kind, part):
    model = made(kind, "eager")
    cap = getattr(ap.capture(model, SOURCES, target=TARGETS), part)
    texts = {"encoder": SOURCES, "decoder": TARGETS}[part]
    with torch.no_grad():
        for text, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
            out = model(
                input_ids=torch.tensor([source]),
                decoder_input_ids=torch.tensor([target]),
                output_attentions=True,
            )
            own = out.encoder_attentions if part == "encoder" else out.decoder_attentions
            assert cap.layers == len(own)
            for layer, weights in enumerate(own):
                found = ap.weights(cap, layer, text=text)
                assert found.shape[-1] == len(texts[text])
                np.testing.assert_allclose(found, weights[0], atol=1e-4)
    frame = ap.table(cap, 1, 2, text=1, future=True)
    tokens = len(texts[1])
    assert len(frame) == tokens * tokens
    np.testing.assert_allclose(
        frame.weight.to_numpy().reshape(tokens, tokens), ap.weights(cap, 1, 2, text=1)
    )
    assert (ap.weights(cap, 1).triu(1).sum() > 0.1) == (part == "encoder")
    assert len(ap.head_stats(cap)) == cap.layers * cap.calls[0].heads
    assert ap.verify(cap).passed
    assert f"this is the {part} alone" in str(ap.verify(cap, checks=["logits"]))


VIEWS = {
    "head_view": lambda cap: ap.head_view(cap, layer=1),
    "model_view": lambda cap: ap.model_view(cap),
    "neuron_view": lambda cap: ap.neuron_view(cap, layer=1, head=2),
    "attention_view": lambda cap: ap.attention_view(cap),
    "walkthrough_view": lambda cap: ap.walkthrough_view(cap, 2),
    "report_view": lambda cap: ap.report_view(cap),
    "heatmap": lambda cap: ap.heatmap(cap, layer=1, head=2),
    "walkthrough": lambda cap: ap.walkthrough(cap, 2, layer=1, head=2),
    "attended": lambda cap: ap.attended(cap, 2),
    "attended_by": lambda cap: ap.attended_by(cap, 1),
    "table": lambda cap: ap.table(cap, 1, 2),
    "weights": lambda cap: ap.weights(cap, 1),
    "scores": lambda cap: ap.scores(cap, 1),
    "head_stats": lambda cap: ap.head_stats(cap),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("kind", [t5, bart])
def test_each_part_can_be_looked_at_and_the_whole_says_which(kind, name):
    cap = ap.capture(made(kind), SOURCES, target=TARGETS)
    with pytest.raises(ap.InputError, match=r"look at cap\.encoder or cap\.decoder"):
        VIEWS[name](cap)
    for part in (cap.encoder, cap.decoder):
        if kind is t5 and name in ("neuron_view", "walkthrough_view"):
            with pytest.raises(ap.InputError, match="this model adds bias"):
                VIEWS[name](part)
        else:
            assert VIEWS[name](part) is not None


@pytest.mark.parametrize("kind", [t5, bart])
def test_texts_begin_with_the_models_start_token(kind):
    cap = ap.capture(
        (made(kind), tokenizer()), ["the children play", "a dog"], target=["a dog sleeps", "the"]
    )
    assert cap.encoder.words_of(0).tokens == ("the", "children", "play")
    assert cap.decoder.words_of(0).tokens == ("<pad>", "a", "dog", "sleeps")
    assert cap.target.padding.sum(-1).tolist() == [4, 2]
    assert ap.verify(cap).passed
    frame = ap.attended(cap.decoder, "dog")
    assert set(frame["key"]) <= {"<pad>", "a", "dog"}
    table = ap.table(cap.encoder, 0, 0, by="word", text=0)
    assert table["query"].unique().tolist() == ["the", "children", "play"]


@pytest.mark.parametrize("kind", [t5, bart])
def test_what_is_missing_is_named(kind):
    model = made(kind)
    with pytest.raises(ap.InputError, match=r"needs a target as well.*capture\(lm, text, target"):
        ap.capture(model, SOURCES)
    with pytest.raises(ap.InputError, match="got 2 texts and 1 targets"):
        ap.capture(model, SOURCES, target=TARGETS[:1])
    for target, said in (
        ([], r"expected a target, a list of targets or token ids, got \[\]"),
        ([[]], "target 0 has no tokens"),
        ([101], "target 0 holds token ids from 101 to 101"),
        ([0.5], "one list of them a target"),
        (b"text", "expected a target as str, got bytes"),
    ):
        with pytest.raises(ap.InputError, match=said):
            ap.capture(model, SOURCES[0], target=target)
    with pytest.raises(ap.InputError, match=r"expected a text, a list of texts .* got \[\]"):
        ap.capture(model, [], target=TARGETS[0])
    with pytest.raises(ap.InputError, match="a bare model takes token ids"):
        ap.capture(model, SOURCES[0], target="text")
    part = ap.capture(model, SOURCES, target=TARGETS).decoder
    with pytest.raises(ap.InputError, match="no encoder and decoder"):
        _ = part.encoder


def test_a_model_of_one_text_has_no_target(gpt2):
    with pytest.raises(ap.InputError, match="GPT2LMHeadModel has no decoder to give a target to"):
        ap.capture(gpt2(), SOURCES[0], target=TARGETS[0])
    with pytest.raises(ap.InputError, match="no encoder and decoder"):
        _ = ap.capture(gpt2(), SOURCES[0]).encoder


def test_padding_on_the_left_is_refused_where_it_would_shift_positions():
    with pytest.raises(ap.InputError, match=r"counts positions.*padding_side='right'"):
        ap.capture(made(bart), SOURCES, target=TARGETS, padding_side="left")
    left = ap.capture(made(t5), SOURCES, target=TARGETS, padding_side="left")
    alone = ap.capture(made(t5), SOURCES[1], target=TARGETS[1])
    torch.testing.assert_close(left.output[1, left.output_padding[1]], alone.output[0])


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("kind", [lambda: t5(num_decoder_layers=2), bart], ids=["t5", "bart"])
def test_a_generation_is_verified_step_by_step(kind, options):
    model = made(kind)
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    ids, mask = torch.tensor([[5, 17, 23, 9]]), torch.ones(1, 4, dtype=torch.long)
    options = options | {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    without = model.generate(ids, **options)
    with ap.probe(model) as calls:
        within = model.generate(ids, **options)
    assert torch.equal(without, within)
    report = ap.verify(calls)
    assert report.passed, report
    assert report.steps == 5  # the encoder's own forward, and four of the decoder
    assert [call.key.shape[2] for call in calls if call.kind == "cross"] == [4] * len(
        [call for call in calls if call.kind == "cross"]
    )


@pytest.mark.parametrize(("kind", "parts"), [(t5, ["q", "v"]), (bart, ["q_proj", "v_proj"])])
def test_under_lora(kind, parts):
    settings = LoraConfig(r=3, target_modules=parts, task_type="SEQ_2_SEQ_LM")
    cap = ap.capture(get_peft_model(made(kind), settings).eval(), SOURCES, target=TARGETS)
    assert (cap.encoder.layers, cap.decoder.layers) == (2, 3)
    assert ap.verify(cap).passed


# Attention that was not seen

UNSEEN = {
    "encoder": ("model.encoder.layers.1.self_attn", "encoder"),
    "decoder": ("model.decoder.layers.1.self_attn", "decoder"),
    "cross": ("model.decoder.layers.1.encoder_attn", "cross"),
}


@pytest.mark.parametrize("part", UNSEEN)
def test_attention_that_was_not_seen_is_of_one_part(part):
    model, (name, _) = made(bart), UNSEEN[part]
    model.get_submodule(name).forward = lambda hidden, *args, **kwargs: (hidden, None)
    cap = ap.capture(model, SOURCES, target=TARGETS)
    assert [(one.part, one.layer, one.name) for one in cap.unseen] == [(part, 1, name)]
    frame = ap.verify(cap, checks=["output"]).to_frame()
    row = frame[frame.verdict == "not_checked"]
    assert (row.part.item(), row.layer.item()) == (part, 1)
    parts = {"encoder": 2, "decoder": 3, "cross": 3}
    for other, layers in parts.items():
        own = getattr(cap, other)
        assert own.layers == layers
        assert len(own.unseen) == (other == part)
        assert ap.verify(own, checks=["output"]).passed == (other != part)
        if other != part:
            assert ap.weights(own, 1).shape[0] == own.call(1).heads
    with pytest.raises(ap.InputError, match=rf"layer 1: {name} computed its attention unseen"):
        getattr(cap, part).call(1)
    assert cap.layers == 5  # self-attention's
    with ap.probe(model) as calls, torch.no_grad():
        model(input_ids=torch.tensor(SOURCES[:1]), decoder_input_ids=torch.tensor(TARGETS[:1]))
    assert [one.part for one in calls.unseen] == [part]


# Cross attention


def test_cross_attention_is_between_two_texts(show):
    cap = ap.capture(made(bart), SOURCES, target=TARGETS)
    cross = cap.cross
    call = next(one for one in cap.calls if one.kind == "cross" and one.layer == 1)
    for text in range(2):
        rows, keys = len(TARGETS[text]), len(SOURCES[text])
        weights = ap.weights(cross, 1, text=text)
        assert weights.shape[1:] == (rows, keys)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        at, keys_at = cap.target.padding[text], cap.padding[text]
        query, key, value, own = (
            one[text].double()
            for one in (call.query, call.key, call.value, call.head_output_model.transpose(1, 2))
        )
        scores = query[:, at] @ key[:, keys_at].mT * call.scaling
        torch.testing.assert_close(weights, torch.softmax(scores, -1))
        torch.testing.assert_close(weights @ value[:, keys_at], own[:, at], rtol=1e-4, atol=1e-4)
        frame = ap.table(cross, 1, 0, text=text)
        assert len(frame) == rows * keys
        assert frame["key"].astype(str).tolist()[:keys] == [str(one) for one in SOURCES[text]]
        assert frame["query"].astype(str).iloc[-1] == str(TARGETS[text][-1])
        wide = ap.table(cross, 1, 0, text=text, wide=True)
        assert wide.shape == (rows, keys)
    tab = show(ap.head_view(cross, layer=1, text=0))
    left, right = (
        tab.page.locator(f"#{side} text").all_text_contents() for side in ("left", "right")
    )
    assert left == [str(one) for one in TARGETS[0]]
    assert right == [str(one) for one in SOURCES[0]]
    drawn = torch.tensor(tab.page.evaluate("bertviz_params.attention[0].attn[0]"))
    assert (drawn - ap.weights(cross, 1)).abs().max() < 1e-4
    tab = show(ap.model_view(cross))
    heads, layers = weights.shape[0], cross.layers
    lines = len(TARGETS[0]) * len(SOURCES[0])
    assert tab.page.locator("svg line").count() == heads * layers * lines


@pytest.mark.parametrize(
    "shows",
    [
        ap.attended,
        ap.head_stats,
        ap.attention_view,
        lambda cap: ap.heatmap(cap, 0, 0),
        lambda cap: ap.neuron_view(cap, 0, 0),
        lambda cap: ap.walkthrough(cap, 0, 0, 0),
        ap.walkthrough_view,
    ],
)
def test_what_cannot_show_two_texts_says_so(shows):
    cross = ap.capture(made(bart), SOURCES, target=TARGETS).cross
    with pytest.raises(ap.InputError, match=r"cross attention is between two texts: weights"):
        shows(cross)

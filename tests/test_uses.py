"""Models as people use them: generation, padding, wrappers, offloading, compiling, training."""

import inspect

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from test_families import small
from transformers import (
    BatchEncoding,
    BertConfig,
    BertModel,
    CompileConfig,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    pipeline,
)
from transformers.generation import utils
from transformers.modeling_utils import AttentionInterface

import attnprobe as ap

IDS = torch.tensor([[5, 17, 23, 5, 9, 42, 8], [3, 3, 60, 11, 72, 1, 90]])
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
TEXTS = [[5, 17, 23, 5, 9, 42, 8], [3, 60, 11]]


def verdicts(report, check):
    return {row.verdict for row in report.rows if row.check == check}


def reasons(report, check):
    return {row.reason for row in report.rows if row.check == check}


def generated(model, **options):
    """What a model writes under a probe, which must be what it writes without; and the calls."""
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 2} | options
    options.setdefault("attention_mask", LEFT)
    torch.manual_seed(1)
    without = model.generate(IDS, **options)
    torch.manual_seed(1)
    with ap.probe(model) as calls:
        within = model.generate(IDS, **options)
    assert torch.equal(without, within)
    return calls


# Generation


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True}, {"use_cache": False}, {"prefill_chunk_size": 3}],
    ids=lambda options: next(iter(options), "greedy"),
)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])  # the last slides its cache
def test_every_step_of_a_generation_is_verified(kind, kernel, options):
    calls = generated(small(kind, kernel), **options)
    report = ap.verify(calls)
    assert report.passed, report
    assert verdicts(report, "mask") == verdicts(report, "output") == {"verified"}
    assert verdicts(report, "projection") == {"verified"}
    assert report.steps == 4 + 2 * ("prefill_chunk_size" in options)
    assert len(report.to_frame().query("check == 'output'")) == report.steps * 2 * 6


MORE = torch.tensor([[0, 0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1]])


def test_padding_is_still_known_when_it_has_partly_left_a_sliding_cache():
    calls = generated(small("mistral"), attention_mask=MORE)
    paddings = [call.expected_mask.padding for call in calls if call.layer == 0]
    kept = [None if one is None else one[0].int().tolist() for one in paddings]
    assert kept == [[0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1], None]  # none is left
    assert [call.first_key for call in calls if call.layer == 0] == [0, 4, 4, 4]
    assert ap.verify(calls).passed


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_a_static_caches_whole_masks_are_checked_against_what_generate_was_given(kind, beams):
    options = {"num_beams": beams, "attention_mask": MORE, "max_new_tokens": 6}
    calls = generated(small(kind), cache_implementation="static", **options)
    assert calls[-1].mask.dim() == 4
    report = ap.verify(calls)
    assert report.passed, report
    assert verdicts(report, "mask") == verdicts(report, "cache") == {"verified"}
    assert verdicts(report, "projection") == {"verified"}  # keys stand where the cache put them
    assert report.tokens == beams * (2 + 7 + 5 * 2)  # without the padding


@pytest.mark.parametrize("forgotten", ["attention_mask", "position_ids"])
def test_padding_that_generate_itself_forgets_is_found(monkeypatch, forgotten):
    """The mask that `generate` makes for a cache of fixed size is not borrowed."""
    model = small("llama")
    right = utils.create_masks_for_generate

    def forgets(**given):
        return right(**given | {forgotten: None})

    monkeypatch.setattr(utils, "create_masks_for_generate", forgets)
    calls = generated(model, cache_implementation="static", attention_mask=MORE)
    lost = forgotten == "attention_mask"
    report = ap.verify(calls, checks=["mask", "output"])
    assert verdicts(report, "mask") == {"mismatch" if lost else "verified"}
    assert report.verdict == ("mismatch" if lost else "verified")


def test_generates_own_method_is_as_before_after_the_probes():
    model = small("gpt2")
    name = "prepare_inputs_for_generation"
    own = type(model).prepare_inputs_for_generation
    outer, inner = ap.probe(model), ap.probe(model)
    outer.__enter__()
    assert inspect.signature(getattr(model, name)) == inspect.signature(own.__get__(model))
    inner.__enter__()
    outer.__exit__(None, None, None)  # not in the order in which they were opened
    assert name in vars(model)
    inner.__exit__(None, None, None)
    assert name not in vars(model)
    given = model.prepare_inputs_for_generation = own.__get__(model)  # as peft sets it
    with pytest.raises(ZeroDivisionError), ap.probe(model):
        raise ZeroDivisionError
    assert vars(model)[name] is given


def test_a_cache_that_counts_no_tokens_does_not_end_a_generation():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=99, hidden_size=24, num_hidden_layers=2, state_size=4)
    model = MambaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    with ap.probe(model) as calls:
        made = model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=2)
    assert made.shape == (2, 10)
    assert calls == []


def test_a_wrong_mask_in_one_step_is_found_and_the_step_named(monkeypatch):
    model = small("mistral")
    kernels = AttentionInterface._global_mapping
    right, count = kernels["sdpa"], []

    def forgets_padding(module, query, key, value, mask, **rest):
        count.append(mask)
        return right(module, query, key, value, None if len(count) == 5 else mask, **rest)

    model.generation_config.eos_token_id = None
    monkeypatch.setitem(kernels, "sdpa", forgets_padding)
    with ap.probe(model) as calls:
        model.generate(IDS, attention_mask=MORE, max_new_tokens=4, do_sample=False, pad_token_id=2)
    assert count[4] is not None
    rows = ap.verify(calls).rows
    wrong = {(row.check, row.layer, row.reason) for row in rows if row.verdict == "mismatch"}
    assert wrong == {("output", 0, "in step 2")}


def test_a_generation_that_transformers_would_compile_is_refused():
    config = CompileConfig(fullgraph=False, backend="eager")
    config._compile_all_devices = True  # as it does on a GPU
    model = small("llama")
    options = {"cache_implementation": "static", "compile_config": config, "max_new_tokens": 3}
    with pytest.raises(ap.ModelError, match="disable_compile=True"), ap.probe(model):
        model.generate(IDS, attention_mask=LEFT, pad_token_id=2, **options)
    assert PreTrainedModel.get_compiled_call.__name__ == "get_compiled_call"
    calls = generated(model, disable_compile=True, **options)
    assert [call.step for call in calls] == [0, 0, 1, 1, 2, 2]
    with ap.probe(small("llama")):  # another model may be compiled
        model.get_compiled_call(config)


def test_a_pipeline_under_a_probe():
    lm = ap.load("bundled")
    pipe = pipeline("text-generation", model=lm.model, tokenizer=lm.tokenizer)
    options = {"max_new_tokens": 3, "do_sample": False}
    without = pipe("Once upon a time", **options)
    with ap.probe(pipe.model) as calls:
        within = pipe("Once upon a time", **options)
    assert without == within
    assert ap.verify(calls).passed
    with pytest.raises(ap.InputError, match="got TextGenerationPipeline"):
        ap.capture(pipe, "Once upon a time")


# What a tokenizer returns


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tensors", [None, "pt"])
def test_a_padded_batch_from_a_tokenizer_is_read_without_its_padding(side, tensors):
    lm = ap.load("bundled")
    texts = ["Once upon a time", "The end"]
    lm.tokenizer.pad_token = lm.tokenizer.eos_token
    given = lm.tokenizer(texts, padding=True, padding_side=side, return_tensors=tensors)
    cap, plain = ap.capture(lm, given), ap.capture(lm, texts)
    assert torch.equal(cap.input_ids, plain.input_ids)
    assert torch.equal(cap.padding, plain.padding)
    assert torch.equal(cap.output, plain.output)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": [1, 1]}, r"with input_ids; got \['attention_mask'\]"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "hides tokens within a text"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "text 0 has no tokens"),
        ({"input_ids": [1, 2], "token_type_ids": [0, 1]}, "and no token_type_ids"),
        ({"input_ids": [1, 2], "inputs_embeds": [0.5]}, "and no inputs_embeds"),
        ([{"role": "user", "content": "Hello"}], r"tokenizer\.apply_chat_template\(chat\)"),
    ],
)
def test_what_a_tokenizer_did_not_return_is_refused(gpt2, given, message):
    with pytest.raises(ap.InputError, match=message):
        ap.capture(gpt2(), BatchEncoding(given) if isinstance(given, dict) else given)


def test_types_that_are_all_zero_are_what_a_model_takes_anyway():
    config = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1}
    model = BertModel(BertConfig(**config, intermediate_size=9, vocab_size=99)).eval()
    cap = ap.capture(model, {"input_ids": [[5, 6, 7]], "token_type_ids": [[0, 0, 0]]})
    assert cap.input_ids.tolist() == [[5, 6, 7]]


# Wrappers

TARGETS = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "o_proj"]}


def lora(kind):
    model = get_peft_model(
        small(kind), LoraConfig(r=3, target_modules=TARGETS[kind], task_type="CAUSAL_LM")
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.3)
    return model


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("state", ["unmerged", "merged", "unloaded"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_lora_model(kind, state, side):
    model = lora(kind)
    if state == "merged":
        model.merge_adapter()
    if state == "unloaded":
        model = model.merge_and_unload()
    cap = ap.capture(model, TEXTS, padding_side=side)
    report = ap.verify(cap)
    assert report.passed, report
    assert "mismatch" not in verdicts(report, "projection") | verdicts(report, "merge")
    assert verdicts(report, "mask") == verdicts(report, "logits") == {"verified"}
    if kind == "gpt2" and state != "unloaded":
        assert (
            "is a peft.tuners.lora.layer.Linear: what it computes"
            in reasons(report, "projection").pop()
        )
    for number, ids in enumerate(TEXTS):  # positions count from the text's first token
        alone = ap.capture(model, ids)
        torch.testing.assert_close(
            cap.output[number, cap.positions(number)], alone.output[0], rtol=1e-4, atol=1e-4
        )


def test_a_lora_model_writes():
    model = lora("llama")
    with ap.probe(model) as calls:
        model.generate(input_ids=IDS, attention_mask=LEFT, max_new_tokens=3, pad_token_id=2)
    assert ap.verify(calls).passed
    assert calls[0].name == "base_model.model.model.layers.0.self_attn"


def test_keys_that_are_no_tokens_are_never_shown_as_tokens():
    model = get_peft_model(
        small("llama"), PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    ).eval()
    cap = ap.capture(model, TEXTS[0])
    assert ap.verify(cap).passed
    with pytest.raises(ap.InputError, match="attends to 10 keys, not to the tokens alone"):
        ap.weights(cap, 1)


# Weights elsewhere

LAYERS = {
    "gpt2": "transformer.wte transformer.wpe transformer.drop transformer.h.0 transformer.h.1 "
    "transformer.ln_f lm_head",
    "llama": "model.embed_tokens model.rotary_emb model.layers.0 model.layers.1 model.norm lm_head",
}


@pytest.mark.parametrize("how", ["cpu", "disk", "one layer"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights_that_accelerate_offloads(kind, how, tmp_path):
    plain = ap.capture(small(kind), TEXTS)
    model = small(kind)
    if how == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    elif how == "disk":
        disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        places = {name: "disk" if name.endswith(".1") else "cpu" for name in LAYERS[kind].split()}
        model = dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path))
    assert any(weight.is_meta for weight in model.parameters())
    cap = ap.capture(model, TEXTS)
    assert torch.equal(cap.output, plain.output)
    report = ap.verify(cap)
    assert report.passed, report
    last = [r for r in report.rows if r.layer == 1 and r.check in ("projection", "merge")]
    assert {row.verdict for row in last} == {"not_checked"}
    assert "offloaded between forwards" in last[0].reason
    assert ap.table(cap, 1, 2).equals(ap.table(plain, 1, 2))
    with pytest.raises(ap.InputError, match="offloaded"):
        ap.attended(cap, 2, layer=1, weigh="value")


def test_a_model_on_meta_is_refused():
    with pytest.raises(ap.ModelError, match="weights on the device 'meta', which holds no numbers"):
        ap.capture(small("llama").to("meta"), TEXTS)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_weights_in_eight_bits(kind):
    packed = torch.ao.quantization.quantize_dynamic(small(kind), {torch.nn.Linear})
    assert any("quantized" in type(one).__module__ for one in packed.modules())
    report = ap.verify(ap.capture(packed, TEXTS))
    assert report.passed, report
    assert verdicts(report, "output") == verdicts(report, "mask") == {"verified"}


# Compiled code


def whole(model):
    return torch.compile(model, backend="eager")


def in_place(model):
    model.compile(backend="eager")
    return model


def forward(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def one_layer(model):
    model.model.layers[1].compile(backend="eager")
    return model


def one_attention(model):
    attention = model.model.layers[1].self_attn
    attention.forward = torch.compile(attention.forward, backend="eager")
    return model


@pytest.mark.parametrize("compiled", [whole, in_place, forward, one_layer, one_attention])
def test_compiled_code_is_refused_before_anything_runs(compiled):
    plain = small("llama")
    runs = []
    plain.model.embed_tokens.register_forward_hook(lambda *_: runs.append(1))
    model = compiled(plain)
    seam = AttentionInterface.get_interface
    for watch in (lambda: ap.capture(model, TEXTS), lambda: ap.probe(model).__enter__()):
        with pytest.raises(ap.ModelError, match=r"is compiled by torch\.compile.*_orig_mod"):
            watch()
    assert not runs
    assert AttentionInterface.get_interface is seam
    if compiled is whole:
        assert ap.verify(ap.capture(model._orig_mod, TEXTS)).passed


def test_what_the_compiler_is_told_to_leave_alone_is_not_compiled():
    model = small("llama")
    model.forward = torch.compiler.disable(model.forward)
    assert ap.verify(ap.capture(model, TEXTS)).passed


# Kernels and dtypes


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_flex_attentions_mask_is_read(kind, side):
    cap = ap.capture(small(kind, "flex_attention"), TEXTS, padding_side=side)
    report = ap.verify(cap)
    assert report.passed, report
    assert verdicts(report, "mask") == {"verified"}
    assert cap.calls[0].mask is cap.calls[1].mask  # made once a forward
    plain = ap.capture(small(kind), TEXTS, padding_side=side)
    assert torch.equal(cap.calls[0].mask, plain.calls[0].mask)


def test_a_wrong_block_mask_is_found(monkeypatch):
    kernels = AttentionInterface._global_mapping
    right = kernels["flex_attention"]

    def no_padding(module, query, key, value, mask, **rest):
        return right(module, query, key, value, None, **rest)

    monkeypatch.setitem(kernels, "flex_attention", no_padding)
    cap = ap.capture(small("llama", "flex_attention"), TEXTS)
    assert verdicts(ap.verify(cap), "output") >= {"mismatch"}


def test_a_mask_of_an_unknown_kind_is_said_to_be_unknown(monkeypatch):
    kernels = AttentionInterface._global_mapping
    right = kernels["sdpa"]

    def unwraps(module, query, key, value, mask, **rest):
        return right(module, query, key, value, mask["mask"], **rest)

    model = small("llama")
    monkeypatch.setitem(kernels, "sdpa", unwraps)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kw: (args, kw | {"attention_mask": {"mask": kw["attention_mask"]}}),
            with_kwargs=True,
        )
    report = ap.verify(ap.capture(model, TEXTS))
    assert report.verdict != "verified"
    assert "mask of type dict" in " ".join(reasons(report, "output"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_half_precision_step_by_step(kernel, dtype):
    calls = generated(small("mistral", kernel, dtype), num_beams=2)
    assert {call.dtype for call in calls} == {dtype}
    assert ap.verify(calls).passed


# Training


def still(model):
    """In train mode, without dropout."""
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_training_step(kind, reentrant):
    model = still(small(kind))
    if reentrant is not None:
        options = {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

    def gradients():
        model.zero_grad()
        model(IDS, attention_mask=LEFT, labels=IDS, use_cache=False).loss.backward()
        return [weight.grad.clone() for weight in model.parameters()]

    without = gradients()
    with ap.probe(model) as calls:
        within = gradients()
    assert all(torch.equal(a, b) for a, b in zip(without, within, strict=True))
    # What the backward pass runs again is no other call.
    assert [(call.step, call.layer) for call in calls] == [(0, 0), (0, 1)]
    assert not calls.unseen
    assert ap.verify(calls).passed


def test_a_layer_that_is_run_by_itself_has_no_facts_about_its_mask():
    model = small("llama")
    hidden = torch.randn(2, 7, 60)
    rotary = model.model.rotary_emb(hidden, torch.arange(7)[None])
    with torch.no_grad(), ap.probe(model) as calls:
        model.model.layers[1](hidden, position_embeddings=rotary)
    assert calls[0].expected_mask is None
    report = ap.verify(calls)
    assert report.passed, report
    assert verdicts(report, "mask") == {"not_checked"}


# A probe's calls


def test_the_calls_of_a_probe_are_verified(gpt2):
    with torch.no_grad(), ap.probe(gpt2()) as calls:
        gpt2_again = gpt2()
    assert calls == []
    model = gpt2_again
    with torch.no_grad(), ap.probe(model) as calls:
        model(IDS)
        model(IDS[:1])
    report = ap.verify(calls)
    assert report.passed
    assert (report.texts, report.tokens, report.steps) == (2, 2 * 7 + 7, 2)
    assert "3 layers over 2 forwards (36 heads in all)" in report.summary
    assert report.summary.endswith("not checked: weights, logits")
    assert verdicts(report, "logits") == {"not_checked"}
    assert "a probe's calls hold no logits" in reasons(report, "logits").pop()
    assert ap.verify(calls[3:], checks=["output"]).passed
    whole = ap.verify(ap.capture(model, IDS), checks=["output", "mask"]).to_frame()
    assert ap.verify(calls[:3], checks=["output", "mask"]).to_frame().equals(whole)


def test_attention_that_a_probe_did_not_see_does_not_pass(gpt2):
    model = gpt2()
    attention = model.transformer.h[1].attn
    attention.forward = lambda hidden, *args, **kwargs: (hidden, None)
    with torch.no_grad(), ap.probe(model) as calls:
        model(IDS)
    report = ap.verify(calls)
    assert report.verdict == "not_checked"
    assert "transformer.h.1.attn computed its attention unseen" in report.summary
    for some in (calls[:1], calls[1:], calls[::-1]):  # what was not seen is of every part of them
        report = ap.verify(some, checks=["output"])
        assert report.verdict == "not_checked"
        assert "transformer.h.1.attn computed its attention unseen" in report.summary


@pytest.mark.parametrize("plain", [list, tuple, lambda calls: [c for c in calls if c.layer == 2]])
def test_a_plain_list_of_calls_is_refused(gpt2, plain):
    model = gpt2()
    with torch.no_grad(), ap.probe(model) as calls:
        model(IDS)
    with pytest.raises(ap.InputError, match=r"no longer says what attention was not seen: give"):
        ap.verify(plain(calls))


def test_padding_is_not_counted_among_the_tokens():
    calls = generated(small("llama"))
    assert ap.verify(calls, checks=["output"]).tokens == 4 + 7 + 3 * 2
    assert ap.verify(calls[-2:], checks=["output"]).tokens == 2
    assert "2 texts, 17 tokens" in repr(ap.verify(calls, checks=["output"]))


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ([], "got no calls"),
        ([1, 2], "got a list of other things"),
        ("calls", "got the text 'calls'"),
    ],
)
def test_what_is_neither_capture_nor_calls_is_refused(given, got):
    with pytest.raises(ap.InputError, match=rf"the calls of a probe, or a model; {got}"):
        ap.verify(given)

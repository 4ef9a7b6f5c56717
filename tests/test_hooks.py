import threading

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.modeling_utils import AttentionInterface

import attnprobe as ap
from attnprobe.hooks import replaced

IDS = torch.tensor([[5, 17, 23, 5, 99, 42, 8], [3, 3, 60, 11, 72, 1, 90]])


FEW = IDS.clamp(max=90)  # ids that a vocabulary of 99 holds


def hooks_of(model):
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks_always_called)
        for m in model.modules()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_logits_are_bit_equal_with_and_without_a_probe(gpt2, kernel, dtype):
    model = gpt2(kernel, dtype)
    with torch.no_grad():
        without = model(IDS).logits
        with ap.probe(model) as calls:
            within = model(IDS).logits
        after = model(IDS).logits
    assert torch.equal(without, within)
    assert torch.equal(without, after)
    assert [call.layer for call in calls] == [0, 1, 2]
    assert {call.kernel for call in calls} == {kernel}
    assert {call.dtype for call in calls} == {dtype}


def test_what_a_call_holds(gpt2):
    model = gpt2("eager")
    with ap.probe(model) as calls:
        model(IDS)
    call = calls[1]
    assert (call.name, call.kind, call.step) == ("transformer.h.1.attn", "self", 0)
    assert call.query.shape == call.key.shape == call.value.shape == (2, 6, 7, 10)
    assert call.head_output_model.shape == (2, 7, 6, 10)
    assert call.weights_model.shape == (2, 6, 7, 7)
    assert call.hidden_states.shape == call.attention_output.shape == (2, 7, 60)
    assert call.scaling == call.expected_scaling == 10**-0.5
    assert not call.query.requires_grad
    joined = torch.cat([call.query, call.key, call.value], 1).transpose(1, 2).flatten(2)
    torch.testing.assert_close(joined, model.transformer.h[1].attn.c_attn(call.hidden_states))


def test_gradients_pass_through_a_probe(gpt2):
    model = gpt2()
    with ap.probe(model):
        model(IDS, labels=IDS).loss.backward()
    within = model.transformer.wte.weight.grad.clone()
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    assert torch.equal(within, model.transformer.wte.weight.grad)


def test_generate_is_unchanged_and_counted_by_step(gpt2):
    model = gpt2()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    without = model.generate(IDS, attention_mask=mask, **options)
    with ap.probe(model) as calls:
        within = model.generate(IDS, attention_mask=mask, **options)
    assert torch.equal(without, within)
    assert [(call.step, call.layer) for call in calls] == [
        (s, n) for s in range(4) for n in (0, 1, 2)
    ]
    assert [call.key.shape[2] for call in calls[::3]] == [7, 8, 9, 10]
    assert [call.expected_mask.offset for call in calls[::3]] == [0, 7, 8, 9]


def test_a_static_caches_buffers_are_not_written_into_afterwards(gpt2):
    model = gpt2()
    cache = StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad(), ap.probe(model) as calls:
        model(IDS[:, :4], cache=cache, use_cache=True)
        model(IDS[:, 4:], cache=cache, use_cache=True)
    assert calls[0].key[:, :, 4:].abs().sum() == 0
    assert calls[3].key[:, :, 4:7].abs().sum() > 0
    assert calls[3].expected_mask.offset == 4


def test_nothing_is_left_behind(gpt2):
    model = gpt2()
    seam, before = AttentionInterface.get_interface, hooks_of(model)
    with ap.probe(model):
        assert AttentionInterface.get_interface is not seam
        assert hooks_of(model) > before
    assert AttentionInterface.get_interface is seam
    assert hooks_of(model) == before


def test_nothing_is_left_behind_when_an_exception_leaves_the_block(gpt2):
    model = gpt2()
    seam, before = AttentionInterface.get_interface, hooks_of(model)
    with pytest.raises(KeyboardInterrupt), ap.probe(model):
        raise KeyboardInterrupt
    assert AttentionInterface.get_interface is seam
    assert hooks_of(model) == before


def test_a_probe_goes_on_after_an_exception_in_a_forward(gpt2):
    model = gpt2()

    def fail(*_):
        raise RuntimeError("in the middle")

    with ap.probe(model) as calls:
        handle = model.transformer.h[1].mlp.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            model(IDS)
        handle.remove()
        assert [call.layer for call in calls] == [0, 1]
        model(IDS)
    assert [(call.step, call.layer) for call in calls[2:]] == [(1, 0), (1, 1), (1, 2)]
    assert all(call.hidden_states is not None for call in calls)
    assert hooks_of(model) == 0


def test_nested_probes_each_see_all(gpt2):
    model = gpt2()
    with ap.probe(model) as outer:
        model(IDS)
        with ap.probe(model) as inner:
            model(IDS)
        model(IDS)
    assert (len(outer), len(inner)) == (9, 3)
    assert [call.step for call in outer] == [0] * 3 + [1] * 3 + [2] * 3
    assert torch.equal(outer[4].query, inner[1].query)


def test_a_probe_on_one_model_does_not_see_another(gpt2):
    one, other = gpt2(seed=1), gpt2(seed=2)
    with ap.probe(one) as ones, ap.probe(other) as others:
        one(IDS)
        other(IDS)
        one(IDS)
    assert (len(ones), len(others)) == (6, 3)
    assert not torch.equal(ones[0].query, others[0].query)


def test_two_models_in_two_threads(gpt2):
    models = [gpt2(seed=1), gpt2(seed=2)]
    alone = [ap.capture(model, IDS).calls[2].query for model in models]
    found = [None, None]

    def run(at):
        for _ in range(20):
            found[at] = ap.capture(models[at], IDS).calls[2].query

    threads = [threading.Thread(target=run, args=(at,)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(want, got) for want, got in zip(alone, found, strict=True))


def test_a_probe_sees_what_stands_in_for_the_kernel(gpt2):
    model = gpt2()
    with ap.probe(model) as calls, replaced(model, _twice_the_values):
        model(IDS)
    assert torch.equal(calls[0].head_output_model, calls[0].value.transpose(1, 2) * 2)
    with replaced(model, _twice_the_values), ap.probe(model) as calls:
        model(IDS)
    assert torch.equal(calls[0].head_output_model, calls[0].value.transpose(1, 2) * 2)


def test_a_users_own_kernel_of_any_signature(gpt2):
    def own(*args, **kwargs):
        return AttentionInterface._global_mapping["sdpa"](*args, **kwargs)

    AttentionInterface.register("users_own", own)
    try:
        model = gpt2()
        model.config._attn_implementation = "users_own"
        assert ap.verify(ap.capture(model, IDS[0]), checks=["output"]).passed
    finally:
        del AttentionInterface._global_mapping["users_own"]


def test_a_part_of_a_model_can_be_run_under_the_probe(gpt2):
    model = gpt2()
    with ap.probe(model) as calls:
        model.transformer(IDS)
        model.transformer(IDS)
    assert [(call.step, call.layer) for call in calls] == [(s, n) for s in (0, 1) for n in range(3)]


def test_key_heads_and_windows_of_other_families():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=60,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_hidden_layers=2,
        intermediate_size=70,
        vocab_size=101,
        initializer_range=0.3,
    )
    cap = ap.capture(LlamaForCausalLM(config).eval(), IDS)
    assert cap.calls[0].key.shape == (2, 3, 7, 10)
    assert ap.verify(cap, checks=["mask", "output", "logits"]).passed


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_number_but_rounding(gpt2, side):
    model = gpt2()
    texts = [[5, 17, 23, 9, 31, 2, 77], [40, 8, 61]]
    batch = ap.capture(model, texts, padding_side=side)
    assert batch.padding.sum(-1).tolist() == [7, 3]
    for number, ids in enumerate(texts):
        alone = ap.capture(model, ids)
        at = batch.positions(number)
        torch.testing.assert_close(batch.output[number, at], alone.output[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            ap.weights(batch, 2, text=number), ap.weights(alone, 2), rtol=1e-4, atol=1e-5
        )


def test_a_capture_holds_nothing_quadratic(gpt2):
    tokens = 61
    cap = ap.capture(gpt2(), torch.arange(tokens))
    held = [x for call in cap.calls for x in vars(call).values() if isinstance(x, torch.Tensor)]
    held += [cap.output, cap.input_ids, cap.padding, *cap.inputs.values()]
    assert len(held) > 18
    assert all(x.shape[-2:] != (tokens, tokens) for x in held)
    assert ap.weights(cap, 0, 0).shape == (tokens, tokens)


def test_gpt2s_own_scaling_options(gpt2):
    model = gpt2(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True)
    cap = ap.capture(model, IDS)
    assert [call.expected_scaling for call in cap.calls] == [1, 1 / 2, 1 / 3]
    assert ap.verify(cap).passed


def test_what_is_known_of_a_forward_is_of_that_forward(gpt2):
    model = gpt2()
    padding = torch.ones_like(IDS)
    padding[0, :2] = 0
    with ap.probe(model) as calls:
        model(IDS)
        model.config.scale_attn_by_inverse_layer_idx = True
        model(IDS, attention_mask=padding)
        model(IDS[:, :3])
    before, after = calls[2], calls[5]
    assert after.expected_scaling == before.expected_scaling / 3
    assert before.expected_mask.padding is None
    assert after.expected_mask.padding.equal(padding.bool())
    assert calls[8].expected_mask.padding is None
    assert [one.position_ids.shape[1] for one in (before, calls[8])] == [IDS.shape[1], 3]


def test_train_mode_with_dropout_is_refused(gpt2):
    model = gpt2().train()
    with pytest.raises(ap.InputError, match=r"train mode with dropout 0\.1.*model\.eval\(\)"):
        ap.capture(model, IDS)
    still = gpt2(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).train()
    assert ap.verify(ap.capture(still, IDS)).passed


def test_dropout_seen_by_a_probe_is_not_compared(gpt2):
    model = gpt2(attn_pdrop=0.3).train()
    with torch.no_grad(), ap.probe(model) as calls:
        model(IDS)
    assert {call.dropout for call in calls} == {0.3}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(gpt2, bad):
    model = gpt2()
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[3, 5] = bad
        model.transformer.h[2].attn.c_attn.weight[3, 5] = bad
    with pytest.raises(
        ap.NonFiniteError, match=r"layer 1.*transformer\.h\.1\.attn\.c_attn\.weight: 1 of"
    ):
        ap.capture(model, IDS)


def test_overflow_of_finite_weights_is_told_apart(gpt2):
    model = gpt2(dtype=torch.float16)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.weight *= 3e4
    with pytest.raises(ap.NonFiniteError, match=r"every weight is finite.*overflows in float16"):
        ap.capture(model, IDS)


def test_nan_after_the_last_attention_is_seen_too(gpt2):
    model = gpt2()
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = float("nan")
    with pytest.raises(ap.NonFiniteError, match=r"output.*transformer\.ln_f\.bias"):
        ap.capture(model, IDS)


def test_a_model_without_softmax_attention_is_refused():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=101, state_size=3)
    with pytest.raises(ap.ModelError, match="MambaForCausalLM computed no softmax attention"):
        ap.capture(MambaForCausalLM(config).eval(), IDS)


def test_gpt2_that_goes_around_the_seam_is_refused(gpt2):
    model = gpt2("eager", reorder_and_upcast_attn=True)
    with pytest.raises(ap.ModelError, match="no softmax attention that attnprobe can see"):
        ap.capture(model, IDS)


def test_a_plain_module_around_a_model_can_be_probed(gpt2):
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, ids):
            return self.inner(ids, attention_mask=torch.ones_like(ids))

    with ap.probe(Wrapper(gpt2())) as calls:
        calls_before = len(calls)
    wrapper = Wrapper(gpt2())
    with ap.probe(wrapper) as calls:
        wrapper(IDS)
    assert calls_before == 0
    assert [call.name for call in calls] == [f"inner.transformer.h.{n}.attn" for n in range(3)]


@pytest.mark.parametrize("kind", ["qwen2", "mistral"])
def test_generate_with_a_static_cache_and_whole_masks(kind):
    from test_families import small

    model = small(kind)
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    without = model.generate(FEW, attention_mask=torch.ones_like(FEW), **options)
    with ap.probe(model) as calls:
        within = model.generate(FEW, attention_mask=torch.ones_like(FEW), **options)
    assert torch.equal(without, within)
    assert len(calls) == 3 * 2


def test_documents_packed_into_one_text_follow_a_rule_of_their_own():
    from test_families import small

    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    model = small("llama")
    with torch.no_grad(), ap.probe(model) as calls:
        model(FEW[:1], position_ids=positions, use_cache=False)
    assert calls[0].expected_mask is None


def _twice_the_values(call, run):
    return call.value.transpose(1, 2) * 2, None

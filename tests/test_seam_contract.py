"""What hooks.py and seam/ take for granted of transformers and torch, one by one.

Where a new release of either changes one of these, the test that names it fails, and says what is
to be looked at; without it, what is wrong would show as attention that nobody saw.
"""

import inspect
from collections import OrderedDict

import pytest
import torch
from samples import IDS, mistral
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    Cache,
    DynamicCache,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
    modeling_utils,
)
from transformers import __version__ as version
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.mistral.modeling_mistral import MistralAttention

from attnprobe.hooks import SEAM
from attnprobe.seam.inspecting import asks_for_kernel, forward_of

TOKENS = torch.tensor([IDS])


def said(what):
    return f"transformers {version}: {what}. See attnprobe/hooks.py and attnprobe/seam/"


def parameters(function):
    return list(inspect.signature(function).parameters)


@pytest.fixture
def asked(monkeypatch):
    """What models ask the registry for, and what they call the kernel with."""
    seen = []
    own = modeling_utils.AttentionInterface.get_interface

    def get_interface(self, implementation, default):
        kernel = own(self, implementation, default)

        def watched(*args, **kwargs):
            output = kernel(*args, **kwargs)
            seen.append((implementation, default, args, kwargs, output))
            return output

        return watched

    monkeypatch.setattr(modeling_utils.AttentionInterface, "get_interface", get_interface)
    return seen


def test_the_registry_has_its_method():
    method = getattr(modeling_utils.AttentionInterface, "get_interface", None)
    assert method is not None, said("AttentionInterface.get_interface is gone: kernels go unseen")
    assert parameters(method)[1:] == ["attn_implementation", "default"], said(
        "AttentionInterface.get_interface takes other arguments"
    )


def test_the_registry_is_one_object_of_that_class():
    registry = modeling_utils.ALL_ATTENTION_FUNCTIONS
    assert type(registry) is modeling_utils.AttentionInterface, said(
        "ALL_ATTENTION_FUNCTIONS is of another class than the one that is watched"
    )
    assert {"sdpa", "flash_attention_2", "flex_attention"} <= set(registry.valid_keys()), said(
        "the registry's valid_keys no longer lists the kernels"
    )


@pytest.mark.parametrize("attention", [GPT2Attention, MistralAttention])
def test_a_forward_names_the_registry(attention):
    assert asks_for_kernel(forward_of(attention)), said(
        f"{attention.__name__}.forward no longer names ALL_ATTENTION_FUNCTIONS, which is how "
        "attention modules are told from others"
    )


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_kernel_is_called_as_it_is_recorded(asked, kernel):
    model = mistral()
    model.set_attn_implementation(kernel)
    with torch.no_grad():
        model(TOKENS)
    assert len(asked) == 2, said("a forward does not ask once a layer for its kernel")
    implementation, default, args, kwargs, output = asked[0]
    assert implementation == kernel, said("a model asks for another kernel than its config names")
    assert callable(default), said("a model gives no kernel of its own to fall back on")
    given = dict(zip(SEAM, args, strict=False)) | kwargs
    assert isinstance(given["module"], MistralAttention), said(
        "a kernel's first argument is not the attention module"
    )
    shapes = [tuple(given[name].shape) for name in ("query", "key", "value")]
    assert shapes == [(1, 6, 11, 10), (1, 3, 11, 10), (1, 3, 11, 10)], said(
        "query, key and value are no longer (B, H, T, D), with the key heads unrepeated"
    )
    assert "attention_mask" in given, said("a kernel is given no attention_mask")
    assert given["scaling"] == 10**-0.5, said("a kernel's factor is no longer called scaling")
    assert isinstance(output, tuple), said("a kernel returns something else than a pair")
    assert tuple(output[0].shape) == (1, 11, 6, 10), said("a kernel's output is not (B, T, H, D)")
    assert (output[1] is None) == (kernel == "sdpa"), said("eager returns no weights, or sdpa does")
    if kernel == "eager":
        assert tuple(output[1].shape) == (1, 6, 11, 11), said(
            "eager's weights are not (B, H, T, S)"
        )


def test_a_kernels_first_arguments_have_these_names():
    for name in ("sdpa", "flex_attention"):
        names = parameters(modeling_utils.ALL_ATTENTION_FUNCTIONS[name])[: len(SEAM)]
        assert names == list(SEAM), said(f"the kernel {name} takes {names}, not {list(SEAM)}")


def test_masks_mean_what_they_are_taken_for(asked):
    """None: causal by the module's word; a bool: True where a query sees a key."""
    model = mistral(window=None)
    with torch.no_grad():
        model(TOKENS)
        padded = torch.ones_like(TOKENS)
        padded[:, :2] = 0
        model(TOKENS, attention_mask=padded)
    plain, masked = asked[0][3], asked[2][3]
    first = dict(zip(SEAM, asked[0][2], strict=False)) | plain
    assert first["attention_mask"] is None, said("without padding sdpa is given a mask")
    assert first["module"].is_causal is True, said("an attention module no longer says is_causal")
    mask = (dict(zip(SEAM, asked[2][2], strict=False)) | masked)["attention_mask"]
    assert mask.dtype == torch.bool, said("sdpa's masks are no longer bool")
    assert mask[0, 0, 5].tolist() == [False] * 2 + [True] * 4 + [False] * 5, said(
        "in a bool mask, True no longer means that a query sees a key"
    )


def test_a_bidirectional_module_says_so():
    config = BertConfig(hidden_size=12, num_attention_heads=3, num_hidden_layers=1, vocab_size=101)
    said_by = [
        module.is_causal
        for module in BertModel(config).modules()
        if asks_for_kernel(forward_of(type(module))) and hasattr(module, "is_causal")
    ]
    assert said_by == [False], said("BERT's attention no longer says that it is not causal")


def test_generate_prepares_each_forward_by_this_method():
    assert hasattr(GenerationMixin, "prepare_inputs_for_generation"), said(
        "generate no longer has prepare_inputs_for_generation, which tells masks it was given"
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=12, vocab_size=101)).eval()
    own, steps = model.prepare_inputs_for_generation, []

    def prepare(*args, **kwargs):
        steps.append((kwargs, own(*args, **kwargs)))
        return steps[-1][1]

    model.prepare_inputs_for_generation = prepare
    mask = torch.ones_like(TOKENS)
    mask[:, :2] = 0
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    model.generate(TOKENS, attention_mask=mask, cache_implementation="static", **options)
    assert len(steps) == 2, said("generate does not call prepare_inputs_for_generation each step")
    assert all(given["attention_mask"].dim() == 2 for given, _ in steps), said(
        "generate gives prepare_inputs_for_generation no mask of a row a text"
    )
    cache = next(one for one in steps[0][1].values() if isinstance(one, Cache))
    assert cache.is_compileable, said("a static cache no longer says is_compileable")
    assert cache.get_max_length() >= TOKENS.shape[1] + 1, said(
        "a static cache's get_max_length is not what it holds"
    )


def test_generate_compiles_by_this_method():
    assert parameters(PreTrainedModel.get_compiled_call) == ["self", "compile_config"], said(
        "PreTrainedModel.get_compiled_call takes other arguments: compiled models go unrefused"
    )


def test_a_cache_counts_what_it_was_given():
    model = mistral()
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=20)):
        assert isinstance(cache, Cache), said("caches have no common class Cache")
        with torch.no_grad():
            model(TOKENS, cache=cache, use_cache=True)
        assert int(cache.get_seq_length()) == len(IDS), said(
            f"{type(cache).__name__}.get_seq_length is not the number of tokens it was given"
        )
        assert len(list(cache.is_linear)) == 2, said("Cache.is_linear is not one a layer")
    assert issubclass(QuantizedCache, Cache), said("QuantizedCache is no Cache")


def test_attention_gets_its_cache_and_hidden_states_by_name():
    model, given = mistral(), {}
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: given.update(kwargs, args=args), with_kwargs=True
    )
    with torch.no_grad():
        model(TOKENS, use_cache=True)
    assert isinstance(given.get("hidden_states"), torch.Tensor), said(
        "an attention module is no longer given hidden_states by name"
    )
    assert any(isinstance(one, Cache) for one in given.values()), said(
        "an attention module is no longer given its cache"
    )


# torch


def test_torch_calls_hooks_as_they_are_relied_on():
    message = f"torch {torch.__version__}: {{}}. See attnprobe/seam/interrupts.py".format
    layer = nn.Linear(2, 2)
    assert isinstance(layer._forward_hooks, OrderedDict), message(
        "forward hooks are kept elsewhere"
    )
    called = []
    layer.register_forward_pre_hook(lambda *given: called.append(len(given)), with_kwargs=True)
    layer.register_forward_hook(lambda *given: called.append(given[2]), always_call=True)
    layer(torch.ones(1, 2))
    assert called[0] == 3, message("a pre-hook with kwargs no longer gets module, args, kwargs")
    layer.forward = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        layer(torch.ones(1, 2))
    assert called[3] is None, message(
        "a hook that is always called no longer gets None after errors"
    )


def test_torchs_module_call_is_seen_on_the_stack():
    from attnprobe.seam.interrupts import modules_around

    outer = nn.Sequential(nn.Linear(2, 2))
    seen = []
    outer[0].register_forward_pre_hook(lambda *_: seen.append(modules_around()))
    outer(torch.ones(1, 2))
    assert seen == [{outer}], (
        f"torch {torch.__version__}: nn.Module._call_impl no longer runs each module, or names it "
        "otherwise. See attnprobe/seam/interrupts.py"
    )


def test_torch_tells_a_backward_pass():
    assert torch._C._current_graph_task_id() == -1, (
        f"torch {torch.__version__}: _current_graph_task_id is not -1 outside of a backward pass. "
        "See attnprobe/seam/interception.py"
    )

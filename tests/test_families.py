"""Model types whose facts are known are verified in full, and mutants of their own are found.

`test_architectures` has the other types.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.modeling_utils import AttentionInterface

import attnprobe as ap

TEXTS = [[(7 * n) % 90 + 5 for n in range(19)], [(11 * n) % 90 + 5 for n in range(8)]]
KINDS = [
    *("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "phi", "gpt_neox"),
    *("bert", "distilbert", "albert", "roberta"),
]
ENCODERS = {"bert", "distilbert", "albert", "roberta"}
GROUPED = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "phi"}


def small(kind, kernel="sdpa", dtype=torch.float32):
    """A random model of a type: sizes all different, scores large."""
    torch.manual_seed(0)
    # The experts' grouped products want rows of 16 bytes.
    hidden, inner = (48, 72) if kind == "mixtral" else (60, 70)
    config = AutoConfig.for_model(
        kind,
        vocab_size=99,
        hidden_size=hidden,
        num_attention_heads=6,
        num_hidden_layers=2,
        intermediate_size=inner,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **({"num_key_value_heads": 3} if kind in GROUPED else {}),
        **({"sliding_window": 5} if kind in ("mistral", "mixtral") else {}),
        **({"head_dim": 10} if kind == "qwen3" else {}),
        **({"partial_rotary_factor": 0.4} if kind == "phi" else {}),
        **({"embedding_size": 14} if kind == "albert" else {}),
        **({"dim": 60, "n_heads": 6, "hidden_dim": 70} if kind == "distilbert" else {}),
    )
    config._attn_implementation = kernel
    auto = AutoModelForMaskedLM if kind in ENCODERS else AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=kernel).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.25)
    return model.to(dtype)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_known_type_is_verified(kind, kernel):
    for side in ("left", "right"):
        report = ap.verify(ap.capture(small(kind, kernel), TEXTS, padding_side=side))
        assert report.passed, report
        frame = report.to_frame()
        assert frame[frame.check == "mask"].verdict.eq("verified").all()
        assert len(frame[frame.check == "output"]) == 2 * 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_known_type_is_verified_in_half_precision(kind, dtype):
    report = ap.verify(ap.capture(small(kind, dtype=dtype), TEXTS), ["mask", "output"])
    assert report.passed, report


def tiled(kernel):
    """Key and value heads tiled, 0 1 2 0 1 2, where each must be repeated, 0 0 1 1 2 2."""

    def run(module, query, key, value, mask, **rest):
        order = torch.arange(query.shape[1]) % key.shape[1]
        module.num_key_value_groups, before = 1, module.num_key_value_groups
        output = kernel(module, query, key[:, order], value[:, order], mask, **rest)
        module.num_key_value_groups = before
        return output

    return run


def wider_window(kernel):
    """A window of one key more."""

    def run(module, query, key, value, mask, **rest):
        tokens = query.shape[2]
        allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        allowed &= allowed.new_ones(tokens, tokens).triu(-5)
        return kernel(module, query, key, value, allowed[None, None], **rest)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "mutant"), [("llama", tiled), ("mistral", wider_window)])
def test_mutants_that_gpt2_does_not_have(monkeypatch, kind, mutant, dtype):
    model = small(kind, dtype=dtype)
    kernels = AttentionInterface._global_mapping
    monkeypatch.setitem(kernels, "sdpa", mutant(kernels["sdpa"]))
    report = ap.verify(ap.capture(model, TEXTS[0]), ["output"])
    print(kind, mutant.__name__, dtype, report.worst.ratio)
    assert report.verdict == "mismatch"

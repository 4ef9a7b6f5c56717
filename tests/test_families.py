"""Model types whose facts are known are verified in full.

`test_architectures` has the other types, `test_mutants` what is found when they are wrong.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

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
    report = ap.verify(ap.capture(small(kind, dtype=dtype), TEXTS), checks=["mask", "output"])
    assert report.passed, report

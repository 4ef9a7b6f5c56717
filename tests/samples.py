"""What tests share: token ids, a small model with grouped key heads, hostile texts."""

import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

IDS = [5, 17, 23, 8, 4, 42, 99, 3, 77, 61, 12]

# Text that runs something, or shows as something else, where a page takes it for more than text.
HOSTILE = [
    "</script><script>window.ran = 1</script>",
    "<img src=x onerror=window.ran=1>",
    "<svg/onload=window.ran=1>",
    '"onmouseover="window.ran=1',
    "'-alert(1)-'",
    "&lt;b&gt;",
    "${window.ran=1}",
    "\\u003cb\\",
    "PYTHON_PARAMS",
    "a\u2028b",
    "x\u202egpj.exe",
    "\uffff",
]


def mistral(window=4):
    """A random Mistral with sharp attention: 2 layers, 6 heads of 10 on 3 key heads, 101 ids."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=101,
        hidden_size=60,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        intermediate_size=70,
        sliding_window=window,
        initializer_range=0.5,
    )
    return MistralForCausalLM(config).eval()


def gpt_oss(dtype=torch.float32):
    """A random gpt-oss, which has sinks: 2 layers, 6 heads of 10 on 3 key heads, eager."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=101,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        intermediate_size=48,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=4,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    model = GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_(std=3.0)
    return model.to(dtype)

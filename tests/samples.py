"""What tests share: token ids, a small model with grouped key heads, hostile texts."""

import torch
from transformers import MistralConfig, MistralForCausalLM

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

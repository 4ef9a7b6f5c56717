from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from browser import chromium
from playwright.sync_api import Browser
from transformers import GPT2Config, GPT2LMHeadModel

transformers.logging.set_verbosity_error()


@pytest.fixture
def gpt2() -> Callable[..., GPT2LMHeadModel]:
    """Makes small GPT-2s with sharp attention: 3 layers, 6 heads of 10, 64 positions, 101 ids."""

    def make(
        kernel: str = "sdpa", dtype: torch.dtype = torch.float32, seed: int = 0, **config: object
    ) -> GPT2LMHeadModel:
        torch.manual_seed(seed)
        settings = {
            "n_layer": 3,
            "n_head": 6,
            "n_embd": 60,
            "n_positions": 64,
            "vocab_size": 101,
            "initializer_range": 0.3,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        model = GPT2LMHeadModel(GPT2Config(**settings | {"attn_implementation": kernel} | config))
        return model.eval().to(dtype)

    return make


@pytest.fixture(scope="module")  # not longer: it holds an event loop that others may want to start
def browser() -> Iterator[Browser]:
    """One headless Chromium for a module's tests of pages."""
    with chromium() as started:
        yield started

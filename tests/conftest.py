from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from browser import Tab, chromium, opened
from playwright.sync_api import Browser
from samples import IDS, mistral
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
)

import attnprobe as ap

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


@pytest.fixture
def bidirectional():
    """A small BERT: 2 layers, 6 heads of 10."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=101,
        hidden_size=60,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=70,
        initializer_range=0.5,
    )
    return ap.capture(BertModel(config).eval(), IDS)


@pytest.fixture
def grouped():
    """A small Mistral: 2 layers, 6 heads of 10 on 3 key heads, a window of 4."""
    return ap.capture(mistral(), IDS)


@pytest.fixture
def show(browser, tmp_path):
    """Opens pages; in the end no page must have failed, or asked for anything."""
    tabs = []
    contexts = []

    def open_(page: ap.View | str) -> Tab:
        file = tmp_path / f"{len(tabs)}.html"
        if isinstance(page, str):
            file.write_text(page, encoding="utf-8")
        else:
            page.save(file)
        contexts.append(opened(browser, file))
        tabs.append(contexts[-1].__enter__())
        return tabs[-1]

    yield open_
    for context in contexts:
        context.__exit__(None, None, None)
    assert [tab.errors + tab.requests for tab in tabs] == [[]] * len(tabs)

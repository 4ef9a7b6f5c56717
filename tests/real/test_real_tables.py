"""Tables of real models and tokenizers, in many scripts, against plain numpy."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from real_models import gpt2_tokenizer, minilm_path, smollm2_path
from transformers import GPT2Config, GPT2LMHeadModel

import attnprobe as ap

SENTENCES = {
    "English": ("The children don't play in the U.S. park.", {"children", "don't", "U.S."}),
    "Chinese": ("孩子们在公园里玩。", {"公", "园"}),
    "Japanese": ("子供たちは公園で遊ぶ。", {"公", "園"}),
    "Russian": ("Дети играют в зелёном парке.", {"Дети", "играют", "зелёном"}),
    "emoji": ("We love 🙂 and 👨‍👩‍👧 here", {"🙂", "👨‍👩‍👧"}),
    "code": ("for i in range(10):\n\tprint(i)", {"range", "10", "print"}),
}


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=3, n_embd=15, n_positions=256, initializer_range=0.5)
    small = GPT2LMHeadModel(config).eval()
    return {
        "GPT-2's tokenizer": ap.LanguageModel(small, gpt2_tokenizer(), "small"),
        "SmolLM2": ap.load(smollm2_path()),
        "MiniLM": ap.load(minilm_path()),
        "bundled": ap.load("bundled"),
    }


def by_numpy(cap, layer, head):
    """Weights by word from the model's own query and key: the formula, then Clark et al.'s rule."""
    call = cap.calls[layer]
    key_head = head // (call.query.shape[1] // call.key.shape[1])
    query, key = call.query[0, head].double().numpy(), call.key[0, key_head].double().numpy()
    scores = query @ key.T / np.sqrt(query.shape[1])
    if cap.causal:
        scores[np.triu_indices(len(scores), 1)] = -np.inf
    e = np.exp(scores - scores.max(-1, keepdims=True))
    weights = e / e.sum(-1, keepdims=True)
    words = [list(word.tokens) for word in cap.words_of(0).words]
    return np.array([[weights[np.ix_(q, k)].sum(1).mean() for k in words] for q in words])


@pytest.mark.parametrize("script", SENTENCES)
@pytest.mark.parametrize("name", ["GPT-2's tokenizer", "SmolLM2", "MiniLM", "bundled"])
def test_tables_by_word_in_every_script(models, name, script):
    text, wanted = SENTENCES[script]
    cap = ap.capture(models[name], text)
    frame = ap.table(cap, 1, 2, by="word", future=True)
    count = len(cap.words_of(0).words)
    found = np.zeros((count, count))
    found[frame.query_pos, frame.key_pos] = frame.weight
    np.testing.assert_allclose(found, by_numpy(cap, 1, 2), rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-12)
    assert frame.weight[frame.masked].eq(0).all()
    labels = set(frame["query"])
    print(name, script, list(dict.fromkeys(frame["query"])))
    assert not any("�" in label or "Ġ" in label or "##" in label for label in labels)
    if name != "MiniLM" or script in ("English", "Russian"):  # its vocabulary knows few others
        assert wanted <= labels


def test_a_word_in_smollm2_step_by_step(models):
    cap = ap.capture(models["SmolLM2"], SENTENCES["English"][0])
    walk = ap.walkthrough(cap, "play", 11, 7)
    totals = dict(zip(walk.totals["name"], walk.totals["value"], strict=True))
    error = totals["largest |o - the model's own head output|"]
    assert 0 < error <= totals["bound on that difference"]
    assert walk.sizes["source"][1] == (
        "X·Wᵀ; head 7: model.layers.11.self_attn.q_proj.weight[448:512]; then turned by the "
        "token's position (rotary)"
    )


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_any_text_makes_a_table(text):
    cap = ap.capture(bundled(), text)
    words = cap.words_of(0)
    assert sorted(token for word in words.words for token in word.tokens) == list(
        range(cap.input_ids.shape[1])
    )
    weights = ap.weights(cap, 2, by="word")
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]).double())
    assert weights.triu(1).abs().sum() == 0
    assert len(ap.table(cap, 2, 3, by="word")) == len(words.words) * (len(words.words) + 1) // 2


@functools.cache
def bundled():
    return ap.load("bundled")

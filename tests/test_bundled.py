"""The bundled model: small, offline, and with the heads that its card promises.

Everything is measured here with transformers alone, so that a fault in attnprobe cannot hide one
in the model.
"""

import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parent.parent / "attnprobe" / "bundled"
SENTENCE = "The children were playing in the green park"
TEXT = (
    "The old gentleman sat by the fire and looked at the children for a long time. Then he got up "
    "and went to the window. It was raining hard, and the garden was full of water. “I do not "
    "think,” he said at last, “that you will be able to go home to-night. But there is a good bed "
    "in the little room, and you shall have some supper.” The girl looked at her brother. She was "
    "tired and hungry, and she wanted her mother; but she knew that he would not like to see her "
    "cry, so she said that they were very much obliged to him, and that they would be glad to stay."
)
# A bigram model counted on the training text, as the card's, gets 4.51 nats per token on TEXT.
LOSS_BOUND = 4.1


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="eager").eval()


@torch.inference_mode()
def attentions(model, ids: Tensor) -> Tensor:
    return torch.stack(model(ids, output_attentions=True).attentions)  # (L, B, H, T, T)


def test_folder_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 12_000_000


def test_loads_without_a_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("the bundled model reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.model_max_length == model.config.n_positions


def test_weights_are_float32_and_nothing_is_dropped(model):
    config = model.config
    assert model.dtype == torch.float32
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.0


def test_most_words_of_the_sentence_are_one_token(tokenizer):
    words = SENTENCE.split()
    tokens = [token.lstrip("Ġ") for token in tokenizer.tokenize(SENTENCE)]
    assert sum(word in tokens for word in words) >= len(words) - 1


@pytest.mark.parametrize("text", [SENTENCE, "naïve café — “日本” 🙂\n\tand  more"])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    encoded = tokenizer(text, return_offsets_mapping=True)
    assert tokenizer.decode(encoded["input_ids"]) == text
    assert encoded["offset_mapping"][-1][1] == len(text)


def test_text_is_less_surprising_than_to_a_bigram_model(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss.item()
    assert loss < LOSS_BOUND


def test_a_head_looks_at_the_previous_token(model, tokenizer):
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    before = attentions(model, ids).diagonal(offset=-1, dim1=-2, dim2=-1)  # (L, 1, H, T-1)
    assert before.mean(dim=(1, 3)).max() > 0.5


@pytest.mark.parametrize("length", [16, 50, 100])
@pytest.mark.parametrize("seed", [11, 12])
def test_a_head_looks_after_the_earlier_copy(model, tokenizer, length, seed):
    generator = torch.Generator().manual_seed(seed)
    block = torch.randint(1, len(tokenizer), (8, length), generator=generator)
    weights = attentions(model, torch.cat([block, block], dim=1))
    # Query length + i repeats token i; the token after the earlier copy is i + 1.
    after = weights.diagonal(offset=1 - length, dim1=-2, dim2=-1)[..., 1:]  # (L, B, H, length)
    assert after.mean(dim=(1, 3)).max() > 0.3

import pytest
import torch

import attnprobe as ap


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([], "expected a text"),
        (None, "expected a text"),
        ([[]], "text 0 has no tokens"),
        (torch.zeros(1, 0, dtype=torch.long), "text 0 has no tokens"),
        ("word", "takes token ids"),
        (b"word", "got bytes"),
        ([True, False], "whole numbers"),
        ([1.5, 2.0], "whole numbers"),
        ([[1, 2], "word"], "whole numbers"),
        ([1, 101], "ids from 1 to 101; the model's vocabulary has ids 0 to 100"),
        ([-1, 4], "ids from -1 to 4"),
        (list(range(65)), "text 0 has 65 tokens; the model takes at most 64"),
        ([[1], list(range(70))], "text 1 has 70 tokens"),
    ],
)
def test_bad_input_says_what_is_wrong(gpt2, text, message):
    with pytest.raises(ap.InputError, match=message):
        ap.capture(gpt2(), text)


def test_bad_padding_side(gpt2):
    with pytest.raises(ap.InputError, match="'left' or 'right', not 'middle'"):
        ap.capture(gpt2(), [1, 2], padding_side="middle")


def test_an_empty_text_is_refused():
    with pytest.raises(ap.InputError, match="text 1 is empty"):
        ap.capture(ap.load("bundled"), ["some", ""])


def test_an_encoder_decoder_is_refused_by_name():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=12, d_kv=5, d_ff=7, num_layers=1, num_heads=3, vocab_size=101)
    with pytest.raises(ap.InputError, match="T5ForConditionalGeneration is an encoder-decoder"):
        ap.capture(T5ForConditionalGeneration(config).eval(), [1, 2])


def test_a_lone_surrogate_is_refused():
    with pytest.raises(ap.InputError, match=r"lone surrogate, U\+DCE9, at character 3"):
        ap.capture(ap.load("bundled"), "caf\udce9")


@pytest.mark.parametrize("ids", [[3, 4, 5], [[3, 4, 5]], torch.tensor([3, 4, 5])])
def test_ids_in_any_form(gpt2, ids):
    cap = ap.capture(gpt2(), ids)
    assert cap.input_ids.tolist() == [[3, 4, 5]]
    assert cap.words_of(0).tokens == ("3", "4", "5")
    assert (len(cap), cap.texts, cap.layers) == (1, (None,), 3)


def test_left_padding_counts_positions_from_the_first_token(gpt2):
    cap = ap.capture(gpt2(), [[3, 4, 5], [6]], padding_side="left")
    assert cap.inputs["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]
    assert cap.inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert cap.positions(1).tolist() == [2]
    with pytest.raises(ap.InputError, match="text 2 is out of range"):
        cap.positions(2)


def roberta(**config):
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": 101,
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_hidden_layers": 2,
        "intermediate_size": 9,
        "max_position_embeddings": 30,
        "initializer_range": 0.5,
    }
    return RobertaForMaskedLM(RobertaConfig(**settings | config)).eval()


def test_positions_that_count_on_from_the_paddings_own():
    model = roberta()
    texts = [[5, 17, 23, 9, 31, 8, 77], [40, 8, 61]]
    left, right = (ap.capture(model, texts, padding_side=side) for side in ("left", "right"))
    for text in (0, 1):
        torch.testing.assert_close(
            left.output[text, left.positions(text)], right.output[text, right.positions(text)]
        )
    assert ap.verify(left).passed
    assert ap.capture(model, list(range(5, 33))).input_ids.shape == (1, 28)
    with pytest.raises(ap.InputError, match="29 tokens; the model takes at most 28"):
        ap.capture(model, list(range(5, 34)))


def test_models_that_read_no_text_or_give_nothing_for_each_token():
    from transformers import BertConfig, BertForSequenceClassification

    with pytest.raises(ap.ModelError, match="Linear takes no token ids"):
        ap.capture(torch.nn.Linear(2, 3), [1, 2])
    config = BertConfig(
        hidden_size=24,
        num_attention_heads=3,
        num_hidden_layers=1,
        intermediate_size=9,
        vocab_size=99,
    )
    with pytest.raises(ap.ModelError, match="gives neither logits nor a hidden state for each"):
        ap.capture(BertForSequenceClassification(config).eval(), [1, 2])

"""Token ids → what a person reads → words, on tokenizers of every kind."""

import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import real_models
import sentencepiece
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoTokenizer,
    BertGenerationTokenizer,
    ByT5Tokenizer,
    PreTrainedTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

import attnprobe
from attnprobe.errors import InputError
from attnprobe.words import read, visible

CORPUS = ["The children were playing in the green park, naïve 公園 で мир don't stop"] * 5
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


# Tokenizers


def wrapped(tokenizer, **special):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL, **special)


def bookended():
    return processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )


def llama():
    """BPE with byte fallback that puts a `▁` before the text, as Llama 2's."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{at:02X}>": at + 3 for at in range(256)}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "▁"), ("h", "e"), ("▁", "м")]
    for piece in [*"▁abcdefghijklmnopqrstuvwxyzTH,.'мир", *(a + b for a, b in merges)]:
        vocabulary.setdefault(piece, len(vocabulary))
    bpe = models.BPE(
        vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = bookended()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return wrapped(tokenizer)


def unigram():
    """Unigram with Metaspace and NFKC, as XLM-R's and T5's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=80,
            special_tokens=["<unk>", "<s>", "</s>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    tokenizer.post_processor = bookended()
    return wrapped(tokenizer)


def unigram_bytes():
    """Unigram with byte fallback, as Japanese models have it: coarse offsets."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{at:02X}>", -10.0) for at in range(256)]
    pieces += [("▁", -2.0), ("▁the", -1.0), ("a", -3.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return wrapped(tokenizer)


def roberta():
    """Byte-level BPE whose offsets are trimmed and whose `<mask>` takes the space before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<unk>", "<s>", "</s>", "<mask>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 1), trim_offsets=True, add_prefix_space=True
    )
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    return wrapped(tokenizer, mask_token="<mask>")


def smollm2():
    path = Path(real_models.smollm2_path())
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


class SlowGpt2(PreTrainedTokenizer):
    """GPT-2's tokens in a tokenizer written in Python: no offsets."""

    def __init__(self):
        self.fast = real_models.gpt2_tokenizer()
        self.byte_decoder = {sign: byte for byte, sign in bytes_to_unicode().items()}
        super().__init__(unk_token="<|endoftext|>")

    @property
    def vocab_size(self):
        return self.fast.vocab_size

    def get_vocab(self):
        return self.fast.get_vocab()

    def _tokenize(self, text, **kwargs):
        return self.fast.tokenize(text)

    def _convert_token_to_id(self, token):
        return self.fast.convert_tokens_to_ids(token)

    def _convert_id_to_token(self, index):
        return self.fast.convert_ids_to_tokens(index)

    def convert_tokens_to_string(self, tokens):
        signs = "".join(tokens)
        return bytes(self.byte_decoder[sign] for sign in signs).decode(errors="replace")


def slow_sentencepiece():
    folder = Path(tempfile.mkdtemp())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "slow"),
        vocab_size=330,
        byte_fallback=True,
        character_coverage=0.98,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return BertGenerationTokenizer(str(folder / "slow.model"))


def slow_bert():
    return BertTokenizerLegacy(str(Path(real_models.minilm_path()) / "vocab.txt"))


MAKE = {
    "bundled": lambda: AutoTokenizer.from_pretrained(Path(attnprobe.__file__).parent / "bundled"),
    "gpt2": real_models.gpt2_tokenizer,
    "smollm2": smollm2,
    "minilm": lambda: AutoTokenizer.from_pretrained(real_models.minilm_path()),
    "llama": llama,
    "unigram": unigram,
    "unigram_bytes": unigram_bytes,
    "roberta": roberta,
    "slow_gpt2": SlowGpt2,
    "slow_bert": slow_bert,
    "slow_sentencepiece": slow_sentencepiece,
    "byt5": ByT5Tokenizer,
}
SLOW = ["slow_gpt2", "slow_bert", "slow_sentencepiece", "byt5"]
FAST = [name for name in MAKE if name not in SLOW]
# Those that keep every character of a text, so that ids alone give it back.
BYTE_LEVEL = ["bundled", "gpt2", "smollm2", "slow_gpt2"]


@cache
def tokenizer_of(name):
    return MAKE[name]()


def read_text(name, text, **options):
    tokenizer = tokenizer_of(name)
    return read(tokenizer, tokenizer(text, verbose=False, **options)["input_ids"], text)


def labels(words):
    return [word.label for word in words.words]


def rebuilt(words):
    written = (word for word in words.words if word.span[0] < word.span[1])
    return "".join(word.space + word.text for word in written) + words.tail


def check(words, tokens):
    """What holds for any text and any ids."""
    assert [at for word in words.words for at in word.tokens] == list(range(tokens))
    assert all(at in words.words[words.word_of[at]].tokens for at in range(tokens))
    assert len(words.tokens) == len(words.shared) == len(words.word_of) == tokens
    assert rebuilt(words) == words.text
    for word in words.words:
        assert word.tokens
        assert word.label
        assert words.text[slice(*word.span)] == (word.text if word.span[0] < word.span[1] else "")
        if word.kind == "word":
            assert word.text == word.text.strip()
        elif word.kind == "space":
            assert not word.text.strip()
    assert all(words.tokens)
    assert not any(one.isspace() for one in words.tokens)


# Tokens as read


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    "text",
    [
        "The children were playing in the green park, and don't stop.",
        " 公園で naïve 🙂 мир  ok\n",
        "Ġ ▁ ## � Ċ ▁▁x ##ing",
        "𠀀👩‍👩‍👧👍🏽🇫🇷 e\u0301\u0323 ﷺ ㎏ ﬁ",
        "שָׁלוֹם عَرَبِيّ สวัสดี 한국어 हिन्दी",
        "if x:\r\n\t\treturn  (y)\n\n\n",
        "\x00 \x1c \u200b \u2028 \ufeff \u3000x",
        "<|endoftext|>a[CLS]b<s></s> [UNK]<unk><mask>",
        " ",
        "\n",
        "",
    ],
)
def test_every_token_has_one_word_and_the_words_rebuild_the_text(name, text):
    words = read_text(name, text)
    check(words, len(words.tokens))
    if name in FAST:
        assert words.text == text
    for mark in "Ġ▁Ċ�":
        assert mark in text or not any(mark in token for token in words.tokens)
    if "##" not in text:
        assert not any(token.startswith("##") for token in words.tokens)


@pytest.mark.parametrize(
    ("name", "text", "tokens"),
    [
        ("gpt2", "公園 naïve 🙂 мир", "公* 公* 園* 園* naïve 🙂 м* м* и р"),
        ("bundled", "公 ï", "公* 公* 公* ␣ ï* ï*"),
        ("smollm2", " 公\tx", "公* 公* 公* ⇥ x"),
        ("minilm", "Naïve É playing 🙂", "[CLS] Naïve É playing [UNK] [SEP]"),
        ("minilm", "embeddings", "[CLS] em bed ding s [SEP]"),
        ("llama", "the 公", "<s> the ␣ 公* 公* 公* </s>"),
        ("unigram", "the ㎏", "<s> ␣ t h e ␣ ㎏* ㎏* </s>"),
        ("unigram_bytes", "the 公é", "the ␣ 公* 公* 公* é* é*"),
        ("roberta", "a  b", "<s> ␣ a ␣ ␣ b </s>"),
        ("slow_sentencepiece", "the 公🙂", "␣ t h e ␣ 公 🙂* 🙂* 🙂* 🙂*"),
        ("llama", "\n", "<s> ␣ ⏎ </s>"),
        ("slow_bert", "Élan embeddings", "[CLS] Él an em bed ding s [SEP]"),
        ("byt5", "ï", "ï* ï* </s>"),
        ("gpt2", "\n\r\x00\u200d\u0301", "⏎ ␍ ␀ <U+200D>* <U+200D>* ◌\u0301* ◌\u0301*"),
    ],
)
def test_tokens_show_the_texts_characters(name, text, tokens):
    words = read_text(name, text)
    starred = (token + "*" * part for token, part in zip(words.tokens, words.shared, strict=True))
    assert " ".join(starred) == tokens


def test_marks_of_tokenizers_written_in_the_text_stay():
    assert read_text("gpt2", "Ġ").tokens == ("Ġ", "Ġ")
    assert read_text("gpt2", "##").tokens == ("##",)
    assert read_text("llama", "a▁b").tokens == ("<s>", "␣", "a", "▁", "b", "</s>")
    assert read_text("minilm", "Ġ").tokens == ("[CLS]", "Ġ", "[SEP]")
    assert set(read_text("bundled", "�").tokens) == {"�"}


# Words


def parted(words):
    """Words with `|` between them; white space and special tokens in brackets."""
    kinds = {"word": "{}", "space": "({})", "special": "[{}]"}
    return "|".join(kinds[word.kind].format(word.label) for word in words.words)


@pytest.mark.parametrize("name", ["gpt2", "smollm2", "bundled"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The children were playing", "The|children|were|playing"),
        ("stop stop, stop", "stop|stop|,|stop"),
        ("don't l'homme O’Neil", "don't|l'homme|O’Neil"),
        ("the U.S. army, e.g. J.R.R. Tolkien", "the|U.S.|army|,|e.g.|J.R.R.|Tolkien"),
        ("It ends. So", "It|ends|.|So"),
        ("3.14 1,000 50% $5", "3.14|1,000|50|%|$|5"),
        ("a well-known foo_bar", "a|well|-|known|foo_bar"),
        ("see https://a.org/b?c=d#e. Or", "see|https://a.org/b?c=d#e|.|Or"),
        ("(www.a.org/b) me.too@a-b.org!", "(|www.a.org/b|)|me.too@a-b.org|!"),
        ("公園で見た", "公|園|で|見|た"),
        ("カタカナ", "カタカナ"),
        ("สวัส", "ส|วั|ส"),
        ("한국어 мир", "한국어|мир"),
        ("שלום عربي", "שלום|عربي"),
        ("e\u0301a \u0915\u094d\u0937", "e\u0301a|\u0915\u094d\u0937"),
        ("👩‍👩‍👧👍🏽❤️🇫🇷🇩🇪", "👩‍👩‍👧|👍🏽|❤️|🇫🇷|🇩🇪"),
        ("a  b", "a|(␣)|b"),
        ("a\n\tb", "a|(⏎⇥)|b"),
        ("hi<|endoftext|>there", "hi|[<|endoftext|>]|there"),
        ("", ""),
    ],
)
def test_words(name, text, expected):
    assert parted(read_text(name, text)) == expected


def test_words_that_share_a_token_are_one():
    assert parted(read_text("gpt2", "Wow!!! a://b ...")) == "Wow|!!!|a://b|..."
    assert parted(read_text("minilm", "Wow!!!")) == "[[CLS]]|Wow|!|!|!|[[SEP]]"


def test_space_before_a_word_is_part_of_it_and_other_space_is_not():
    words = read_text("gpt2", " a   b \n")
    assert [(word.space, word.text, word.kind, word.tokens) for word in words.words] == [
        (" ", "a", "word", (0,)),
        ("", "  ", "space", (1, 2)),
        (" ", "b", "word", (3,)),
        ("", " \n", "space", (4, 5)),
    ]
    alone = read_text("bundled", "a 公")  # this vocabulary has no token of a space and 公's byte
    assert [(word.space, word.text, len(word.tokens)) for word in alone.words] == [
        ("", "a", 1),
        (" ", "公", 4),
    ]
    dropped = read_text("minilm", " a \n b \n")
    assert [word.space for word in dropped.words] == ["", " ", " \n ", ""]
    assert dropped.tail == " \n"


def test_special_tokens_stand_alone():
    words = read_text("minilm", "a[MASK]b")
    assert [(word.text, word.kind, word.span) for word in words.words] == [
        ("[CLS]", "special", (0, 0)),
        ("a", "word", (0, 1)),
        ("[MASK]", "special", (1, 7)),
        ("b", "word", (7, 8)),
        ("[SEP]", "special", (8, 8)),
    ]
    assert parted(read_text("roberta", "a <mask>")) == "[<s>]|a|[<mask>]|[</s>]"
    chat = "<|im_start|>user\nHi<|im_end|>\n"
    words = read_text("smollm2", chat)
    assert parted(words) == "[<|im_start|>]|user|(⏎)|Hi|[<|im_end|>]|(⏎)"


def test_an_unknown_token_is_a_word_of_the_text_but_shows_as_unknown():
    words = read_text("minilm", "a 🙂 b")
    assert words.tokens == ("[CLS]", "a", "[UNK]", "b", "[SEP]")
    assert labels(words) == ["[CLS]", "a", "🙂", "b", "[SEP]"]
    assert words.words[2].kind == "word"


# Ids without a text, or with another


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_ids_alone_read_as_with_their_text(name):
    for text in ["The children 公園 naïve 🙂 Ġ ▁ � \n ok", " a<|endoftext|>b", "e\u0301"]:
        words = read_text(name, text)
        ids = tokenizer_of(name)(text)["input_ids"]
        assert read(tokenizer_of(name), ids) == words


@pytest.mark.parametrize("name", ["minilm", "slow_bert"])
def test_ids_of_wordpiece_alone(name):
    ids = tokenizer_of(name)("embeddings go")["input_ids"]
    words = read(tokenizer_of(name), ids)
    assert words.text == "[CLS] embeddings go [SEP]"
    assert parted(words) == "[[CLS]]|embeddings|go|[[SEP]]"
    middle = read(tokenizer_of(name), ids[2:-1])  # begins within a word
    assert middle.tokens == ("bed", "ding", "s", "go")


@pytest.mark.parametrize("name", ["llama", "slow_sentencepiece"])
def test_ids_of_sentencepiece_alone(name):
    tokenizer = tokenizer_of(name)
    ids = tokenizer("the 公園 the", add_special_tokens=False)["input_ids"]
    assert read(tokenizer, ids).text == "the 公園 the"
    assert labels(read(tokenizer, ids)) == ["the", "公", "園", "the"]


@pytest.mark.parametrize("name", FAST)
def test_text_is_found_also_for_ids_with_special_tokens_of_ones_own(name):
    tokenizer = tokenizer_of(name)
    text = "The park,\nthe green"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    own = tokenizer.all_special_ids[0]
    words = read(tokenizer, [own, *ids, own, own], text)
    assert words.text == text or name == "unigram"  # whose [UNK] may be anything
    check(words, len(ids) + 3)
    assert [word.kind for word in words.words][-2:] == ["special"] * 2


def test_a_slow_tokenizers_words_are_the_texts():
    text = " The Élan of  embeddings\n"
    words = read_text("slow_bert", text)
    assert words.text == text
    assert labels(words) == ["[CLS]", "The", "Élan", "of", "embeddings", "[SEP]"]
    words = read_text("slow_sentencepiece", "the  ㎏ park")
    assert words.text == "the  ㎏ park"
    assert labels(words) == ["the", "␣", "㎏", "park"]


def test_a_text_that_the_ids_do_not_spell_gives_way_to_what_they_decode_to():
    tokenizer = tokenizer_of("gpt2")
    assert read(tokenizer, tokenizer("the park")["input_ids"], "the lake").text == "the park"


def test_ids_that_are_no_characters():
    words = read(tokenizer_of("gpt2"), [50300, 105, 50256, 17739])
    assert words.tokens == ("<id 50300>", "<0xAC>", "<|endoftext|>", "<0xE5><0x85>")
    assert words.shared == (False, True, False, True)
    assert [word.kind for word in words.words] == ["special", "word", "special", "word"]
    assert read(tokenizer_of("slow_gpt2"), [50300, 64]).tokens == ("<id 50300>", "a")


def test_a_bare_model_has_a_word_for_each_id():
    words = read(None, [5, 17, 5])
    assert labels(words) == list(words.tokens) == ["5", "17", "5"]
    check(words, 3)


@pytest.mark.parametrize(
    ("tokenizer", "ids", "text", "message"),
    [
        ("gpt2", [-1], None, "got -1"),
        ("gpt2", [2**40], None, "32 bits"),
        ("gpt2", [64], "a\ud83d", r"U\+D83D, at character 1"),
        ("slow_bert", [64], "\udc80", "lone surrogate"),
        (None, [64], "a", "without a tokenizer"),
    ],
)
def test_refusals(tokenizer, ids, text, message):
    with pytest.raises(InputError, match=message):
        read(tokenizer and tokenizer_of(tokenizer), ids, text)


# Any text, any ids

TEXTS = st.text(
    st.characters(exclude_categories=["Cs"])
    | st.sampled_from(" \n▁Ġ#\u0301\u200d\ufe0f🙂🇫公aé.@:/'"),
    max_size=60,
)


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_any_text(name, text):
    words = read_text(name, text)
    check(words, len(words.tokens))
    assert words.text == text
    for mark in "Ġ�":
        assert mark in text or not any(mark in token for token in words.tokens)


@pytest.mark.parametrize("name", BYTE_LEVEL)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_tokens_that_hold_parts_of_characters_are_those_that_decode_to_none(name, text):
    tokenizer = tokenizer_of(name)
    ids = tokenizer(text, verbose=False)["input_ids"]
    # SmolLM2's vocabulary lacks the bytes of a few characters that nobody writes, and drops them.
    assume(tokenizer.decode(ids) == text and "�" not in text)
    parts = tuple("�" in tokenizer.decode([one]) for one in ids)
    assert read(tokenizer, ids, text).shared == parts
    assert read(tokenizer, ids).shared == parts


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), text=st.none() | st.text("the park 公é\n", max_size=10))
def test_any_ids(name, data, text):
    tokenizer = tokenizer_of(name)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 5), max_size=20))
    check(read(tokenizer, ids, text), len(ids))


@pytest.mark.parametrize("name", ["gpt2", "minilm", "slow_gpt2"])
@pytest.mark.parametrize("piece", ["The quick fox, naïve 公園! ", "a", "!", "🇫🇷", "a.b/", "x@"])
def test_time_is_linear(name, piece):
    def took(characters):
        tokenizer = tokenizer_of(name)
        text = (piece * characters)[:characters]
        ids = tokenizer(text, verbose=False)["input_ids"]
        start = time.perf_counter()
        read(tokenizer, ids, text)
        return time.perf_counter() - start

    # Quadratic time would make it 64 times as long.
    assert min(took(8000) for _ in range(2)) < 24 * min(took(1000) for _ in range(3)) + 0.05


def test_marks_that_a_tokenizer_drops_stay_with_the_last_word_too():
    tokenizer = AutoTokenizer.from_pretrained(real_models.minilm_path())
    text = "un cafe\u0301"
    words = read(tokenizer, tokenizer(text)["input_ids"], text)
    assert [one.text for one in words.words if one.kind == "word"] == ["un", "cafe\u0301"]
    assert words.tail == ""


def test_c1_controls_are_made_visible():
    assert visible("Hi\x9b31m") == "Hi<U+009B>31m"

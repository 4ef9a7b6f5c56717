"""Anything that a caller may hand in: an answer, or an `AttnprobeError`, and nothing else.

FUZZ_CASES says how many cases there are in all: 2,000 in `make test`, always the same ones; 20,000
new ones in `make fuzz`.
"""

import functools
import hashlib
import json
import math
import os
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import attnprobe as ap
from attnprobe.formula import tiles
from attnprobe.masks import MaskRule
from attnprobe.outputs import attention
from attnprobe.saving import captures
from attnprobe.words import read

CASES = int(os.environ.get("FUZZ_CASES", "2000"))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
tried = Counter()


def fuzz(share):
    """A test's share of the cases; always the same ones where there are few."""
    return settings(
        max_examples=math.ceil(CASES * share),
        deadline=None,
        database=None,
        derandomize=CASES <= 2000,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate),  # a case takes long, to make it small for ever
        suppress_health_check=list(HealthCheck),
    )


# What is drawn


def mostly(usual, other=None):
    """What fits, three times of four."""
    return st.integers(0, 3).flatmap(lambda one: (other or JUNK) if one == 0 else usual)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-1, 3), max_size=3),
    st.lists(st.text(max_size=1), max_size=2),
    st.tuples(st.integers(-1, 9), st.integers(-1, 9)),
    st.sampled_from(
        [b"", object(), {}, {0}, range(2), np.int64(1), np.float32(1), torch.tensor(1)]
    ),
)
WHICH = mostly(st.one_of(st.none(), st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1)))
ONE = mostly(st.integers(0, 1))
BY = mostly(st.sampled_from(["token", "word"]))
WORD = mostly(st.integers(0, 4))
FLAG = mostly(st.booleans())

CALLS = {
    "weights": {"layer": ONE, "head": WHICH, "by": BY, "text": ONE},
    "scores": {"layer": ONE, "head": WHICH, "text": ONE},
    "table": {
        **{"layer": WHICH, "head": WHICH, "by": BY, "text": WHICH, "future": FLAG, "wide": FLAG},
        "max_bytes": mostly(st.just(10**8)),
    },
    "attended": {
        **{"word": WORD, "top": mostly(st.integers(1, 9)), "layer": WHICH, "head": WHICH},
        "how": mostly(st.sampled_from(["mean", "max", "rollout"])),
        "weigh": mostly(st.sampled_from(["weight", "value"])),
        **{"skip_first": FLAG, "nth": mostly(st.just(0)), "text": ONE},
    },
    "attended_by": {
        **{"word": WORD, "layer": WHICH, "head": WHICH, "text": ONE},
        "how": mostly(st.sampled_from(["mean", "max", "rollout"])),
    },
    "walkthrough": {
        "word": WORD,
        "layer": ONE,
        "head": ONE,
        "nth": mostly(st.just(0)),
        "text": ONE,
    },
    "head_stats": {"layer": WHICH, "head": WHICH, "text": WHICH},
    "attention_view": {
        **{"layer": WHICH, "head": WHICH, "by": BY, "text": ONE},
        "span": mostly(st.one_of(st.none(), st.tuples(st.integers(0, 2), st.integers(1, 5)))),
    },
    "head_view": {"layer": WHICH, "head": WHICH, "by": BY, "text": ONE},
    "model_view": {"layer": WHICH, "head": WHICH, "by": BY, "text": ONE},
    "neuron_view": {"layer": ONE, "head": ONE, "text": ONE},
    "walkthrough_view": {"word": WORD, "layer": WHICH, "head": WHICH, "text": ONE},
    "verify": {"checks": mostly(st.lists(st.sampled_from(["mask", "output", "merge"])))},
    "logit_contributions": {"word": mostly(st.integers(0, 90)), "after": WORD, "text": ONE},
}
WITHOUT_MODEL = [name for name in CALLS if name != "logit_contributions"]


def some_call(data, names=tuple(CALLS)):
    """One of the public calls, with some arguments."""
    name = data.draw(st.sampled_from(names))
    options = {key: data.draw(one) for key, one in CALLS[name].items()}
    kept = data.draw(st.sets(st.sampled_from(list(options))))
    options = {key: one for key, one in options.items() if key in kept}
    note(f"ap.{name}(cap, {options})")

    def call(cap):
        for required in {"layer", "head", "word"} & set(CALLS[name]) - set(options):
            options[required] = 0
        return getattr(ap, name)(cap, **options)

    return call


def answered(call, *given_):
    """What a call answers; None where it refuses."""
    tried["calls"] += 1
    try:
        return call(*given_)
    except ap.AttnprobeError as error:
        assert str(error)  # noqa: PT017  # a refusal without a word would be none
        return None


# Models


@functools.cache
def model(kind, kernel="sdpa", dtype=torch.float32, heads=2, groups=1, size=4, window=None):
    """A small random model of two layers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "attn_implementation": kernel, "initializer_range": 0.4}
    width = heads * size
    if kind == "gpt2":
        config = GPT2Config(
            n_layer=2,
            n_head=heads,
            n_embd=width,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
            **sizes,
        )
        made = GPT2LMHeadModel(config)
    elif kind == "bert":
        config = BertConfig(
            num_hidden_layers=2,
            num_attention_heads=heads,
            hidden_size=width,
            intermediate_size=9,
            max_position_embeddings=64,
            **sizes,
        )
        made = BertForMaskedLM(config)
    elif kind == "t5":
        config = T5Config(
            **{"vocab_size": 101, "d_model": 10, "d_kv": size, "d_ff": 9, "num_layers": 2},
            **{"num_heads": heads, "decoder_start_token_id": 0, "attn_implementation": kernel},
            initializer_factor=4.0,
        )
        made = T5ForConditionalGeneration(config)
    else:
        config = MistralConfig(
            **{"num_hidden_layers": 2, "num_attention_heads": heads * groups, "head_dim": size},
            **{"num_key_value_heads": heads, "hidden_size": width, "intermediate_size": 9},
            **{"sliding_window": window, "max_position_embeddings": 64},
            **sizes,
        )
        made = MistralForCausalLM(config)
    return made.eval().to(dtype)


MODELS = st.one_of(
    st.builds(
        model,
        st.sampled_from(["gpt2", "bert", "t5"]),
        st.sampled_from(["sdpa", "eager"]),
        st.sampled_from(DTYPES),
        st.integers(1, 3),
        st.just(1),
        st.sampled_from([2, 4, 6]),
    ),
    st.builds(
        model,
        st.just("mistral"),
        st.sampled_from(["sdpa", "eager"]),
        st.sampled_from(DTYPES),
        st.integers(1, 2),
        st.integers(1, 3),
        st.sampled_from([2, 4, 6]),
        st.sampled_from([None, 1, 2, 5, 40]),
    ),
)
IDS = st.lists(st.integers(0, 100), min_size=1, max_size=12)


@functools.cache
def lm():
    """A small random model with the bundled one's tokenizer."""
    tokenizer = ap.load("bundled").tokenizer
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=400, vocab_size=len(tokenizer))
    return GPT2LMHeadModel(config).eval(), tokenizer


# Texts

LETTERS = st.characters(codec=None)  # all of Unicode, lone surrogates among it
TEXTS = st.one_of(
    st.text(LETTERS, max_size=40),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=60),
    st.text(" \t\n\r\x0b\u00a0\u2003\u3000\u200b\ufeff", max_size=20),
    st.text("aé 公園\u0301\u200d👩🏽\u2764\ufe0f🇩🇪\u0e01\u0e33\u202e", max_size=40),
    st.text("a", max_size=300),
    st.sampled_from(
        ["", " ", "a", "\x00", "\ud800", "<|endoftext|>", "a<|endoftext|> b", "İ", "ﷺ"]
    ),
)


@fuzz(0.25)
@given(text=st.one_of(TEXTS, st.lists(TEXTS, max_size=3)), data=st.data())
def test_any_text(text, data):
    tried["texts"] += 1
    cap = answered(ap.capture, lm(), text)
    if cap is None:
        return
    for given_, words in zip([text] if isinstance(text, str) else text, cap.words, strict=True):
        assert words.text == given_
        written = (one for one in words.words if one.span[0] < one.span[1])
        assert "".join(one.space + one.text for one in written) + words.tail == given_
        assert all(words.labels("word"))
    answered(some_call(data), cap)
    weights = ap.weights(cap, 0, by="word")
    assert torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_a_hundred_thousand_characters_without_a_space():
    _, tokenizer = lm()
    for text in (
        "a" * 100_000,
        "公" * 100_000,
        "👩🏽\u200d" * 25_000,
    ):
        ids = tokenizer(text)["input_ids"]
        words = read(tokenizer, ids, text)
        assert words.text == text
        assert len(words.word_of) == len(ids)
        with pytest.raises(ap.InputError, match="the model takes at most 400"):
            ap.capture(lm(), text)


@fuzz(0.05)
@given(given_=st.one_of(JUNK, st.lists(JUNK, max_size=3), st.dictionaries(st.text(), JUNK)))
def test_what_is_no_text(given_):
    tried["no texts"] += 1
    answered(ap.capture, lm(), given_)
    answered(ap.capture, lm()[0], given_)
    answered(ap.verify, given_)


# Shapes, dtypes, kernels, windows


@fuzz(0.12)
@given(
    own=MODELS,
    ids=st.lists(IDS, min_size=1, max_size=3),
    side=st.sampled_from(["left", "right"]),
    data=st.data(),
)
def test_any_shape(own, ids, side, data):
    """A right model is never called wrong, whatever its sizes, dtype, kernel and padding."""
    tried["shapes"] += 1
    target = None
    if isinstance(own, T5ForConditionalGeneration):
        target = data.draw(st.lists(IDS, min_size=len(ids), max_size=len(ids)))
    cap = answered(lambda: ap.capture(own, ids, target=target, padding_side=side))
    if cap is None:
        return
    wrong = {row for row in ap.verify(cap).rows if row.verdict == "mismatch"}
    assert {row for row in wrong if row.check != "logits"} == set()  # whose bound is an estimate
    if target:
        cap = data.draw(st.sampled_from([cap, cap.encoder, cap.decoder, cap.cross]))
    answered(some_call(data), cap)


@fuzz(0.1)
@given(own=MODELS, ids=st.lists(IDS, min_size=1, max_size=3), data=st.data())
def test_any_mask(own, ids, data):
    """Padding anywhere, rows of nothing but padding, whole masks: of a forward of the caller's."""
    tried["masks"] += 1
    longest = max(map(len, ids))
    tokens = torch.tensor([(row * longest)[:longest] for row in ids])
    shape = tuple(tokens.shape)
    rows = data.draw(
        st.one_of(
            st.just([[1] * shape[1]] * shape[0]),
            st.just([[0] * shape[1]] * shape[0]),
            st.lists(
                st.lists(st.integers(0, 1), min_size=shape[1], max_size=shape[1]),
                min_size=shape[0],
                max_size=shape[0],
            ),
        )
    )
    options = {"attention_mask": torch.tensor(rows)}
    if isinstance(own, T5ForConditionalGeneration):
        options["decoder_input_ids"] = tokens.flip(1)
    elif data.draw(st.booleans()):
        causal = torch.ones(shape[1], shape[1]).tril().bool()
        allowed = torch.tensor(rows).bool()[:, None, None] & causal  # (B, 1, T, T)
        lowest = torch.finfo(own.dtype).min
        additive = torch.zeros(allowed.shape, dtype=own.dtype).masked_fill(~allowed, lowest)
        options["attention_mask"] = additive
    with torch.no_grad(), ap.probe(own) as calls:
        own(tokens, **options)
    report = answered(ap.verify, calls)
    assert report is None or {row for row in report.rows if row.verdict == "mismatch"} == set()


@fuzz(0.18)
@given(data=st.data())
def test_any_rule(data):
    """The formula under any mask rule is softmax(QKᵀ + M)V, number by number."""
    tried["rules"] += 1
    batch, groups, served, queries, keys, size, values = (
        data.draw(st.integers(1, most)) for most in (3, 2, 3, 9, 9, 4, 5)
    )
    some = st.one_of(st.none(), st.integers(1, 10))
    rule = MaskRule(
        queries,
        keys,
        causal=data.draw(st.booleans()),
        window=data.draw(some),
        ahead=data.draw(st.one_of(st.none(), st.integers(0, 9))),
        chunk=data.draw(some),
        offset=data.draw(st.integers(0, keys)),
        padding=data.draw(
            st.one_of(
                st.none(),
                st.just(torch.zeros(batch, keys, dtype=torch.bool)),
                st.integers(0, 2**20).map(
                    lambda seed: (
                        torch.rand(batch, keys, generator=torch.Generator().manual_seed(seed)) < 0.6
                    )
                ),
            )
        ),
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    dtype = data.draw(st.sampled_from(DTYPES))
    query, key, value = (
        torch.randn(*shape, generator=generator).to(dtype) * data.draw(st.sampled_from([0, 1, 30]))
        for shape in (
            (batch, groups * served, queries, size),
            (batch, groups, keys, size),
            (batch, groups, keys, values),
        )
    )
    want = by_hand(query, key, value, rule)
    got = attention(query, key, value, rule, 0.7)  # (B, T, H, Dv)
    assert np.allclose(got.transpose(1, 2).numpy(), want, rtol=1e-9, atol=1e-9)
    tiled = torch.cat([tile.output for tile in tiles(query, key, value, rule, 0.7)], 2)
    assert np.allclose(tiled.numpy(), want, rtol=1e-9, atol=1e-9)


def by_hand(query, key, value, rule):
    """softmax(0.7·QKᵀ + M)V by loops."""
    query, key, value = (one.double().numpy() for one in (query, key, value))
    batch, heads, queries, _ = query.shape
    served = heads // key.shape[1]
    out = np.zeros((batch, heads, queries, value.shape[-1]))
    for b, h, i in np.ndindex(batch, heads, queries):
        padding = None if rule.padding is None else rule.padding[b].numpy()
        begin = 0 if padding is None else int(padding.argmax())
        at = rule.offset + i
        seen = [
            j
            for j in range(rule.keys)
            if (padding is None or padding[j])
            and (not rule.causal or j <= at)
            and (rule.window is None or j > at - rule.window)
            and (rule.ahead is None or j <= at + rule.ahead)
            and (rule.chunk is None or (j - begin) // rule.chunk == (at - begin) // rule.chunk)
        ]
        if seen:
            score = np.array([0.7 * query[b, h, i] @ key[b, h // served, j] for j in seen])
            weight = np.exp(score - score.max())
            out[b, h, i] = weight / weight.sum() @ value[b, h // served, seen]
    return out


# Selections


@functools.cache
def captured(kind):
    options = {"target": [[0, 5, 9, 4], [0, 7]]} if kind == "t5" else {}
    return ap.capture(model(kind), [[5, 17, 23, 8, 4, 42], [9, 3, 77]], **options)


@fuzz(0.15)
@given(kind=st.sampled_from(["gpt2", "bert", "t5", "mistral"]), data=st.data())
def test_any_selection(kind, data):
    tried["selections"] += 1
    cap = captured(kind)
    if kind == "t5":
        cap = data.draw(st.sampled_from([cap, cap.encoder, cap.decoder, cap.cross]))
    answered(some_call(data), cap)


# Files


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folders = {}
    for kind in ("gpt2", "bert", "t5", "mistral"):
        folders[kind] = tmp_path_factory.mktemp("fuzz") / kind
        ap.save(captured(kind), folders[kind])
    return folders


def leaves(told, at=()):
    """The places of all values in JSON."""
    yield at
    if isinstance(told, dict | list):
        for name, one in told.items() if isinstance(told, dict) else enumerate(told):
            yield from leaves(one, (*at, name))


JSON = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        ["nan", "inf", "-inf", "", "self", "cross", "encoder", "é", "float64", "eager"]
    ),
    st.lists(st.integers(-1, 9), max_size=3),
    st.just({}),
)


@fuzz(0.15)
@given(kind=st.sampled_from(["gpt2", "bert", "t5", "mistral"]), data=st.data())
def test_any_saved_file(kind, data, saved, tmp_path_factory):
    """Files that say other things, with the right hashes, are refused, or can be used."""
    tried["files"] += 1
    folder = tmp_path_factory.getbasetemp() / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved[kind], folder)
    told = json.loads((folder / "capture.json").read_text())
    for _ in range(data.draw(st.integers(0, 2))):
        change_json(told["capture"], data)
    if data.draw(st.booleans()):
        change_tensors(folder, told, data)
    told["sha256"] = captures._digest(told)
    (folder / "capture.json").write_text(json.dumps(told))
    cap = answered(ap.load_capture, folder, data.draw(st.sampled_from([None, model(kind)])))
    if cap is not None:
        tried["files that load"] += 1
        answered(ap.verify, cap)
        if cap.target is not None and not cap.part:
            cap = answered(lambda: getattr(cap, data.draw(st.sampled_from(["encoder", "cross"]))))
        if cap is not None:
            answered(some_call(data), cap)


def change_json(told, data):
    """Another value, or the one of another place, somewhere."""
    places = [at for at in leaves(told) if at]
    *path, last = data.draw(st.sampled_from(places))
    where = functools.reduce(lambda one, name: one[name], path, told)
    if data.draw(st.booleans()):
        other = data.draw(st.sampled_from([at for at in places if at[-1] == last]))
        where[last] = json.loads(
            json.dumps(functools.reduce(lambda one, name: one[name], other, told))
        )
    else:
        where[last] = data.draw(JSON)
    note(f"{path}, {last}: {where[last]}")


def change_tensors(folder, told, data):
    """Other numbers, or another header."""
    file = folder / told["tensors"]["file"]
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    low, high = data.draw(st.sampled_from([(0, 8), (8, 8 + length), (8 + length, len(content))]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(low, high - 1))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    file.write_bytes(content)
    told["tensors"] |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_as_many_cases_were_tried():
    """The last of the file: what was to be tried was."""
    names = ("texts", "no texts", "shapes", "masks", "rules", "selections", "files")
    if all(tried[name] for name in names):
        assert sum(tried[name] for name in names) >= CASES
        assert tried["files that load"] >= 0.05 * tried["files"]

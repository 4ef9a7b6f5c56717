"""Statistics of heads, against loops over the model's own weights."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
import torch
from samples import mistral
from transformers import BertConfig, BertModel

import attnprobe as ap

IDS = [5, 17, 23, 8, 5, 17, 17, 42, 99, 3, 23]
OTHER = [5, 23, 23, 8, 61, 5, 23]
TOKENS = ["The", "“", "a", ".", "the", "!?", "a.", "$", "…", "b", "-"]
SHARP = {"vocab_size": 101, "hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 6}


def bert():
    torch.manual_seed(0)
    config = BertConfig(**SHARP, intermediate_size=70, initializer_range=0.5)
    return BertModel(config).eval()


def captured(model, ids, **options):
    """A capture with the model's own weights, and tokens some of which are punctuation."""
    model.set_attn_implementation("eager")
    cap = ap.capture(model, ids, **options)
    words = [replace(one, tokens=tuple(TOKENS[: len(one.tokens)])) for one in cap.words]
    return replace(cap, words=tuple(words))


CASES = {
    "causal": lambda gpt2: (captured(gpt2(), IDS), None),
    "windowed": lambda _: (captured(mistral(), IDS), 4),
    "bidirectional": lambda _: (captured(bert(), [IDS, OTHER, IDS[3:]]), None),
    "padded left": lambda gpt2: (
        captured(gpt2(), [IDS, OTHER, IDS[2:], [9]], padding_side="left"),
        None,
    ),
    "padded right": lambda gpt2: (captured(gpt2(), [OTHER, IDS], padding_side="right"), None),
    "windowed and padded": lambda _: (captured(mistral(), [OTHER, IDS]), 4),
}


@pytest.fixture(params=CASES)
def case(request, gpt2):
    """A capture, and its window."""
    return CASES[request.param](gpt2)


def texts_of(cap, window, texts, layer, head):
    """Of each text its rows of (keys that it may attend to, their weights), and its ids."""
    for text in texts:
        at = [i for i, real in enumerate(cap.padding[text].tolist()) if real]
        model = cap.calls[layer].weights_model[text, head].double()
        rows = []
        for i in range(len(at)):
            keys = [
                j
                for j in range(len(at))
                if (not cap.causal or j <= i) and (window is None or j > i - window)
            ]
            rows.append((keys, {j: float(model[at[i], at[j]]) for j in keys}))
        yield text, rows, cap.input_ids[text, at].tolist()


def is_punctuation(token):
    return all(unicodedata.category(one).startswith("P") for one in token)


KINDS = {
    "first": lambda i, j, ids: j == 0,
    "previous": lambda i, j, ids: j == i - 1,
    "two_before": lambda i, j, ids: j == i - 2,
    "same": lambda i, j, ids: j == i,
    "next": lambda i, j, ids: j == i + 1,
    "punctuation": lambda i, j, ids: is_punctuation(TOKENS[j]),
    "duplicate": lambda i, j, ids: j < i and ids[j] == ids[i],
    "induction": lambda i, j, ids: 0 < j < i and ids[j - 1] == ids[i],
}


def by_loops(cap, window, texts, layer, head):
    """Every column of one head, but for those by value and the variability."""
    lists = {name: [] for name in ("entropy", "share", "largest", "far", "far_rest", *KINDS)}
    for _, rows, ids in texts_of(cap, window, texts, layer, head):
        for i, (keys, a) in enumerate(rows):
            entropy = -sum(a[j] * math.log(a[j]) for j in keys if a[j] > 0)
            lists["entropy"].append(entropy)
            lists["far"].append(sum(a[j] * abs(i - j) for j in keys))
            if len(keys) > 1:
                lists["share"].append(entropy / math.log(len(keys)))
                lists["largest"].append(max(a.values()))
            rest = sum(a[j] for j in keys if j > 0)
            if rest > 0:
                far = sum(a[j] * abs(i - j) for j in keys if j > 0)
                lists["far_rest"].append(far / rest)
            for name, holds in KINDS.items():
                mine = [j for j in keys if holds(i, j, ids)]
                if 0 < len(mine) < len(keys):
                    lists[name].append(sum(a[j] for j in mine))
    means = {name: np.mean(one) if one else math.nan for name, one in lists.items()}
    renamed = {
        "share": "entropy_share",
        "far": "distance",
        "far_rest": "distance_without_first",
    }
    result = {renamed.get(name, name): mean for name, mean in means.items()}
    counts = {
        f"{name}_rows": len(lists[name]) for name in ("punctuation", "duplicate", "induction")
    }
    return {"rows": len(lists["entropy"]), **result, **counts}


def close(found, wanted):
    """Within the rounding of the model's own weights, which are float32."""
    return found == pytest.approx(wanted, rel=2e-5, abs=2e-6, nan_ok=True)


def test_every_column_is_what_loops_give(case):
    cap, window = case
    frame = ap.head_stats(cap)
    places = [(layer, head) for layer in range(cap.layers) for head in range(6)]
    assert list(zip(frame.layer, frame["head"], strict=True)) == places
    for at, (layer, head) in enumerate(places):
        wanted = by_loops(cap, window, range(len(cap)), layer, head)
        assert set(wanted) == {
            name
            for name in frame.columns
            if not name.startswith("value_") and name not in ("layer", "head", "variability")
        }
        for name, value in wanted.items():
            assert close(frame[name][at], value), (layer, head, name)


def test_the_cases_hold_what_is_counted(case):
    """So that no comparison above is one of NaN with NaN, but for what a causal model has not."""
    cap, _ = case
    frame = ap.head_stats(cap)
    assert (frame[["punctuation_rows", "duplicate_rows", "induction_rows"]] > 0).all(axis=None)
    assert frame["next"].isna().all() == cap.causal
    plain = [name for name in KINDS if name != "next"]
    assert frame[plain].notna().all(axis=None)
    assert frame[plain].std().min() > 0.01  # heads differ: none could stand for another


def test_some_layers_heads_and_texts(gpt2):
    cap = captured(gpt2(), [IDS, OTHER])
    frame = ap.head_stats(cap, layer=[2, 0], head=[5, 1], text=1)
    assert list(zip(frame.layer, frame["head"], strict=True)) == [(2, 5), (2, 1), (0, 5), (0, 1)]
    for at, (layer, head) in enumerate(zip(frame.layer, frame["head"], strict=True)):
        wanted = by_loops(cap, None, [1], layer, head)
        assert all(close(frame[name][at], value) for name, value in wanted.items())
    assert len(ap.head_stats(cap, 1, 3)) == 1


# Variability


def variability(cap, window, layer, head):
    texts = list(texts_of(cap, window, range(len(cap)), layer, head))
    seen = {}
    for _, rows, _ in texts:
        for i, (keys, a) in enumerate(rows):
            for j in keys:
                seen.setdefault((i, j), []).append(a[j])
    shared = [one for one in seen.values() if len(one) > 1]
    apart = sum(abs(a - sum(one) / len(one)) for one in shared for a in one)
    return apart / (2 * sum(map(sum, shared)))


def test_variability_is_what_loops_give(case):
    cap, window = case
    frame = ap.head_stats(cap)
    if len(cap) == 1:
        assert frame["variability"].isna().all()
        assert "there is one" in frame.attrs["reasons"]["variability"]
        return
    assert "variability" not in frame.attrs["reasons"]
    wanted = [
        variability(cap, window, layer, head) for layer in range(cap.layers) for head in range(6)
    ]
    assert np.std(wanted) > 0.01
    assert close(frame["variability"].tolist(), wanted)


def test_variability_goes_from_0_to_1_less_a_share(gpt2):
    same = ap.head_stats(captured(gpt2(), [IDS, IDS, IDS]))["variability"]
    assert same.tolist() == pytest.approx([0.0] * 18, abs=1e-6)
    cap = known([[1.0], [1.0, 0.0], [0.0, 1.0, 0.0]])
    other = known([[1.0], [0.0, 1.0], [0.0, 0.0, 1.0]])
    both = replace(
        cap,
        texts=(None, None),
        words=cap.words * 2,
        input_ids=cap.input_ids.repeat(2, 1),
        padding=cap.padding.repeat(2, 1),
        calls=(
            replace(
                cap.calls[0],
                **{
                    name: torch.cat([getattr(one.calls[0], name) for one in (cap, other)])
                    for name in ("query", "key", "value")
                },
            ),
        ),
    )
    # The first rows are equal, the others have nothing in common: 2 of 3 rows, each ½.
    assert ap.head_stats(both)["variability"][0] == pytest.approx(1 / 3)


# By value


def test_masses_by_value_are_what_loops_give(gpt2):
    cap = captured(gpt2(), [IDS, OTHER])
    frame = ap.head_stats(cap)
    assert "value" not in frame.attrs["reasons"]
    for layer, head in ((0, 1), (2, 5)):
        call = cap.calls[layer]
        out = call.module.c_proj.weight.detach().double()[10 * head : 10 * head + 10]
        lists = {name: [] for name in KINDS}
        for text, rows, ids in texts_of(cap, None, range(2), layer, head):
            values = call.value[text, head][cap.padding[text]].double()
            lengths = [float((value @ out).norm()) for value in values]
            for i, (keys, a) in enumerate(rows):
                whole = sum(a[j] * lengths[j] for j in keys)
                for name, holds in KINDS.items():
                    mine = [j for j in keys if holds(i, j, ids)]
                    if 0 < len(mine) < len(keys):
                        lists[name].append(sum(a[j] * lengths[j] for j in mine) / whole)
        row = frame[(frame.layer == layer) & (frame["head"] == head)].iloc[0]
        for name, one in lists.items():
            assert close(row[f"value_{name}"], np.mean(one) if one else math.nan), name
            assert name == "next" or abs(row[f"value_{name}"] - row[name]) > 1e-4


def test_without_w_o_the_columns_by_value_are_nan_and_say_why():
    class Packed(torch.nn.Linear):
        """As other libraries make of a linear layer."""

    model = mistral()
    for layer in model.model.layers:
        layer.self_attn.o_proj.__class__ = Packed
    frame = ap.head_stats(captured(model, IDS))
    assert frame.filter(like="value_").isna().all(axis=None)
    assert frame.filter(like="value_").shape[1] == len(KINDS)
    assert "Packed: what it computes is not known" in frame.attrs["reasons"]["value"]


# By hand


def known(rows):
    """A capture of one layer and head of tokens 7, 7, 9 with just these weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 3, "n_positions": 5, "vocab_size": 11}
    cap = ap.capture(GPT2LMHeadModel(GPT2Config(**sizes)).eval(), [7, 7, 9])
    query = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    for i, row in enumerate(rows):
        query[0, 0, i, : len(row)] = torch.tensor(row, dtype=torch.float64).clamp(min=1e-300).log()
    call = cap.calls[0]
    query = query / call.expected_scaling
    return replace(cap, calls=(replace(call, query=query, key=torch.eye(3)[None, None].double()),))


def test_three_tokens_by_hand():
    cap = known([[1.0], [0.25, 0.75], [0.5, 0.125, 0.375]])
    row = ap.head_stats(cap).iloc[0]
    second = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    third = 0.5 * math.log(2) + 0.125 * math.log(8) + 0.375 * math.log(8 / 3)
    wanted = {
        "rows": 3,
        "entropy": (0 + second + third) / 3,
        "entropy_share": (second / math.log(2) + third / math.log(3)) / 2,
        "largest": (0.75 + 0.5) / 2,
        "distance": (0 + 0.25 + (2 * 0.5 + 0.125)) / 3,
        "distance_without_first": (0 + 0.125 / 0.5) / 2,
        "first": (0.25 + 0.5) / 2,
        "previous": (0.25 + 0.125) / 2,
        "two_before": 0.5,
        "same": (0.75 + 0.375) / 2,
        "duplicate": 0.25,
        "duplicate_rows": 1,
        "induction_rows": 0,  # the token after the equal earlier one is the token itself
        "punctuation_rows": 0,
    }
    assert {name: row[name] for name in wanted} == pytest.approx(wanted, abs=1e-12)
    assert row[["next", "punctuation", "induction", "variability"]].isna().all()


def test_rows_that_have_no_weight_beyond_the_first():
    row = ap.head_stats(known([[1.0], [1.0, 0.0], [1.0, 0.0, 0.0]])).iloc[0]
    assert row["entropy"] == pytest.approx(0, abs=1e-12)
    assert row["distance"] == pytest.approx(1.0)
    assert row["first"] == pytest.approx(1.0)


def test_one_token_has_only_what_one_row_can_have(gpt2):
    frame = ap.head_stats(captured(gpt2(), [9]))
    assert frame.rows.tolist() == [1] * 18
    assert frame[["entropy", "distance"]].eq(0).all(axis=None)
    assert (
        frame[[*KINDS, "largest", "entropy_share", "distance_without_first"]].isna().all(axis=None)
    )


# The bundled model


@pytest.fixture(scope="module")
def bundled():
    return ap.load("bundled")


def test_head_0_0_of_the_bundled_model_looks_at_the_previous_token(bundled):
    text = "She had never seen a garden like this, and the children were not at home."
    frame = ap.head_stats(ap.capture(bundled, text))
    assert frame["previous"].idxmax() == 0
    assert frame["previous"][0] > 0.98
    assert frame["largest"][0] > 0.98
    assert frame["entropy_share"][0] < 0.05


def test_head_1_0_of_the_bundled_model_copies(bundled):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 4096, (32,), generator=generator).tolist()
    frame = ap.head_stats(ap.capture(bundled, ids * 2))
    best = frame["induction"].idxmax()
    assert (frame.layer[best], frame["head"][best]) == (1, 0)
    assert frame["induction"][best] > 0.9
    assert frame["induction_rows"][best] == 32  # the last token too: position 32 is after its copy
    assert frame["duplicate_rows"][best] == 32


def test_punctuation_is_read_from_the_tokens(bundled):
    cap = ap.capture(bundled, "“Oh!” said he; well... $5 + 3 = `8` ")
    marks = [token for token in cap.words_of(0).tokens if is_punctuation(token)]
    assert {"!”", "..."} & set(marks)
    a = ap.weights(cap, 2, 3)
    at = [j for j, token in enumerate(cap.words_of(0).tokens) if is_punctuation(token)]
    masses = []
    for i in range(len(a)):
        mine = [j for j in at if j <= i]
        if 0 < len(mine) < i + 1:
            masses.append(sum(float(a[i, j]) for j in mine))
    row = ap.head_stats(cap, 2, 3).iloc[0]
    assert row["punctuation"] == pytest.approx(np.mean(masses))
    assert row["punctuation_rows"] == len(masses)


def test_a_special_token_is_no_punctuation(gpt2):
    cap = captured(gpt2(), IDS)
    words = list(cap.words[0].words)
    assert ap.head_stats(cap)["punctuation_rows"][0] == 10
    words[1] = replace(words[1], kind="special")
    cap = replace(cap, words=(replace(cap.words[0], words=tuple(words)),))
    assert ap.head_stats(cap)["punctuation_rows"][0] == 8  # from the next mark, at 3, on


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "layer 3 is out of range"),
        ({"head": 6}, "head 6 is out of range"),
        ({"text": 1}, "text 1 is out of range"),
        ({"text": []}, "expected a text, a list of them, or None"),
    ],
)
def test_what_is_not_there_is_refused(gpt2, options, message):
    with pytest.raises(ap.InputError, match=message):
        ap.head_stats(ap.capture(gpt2(), IDS), **options)


def test_something_else_than_a_capture_is_refused():
    with pytest.raises(ap.InputError, match="expected a capture"):
        ap.head_stats("bundled")

"""Sweeps over a corpus: against `head_stats`, against loops, and against themselves."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import math
import os
import shutil
import signal
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import attnprobe as ap
from attnprobe.heads import BASIC, COUNTED, MASSES
from attnprobe.masks import disagreement
from attnprobe.sweeping import folder, pairs, rows, shards
from attnprobe.sweeping.frames import quantile
from attnprobe.sweeping.shards import Passage, passages
from attnprobe.sweeping.sources import Document
from attnprobe.sweeping.tallies import BINS, edges
from attnprobe.sweeping.texts import CLASSES, Text, cut
from attnprobe.words import read

TEXTS = [
    "The old man said that the old man was there, and the old man was tired.",
    "Alice! Alice ran: “where?” — 42 times, 3.5 miles; the cat, the cat and the hat.",
    "She had never seen a garden like this.\n\nShe had never seen a house like this, no…",
    "$5 + $5 = $10 😀 und unwahrscheinlichkeitsbedingungen",
    "I",
    "the " * 40 + "cat and " * 15,
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return ap.load("bundled").tokenizer


def causal(dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=4096,
        n_layer=2,
        n_head=6,
        n_embd=60,
        n_positions=128,
        initializer_range=0.3,
        **more,
    )
    return transformers.GPT2LMHeadModel(config).eval().to(dtype)


SIZES = {"vocab_size": 4096, "hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 6}
LLAMA = SIZES | {"num_key_value_heads": 3, "head_dim": 10, "intermediate_size": 70}
SHARP = {"initializer_range": 0.4}


def windowed() -> Any:
    return MistralForCausalLM(MistralConfig(**LLAMA, **SHARP, sliding_window=5))


def bidirectional() -> Any:
    return BertModel(BertConfig(**SIZES, **SHARP, intermediate_size=70))


def capped() -> Any:
    """With a softcap. The windows are wider than any padding: of rows that see padding alone,
    transformers' eager kernel makes NaN."""
    more = {"attn_logit_softcapping": 2.0, "sliding_window": 120, "query_pre_attn_scalar": 10}
    return Gemma2ForCausalLM(Gemma2Config(**LLAMA, **SHARP, **more, attn_implementation="eager"))


def with_sinks() -> Any:
    more = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6}
    model = GptOssForCausalLM(
        GptOssConfig(
            **LLAMA, **SHARP, **more, attn_implementation="eager", experts_implementation="eager"
        )
    )
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


def biased() -> Any:
    """With ALiBi."""
    sizes = {"vocab_size": 4096, "hidden_size": 60, "n_layer": 2, "n_head": 6}
    return BloomForCausalLM(BloomConfig(**sizes, **SHARP))


MODELS = {
    "causal": causal,
    "windowed": windowed,
    "bidirectional": bidirectional,
    "capped": capped,
    "with sinks": with_sinks,
    "biased": biased,
}


def built(name: str) -> Any:
    torch.manual_seed(1)
    return MODELS[name]().eval().double()


@pytest.fixture(scope="module")
def lm(tokenizer: Any) -> Any:
    """A causal model in float64."""
    return causal(), tokenizer


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards of several passages from a text of a page."""
    monkeypatch.setattr(shards, "PASSAGE", 300)
    monkeypatch.setattr(shards, "SHARD", 900)


PAGE = "\n\n".join(
    f"Chapter {at}. The children went to the garden, and the garden was {at * at} steps long; the "
    f"children counted them. “Are we at {at}?” said the oldest, who was not at all tired." * 2
    for at in range(1, 16)
)


def files_of(out: Path) -> dict[str, bytes]:
    """Every file of a sweep's folder, byte by byte."""
    return {str(one.relative_to(out)): one.read_bytes() for one in out.rglob("*") if one.is_file()}


def close(found: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(
        np.asarray(found, float), np.asarray(wanted, float), rtol=tolerance, atol=tolerance
    )


# Against head_stats and loops


@pytest.mark.parametrize("name", MODELS)
def test_the_means_are_those_of_head_stats(name: str, tokenizer: Any, tmp_path: Path) -> None:
    model = built(name)
    found = ap.sweep((model, tokenizer), TEXTS, tmp_path / "out", value=True, batch_size=4)
    wanted = ap.head_stats(ap.capture((model, tokenizer), TEXTS))
    assert found.manifest["left_out"] == {}
    assert bool(found.manifest["value_left_out"]) == ("value" in wanted.attrs["reasons"])
    exact = ["layer", "head", "rows", *(f"{one}_rows" for one in COUNTED)]
    assert found.heads[exact].equals(wanted[exact])
    for column in (*BASIC, *MASSES, *(f"value_{mass}" for mass in MASSES)):
        close(found.heads[column], wanted[column])
        if column.removeprefix("value_") != "next" and not wanted[column].isna().all():
            assert wanted[column].std() > 1e-3, column


def test_layers_of_unlike_head_counts_are_each_cut_into_their_own_tiles(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = causal()
    attention = model.transformer.h[1].attn
    attention.num_heads, attention.head_dim, attention.scaling = 2, 30, 30**-0.5
    monkeypatch.setattr(rows, "TILE", 4 * rows.ROWS * 32 * 2)  # 1 text of layer 0, 4 of layer 1
    found = ap.sweep((model, tokenizer), TEXTS[:3] * 2, tmp_path / "out", value=True)
    wanted = ap.head_stats(ap.capture((model, tokenizer), TEXTS[:3] * 2))
    assert found.manifest["left_out"] == {}
    assert found.heads.groupby("layer").size().tolist() == [6, 2]
    for column in (*BASIC, *MASSES, *(f"value_{mass}" for mass in MASSES)):
        close(found.heads[column], wanted[column])


def class_of(words: Any, at: int) -> str:
    """The class of a token, worked out anew."""
    word = words.words[words.word_of[at]]
    if at == 0:
        return "first"
    if word.kind != "word":
        return str(word.kind)
    letters = [one for one in word.text if one.isalpha()]
    if not letters:
        if any(one.isnumeric() for one in word.text):
            return "number"
        import unicodedata

        marks = all(unicodedata.category(one)[0] == "P" for one in word.text)
        return "punctuation" if marks else "symbol"
    if at != word.tokens[0]:
        return "continuation"
    return "capitalised" if letters[0].isupper() else "word"


@pytest.mark.parametrize("name", ["causal", "bidirectional", "windowed"])
def test_distances_classes_pairs_and_histograms_are_what_loops_give(
    name: str, tokenizer: Any, tmp_path: Path
) -> None:
    model = built(name)
    found = ap.sweep((model, tokenizer), TEXTS, tmp_path / "out", batch_size=5)
    window = 5 if name == "windowed" else math.inf
    far: dict[Any, list[float]] = defaultdict(list)
    mass: dict[Any, list[float]] = defaultdict(list)
    even: dict[Any, list[float]] = defaultdict(list)
    most: dict[Any, Counter[Any]] = defaultdict(Counter)
    largest: dict[Any, list[float]] = defaultdict(list)
    for text in TEXTS:
        cap = ap.capture((model, tokenizer), text)
        words = cap.words_of(0)
        kinds = [class_of(words, at) for at in range(len(words.tokens))]
        for layer in range(2):
            for head, weights in enumerate(ap.weights(cap, layer).numpy()):
                for i, row in enumerate(weights):
                    reach = len(row) if name == "bidirectional" else i + 1
                    keys = [j for j in range(reach) if j > i - window]
                    for j in keys:
                        far[layer, head, i - j].append(row[j])
                    for kind in CLASSES:
                        own = [j for j in keys if kinds[j] == kind]
                        mass[layer, head, kinds[i], kind].append(sum(row[j] for j in own))
                        even[layer, head, kinds[i], kind].append(len(own) / len(keys))
                    if len(keys) > 1:
                        largest[layer, head].append(max(row))
                    word = words.words[words.word_of[i]]
                    best = max(keys, key=lambda j: row[j])
                    if i == word.tokens[-1] and best and any(map(str.isalnum, word.text)):
                        looked = words.words[words.word_of[best]].label
                        most[layer, head][word.label, looked] += 1
    assert len(found.distances) == len(far)
    for row in found.distances.itertuples():
        one = far[row.layer, row.head, row.distance]
        assert row.cells == len(one)
        close([row.weight, row.mean], [sum(one), np.mean(one)])
    close(found.distances.groupby(["layer", "head"])["share"].sum(), [1.0] * 12)
    seen = {kind for _, _, kind, _ in mass}
    assert {*CLASSES} - seen <= {"special"}
    assert len(found.classes) == 12 * len(seen) ** 2
    for row in found.classes.itertuples():
        place = (row.layer, row.head, row.query_class, row.key_class)
        assert row.rows == len(mass[place])
        close([row.mass, row.uniform], [np.mean(mass[place]), np.mean(even[place])])
    for place, counts in most.items():
        own = found.pairs[(found.pairs.layer == place[0]) & (found.pairs["head"] == place[1])]
        ordered = sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:100]
        assert [((a, b), n) for _, _, a, b, n in own.itertuples(index=False)] == ordered
        histogram = found.histograms.query(
            f"layer == {place[0]} and head == {place[1]} and statistic == 'largest'"
        )
        bins, _ = np.histogram(largest[place], edges("largest", 256))
        assert histogram["count"].tolist() == bins[bins > 0].tolist()
        spread = found.heads.query(f"layer == {place[0]} and head == {place[1]}")
        close(spread["largest_std"], [np.std(largest[place])], 1e-8)
        middle = np.quantile(largest[place], 0.5)
        assert abs(spread["largest_median"].iloc[0] - middle) < 2 / BINS


def test_float32_is_within_its_rounding(tokenizer: Any, tmp_path: Path) -> None:
    model = causal(torch.float32)
    found = ap.sweep((model, tokenizer), TEXTS, tmp_path / "out").heads
    cap = ap.capture((model, tokenizer), TEXTS)
    wanted = ap.head_stats(cap)
    for column in (*BASIC, *MASSES[:4], *MASSES[5:]):
        close(found[column], wanted[column], 5e-6)


def test_quantiles_lie_evenly_in_their_bins() -> None:
    counts, bounds = np.array([0, 4, 0, 4]), np.array([0.0, 1.0, 3.0, 4.0, 5.0])
    assert quantile(counts, bounds, 0.25) == pytest.approx(2.0)
    assert quantile(counts, bounds, 0.5) == pytest.approx(3.0)
    assert quantile(counts, bounds, 0.75) == pytest.approx(4.5)
    assert quantile(counts, bounds, 1.0) == pytest.approx(5.0)
    assert math.isnan(quantile(counts * 0, bounds, 0.5))
    low = np.array([7, *[0] * (BINS - 1)])  # all of them may be 1e-7
    assert quantile(low, edges("first", 256), 0.5) == pytest.approx(0.005)


# Texts


@pytest.mark.parametrize("tokens", [8, 31, 256])
def test_a_passage_is_cut_into_texts_that_fit_and_leave_nothing_out(
    tokens: int, tokenizer: Any
) -> None:
    passage = Passage("page", 0, PAGE + "x" * 3000 + "終わりのない文字列" * 200)
    found = list(cut(tokenizer, passage, tokens))
    assert "".join(text for _, text, *_ in found) == passage.text
    assert all(len(ids) <= tokens for _, _, ids, _ in found)
    assert all(ids == tokenizer(text)["input_ids"] for _, text, ids, _ in found)
    assert all(Text.of(tokenizer, *one).words == read(tokenizer, one[2], one[1]) for one in found)
    assert len({name for name, *_ in found}) == len(found)
    own = [ids for _, text, ids, _ in found if text in PAGE]
    assert sum(map(len, own)) / len(own) > 0.75 * tokens
    words = [text for _, text, *_ in found if text in PAGE[len(text) :]][1:]
    assert tokens == 8 or all(text[0].isspace() for text in words)


def test_passages_are_the_text_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PASSAGE", 50)
    text = "a bb ccc\n\n" * 30 + "x" * 240 + "\n\n" + "終" * 120
    blocks = [text[at : at + 7] for at in range(0, len(text), 7)]
    found = list(passages(blocks))
    assert "".join(found) == text
    assert found == list(passages([text]))
    assert max(map(len, found)) <= 50
    assert all(one.endswith("\n\n") for one in found[:5])
    assert list(passages(["  \n", " " * 200])) == []


# Whatever the batch size; and after a crash


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_batch_size_moves_no_number(dtype: torch.dtype, tokenizer: Any, tmp_path: Path) -> None:
    """By more than the order of sums: in float32 too, as a text is padded alike in any batch."""
    lm = causal(dtype), tokenizer
    several = [
        ap.sweep(lm, [PAGE, *TEXTS], tmp_path / str(n), batch_size=n, tokens=64) for n in (1, 3, 16)
    ]
    for other in several[1:]:
        assert several[0].manifest | {"tables": {}} == other.manifest | {"tables": {}}
        assert several[0].pairs.equals(other.pairs)
        assert several[0].histograms.equals(other.histograms)
        for table in ("heads", "distances", "classes"):
            numbers = [getattr(one, table).select_dtypes("number") for one in (several[0], other)]
            close(*numbers, 1e-11)


def stopping(after: int, error: BaseException) -> Any:
    """A progress that raises after so many batches."""
    seen = []

    def progress(now: Any) -> None:
        seen.append(now.tokens)
        if len(seen) == after:
            raise error

    return progress


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("engine_option", [{}, {"value": True, "verify": 2}])
def test_after_a_crash_it_goes_on_and_the_result_is_the_same_bit_for_bit(
    lm: Any, tmp_path: Path, engine_option: dict[str, Any]
) -> None:
    corpus = [PAGE, *TEXTS, b"no text"]
    options = {"tokens": 64, "batch_size": 4, **engine_option}
    whole = ap.sweep(lm, corpus, tmp_path / "whole", **options)
    assert whole.manifest["corpus"]["shards"] > 4
    for number, after in enumerate((1, 9)):
        out = tmp_path / f"stopped {number}"
        with pytest.raises(KeyboardInterrupt):
            ap.sweep(lm, corpus, out, **options, progress=stopping(after, KeyboardInterrupt()))
        assert not lm[0].transformer.h[0].attn._forward_hooks
        finished = [*(out / "parts").glob("[0-9]*")]
        assert bool(finished) == (after > 3)
        (out / "parts" / ".000009.77").mkdir(parents=True)  # as a killed one leaves it
        (out / ".heads.parquet.part").write_bytes(b"half")
        shown: list[Any] = []
        again = ap.sweep(lm, corpus, out, **options, progress=shown.append)
        assert again.manifest == whole.manifest
        assert files_of(out) == files_of(tmp_path / "whole")
        assert (shown[-1].tokens_now < whole.manifest["corpus"]["tokens"]) == bool(finished)
    assert {*files_of(tmp_path / "whole")} == {
        *("heads.parquet", "histograms.parquet", "distances.parquet", "classes.parquet"),
        *("pairs.parquet", "manifest.json"),
    }


@pytest.mark.usefixtures("small_shards")
def test_how_far_a_sweep_is_stands_in_its_repr(lm: Any, tmp_path: Path) -> None:
    done = ap.sweep(lm, [PAGE], tmp_path / "done", tokens=64)
    assert f" over 1 document, {done.manifest['corpus']['tokens']} tokens)" in repr(done)
    with pytest.raises(KeyboardInterrupt):
        ap.sweep(lm, [PAGE], tmp_path / "a", tokens=64, progress=stopping(4, KeyboardInterrupt()))
    found = ap.read_sweep(tmp_path / "a")
    assert 0 < found.manifest["corpus"]["tokens"] < done.manifest["corpus"]["tokens"]
    assert repr(found).endswith(" tokens, unfinished, in the first document)")


@pytest.mark.usefixtures("small_shards")
def test_a_finished_sweep_is_not_computed_again(lm: Any, tmp_path: Path) -> None:
    first = ap.sweep(lm, [PAGE], tmp_path / "out", tokens=64)
    before = files_of(tmp_path / "out")
    computed: list[Any] = []
    again = ap.sweep(
        lm, [PAGE], tmp_path / "out", tokens=64, batch_size=3, progress=computed.append
    )
    assert not computed
    assert again.manifest == first.manifest
    assert files_of(tmp_path / "out") == before
    with pytest.raises(ap.InputError, match="finished sweep of another corpus"):
        ap.sweep(lm, [PAGE + "!"], tmp_path / "out", tokens=64)
    assert files_of(tmp_path / "out") == before


@pytest.mark.usefixtures("small_shards")
def test_another_corpus_model_or_setting_is_refused(
    lm: Any, tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        ap.sweep(lm, [PAGE], out, tokens=64, progress=stopping(9, KeyboardInterrupt()))
    before = files_of(out)
    with pytest.raises(ap.InputError, match="begun with other settings: tokens was 64"):
        ap.sweep(lm, [PAGE], out, tokens=32)
    with pytest.raises(
        ap.InputError, match=r"not the one that .* was begun with: it differs at doc"
    ):
        ap.sweep(lm, [PAGE.replace("garden", "house")], out, tokens=64)
    with pytest.raises(ap.InputError, match="another model: dtype was 'float64'"):
        ap.sweep((causal(torch.float32), tokenizer), [PAGE], out, tokens=64)
    other = causal()
    with torch.no_grad():
        other.transformer.h[1].attn.c_attn.bias[3] += 1e-9
    with pytest.raises(ap.InputError, match="another model: sha256"):
        ap.sweep((other, tokenizer), [PAGE], out, tokens=64)
    begun = next(iter(shards.shards([Document("document 0", [PAGE], "", 1)])))
    with pytest.raises(ap.AttnprobeError, match="finished shards, and the corpus has 1"):
        ap.sweep(lm, ["".join(one.text for one in begun.passages)], out, tokens=64)
    assert {name: one for name, one in files_of(out).items() if name.startswith("parts")} == {
        name: one for name, one in before.items() if name.startswith("parts")
    }


@pytest.mark.usefixtures("small_shards")
def test_a_full_disk_is_a_clear_error_and_leaves_what_was_finished(
    lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ap.sweep(lm, [PAGE], tmp_path / "whole", tokens=64)
    right, room = folder._write, [7]

    def full(file: Path, content: bytes) -> None:
        room[0] -= 1
        if room[0] < 0:
            file.write_bytes(content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        right(file, content)

    out = tmp_path / "out"
    monkeypatch.setattr(folder, "_write", full)
    with pytest.raises(ap.AttnprobeError, match=r"the disk is full.* 3 shards finished"):
        ap.sweep(lm, [PAGE], out, tokens=64)
    monkeypatch.undo()
    monkeypatch.setattr(shards, "PASSAGE", 300)
    monkeypatch.setattr(shards, "SHARD", 900)
    part = ap.read_sweep(out)
    assert part.manifest["complete"] is False
    assert 0 < part.heads["rows"][0] == part.manifest["corpus"]["tokens"]
    assert part.heads["rows"][0] < whole.heads["rows"][0]
    assert min(map(len, (part.pairs, part.classes, part.distances, part.histograms))) > 0
    ap.sweep(lm, [PAGE], out, tokens=64)
    assert files_of(out) == files_of(tmp_path / "whole")


# Where the texts come from


def written(kind: str, folder_: Path) -> Any:
    """A corpus of `TEXTS`, in one of the forms it may come in."""
    rows = [{"id": at, "text": text} for at, text in enumerate(TEXTS)]
    frame = pd.DataFrame(rows)
    match kind:
        case "folder of txt":
            (folder_ / "below").mkdir()
            for at, text in enumerate(TEXTS):
                place = folder_ / "below" if at > 3 else folder_
                place.joinpath(f"{'z' if at > 3 else ''}{at}.txt").write_text(text)
            (folder_ / "notes.md").write_text("no text")
            return folder_
        case "jsonl":
            content = "\n\n".join(json.dumps(row) for row in rows)
            (folder_ / "a.jsonl").write_text(content)
            return str(folder_ / "a.jsonl")
        case "parquet":
            frame.to_parquet(folder_ / "a.parquet", row_group_size=2)
            return folder_ / "a.parquet"
        case "datasets":
            return pytest.importorskip("datasets").Dataset.from_list(rows)
        case "streamed datasets":
            return pytest.importorskip("datasets").Dataset.from_list(rows).to_iterable_dataset()
        case "generator":
            return (text for text in TEXTS)
    return TEXTS


FORMS = (
    *("folder of txt", "jsonl", "parquet", "datasets", "streamed datasets", "generator", "list"),
)


@pytest.fixture(scope="module")
def plain(lm: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A sweep over `TEXTS`."""
    return ap.sweep(lm, TEXTS, tmp_path_factory.mktemp("plain") / "out")


@pytest.mark.parametrize("form", FORMS)
def test_texts_come_from_anywhere(form: str, lm: Any, plain: Any, tmp_path: Path) -> None:
    place = tmp_path / "corpus"
    place.mkdir()
    shown: list[Any] = []
    corpus = written(form, place)
    found = ap.sweep(
        lm, corpus, tmp_path / "out", progress=lambda now: shown.append((now.done, now.total))
    )
    assert found.manifest["corpus"]["documents"] == len(TEXTS)
    assert found.manifest["damaged"]["count"] == 0
    others = ["notes.md"] if form == "folder of txt" else []
    assert found.manifest["corpus"]["skipped"] == {"count": len(others), "named": others}
    for table in ("heads", "distances", "classes", "pairs", "histograms"):
        assert getattr(found, table).equals(getattr(plain, table)), table
    done, total = shown[-1]
    assert total == {
        "folder of txt": sum(len(text.encode()) for text in TEXTS),
        "jsonl": place.joinpath("a.jsonl").stat().st_size if form == "jsonl" else 0,
        "parquet": place.joinpath("a.parquet").stat().st_size if form == "parquet" else 0,
        "streamed datasets": None,
        "generator": None,
    }.get(form, len(TEXTS))
    assert done == pytest.approx(total or len(TEXTS))


def test_standard_input_is_one_text(
    lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(PAGE.replace("\n", "\r\n").encode())
    wanted = ap.sweep(lm, file, tmp_path / "file")
    with file.open(encoding="utf-8", newline="") as opened:
        monkeypatch.setattr("sys.stdin", opened)
        found = ap.sweep(lm, "-", tmp_path / "stdin")
    assert found.manifest["corpus"]["documents"] == 1
    for table in ("heads", "distances", "classes", "pairs"):
        assert getattr(found, table).equals(getattr(wanted, table))
    assert not [*(tmp_path / "stdin").glob(".*")]
    held = ap.sweep(lm, io.BytesIO(PAGE.encode()), tmp_path / "held")
    assert held.heads.equals(wanted.heads)


def test_damaged_documents_are_counted_and_named_and_the_rest_goes_on(
    lm: Any, plain: Any, tmp_path: Path
) -> None:
    place = tmp_path / "corpus"
    place.mkdir()
    (place / "a.txt").write_bytes("naïve ".encode() * 20_000 + b"\xff\xfe")
    (place / "b.txt").write_text("  \n")
    lines = [json.dumps({"text": text}).encode() for text in TEXTS]
    lines[2:2] = [
        *(b'{"text": "half', b"[1, 2]", b'{"body": "x"}', b'{"text": 7}'),
        *(b'{"text": "\\ud800"}', b'{"text": "\xff"}', b'{"text": ""}', b"[" * 100_000),
    ]
    (place / "c.jsonl").write_bytes(b"\n".join(lines))
    (place / "d.parquet").write_bytes(b"PAR1 and no more")
    found = ap.sweep(lm, place, tmp_path / "out")
    damaged = found.manifest["damaged"]
    assert {one["name"]: one["reason"][:26] for one in damaged["named"]} == {
        "a.txt": "not UTF-8 near byte 140000",
        "b.txt": "empty: there is nothing to",
        "c.jsonl:3": "no JSON: Unterminated stri",
        "c.jsonl:4": "expected a JSON object, go",
        "c.jsonl:5": "no field 'text': it has bo",
        "c.jsonl:6": "expected text, got int",
        "c.jsonl:7": "the text holds a lone surr",
        "c.jsonl:8": "not UTF-8 at byte 10",
        "c.jsonl:9": "empty: there is nothing to",
        "c.jsonl:10": damaged["named"][9]["reason"][:26],
        "d.parquet:0 and after": "damaged Parquet: Parquet m",
    }
    assert damaged["count"] == 11
    assert found.manifest["corpus"]["documents"] == 11 + len(TEXTS)
    assert found.heads.equals(plain.heads)


def test_a_text_that_overflows_is_named_and_the_rest_goes_on(
    tokenizer: Any, tmp_path: Path
) -> None:
    model = causal(torch.float32)
    (cat,) = tokenizer(" cat")["input_ids"]

    def overflow(module: Any, ids: Any, output: torch.Tensor) -> torch.Tensor:
        return output.masked_fill((ids[0] == cat)[..., None], torch.inf)

    model.transformer.wte.register_forward_hook(overflow)
    bad = [at for at, text in enumerate(TEXTS) if " cat" in text]
    assert 0 < len(bad) < len(TEXTS)
    found = ap.sweep((model, tokenizer), TEXTS, tmp_path / "out")
    named = found.manifest["damaged"]["named"]
    assert sorted(one["name"] for one in named) == [f"document {at}" for at in bad]
    assert all("NaN or infinity" in one["reason"] for one in named)
    rest = [text for at, text in enumerate(TEXTS) if at not in bad]
    wanted = ap.sweep((model, tokenizer), rest, tmp_path / "rest")
    assert found.heads.equals(wanted.heads)
    assert found.pairs.equals(wanted.pairs)
    assert found.manifest["corpus"]["tokens"] == wanted.manifest["corpus"]["tokens"]


# What it says beside the numbers


def test_the_manifest_says_what_was_run(lm: Any, tmp_path: Path) -> None:
    manifest = ap.sweep(lm, [PAGE, *TEXTS], tmp_path / "out", verify=3, tokens=96).manifest
    assert manifest == json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["complete"] is True
    assert manifest["model"]["dtype"] == "float64"
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["settings"]["tokens"] == 96
    assert len(manifest["corpus"]["sha256"]) == 64
    texts = [PAGE, *TEXTS]
    own = [
        text
        for at, one in enumerate(texts)
        for _, text, *_ in cut(lm[1], Passage(str(at), 0, one), 96)
    ]
    assert manifest["corpus"]["texts"] == len(own)
    assert manifest["corpus"]["tokens"] == sum(len(lm[1](text)["input_ids"]) for text in own)
    drawn = {at for at, text in enumerate(own) if not zlib.crc32(text.encode()) % 3} | {0}
    assert manifest["verification"]["texts"] == len(drawn)
    assert manifest["verification"]["verified"] == len(drawn) > 1
    assert 0 < manifest["verification"]["worst_ratio"] < 1


def test_a_wrong_kernel_is_a_mismatch_in_the_manifest(
    lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    right = kernels["sdpa"]

    def wrong(module: Any, query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
        return right(module, query, key, 1.01 * value, *more, **options)

    monkeypatch.setitem(kernels._global_mapping, "sdpa", wrong)
    checked = ap.sweep(lm, TEXTS, tmp_path / "out", verify=1).manifest["verification"]
    assert checked["mismatch"] == checked["texts"] == len(TEXTS)
    assert checked["not_verified"][0]["text"] == "document 0"
    assert "MISMATCH" in checked["not_verified"][0]["summary"]


def test_a_layer_without_the_formula_is_left_out_by_name(
    lm: Any, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm[0].transformer.h[1].attn, "scaling", 0.5)
    found = ap.sweep(lm, TEXTS, tmp_path / "out")
    assert found.manifest["left_out"].keys() == {"layer 1"}
    assert "scales by" in found.manifest["left_out"]["layer 1"]
    assert found.heads.equals(plain.heads[plain.heads["layer"] == 0])
    assert set(found.pairs["layer"]) == {0}
    monkeypatch.setattr(lm[0].transformer.h[0].attn, "scaling", 0.5)
    with pytest.raises(ap.ModelError, match=r"no layer could be measured: layer 0: .*scales by"):
        ap.sweep(lm, TEXTS, tmp_path / "none")


def test_pandas_polars_and_duckdb_read_it_as_it_is(plain: Any) -> None:
    for table in ("heads", "histograms", "distances", "classes", "pairs"):
        file = str(plain.path / f"{table}.parquet")
        frame = pd.read_parquet(file)
        assert frame.equals(getattr(plain, table))
        polars = pytest.importorskip("polars").read_parquet(file)
        assert polars.columns == [*frame.columns]
        assert len(polars) == len(frame) > 0
        duckdb = pytest.importorskip("duckdb")
        (rows,) = duckdb.sql(f"select count(*), sum(layer) from '{file}'").fetchall()
        assert rows == (len(frame), frame["layer"].sum())


def test_pairs_are_merged_in_parts_alike(
    lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ap.sweep(lm, [PAGE, *TEXTS], tmp_path / "whole", pairs=7).pairs
    assert wanted.groupby(["layer", "head"]).size().eq(7).all()
    monkeypatch.setattr(pairs, "MERGED", 11)
    assert ap.sweep(lm, [PAGE, *TEXTS], tmp_path / "parts", pairs=7).pairs.equals(wanted)
    assert len(ap.sweep(lm, TEXTS, tmp_path / "none", pairs=0).pairs) == 0


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 129}, "tokens=129, and the model takes at most 128"),
        ({"tokens": 7}, "tokens must be at least 8, got 7"),
        ({"tokens": True}, "expected a whole number for tokens"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"verify": 0}, "verify must be at least 1"),
        ({"pairs": -1}, "pairs must be at least 0"),
        ({"engine": "dask"}, "engine must be 'local' or 'ray', got 'dask'"),
        ({"workers": 2}, "got workers=2: one with engine='local'"),
    ],
)
def test_options_out_of_range_are_refused(
    options: dict[str, Any], message: str, lm: Any, tmp_path: Path
) -> None:
    with pytest.raises(ap.InputError, match=message):
        ap.sweep(lm, TEXTS, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("nowhere.txt", "cannot read nowhere.txt: there is no such file"),
        (7, "expected a file, a folder, .* got int"),
        ({"train": []}, "a data set's split .* got dict"),
        ([], "the corpus list holds no text: it has no documents"),
        (["", " "], "of 2 documents damaged the first is document 0: empty"),
    ],
)
def test_no_corpus_is_refused(corpus: Any, message: str, lm: Any, tmp_path: Path) -> None:
    with pytest.raises(ap.InputError, match=message):
        ap.sweep(lm, corpus, tmp_path / "out")


def test_files_of_another_kind_are_refused(lm: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nhello")
    with pytest.raises(ap.InputError, match=r"expected a corpus in .txt, .jsonl, .parquet, got a"):
        ap.sweep(lm, tmp_path / "a.csv", tmp_path / "out")
    with pytest.raises(ap.InputError, match="in this folder there is no file"):
        ap.sweep(lm, tmp_path, tmp_path / "out")
    pd.DataFrame({"body": ["x"]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ap.InputError, match="has no column 'text': it has body"):
        ap.sweep(lm, tmp_path / "a.parquet", tmp_path / "out")
    found = ap.sweep(lm, tmp_path / "a.parquet", tmp_path / "out", field="body")
    assert found.manifest["corpus"]["documents"] == 1


def test_models_that_cannot_be_swept_are_refused(
    lm: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ap.InputError, match=r"give a \(model, tokenizer\) pair"):
        ap.sweep(lm[0], TEXTS, tmp_path / "out")
    broken = causal()
    with torch.no_grad():
        broken.transformer.h[1].attn.c_attn.bias[3] = math.nan
    with pytest.raises(ap.NonFiniteError, match=r"h\.1\.attn\.c_attn\.bias holds NaN"):
        ap.sweep((broken, tokenizer), TEXTS, tmp_path / "out")
    monkeypatch.setattr(lm[0].config, "is_encoder_decoder", True)
    with pytest.raises(ap.InputError, match="is an encoder-decoder"):
        ap.sweep(lm, TEXTS, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [{"weights": "uniform"}, {"scale": "none"}, {"mask": "none"}])
def test_inside_of_an_edit_it_is_refused(change: dict[str, Any], lm: Any, tmp_path: Path) -> None:
    with ap.edit(lm, **change):
        with pytest.raises(ap.InputError, match="an edit is open on this model, and sweep comp"):
            ap.sweep(lm, TEXTS, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        with pytest.raises(ap.InputError, match=r"an edit is open .* and head_roles computes"):
            ap.head_roles(lm, tokens=5, texts=1)
    with (
        ap.edit(lm[0].transformer, **change),
        pytest.raises(ap.InputError, match="an edit is open"),
    ):
        ap.sweep(lm, TEXTS, tmp_path / "out")
    assert len(ap.head_roles(lm, tokens=5, texts=1)) == 12


def test_a_folder_of_something_else_is_refused(lm: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("a year's work")
    with pytest.raises(ap.InputError, match="holds other files, and no sweep"):
        ap.sweep(lm, TEXTS, tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ap.AttnprobeError, match=r"cannot write to .*thesis.txt"):
        ap.sweep(lm, TEXTS, tmp_path / "thesis.txt" / "out")
    with pytest.raises(ap.InputError, match="there is no sweep in"):
        ap.read_sweep(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ap.InputError, match=r"manifest\.json is damaged"):
        ap.read_sweep(tmp_path)


@pytest.mark.parametrize(("missing", "extra"), [("pyarrow", "parquet"), ("ray", "ray")])
def test_what_is_not_installed_is_said_before_any_work(
    missing: str, extra: str, lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == missing else found(name)
    )
    with pytest.raises(ap.InputError, match=rf"pip install 'attnprobe\[{extra}\]'"):
        ap.sweep(lm, TEXTS, tmp_path / "out", engine="ray" if missing == "ray" else "local")


# Two workers


class Dying(torch.nn.Embedding):
    """Ends the process that runs it, once: as a worker that the system kills."""

    marker: Path
    caller: int

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if os.getpid() != self.caller and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(ids)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, stopped in the end: `sweep` starts it."""
    found = pytest.importorskip("ray")
    found.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield found
    found.shutdown()


@pytest.mark.usefixtures("ray", "small_shards")
def test_two_workers_one_of_them_killed_give_the_same_bit_for_bit(
    tokenizer: Any, tmp_path: Path
) -> None:
    model = causal(torch.float32)
    corpus = [PAGE, *TEXTS, "", b"no text"]
    whole = ap.sweep((model, tokenizer), corpus, tmp_path / "whole", tokens=64, verify=2)
    words = model.transformer.wte
    words.__class__, words.marker, words.caller = Dying, tmp_path / "killed", os.getpid()
    shown: list[Any] = []
    out = tmp_path / "out"
    options = {"tokens": 64, "verify": 2, "engine": "ray", "workers": 2}
    found = ap.sweep((model, tokenizer), corpus, out, **options, progress=shown.append)
    assert words.marker.exists()
    assert files_of(out) == files_of(tmp_path / "whole")
    assert shown[-1].documents == found.manifest["corpus"]["documents"] == len(corpus)
    assert shown[-1].done == shown[-1].total == len(corpus)
    assert found.manifest["corpus"]["tokens"] == whole.manifest["corpus"]["tokens"]
    assert ap.sweep((model, tokenizer), corpus, out, **options).manifest == whole.manifest
    with pytest.raises(ap.InputError, match="workers=3, and Ray has 2 processors"):
        ap.sweep((model, tokenizer), corpus, tmp_path / "3", **options | {"workers": 3})


def test_a_layer_whose_mask_is_another_is_left_out(
    lm: Any, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask is compared once for all layers that are given the same one, not once for all."""
    attention = lm[0].transformer.h[1].attn
    right = attention.forward

    def wrong(states: torch.Tensor, *more: Any, attention_mask: Any, **options: Any) -> Any:
        shown = attention_mask.clone()
        shown[:, :, 3, 1] = False if shown.dtype == torch.bool else -torch.inf
        return right(states, *more, attention_mask=shown, **options)

    monkeypatch.setattr(attention, "forward", wrong)
    texts = [text for text in TEXTS if len(lm[1](text)["input_ids"]) > 4]
    found = ap.sweep(lm, texts, tmp_path / "out")
    assert found.manifest["left_out"].keys() == {"layer 1"}
    assert "mask entries differ" in found.manifest["left_out"]["layer 1"]
    assert set(found.heads["layer"]) == {0}


def test_a_mask_that_layers_share_is_compared_once(
    lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def counted(passed: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        compared.append(passed)
        return disagreement(passed, allowed)

    monkeypatch.setattr("attnprobe.checking.basis.disagreement", counted)
    ap.sweep(lm, TEXTS[:1], tmp_path / "out")  # two layers
    assert len(compared) == 1


# Damaged folders


@pytest.fixture
def stopped(lm: Any, tmp_path: Path, small_shards: None) -> tuple[Path, dict[str, bytes]]:
    """A sweep that was stopped with some shards finished, and what it comes to when it is not."""
    ap.sweep(lm, [PAGE], tmp_path / "whole", tokens=64)
    with pytest.raises(KeyboardInterrupt):
        ap.sweep(lm, [PAGE], tmp_path / "out", tokens=64, progress=stopping(7, KeyboardInterrupt()))
    assert (tmp_path / "out" / "parts" / "000001").is_dir()
    return tmp_path / "out", files_of(tmp_path / "whole")


def overwritten(file: Path) -> None:
    """Other bytes in the middle, the same length: still a file that can be read."""
    content = bytearray(file.read_bytes())
    at = len(content) // 2
    content[at] ^= 0x40
    file.write_bytes(content)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def broken_off(file: Path) -> None:
    file.write_bytes(b"{")


def swapped(file: Path) -> None:
    """That of another shard."""
    file.write_bytes((file.parent.parent / "000000" / file.name).read_bytes())


HARM = (overwritten, emptied, broken_off, swapped, Path.unlink)


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("name", ["sums.safetensors", "pairs.parquet", "shard.json"])
def test_a_damaged_shard_is_told_computed_again_and_never_merged(
    name: str, harm: Any, lm: Any, stopped: tuple[Path, dict[str, bytes]]
) -> None:
    out, wanted = stopped
    before = ap.read_sweep(out).manifest["corpus"]
    harm(out / "parts" / "000001" / name)
    with pytest.warns(UserWarning, match=r"1 shard in .*: damaged and left out, 000001 first"):
        part = ap.read_sweep(out)
    assert part.manifest["corpus"]["shards"] == before["shards"] - 1
    assert part.heads["rows"][0] == part.manifest["corpus"]["tokens"] < before["tokens"]
    with pytest.warns(UserWarning, match=r"000001 is damaged: .* computed again"):
        ap.sweep(lm, [PAGE], out, tokens=64)
    assert files_of(out) == wanted


def test_a_number_changed_in_the_notes_of_a_shard_is_damage(
    stopped: tuple[Path, dict[str, bytes]],
) -> None:
    out, _ = stopped
    file = out / "parts" / "000001" / "shard.json"
    notes = json.loads(file.read_text())
    file.write_text(json.dumps(notes | {"tokens": notes["tokens"] + 1}))
    with pytest.warns(UserWarning, match=r"1 shard in .*: damaged and left out"):
        found = ap.read_sweep(out).manifest["corpus"]
    assert found["shards"] == len([*out.glob("parts/*")]) - 1


def test_a_shard_that_is_a_file_is_damage(
    lm: Any, stopped: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    out, wanted = stopped
    (out / "parts" / "000001").rename(tmp_path / "away")
    (out / "parts" / "000001").write_text("x")
    with pytest.warns(UserWarning, match="000001 is damaged"):
        ap.sweep(lm, [PAGE], out, tokens=64)
    assert files_of(out) == wanted


def test_a_shard_that_is_damaged_while_the_sweep_runs_is_not_merged(
    lm: Any, stopped: tuple[Path, dict[str, bytes]]
) -> None:
    out, wanted = stopped

    harmed: list[Path] = []

    def harming(now: Any) -> None:
        if now.tokens_now and not harmed:
            harmed.append(out / "parts" / "000000" / "sums.safetensors")
            overwritten(harmed[0])

    with pytest.raises(ap.AttnprobeError, match=r"1 shard in .*: damaged while the sweep ran"):
        ap.sweep(lm, [PAGE], out, tokens=64, progress=harming)
    with pytest.warns(UserWarning, match="000000 is damaged"):
        ap.sweep(lm, [PAGE], out, tokens=64)
    assert files_of(out) == wanted


@pytest.mark.parametrize("harm", [overwritten, emptied, broken_off, Path.unlink])
@pytest.mark.parametrize("table", ["heads", "histograms", "distances", "classes", "pairs"])
def test_a_damaged_table_is_refused_and_not_taken_for_finished(
    table: str, harm: Any, lm: Any, plain: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(plain.path, out)
    harm(out / f"{table}.parquet")
    before = files_of(out)
    message = rf"{table}\.parquet.* (damaged|gone).* Delete the folder and run the sweep again"
    found = ap.read_sweep(out)
    with pytest.raises(ap.InputError, match=message):
        getattr(found, table)
    with pytest.raises(ap.InputError, match=message):
        ap.sweep(lm, TEXTS, out)
    assert files_of(out) == before


@pytest.mark.usefixtures("small_shards")
def test_a_damaged_table_is_merged_again_where_the_shards_are_still_there(
    lm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:  # killed between the manifest and the end
        patched.setattr(folder.Folder, "drop_parts", lambda self: None)
        ap.sweep(lm, [PAGE], tmp_path / "out", tokens=64)
    wanted = {k: v for k, v in files_of(tmp_path / "out").items() if not k.startswith("parts")}
    overwritten(tmp_path / "out" / "heads.parquet")
    ap.sweep(lm, [PAGE], tmp_path / "out", tokens=64)
    assert files_of(tmp_path / "out") == wanted


BEGUN: dict[str, Any] = {
    "complete": False,
    "model": {"name": "x", "dtype": "float32"},
    "settings": {"tokens": 8, "value": False, "pairs": 1, "verify": None},
    "corpus": {},
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "it has no complete"),
        ("[]", r"expected an object, and it is \[\]"),
        ("5", "expected an object, and it is 5"),
        ("null", "expected an object, and it is None"),
        ("[" * 100_000, "recursion"),
        ("\xff", "invalid start byte"),
        ('{"complete": true, "model": 5}', "and model is 5"),
        (json.dumps(BEGUN | {"complete": 1}), "complete is 1"),
        (json.dumps(BEGUN | {"model": {"dtype": "x"}}), r"it has no model\.name"),
        (json.dumps(BEGUN | {"settings": BEGUN["settings"] | {"pairs": True}}), "pairs is True"),
        (json.dumps(BEGUN | {"complete": True}), r"it has no corpus\.sha256"),
    ],
)
def test_a_damaged_manifest_is_refused(content: str, message: str, lm: Any, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(content.encode("latin-1"))
    wanted = rf"manifest\.json is damaged: .*{message}.*\. Delete the folder"
    with pytest.raises(ap.InputError, match=wanted):
        ap.read_sweep(tmp_path)
    with pytest.raises(ap.InputError, match=wanted):
        ap.sweep(lm, TEXTS, tmp_path)
    assert [*files_of(tmp_path)] == ["manifest.json"]


def test_a_manifest_with_what_is_looked_up_is_enough(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(BEGUN))
    assert ap.read_sweep(tmp_path).manifest["corpus"]["documents"] == 0


@pytest.mark.parametrize("path", [None, "", 5, b"out", "a\0b", ["out"]])
def test_what_is_no_path_is_refused(path: Any, lm: Any) -> None:
    with pytest.raises(ap.InputError, match="expected the path of a sweep's folder, got"):
        ap.read_sweep(path)
    with pytest.raises(ap.InputError, match="expected the path of a sweep's folder, got"):
        ap.sweep(lm, TEXTS, path)


def test_a_file_is_no_sweep(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    with pytest.raises(ap.InputError, match=r"no sweep in .*: expected a folder, got a file"):
        ap.read_sweep(tmp_path / "a")


@pytest.mark.parametrize("corpus", ["nowhere.txt", 7, [], ["", " "], io.BytesIO(b"  ")])
@pytest.mark.parametrize("out", ["out", "deep/er/out", "there"])
def test_a_refused_sweep_leaves_nothing_behind(
    corpus: Any, out: str, lm: Any, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ap.InputError):
        ap.sweep(lm, corpus, tmp_path / out)
    assert [*tmp_path.rglob("*")] == [tmp_path / "there"]


def test_shards_without_a_manifest_are_not_gone_on_with(
    lm: Any, stopped: tuple[Path, dict[str, bytes]]
) -> None:
    """Nothing tells of which model they are."""
    out, _ = stopped
    (out / "manifest.json").unlink()
    before = files_of(out)
    with pytest.raises(ap.InputError, match="holds other files, and no sweep"):
        ap.sweep(lm, [PAGE], out, tokens=64)
    assert files_of(out) == before

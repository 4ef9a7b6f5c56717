"""What a sweep costs beside plain forwards of the same batches, and how its memory grows.

    python scripts/bench_sweep.py CORPUS               the bundled model, the whole corpus
    python scripts/bench_sweep.py CORPUS --model smollm2 --tokens 200000
    python scripts/bench_sweep.py CORPUS --memory      the peak at 1, 10 and 100 % of the corpus

Shard by shard, the sweep (reading, cutting and tokenizing the texts, the model, the statistics,
writing them) and plain forwards of the same padded batches take turns, so that a machine that
others use too slows down both. A plain forward is the model as it is loaded, logits and all; beside
it stands the same without the layers that make logits, which a sweep does not run. Merging and
writing the tables in the end is counted to the sweep.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_effects import Clock
from real_models import smollm2_path

import attnprobe as ap
from attnprobe.sweeping.folder import Folder
from attnprobe.sweeping.measuring import Settings, measure, without_head
from attnprobe.sweeping.results import TABLES, Merged, parquet
from attnprobe.sweeping.shards import Passage, Shard, passages, shards
from attnprobe.sweeping.sources import source
from attnprobe.sweeping.texts import Text, batch_of, batches, cut

PARTS = (0.01, 0.1, 1.0)
SETTINGS = Settings(tokens=256, value=False, pairs=100, every=None, batch_size=16)


def loaded(name: str) -> ap.LanguageModel:
    return ap.load(smollm2_path() if name == "smollm2" else name)


def texts_of(lm: ap.LanguageModel, shard: Shard) -> list[Text]:
    tokenizer = lm.tokenizer
    return [
        Text.of(tokenizer, *one)
        for passage in shard.passages
        for one in cut(tokenizer, passage, SETTINGS.tokens)
    ]


def cost(name: str, corpus: Path, limit: int | None, headless_too: bool) -> None:
    lm = loaded(name)
    models = [lm.model, without_head(lm).model][: 1 + headless_too]
    ours, plain, headless, finishing = Clock(), Clock(), Clock(), Clock()
    tokens = 0
    with tempfile.TemporaryDirectory() as out:
        folder = Folder(Path(out))
        documents = source(corpus, "text", folder.spool).documents
        measure(
            lm, Shard(0, [Passage("warm", 0, "Once upon a time. " * 99)]), SETTINGS, lambda *_: None
        )
        for shard in shards(documents):
            if limit is not None and tokens >= limit:
                break
            with ours.running():
                found = measure(lm, shard, SETTINGS, lambda *_: None)
                folder.keep(shard, found)
            tokens += found.tokens
            given = [
                batch_of(lm, some, SETTINGS.tokens).inputs
                for some in batches(texts_of(lm, shard), SETTINGS.batch_size)
            ]
            with torch.no_grad():
                for clock, model in zip((plain, headless), models, strict=False):
                    with clock.running():
                        for inputs in given:
                            model(**inputs)
            so_far = f"{tokens} tokens, {ours.processor / plain.processor:.2f} of processor time"
            print(so_far, file=sys.stderr, flush=True)
        with finishing.running():
            merged = Merged(folder)
            settings = {"tokens": SETTINGS.tokens, "value": SETTINGS.value, "pairs": SETTINGS.pairs}
            for table in TABLES:
                folder.write(f"{table}.parquet", parquet(merged.table(table, settings)))
    ours.wall += finishing.wall
    ours.processor += finishing.processor
    size = f"{tokens} tokens, {len(merged.numbers)} shards"
    print(f"{name}, {size}, {torch.get_num_threads()} threads")
    clocks = {"plain forwards": plain, "without logits": headless}
    clocks = dict([*clocks.items()][: len(models)])
    for label, clock in ({"sweep": ours, "(of it, merging)": finishing} | clocks).items():
        speed = tokens / clock.wall
        print(
            f"{label:17} {clock.wall:8.1f} s, {clock.processor:8.1f} s of processor time, "
            f"{speed:8.0f} tokens/s"
        )
    for label, clock in clocks.items():
        print(
            f"sweep / {label}: {ours.wall / clock.wall:.2f}, "
            f"{ours.processor / clock.processor:.2f} of processor time"
        )


def part_of(corpus: Path, share: float) -> Iterator[str]:
    """The first so much of the corpus's characters, in passages, as an iterator gives them."""
    files = [corpus] if corpus.is_file() else sorted(corpus.glob("*.txt"))
    left = share * sum(len(file.read_text(encoding="utf-8")) for file in files)
    for file in files:
        for passage in passages([file.read_text(encoding="utf-8")]):
            if left <= 0:
                return
            yield passage[: int(left) + 1]
            left -= len(passage)


def one_peak(name: str, corpus: Path, share: float) -> None:
    lm = loaded(name)
    before = peak()
    with tempfile.TemporaryDirectory() as out:
        began = time.perf_counter()
        found = ap.sweep(lm, part_of(corpus, share), out)
        seconds = time.perf_counter() - began
    tokens = found.manifest["corpus"]["tokens"]
    print(json.dumps({"tokens": tokens, "seconds": seconds, "before": before, "peak": peak()}))


def peak() -> float:
    """The most memory that this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def memory(name: str, corpus: Path) -> None:
    for share in PARTS:
        command = [sys.executable, __file__, str(corpus), "--model", name, "--share", str(share)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{share:5.0%} of the corpus: {found['tokens']:8} tokens in {found['seconds']:7.1f} s, "
            f"peak {found['peak']:6.0f} MiB (with the model loaded: {found['before']:.0f} MiB)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="a folder of .txt files, or one")
    parser.add_argument("--model", default="bundled", help="bundled, smollm2, or what load takes")
    parser.add_argument("--tokens", type=int, help="stop after so many")
    parser.add_argument("--plain-alone", action="store_true", help="none without logits")
    parser.add_argument("--memory", action="store_true", help="the peaks, each in a new process")
    parser.add_argument("--share", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share is not None:
        one_peak(options.model, options.corpus, options.share)
    elif options.memory:
        memory(options.model, options.corpus)
    else:
        cost(options.model, options.corpus, options.tokens, not options.plain_alone)


if __name__ == "__main__":
    main()

"""What a context of thousands of tokens takes: SmolLM2-135M over the beginning of a book.

python scripts/long_context.py BOOK.txt --tokens 8192
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from real_models import smollm2_path

import attnprobe as ap

T = TypeVar("T")


def timed(what: str, run: Callable[[], T]) -> T:
    """Run it; print the seconds it took and what the process has held at most."""
    start = time.perf_counter()
    made = run()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what:<52} {seconds:8.2f} s   peak {peak:8,.0f} MB", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("book", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)

    lm = timed("load", lambda: ap.load(smollm2_path()))
    assert lm.tokenizer is not None
    ids = lm.tokenizer(given.book.read_text(encoding="utf-8"))["input_ids"][: given.tokens]
    text = lm.tokenizer.decode(ids)
    with torch.no_grad():
        timed("plain forward", lambda: lm.model(torch.tensor([ids])))
    checks = ["mask", "output"]
    report = timed("verify(lm, text), mask and output", lambda: ap.verify(lm, text, checks=checks))
    print(report.summary)
    cap = timed("capture", lambda: ap.capture(lm, text))
    words = cap.words_of(0).words
    at = len(words) - 9
    print(f"{len(words):,} words; the word looked at is {at}, {words[at].label!r}")
    looked = timed("attended, one word, every head", lambda: ap.attended(cap, at))
    print(looked.to_string(index=False))
    span = (at - 60, at + 1)
    timed("heatmap of a span of 61 words", lambda: ap.heatmap(cap, 15, 4, by="word", span=span))
    view = timed(
        "attention_view of a span of 61 words, every head",
        lambda: ap.attention_view(cap, by="word", span=span),
    )
    print(f"{len(view.html) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

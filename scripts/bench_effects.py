"""How long silencing each head in turn takes, beside as many plain forwards of the same text.

One random model of GPT-2 small's size (12 layers of 12 heads, 768 wide), one text of 32 tokens. A
plain forward gives the logits of all tokens, as the loss needs them, and measures nothing. Both
take turns, so that a machine that others use too slows down both; the seconds of processor time say
what they would take without others (with OMP_NUM_THREADS=1, as threads that wait count as well).
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from real_models import gpt2_small_size

import attnprobe as ap

TOKENS = 32
HEADS = [(layer, head) for layer in range(12) for head in range(12)]


class Clock:
    """Seconds by the clock and of processor time, summed over many stretches."""

    def __init__(self) -> None:
        self.wall = self.processor = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add what the block takes."""
        wall, processor = time.perf_counter(), time.process_time()
        yield
        self.wall += time.perf_counter() - wall
        self.processor += time.process_time() - processor


def forwards(lm: ap.LanguageModel, ids: list[int], count: int) -> None:
    given = torch.tensor([ids])
    with torch.no_grad():
        for _ in range(count):
            lm.model(given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--at-once", type=int, default=36, help="heads in one turn")
    parser.add_argument("--heads", type=int, default=len(HEADS), help="only the first so many")
    options = parser.parse_args()
    lm = gpt2_small_size()
    ids = torch.randint(50257, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    forwards(lm, ids, 2)  # warm
    ours, plain = Clock(), Clock()
    heads = HEADS[: options.heads]
    for start in range(0, len(heads), options.at_once):
        part = heads[start : start + options.at_once]
        with ours.running():
            frame = ap.head_effects(lm, [ids], heads=part)
        assert len(frame) == len(part)
        with plain.running():
            forwards(lm, ids, len(part))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{len(heads)} heads, {TOKENS} tokens, {torch.get_num_threads()} threads")
    print(f"head_effects    {ours.wall:7.1f} s, {ours.processor:7.1f} s of processor time")
    print(f"plain forwards  {plain.wall:7.1f} s, {plain.processor:7.1f} s of processor time")
    print(
        f"ratio           {ours.wall / plain.wall:7.2f},   {ours.processor / plain.processor:7.2f}"
    )
    print(f"peak memory     {peak:7.2f} GiB, the model's 0.46 GiB among it")


if __name__ == "__main__":
    main()

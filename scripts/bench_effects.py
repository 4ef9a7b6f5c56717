"""How long silencing each head in turn takes, beside as many plain forwards of the same text.

One random model of GPT-2 small's size (12 layers of 12 heads, 768 wide), one text of 32 tokens. A
plain forward gives the logits of all tokens, as the loss needs them, and measures nothing. Forwards
and trials take turns, so that a machine that others use too slows down both.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from real_models import gpt2_small_size

import attnprobe as ap

TOKENS = 32
HEADS = [(layer, head) for layer in range(12) for head in range(12)]


def seconds_of_effects(lm: ap.LanguageModel, ids: list[int], part: list[tuple[int, int]]) -> float:
    start = time.perf_counter()
    frame = ap.head_effects(lm, [ids], heads=part)
    assert len(frame) == len(part)
    return time.perf_counter() - start


def seconds_of_forwards(lm: ap.LanguageModel, ids: list[int], count: int) -> float:
    given = torch.tensor([ids])
    start = time.perf_counter()
    with torch.no_grad():
        for _ in range(count):
            lm.model(given)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=4, help="in how many parts the heads are run")
    options = parser.parse_args()
    lm = gpt2_small_size()
    ids = torch.randint(50257, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    seconds_of_forwards(lm, ids, 2)  # warm
    effects = forwards = 0.0
    size = -(-len(HEADS) // options.turns)
    for start in range(0, len(HEADS), size):
        part = HEADS[start : start + size]
        effects += seconds_of_effects(lm, ids, part)
        forwards += seconds_of_forwards(lm, ids, len(part))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{len(HEADS)} heads, {TOKENS} tokens, {torch.get_num_threads()} threads")
    print(f"head_effects    {effects:7.1f} s")
    print(f"plain forwards  {forwards:7.1f} s")
    print(f"ratio           {effects / forwards:7.2f}")
    print(f"peak memory     {peak:7.2f} GiB, the model's {4 * 124 / 1024:.2f} GiB among it")


if __name__ == "__main__":
    main()

"""Verify every model at hand, with every kernel and dtype, and print what came of it.

`python scripts/verify_models.py` runs the bundled model, a random model of GPT-2 small's size at
16, 128 and 1,024 tokens, SmolLM2-135M-Instruct and all-MiniLM-L6-v2; `--all` adds float16,
bfloat16 and eager to the two larger ones, which takes several minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator

import torch
import transformers
from real_models import gpt2_small_size, minilm_path, smollm2_path
from torch import Tensor

import attnprobe as ap

SENTENCES = ["The children were playing in the green park, and it rained.", "Once upon a time"]
STORY = " ".join(
    f"On day {day} the children of the house went down to the river and counted {day * 7} boats."
    for day in range(1, 90)
)
KERNELS = ("sdpa", "eager")
DTYPES = ("float32", "float16", "bfloat16")


def entropy_share(cap: ap.Capture) -> float:
    """The mean entropy of the weights as a share of its maximum, log(i + 1) at position i."""
    shares = []
    for layer in range(cap.layers):
        w = ap.weights(cap, layer)[:, 1:]  # (H, T - 1, S); the first word has no choice
        entropy = -torch.special.xlogy(w, w).sum(-1)
        most = torch.arange(2, w.shape[1] + 2, dtype=torch.float64).log()
        shares.append((entropy / most).mean())
    return torch.stack(shares).mean().item()


def biggest_square(cap: ap.Capture) -> int:
    """The number of tensors in a capture that are at least T × S large."""
    tokens = cap.input_ids.shape[1]
    tensors = [
        value for call in cap.calls for value in vars(call).values() if isinstance(value, Tensor)
    ]
    return sum(tensor.shape[-2:] == (tokens, tokens) for tensor in tensors)


def show(name: str, cap: ap.Capture) -> bool:
    """Verify one capture and print its report."""
    start = time.perf_counter()
    report = ap.verify(cap)
    seconds = time.perf_counter() - start
    print(f"\n=== {name}")
    print(report)
    print(
        f"entropy of the weights {entropy_share(cap):.0%} of its maximum; "
        f"{biggest_square(cap)} tensors of T × T held; {seconds:.1f} s"
    )
    return report.passed


def runs(everything: bool) -> Iterator[tuple[str, Callable[[], ap.Capture]]]:
    """The name of each run, and what makes its capture."""

    def loaded(source: str, kernel: str, dtype: str, side: str | None) -> ap.Capture:
        lm = ap.load(source, attn=kernel, dtype=dtype)
        return ap.capture(lm, SENTENCES, padding_side=side)  # type: ignore[arg-type]

    def sized(kernel: str, dtype: str, tokens: int) -> ap.Capture:
        lm = gpt2_small_size(kernel, getattr(torch, dtype))
        assert lm.tokenizer is not None
        return ap.capture(lm, lm.tokenizer.decode(lm.tokenizer(STORY)["input_ids"][:tokens]))

    for kernel in KERNELS:
        for dtype in DTYPES:
            plain = kernel == "sdpa" and dtype == "float32"
            for side in ("left", "right"):
                yield (
                    f"bundled, {kernel}, {dtype}, padded on the {side}",
                    lambda k=kernel, d=dtype, s=side: loaded("bundled", k, d, s),
                )
            if not (plain or everything):
                continue
            for tokens in (16, 128, 1024) if kernel == "sdpa" else (16, 128):
                yield (
                    f"GPT-2 small's size, {kernel}, {dtype}, {tokens} tokens",
                    lambda k=kernel, d=dtype, n=tokens: sized(k, d, n),
                )
            yield (
                f"SmolLM2-135M-Instruct, {kernel}, {dtype}",
                lambda k=kernel, d=dtype: loaded(smollm2_path(), k, d, None),
            )
            yield (
                f"all-MiniLM-L6-v2, {kernel}, {dtype}",
                lambda k=kernel, d=dtype: loaded(minilm_path(), k, d, None),
            )


def main() -> int:
    """Run all, and say how many passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every kernel and dtype of every model")
    transformers.logging.set_verbosity_error()
    passed = [show(name, made()) for name, made in runs(parser.parse_args().all)]
    print(f"\n{sum(passed)} of {len(passed)} verified")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())

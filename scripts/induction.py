"""Find the bundled model's induction heads, silence them, and see what becomes of repeated text.

The recipe is Olsson et al.'s (2022, *In-context Learning and Induction Heads*): on random tokens
that come twice, an induction head looks from each token to the one after its earlier copy, and the
second copy becomes easy to foretell. Silenced, it is not; with as many other heads silenced, drawn
at random, it stays so.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import attnprobe as ap

LENGTH, TEXTS, SHARE = 50, 8, 0.3
"""Tokens in one copy, texts, and the mean weight from which on a head is an induction head."""

Pairs = list[tuple[int, int]]


def repeated(vocabulary: int, seed: int) -> Tensor:
    """Random tokens, each text twice in a row, (TEXTS, 2·LENGTH)."""
    block = torch.randint(
        1, vocabulary, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    return torch.cat([block, block], dim=1)


def after_the_copy(cap: ap.Capture) -> Tensor:
    """Each head's mean weight from a token that comes again to the one after its copy, (L, H)."""
    means = []
    for layer in range(cap.layers):
        weights = torch.stack([ap.weights(cap, layer, text=text) for text in range(len(cap))])
        # Query LENGTH + i repeats token i; the token after its first copy is i + 1.
        found = weights.diagonal(offset=1 - LENGTH, dim1=-2, dim2=-1)[..., 1:]  # (B, H, LENGTH)
        means.append(found.mean(dim=(0, 2)))
    return torch.stack(means)


def loss_by_half(lm: ap.LanguageModel, ids: Tensor) -> tuple[float, float]:
    """The mean next-token loss within the first copy and within the second, in nats."""
    with torch.no_grad():
        logits = lm.model(ids).logits[:, :-1]
    losses = cross_entropy(logits.transpose(1, 2).double(), ids[:, 1:], reduction="none")
    return float(losses[:, : LENGTH - 1].mean()), float(losses[:, LENGTH:].mean())


def silenced(lm: ap.LanguageModel, ids: Tensor, heads: Pairs) -> tuple[float, float]:
    """As `loss_by_half`, with heads silenced."""
    with ap.edit(lm, heads=heads, head_output="zero"):
        return loss_by_half(lm, ids)


def trial(draws: int, seed: int) -> dict[str, list[tuple[Pairs, float, float]]]:
    """Which heads were silenced, and the loss in each half: with none, induction heads, others."""
    lm = ap.load("bundled")
    ids = repeated(lm.model.config.vocab_size, seed)
    share = after_the_copy(ap.capture(lm, ids))
    heads: Pairs = [(layer, head) for layer, head in (share > SHARE).nonzero().tolist()]
    rest: Pairs = [(layer, head) for layer, head in (share <= SHARE).nonzero().tolist()]
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        sorted(rest[at] for at in torch.randperm(len(rest), generator=generator)[: len(heads)])
        for _ in range(draws)
    ]
    return {
        "none": [([], *loss_by_half(lm, ids))],
        "induction heads": [(heads, *silenced(lm, ids, heads))],
        "others at random": [(others, *silenced(lm, ids, others)) for others in drawn],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{TEXTS} texts of {LENGTH} random tokens, twice; mean loss in nats")
    print(f"{'silenced':18}{'first copy':>12}{'second copy':>13}  heads")
    for what, runs in trial(options.draws, options.seed).items():
        for heads, first, second in runs:
            named = " ".join(f"{layer}.{head}" for layer, head in heads)
            print(f"{what:18}{first:12.3f}{second:13.3f}  {named}")


if __name__ == "__main__":
    main()

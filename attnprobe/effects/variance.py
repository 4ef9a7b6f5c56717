"""Why q·k is divided by √d_k: its variance, in a model's heads and of random vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from attnprobe.capturing import Texts, forward
from attnprobe.checking.basis import basis_of
from attnprobe.effects.predicting import refuse_encoder_decoder, unpadded
from attnprobe.errors import InputError, ModelError
from attnprobe.formula import TILE_BYTES, scores, softmax
from attnprobe.masks import Allowing, MaskRule
from attnprobe.models import as_language_model
from attnprobe.records import AttentionCall, seeded, several, whole

SIZES = (8, 16, 32, 64, 128, 256, 512)
"""The head sizes that random vectors are drawn in."""

VECTORS = 512
"""How many random queries there are, and as many keys."""

LARGEST = 2**14
"""The largest head size that random vectors are drawn in: they take 134 MB."""

COLUMNS = (
    *("source", "layer", "head", "d_k", "pairs", "variance", "expected", "ratio"),
    *("variance_scaled", "entropy", "entropy_unscaled"),
)


def scale_variance(
    lm: object,
    text: Texts,
    *,
    sizes: Sequence[int] = SIZES,
    seed: int = 0,
) -> pd.DataFrame:
    """The variance of q·k in each head of a model, and of random vectors of several sizes.

    "Assume that the components of q and k are independent random variables with mean 0 and
    variance 1. Then their dot product, q·k = Σ q_i k_i, has mean 0 and variance d_k." (Vaswani et
    al. 2017, *Attention Is All You Need*, footnote 4.) Divided by √d_k it has variance 1 whatever
    d_k is. So it is with random vectors, drawn here from a normal distribution; a trained head's
    components are neither independent nor of variance 1, and the ratio says how far from that.

    | column | what it is, over the pairs of a query and a key that it may attend to |
    |---|---|
    | `source` | "model" or "random" |
    | `layer`, `head`, `d_k` | which head, and its size; random vectors have no layer and head |
    | `pairs` | how many there are |
    | `variance` | of q·k, before any scale |
    | `expected` | mean of abs(q)²·abs(k)²/d_k: of vectors as long, in random directions |
    | `ratio` | variance / expected |
    | `variance_scaled` | of q·k times the model's own factor; of random ones 1/√d_k |
    | `entropy` | of softmax(q·k times that factor), in nats, mean over queries |
    | `entropy_unscaled` | of softmax(q·k), in nats, mean over queries |

    The entropies leave out what some models add to the formula: a softcap, a bias, sinks.

    Args:
        lm: what `load` returns, a (model, tokenizer) pair, or a bare model with token ids; no
            encoder-decoder.
        text: one or several, as `capture` takes them. They run one by one, so nothing is padded.
        sizes: d_k of the random vectors, from 1 to `LARGEST` (16,384); `VECTORS` queries and as
            many keys of each.
        seed: of the random vectors.

    Returns:
        The columns above: layer and head Int64, d_k and pairs int64, the rest float64. First the
        model's heads, then the random vectors.

    Raises:
        InputError: as `capture`; sizes or a seed that are none.
        ModelError: an encoder-decoder; attention that is not seen, or none; as `capture`.
        NonFiniteError: as `capture`.
    """
    wanted = _sizes(sizes)
    generator = torch.Generator().manual_seed(seeded(seed))
    layers = _of_model(lm, text)
    rows = [
        {"source": "model", "layer": layer, "head": head, **row}
        for layer in sorted(layers)
        for head, row in enumerate(layers[layer].rows())
    ]
    for size in wanted:
        query, key = torch.randn(2, 1, 1, VECTORS, size, dtype=torch.float64, generator=generator)
        moments = _Moments(size, size**-0.5)
        moments.add(query, key, MaskRule(VECTORS, VECTORS, causal=False))
        rows += [{"source": "random", "layer": None, "head": None, **row} for row in moments.rows()]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype({"layer": "Int64", "head": "Int64"})


def _sizes(sizes: object) -> list[int]:
    """Head sizes that can be drawn.

    Raises:
        InputError: something else.
    """
    if not several(sizes):
        raise InputError(f"expected a list of sizes, such as [8, 64]; got {sizes!r}")
    wanted = [whole(size, "sizes") for size in sizes]
    if not wanted or min(wanted) < 1 or max(wanted) > LARGEST:
        raise InputError(f"expected sizes from 1 to {LARGEST:,}, got {wanted}")
    return wanted


class _Moments:
    """What is summed over the pairs of one layer, head by head."""

    def __init__(self, head_size: int, scale: float) -> None:
        self.head_size = head_size
        self.scale = scale
        self.sums: dict[str, Tensor] = {}  # (H,) each

    def add(self, query: Tensor, key: Tensor, rule: Allowing) -> None:
        """Queries, (1, H, T, D), and keys, (1, Hkv, S, D), of one text; float64."""
        heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
        squares = key.square().sum(-1).repeat_interleave(heads // key.shape[1], 1)  # (1, H, S)
        rows = max(1, TILE_BYTES // (8 * heads * keys))
        for start in range(0, queries, rows):
            stop = min(start + rows, queries)
            q = query[:, :, start:stop]
            allowed = rule.allowed(start, stop, keys=keys, device=q.device)  # (1, 1, t, S)
            raw = scores(q, key, 1.0)  # (1, H, t, S)
            lengths = q.square().sum(-1)[..., None] * squares[:, :, None]  # |q|²|k|²
            counted = allowed.expand_as(raw)
            self._add("pairs", counted.double())
            self._add("rows", counted.any(-1).double())
            for name, one in (("raw", raw), ("square", raw.square()), ("lengths", lengths)):
                self._add(name, one.where(counted, 0.0))
            for name, scale in (("entropy", self.scale), ("entropy_unscaled", 1.0)):
                weights = softmax((raw * scale).masked_fill(~allowed, -torch.inf))
                self._add(name, torch.special.entr(weights))

    def _add(self, name: str, values: Tensor) -> None:
        """(1, H, t) or (1, H, t, S), summed head by head."""
        total = values.flatten(2).sum((0, 2)).cpu()
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def rows(self) -> Iterator[dict[str, Any]]:
        """The columns from `d_k` on, head by head."""
        pairs, rows = self.sums["pairs"], self.sums["rows"]
        variance = self.sums["square"] / pairs - (self.sums["raw"] / pairs).square()
        expected = self.sums["lengths"] / pairs / self.head_size
        columns = {
            "variance": variance,
            "expected": expected,
            "ratio": variance / expected,
            "variance_scaled": variance * self.scale**2,
            "entropy": self.sums["entropy"] / rows,
            "entropy_unscaled": self.sums["entropy_unscaled"] / rows,
        }
        for head, count in enumerate(pairs):
            numbers = {name: float(column[head]) for name, column in columns.items()}
            yield {"d_k": self.head_size, "pairs": int(count), **numbers}


def _of_model(lm: object, text: Texts) -> dict[int, _Moments]:
    """By layer, over all texts."""
    lm = as_language_model(lm)
    refuse_encoder_decoder(lm.model)
    layers: dict[int, _Moments] = {}

    def take(call: AttentionCall) -> None:
        if call.kind == "self":
            own = _Moments(call.query.shape[-1], call.expected_scaling * call.scaled_before)
            query, key = call.query.double() / call.scaled_before, call.key.double()
            layers.setdefault(call.layer, own).add(query, key, basis_of(call).rule)

    for ids in unpadded(lm, text):
        cap = forward(lm, ids, None, None, take)
        if cap.unseen:
            raise ModelError(f"{type(lm.model).__name__}: {cap.unseen[0]}")
    return layers

"""The known roles of heads, by the standard recipe of repeated random tokens: `head_roles`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attnprobe.capturing import capture
from attnprobe.errors import InputError
from attnprobe.hooks import refuse_replaced
from attnprobe.models import as_language_model
from attnprobe.recompute import Attention
from attnprobe.records import Capture, LanguageModel, seeded, whole

ROLES = ("previous", "duplicate", "induction")
"""The scores, and the names of the roles."""


def head_roles(
    lm: object,
    *,
    tokens: int = 50,
    texts: int = 8,
    seed: int = 0,
    first: bool | int = True,
    threshold: float = 0.4,
) -> pd.DataFrame:
    """Which heads look at the token before, at an earlier copy, and behind it.

    Random tokens say nothing; given twice in a row, they show what a head does by position and by
    equality alone: the recipe of Olsson et al. 2022 (*In-context Learning and Induction Heads*),
    as Wang et al. 2023 (*Interpretability in the Wild*) and TransformerLens use it. Each text is

        [first] x_0 … x_{n-1} x_0 … x_{n-1}

    with n different tokens x, drawn evenly from the vocabulary without its special tokens. A score
    is a mean weight, over the texts and these rows i, with positions counted from x_0:

    | score | from i to | rows |
    |---|---|---|
    | `previous` | i - 1 | 1 ≤ i < 2n: both copies |
    | `duplicate` | i - n | n ≤ i < 2n: the second copy |
    | `induction` | i - n + 1 | n ≤ i < 2n: the second copy |

    Published scores differ in n, in whether a first token stands before (many heads rest on it, so
    that scores are lower without), and in which rows are averaged.

    Args:
        lm: what `load` returns, a (model, tokenizer) pair, or a bare model; causal.
        tokens: n, at least 2.
        texts: how many, as one batch.
        seed: of torch's generator on the CPU: the same tokens each time.
        first: whether the text begins with the tokenizer's BOS, or, where it has none, the config's
            (for a model with neither, its EOS; else nothing stands there); or a token id.
        threshold: from which score on a head gets a role: that of its largest score. 0.4 is a
            common choice, and no more than that.

    Returns:
        Columns layer, head, previous, duplicate, induction (float64, 0 to 1) and role, which is ""
        below the threshold. `frame.attrs` holds tokens, texts, seed, first (the id or None),
        threshold and model.

    Raises:
        InputError: a model that is not causal, or an encoder-decoder; too few different tokens in
            its vocabulary; a text longer than its positions; an option out of its range; layers
            whose weights would not be the model's own; an edit that is open on the model.
        ModelError, NonFiniteError: as `capture`.
    """
    given = as_language_model(lm)
    count, number = whole(tokens, "tokens"), whole(texts, "texts")
    if count < 2 or number < 1:
        raise InputError(f"expected tokens ≥ 2 and texts ≥ 1, got {count} and {number}")
    number_given = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not number_given or not 0 <= threshold <= 1:
        raise InputError(f"expected a threshold from 0 to 1, as scores are; got {threshold!r}")
    refuse_replaced(given.model, "head_roles")
    start = _first(given, first)
    ids = _repeated(_vocabulary(given), count, number, seed, start)
    cap = capture(given, ids)
    if cap.target is not None or not cap.causal:
        raise InputError(
            f"expected a causal model, whose heads can look back only; {given.name or 'this one'} "
            "is none"
        )
    frame = pd.concat([_of_layer(cap, one, count) for one in range(cap.layers)], ignore_index=True)
    scores = frame[list(ROLES)].to_numpy()
    best = scores.argmax(1)
    frame["role"] = np.where(scores.max(1) >= threshold, np.array(ROLES, object)[best], "")
    frame.attrs |= {"tokens": count, "texts": number, "seed": seed, "first": start}
    frame.attrs |= {"threshold": threshold, "model": given.name}
    return frame


def _of_layer(cap: Capture, layer: int, n: int) -> pd.DataFrame:
    """The scores of one layer's heads."""
    heads = list(range(cap.call(layer).heads))
    total = np.zeros((len(ROLES), len(heads)))
    for text in range(len(cap)):
        weights = Attention.of(cap, layer, heads, text).weights[:, -2 * n :, -2 * n :]
        second = weights[:, n:]  # (h, n, 2n)
        sums = (
            weights.diagonal(-1, 1, 2).mean(-1),
            second.diagonal(0, 1, 2).mean(-1),
            second.diagonal(1, 1, 2).mean(-1),
        )
        total += torch.stack(sums).cpu().numpy()
    scores = dict(zip(ROLES, total / len(cap), strict=True))
    return pd.DataFrame({"layer": layer, "head": heads} | scores)


def _repeated(ids: Tensor, n: int, texts: int, seed: int, first: int | None) -> Tensor:
    """The texts, (texts, 2n) or one more, int64."""
    if len(ids) < n:
        raise InputError(
            f"expected a vocabulary of {n} different tokens, got {len(ids)}: give fewer tokens"
        )
    generator = torch.Generator().manual_seed(seeded(seed))
    orders = [torch.randperm(len(ids), generator=generator) for _ in range(texts)]
    copies = torch.stack([ids[order[:n]] for order in orders])
    before = copies.new_full((texts, 0 if first is None else 1), first or 0)
    return torch.cat([before, copies, copies], 1)


def _vocabulary(lm: LanguageModel) -> Tensor:
    """The ids that are no special token, of those that both the model and the tokenizer know."""
    model: Any = lm.model
    size: int = model.get_input_embeddings().num_embeddings
    special: set[int] = set()
    if lm.tokenizer is not None:
        size, special = min(size, len(lm.tokenizer)), set(lm.tokenizer.all_special_ids)
    return torch.tensor([one for one in range(size) if one not in special])


def _first(lm: LanguageModel, first: bool | int) -> int | None:
    """The id that texts begin with, or None."""
    if first is False:
        return None
    if first is not True:
        return whole(first, "first")
    config: Any = lm.model.config
    sources = [lm.tokenizer] if lm.tokenizer is not None else []
    for name in ("bos_token_id", "eos_token_id"):
        for source in (*sources, config):
            found = getattr(source, name, None)
            found = found[0] if isinstance(found, list) and found else found
            if isinstance(found, int):
                return found
    return None

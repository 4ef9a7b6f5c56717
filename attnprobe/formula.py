"""softmax(QKᵀ/√d_k + M)V in float64, a tile of query rows at a time.

Pure torch: no transformers, no hooks. The functions take any float dtype and compute in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.masks import Allowing
from attnprobe.rounding import Arithmetic, bounds, by_key_head, score_error
from attnprobe.terms import PLAIN, Terms

TILE_BYTES = 4 * 2**20
"""The size of one float64 tile of scores that the computation aims at, in bytes."""

Weigh = Callable[[Tensor, Tensor | None, int], Tensor]
"""Makes weights of masked scores (B, H, t, K), of the sinks (…, 1) or None, and of the number of
the first of these rows."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Rows `start` to `stop` of one attention call, over the first K keys: those they can reach.

    All float64. `seen` is False for a row that may attend to no key: it has no meaning, and its
    weights and output are 0 here.
    """

    start: int
    stop: int
    seen: Tensor  # (B or 1, 1, t) bool
    scores: Tensor  # (B, H, t, K): scaled, capped, with bias, masked with -inf
    weights: Tensor  # (B, H, t, K)
    output: Tensor  # (B, H, t, Dv)
    weights_bound: Tensor | None = None  # (B, H, t, K)
    output_bound: Tensor | None = None  # (B, H, t, Dv)


def scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Scaled scores q·k·scaling, without a mask, in float64.

    Args:
        query: (B, H, T, D).
        key: (B, Hkv, S, D); each key head serves H/Hkv query heads in a row.

    Returns:
        (B, H, T, S).
    """
    return by_key_head(query.double(), key.double().transpose(-1, -2)) * scaling


def softmax(masked: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax along the last axis; a row of nothing but -inf gives zeros.

    With `sinks`, a score beside each row, (…, 1), whose share is left out.
    """
    top = masked.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    exp = torch.exp(masked - top)
    total = exp.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return exp / total.masked_fill(total == 0, 1.0)


def capped(scores: Tensor, terms: Terms) -> Tensor:
    """Scores after the softcap, where there is one."""
    return scores if terms.softcap is None else terms.softcap * torch.tanh(scores / terms.softcap)


def tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Allowing,
    scaling: float,
    terms: Terms = PLAIN,
    *,
    rounding: Arithmetic | None = None,
    weigh: Weigh | None = None,
    rows: slice | None = None,
    tile_bytes: int = TILE_BYTES,
) -> Iterator[Tile]:
    """Compute one attention call a tile of query rows at a time; past the diagonal, nothing.

    Args:
        query: (B, H, T, D).
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, Dv).
        rule: which keys each query may attend to.
        scaling: the factor on q·k, 1/√D by the formula.
        terms: what the model adds to the formula.
        rounding: a kernel's arithmetic; given, every tile carries bounds on that kernel's error.
        weigh: what makes weights of the scores in softmax's place, for who changes the formula; the
            bounds are softmax's.
        rows: which query rows, a stretch; all of them by default.
        tile_bytes: the size of a float64 tile of scores to aim at.

    Yields:
        The tiles from the first row to the last. No two share memory.
    """
    batch, heads, queries, _ = query.shape
    begin, end, _ = (rows or slice(None)).indices(queries)
    query = query[:, :, begin:end].double()
    key, value = key.double(), value.double()
    step = max(1, tile_bytes // (8 * batch * heads * key.shape[-2]))
    for start in range(begin, end, step):
        stop = min(start + step, end)
        allowed = rule.allowed(start, stop, device=query.device)  # (B, 1, t, K)
        reach = allowed.shape[-1]
        q, k, v = query[:, :, start - begin : stop - begin], key[:, :, :reach], value[:, :, :reach]
        bias = terms.bias_of(start, stop, reach)
        s = capped(scores(q, k, scaling), terms)  # (B, H, t, K)
        masked = (s if bias is None else s + bias).masked_fill(~allowed, -torch.inf)
        sinks = terms.sinks_of(start, stop)
        w = weigh(masked, sinks, start) if weigh else softmax(masked, sinks)
        o = by_key_head(w, v)  # (B, H, t, Dv)
        seen = allowed.any(-1)  # (B, 1, t)
        limits: tuple[Tensor | None, Tensor | None] = (None, None)
        if rounding is not None:
            eps = score_error(q, k, s, bias, sinks, scaling, terms.softcap, allowed, rounding)
            limits = bounds(eps, w, o, v, allowed, rounding)
        yield Tile(start, stop, seen, masked, w, o, *limits)

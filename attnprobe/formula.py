"""softmax(QKᵀ/√d_k + M)V in float64, a tile of query rows at a time, and a bound on its rounding.

Pure torch: no transformers, no hooks. The functions take any float dtype and compute in float64.

The bound
---------
How far may a kernel's result stand from the exact one, if the kernel is right? Write `u` for the
unit roundoff of the accumulator, `γ(n) = nu / (1 - nu)` for n roundings (Higham, *Accuracy and
Stability of Numerical Algorithms*, 2nd ed., Lemma 3.1), n for the number of keys a row may attend
to. Everything below is worst case, for any order of summation; nothing is fitted.

1. Scores. A dot product of length d, scaled, is off by at most γ(d + 8)·|scaling|·|q|·|k|; each
   time a score is stored, it is rounded with the unit `u_s` of the dtype that holds it; softmax
   subtracts the row's largest score, and may change to base 2, with a relative rounding of what it
   subtracts. Together: |ŝ_j - s_j| ≤ ε_j.
2. Softmax. An exponential that is right to 20 ulp, a sum of n terms, and a rescaling for each
   further block of keys make a relative error of at most θ in every numerator and in the
   denominator. Perturbed scores change weight j by a factor of at most exp(ε_j)·Σ_k w_k exp(ε_k)
   up, and by its inverse down (Jensen). This replaces the first-order argument of Blanchard,
   Higham & Higham, *Accurately computing the log-sum-exp and softmax functions*, IMA J. Numer.
   Anal. 41 (2021), as half-precision scores are not always small perturbations.
3. Weights are stored with unit `u_w`, and vanish below the smallest number of their dtype.
4. A V is a sum of n products: γ(n) of Σ_j w_j |v_j|; the output is stored with unit `u_w`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.masks import MaskRule

TILE_BYTES = 4 * 2**20
"""The size of one float64 tile of scores that the computation aims at, in bytes."""

EXP_ULPS = 20
"""The largest error that torch states for any of its vectorised exponentials (`exp_u20`)."""

BLOCK_KEYS = 64
"""The fewest keys that fused kernels take in before they rescale what they have summed."""


@dataclass(frozen=True)
class Arithmetic:
    """How a kernel rounds: unit roundoffs (half the spacing of the numbers just above 1).

    Attributes:
        storage: of the dtype that holds query, key, value, weights and output.
        accumulate: of the sums inside a kernel.
        scores: of the dtype that the scores pass through between q·k and softmax.
        operands: of what a matrix product reads, where that is less than `storage` (TF32); else 0.
        tiny: what a stored weight may lose by underflow, absolute.
        blocked: softmax goes over the keys in blocks and rescales, as fused kernels do.
    """

    storage: float
    accumulate: float
    scores: float
    operands: float
    tiny: float
    blocked: bool


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half of the dtype's machine epsilon: 2⁻²⁴ for float32, 2⁻¹¹ for float16, 2⁻⁸ for bfloat16."""
    return torch.finfo(dtype).eps / 2


def arithmetic(dtype: torch.dtype, kernel: str) -> Arithmetic:
    """The arithmetic of a kernel that gets operands of a dtype.

    Half-precision kernels accumulate in float32. `eager` (plain matmul, softmax, matmul) also
    stores the scores in the operands' dtype; every fused kernel keeps them in its accumulator.
    """
    storage = unit_roundoff(dtype)
    accumulate = min(storage, unit_roundoff(torch.float32))
    reduced = {"high": 2.0**-10, "medium": 2.0**-8}  # TF32 (cut off, not rounded), bfloat16
    operands = reduced.get(torch.get_float32_matmul_precision(), 0.0)
    eager = "eager" in kernel
    info = torch.finfo(dtype)
    # float16 keeps its subnormals everywhere; the wider dtypes may be flushed to zero.
    tiny = info.smallest_normal * info.eps if dtype == torch.float16 else info.smallest_normal
    return Arithmetic(
        storage=storage,
        accumulate=accumulate,
        scores=storage if eager else accumulate,
        operands=operands if dtype == torch.float32 else 0.0,
        tiny=tiny,
        blocked=not eager,
    )


def gamma(n: int | Tensor, unit: float) -> float | Tensor:
    """γ(n) = n·u / (1 - n·u): the most that n roundings of unit u can do, relative."""
    return n * unit / (1 - n * unit)


@dataclass(frozen=True, eq=False)
class Tile:
    """Rows `start` to `stop` of one attention call, over the first K keys: those they can reach.

    All float64. `seen` is False for a row that may attend to no key: it has no meaning, and its
    weights and output are 0 here.
    """

    start: int
    stop: int
    seen: Tensor  # (B or 1, 1, t) bool
    scores: Tensor  # (B, H, t, K): scaled, masked with -inf
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
    return _by_key_head(query.double(), key.double().transpose(-1, -2)) * scaling


def softmax(masked: Tensor) -> Tensor:
    """Softmax along the last axis; a row of nothing but -inf gives zeros."""
    top = masked.amax(-1, keepdim=True)
    exp = torch.exp(masked - top.nan_to_num(neginf=0.0))
    total = exp.sum(-1, keepdim=True)
    return exp / total.masked_fill(total == 0, 1.0)


def attention(query: Tensor, key: Tensor, value: Tensor, rule: MaskRule, scaling: float) -> Tensor:
    """softmax(QKᵀ·scaling + M)V in float64, (B, T, H, Dv): heads last, as kernels return it."""
    batch, heads, queries, _ = query.shape
    output = query.new_empty(batch, queries, heads, value.shape[-1], dtype=torch.float64)
    for tile in tiles(query, key, value, rule, scaling):
        output[:, tile.start : tile.stop] = tile.output.transpose(1, 2)
    return output


def tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: MaskRule,
    scaling: float,
    *,
    rounding: Arithmetic | None = None,
    tile_bytes: int = TILE_BYTES,
) -> Iterator[Tile]:
    """Compute one attention call a tile of query rows at a time; past the diagonal, nothing.

    Args:
        query: (B, H, T, D).
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, Dv).
        rule: which keys each query may attend to.
        scaling: the factor on q·k, 1/√D by the formula.
        rounding: a kernel's arithmetic; given, every tile carries bounds on that kernel's error.
        tile_bytes: the size of a float64 tile of scores to aim at.

    Yields:
        The tiles from the first row to the last.
    """
    batch, heads, queries, _ = query.shape
    query, key, value = query.double(), key.double(), value.double()
    rows = max(1, tile_bytes // (8 * batch * heads * key.shape[-2]))
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        allowed = rule.allowed(start, stop, device=query.device)  # (B, 1, t, K)
        reach = allowed.shape[-1]
        q, k, v = query[:, :, start:stop], key[:, :, :reach], value[:, :, :reach]
        s = scores(q, k, scaling)  # (B, H, t, K)
        masked = s.masked_fill(~allowed, -torch.inf)
        w = softmax(masked)
        o = _by_key_head(w, v)  # (B, H, t, Dv)
        seen = allowed.any(-1)  # (B, 1, t)
        bounds: tuple[Tensor | None, Tensor | None] = (None, None)
        if rounding is not None:
            size = abs(scaling) * _by_key_head(
                q.norm(dim=-1, keepdim=True), k.norm(dim=-1)[..., None, :]
            )  # (B, H, t, K): |q||k|, at least Σ|q||k| over the head's components
            bounds = _bounds(s, size, w, o, v, allowed, query.shape[-1], rounding)
        yield Tile(start, stop, seen, masked, w, o, *bounds)


def _bounds(
    s: Tensor,
    size: Tensor,
    w: Tensor,
    o: Tensor,
    v: Tensor,
    allowed: Tensor,
    head_size: int,
    r: Arithmetic,
) -> tuple[Tensor, Tensor]:
    """Steps 1 to 4 of the module's docstring: the bounds of a tile's weights and output."""
    # The float64 reference rounds too: charge its own unit along with the kernel's.
    u = r.accumulate + unit_roundoff(torch.float64)
    n = allowed.sum(-1, keepdim=True)  # (B, 1, t, 1): keys a row may attend to
    top = (s.abs() * allowed).amax(-1, keepdim=True)  # (B, H, t, 1)

    product = (gamma(head_size + 8, u) + 2 * r.operands + r.operands**2) * size
    stored = gamma(2, r.scores) * (s.abs() + product)
    shifted = gamma(3, u) * (s.abs() + top)
    eps = (product + stored + shifted).masked_fill(~allowed, 0.0)  # (B, H, t, K)

    rescalings = (n - 1).clamp(min=0) // BLOCK_KEYS if r.blocked else torch.zeros_like(n)
    exp_error = 2 * EXP_ULPS * u
    theta = gamma(n + 2, u) + (1 + rescalings) * (exp_error + u)  # (B, 1, t, 1)
    # Products of factors near 1 as sums of logarithms, which keep their digits in float64 as well.
    row = (
        torch.log1p((w * torch.expm1(eps)).sum(-1, keepdim=True))
        + torch.log1p(theta)
        - torch.log1p(-theta)
        + math.log1p(r.storage + r.operands)
    )  # (B, H, t, 1)
    weights_bound = w * torch.expm1(eps + row) + r.tiny * allowed  # (B, H, t, K)

    summed = gamma(n + rescalings + 2, u) + r.operands  # (B, 1, t, 1)
    error = _by_key_head(weights_bound * (1 + summed) + w * summed, v.abs())  # (B, H, t, Dv)
    output_bound = error + r.storage * (o.abs() + error) + r.tiny
    return weights_bound, output_bound


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, rounding: Arithmetic
) -> tuple[Tensor, Tensor]:
    """x·W + b in float64, and the bound on a kernel's error in it.

    Args:
        x: (..., E).
        weight: (E, F).
        bias: (F,) or None.

    Returns:
        The product and the bound, both (..., F). The bound charges γ(E + 2) for the sum and two
        roundings of the stored result: after the product and after the bias.
    """
    x, weight = x.double(), weight.double()
    y = x @ weight
    size = x.norm(dim=-1, keepdim=True) * weight.norm(dim=0)  # (..., F): at least |x||W|
    if bias is not None:
        y = y + bias.double()
        size = size + bias.double().abs()
    u = rounding.accumulate + unit_roundoff(torch.float64)
    inside = (gamma(weight.shape[0] + 2, u) + 2 * rounding.operands) * size
    stored = gamma(2, rounding.storage) * (size if bias is not None else y.abs() + inside)
    return y, inside + stored + rounding.tiny


def _by_key_head(left: Tensor, right: Tensor) -> Tensor:
    """left @ right where each of right's Hkv heads serves H/Hkv of left's heads in a row.

    (B, H, t, K) @ (B, Hkv, K, N) -> (B, H, t, N), without repeating right.
    """
    batch, heads, rows, inner = left.shape
    groups = right.shape[1]
    grouped = left.reshape(batch, groups, heads // groups * rows, inner)
    return (grouped @ right).view(batch, heads, rows, right.shape[-1])

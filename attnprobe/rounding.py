"""How far rounding may take a right kernel from the exact result: bounds that are derived.

How far may a kernel's result stand from the exact one, if the kernel is right? Write `u` for the
unit roundoff of the accumulator, `γ(n) = nu / (1 - nu)` for n roundings (Higham, *Accuracy and
Stability of Numerical Algorithms*, 2nd ed., Lemma 3.1), n for the number of keys a row may attend
to. Everything below is worst case, in any order of summation; nothing is fitted. What it takes for
granted of a kernel stands in `Arithmetic`, `EXP_ULPS` and `BLOCK_KEYS`.

1. Scores. A dot product of length d, scaled, is off by at most γ(d + 8)·|scaling|·|q|·|k|; each
   time a score is stored, it is rounded with the unit `u_s` of the dtype that holds it; softmax
   subtracts the row's largest score, and may change to base 2, with a relative rounding of what it
   subtracts. Products and operands below the smallest normal number may be flushed to zero.
   Together: |ŝ_j - s_j| ≤ ε_j. A softcap, c·tanh(s/c), passes no more than the error it is given,
   as tanh is 1-Lipschitz, and adds three roundings and a tanh right to 20 ulp; a bias adds one
   rounding of the sum. A sink is one more score, that is only subtracted from.
2. Softmax. An exponential that is right to 20 ulp, a sum of n terms, and a rescaling for each
   further block of keys make a relative error of at most θ in every numerator and in the
   denominator. Perturbed scores change weight j by a factor of at most exp(ε_j)·Σ_k w_k exp(ε_k)
   up, and by its inverse down (Jensen). This replaces the first-order argument of Blanchard,
   Higham & Higham, *Accurately computing the log-sum-exp and softmax functions*, IMA J. Numer.
   Anal. 41 (2021), as half-precision scores are not always small perturbations.
3. Weights are stored with unit `u_w`, and vanish below the smallest number of their dtype.
4. A V is a sum of n products: γ(n) of Σ_j w_j |v_j|, and what products and operands lose where they
   are flushed to zero; the output is stored with unit `u_w`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

EXP_ULPS = 20
"""The largest error that torch states for any of its vectorised exponentials (`exp_u20`); those of
tanh are smaller."""

BLOCK_KEYS = 64
"""The fewest keys that fused kernels take in before they rescale what they have summed."""


FUSED = ("sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""transformers' names of the kernels that never store the scores."""

OWN = "eager (own code)"
"""The name here of what a model computes by plain torch calls of its own."""


@dataclass(frozen=True)
class Arithmetic:
    """How a kernel rounds: unit roundoffs (half the spacing of the numbers just above 1).

    Attributes:
        storage: of the dtype that holds query, key, value, weights and output.
        accumulate: of the sums inside a kernel.
        scores: of the dtype that the scores pass through between q·k and softmax.
        operands: of what a matrix product reads, where that is less than `storage` (TF32); else 0.
        tiny: what a stored number may lose by underflow, absolute.
        tiny_accumulate: the same inside a kernel, where numbers below the smallest normal one may
            be flushed to zero.
        blocked: softmax goes over the keys in blocks and rescales, as fused kernels do.
    """

    storage: float
    accumulate: float
    scores: float
    operands: float
    tiny: float
    tiny_accumulate: float
    blocked: bool


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half of the dtype's machine epsilon: 2⁻²⁴ for float32, 2⁻¹¹ for float16, 2⁻⁸ for bfloat16."""
    return torch.finfo(dtype).eps / 2


def operand_unit(dtype: torch.dtype, device: torch.device) -> float:
    """With what unit torch rounds a matrix product's operands here and now; 0 if it does not.

    It does so for float32 where the user has allowed TF32 or bfloat16 inside.
    """
    if dtype != torch.float32:
        return 0.0
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    # TF32 is cut off, not rounded.
    return {"tf32": 2.0**-10, "bf16": 2.0**-8}.get(backend.matmul.fp32_precision, 0.0)


def arithmetic(dtype: torch.dtype, kernel: str, operands: float = 0.0) -> Arithmetic:
    """The arithmetic of a kernel that gets operands of a dtype.

    Half-precision kernels accumulate in float32. `eager` (plain matmul, softmax, matmul) also
    stores the scores in the operands' dtype; the fused kernels keep them in their accumulator. A
    kernel that is neither is given the room of both. A model's own code may store the scores three
    times as often as eager (see `attnprobe.seam.scoring`). In most of transformers' models eager's
    softmax is in float32 whatever the operands are (Llama's, and all that came of it): so float64
    is given float32's room there.
    """
    if dtype == torch.float64 and "eager" in kernel:
        dtype = torch.float32
    storage = unit_roundoff(dtype)
    accumulate = min(storage, unit_roundoff(torch.float32))
    fused = kernel in FUSED
    info = torch.finfo(dtype)
    wide = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    # float16 keeps its subnormals everywhere; the wider dtypes may be flushed to zero.
    tiny = info.smallest_normal * info.eps if dtype == torch.float16 else info.smallest_normal
    return Arithmetic(
        storage=storage,
        accumulate=accumulate,
        scores=accumulate if fused else gamma(3, storage) if kernel == OWN else storage,
        operands=operands,
        tiny=tiny,
        tiny_accumulate=wide.smallest_normal,
        blocked="eager" not in kernel,
    )


N = TypeVar("N", float, Tensor)


def gamma(n: N, unit: float) -> N:
    """γ(n) = n·u / (1 - n·u): the most that n roundings of unit u can do, relative."""
    return n * unit / (1.0 - n * unit)


@dataclass(frozen=True, eq=False)
class ScoreError:
    """ε: how far a kernel's scores may be off."""

    scores: Tensor  # (B, H, t, K); 0 if masked
    sinks: Tensor | None  # (B, H, t, 1)


def score_error(
    q: Tensor,
    k: Tensor,
    s: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float | None,
    allowed: Tensor,
    r: Arithmetic,
) -> ScoreError:
    """Step 1 of the module's docstring; `s` are the scores (B, H, t, K) before the bias."""
    u = r.accumulate + unit_roundoff(torch.float64)  # the float64 reference rounds too
    before = _product_error(q, k, scaling, r)
    before = before + gamma(2, r.scores) * (s.abs() + before)
    if softcap is not None:
        rounded = gamma(3, r.scores) + 2 * EXP_ULPS * u
        before = before + rounded * (s.abs() + before) + abs(softcap) * r.tiny
    size = s.abs()
    if bias is not None:
        before = before + gamma(1, r.scores) * (size + before + bias.abs())
        size = (s + bias).abs()
    largest = ((size + before) * allowed).amax(-1, keepdim=True)  # (B, H, t, 1)
    unit = gamma(3, u)
    of_sink = None
    if sinks is not None:
        sink = sinks.abs()
        largest = torch.maximum(largest, sink)
        unit = gamma(3, u) + gamma(1, r.scores)  # gpt-oss subtracts before it goes to float32
        of_sink = unit * (sink + largest)  # (B, H, t, 1)
    subtracted = unit * (size + before + largest)
    return ScoreError((before + subtracted).masked_fill(~allowed, 0.0), of_sink)


def _product_error(q: Tensor, k: Tensor, scaling: float, r: Arithmetic) -> Tensor:
    """How far a kernel's q·k·scaling may be off before it is stored, (B, H, t, K)."""
    u = r.accumulate + unit_roundoff(torch.float64)
    head_size = q.shape[-1]
    q_norm, k_norm = q.norm(dim=-1, keepdim=True), k.norm(dim=-1)[..., None, :]
    # |q||k| is at least Σ|q||k| over the head's components (Cauchy & Schwarz), and costs no product
    size = by_key_head(q_norm, k_norm)  # (B, H, t, K)
    flushed = by_key_head(torch.ones_like(q_norm), k_norm) + q_norm + 2 * math.sqrt(head_size)
    error: Tensor = abs(scaling) * (
        (gamma(head_size + 8, u) + 2 * r.operands + r.operands**2) * size
        + r.tiny_accumulate * math.sqrt(head_size) * flushed
    )
    return error


@dataclass(frozen=True, eq=False)
class RowError:
    """What rounding does to a whole row, by steps 2 to 4 of the module's docstring.

    Attributes:
        softmax: the logarithm of the factor by which each weight may be off though the scores are
            right, (…, 1).
        summed: the relative error of the sum of the row's products, (…, 1).
    """

    softmax: Tensor
    summed: Tensor


def row_error(n: Tensor, r: Arithmetic, *, sinks: bool = False) -> RowError:
    """The error of rows that may attend to `n` keys each, (…, 1) float64."""
    u = r.accumulate + unit_roundoff(torch.float64)
    # Keys that a window or padding hides may shift the blocks' edges by one.
    rescalings = (n / BLOCK_KEYS).floor() + 1.0 if r.blocked else torch.zeros_like(n)
    exponentials = torch.expm1((1.0 + rescalings) * math.log1p((2 * EXP_ULPS + 1) * u))
    theta = gamma(n + (2.0 + sinks), u) * (1.0 + exponentials) + exponentials
    # Products of factors near 1 as sums of logarithms, which keep their digits in float64 as well.
    factor = (
        torch.log1p(theta) - torch.log1p(-theta) + math.log1p(r.storage) + math.log1p(r.operands)
    )
    summed = torch.expm1(torch.log1p(gamma(n + rescalings + 2.0, u)) + math.log1p(r.operands))
    return RowError(factor, summed)


def bounds(
    eps: ScoreError, w: Tensor, o: Tensor, v: Tensor, allowed: Tensor, r: Arithmetic
) -> tuple[Tensor, Tensor]:
    """Steps 2 to 4 of the module's docstring: the bounds of a tile's weights and output."""
    n = allowed.sum(-1, keepdim=True).double()  # (B, 1, t, 1): keys a row may attend to
    of_row = row_error(n, r, sinks=eps.sinks is not None)
    moved = (w * torch.expm1(eps.scores)).sum(-1, keepdim=True)
    if eps.sinks is not None:
        moved = moved + (1 - w.sum(-1, keepdim=True)).clamp(min=0.0) * torch.expm1(eps.sinks)
    row = torch.log1p(moved) + of_row.softmax  # (B, H, t, 1)
    weights_bound = w * torch.expm1(eps.scores + row) + r.tiny * allowed  # (B, H, t, K)

    summed = of_row.summed
    error = by_key_head(weights_bound * (1 + summed) + w * summed, v.abs())  # (B, H, t, Dv)
    error = error + 2 * (n + 1) * r.tiny_accumulate
    output_bound = error + r.storage * (o.abs() + error) + r.tiny
    return weights_bound, output_bound


Bounded = tuple[Tensor, Tensor]
"""What a layer should give, and the bound on a model's own error in it: both float64."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, rounding: Arithmetic) -> Bounded:
    """x·W + b in float64, and the bound on a kernel's error in it.

    Args:
        x: (..., E).
        weight: (E, F).
        bias: (F,) or None.

    Returns:
        The product and the bound, both (..., F). The bound charges γ(E + 2) for the sum and two
        roundings of the stored result: after the product and after the bias.
    """
    x, weight = x.double(), weight.to(torch.float64, copy=True)
    y = x @ weight
    rows = x.norm(dim=-1, keepdim=True)  # (..., 1)
    columns = weight.square_().sum(0).sqrt()  # (F,): as norm(dim=0), which takes longer than both
    addend = torch.zeros_like(columns)
    if bias is not None:
        y += bias
        addend = bias.double().abs()
    root = math.sqrt(weight.shape[0])
    u = rounding.accumulate + unit_roundoff(torch.float64)
    inside = gamma(weight.shape[0] + 2, u) + 2 * rounding.operands + rounding.operands**2
    stored = gamma(2, rounding.storage)
    # With |x||W| + |b| for the size of what is summed, at least |x·W| + |b|, and what is flushed to
    # zero, (|x| + |W| + 2√E)·tiny·√E: a product of three numbers a row and three a column.
    sized = (1.0 + stored) * inside + stored
    flushed = (1.0 + stored) * rounding.tiny_accumulate * root
    ones = torch.ones_like(rows)
    by_row = torch.cat((sized * rows + flushed, flushed * rows, ones), -1)  # (..., 3)
    constant = sized * addend + 2.0 * flushed * root + rounding.tiny
    by_column = torch.stack((columns, torch.ones_like(columns), constant))  # (3, F)
    return y, by_row @ by_column


def scaled(x: Bounded, factor: float, rounding: Arithmetic) -> Bounded:
    """x times a number: the number and the product are each rounded once, the latter as stored."""
    y, off = x[0] * factor, x[1] * abs(factor)
    unit = rounding.storage + rounding.accumulate + unit_roundoff(torch.float64)
    return y, off + gamma(2, unit) * (y.abs() + off) + rounding.tiny


def rms_norm(x: Bounded, weight: Tensor, eps: float, rounding: Arithmetic) -> Bounded:
    """x / √(mean of x² + eps) · weight, and the bound on a model's error in it.

    Zhang & Sennrich 2019, *Root Mean Square Layer Normalization*. Write m(x) for the root: it is
    the length of (x/√D, √eps), so an error e in x moves it by at most |e|/√D, and x/m(x) by
    e/m' + |x|/m·(|e|/√D)/m', where m' is the least that the model's own root can be.

    Models compute it in float32, whatever their dtype: the cast, D squares, their sum, mean and
    root, and the product are right to γ(D + 12). The result is rounded to the model's dtype before
    the weight is multiplied (Llama), or after (Gemma), the product then: twice at most.

    Args:
        x: (..., D) float64, and how far the model's own may be off.
        weight: (D,) float64.
        eps: what keeps the root from 0.
        rounding: of the model's dtype.
    """
    normed, error = _over_root(x, eps, unit_roundoff(torch.float32))
    normed, error = normed * weight, error * weight.abs()
    stored = gamma(2, rounding.storage) * (normed.abs() + error)
    return normed, error + stored + rounding.tiny * (1 + weight.abs())


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, rounding: Arithmetic
) -> Bounded:
    """(x - mean) / √(variance + eps) · weight + bias, and the bound on a kernel's error in it.

    Ba, Kiros & Hinton 2016, *Layer Normalization*: the RMS norm of x - mean, computed in the
    accumulator. A kernel's mean is right to γ(D)·mean|x|, and it may subtract it before or after it
    divides: each number of x - mean is off by at most γ(D + 8)·(|x| + mean|x|). That moves the root
    by no less than summing the variance on the way (Welford) does, which is right to γ(D)·√(mean of
    x²) / √variance, relative (Chan, Golub & LeVeque 1983, *Algorithms for Computing the Sample
    Variance*).

    Args:
        x: (..., D) float64, as the model stored it.
        weight: (D,) float64.
        bias: (D,) float64, or None.
        eps: what keeps the root from 0.
        rounding: of the model's dtype.
    """
    u = rounding.accumulate + unit_roundoff(torch.float64)
    off = gamma(x.shape[-1] + 8, u) * (x.abs() + x.abs().mean(-1, keepdim=True))
    normed, error = _over_root((x - x.mean(-1, keepdim=True), off), eps, u)
    bias = torch.zeros_like(weight) if bias is None else bias
    y, error = normed * weight + bias, error * weight.abs()
    error = error + gamma(2, u) * ((normed * weight).abs() + bias.abs() + error)
    return y, error + rounding.storage * (y.abs() + error) + rounding.tiny * (1 + weight.abs())


def _over_root(x: Bounded, eps: float, unit: float) -> Bounded:
    """x / √(mean of x² + eps), computed with a unit roundoff; see `rms_norm`."""
    y, off = x
    size = y.shape[-1]
    root = (y.square().mean(-1, keepdim=True) + eps).sqrt()  # (..., 1)
    moved = off.norm(dim=-1, keepdim=True) / math.sqrt(size)
    least = (root - moved).clamp(min=math.sqrt(eps))
    normed = y / root
    error = off / least + normed.abs() * moved / least
    error = error + gamma(size + 12, unit) * (normed.abs() + error)
    return normed, error


def by_key_head(left: Tensor, right: Tensor) -> Tensor:
    """left @ right where each of right's Hkv heads serves H/Hkv of left's heads in a row.

    (B, H, t, K) @ (B, Hkv, K, N) -> (B, H, t, N), without repeating right.
    """
    batch, heads, rows, inner = left.shape
    groups = right.shape[1]
    grouped = left.reshape(batch, groups, heads // groups * rows, inner)
    return (grouped @ right).view(batch, heads, rows, right.shape[-1])

"""The bound on the error of weights · V, without a bound for each weight.

`attnprobe.rounding.bounds` makes a bound for each weight and multiplies these with |V|. Where ε,
what the scores may be off by, is small, its expm1 is almost ε, and ε almost a number of the row
plus one of the row times one of the key. Then the weights are read once, in float32. Written in the
words of `attnprobe.rounding`, for a row i, with c = |scaling|, κ_j = |k_j| and K the row's largest
κ:

1. ε_j ≤ α·κ_j + β. Of step 1 there, without a softcap, bias or sinks, each term is one of |q|κ_j,
   of κ_j, of |s_j|, or of none of them. For |s_j| the row's largest is taken.
2. expm1 is convex and 0 at 0, so expm1(ε_j) ≤ C·ε_j, with C = expm1(E) / E and E = αK + β, the
   row's largest ε. Jensen's sum is at most C·(α·Σ_j w_j κ_j + β), and with ρ for the error of
   the row, so that step 2 there bounds weight j by w_j·expm1(ε_j + ρ) = w_j·(expm1(ρ) +
   exp(ρ)·expm1(ε_j)),

       Σ_j w_j·expm1(ε_j + ρ)·|v_j| ≤ Σ_j w_j·(A + B·κ_j)·|v_j|,

   A = expm1(ρ) + exp(ρ)·C·β and B = exp(ρ)·C·α. What this gives away is C - 1 ≤ E, and what |s_j|
   falls short of the row's largest: so it is for kernels that round scores no more than their
   accumulator does, where the terms of |s_j| are the small ones, and for E up to `LARGEST`.
3. The two sums, over w_j·|v_j| and over w_j·(κ_j/K)·|v_j|, K now the largest κ of all keys, are
   one product in float32. What stands beside w_j is made once for all rows, and A and B, numbers of
   a row, come after. Its roundings, those of each factor and the sum over S keys in any order, are
   at most γ(S + 16), relative to a sum of terms that are all positive; and what is flushed to zero,
   of two factors below 1, of |v| and of the products, is at most 2⁻¹²⁶·(3|v| + 2) a key. Both are
   added: it is a bound still. The float64 arithmetic on the rows is of no account beside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.rounding import Arithmetic, gamma, row_error, unit_roundoff

LARGEST = 2.0**-6
"""The largest ε for which this bound is used: C is then less than 1 % above 1."""

_UNIT = unit_roundoff(torch.float32)
_TINY = torch.finfo(torch.float32).smallest_normal


def holds(query: Tensor, key: Tensor, scaling: float, r: Arithmetic) -> bool:
    """Whether the bound is as good as the one by weights for a call without further terms.

    Args:
        query: (B, H, T, D) in the model's dtype, as `key`, (B, Hkv, S, D).
    """
    if r.accumulate != _UNIT or r.scores > r.accumulate or query.numel() == 0:
        return False
    if query.dtype == torch.float64:  # which is more than float32 can hold
        return False
    largest = [
        torch.linalg.vector_norm(one, dim=-1, dtype=torch.float32).amax().double()
        for one in (query, key)
    ]
    size = abs(scaling) * largest[0] * largest[1]
    return bool(gamma(query.shape[-1] + 16, r.accumulate + 2 * r.operands) * size < LARGEST)


@dataclass(frozen=True, eq=False)
class RowBounds:
    """What the bound takes from the call, and from the keys and values of h of its key heads."""

    rounding: Arithmetic
    scaling: float  # c
    head_size: int  # D
    norms: Tensor  # (h, S, 1) float64: κ
    largest: Tensor  # (h, 1, 1, 1) float64: max κ
    values: Tensor  # (h, S, 2 Dv) float32: |v|, and |v|·κ / max κ
    largest_values: Tensor  # (h, 1, 1, Dv) float64: max |v|, number by number
    largest_value: Tensor  # (h, 1, 1, 1) float64: the largest of these

    @classmethod
    def of(cls, key: Tensor, value: Tensor, scaling: float, rounding: Arithmetic) -> RowBounds:
        """Of keys (h, S, D), float64, and values (h, S, Dv), float32 or a lower dtype."""
        norms = torch.linalg.vector_norm(key, dim=-1, keepdim=True)
        largest = norms.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        size = value.shape[-1]
        values = value.new_empty(*value.shape[:-1], 2 * size, dtype=torch.float32)
        torch.abs(value.float(), out=values[..., :size])
        torch.mul(values[..., :size], (norms / largest).float(), out=values[..., size:])
        most = values[:, None, :, :size].amax(2, keepdim=True).double()
        facts = (rounding, abs(scaling), key.shape[-1])
        return cls(*facts, norms, largest[:, None], values, most, most.amax(-1, keepdim=True))

    def sums(self, exp: Tensor, scratch: Tensor, out: Tensor) -> None:
        """Both sums over the keys of step 3, (h, R, 2 Dv) float32.

        Args:
            exp: (h, R, K) in [0, 1]: the weights, times their row's total.
            scratch: a float32 tensor of exp's shape, to write to.
        """
        torch.bmm(scratch.copy_(exp), self.values[:, : exp.shape[-1]], out=out)

    def output(
        self,
        sums: Tensor,
        total: Tensor,
        by_norm: Tensor,
        output: Tensor,
        query_norms: Tensor,
        largest: Tensor,
        n: Tensor,
        keys: int,
        out: Tensor,
    ) -> None:
        """The bound on a kernel's error in R rows of the heads that each of h key heads serves.

        Args:
            sums: (…, h, H/h, R, 2 Dv): what `sums` gave.
            total: (…, h, H/h, R, 1), at least 1.
            by_norm: (…, h, H/h, R, 1): Σ_j exp_j κ_j.
            output: (…, h, H/h, R, Dv): the rows.
            query_norms: (…, h, H/h, R, 1): c|q|.
            largest: (…, h, H/h, R, 1): at least the row's largest |s|.
            n: (…, h, H/h, R, 1): how many keys a row may attend to.
            keys: how many of the keys, from the first, any of the rows may attend to.
            out: as `output`: where the bound is written to.
        """
        r, size = self.rounding, output.shape[-1]
        alpha, beta = self._score_error(query_norms, largest)
        most = alpha * self.largest + beta  # E
        convex = torch.expm1(most) / most  # C
        of_row = row_error(n, r)
        moved = convex * (alpha * by_norm / total + beta)  # Jensen's sum
        rho = torch.log1p(moved) + of_row.softmax
        more = 1.0 + of_row.summed
        factor = rho.exp() * convex * more
        a = torch.expm1(rho) * more + factor * beta + of_row.summed
        b = factor * alpha * self.largest

        # All further terms are numbers of a row, in which a head's largest |v| stands for each.
        lost = float(keys) * _TINY * (3.0 * self.largest_value + 2.0) * (a + b)
        lost = lost + 2.0 * (n + 1.0) * r.tiny_accumulate
        stored = 1.0 + r.storage
        if r.tiny <= _TINY:
            lost = lost + r.tiny * more * n * self.largest_value
        scale = stored * (1.0 + gamma(keys + 16, 2 * _UNIT)) / total
        torch.mul(sums[..., :size].double(), a * scale, out=out)
        out.addcmul_(b * scale, sums[..., size:].double())
        out.add_(lost * stored + r.tiny).add_(output.abs(), alpha=r.storage)
        if r.tiny > _TINY:  # float16's is not so small that it could be taken for all alike
            # Σ|v| over the n keys that a row may attend to, of the first K.
            found = self.values[:, None, :keys, :size].sum(2, keepdim=True).double()
            found = found * (1.0 + gamma(keys, 2 * _UNIT))
            out.addcmul_(more * (r.tiny * stored), torch.minimum(found, n * self.largest_values))

    def _score_error(self, query_norms: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """α and β: ε_j ≤ α·κ_j + β, of the shape of what is given."""
        r = self.rounding
        u = r.accumulate + unit_roundoff(torch.float64)
        root = math.sqrt(self.head_size)
        flushed = r.tiny_accumulate * root
        stored, unit = gamma(2, r.scores), gamma(3, u)
        product = gamma(self.head_size + 8, u) + 2 * r.operands + r.operands**2
        alpha = (1.0 + stored) * (product * query_norms + self.scaling * flushed)
        beta = (1.0 + stored) * flushed * (
            query_norms + 2.0 * root * self.scaling
        ) + stored * largest
        subtracted = largest + alpha * self.largest + beta  # the largest |s| and its error
        return alpha * (1.0 + unit), beta * (1.0 + unit) + unit * (largest + subtracted)

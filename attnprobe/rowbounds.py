"""The bound on the error of weights · V, without a bound for each weight.

`attnprobe.rounding.bounds` makes a bound for each weight and multiplies these with |V|. Where ε,
what the scores may be off by, is small, its expm1 is almost ε, and ε almost a number of the row
times one of the key. Then the weights are read once, in float32. Written in the words of
`attnprobe.rounding`, for a row i, with c = |scaling|, κ_j = |k_j| and K the largest κ of all keys:

1. ε_j ≤ α·κ_j + β. Of step 1 there, without a softcap, bias or sinks, each term is one of |q|κ_j,
   of κ_j, of |s_j|, of the row's largest |s|, or of none of them; and |s_j| ≤ c|q|κ_j (Cauchy &
   Schwarz).
2. expm1 is convex and 0 at 0, so expm1(ε_j) ≤ C·ε_j, with C = expm1(E) / E and E = αK + β, at
   least the row's largest ε. Jensen's sum is at most C·(α·Σ_j w_j κ_j + β), and with ρ for the
   error of the row, so that step 2 there bounds weight j by w_j·expm1(ε_j + ρ) = w_j·(expm1(ρ) +
   exp(ρ)·expm1(ε_j)),

       Σ_j w_j·expm1(ε_j + ρ)·|v_j| ≤ Σ_j w_j·(A + B·κ_j)·|v_j|,

   A = expm1(ρ) + exp(ρ)·C·β and B = exp(ρ)·C·α. What this gives away is C - 1 ≤ E, and what |s_j|
   falls short of c|q|κ_j: so it is for kernels that round scores no more than their accumulator
   does, where the terms of |s_j| are the small ones, and for E up to `LARGEST`.
3. The two sums, over w_j·|v_j| and over w_j·(κ_j/K)·|v_j|, are one product in float32. What stands
   beside w_j is made once for all rows, and A and B, numbers of a row, come after. Its roundings,
   those of each factor and the sum over S keys in any order, are at most γ(S + 16), relative to a
   sum of terms that are all positive; and what is flushed to zero, of two factors below 1, of |v|
   and of the products, is at most 2⁻¹²⁶·(3|v| + 2) a key. Both are added: it is a bound still. The
   float64 arithmetic on the rows is of no account beside.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.rounding import Arithmetic, gamma, row_error, unit_roundoff

LARGEST = 2.0**-6
"""The largest ε for which this bound is used: C is then less than 1 % above 1."""

_UNIT = unit_roundoff(torch.float32)
_TINY = torch.finfo(torch.float32).smallest_normal


@dataclass(frozen=True, eq=False)
class RowBounds:
    """What the bound takes from a call."""

    rounding: Arithmetic
    scaling: float  # c
    head_size: int  # D
    query_norms: Tensor  # (B, H, T, 1) float64: |q|
    key_norms: Tensor  # (B, Hkv, S, 1) float64: κ
    by_count: Tensor  # (S + 1, 3) float64: of a row with n keys its two errors, and n

    @classmethod
    def of(cls, query: Tensor, key: Tensor, scaling: float, r: Arithmetic) -> RowBounds | None:
        """Of a call without further terms; None where this bound is not as good as the one by
        weights.

        Args:
            query: (B, H, T, D) in the model's dtype, as `key`, (B, Hkv, S, D).
        """
        if r.accumulate != _UNIT or r.scores > r.accumulate or query.numel() == 0:
            return None
        if query.dtype == torch.float64:  # which is more than float32 can hold
            return None
        norms = [
            torch.linalg.vector_norm(one, dim=-1, keepdim=True, dtype=torch.float64)
            for one in (query, key)
        ]
        size = abs(scaling) * norms[0].amax() * norms[1].amax()
        if not gamma(query.shape[-1] + 16, r.accumulate + 2 * r.operands) * size < LARGEST:
            return None
        by_count = _by_count(key.shape[2], r, key.device, torch.is_inference_mode_enabled())
        return cls(r, abs(scaling), query.shape[-1], norms[0], norms[1], by_count)

    def of_heads(self, text: int, heads: slice, some: slice, value: Tensor) -> HeadBounds:
        """Of some heads of a text, served by some key heads with values (h, S, Dv), float32 or a
        lower dtype."""
        norms = self.key_norms[text, some]  # (h, S, 1)
        largest = norms.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        size = value.shape[-1]
        values = value.new_empty(*value.shape[:-1], 2 * size, dtype=torch.float32)
        torch.abs(value.float(), out=values[..., :size])
        torch.mul(values[..., :size], (norms / largest).float(), out=values[..., size:])
        most = values[:, None, :, :size].amax(2, keepdim=True).double()
        of_query = self._of_query(self.query_norms[text, heads], largest)
        return HeadBounds(self, norms, of_query, largest[:, None], values, most)

    def _of_query(self, query_norms: Tensor, largest: Tensor) -> Tensor:
        """α, β and C of rows, (H, T, 3), by their |q|, (H, T, 1), and K, (h, 1, 1)."""
        r, c = self.rounding, self.scaling
        u = r.accumulate + unit_roundoff(torch.float64)
        root = math.sqrt(self.head_size)
        flushed = c * r.tiny_accumulate * root
        stored, unit = gamma(2, r.scores), gamma(3, u)
        product = gamma(self.head_size + 8, u) + 2 * r.operands + r.operands**2
        found = query_norms.new_empty(*query_norms.shape[:2], 3)
        served = found.view(len(largest), -1, 3)  # (h, H/h·T, 3): rows by the key head
        alpha, beta, convex = served.chunk(3, -1)
        norms = query_norms.view_as(alpha)
        size = norms * c
        # What step 1 has before it subtracts, and what |s| is at most: of κ_j, and of no key.
        by_key = size * ((1.0 + stored) * product + stored) + (1.0 + stored) * flushed
        alone = (1.0 + stored) * flushed * (norms + 2.0 * root)
        torch.add(by_key * (1.0 + unit), size, alpha=unit, out=alpha)
        torch.add(alone * (1.0 + 2.0 * unit), (size + by_key) * largest, alpha=unit, out=beta)
        error = alpha * largest + beta  # E
        torch.div(error.expm1(), error, out=convex)
        return found


@functools.lru_cache(maxsize=16)
def _by_count(keys: int, r: Arithmetic, device: torch.device, inference: bool) -> Tensor:
    """`RowBounds.by_count`, the same for each layer; what is made in inference mode stays there."""
    n = torch.arange(keys + 1, dtype=torch.float64, device=device)[:, None]
    errors = row_error(n, r)
    return torch.cat((errors.softmax, errors.summed, n), -1)


@dataclass(frozen=True, eq=False)
class HeadBounds:
    """What the bound takes from H heads of a text, which h key heads serve."""

    call: RowBounds
    norms: Tensor  # (h, S, 1) float64: κ
    of_query: Tensor  # (H, T, 3) float64: α, β and C
    largest: Tensor  # (h, 1, 1, 1) float64: K
    values: Tensor  # (h, S, 2 Dv) float32: |v|, and |v|·κ / K
    largest_values: Tensor  # (h, 1, 1, Dv) float64: max |v|, number by number

    def sums(self, weights: Tensor, scratch: Tensor, out: Tensor) -> None:
        """Both sums over the keys of step 3, (h, R, 2 Dv) float32.

        Args:
            weights: (h, R, K).
            scratch: a float32 tensor of that shape, to write to.
        """
        torch.bmm(scratch.copy_(weights), self.values[:, : weights.shape[-1]], out=out)

    def output(
        self,
        sums: Tensor,
        by_norm: Tensor,
        output: Tensor,
        of_query: Tensor,
        of_count: Tensor,
        keys: int,
        scratch: Tensor,
        out: Tensor,
    ) -> None:
        """The bound on a kernel's error in R rows of the heads that each of h key heads serves.

        Args:
            sums: (…, h, H/h, R, 2 Dv): what `sums` gave.
            by_norm: (…, h, H/h, R, 1): Σ_j w_j κ_j.
            output: (…, h, H/h, R, Dv): the rows.
            of_query: (…, h, H/h, R, 3): of `of_query`.
            of_count: (…, h, H/h, R, 3): of `RowBounds.by_count`.
            keys: how many of the keys, from the first, any of the rows may attend to.
            scratch: as `output`: to write to.
            out: as `output`: where the bound is written to.
        """
        r, size = self.call.rounding, output.shape[-1]
        alpha, beta, convex = of_query.chunk(3, -1)
        softmax, summed, n = of_count.chunk(3, -1)
        moved = (alpha * by_norm).add_(beta).mul_(convex)  # Jensen's sum
        rho = moved.log1p_().add_(softmax)
        more = 1.0 + summed
        factor = rho.exp().mul_(convex).mul_(more)
        a = rho.expm1_().mul_(more).add_(summed).addcmul_(factor, beta)
        b = factor.mul_(alpha).mul_(self.largest)

        # All further terms are numbers of a row, in which a head's largest |v| stands for each, and
        # `keys` for n.
        most = self.largest_values.amax(-1, keepdim=True)
        lost = (
            (a + b)
            .mul_(keys * _TINY * (3.0 * most + 2.0))
            .add_(2.0 * (keys + 1) * r.tiny_accumulate)
        )
        if r.tiny <= _TINY:
            lost.addcmul_(more, most, value=r.tiny * keys)
        stored = 1.0 + r.storage
        scale = stored * (1.0 + gamma(keys + 16, 2 * _UNIT))
        out.copy_(sums[..., :size]).mul_(a.mul_(scale))
        out.addcmul_(scratch.copy_(sums[..., size:]), b.mul_(scale))
        out.add_(lost.mul_(stored).add_(r.tiny))
        out.add_(torch.abs(output, out=scratch), alpha=r.storage)
        if r.tiny > _TINY:  # float16's is not so small that it could be taken for all alike
            # Σ|v| over the n keys that a row may attend to, of the first K.
            found = self.values[:, None, :keys, :size].sum(2, keepdim=True).double()
            found = found * (1.0 + gamma(keys, 2 * _UNIT))
            out.addcmul_(more * (r.tiny * stored), torch.minimum(found, n * self.largest_values))

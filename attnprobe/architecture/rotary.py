"""Rotary positions in float64, and how far rounding may take a model's own from them.

Su et al. 2021, *RoFormer: Enhanced Transformer with Rotary Position Embedding*: of each head's
first R numbers, pair i is turned by the angle position·f_i, f_i = θ^(-2i/R). Written from the
formulas; no model's code is called.

Models compute the frequencies and angles in float32, whatever their own dtype. Step by step, with
`u` the unit roundoff of float32 and `u_s` that of the model's dtype:

1. Frequency. The exponent 2i/R is rounded: that moves f by a factor of at most exp(u·2i/R·ln θ).
   The power is right to `POWER_ULPS`, the reciprocal to one rounding; a scaling adds its own
   roundings. A model that was cast as a whole holds its frequencies rounded to its own dtype; so
   are ours then, and the error is that of the rounded ends of the interval.
2. Angle. |Δangle| ≤ position·|Δf| + u·angle: it grows with the position, and so does the bound.
3. Cosine and sine are 1-Lipschitz, are right to `TRIG_ULPS` by themselves, and are rounded to u_s:
   |Δcos| ≤ min(|Δangle|, 2) + 2·TRIG_ULPS·u + u_s·|cos|.
4. The turned pair is a·cos - b·sin and b·cos + a·sin: what a and b were off is turned along, what
   cos and sin are off is multiplied by a and b, and each product and their sum are rounded to u_s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attnprobe.rounding import Arithmetic, Bounded, gamma, unit_roundoff

Pairs = Literal["halves", "neighbours"]
"""Which two numbers make pair i of R: i and i + R/2 (Llama, GPT-NeoX), or 2i and 2i + 1 (RoFormer
itself, GPT-J, Cohere)."""

POWER_ULPS = 4
"""The largest error that CUDA states for a float32 power; torch's on the CPU is smaller."""

TRIG_ULPS = 4
"""Likewise for cosine and sine, of which CUDA states 2, and torch's vectorised ones 1."""

_U = unit_roundoff(torch.float32)


@dataclass(frozen=True, eq=False)
class Frequencies:
    """How fast each pair turns.

    Attributes:
        value: radians a position, (R/2,) float64.
        error: how far a model's own may be from it, (R/2,) float64.
        factor: what cosine and sine are multiplied by.
    """

    value: Tensor
    error: Tensor
    factor: float = 1.0


def frequencies(
    parameters: Mapping[str, Any], head_size: int, held: torch.dtype = torch.float32
) -> Frequencies | str:
    """The frequencies that a config's `rope_parameters` ask for; or why they are not known.

    Args:
        parameters: rope_type ("default", "linear", "llama3" or "yarn"), rope_theta, perhaps
            partial_rotary_factor, and what the type needs.
        head_size: D.
        held: the dtype in which the model holds its frequencies.
    """
    kind = parameters.get("rope_type", "default")
    scaled = _TYPES.get(kind)
    missing = [name for name in ("rope_theta", *_NEEDS.get(kind, ())) if name not in parameters]
    if scaled is None or missing or any(parameters[name] is None for name in _NEEDS[kind]):
        lack = f" without {', '.join(missing)}" if missing else ""
        return f"rotary positions of type {kind!r}{lack} are not known"
    base = float(parameters["rope_theta"])
    size = int(head_size * (parameters.get("partial_rotary_factor") or 1.0))  # R
    exponent = torch.arange(0, size, 2, dtype=torch.float64) / size  # (R/2,)
    error = gamma(exponent * abs(math.log(base)) + 2 * POWER_ULPS + 2, _U)
    value, relative, factor = scaled(base**-exponent, error, size, parameters)
    if held in (torch.float32, torch.float64):
        return Frequencies(value, value * relative, factor)
    low, middle, high = ((value * (1 + side * relative)).to(held).double() for side in (-1, 0, 1))
    return Frequencies(middle, torch.maximum(high - middle, middle - low), factor)


_Scaled = tuple[Tensor, Tensor, float]  # frequencies, their relative error, factor on cos and sin


def _default(f: Tensor, error: Tensor, size: int, parameters: Mapping[str, Any]) -> _Scaled:
    return f, error, 1.0


def _linear(f: Tensor, error: Tensor, size: int, parameters: Mapping[str, Any]) -> _Scaled:
    """Chen et al. 2023, *Extending Context Window via Positional Interpolation*."""
    return f / parameters["factor"], error + 2 * _U, 1.0


def _llama3(f: Tensor, error: Tensor, size: int, parameters: Mapping[str, Any]) -> _Scaled:
    """Llama 3.1: long waves are slowed down by `factor`, short ones are left, others between."""
    factor, low, high = (
        float(parameters[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    waves = parameters["original_max_position_embeddings"] * f / (2 * math.pi)  # in a context
    slowed = (high - waves) / (high - low)
    off = (waves / (high - low)) * (error + 5 * _U) + 4 * _U * (1 + slowed.abs())
    return *_slowed(f, error, factor, slowed, off), 1.0


def _yarn(f: Tensor, error: Tensor, size: int, parameters: Mapping[str, Any]) -> _Scaled:
    """Peng et al. 2023, *YaRN: Efficient Context Window Extension of Large Language Models*."""
    factor, base = float(parameters["factor"]), float(parameters["rope_theta"])
    context = parameters["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return size * math.log(context / (times * 2 * math.pi)) / (2 * math.log(base))

    first = pair_that_turns(parameters.get("beta_fast") or 32)
    last = pair_that_turns(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    pair = torch.arange(size // 2, dtype=torch.float64)
    slowed = (pair - first) / (last - first)
    off = 4 * _U * (pair + abs(first) + abs(last)) / abs(last - first) + 3 * _U
    return *_slowed(f, error, factor, slowed, off), _attention_factor(factor, parameters)


def _slowed(
    f: Tensor, error: Tensor, factor: float, part: Tensor, off: Tensor
) -> tuple[Tensor, Tensor]:
    """Frequencies of which a part, cut to 0 … 1 and itself off by `off`, is divided by `factor`;
    and their relative error. Where the part is cut, its error is nothing."""
    error_of_part = off * ((part > -off) & (part < 1 + off))
    part = part.clamp(0, 1)
    value = f * (part / factor + (1 - part))
    return value, error + error_of_part * f / value + 5 * _U


def _attention_factor(factor: float, parameters: Mapping[str, Any]) -> float:
    """YaRN's temperature: what cosine and sine are multiplied by."""

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    some, all_ = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return grown(some) / grown(all_) if some and all_ else grown(1.0)


_TYPES: dict[str, Callable[[Tensor, Tensor, int, Mapping[str, Any]], _Scaled]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}

_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def rotated(
    x: Bounded, positions: Tensor, turning: Frequencies, pairs: Pairs, rounding: Arithmetic
) -> Bounded:
    """Turn each pair of x by its position; steps 2 to 4 of the module's docstring.

    Args:
        x: (B, H, T, D) float64, and how far the model's own may be off.
        positions: (B or 1, T).
        turning: the frequencies, of which there are at most D/2.
        pairs: which two numbers are turned together.
        rounding: of the model's dtype.

    Returns:
        (B, H, T, D), and the bound on the model's own: both float64.
    """
    value, size = turning.value.to(x[0].device), 2 * len(turning.value)
    at = positions.to(x[0].device).double()[:, None, :, None]  # (B, 1, T, 1)
    angle = at * value  # (B, 1, T, R/2)
    off = (at.abs() * turning.error.to(x[0].device) + gamma(2, _U) * angle.abs()).clamp(max=2.0)
    off = abs(turning.factor) * (off + 2 * (TRIG_ULPS + 1) * _U)
    first, second = _split(x[0][..., :size], pairs), _split(x[1][..., :size], pairs)
    (a, b), (a_off, b_off) = first, second
    unit = rounding.storage
    cos, sin = turning.factor * angle.cos(), turning.factor * angle.sin()
    cos_off, sin_off = (off + unit * (one.abs() + off) + rounding.tiny for one in (cos, sin))

    def bound(by_cos: Tensor, by_sin: Tensor, cos_by_off: Tensor, sin_by_off: Tensor) -> Tensor:
        moved = cos_by_off * (cos.abs() + cos_off) + by_cos.abs() * cos_off
        moved = moved + sin_by_off * (sin.abs() + sin_off) + by_sin.abs() * sin_off
        largest = by_cos.abs() * cos.abs() + by_sin.abs() * sin.abs() + moved
        return moved + gamma(2, unit + unit_roundoff(torch.float64)) * largest + 3 * rounding.tiny

    turned = _join(a * cos - b * sin, b * cos + a * sin, pairs)
    bounds = _join(bound(a, b, a_off, b_off), bound(b, a, b_off, a_off), pairs)
    rest = slice(size, None)
    return (
        torch.cat([turned, x[0][..., rest]], -1),
        torch.cat([bounds, x[1][..., rest]], -1),
    )


def _split(x: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """(..., R) -> the first and the second number of each pair, (..., R/2) each."""
    if pairs == "halves":
        first, second = x.chunk(2, -1)
        return first, second
    return x[..., ::2], x[..., 1::2]


def _join(first: Tensor, second: Tensor, pairs: Pairs) -> Tensor:
    """What `_split` took apart, put together again."""
    if pairs == "halves":
        return torch.cat([first, second], -1)
    return torch.stack([first, second], -1).flatten(-2)

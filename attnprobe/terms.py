"""What some models add to the formula: a softcap, a bias on the scores, sinks. Pure tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attnprobe.biases import Bias
from attnprobe.masks import part


@dataclass(frozen=True, eq=False)
class Terms:
    """What some models add to softmax(QKᵀ/√d_k + M)V.

    Attributes:
        softcap: c, where scaled scores s become c·tanh(s/c) before anything is added to them
            (Gemma Team 2024, *Gemma 2*, section 2).
        bias: (B or 1, H or 1, T or 1, S), added to the scores: by distance (ALiBi, Press et al.
            2022), learned for distances (T5, Raffel et al. 2020), or a model's own. As a tensor,
            or made by rows.
        sinks: a score for each head that takes part in softmax beside the keys' and brings no value
            (gpt-oss), so that the weights of the keys sum to less than 1: (H,), or one for each
            query as well, (B, H, T, 1).
    """

    softcap: float | None = None
    bias: Tensor | Bias | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether there is none of them."""
        return self.softcap is None and self.bias is None and self.sinks is None

    def bias_of(self, start: int, stop: int, reach: int) -> Tensor | None:
        """Rows of the bias over the first `reach` keys, float64; None where there is no bias."""
        if self.bias is None:
            return None
        if not isinstance(self.bias, Tensor):
            return self.bias.rows(start, stop, reach)
        rows = self.bias if self.bias.shape[-2] == 1 else self.bias[..., start:stop, :]
        return rows[..., :reach].double()

    @property
    def unit(self) -> float:
        """How far a model's own bias may be off by rounding, relative to each number of this."""
        return 0.0 if self.bias is None or isinstance(self.bias, Tensor) else self.bias.unit

    def sinks_of(self, start: int, stop: int) -> Tensor | None:
        """Rows of the sinks, (B or 1, H, t or 1, 1) float64; None where there are none."""
        if self.sinks is None:
            return None
        if self.sinks.dim() == 1:
            return self.sinks.double().view(1, -1, 1, 1)
        return self.sinks[:, :, start:stop].double()

    def within(self, text: int, heads: Sequence[int], rows: slice, keys: slice) -> Terms:
        """The terms of some heads among one text's own tokens: stretches of queries and keys."""
        bias = self.bias
        if bias is not None:
            whole = bias if isinstance(bias, Tensor) else bias.rows(0, rows.stop, keys.stop)
            bias = part(whole, text, heads, rows, keys)
        sinks = self.sinks
        if sinks is not None and sinks.dim() == 1:
            sinks = sinks[list(heads)]
        elif sinks is not None:
            sinks = sinks[text : text + 1, list(heads), rows]
        return Terms(self.softcap, bias, sinks)


PLAIN = Terms()
"""The formula as it stands."""

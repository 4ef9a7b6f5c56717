"""The parts that add up to a logit, what each adds, and the steps in which a model adds them up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from attnprobe.checking.report import Row
from attnprobe.effects.residual import FinalNorm, Residual
from attnprobe.errors import ModelError
from attnprobe.projections import output_weights
from attnprobe.records import AttentionCall, Capture
from attnprobe.rounding import Arithmetic, gamma, linear, unit_roundoff

Label = tuple[str, int | None, int | None]
"""A part, and its layer and head, if it has them."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of a residual stream: what they are, and the steps in which the model adds them up.

    Attributes:
        labels: part, layer and head of each.
        vectors: what each adds, (n, E) float64.
        off: how far the model's own sum may be from theirs, (E,) float64.
        checks: a row a step.
    """

    labels: list[Label]
    vectors: Tensor
    off: Tensor
    checks: list[Row]

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            self.labels + other.labels,
            torch.cat([self.vectors, other.vectors]),
            self.off + other.off,
            self.checks + other.checks,
        )


def parts_of(cap: Capture, text: int, place: int, found: Residual) -> Parts:
    """What adds to the residual stream of one token.

    Args:
        cap: what `capture` returned.
        text: which text of the batch.
        place: which token, counted in the padded batch.
        found: what `residual` gave for them.

    Raises:
        ModelError: a layer whose W_O is not known.
        InputError: a layer whose attention ran unseen.
    """
    parts = _embedded(found, cap.calls[0].layer_rounding)
    for layer in range(cap.layers):
        parts += _of_layer(cap.call(layer), text, place, found)
    return parts


def _embedded(found: Residual, rounding: Arithmetic) -> Parts:
    """The embeddings, which the first block is given the sum of."""
    named = {"embedding": found.embedding, "position": found.position}
    here = {name: vector for name, vector in named.items() if vector is not None}
    vectors = torch.stack([*here.values()])
    off = _stored(vectors, rounding)
    check = _compared("embedding", None, found.states[0] - vectors.sum(0), off)
    return Parts([(name, None, None) for name in here], vectors, off, [check])


def _of_layer(call: AttentionCall, text: int, place: int, found: Residual) -> Parts:
    """One layer's heads, attention bias and MLP."""
    output = output_weights(call)
    if isinstance(output, str):
        raise ModelError(f"the heads of layer {call.layer} cannot be told apart: {output}")
    weight = output[0].double().cpu()
    bias = None if output[1] is None else output[1].double().cpu()
    assert call.head_output_model is not None
    assert call.attention_output is not None
    z = call.head_output_model[text, place].double().cpu()  # (H, Dv)
    added = torch.einsum("hd,hde->he", z, weight)  # (H, E)
    labels: list[Label] = [("head", call.layer, head) for head in range(call.heads)]
    if bias is not None:
        added = torch.cat([added, bias[None]])
        labels.append(("attention bias", call.layer, None))
    attention = call.attention_output[text, place].double().cpu()  # (E,)
    before, after = found.states[call.layer : call.layer + 2]
    mlp = found.mlps[call.layer]
    _, merge = linear(z.flatten(), weight.flatten(0, 1), bias, call.layer_rounding)
    terms = torch.stack([before, attention, mlp])
    sums = _stored(terms, call.layer_rounding)
    return Parts(
        [*labels, ("mlp", call.layer, None)],
        torch.cat([added, mlp[None]]),
        merge + sums,
        [
            _compared("merge", call.layer, attention - added.sum(0), merge),
            _compared("residual", call.layer, after - terms.sum(0), sums),
        ],
    )


@dataclass(frozen=True, eq=False)
class Reader:
    """What a logit, or the difference of two, reads off the final residual."""

    columns: Tensor  # (E, k): the unembedding of each of k tokens, 1 or 2
    biases: Tensor | None  # (k,)
    sign: Tensor  # (k,): 1, or 1 and -1
    norm: FinalNorm
    along: Tensor  # (E,): g ∘ u / σ

    @classmethod
    def of(cls, found: Residual, ids: list[int]) -> Reader:
        """What reads the logit of one token, or the first one's less the second one's."""
        weight, bias = found.lm_head
        columns = weight[:, ids].double().cpu()
        sign = torch.tensor([1.0, -1.0], dtype=torch.float64)[: len(ids)]
        return cls(
            columns,
            None if bias is None else bias[ids].double().cpu(),
            sign,
            found.norm,
            found.norm.frozen(found.states[-1], columns @ sign),
        )

    def frame(self, parts: Parts) -> pd.DataFrame:
        """What each part adds, and after them the biases of the norm and of the unembedding."""
        labels = list(parts.labels)
        added = [self.norm.centre(parts.vectors) @ self.along]
        if self.norm.bias is not None:
            labels.append(("final norm bias", None, None))
            added.append((self.columns @ self.sign @ self.norm.bias)[None])
        if self.biases is not None:
            labels.append(("unembedding bias", None, None))
            added.append((self.biases @ self.sign)[None])
        frame = pd.DataFrame(labels, columns=["part", "layer", "head"])
        frame = frame.astype({"layer": "Int64", "head": "Int64"})
        return frame.assign(contribution=torch.cat(added).numpy())

    def checked(
        self, parts: Parts, found: Residual, logits: Tensor, rounding: Arithmetic
    ) -> tuple[list[Row], float]:
        """The steps from the final residual to the logits, and the bound on the whole sum."""
        normed, norm_off = self.norm.applied(found.states[-1], rounding)  # (E,), (E,)
        made, made_off = linear(found.normed, self.columns, self.biases, rounding)  # (k,), (k,)
        size = parts.vectors.abs()
        size = (size + size.mean(-1, keepdim=True)) @ self.along.abs()  # (n,)
        own = gamma(2 * len(self.along) + len(size), unit_roundoff(torch.float64))
        bound = (
            self.norm.centre(self.along).abs() @ parts.off
            + (self.columns @ self.sign).abs() @ norm_off
            + made_off.sum()
            + own * size.sum()
        )
        checks = [
            _compared("norm", None, found.normed - normed, norm_off),
            _compared("unembedding", None, logits - made, made_off),
        ]
        return checks, float(bound)


def _stored(terms: Tensor, rounding: Arithmetic) -> Tensor:
    """How far a sum of terms, (n, E), may be off that is stored after each addition, (E,)."""
    unit = rounding.storage + unit_roundoff(torch.float64)  # the float64 reference rounds too
    return gamma(len(terms) - 1, unit) * terms.abs().sum(0)


def _compared(check: str, layer: int | None, error: Tensor, bound: Tensor) -> Row:
    """The number, of (E,) of them, that stands worst against its bound."""
    error = error.abs()
    at = int(torch.where(error == 0, 0.0, error / bound).nan_to_num(math.inf).argmax())
    return Row(check, layer, None, float(error[at]), float(bound[at]))

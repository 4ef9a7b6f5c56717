"""The formula for one word, step by step, with the numbers that a real model computed."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from attnprobe.checking.basis import basis_of
from attnprobe.formula import softmax
from attnprobe.looking import position
from attnprobe.projections import source
from attnprobe.recompute import Attention, chosen
from attnprobe.records import AttentionCall, Capture, captured, dtype_name, whole
from attnprobe.tables import styled
from attnprobe.words import visible


@dataclass(frozen=True, eq=False)
class Walkthrough:
    """softmax(q·Kᵀ/√d_k + M)·V for one query token in one head of one layer.

    Attributes:
        title: what is walked through.
        of: the model, its dtype and kernel, and the text.
        sizes: a row for X, Q, K, V and the head's output: name, shape, axes, and the source.
        steps: a row a key token: key_pos, key; score_raw = q·k and what it is made of, query_norm
            |q|, key_norm |k| and cosine (|q|·|k|·cos θ = q·k); score = q·k·scaling, capped and
            with a bias where the model has these; mask, 0 or
            -inf; masked_score = score + mask; weight; value_norm |v|; weighted_norm = weight·|v|;
            share: the part of the head's output o that the key's weight·v makes along o, which
            sums to 1.
        totals: a row a quantity: name, value: the sums of the weights and shares, |o|, the
            largest difference between o and the model's own head output, the bound on it, and the
            row's entropy in nats with and without the scaling.
        output: o, computed from the steps, (Dv,) float64.
        output_model: the model's own head output, (Dv,) float64.
    """

    title: str
    of: str
    sizes: pd.DataFrame
    steps: pd.DataFrame
    totals: pd.DataFrame
    output: Tensor
    output_model: Tensor

    def __repr__(self) -> str:
        sizes, steps, totals = (
            frame.to_string(index=False, float_format="{:.4g}".format) for _, frame in self._parts()
        )
        (first, _), (second, _), (third, _) = self._parts()
        return (
            f"{self.title}\n{self.of}\n\n{first}\n{sizes}\n\n{second}\n{steps}\n\n{third}\n{totals}"
        )

    def _repr_html_(self) -> str:
        parts = "".join(
            f"<h4>{html.escape(title)}</h4>{styled(frame, digits='.4g').hide().to_html()}"
            for title, frame in self._parts()
        )
        return f"<h3>{html.escape(self.title)}</h3><p>{html.escape(self.of)}</p>{parts}"

    def _parts(self) -> list[tuple[str, pd.DataFrame]]:
        return [
            ("1. From X to Q, K and V", self.sizes),
            (
                "2. score_raw = q·k = |q|·|k|·cos θ; score = q·k·scaling; plus the mask; weight = "
                "softmax; weighted_norm = |weight·v|; share = its part of the output",
                self.steps,
            ),
            ("3. The sums, and the model's own output", self.totals),
        ]


def walkthrough(
    cap: Capture, word: str | int, layer: int, head: int, *, nth: int = 0, text: int = 0
) -> Walkthrough:
    """Walk through the formula for one word in one head.

    Args:
        cap: what `capture` returned.
        word: a word of the text, or its position among the words, from 0. Of a word of several
            tokens it is the last one's query: the first to have seen the whole word.
        layer: from 0.
        head: from 0.
        nth: which occurrence of a word that the text holds several times, from 0.
        text: which text of a batch.

    Raises:
        InputError: layer, head or text out of range; a word that is not in the text; a term or a
            mask that the formula does not hold.
    """
    words = captured(cap).words_of(text)
    call = cap.call(layer)
    head = whole(head, "head")
    chosen(head, call.heads, "head")
    at = words.words[position(words, word, nth)].tokens[-1]
    attention = Attention.of(cap, layer, [head], text, holds=4)
    steps, output = _steps(attention, at, words.tokens)
    assert call.head_output_model is not None
    place = int(cap.positions(text)[at])
    output_model = call.head_output_model[text, place, head].double()
    totals = {
        "sum of the weights": steps["weight"].sum(),
        "sum of the shares": steps["share"].sum(skipna=False),
        "|o|, the size of the head's output": output.norm().item(),
        "largest |o - the model's own head output|": (output - output_model).abs().max().item(),
        "bound on that difference": _bound(call, text, head, place),
        **_entropies(steps, attention.scaling),
        **_of_sink(attention, at),
    }
    return Walkthrough(
        title=(
            f"softmax(QKᵀ/√d_k + M)V for {words.tokens[at]!r} (token {at}) in layer {layer}, "
            f"head {head}: the word {words.words[words.word_of[at]].text!r}"
        ),
        of=(
            f"{cap.model_name or 'a model'} in "
            f"{dtype_name(call.dtype)}, {call.kernel} kernel: {visible(words.text)}"
        ),
        sizes=_sizes(call, head),
        steps=steps,
        totals=pd.DataFrame({"name": list(totals), "value": list(totals.values())}),
        output=output,
        output_model=output_model,
    )


def _steps(attention: Attention, at: int, tokens: tuple[str, ...]) -> tuple[pd.DataFrame, Tensor]:
    """The formula for the query at one position: a row a key; and the head's output, (Dv,)."""
    query, key, value = attention.query[0, at], attention.key[0], attention.value[0]  # (D,), (T, D)
    raw = key @ query  # (T,)
    score = attention.scores[0, at]
    mask = torch.zeros_like(score).masked_fill(~attention.allowed[at], -torch.inf)
    weight = attention.weights[0, at]
    brought = weight[:, None] * value  # (T, Dv)
    output = brought.sum(0)
    columns = {
        "score_raw": raw,
        "query_norm": query.norm().expand(len(key)),
        "key_norm": key.norm(dim=-1),
        "cosine": raw / (query.norm() * key.norm(dim=-1)),
        "score": score,
        "mask": mask,
        "masked_score": score + mask,
        "weight": weight,
        "value_norm": value.norm(dim=-1),
        "weighted_norm": brought.norm(dim=-1),
        "share": brought @ output / output.square().sum(),
    }
    numbers = {name: column.cpu().numpy() for name, column in columns.items()}
    return pd.DataFrame({"key_pos": range(len(key)), "key": tokens, **numbers}), output


def _entropies(steps: pd.DataFrame, scaling: float) -> dict[str, float]:
    """The entropy of the row's weights in nats: as they are, without the scaling, at the most."""
    raw, mask, weight = (
        torch.tensor(steps[name].to_numpy()) for name in ("score_raw", "mask", "weight")
    )
    seen = int((mask == 0).sum())
    return {
        f"entropy of the weights with the scaling {scaling:.4g} (nats)": _entropy(weight),
        "entropy without it (nats)": _entropy(softmax(raw + mask)),
        f"the most an entropy can be here, ln {seen} (nats)": math.log(seen),
    }


def _of_sink(attention: Attention, at: int) -> dict[str, float]:
    if attention.sink is None:
        return {}
    return {"the sink's share, beside the keys'": float(attention.sink[0, at])}


def _sizes(call: AttentionCall, head: int) -> pd.DataFrame:
    """The tensors of the whole layer: their shapes and where they come from."""
    by_head = "texts × heads × tokens × head size"
    rows: list[tuple[str, Tensor | None, str, str]] = [
        (
            "X",
            call.hidden_states,
            "texts × tokens × embedding",
            "what enters the layer's attention",
        ),
        ("Q", call.query, by_head, source(call, "query", head)),
        ("K", call.key, by_head, source(call, "key", head)),
        ("V", call.value, by_head, source(call, "value", head)),
        (
            "heads",
            call.head_output_model,
            "texts × tokens × heads × head size",
            "weights · V, what the kernel returned",
        ),
    ]
    return pd.DataFrame(
        [
            {"name": name, "shape": " × ".join(map(str, x.shape)), "axes": axes, "source": where}
            for name, x, axes, where in rows
            if x is not None
        ]
    )


def _bound(call: AttentionCall, text: int, head: int, row: int) -> float:
    """The bound of the `output` check at one row of one head: its largest over the components."""
    (tile,) = basis_of(call).tiles(slice(row, row + 1))
    assert tile.output_bound is not None
    return float(tile.output_bound[text, head, 0].max())


def _entropy(weight: Tensor) -> float:
    return float(-torch.special.xlogy(weight, weight).sum())

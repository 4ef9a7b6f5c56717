"""What each term of the formula is good for: a model without it, in numbers: `term_effects`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from attnprobe.capturing import Texts, refuse_nonfinite
from attnprobe.checking.basis import basis_of
from attnprobe.editing import changed
from attnprobe.effects.changes import Change
from attnprobe.effects.predicting import (
    Predictions,
    compared,
    logits_of,
    refuse_nonfinite_logits,
    texts_of,
)
from attnprobe.effects.sites import Where
from attnprobe.errors import ModelError
from attnprobe.formula import Tile
from attnprobe.hooks import replaced
from attnprobe.models import as_language_model
from attnprobe.records import AttentionCall, LanguageModel
from attnprobe.seam.interception import KernelOutput
from attnprobe.verification import Progress

COLUMNS = (
    *("term", "formula", "entropy", "entropy_share", "future"),
    *("loss", "perplexity", "top1", "kl", "note"),
)


def term_effects(
    lm: object,
    text: Texts,
    *,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Take each term of the formula away, in all layers at once, and see what becomes of the model.

    The first row is the model as it is: its own kernel's predictions, and the weights that the
    formula makes of its query and key. In each other row all softmax attention is computed with
    the formula that stands there (see `attnprobe.edit`).

    | column | what it is | over |
    |---|---|---|
    | `entropy` | mean of -Σ a[j]·ln a[j], in nats | rows of weights |
    | `entropy_share` | the same, of its maximum ln n for n keys | rows with n > 1 |
    | `future` | mean of Σ a[j] over keys j later than the query | rows of weights |
    | `loss` | mean of -ln p(next token), in nats | tokens with a next one |
    | `perplexity` | exp(loss) | |
    | `top1` | share whose likeliest next token is the unchanged model's | tokens |
    | `kl` | mean of KL(unchanged ‖ changed) of the next token, in nats | tokens |
    | `note` | what the numbers mean where they could be misread | |

    A row of weights is one query token of one text in one layer and head; n counts the keys that
    it may attend to in that row of the frame. All rows, and all tokens, of all texts count alike.
    d_k is the size of one head, d_model that of the embedding.

    Without attention there are no weights, and the first three are NaN. Where a model has sinks, a
    share of each row goes to no key, and entropy is that of what the keys get.

    Without M a model sees the token that it is to predict. Whether it then predicts better for that
    reason, or breaks, as it never saw later tokens in training, the note tells by the loss.

    Args:
        lm: a causal language model: what `load` returns, a (model, tokenizer) pair, or a bare
            model with token ids.
        text: one or several, as `capture` takes them, of at least two tokens each. They run one by
            one, so no padding is in any number.
        progress: called as `progress(term, done, total)` after each run of the model.

    Returns:
        A row for each of the terms, in the order of `TERMS`; numbers are float64.
        `frame.attrs` counts "texts", "tokens" and "predicted", the tokens with a next one.

    Raises:
        InputError: as `capture`; a text of one token.
        ModelError: no causal language model; as `edit`.
        NonFiniteError: NaN or infinity in the unchanged model's output.
    """
    lm = as_language_model(lm)
    texts = texts_of(lm, text)
    own = _Own(lm.model)
    runs = [_Run(term) for term in TERMS]
    for number, ids in enumerate(texts):
        unchanged = _unchanged(lm, ids, own, runs[0].weights)  # (T, V)
        for at, run in enumerate(runs):
            logits = run.logits(lm, ids, own) if at else unchanged
            if logits is not None:
                run.predictions += compared(ids, unchanged, logits)
            if progress:
                progress(run.term.name, number * len(runs) + at + 1, len(texts) * len(runs))
    frame = pd.DataFrame(_rows(runs, own), columns=list(COLUMNS))
    counted = runs[0].predictions
    frame.attrs = {"texts": len(texts), "tokens": counted.tokens, "predicted": counted.known}
    return frame


@dataclass(frozen=True)
class Term:
    """One change of the formula, in all layers.

    Attributes:
        name: what is done.
        formula: how it then reads; `{scale}` stands for the model's own.
        options: of `Change`.
        factor: a factor on q·k in place of the model's own, by head size and embedding size.
    """

    name: str
    formula: str
    options: dict[str, Any] = field(default_factory=dict)
    factor: Callable[[int, int], float] | None = None


TERMS = (
    Term("as it is", "softmax(QKᵀ{scale} + M)V"),
    Term("without /√d_k", "softmax(QKᵀ + M)V", factor=lambda head, width: 1.0),
    Term("divided by d_k", "softmax(QKᵀ/d_k + M)V", factor=lambda head, width: 1 / head),
    Term(
        "divided by √d_model",
        "softmax(QKᵀ/√d_model + M)V",
        factor=lambda head, width: width**-0.5,
    ),
    Term("without M", "softmax(QKᵀ{scale})V", {"mask": "none"}),
    Term("uniform weights", "softmax(M)V", {"weights": "uniform"}),
    Term("no attention at all", "0", {"head_output": "zero"}),
)
"""What `term_effects` tries, one after another; the first changes nothing."""


class _Weights:
    """Means over the rows of weights of all layers and heads, as their tiles come."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def see(self, call: AttentionCall, tile: Tile) -> None:
        """Take in one tile; see `Change.see`."""
        if call.kind != "self":
            return
        weights = tile.weights  # (B, H, t, K)
        keys = (tile.scores > -torch.inf).sum(-1)  # (B, H, t)
        key_pos = torch.arange(weights.shape[-1], device=weights.device)
        query_pos = call.first_key + torch.arange(tile.start, tile.stop, device=weights.device)
        later = weights * (key_pos > query_pos[:, None])
        entropy = torch.special.entr(weights).sum(-1)  # (B, H, t)
        self._add("entropy", entropy, keys > 0)
        self._add("entropy_share", entropy / keys.double().log(), keys > 1)
        self._add("future", later.sum(-1), keys > 0)

    def _add(self, name: str, values: Tensor, counts: Tensor) -> None:
        """Values and which of them count, (B, H, t) each."""
        self.totals[name] = self.totals.get(name, 0.0) + float(values.where(counts, 0.0).sum())
        self.counts[name] = self.counts.get(name, 0) + int(counts.sum())

    def means(self) -> dict[str, float]:
        """By column; NaN where there was no row."""
        return {
            name: self.totals[name] / self.counts[name] if self.counts.get(name) else math.nan
            for name in ("entropy", "entropy_share", "future")
        }


class _Own:
    """What the unchanged model's own formula is, by what its attention calls say."""

    def __init__(self, model: nn.Module) -> None:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        self.width: int = embedding.weight.shape[-1]
        self.factors: dict[int, tuple[float, int]] = {}  # by layer: its factor on q·k, and d_k
        self.adds: dict[str, None] = {}  # what it adds to the formula, in words
        self.mask_unknown = False

    def note(self, call: AttentionCall) -> None:
        """Take in one call.

        Raises:
            ModelError: it sees later tokens, so that the model is no causal one.
        """
        if call.kind != "self":
            return
        rule, terms = call.expected_mask, basis_of(call).terms
        if rule is not None and not rule.causal:
            raise ModelError(
                f"{call.name} sees later tokens: expected a causal language model, and this one "
                "reads both ways"
            )
        self.mask_unknown |= rule is None
        head_size = call.query.shape[-1]
        self.factors[call.layer] = (call.expected_scaling * call.scaled_before, head_size)
        if terms.softcap is not None:
            self.adds[f"scores are capped at {terms.softcap:g}"] = None
        if terms.bias is not None:
            self.adds["a bias is added to the scores, but for uniform weights"] = None
        if terms.sinks is not None:
            self.adds["a share of the weights goes to sinks; entropy is of what keys get"] = None

    def has(self, factor: Callable[[int, int], float]) -> bool:
        """Whether the model's own factor on q·k is this one in all layers."""
        return all(math.isclose(own, factor(d, self.width)) for own, d in self.factors.values())

    @property
    def scale(self) -> str:
        """The model's own factor on q·k, as the formula has it."""
        if self.has(lambda head, width: head**-0.5):
            return "/√d_k"
        values = {f"{own:.4g}" for own, _ in self.factors.values()}
        if values == {"1"}:
            return ""
        return f"·{values.pop()}" if len(values) == 1 else "·c"

    @property
    def remarks(self) -> list[str]:
        """What the model has that the formula has not."""
        several = ["c differs from layer to layer"] if self.scale == "·c" else []
        return [*several, *self.adds]


class _Run:
    """One term's runs over the texts, and what has been summed of them."""

    def __init__(self, term: Term) -> None:
        self.term = term
        self.weights = _Weights()
        self.predictions = Predictions()

    def logits(self, lm: LanguageModel, ids: Tensor, own: _Own) -> Tensor | None:
        """One text, (T,), run with the term changed: (T, V); None if that cannot be."""
        if "mask" in self.term.options and own.mask_unknown:
            return None
        options = dict(self.term.options)
        factor = self.term.factor
        if factor is not None:
            options["scale"] = lambda call: (
                factor(call.query.shape[-1], own.width) / call.scaled_before
            )
        with changed(lm, Change(Where(), see=self.weights.see, **options)):
            return logits_of(lm.model, ids[None])[0]


def _unchanged(lm: LanguageModel, ids: Tensor, own: _Own, weights: _Weights) -> Tensor:
    """The model run on one text, (T,), by its own kernels: (T, V). Each call's weights come by the
    formula beside."""
    every = torch.ones_like(ids[None], dtype=torch.bool)

    def handle(call: AttentionCall, run: Callable[[], KernelOutput]) -> KernelOutput:
        refuse_nonfinite(lm, call, every)
        basis = basis_of(call)
        if basis.unheld:
            raise ModelError(f"layer {call.layer}: {basis.unheld}")
        own.note(call)
        for tile in basis.weights():
            weights.see(call, tile)
        return run()

    with replaced(lm.model, handle) as unseen:
        logits = logits_of(lm.model, ids[None], outputs=2)[0]  # and a changed run's beside them
    if unseen or not own.factors:
        reason = str(unseen[0]) if unseen else "it has no softmax attention to be seen"
        raise ModelError(f"{type(lm.model).__name__} cannot be changed: {reason}")
    refuse_nonfinite_logits(lm, logits)
    return logits


def _rows(runs: Sequence[_Run], own: _Own) -> list[dict[str, Any]]:
    """The frame's rows."""
    loss = runs[0].predictions.means()["loss"]
    rows = []
    for run in runs:
        row: dict[str, Any] = {
            "term": run.term.name,
            "formula": run.term.formula.format(scale=own.scale),
            **run.weights.means(),
            **run.predictions.means(),
        }
        rows.append(row | {"note": "; ".join(_notes(run, row, loss, own))})
    return rows


def _notes(run: _Run, row: dict[str, Any], loss: float, own: _Own) -> list[str]:
    """What a row's numbers mean, where they could be misread."""
    if run.term is TERMS[0]:
        return own.remarks
    if not run.predictions.tokens:
        return ["not run: the model's M is not known"]
    if math.isnan(row["loss"]):
        return ["what the model computes is not finite any more"]
    if math.isnan(row["entropy"]):
        return ["there are no weights"]
    if run.term.factor is not None and own.has(run.term.factor):
        return ["this is the model's own scale"]
    if row["future"] > 0:
        seen = f"{row['future']:.0%} of the weights are on later tokens"
        if row["loss"] < loss:
            return [f"sees the answer: {seen}, and the loss falls"]
        return [f"breaks: {seen}, and the loss does not fall"]
    return []

"""Run a model on one text under many changes, as many in each forward as memory lets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attnprobe.effects.predicting import TOKENS_AT_ONCE, logits_of
from attnprobe.errors import InputError, ModelError
from attnprobe.loading.continuations import NextToken, next_token
from attnprobe.loading.encoding import accepted
from attnprobe.records import Capture, LanguageModel

BYTES_AT_ONCE = 2**28
"""About how many bytes the logits and activations of one forward may take."""

MetricName = Literal["loss", "logit", "logit_difference"]
METRICS: tuple[MetricName, ...] = ("loss", "logit", "logit_difference")


@dataclass(frozen=True)
class Metric:
    """A number that tells how well a model goes on with a text."""

    name: MetricName
    target: NextToken | None = None
    against: NextToken | None = None

    @classmethod
    def of(
        cls,
        lm: LanguageModel,
        name: MetricName,
        target: str | int | None,
        against: str | int | None,
        context: str = "",
    ) -> Metric:
        """The metric of this name; `context` is the text that goes on.

        Raises:
            InputError: as `refuse_unmeasured`; a word that is not one token.
        """
        refuse_unmeasured(name, target, against)
        config: Any = lm.model.config
        vocabulary = config.get_text_config().vocab_size
        tokens = (
            None if one is None else next_token(lm.tokenizer, one, context, vocabulary)
            for one in (target, against)
        )
        return cls(name, *tokens)

    @property
    def words(self) -> list[str | int | None]:
        """The target, and what it is against, as frames hold them; None for none."""
        return [None if one is None else one.word for one in (self.target, self.against)]

    @property
    def unit(self) -> str:
        """What it is counted in."""
        return "nats" if self.name == "loss" else "logits"

    @property
    def last(self) -> bool:
        """Whether it is of the last token's logits alone."""
        return self.name != "loss"

    def count(self, tokens: int) -> int:
        """Of how many next words it is, in a text of so many tokens."""
        return 1 if self.last else tokens - 1

    def measure(self, logits: Tensor, ids: Tensor) -> Tensor:
        """The mean over a text's next words, (N,) float64.

        Args:
            logits: (N, T, V), or (N, 1, V) of the last token.
            ids: the text's, (T,).
        """
        if self.target is None:
            return torch.stack([_loss(one[:-1], ids[1:]) for one in logits])
        found = logits[:, -1, self.target.id].double()
        return found if self.against is None else found - logits[:, -1, self.against.id].double()


def _loss(logits: Tensor, following: Tensor) -> Tensor:
    """The mean loss of the next tokens (T,), float64: of (T, V) logits, some rows at a time, as
    they take much room in float64."""
    losses = [
        cross_entropy(logits[rows].double(), following[rows], reduction="sum")
        for start in range(0, len(following), TOKENS_AT_ONCE)
        for rows in [slice(start, start + TOKENS_AT_ONCE)]
    ]
    return torch.stack(losses).sum() / len(following)


def refuse_unmeasured(name: object, target: object, against: object) -> None:
    """Refuse what is no metric, or lacks a word or has one too many.

    Raises:
        InputError: it is so.
    """
    if name not in METRICS:
        raise InputError(f"metric is one of {', '.join(METRICS)}; got {name!r}")
    needed = {"target": name != "loss", "against": name == "logit_difference"}
    for what, given in (("target", target), ("against", against)):
        if needed[what] and given is None:
            raise InputError(f"metric {name!r} needs {what}, a next word or its token id")
        if not needed[what] and given is not None:
            raise InputError(f"metric {name!r} takes no {what}, got {given!r}")


def trials(
    cap: Capture,
    ids: Tensor,
    count: int,
    changed: Callable[[slice], AbstractContextManager[Any]],
    metric: Metric,
) -> Iterator[tuple[slice, Tensor]]:
    """Run a model on a text under so many changes.

    Args:
        cap: a capture of the model, whatever the text: for its sizes.
        ids: the text's, (T,).
        count: how many changes.
        changed: makes those of a slice, a text of the batch each, for as long as it is open.
        metric: what is measured.

    Yields:
        After each forward, which changes it ran and the metric of each, (n,) float64.
    """
    assert cap.lm is not None
    model = cap.lm.model
    at_once = _texts_at_once(cap, len(ids), metric)
    for start in range(0, count, at_once):
        part = slice(start, min(start + at_once, count))
        with changed(part):
            logits = logits_of(model, ids.expand(part.stop - start, -1), last=metric.last)
        yield part, metric.measure(logits, ids)


def refuse_unfit(cap: Capture) -> None:
    """Refuse a model that predicts no next word, or whose heads are not all seen.

    Raises:
        ModelError: it is one.
    """
    assert cap.lm is not None
    name = type(cap.lm.model).__name__
    if not cap.causal:
        raise ModelError(f"{name} sees later words, so that it predicts no next one")
    if cap.unseen:
        raise ModelError(f"{name} has heads that cannot be changed: {cap.unseen[0]}")


def _texts_at_once(cap: Capture, tokens: int, metric: Metric) -> int:
    """How many texts of so many tokens take about `BYTES_AT_ONCE` in one forward.

    Each holds its logits, an MLP some times as wide as the model, and weights where a kernel makes
    them.
    """
    assert cap.lm is not None
    call, vocabulary = cap.calls[0], cap.output.shape[-1]
    few = metric.last and "logits_to_keep" in accepted(cap.lm.model)
    numbers = 2 * vocabulary * (1 if few else tokens)
    numbers += call.heads * tokens * (24 * call.value.shape[-1] + tokens)
    return max(1, BYTES_AT_ONCE // (numbers * call.query.element_size()))

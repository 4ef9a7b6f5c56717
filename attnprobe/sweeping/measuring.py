"""One shard of a corpus → its statistics: the model runs, and each layer is measured as it does."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnprobe.capturing import run
from attnprobe.checking.basis import Basis, basis_of
from attnprobe.errors import NonFiniteError
from attnprobe.loading.encoding import Batch
from attnprobe.masks import MaskRule, Rule
from attnprobe.projections import value_norms
from attnprobe.records import AttentionCall, LanguageModel
from attnprobe.sweeping.pairs import PairCounter
from attnprobe.sweeping.plans import Plan, Reading
from attnprobe.sweeping.rows import rows_of
from attnprobe.sweeping.shards import Shard
from attnprobe.sweeping.tallies import Tally
from attnprobe.sweeping.texts import Text, batch_of, batches, cut
from attnprobe.verification import verify


@dataclass(frozen=True)
class Settings:
    """What a sweep's numbers hang on, beside model and corpus, and how it goes about it.

    Attributes:
        tokens: N, the most tokens of a text.
        value: whether masses by value are gathered as well.
        pairs: how many word pairs of each head are kept in the end; 0 for none.
        every: one text in so many is verified; None for none.
        batch_size: texts at a time.
    """

    tokens: int
    value: bool
    pairs: int
    every: int | None
    batch_size: int


@dataclass(frozen=True)
class Verified:
    """What `verify` said of one text: the worst ratio of an error to its bound."""

    text: str
    verdict: str
    ratio: float
    summary: str


@dataclass(eq=False)
class Measured:
    """What one shard comes to.

    Attributes:
        tallies: by layer.
        pairs: which word looks most at which.
        texts, tokens: how many were measured.
        damaged: names and reasons of what could not be.
        left_out: layers that could not be, and why.
        value_left_out: why layers have no masses by value.
        verified: the texts that were verified.
    """

    tallies: dict[int, Tally] = field(default_factory=dict)
    pairs: PairCounter = field(default_factory=PairCounter)
    texts: int = 0
    tokens: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)
    value_left_out: dict[int, str] = field(default_factory=dict)
    verified: list[Verified] = field(default_factory=list)


Show = Callable[[int, float], None]
"""Called after each batch with its tokens, and how much of the shard is done, up to 1."""


def measure(lm: LanguageModel, shard: Shard, settings: Settings, show: Show) -> Measured:
    """Run the model on a shard's texts and gather their statistics."""
    assert lm.tokenizer is not None
    found = Measured()
    texts = [
        Text.of(lm.tokenizer, *one)
        for passage in shard.passages
        for one in cut(lm.tokenizer, passage, settings.tokens)
    ]
    whole = sum(len(text.ids) for text in texts)
    for some in batches(texts, settings.batch_size):
        for measured in _finite(lm, some, settings, found):
            measured.add_to(found)
        tokens = sum(len(text.ids) for text in some)
        show(tokens, tokens / whole)
    found.pairs.drop([*found.left_out])
    for layer in found.left_out:
        found.tallies.pop(layer, None)
    if settings.every is not None:
        _verify(lm, texts, shard.number == 0, settings.every, found)
    return found


def _finite(
    lm: LanguageModel, texts: Sequence[Text], settings: Settings, found: Measured
) -> Iterable[_Batch]:
    """Measure texts together, or one at a time where one of them gives NaN: that is named."""
    try:
        yield _Batch.of(lm, texts, settings)
    except NonFiniteError as error:
        if len(texts) == 1:
            found.damaged.append((texts[0].name, str(error)))
            return
        for text in texts:
            yield from _finite(lm, [text], settings, found)


def _verify(
    lm: LanguageModel, texts: Sequence[Text], first: bool, every: int, found: Measured
) -> None:
    """Verify a sample, drawn by a checksum of the texts; of the first shard, the first text too."""
    damaged = {name for name, _ in found.damaged}
    for at, text in enumerate(texts):
        drawn = zlib.crc32(text.text.encode()) % every == 0 or (first and not at)
        if drawn and text.name not in damaged:
            report = verify(lm, text.text, checks=["output"])
            ratios = [row.ratio for row in report.rows if row.verdict != "not_checked"]
            worst = max(ratios, default=float("nan"))
            found.verified.append(Verified(text.name, report.verdict, worst, report.summary))


class _Batch:
    """Texts that run together. Nothing of them counts before the model has come to its end."""

    def __init__(self, texts: Sequence[Text], batch: Batch, settings: Settings) -> None:
        self.texts, self.settings = texts, settings
        self.reading = Reading.of(texts, batch.padding)
        self.plans: dict[tuple[object, ...], Plan] = {}
        self.compared: list[tuple[Tensor, MaskRule, tuple[object, ...], str]] = []
        self.tallies: dict[int, Tally] = {}
        self.strongest: dict[int, Tensor] = {}
        self.left_out: dict[int, str] = {}
        self.value_left_out: dict[int, str] = {}

    @classmethod
    def of(cls, lm: LanguageModel, texts: Sequence[Text], settings: Settings) -> _Batch:
        """Run the model.

        Raises:
            NonFiniteError: NaN or infinity in what was computed.
        """
        batch = batch_of(lm, texts, settings.tokens)
        found = cls(texts, batch, settings)
        cap = run(without_head(lm), lambda: batch, found.take, {"instead": "a smaller batch_size"})
        found.left_out |= {one.layer: str(one) for one in cap.unseen}
        return found

    def take(self, call: AttentionCall) -> None:
        """Measure a call while the model runs."""
        basis = self._basis(call)
        reason = basis.departure
        if call.kind == "cross" or call.key.shape[2] != self.reading.real.shape[1]:
            reason = f"it attends to {call.key.shape[2]} keys, not to the tokens alone"
        if reason:
            self.left_out[call.layer] = reason
            return
        plan = self._plan(basis.rule)
        norms = self._norms(call) if self.settings.value else None
        rows = rows_of(basis, plan, norms)
        tally = self.tallies[call.layer] = Tally.of(rows, plan)
        if not tally.finite:
            raise NonFiniteError(f"layer {call.layer}: its weights hold NaN or infinity")
        if self.settings.pairs:
            self.strongest[call.layer] = rows.strongest

    def _basis(self, call: AttentionCall) -> Basis:
        """The basis of a call; a mask is compared with the facts once for all layers with it."""
        basis, rule = basis_of(call), call.expected_mask
        plain = call.terms.bias is None and call.expected_terms.bias is None
        if rule is None or call.mask is None or not plain:
            return basis
        key = (call.is_causal, call.kernel, call.facts_known, call.bias_known)
        for mask, before, known, difference in self.compared:
            if mask is call.mask and known == key and rule.same_as(before):
                vars(basis)["mask_difference"] = difference
                return basis
        self.compared.append((call.mask, rule, key, basis.mask_difference))
        return basis

    def _plan(self, rule: Rule) -> Plan:
        if not isinstance(rule, MaskRule):
            return Plan(self.reading, rule, self.settings.tokens)
        facts = (rule.causal, rule.window, rule.ahead, rule.chunk, rule.offset)
        if facts not in self.plans:
            self.plans[facts] = Plan(self.reading, rule, self.settings.tokens)
        return self.plans[facts]

    def _norms(self, call: AttentionCall) -> Tensor | None:
        """‖v·W_O‖ of each value, (B, H, T); None where W_O is not known."""
        if call.offloaded:
            self.value_left_out[call.layer] = "the layer's weights are offloaded"
            return None
        value = call.value.repeat_interleave(call.heads // call.value.shape[1], 1)
        by_head = value.transpose(0, 1).flatten(1, 2)  # (H, B·T, Dv)
        norms = value_norms(call, list(range(call.heads)), by_head)
        if isinstance(norms, str):
            self.value_left_out[call.layer] = norms
            return None
        return norms.view(call.heads, len(value), -1).transpose(0, 1)

    def add_to(self, found: Measured) -> None:
        """Count it."""
        for layer, tally in self.tallies.items():
            if layer in found.tallies:
                found.tallies[layer].add(tally)
            else:
                found.tallies[layer] = tally
        if self.strongest:
            words = found.pairs.words_of(self.texts, self.reading.real.shape[1])
            for layer, strongest in self.strongest.items():
                found.pairs.take(layer, words, strongest.cpu().numpy())
        found.texts += len(self.texts)
        found.tokens += int(self.reading.real.sum())
        found.left_out |= self.left_out
        found.value_left_out |= self.value_left_out


def without_head(lm: LanguageModel) -> LanguageModel:
    """The model without the layers that make logits of its last hidden state: attention does not
    hang on them, and they cost as much as several layers."""
    inner = lm.model.base_model if isinstance(lm.model, PreTrainedModel) else lm.model
    assert isinstance(inner, torch.nn.Module)
    return LanguageModel(inner, lm.tokenizer, lm.name)

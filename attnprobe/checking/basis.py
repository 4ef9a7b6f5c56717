"""On what a call is computed again: M, the scale and further terms, as the facts have them.

Where a model goes by others than the facts say, that is a mismatch, if the facts are known to hold
for its type. If they are not, M may be a rule of the model's own: then it is taken as the model
passed it, and the `mask` check says that it is not checked. A bias on the scores is a part of M: it
is held against the one made anew, and may differ from it by how the model rounds it, number by
number. Where it does not differ further, the formula is computed with the model's own, an operand
as query and key are.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attnprobe.biases import Bias
from attnprobe.formula import Tile, tiles
from attnprobe.masks import MASKED_BELOW, GivenMask, MaskRule, Rule, disagreement
from attnprobe.outputs import Rows, attention, outputs
from attnprobe.records import AttentionCall
from attnprobe.terms import Terms

_NO_RULE = (
    "the mask came whole (4-D, or by layer type) or the layer ran by itself, so there are no facts "
    "to rebuild it from: M is taken as the model passed it"
)
_OWN_BIAS = "the model adds a bias of its own to the scores, taken as the model passed it"
_BIAS_AWAY = "its bias's weights are offloaded or adapted: it is taken as the model passed it"
_OWN_SINKS = "the model computes sinks from the text, taken as the model passed them"


def basis_of(call: AttentionCall) -> Basis:
    """The basis of a call, made once."""
    found: Basis | None = vars(call).get("_basis")
    if found is None:
        found = Basis(weakref.ref(call))
        vars(call)["_basis"] = found  # beside the fields of a frozen dataclass
    return found


@dataclass(frozen=True, eq=False)
class Basis:
    """What a call is computed again with, and how the model departs from it.

    It lies with its call, and does not hold it: both would be let go only when Python looks for
    cycles, which a layer's tensors, verified and done with, must not wait for.
    """

    reference: weakref.ref[AttentionCall]

    @property
    def call(self) -> AttentionCall:
        """The call, which must be there as long as this is asked of."""
        call = self.reference()
        assert call is not None
        return call

    @cached_property
    def unheld(self) -> str:
        """Why the formula here does not hold for the call; empty where it does."""
        call = self.call
        if call.unheld:
            return f"the formula here has no {', '.join(call.unheld)}"
        if call.dropout:
            return f"dropout of {call.dropout} was on, so the weights were random"
        if not call.facts_known and self.difference:
            return f"{_unknown_type(call)}: {self.difference}"
        if self.taken and self.opened:
            return f"the model attends to keys that are later or padding: {self.opened}"
        return ""

    @cached_property
    def opened(self) -> int:
        """How many entries the kernel's mask opens that causality or padding closes.

        A model may narrow what a query sees by a rule of its own; a mask that was lost widens it.
        """
        expected, used = self.call.expected_mask, self._used
        if expected is None:
            return 0
        base = replace(expected, window=None, ahead=None, chunk=None)
        count = 0
        for start, stop in row_blocks(self.call):
            allowed = base.allowed(start, stop, device=self.call.query.device, keys=base.keys)
            open_ = used.allowed(start, stop, device=self.call.query.device, keys=used.keys)
            count += int((open_ & ~allowed & allowed.any(-1, keepdim=True)).sum())
        return count

    @cached_property
    def departure(self) -> str:
        """Why the formula's weights would not be the model's own; empty where they are."""
        return self.unheld or self.difference or ("" if self.taken else self.mask_difference)

    @cached_property
    def taken(self) -> str:
        """Why M is taken as the model passed it, unchecked; empty where it is rebuilt."""
        call = self.call
        if call.expected_mask is None:
            return _NO_RULE
        if not call.facts_known and self.mask_difference:
            return f"{_unknown_type(call)}: {self.mask_difference}. M is taken as it was passed"
        unknown = call.expected_terms.bias is None and not call.bias_known
        if call.terms.bias is not None and unknown:
            return _BIAS_AWAY if call.facts_known else _OWN_BIAS
        return _OWN_SINKS if self._sinks_of_its_own else ""

    @property
    def _sinks_of_its_own(self) -> bool:
        sinks, expected = self.call.terms.sinks, self.call.expected_terms.sinks
        return sinks is not None and sinks.dim() > 1 and expected is None

    @cached_property
    def difference(self) -> str:
        """How the scale, the softcap or the sinks differ from the expected; empty if not."""
        call, passed, expected = self.call, self.call.terms, self.call.expected_terms
        if not math.isclose(call.scaling, call.expected_scaling, rel_tol=1e-6):
            return f"the model scales by {call.scaling:.6g}, expected {call.expected_scaling:.6g}"
        if passed.softcap != expected.softcap:
            return f"the model caps scores at {passed.softcap}, expected {expected.softcap}"
        if not self._sinks_of_its_own and not _same(passed.sinks, expected.sinks):
            return "the model passed other sinks than its weights hold"
        return ""

    @cached_property
    def mask_difference(self) -> str:
        """Where M, what is hidden or the bias, differs from the rebuilt one; empty if nowhere."""
        rule, used = self.call.expected_mask, self._used
        assert rule is not None
        if rule.same_as(used):
            return self._bias_difference
        biased = self.call.expected_terms.bias is not None  # what is added is compared by itself
        different, first = 0, ""
        for start, stop in row_blocks(self.call):
            allowed = rule.allowed(start, stop, device=self.call.query.device, keys=rule.keys)
            passed = _rows(used, start, stop, device=self.call.query.device)
            if biased and passed.dtype != torch.bool:
                passed = passed > MASKED_BELOW
            differs = disagreement(passed, allowed)
            if differs.any() and not different:
                where = differs.nonzero()[0].tolist()
                first = f"first at query {start + where[2]}, key {where[3]}"
            different += int(differs.sum())
        if different:
            return f"{different} mask entries differ from the rule, {first}"
        return self._bias_difference

    @cached_property
    def _bias_difference(self) -> str:
        """How the bias differs from the rebuilt one by more than rounding, where that is known."""
        call, rule, expected = self.call, self.call.expected_mask, self.call.expected_terms
        assert rule is not None
        if expected.bias is None and (self.added is None or not call.bias_known):
            return ""
        added, different, first = Terms(bias=self.added), 0, ""
        nothing = call.query.new_zeros(1, 1, 1, 1, dtype=torch.float64)
        for start, stop in row_blocks(call, 32):
            allowed = rule.allowed(start, stop, device=nothing.device, keys=rule.keys)
            got, want = (one.bias_of(start, stop, rule.keys) for one in (added, expected))
            got, want = (nothing if one is None else one for one in (got, want))
            differs = ~((got - want).abs() <= expected.unit * want.abs()) & allowed  # NaN differs
            if differs.any() and not different:
                at = differs.nonzero()[0].tolist()
                pair = [float(one.expand_as(differs)[tuple(at)]) for one in (got, want)]
                first = f"head {at[1]}, query {start + at[2]}, key {at[3]} "
                first += "gets {:.6g}, expected {:.6g}".format(*pair)
            different += int(differs.sum())
        return f"the bias on {different} scores is another: {first}" if different else ""

    @cached_property
    def added(self) -> Tensor | Bias | None:
        """The bias that the model added, beside its mask or within it."""
        call, used = self.call, self._used
        ours = call.expected_mask is not None and call.bias_known
        if not isinstance(used, GivenMask) or (ours and call.expected_terms.bias is None):
            return call.terms.bias  # what else the mask holds counts as a difference of the mask
        inside = used.bias
        if inside is None:
            return call.terms.bias
        beside = call.terms.bias_of(0, used.queries, used.keys)
        return inside if beside is None else inside.double() + beside

    @cached_property
    def _used(self) -> Rule:
        """What the kernel went by: the mask passed, or its own causality."""
        call = self.call
        queries, keys = call.query.shape[2], call.key.shape[2]
        if call.mask is None:
            # eager masks nothing by itself; others mask the future unless a single query asks. sdpa
            # draws the diagonal from the top left, the flash kernels to the bottom right.
            causal = call.is_causal and queries > 1 and "eager" not in call.kernel
            offset = 0 if call.kernel == "sdpa" else keys - queries
            return MaskRule(queries, keys, causal=causal, offset=offset)
        if call.mask.dim() == 2:  # the flash kernels take padding, and mask the future themselves
            return MaskRule(
                queries,
                keys,
                causal=call.is_causal and queries > 1,
                padding=call.mask[:, :keys].bool(),
                offset=keys - queries,
            )
        return GivenMask(call.mask[..., :keys], queries)

    @cached_property
    def rule(self) -> Rule:
        """M: rebuilt from facts, or as the model passed it where `taken` says so."""
        expected = self.call.expected_mask
        if expected is None or (self.taken and self.mask_difference):
            return self._used
        return expected

    @cached_property
    def terms(self) -> Terms:
        """The expected terms. A bias is that which the model added, rounded as it may be, where it
        is the expected one, or where nothing else tells it."""
        terms = self.call.expected_terms
        agrees = self.rule is self._used or not self.mask_difference
        sinks = self.call.terms.sinks if self._sinks_of_its_own else terms.sinks
        return replace(terms, bias=self.added if agrees else terms.bias, sinks=sinks)

    @property
    def _operands(self) -> tuple[Tensor, Tensor, Tensor, Rule, float, Terms]:
        call = self.call
        return (call.query, call.key, call.value, self.rule, call.expected_scaling, self.terms)

    def tiles(self, rows: slice | None = None) -> Iterator[Tile]:
        """The formula computed again, with bounds, in tiles; of a stretch of rows, or of all."""
        return tiles(*self._operands, rounding=self.call.rounding, rows=rows)

    def outputs(self) -> Iterator[Rows]:
        """As `tiles`, but the output and its bound alone, which is faster."""
        return outputs(*self._operands, rounding=self.call.rounding)

    def weights(self) -> Iterator[Tile]:
        """As `tiles`, without bounds."""
        return tiles(*self._operands)

    def output(self) -> Tensor:
        """The heads' output by the formula, (B, T, H, Dv) float64."""
        return attention(*self._operands)


def row_blocks(call: AttentionCall, rows: int = 256) -> Iterator[tuple[int, int]]:
    """Stretches of query rows, so that no (T, S) tensor need exist."""
    queries = call.query.shape[2]
    for start in range(0, queries, rows):
        yield start, min(start + rows, queries)


def _rows(rule: Rule, start: int, stop: int, device: torch.device) -> Tensor:
    """Rows of a mask as it was passed, boolean or additive."""
    if isinstance(rule, GivenMask):
        return rule.mask if rule.mask.shape[-2] == 1 else rule.mask[..., start:stop, :]
    return rule.allowed(start, stop, keys=rule.keys, device=device)


def _same(passed: Tensor | None, expected: Tensor | None) -> bool:
    if passed is None or expected is None:
        return passed is expected
    return torch.equal(passed, expected.to(passed.dtype))


def _unknown_type(call: AttentionCall) -> str:
    kind = getattr(getattr(call.module, "config", None), "model_type", "this model")
    return f"whether {kind} has rules of its own is not known"

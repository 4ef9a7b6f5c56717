"""What `edit` changes in one attention call: the formula's terms, its operands, its output."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from attnprobe.checking.basis import basis_of
from attnprobe.effects.sites import Axis, Sites, aligned, by_key_head, positions_of
from attnprobe.errors import InputError, ModelError
from attnprobe.formula import Tile, softmax, tiles
from attnprobe.masks import Allowing
from attnprobe.memory import need
from attnprobe.records import AttentionCall, Capture, captured, whole
from attnprobe.seam.interception import KernelOutput

Scale = float | Literal["none", "1/d_k"] | Callable[[AttentionCall], float]
Weights = Literal["uniform", "previous", "first"] | Callable[[Tensor], Tensor]
HeadOutput = Literal["zero", "mean", "resample"] | Capture

OPERANDS = ("query", "key", "value")


@dataclass(frozen=True, eq=False)
class Change:
    """What `edit` changes, and where; see there.

    `see` gets each tile of what is computed here, for who makes statistics of it.
    """

    where: Sites
    scale: Scale | None = None
    mask: Literal["none"] | None = None
    window: int | None = None
    drop: frozenset[int] | None = None
    temperature: float | None = None
    weights: Weights | None = None
    query: Capture | None = None
    key: Capture | None = None
    value: Capture | None = None
    head_output: HeadOutput | None = None
    reference: Capture | None = None
    seed: int = 0
    kernel: Literal["formula"] | None = None
    see: Callable[[AttentionCall, Tile], None] | None = None
    last: set[int] = field(default_factory=set)  # last positions of keys, where some are dropped

    @property
    def operands(self) -> dict[str, Capture]:
        """The captures that query, key and value are taken from."""
        given = {name: getattr(self, name) for name in OPERANDS}
        return {name: cap for name, cap in given.items() if cap is not None}

    @property
    def _terms(self) -> bool:
        """Whether a term of the formula changes."""
        mask = (self.mask, self.window, self.drop)
        return any(one is not None for one in (*mask, self.scale, self.temperature, self.weights))

    @property
    def changes_nothing(self) -> bool:
        """Whether nothing is named that is to change."""
        return not (self._terms or self.operands or self.kernel or self.head_output is not None)

    def refuse_missed(self) -> None:
        """Refuse positions of keys to drop that no forward had, if one ran.

        Raises:
            InputError: there is one.
        """
        missed = sorted(one for one in self.drop or () if self.last and one > max(self.last))
        if missed:
            raise InputError(
                f"position {missed[0]} was not dropped: the last of the texts that ran is "
                f"{max(self.last)}"
            )

    def refuse_nonsense(self) -> None:
        """Refuse what no forward can be run with.

        Raises:
            InputError: an unknown name, a number out of range, changes that cannot go together.
        """
        one_of("mask", self.mask, ("none",))
        one_of("kernel", self.kernel, ("formula",))
        if not callable(self.scale) and not _is_number(self.scale):
            one_of("scale", self.scale, ("none", "1/d_k", "a number"))
        if not callable(self.weights):
            one_of("weights", self.weights, ("uniform", "previous", "first"))
        if self.window is not None and whole(self.window, "window") < 1:
            raise InputError(f"a window is at least 1, the word itself; got {self.window}")
        if self.temperature is not None and not (
            _is_number(self.temperature) and self.temperature > 0
        ):
            raise InputError(f"expected a temperature above 0, got {self.temperature!r}")
        for cap in self.operands.values():
            captured(cap)
        if self.operands and (self._terms or self.head_output is not None):
            raise InputError(
                f"{' and '.join(self.operands)} cannot change together with the formula or its "
                "output: make an edit of each"
            )
        if not isinstance(self.head_output, Capture):
            one_of("head_output", self.head_output, ("zero", "mean", "resample", "a capture"))
        if (self.head_output in ("mean", "resample")) != (self.reference is not None):
            raise InputError(
                "head_output='mean' or 'resample' asks for reference=, what ap.capture returns, "
                "and nothing else does"
            )
        if self.reference is not None:
            captured(self.reference)

    def patch(self, call: AttentionCall) -> dict[str, Tensor]:
        """The query, key and value that stand for a call's own, each of its shape."""
        found = {}
        for name, cap in self.operands.items():
            axis: Axis = "query" if name == "query" else "key"
            sites = self.where.of(call, axis)
            if sites is not None:
                own = getattr(call, name)  # (B, H or Hkv, T or S, D)
                other, has = aligned(call, cap, name)
                here = by_key_head(sites, own.shape[1]) & has[..., None]
                here = here.transpose(1, 2)[..., None]  # (B or 1, H or Hkv, T or S, 1)
                found[name] = torch.where(here, other.to(own.dtype), own)
        return found

    def handle(self, call: AttentionCall, run: Callable[[], KernelOutput]) -> KernelOutput:
        """What stands for a kernel's output; where nothing changes, the kernel's own."""
        sites = self._reached(call)
        if sites is None:
            return run()
        if self.operands or self._terms or self.kernel:
            output, weights = self._computed(call)
            if not sites.all():
                output, weights = _joined(sites, (output, weights), run())
            if torch.is_grad_enabled() and any(one.requires_grad for one in _parameters(call)):
                output = _NoWayBack.apply(  # type: ignore[no-untyped-call]
                    output, output.new_zeros((), requires_grad=True)
                )
        else:
            output, weights = run()
        if self.head_output is not None:
            other, has = self._other_output(call)
            here = (sites & has[..., None])[..., None]  # (B or 1, T or 1, H, 1)
            output = torch.where(here, other.to(output.dtype), output)
        return output.contiguous(), weights

    def _reached(self, call: AttentionCall) -> Tensor | None:
        """Whose output changes, (B or 1, T or 1, H) bool; None for no one's."""
        if not self.operands:
            return self.where.of(call, "query")
        reached = None
        for name in self.operands:
            sites = self.where.of(call, "query" if name == "query" else "key")
            if sites is None:
                return None
            heads = sites.any(1, keepdim=True)  # (B or 1, 1, H)
            if name != "query":  # all heads that a key head serves
                served = call.heads // call.key.shape[1]
                heads = by_key_head(heads, call.key.shape[1]).repeat_interleave(served, -1)
            reached = heads if reached is None else reached | heads
        return reached

    def _computed(self, call: AttentionCall) -> KernelOutput:
        """The changed formula, in float64, rounded to the call's dtype; with weights under eager,
        which holds them as well."""
        basis = basis_of(call)
        if basis.unheld:
            raise ModelError(f"layer {call.layer} cannot be edited: {basis.unheld}")
        batch, heads, queries, _ = call.query.shape
        output = call.value.new_empty(batch, queries, heads, call.value.shape[-1])
        weights = None
        if "eager" in call.kernel:
            shape = (batch, heads, queries, call.key.shape[2])
            need(
                2 * math.prod(shape) * call.value.element_size(),
                f"the weights of {batch} × {heads} heads over {queries:,} × {shape[3]:,} tokens",
                "a model loaded with attn='sdpa', fewer texts or a shorter one",
                call.value.device,
            )
            weights = call.value.new_zeros(shape)
        rule, scaling = self._rule(call, basis.rule), self._scaling(call)
        operands = (call.query, call.key, call.value)
        for tile in tiles(*operands, rule, scaling, basis.terms, weigh=partial(self._weigh, call)):
            rows = slice(tile.start, tile.stop)
            output[:, rows] = tile.output.transpose(1, 2).to(output.dtype)
            if weights is not None:
                weights[:, :, rows, : tile.weights.shape[-1]] = tile.weights.to(weights.dtype)
            if self.see is not None:
                self.see(call, tile)
        return output, weights

    def _scaling(self, call: AttentionCall) -> float:
        if self.scale is None:
            return call.expected_scaling
        if self.scale == "none":
            return 1 / call.scaled_before
        if self.scale == "1/d_k":
            return 1 / call.query.shape[-1] / call.scaled_before
        found = self.scale(call) if callable(self.scale) else self.scale
        if not _is_number(found):
            raise InputError(f"expected a number from scale, got {found!r}")
        return float(found)

    def _rule(self, call: AttentionCall, rule: Allowing) -> Allowing:
        if self.mask == "none" and call.kind == "self":
            if call.expected_mask is None:
                raise ModelError(f"layer {call.layer}: its M is not known, so it cannot be changed")
            if call.past:
                raise ModelError(
                    "words in a cache cannot see later ones: without M, generate with "
                    "use_cache=False"
                )
            rule = replace(call.expected_mask, causal=False, window=None, ahead=None, chunk=None)
        window = (
            min(self.window, call.key.shape[2]) if self.window and call.kind == "self" else None
        )
        dropped = None
        if self.drop is not None:
            here = positions_of(call, "key")  # (B or 1, S)
            self.last.add(int(here.max()))
            dropped = torch.isin(here, torch.tensor(sorted(self.drop), device=here.device))
        if window is None and dropped is None:
            return rule
        return _Narrowed(rule, call.first_key, window, dropped)

    def _weigh(
        self, call: AttentionCall, masked: Tensor, sinks: Tensor | None, start: int
    ) -> Tensor:
        """See `attnprobe.formula.Weigh`."""
        if self.temperature is not None:
            masked = masked / self.temperature
            sinks = None if sinks is None else sinks / self.temperature
        if callable(self.weights):
            found = self.weights(softmax(masked, sinks))
            if not isinstance(found, Tensor) or found.shape != masked.shape:
                shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise InputError(
                    f"weights= must return a tensor of shape {tuple(masked.shape)}, got {shape}"
                )
            if not torch.isfinite(found).all():
                raise InputError("weights= returned NaN or infinity: expected finite weights")
            return found.to(masked)
        if self.weights is None:
            return softmax(masked, sinks)
        seen = masked > -torch.inf  # (B, H, t, K)
        if self.weights == "uniform":
            return seen.to(masked) / seen.sum(-1, keepdim=True).clamp(min=1)
        own = call.first_key + start + torch.arange(masked.shape[-2], device=masked.device)
        places = torch.arange(masked.shape[-1], device=masked.device)
        at = seen.int().argmax(-1)  # (B, H, t): the first key that a word sees
        if self.weights == "previous":
            before = seen & (places < own[:, None])
            last = (before * (places + 1)).argmax(-1)
            at = torch.where(before.any(-1), last, at)
        one_hot = torch.nn.functional.one_hot(at, masked.shape[-1])  # (B, H, t, K)
        return (one_hot * seen).to(masked)

    def _other_output(self, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """The head output that stands for a call's own, (B or 1, T or 1, H, Dv), and where there is
        one, (B or 1, T or 1) bool."""
        everywhere = torch.ones(1, 1, dtype=torch.bool, device=call.query.device)
        if isinstance(self.head_output, Capture):
            return aligned(call, self.head_output, "head_output_model")
        if self.head_output == "zero":
            return call.value.new_zeros(1, 1, 1, 1), everywhere
        assert self.reference is not None
        tokens = head_outputs(call, self.reference)  # (N, H, Dv)
        if self.head_output == "mean":
            return tokens.double().mean(0)[None, None], everywhere
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randperm(len(tokens), generator=generator).to(tokens.device)
        at = positions_of(call, "query") % len(tokens)  # (B or 1, T)
        return tokens[drawn[at]], everywhere


@dataclass(frozen=True, eq=False)
class _Narrowed:
    """A rule that a window, and keys that no query sees, (B or 1, S) bool, narrow further."""

    rule: Allowing
    offset: int
    window: int | None
    dropped: Tensor | None

    def allowed(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        keys: int | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """As `MaskRule.allowed`."""
        allowed = self.rule.allowed(start, stop, keys=keys, device=device)  # (B, H or 1, t, K)
        if self.window is not None:
            key_pos = torch.arange(allowed.shape[-1], device=allowed.device)
            query_pos = torch.arange(start, start + allowed.shape[-2], device=allowed.device)
            allowed = allowed & (key_pos > query_pos[:, None] + self.offset - self.window)
        if self.dropped is not None:
            allowed = allowed & ~self.dropped[:, None, None, : allowed.shape[-1]]
        return allowed


class _NoWayBack(torch.autograd.Function):
    """What is computed here has no gradient: a backward pass through it is refused, not wrong."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, _: Tensor) -> Tensor:
        """The output as it is."""
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Refuse."""
        raise ModelError(
            "an edit computes attention without gradients: no backward pass goes through it"
        )


def head_outputs(call: AttentionCall, cap: Capture) -> Tensor:
    """The head output of all tokens of a capture in a call's layer, without padding, (N, H, Dv).

    Raises:
        InputError: it has or kept no such layer, or one of other heads or sizes.
    """
    found = cap.call_like(call)
    sizes = (call.heads, call.value.shape[-1])
    output = None if found is None else found.head_output_model
    if output is None or output.shape[-2:] != sizes:
        raise InputError(
            f"layer {call.layer}: the reference has no head output of {sizes[0]} heads of size "
            f"{sizes[1]}: capture it with the same model"
        )
    rows = cap.padding if call.part in ("", "encoder") else cap.output_padding
    return output[rows].to(call.query.device)


def _joined(sites: Tensor, changed: KernelOutput, own: KernelOutput) -> KernelOutput:
    """The changed output and weights where `sites`, (B or 1, T or 1, H) bool; else the model's."""
    output = torch.where(sites[..., None], changed[0], own[0])
    if changed[1] is None or own[1] is None:
        return output, None
    return output, torch.where(sites.transpose(1, 2)[..., None], changed[1], own[1])


def _parameters(call: AttentionCall) -> list[torch.nn.Parameter]:
    return [] if call.module is None else list(call.module.parameters())


def _is_number(given: object) -> bool:
    return isinstance(given, Real) and not isinstance(given, bool) and math.isfinite(given)


def one_of(what: str, given: object, names: tuple[str, ...]) -> None:
    """Refuse what is none of some names; None is no name, and passes.

    Raises:
        InputError: it is something else.
    """
    if given is not None and given not in names:
        raise InputError(f"{what} is one of {', '.join(names)}; got {given!r}")

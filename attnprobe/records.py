"""What a capture holds: frozen records, in the order in which the model made them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, SupportsIndex, TypeGuard, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from attnprobe.errors import InputError
from attnprobe.masks import MaskRule
from attnprobe.rounding import Arithmetic, arithmetic
from attnprobe.terms import PLAIN, Terms
from attnprobe.words import Words


def whole(value: Any, what: str) -> int:
    """A whole number of any kind that Python takes for an index; True and False are none.

    Raises:
        InputError: it is something else.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass  # refused below, in words
    raise InputError(f"expected a whole number for {what}, got {value!r}")


def several(given: object) -> TypeGuard[Iterable[Any]]:
    """Whether this names some, as a list does, and not one: a tensor without axes is a number."""
    return isinstance(given, Iterable) and getattr(given, "ndim", 1) != 0


def counted(number: int, what: str) -> str:
    """1 text, 2 texts."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def dtype_name(dtype: torch.dtype) -> str:
    """float32, bfloat16, …"""
    return str(dtype).removeprefix("torch.")


def seeded(seed: Any) -> int:
    """A seed that torch's generators take.

    Raises:
        InputError: it is no whole number, or out of their range.
    """
    number = whole(seed, "seed")
    if not -(2**63) <= number < 2**64:
        raise InputError(f"expected a seed from -2**63 to 2**64 - 1, got {number}")
    return number


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model with its tokenizer, as `load` returns it.

    `tokenizer` is None for a bare model, which then takes token ids only. `name` is what the
    model was loaded as, for reports.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None = None
    name: str = ""

    @property
    def layers(self) -> int | None:
        """How many layers the config speaks of, attention in them or not; None if of none."""
        layers = getattr(getattr(self.model, "config", None), "num_hidden_layers", None)
        return layers if isinstance(layers, int) else None


@dataclass(frozen=True)
class Origin:
    """The model that a saved capture was made of; see `attnprobe.saving.origins`."""

    name: str
    """As `LanguageModel.name`."""
    kind: str
    """The name of its class."""
    layers: int | None
    """As `LanguageModel.layers`."""
    config: dict[str, str]
    """A hash of each of its config's values."""
    weights: dict[str, str]
    """A hash of each of its weights."""


Kind = Literal["self", "cross"]


def part_of(kind: Kind, in_encoder: bool | None) -> str:
    """Of an encoder-decoder's attention: encoder, decoder or cross; empty of other models'."""
    if kind == "cross":
        return "cross"
    return {None: "", True: "encoder", False: "decoder"}[in_encoder]


def writes(key: Tensor, value: Tensor) -> int:
    """How often two tensors were written into so far; 0 where torch does not count it."""
    return sum(one._version for one in (key, value) if not one.is_inference())


WRITTEN = "its keys or values were written into after it ran, so what it was given is not known"


@dataclass(frozen=True)
class Cached:
    """The cache that a call was given, and how much had gone by when it was."""

    number: int
    """Which of the caches that the probe saw."""
    past: int
    """How many tokens went by before this forward, those that have left the cache among them."""
    inexact: str
    """Why it is not known to give back what it was given, bit for bit; empty where it is."""
    writes: int
    """What `writes` gave of the call's key and value."""


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call of one layer: what the kernel was given, and what it returned.

    Sizes: `B` texts, `H` heads, `Hkv` key/value heads, `T` tokens, `S` keys, `D` head size,
    `Dv` value head size, `E` hidden size. All tensors are detached, in the model's own dtype,
    on the model's own device, or where `capture` was told to keep them.
    """

    layer: int
    """Layer, counted from 0 by order of calls of this `part` within one forward."""
    name: str
    """The attention module's name in the model, such as `transformer.h.0.attn`."""
    kind: Kind
    kernel: str
    """transformers' name of the kernel that ran: `sdpa`, `eager`, …"""
    query: Tensor  # (B, H, T, D)
    key: Tensor  # (B, Hkv, S, D)
    value: Tensor  # (B, Hkv, S, Dv)
    scaling: float
    """The factor on q·k that the model passed to the kernel."""
    expected_scaling: float
    """The factor that the formula and the model's config ask for: 1/√d_k where it says no other."""
    mask: Tensor | None
    """What the model passed: added to the scores, or boolean (True: may attend), or None."""
    is_causal: bool
    """Whether the kernel masks the future by itself where `mask` is None."""
    expected_mask: MaskRule | None
    """M rebuilt from facts: padding, causality, window, cache offset; None where the caller gave a
    mask of more than (B, S), so that there are no facts to rebuild it from."""
    scaled_before: float = 1.0
    """The factor on q·k that `query` and `key` bring along, where a model multiplies them by it
    before its kernel gets them; 1/√d_k in OPT and its like."""
    first_key: int = 0
    """Where this forward's own keys begin: after those that a cache held before it."""
    cache: Cached | None = None
    """The cache that keeps its keys and values for the next forward; None where it has none."""
    in_encoder: bool | None = None
    """Whether it is a call of an encoder-decoder's encoder; None of other models."""
    step: int = 0
    """Which forward of the model, counted from 0 since the probe was opened."""
    terms: Terms = PLAIN
    """What the model passed beside: softcap, bias, sinks."""
    expected_terms: Terms = PLAIN
    """What the model's config and weights ask for beside; a bias that neither tells is missing."""
    unheld: tuple[str, ...] = ()
    """What the model passed beside that the formula here does not hold, such as packed texts."""
    dropout: float = 0.0
    facts_known: bool = True
    """Whether scale and mask are known for this type; see `attnprobe.architecture.facts`."""
    bias_known: bool = True
    """Whether what it adds to the scores is known as well, or that it adds nothing."""
    operands: float = 0.0
    """The unit with which torch rounded a matrix product's operands then; 0 if it did not."""
    module: nn.Module | None = None
    parent: nn.Module | None = None
    """The module that holds the attention module."""
    position_ids: Tensor | None = None
    """The position of each token, (B or 1, T); None where a token has several."""
    frequency_dtype: torch.dtype = torch.float32
    """The dtype in which the model holds its rotary frequencies, if it has any."""
    hidden_states: Tensor | None = None  # (B, T, E): X
    head_output_model: Tensor | None = None  # (B, T, H, Dv)
    weights_model: Tensor | None = None  # (B, H, T, S), eager only
    attention_output: Tensor | None = None  # (B, T, E): after W_O

    def __repr__(self) -> str:
        shapes = f"query {tuple(self.query.shape)}, key {tuple(self.key.shape)}"
        return f"AttentionCall({self.name}, layer {self.layer}, step {self.step}, {shapes})"

    @property
    def part(self) -> str:
        """Of an encoder-decoder: encoder, decoder or cross; empty of other models."""
        return part_of(self.kind, self.in_encoder)

    @property
    def written(self) -> bool:
        """Whether the cache's keys or values, which the record shares, were written into since."""
        return self.cache is not None and self.cache.writes != writes(self.key, self.value)

    @property
    def past(self) -> int:
        """How many tokens went by before this forward; a cache may have let some of them go."""
        return 0 if self.cache is None else self.cache.past

    @property
    def dtype(self) -> torch.dtype:
        """The dtype the kernel ran in."""
        return self.query.dtype

    @property
    def rounding(self) -> Arithmetic:
        """How the kernel rounds."""
        return arithmetic(self.dtype, self.kernel, self.operands)

    @property
    def layer_rounding(self) -> Arithmetic:
        """How the linear layers, norms and rotary positions round, on either side of the kernel."""
        return arithmetic(self.dtype, "", self.operands)

    @property
    def heads(self) -> int:
        """The number of (query) heads, H."""
        return self.query.shape[1]

    @property
    def offloaded(self) -> bool:
        """Whether the module's weights are elsewhere between forwards (accelerate's offloading)."""
        return self.module is not None and any(one.is_meta for one in self.module.parameters())


@dataclass(frozen=True)
class UnseenAttention:
    """An attention module that ran, and of whose attention not all was seen."""

    layer: int
    name: str
    reason: str
    part: str = ""
    """As `AttentionCall.part`."""

    def __str__(self) -> str:
        return f"{self.name} computed its attention unseen: {self.reason}"


@dataclass(frozen=True)
class LeftOut:
    """An attention call that was seen and not kept, as `capture` was told."""

    layer: int
    part: str = ""
    """As `AttentionCall.part`."""


class Calls(list[AttentionCall]):
    """The calls that a probe saw, in order.

    `unseen` holds the attention modules that ran and asked for no kernel. A slice holds them as
    well: what was not seen is not made good by looking at a part.
    """

    def __init__(
        self, calls: Iterable[AttentionCall] = (), unseen: Iterable[UnseenAttention] = ()
    ) -> None:
        super().__init__(calls)
        self.unseen = list(unseen)

    @overload
    def __getitem__(self, at: SupportsIndex) -> AttentionCall: ...

    @overload
    def __getitem__(self, at: slice) -> Calls: ...

    def __getitem__(self, at: SupportsIndex | slice) -> AttentionCall | Calls:
        found = super().__getitem__(at)
        return Calls(found, self.unseen) if isinstance(found, list) else found


@dataclass(frozen=True, eq=False)
class Target:
    """What an encoder-decoder's decoder was given, as a `Capture` holds what the encoder was."""

    texts: tuple[str | None, ...]
    input_ids: Tensor  # (B, T)
    padding: Tensor  # (B, T) bool
    words: tuple[Words, ...]


@dataclass(frozen=True, eq=False)
class Capture:
    """One forward of a model over one or more texts.

    `words` says how each text is read, token by token and word by word, without the padding;
    `padding` is True where a token stands and False where a batch was filled up, (B, T) bool.
    `output` is the model's logits, (B, T, V), or its last hidden state, (B, T, E), where it has no
    language-model head.
    """

    lm: LanguageModel | None
    texts: tuple[str | None, ...]
    input_ids: Tensor  # (B, T)
    padding: Tensor  # (B, T) bool
    words: tuple[Words, ...]
    calls: tuple[AttentionCall, ...]
    output: Tensor
    unseen: tuple[UnseenAttention, ...] = ()
    """Attention modules that ran, and of whose attention not all was seen."""
    left_out: tuple[LeftOut, ...] = ()
    """Attention calls that were seen and not kept: `capture` was told which layers to keep."""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """The keyword arguments of the forward, for running it again."""
    target: Target | None = None
    """What an encoder-decoder's decoder was given; the rest is then of its encoder. Tables and
    views are of one of them: `encoder` and `decoder`."""
    part: Literal["", "encoder", "decoder", "cross"] = ""
    """Which part of an encoder-decoder's capture this is."""
    source: Target | None = None
    """Of cross attention: what is attended to, the encoder's texts; the rest is of the decoder."""
    origin: Origin | None = None
    """Of a capture that was loaded without its model: what that was."""

    @property
    def model_name(self) -> str:
        """What the model was loaded as; empty where that is not known."""
        known = self.lm or self.origin
        return "" if known is None else known.name

    @property
    def model_layers(self) -> int | None:
        """As `LanguageModel.layers`."""
        known = self.lm or self.origin
        return None if known is None else known.layers

    @property
    def encoder(self) -> Capture:
        """An encoder-decoder's encoder: its self-attention, as a capture of its own.

        Raises:
            InputError: the capture is of no encoder-decoder.
        """
        return self._part("encoder")

    @property
    def decoder(self) -> Capture:
        """An encoder-decoder's decoder: its self-attention, as a capture of its own.

        Raises:
            InputError: the capture is of no encoder-decoder.
        """
        return self._part("decoder")._of_target()

    def _of_target(self) -> Capture:
        """With the decoder's texts in the place of the encoder's."""
        assert self.target is not None
        target = self.target
        return replace(
            self,
            texts=target.texts,
            input_ids=target.input_ids,
            padding=target.padding,
            words=target.words,
        )

    @property
    def cross(self) -> Capture:
        """An encoder-decoder's cross attention, as a capture of its own: the decoder's queries, and
        the encoder's keys. `weights`, `scores`, `table`, `head_view` and `model_view` show it.

        Raises:
            InputError: the capture is of no encoder-decoder.
        """
        source = Target(self.texts, self.input_ids, self.padding, self.words)
        return replace(self._part("cross")._of_target(), source=source)

    def _both(self) -> Target:
        """The decoder's texts of a capture that holds both parts; refuses any other."""
        if self.target is None or self.part:
            raise InputError("this capture has no encoder and decoder: it is of one text's model")
        return self.target

    def _part(self, part: Literal["encoder", "decoder", "cross"]) -> Capture:
        self._both()
        calls = tuple(call for call in self.calls if call.part == part)
        left_out = tuple(one for one in self.left_out if one.part == part)
        if left_out and not calls:
            where = "cross attention" if part == "cross" else f"the {part}"
            raise InputError(f"no layer of {where} was kept: capture one")
        unseen = tuple(one for one in self.unseen if one.part == part)
        return replace(self, calls=calls, left_out=left_out, unseen=unseen, part=part)

    @property
    def output_padding(self) -> Tensor:
        """Where `output` stands for a token, (B, T) bool."""
        return self.padding if self.target is None else self.target.padding

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def layers(self) -> int:
        """The number of self-attention layers, seen and kept or not; of `cross`, of cross
        attention's."""
        cross = self.part == "cross"
        parts = [one.part for some in (self.calls, self.unseen, self.left_out) for one in some]
        return sum((part == "cross") == cross for part in parts)

    @property
    def causal(self) -> bool:
        """Whether no word sees a later one.

        Raises:
            InputError: no call was kept that could tell.
        """
        if not self.calls:
            raise InputError("no attention call was kept of this capture: capture other layers")
        rule = self.calls[0].expected_mask
        return rule is not None and rule.causal

    def call(self, layer: int, kind: Kind = "self") -> AttentionCall:
        """The attention call of one layer.

        Raises:
            InputError: the layer is out of range (the message says the range), or was not kept;
                self-attention of an encoder-decoder's capture as a whole.
        """
        if self.part == "cross":
            kind = "cross"
        elif kind == "self":
            self._refuse_both()
        layer = whole(layer, "layer")
        calls = {call.layer: call for call in self.calls if call.kind == kind}
        for unseen in self.unseen:
            if layer == unseen.layer and (kind == "cross") == (unseen.part == "cross"):
                raise InputError(f"layer {layer}: {unseen}")
        others = [one for one in self.left_out if (one.part == "cross") == (kind == "cross")]
        if any(one.layer == layer for one in others):
            raise _not_kept(layer)
        if layer not in calls:
            last = max([*calls, *(one.layer for one in others)], default=-1)
            raise InputError(
                f"layer {layer} is out of range: the model has {last + 1} {kind}-attention "
                f"layers, numbered 0 to {last}"
            )
        return calls[layer]

    def call_like(self, other: AttentionCall) -> AttentionCall | None:
        """The call of the same layer and part as one of another forward; None if there is none.

        Raises:
            InputError: it was not kept.
        """
        place = (other.layer, other.part)
        if any((one.layer, one.part) == place for one in self.left_out):
            raise _not_kept(other.layer)
        found = (one for one in self.calls if (one.layer, one.part) == place)
        return next(found, None)

    def positions(self, text: int) -> Tensor:
        """The positions of a text's own tokens within the padded batch, (tokens,) int64.

        Raises:
            InputError: there is no such text; an encoder-decoder's capture as a whole.
        """
        self._refuse_both()
        return self.padding[self._text(text)].nonzero().flatten()

    def key_positions(self, text: int) -> Tensor:
        """As `positions`, of what the text's tokens attend to: others in cross attention only."""
        if self.source is None:
            return self.positions(text)
        return self.source.padding[self._text(text)].nonzero().flatten()

    def key_words_of(self, text: int) -> Words:
        """As `words_of`, of what the text's tokens attend to: others in cross attention only."""
        return self.words_of(text) if self.source is None else self.source.words[self._text(text)]

    def words_of(self, text: int) -> Words:
        """How one text is read: its tokens and words.

        Raises:
            InputError: there is no such text; an encoder-decoder's capture as a whole.
        """
        self._refuse_both()
        return self.words[self._text(text)]

    def __repr__(self) -> str:
        name = self.model_name or "no model"
        left_out = f", {len(self.left_out)} not kept" if self.left_out else ""
        return (
            f"Capture({name}: {counted(len(self), 'text')}, {int(self.padding.sum())} tokens, "
            f"{len(self.calls)} attention calls{left_out})"
        )

    def _refuse_both(self) -> None:
        if self.target is not None and not self.part:
            raise InputError(
                "this is an encoder-decoder's capture, of two texts: look at cap.encoder or "
                "cap.decoder, or at cap.cross"
            )

    def _text(self, text: int) -> int:
        text = whole(text, "text")
        if not 0 <= text < len(self):
            raise InputError(
                f"text {text} is out of range: the capture holds {len(self)}, "
                f"numbered 0 to {len(self) - 1}"
            )
        return text


def _not_kept(layer: int) -> InputError:
    return InputError(
        f"layer {layer} was not kept: capture it, with capture(…, layers=[…, {layer}])"
    )


def captured(cap: object) -> Capture:
    """The capture that a public function was given.

    Raises:
        InputError: it is something else.
    """
    if not isinstance(cap, Capture):
        raise InputError(f"expected a capture, what ap.capture returns; got {type(cap).__name__}")
    return cap

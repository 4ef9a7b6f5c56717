"""What one open probe or replacement knows: where the forward stands, and each call's record."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import Cache, QuantizedCache

from attnprobe.architecture import additions, facts
from attnprobe.architecture.known import KNOWN_TYPES
from attnprobe.architecture.layouts import layout_of
from attnprobe.errors import InputError, ModelError
from attnprobe.records import AttentionCall, Cached, Kind, UnseenAttention, part_of, writes
from attnprobe.rounding import operand_unit
from attnprobe.seam.following import Following
from attnprobe.seam.inspecting import arguments_of, asking, computes_softmax
from attnprobe.seam.interrupts import modules_around
from attnprobe.terms import Terms

Fact = TypeVar("Fact")
KernelOutput = tuple[Tensor, Tensor | None]
Handler = Callable[[AttentionCall, Callable[[], KernelOutput]], KernelOutput]
"""Gets a call's inputs and a function that runs the kernel; returns what a kernel returns: the
output (B, T, H, Dv), and the weights or None."""


@dataclass(eq=False)
class _Entered:
    """An attention module that is running, with its arguments.

    `asks` says whether it should ask for a kernel, `asked` whether attention of it was seen, and
    `refused` why some was not.
    """

    module: nn.Module
    arguments: dict[str, Any]
    asks: bool
    asked: bool = False
    refused: str = ""

    @property
    def kind(self) -> Kind:
        others = ("encoder_hidden_states", "key_value_states")
        is_cross = any(self.arguments.get(name) is not None for name in others)
        return "cross" if is_cross else "self"


@dataclass(eq=False)
class Interception:
    """One open probe or replacement: which modules it concerns, and where the forward stands."""

    model: nn.Module
    handle: Handler
    leave: Callable[[nn.Module, Any], None] | None = None
    forget: Callable[[], object] | None = None  # called where a forward was left half-way
    replaces: bool = False
    patch: Callable[[AttentionCall], dict[str, Tensor]] | None = None
    names: dict[nn.Module, str] = field(init=False)
    asking: set[nn.Module] = field(init=False)  # those whose code asks for a kernel
    parents: dict[nn.Module, nn.Module] = field(init=False)
    apart: dict[nn.Module, nn.Module] = field(default_factory=dict)  # W_O -> its attention module
    thread: int = field(default_factory=threading.get_ident)  # the one that opened it
    ran: bool = False  # whether the model ran in that thread,
    ran_elsewhere: bool = False  # and in others
    running: list[nn.Module] = field(default_factory=list)  # models within the model that run
    frames: list[dict[str, Any]] = field(default_factory=list)  # their arguments
    made: dict[tuple[Any, ...], Any] = field(default_factory=dict)  # see `_once`
    inside: list[_Entered] = field(default_factory=list)  # attention modules running
    unseen: list[UnseenAttention] = field(default_factory=list)
    counts: dict[tuple[str, bool | None], int] = field(
        default_factory=dict
    )  # calls in this forward
    caches: weakref.WeakKeyDictionary[Cache, int] = field(  # the number of each
        default_factory=weakref.WeakKeyDictionary
    )
    caches_seen: int = 0
    prepared: dict[str, tuple[Any, Tensor]] = field(default_factory=dict)  # see `note_prepared`
    step: int = -1
    frequency_dtype: torch.dtype = torch.float32
    encoder: str = ""  # how the names of an encoder-decoder's encoder's modules begin
    following: Following = field(init=False)
    follows: bool = False  # whether there are modules to follow
    config: facts.Config | None = None  # the last call's, in this forward
    blocks: dict[int, tuple[BlockMask, Tensor]] = field(default_factory=dict)  # see `_mask`

    def __post_init__(self) -> None:
        self.names = {module: name for name, module in self.model.named_modules()}
        self.asking = asking(self.names)
        self.parents = {
            child: one
            for one in self.names
            for child in one._modules.values()  # one.children() takes ten times as long
            if child is not None
        }
        me = weakref.proxy(self)  # in a cycle it would keep what was captured until Python looks
        self.following = Following(
            lambda *found: me.followed(*found), lambda reason: me.refused(reason)
        )
        config = getattr(self.model, "config", None)
        encoder_of = getattr(self.model, "get_encoder", None)  # a wrapper hands it on
        if getattr(config, "is_encoder_decoder", False) and encoder_of is not None:
            self.encoder = f"{self.names[encoder_of()]}."
        for module in self.asking:
            layout = layout_of(module, self.parents.get(module))
            if layout is not None and layout.apart:
                layer = layout.output_layer(module, self.parents.get(module))
                if layer is not None:
                    self.apart[layer] = module

    @property
    def here(self) -> bool:
        """Whether what runs now is of the thread that opened this; or, of a replacement, a backward
        pass, which torch may run in threads of its own."""
        own = threading.get_ident() == self.thread
        return own or (self.replaces and torch._C._current_graph_task_id() != -1)

    def hook(self, method: Callable[..., None]) -> Callable[..., None]:
        """A method as a forward hook, for the forwards of this interception's thread alone."""

        def run(*given: Any) -> None:  # another thread may be about to call what is taken away
            if self.here:
                self.ran = True
                method(*given)
            else:
                self.ran_elsewhere = True

        return run

    def refuse_elsewhere(self) -> None:
        """Refuse a block in which the model ran, but not in the block's own thread.

        Raises:
            InputError: this is so.
        """
        if self.ran_elsewhere and not self.ran:
            raise InputError(
                "the model ran in another thread than the one that opened the block, which is seen "
                "and changed in its own thread alone: open it in the thread that runs the model"
            )

    def _forget_what_was_left(self) -> None:
        """Drop what stopped half-way: torch calls no hook of it after a KeyboardInterrupt."""
        still = modules_around()
        if self.running[-1] in still:
            return
        kept = [one in still for one in self.running]
        self.frames = [one for one, keep in zip(self.frames, kept, strict=True) if keep]
        self.running = [one for one, keep in zip(self.running, kept, strict=True) if keep]
        self.inside = [one for one in self.inside if one.module in still]
        self.prepared = {}
        self.following.close()
        if self.forget is not None:
            self.forget()

    def enter_model(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model, or a model within it, begins: its arguments are a frame until it returns."""
        if self.frames:
            self._forget_what_was_left()
        if not self.frames:
            self.step += 1
            self.counts = {}
            self.blocks = {}
            self.config = None
            self.frequency_dtype = facts.frequency_dtype(self.names)
        arguments = arguments_of(module, args, kwargs)
        caches = [value for value in arguments.values() if isinstance(value, Cache)]
        arguments = self._as_given(arguments, caches[0] if caches else None)
        # Read now: once the layers have run, the cache holds this forward's tokens too.
        arguments["past"] = _gone_by(caches[0]) if caches else 0
        config = getattr(module, "config", None)
        arguments["encoder_decoder"] = getattr(config, "is_encoder_decoder", False)
        self.frames.append(arguments)
        self.made = {}
        self.running.append(module)

    def note_prepared(self, given: dict[str, Any], made: dict[str, Any]) -> None:
        """`generate` has made a forward's arguments of what it was given.

        For a cache of fixed size it makes a whole mask of a row of 0 and 1 for each text, or none
        where it finds nothing to mask: the row is what M can be rebuilt from.
        """
        names = ("attention_mask", "decoder_attention_mask")
        self.prepared = {
            name: (made.get(name), given[name])
            for name in names
            if not _is_rows(made.get(name)) and _is_rows(given.get(name))
        }

    def _as_given(self, arguments: dict[str, Any], cache: Cache | None) -> dict[str, Any]:
        """A model's arguments; of a mask that `generate` made, or left out, what it was given."""
        found = dict(arguments)
        fixed = cache is not None and cache.is_compileable
        for name, (made, given) in self.prepared.items():
            room = int(cache.get_max_length()) - given.shape[-1] if cache is not None else 0
            filled = nn.functional.pad(given, (0, max(room, 0)))
            if made is None and fixed and not self.frames and found.get(name) is None:
                found[name] = filled
            found |= {key: filled for key, value in arguments.items() if value is made is not None}
        return found

    def leave_model(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """It returns, or an exception came first."""
        self.frames.pop()
        self.running.pop()
        self.made = {}
        if not self.frames:
            self.prepared = {}
        if self.follows and not self.frames and output is not None:
            self._note_new_modules()

    def _note_new_modules(self) -> None:
        """Some models (BigBird) put other attention modules in their place as they run."""
        for name, module in self.model.named_modules():
            if module not in self.names and computes_softmax(type(module)):  # type: ignore[arg-type]
                reason = "the model put it in place as it ran, which it will not do again"
                self._note_unseen("self", module, name, reason)

    def _note_unseen(self, kind: Kind, module: nn.Module, name: str, reason: str) -> None:
        part = part_of(kind, self._in_encoder(module))
        self.unseen.append(UnseenAttention(self._count(kind, module), name, reason, part))

    def enter_attention(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """An attention module begins."""
        self.inside.append(_Entered(module, arguments_of(module, args, kwargs), asks=True))

    def leave_attention(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """It returns; attention that should have been seen and was not is noted."""
        entered = self.inside.pop()
        reason = entered.refused
        if entered.asks and not entered.asked:
            reason = "it asks transformers for no kernel"
        if reason and output is not None and not self.runs_again:  # None: an exception
            self._note_unseen(entered.kind, module, self.names[module], reason)
        if module not in self.apart.values():
            self._leave(module, output)

    def leave_output_layer(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """W_O returns, where it stands outside of its attention module."""
        self._leave(self.apart[layer], output)

    def _leave(self, module: nn.Module, output: Any) -> None:
        if self.leave is not None:
            with self.following.paused():
                self.leave(module, output)

    @property
    def runs_again(self) -> bool:
        """Whether the backward pass runs a layer anew, as gradient checkpointing has it do."""
        return not self.frames and torch._C._current_graph_task_id() != -1

    def _mask(self, given: Any, query: Tensor, key: Tensor) -> Tensor | None:
        """The mask passed. flex attention's is a function of positions: made once a forward."""
        if not isinstance(given, BlockMask):
            return _detached(given)
        if id(given) not in self.blocks:
            texts, heads = given.shape[:2]
            dense = create_mask(  # (B, H or 1, T, S)
                given.mask_mod, texts, heads, query.shape[2], key.shape[2], device=str(query.device)
            )
            self.blocks[id(given)] = (given, dense)
        return self.blocks[id(given)][1]

    def enter_own(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module that computes a softmax by itself begins: it is followed."""
        self.inside.append(_Entered(module, arguments_of(module, args, kwargs), asks=False))
        self.following.start(module, self._texts())

    def leave_own(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """It returns."""
        self.following.stop()
        self.leave_attention(module, args, output)

    def followed(
        self, kernel: str, arguments: dict[str, Any], run: Callable[[], KernelOutput]
    ) -> KernelOutput:
        """An attention that the innermost module computed by itself."""
        call = self.record(kernel, self.inside[-1].module, arguments)
        if self.patch is not None and self.patch(call):
            raise ModelError(
                f"{call.name} computes its attention by itself, so its query, key and value are "
                "past when they are seen: patch its head_output"
            )
        return self.handle(call, run)

    def refused(self, reason: str) -> None:
        """An attention of the innermost module that could not be followed."""
        self.inside[-1].refused = self.inside[-1].refused or reason

    def _texts(self) -> int | None:
        """How many texts the model that is running was given."""
        given = self.frames[-1] if self.frames else {}
        usual = [given.get(name) for name in ("input_ids", "inputs_embeds", "hidden_states")]
        tensors = [one for one in (*usual, *given.values()) if isinstance(one, Tensor)]
        return next((one.shape[0] for one in tensors if one.dim() > 1), None)

    def _count(self, kind: str, module: nn.Module) -> int:
        """The number of a module's call among those of its part of the model."""
        part = (kind, self._in_encoder(module))
        layer = self.counts.get(part, 0)
        self.counts[part] = layer + 1
        return layer

    def _in_encoder(self, module: nn.Module) -> bool | None:
        name = self.names.get(module, "")  # empty for what the model put in place as it ran
        return name.startswith(self.encoder) if self.encoder else None

    def _once(self, fact: Callable[..., Fact], *of: Any) -> Fact:
        """A fact of the frames as they stand, which the calls of a forward share."""
        if (fact, *of) not in self.made:
            self.made[fact, *of] = fact(self.frames, *of)
        found: Fact = self.made[fact, *of]
        return found

    def _config(self, module: nn.Module) -> facts.Config:
        """A module's config, or the model's."""
        config = getattr(module, "config", None) or getattr(self.model, "config", None)
        if self.config is None or self.config.of is not config:
            self.config = facts.Config(config)
        return self.config

    def _cached(self, cache: Cache, key: Tensor, value: Tensor) -> Cached:
        """What is to be known of a call's cache for comparing what it gives back."""
        if cache not in self.caches:
            self.caches[cache] = self.caches_seen
            self.caches_seen += 1
        return Cached(
            self.caches[cache], self._once(facts.past), _inexact(cache), writes(key, value)
        )

    def record(self, kernel: str, module: nn.Module, arguments: dict[str, Any]) -> AttentionCall:
        """The call's inputs and facts, from what the kernel is about to be given."""
        entered = next((one for one in reversed(self.inside) if one.module is module), None)
        own = entered.arguments if entered is not None else {}
        kind: Kind = entered.kind if entered is not None else "self"
        if entered is not None:
            entered.asked = True
        layer = self._count(kind, module)
        query, key, value = (arguments[name].detach() for name in ("query", "key", "value"))
        shape = (key.shape[0], query.shape[2], key.shape[2])
        cached = next((arg for arg in own.values() if isinstance(arg, Cache)), None)
        if cached is not None and cached.is_compileable:  # a buffer that the next step writes into
            key, value = key.clone(), value.clone()
        index = facts.index_of(module, layer)
        config = facts.config_of(module, self._config(module), index)
        scaling = arguments.get("scaling")
        causal = arguments.get("is_causal")
        mask = self._mask(arguments.get("attention_mask"), query, key)
        hidden = own.get("hidden_states")
        rule = facts.mask_rule(
            module, config, index, kind, shape, self._once(facts.standing, kind, shape)
        )
        bias = additions.expected_bias(module, self.parents, config, kind, rule, query)
        known = getattr(config, "model_type", None) in KNOWN_TYPES
        return AttentionCall(
            layer=layer,
            name=self.names[module],
            kind=kind,
            kernel=kernel,
            query=query,
            key=key,
            value=value,
            scaling=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
            expected_scaling=facts.expected_scaling(config, query.shape[-1], index),
            scaled_before=facts.scaled_before(config, query.shape[-1]),
            mask=mask,
            is_causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
            expected_mask=rule,
            first_key=self._once(facts.first_key, kind, shape),
            cache=None if cached is None else self._cached(cached, key, value),
            in_encoder=self._in_encoder(module),
            step=max(self.step, 0),
            terms=Terms(
                softcap=arguments.get("softcap"),
                bias=_detached(arguments.get("position_bias")),
                sinks=_detached(arguments.get("s_aux", arguments.get("sinks"))),
            ),
            expected_terms=additions.expected_terms(module, config, bias),
            unheld=_unheld(arguments, query.device),
            facts_known=known,
            bias_known=known and (bias is not None or not additions.adds_bias(config, kind)),
            operands=operand_unit(query.dtype, query.device),
            dropout=float(arguments.get("dropout") or 0.0),
            module=module,
            parent=self.parents.get(module),
            position_ids=self._once(facts.positions, len(query), query.shape[2]),
            frequency_dtype=self.frequency_dtype,
            hidden_states=_detached(hidden),
        )


def _detached(given: Any) -> Tensor | None:
    """A tensor without its history: itself where it has none, so that layers share their mask."""
    if not isinstance(given, Tensor):
        return None
    return given.detach() if given.requires_grad else given


def _gone_by(cache: Cache) -> int:
    """How many tokens a cache was given so far; 0 of one that counts none, as Mamba's."""
    return 0 if all(cache.is_linear) else int(cache.get_seq_length())


def _inexact(cache: Cache) -> str:
    """Why a cache is not known to give back what it was given; empty where it is."""
    inner = getattr(cache, "self_attention_cache", cache)  # the decoder's, of an encoder-decoder
    if isinstance(inner, QuantizedCache):
        return "a quantized cache gives back only about what it was given"
    for layer in inner.layers:
        kind = type(layer)
        if kind.__module__.startswith("transformers.models."):  # DeepSeek V4's compress
            return f"what {kind.__name__}, a cache of this model's own, gives back is not known"
    return ""


def _is_rows(mask: Any) -> bool:
    """Whether this is a row of 0 and 1 for each text."""
    return isinstance(mask, Tensor) and mask.dim() == 2


def _unheld(arguments: dict[str, Any], device: torch.device) -> tuple[str, ...]:
    terms = [term for term in facts.UNHELD if arguments.get(term) is not None]
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor | BlockMask | None):
        terms.append(f"mask of type {type(mask).__name__}")
    if torch.is_autocast_enabled(device.type):
        terms.append("autocast: the kernel casts what it is given")
    return tuple(terms)

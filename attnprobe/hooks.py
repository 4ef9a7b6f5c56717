"""See each attention call of a model as it runs: `probe`; or put another in its place.

The only module that knows where transformers computes attention: most models ask
`AttentionInterface.get_interface` for a kernel and call it with query, key, value and mask. While
an interception is open, what that returns is wrapped; the kernel, its inputs and its output stay
the model's own. Forward hooks on the attention modules give what lies on either side of the kernel.
Modules that compute a softmax by themselves are followed (see `attnprobe.seam.following`).
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from attnprobe.errors import InputError, ModelError
from attnprobe.memory import need
from attnprobe.models import as_language_model
from attnprobe.records import AttentionCall, Calls, UnseenAttention
from attnprobe.seam.inspecting import computes_softmax, torchs_attention
from attnprobe.seam.interception import Handler, Interception, KernelOutput
from attnprobe.seam.interrupts import uninterrupted

SEAM = ("module", "query", "key", "value", "attention_mask")
"""What every kernel is called with first, whatever it calls them itself."""

_PREPARING = "prepare_inputs_for_generation"
"""The method by which `generate` makes each forward's arguments."""

# Those that are open, in all threads; never changed, only exchanged: other threads are reading it.
_interceptions: tuple[Interception, ...] = ()
_prepared_by: dict[nn.Module, Any] = {}  # what a model had in place of its class's method
_lock = threading.Lock()
_get_interface = AttentionInterface.get_interface
_get_compiled_call = PreTrainedModel.get_compiled_call


@contextmanager
def probe(lm: object) -> Iterator[Calls]:
    """Watch every forward or generate of a model inside the block.

    Args:
        lm: a model, what `load` returns, or a (model, tokenizer) pair.

    Yields:
        A list of `AttentionCall`s that fills as the model runs, in order. The model computes what
        it would have computed without the probe, with the same kernel, bit for bit. `verify` takes
        the list. What gradient checkpointing runs again in the backward pass is not seen twice.
        What other threads run on the model meanwhile is theirs: it is neither seen nor changed.

    Raises:
        InputError: no model; when the block ends: the model ran, but in other threads only.
        ModelError: a model, or a part of one, that torch.compile has compiled; out of `generate`,
            when it is about to compile the model.

    Out of a forward, too: InputError where a kernel gives its weights (eager), and those of one
    more layer would take more memory than `attnprobe.memory` allows.
    """
    with watched(as_language_model(lm).model) as calls:
        yield calls


def replacing(model: nn.Module) -> bool:
    """Whether this thread runs the model with something in place of its kernels: see `replaced`."""
    return any(one.replaces and one.model is model and one.here for one in _interceptions)


def refuse_replaced(model: nn.Module, what: str) -> None:
    """Refuse what computes weights by the formula as it is, from a model that runs with another.

    Raises:
        InputError: an edit is open on the model, on a part of it or on a model that it is part of,
            in this thread.
    """
    parts = set(model.modules())
    if any(one.replaces and one.here and parts & {*one.model.modules()} for one in _interceptions):
        raise InputError(
            f"an edit is open on this model, and {what} computes weights by the unchanged formula: "
            "call it outside of the edit"
        )


@contextmanager
def watched(
    model: nn.Module, take: Callable[[AttentionCall], None] | None = None
) -> Iterator[Calls]:
    """As `probe`, for a bare model.

    Args:
        model: the model.
        take: gets each call when it is complete, while the model runs on, and none is kept then.
    """
    calls = Calls()
    places: list[tuple[nn.Module, int]] = []  # calls whose module has not returned yet

    def watch(call: AttentionCall, run: Callable[[], KernelOutput]) -> KernelOutput:
        output, weights = run()
        if weights is not None:
            need(
                2 * weights.nbytes,
                f"the weights that the {call.kernel} kernel gives for each further layer",
                "a model loaded with attn='sdpa', or a shorter text",
                weights.device,
            )
        if call.module is not None:
            places.append((call.module, len(calls)))
        calls.append(
            replace(
                call,
                head_output_model=output.detach(),
                weights_model=None if weights is None else weights.detach(),
            )
        )
        return output, weights

    def leave(module: nn.Module, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        for seen, at in places:
            if seen is module and isinstance(first, Tensor):
                calls[at] = replace(calls[at], attention_output=first.detach())
        places[:] = [place for place in places if place[0] is not module]
        if not places:
            hand_over()

    def hand_over() -> None:
        if take is not None:
            for call in calls:
                take(call)
            calls.clear()

    interception = Interception(model, watch, leave, places.clear, unseen=calls.unseen)
    with _intercept(interception):
        yield calls
    interception.refuse_elsewhere()
    hand_over()  # of modules that were run past their hooks


@contextmanager
def replaced(
    model: nn.Module,
    handle: Handler,
    patch: Callable[[AttentionCall], dict[str, Tensor]] | None = None,
) -> Iterator[list[UnseenAttention]]:
    """Run a model with something else in place of every attention kernel.

    Args:
        model: the model; it is as before after the block.
        handle: gets a call without its outputs, and what runs the model's own kernel on what the
            model gave it; returns the heads' output (B, T, H, Dv), and weights or None.
        patch: gives a call's query, key or value others, by name: `handle` and every probe see them
            in the place of the model's own.

    Yields:
        A list that fills with the attention that could not be seen, and ran as it was.
    """
    interception = Interception(model, handle, replaces=True, patch=patch)
    with _intercept(interception):
        yield interception.unseen
    interception.refuse_elsewhere()


def _refuse_compiled(names: Mapping[nn.Module, str]) -> None:
    """Refuse what torch.compile made: compiled earlier, it runs past hooks and seam, unseen."""
    for module, name in names.items():
        called = module._compiled_call_impl is not None or "_orig_mod" in module._modules
        if called or _is_compiled(module.forward):
            raise ModelError(
                f"{name or 'the model'} is compiled by torch.compile: compiled code runs past what "
                "watches it. Give the model as it was before (model._orig_mod of a "
                "torch.compile(model)), or load it again and do not compile it"
            )


def _is_compiled(function: Callable[..., Any]) -> bool:
    """Whether torch.compile made this; what the compiler was told to leave alone looks alike."""
    compiled = hasattr(function, "_torchdynamo_orig_callable")
    return compiled and not getattr(function, "_torchdynamo_disable", False)


@contextmanager
def _intercept(interception: Interception) -> Iterator[None]:
    """Hook the model and open the seam; both are as before when the block ends, however it ends."""
    _refuse_compiled(interception.names)
    with ExitStack() as stack:  # the last word, should Ctrl-C come between the lines below
        try:
            with uninterrupted():
                stack.callback(interception.following.close)
                _hook(interception, stack)
                _open_seam(interception, stack)
            yield
        finally:
            with uninterrupted():
                stack.close()


def _hook(interception: Interception, stack: ExitStack) -> None:
    """Put forward hooks on the modules; the stack takes them away."""
    torchs_own = torchs_attention(interception.names)
    hook = interception.hook
    for module in interception.names:
        if isinstance(module, PreTrainedModel) or module is interception.model:
            enter, leave = interception.enter_model, interception.leave_model
        elif module in interception.asking or module in torchs_own:
            enter, leave = interception.enter_attention, interception.leave_attention
        elif computes_softmax(type(module)):  # type: ignore[arg-type]
            enter, leave = interception.enter_own, interception.leave_own
            interception.follows = True
        else:
            continue
        before = module.register_forward_pre_hook(hook(enter), with_kwargs=True)
        stack.callback(before.remove)
        # always_call: an exception in the forward must not leave the stacks unbalanced.
        after = module.register_forward_hook(hook(leave), always_call=True)
        stack.callback(after.remove)
    for layer in interception.apart:
        after = layer.register_forward_hook(hook(interception.leave_output_layer))
        stack.callback(after.remove)


def _open_seam(interception: Interception, stack: ExitStack) -> None:
    """Add an interception to those that the seam's calls go through; the stack takes it away."""
    global _interceptions
    stack.callback(_close_seam, interception)
    with _lock:
        for module in _generating(interception):
            _watch_preparing(module)
        # Replacements stand nearest to the kernel: a probe sees what they computed.
        opened = (*_interceptions, interception)
        _interceptions = tuple(sorted(opened, key=lambda one: not one.replaces))
        AttentionInterface.get_interface = _get_watched_interface
        PreTrainedModel.get_compiled_call = _refuse_compiling


def _close_seam(interception: Interception) -> None:
    global _interceptions
    with _lock:
        _interceptions = tuple(one for one in _interceptions if one is not interception)
        for module in _generating(interception):
            _unwatch_preparing(module)
        if not _interceptions:
            AttentionInterface.get_interface = _get_interface
            PreTrainedModel.get_compiled_call = _get_compiled_call


def _generating(interception: Interception) -> list[Any]:
    """The models that can `generate` and that no other interception concerns."""
    return [
        module
        for module in interception.names
        if isinstance(module, GenerationMixin)
        and not any(module in one.names for one in _interceptions)
    ]


def _watch_preparing(model: Any) -> None:
    """See what `generate` makes of the mask it was given: the facts are in what it was given."""
    prepare = getattr(model, _PREPARING)

    @functools.wraps(prepare)
    def watched_preparing(*args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = prepare(*args, **kwargs)
        for one in _interceptions:
            if model in one.names and one.here:
                one.note_prepared(kwargs, inputs)
        return inputs

    _prepared_by[model] = vars(model).get(_PREPARING)
    setattr(model, _PREPARING, watched_preparing)


def _unwatch_preparing(model: Any) -> None:
    if model not in _prepared_by:
        return
    own = _prepared_by.pop(model)
    delattr(model, _PREPARING)
    if own is not None:
        setattr(model, _PREPARING, own)


def _refuse_compiling(self: PreTrainedModel, compile_config: Any) -> Callable[..., Any]:
    """Stands in for what gives `generate` compiled code where a cache has fixed places."""
    call: Callable[..., Any] = _get_compiled_call(self, compile_config)
    if _is_compiled(call) and any(self in one.names and one.here for one in _interceptions):
        raise ModelError(
            "generate would compile the model, and compiled code runs past what watches it: give "
            "generate disable_compile=True"
        )
    return call


def _get_watched_interface(
    self: AttentionInterface, implementation: str, default: Callable[..., KernelOutput]
) -> Callable[..., KernelOutput]:
    kernel = _get_interface(self, implementation, default)
    return functools.partial(_watched_kernel, kernel, implementation)


def _watched_kernel(
    kernel: Callable[..., KernelOutput],
    implementation: str,
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> KernelOutput:
    """Call the kernel through every interception that concerns the module."""
    run = functools.partial(kernel, module, *args, **kwargs)
    concerned = [
        one
        for one in _interceptions
        if module in one.names and one.here and (one.replaces or not one.runs_again)
    ]
    if not concerned:
        return run()
    given, order = (module, *args), [*SEAM]
    if len(given) > len(SEAM):  # the kernel's own names, which take time to read
        order += list(inspect.signature(kernel).parameters)[len(SEAM) :]
    arguments = dict(zip(order, given, strict=False)) | kwargs
    for one in concerned:
        call = one.record(implementation or "eager", module, arguments)
        if one.patch is not None:
            patches = one.patch(call)
            call, arguments = replace(call, **patches), arguments | patches  # type: ignore[arg-type]
        run = functools.partial(one.handle, call, run)
    with ExitStack() as stack:
        for one in concerned:
            if one.follows:
                stack.enter_context(one.following.paused())
        return run()

"""Where a model keeps what makes its answer: `patch_effects`, activation patching."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from attnprobe.capturing import capture
from attnprobe.editing import changed
from attnprobe.effects.changes import Change
from attnprobe.effects.predicting import logits_of, refuse_encoder_decoder
from attnprobe.effects.sites import ByText, Where
from attnprobe.effects.trials import Metric, refuse_unfit, trials
from attnprobe.errors import InputError, ModelError
from attnprobe.models import as_language_model
from attnprobe.records import Capture
from attnprobe.verification import Progress

PatchBy = Literal["position", "head"]
What = Literal["head_output", "residual"]

ROUNDINGS = 8
"""Logit differences that are closer than so many roundings of a logit are the same."""

Place = tuple[int, int]
"""A layer, and a position or a head of it."""

Open = Callable[[slice], AbstractContextManager[Any]]


def patch_effects(
    lm: object,
    clean: str | Sequence[int] | Tensor,
    corrupt: str | Sequence[int] | Tensor,
    answer: str | int,
    wrong: str | int,
    *,
    by: PatchBy = "position",
    what: What = "head_output",
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Put a clean run's activations into a corrupt run, one place at a time: how much comes back.

    Both texts have as many tokens, and differ where it matters: after the clean one the model
    prefers `answer` to `wrong`, after the corrupt one less so, or not: on the bundled model,

        patch_effects(lm, "The old man shook", "The old woman shook", "his", "her")

    has +2.4 logits and -1.7. With one place patched, the
    logit difference LD = logit(answer) - logit(wrong) at the last token moves from LD_corrupt
    towards LD_clean if that place carries what the two differ in:

        restored = (LD_patched - LD_corrupt) / (LD_clean - LD_corrupt)

    1 is all of it, 0 nothing. A place may restore more than 1, or less than 0. Meng, Bau, Andonian
    & Belinkov 2022, *Locating and Editing Factual Associations in GPT*; Wang et al. 2022,
    *Interpretability in the Wild*; on the choice of metric and of corrupt text, Zhang & Nanda 2024,
    *Towards Best Practices of Activation Patching*.

    Positions before the first token that differs hold the same in both runs, as no word sees a
    later one: they restore 0 exactly, and are not run.

    Args:
        lm: what `load` returns, a (model, tokenizer) pair, or a bare model with token ids.
        clean, corrupt: a text each, or token ids.
        answer, wrong: next words of one token each, or token ids.
        by: "position": each layer and token, all heads at once; "head": each layer and head, at all
            tokens at once.
        what: "head_output": the heads' output before W_O; "residual", by position: what enters the
            layer, from which all later ones read.
        progress: called as `progress(label, done, total)` after each forward.

    Returns:
        A row for each layer and position, with the corrupt text's token, or for each layer and
        head: logit_difference, LD_patched, and restored, both float64. `frame.attrs` holds model,
        what, answer and wrong (as they read in a text, or ids of a bare model), the logit
        differences clean and corrupt, and clean_text and corrupt_text.

    Raises:
        InputError: what `capture` refuses; texts of different numbers of tokens (the message shows
            both); a word that is not one token; an unknown `by` or `what`, or "residual" by head;
            a logit difference that is no larger after the clean text than after the corrupt one;
            an edit that is open on the model.
        ModelError: an encoder-decoder; a model that predicts no next word, or whose heads are not
            all seen; "residual" of one whose layers are not modules of a list.
    """
    lm = as_language_model(lm)
    refuse_encoder_decoder(lm.model)
    _refuse_unknown(by, what)
    context = corrupt if isinstance(corrupt, str) else ""
    metric = Metric.of(lm, "logit_difference", answer, wrong, context)
    into = _of_one(capture(lm, corrupt), "corrupt")
    refuse_unfit(into)
    blocks = _blocks(into) if what == "residual" else {}
    inputs: dict[int, Tensor] = {}
    with _entering(blocks, partial(_keep, inputs)):
        source = _of_one(capture(lm, clean), "clean")
    _refuse_unlike(source, into)
    ids = into.input_ids[0]
    ends = [logits_of(lm.model, cap.input_ids, last=True) for cap in (source, into)]
    best, base = (float(metric.measure(logits, ids)) for logits in ends)
    _refuse_no_better(best, base, torch.stack(ends), metric)
    places = _places(into, by)
    first = _first_difference(source, into) if by == "position" else 0
    run = [at for at, (_, where) in enumerate(places) if where >= first]
    chosen = [places[at] for at in run]
    opened: Open
    if what == "residual":
        opened = partial(_residual_put, blocks, inputs, chosen)
    else:
        opened = partial(_outputs_put, source, by, chosen)
    found = np.full(len(places), base)
    for part, differences in trials(into, ids, len(chosen), opened, metric):
        found[run[part]] = differences.cpu().numpy()
        if progress:
            progress(f"layer {chosen[part.stop - 1][0]}", part.stop, len(chosen))
    frame = _frame(into, by, places)
    frame["logit_difference"] = found
    frame["restored"] = (found - base) / (best - base) + 0.0  # no -0
    frame.attrs = {"model": lm.name, "what": what, "clean": best, "corrupt": base}
    frame.attrs |= dict(zip(("answer", "wrong"), metric.words, strict=True))
    frame.attrs |= {"clean_text": source.words_of(0).text, "corrupt_text": into.words_of(0).text}
    return frame


def _refuse_unknown(by: str, what: str) -> None:
    if by not in ("position", "head"):
        raise InputError(f"by is 'position' or 'head', got {by!r}")
    if what not in ("head_output", "residual"):
        raise InputError(f"what is 'head_output' or 'residual', got {what!r}")
    if what == "residual" and by == "head":
        raise InputError("the residual stream has no heads: give what='residual' by='position'")


def _of_one(cap: Capture, which: str) -> Capture:
    if len(cap) != 1:
        raise InputError(f"{which} is one text, got {len(cap)}")
    return cap


def _refuse_unlike(source: Capture, into: Capture) -> None:
    """Refuse texts whose tokens do not stand side by side."""
    clean, corrupt = (cap.words_of(0).tokens for cap in (source, into))
    if len(clean) != len(corrupt):
        raise InputError(
            "both texts must have as many tokens, so that each position has its own in the other; "
            f"got {len(clean)} and {len(corrupt)}:\n  clean    {' | '.join(clean)}\n"
            f"  corrupt  {' | '.join(corrupt)}"
        )


def _refuse_no_better(best: float, base: float, ends: Tensor, metric: Metric) -> None:
    """Refuse logit differences of which the clean one is no larger, but by what may be rounding.

    Args:
        best, base: the differences after the clean and after the corrupt text.
        ends: the logits that they are of, (2, 1, 1, V).
        metric: of which two words.
    """
    assert metric.target is not None
    assert metric.against is not None
    size = float(ends[..., [metric.target.id, metric.against.id]].abs().max())
    room = ROUNDINGS * torch.finfo(ends.dtype).eps * size
    if best - base > room:
        return
    got = (
        f"the logit of {metric.target} less that of {metric.against} is {best:.4g} after the clean "
        f"text and {base:.4g} after the corrupt one"
    )
    if base - best <= room:
        raise InputError(
            f"there is nothing to restore: {got}. Give texts that the model goes on with "
            "differently"
        )
    raise InputError(
        f"{got}: the answer must stand better after the clean text. Exchange the two texts, or the "
        "two words"
    )


def _first_difference(source: Capture, into: Capture) -> int:
    """The first position at which two texts differ; their number of tokens where none does."""
    differ = (source.input_ids[0] != into.input_ids[0]).tolist()
    return differ.index(True) if True in differ else len(differ)


def _places(cap: Capture, by: PatchBy) -> list[Place]:
    """Every layer's positions or heads, in order."""
    tokens = cap.input_ids.shape[1]
    counts = {call.layer: tokens if by == "position" else call.heads for call in cap.calls}
    return [(layer, where) for layer, count in counts.items() for where in range(count)]


def _frame(cap: Capture, by: PatchBy, places: Sequence[Place]) -> pd.DataFrame:
    layer, where = np.array(places, dtype=np.int64).T
    frame = pd.DataFrame({"layer": layer, by: where})
    if by == "position":
        tokens = cap.words_of(0).tokens
        frame["token"] = [tokens[at] for at in where]
    return frame


def _outputs_put(
    source: Capture, by: PatchBy, places: Sequence[Place], part: slice
) -> AbstractContextManager[Any]:
    """Put another run's head outputs in, at one place in each text of a batch."""
    sites = [
        Where(layers=frozenset({layer}), positions=frozenset({where}))
        if by == "position"
        else Where(heads={layer: frozenset({where})})
        for layer, where in places[part]
    ]
    return changed(source.lm, Change(ByText(sites), head_output=source))


# The residual stream


def _blocks(cap: Capture) -> dict[int, nn.Module]:
    """Each layer's block: the module of a list that holds the layer's attention.

    Raises:
        ModelError: there is none, or one that stands for several layers (ALBERT).
    """
    assert cap.lm is not None
    modules = dict(cap.lm.model.named_modules())
    blocks = {}
    for call in cap.calls:
        path = call.name.split(".")
        for end in range(len(path) - 1, 0, -1):  # without the attention module itself
            if isinstance(modules[".".join(path[: end - 1])], nn.ModuleList):
                blocks[call.layer] = modules[".".join(path[:end])]
                break
    if len(set(blocks.values())) < len(cap.calls):
        raise ModelError(
            f"{type(cap.lm.model).__name__} has not a block of its own for each layer, so that it "
            "is not known what enters each: give what='head_output'"
        )
    return blocks


@contextmanager
def _entering(
    blocks: dict[int, nn.Module], handle: Callable[[int, Tensor], Tensor | None]
) -> Iterator[None]:
    """Hand what enters each block to a function, which may return what shall stand for it."""
    with ExitStack() as stack:
        for layer, block in blocks.items():
            hook = partial(_enter, layer, handle)
            stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _enter(
    layer: int,
    handle: Callable[[int, Tensor], Tensor | None],
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A block's pre-hook: its input is its first argument, or named as everywhere."""
    given = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(given, Tensor) or given.dim() != 3:
        raise ModelError(
            f"layer {layer}: {type(block).__name__} is given no (texts, tokens, size) tensor"
        )
    other = handle(layer, given)
    if other is None:
        return None
    return ((other, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": other})


def _keep(inputs: dict[int, Tensor], layer: int, given: Tensor) -> None:
    inputs[layer] = given.detach()


def _residual_put(
    blocks: dict[int, nn.Module], inputs: dict[int, Tensor], places: Sequence[Place], part: slice
) -> AbstractContextManager[Any]:
    """Put another run's block inputs (1, T, E) in, at one place in each text of a batch."""

    def put(layer: int, given: Tensor) -> Tensor | None:
        at = [(text, where) for text, (one, where) in enumerate(places[part]) if one == layer]
        if not at:
            return None
        texts, positions = torch.tensor(at, device=given.device).T
        patched = given.clone()  # (N, T, E)
        patched[texts, positions] = inputs[layer][0, positions]
        return patched

    return _entering(blocks, put)

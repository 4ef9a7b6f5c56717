"""What each head is needed for: `head_effects`, each head silenced in turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch

from attnprobe.capturing import Texts, capture
from attnprobe.editing import changed, heads_by_layer
from attnprobe.effects.changes import Change
from attnprobe.effects.predicting import logits_of, refuse_nonfinite_logits, texts_of
from attnprobe.effects.sites import ByText, Where
from attnprobe.effects.trials import (
    Metric,
    MetricName,
    refuse_unfit,
    refuse_unmeasured,
    trials,
)
from attnprobe.errors import InputError
from attnprobe.models import as_language_model
from attnprobe.records import Capture, LanguageModel, seeded
from attnprobe.verification import Progress
from attnprobe.words import read

How = Literal["zero", "mean", "resample"]


def head_effects(
    lm: object,
    texts: Texts,
    metric: MetricName = "loss",
    *,
    target: str | int | None = None,
    against: str | int | None = None,
    how: How = "zero",
    reference: Capture | None = None,
    seed: int = 0,
    heads: Iterable[tuple[int, int]] | None = None,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Silence each head in turn, and measure how well the model goes on with the texts.

    Of many heads each forward runs several, one in each copy of a text: texts are never padded, and
    no head costs more than a forward of its own. The effect of one head says what it is needed for
    with all others there: where another does the same, or later ones make up for it (Michel, Levy &
    Neubig 2019, *Are Sixteen Heads Really Better than One?*; McGrath et al. 2023, *The Hydra
    Effect*), it is small.

    | metric | what it is: the mean over … | in |
    |---|---|---|
    | `loss` | -ln p(next token), over all tokens but each text's first | nats |
    | `logit` | the logit of `target` at a text's last token, over texts | logits |
    | `logit_difference` | that of `target` minus that of `against` | logits |

    Args:
        lm: what `load` returns, a (model, tokenizer) pair, or a bare model with token ids.
        texts: one text, several, or token ids, as for `capture`.
        metric: "loss", "logit" or "logit_difference".
        target, against: next words of one token each, or token ids; " park" and "park" alike are
            the token with the space, where there is one.
        how: what stands for the head's output before W_O: "zero"; its "mean" over all tokens of
            `reference`; "resample": for each position a token of `reference`, drawn by `seed`.
        reference: what `capture` returned, of the same model; the texts themselves by default.
        seed: of "resample".
        heads: which heads, as (layer, head) pairs; all by default.
        progress: called as `progress(label, done, total)` after each forward.

    Returns:
        A row for each layer and head, int64: value, the metric with that head silenced, and effect,
        how far that is from the unchanged model's, float64. Of a head that the model needs, the
        effect is above 0 for a loss and below 0 for a logit. `frame.attrs` holds model, metric,
        unit, target and against (as they read in a text, or ids of a bare model), how, seed (of
        "resample"), unchanged, the unchanged model's value, texts, how many, and text, the first.

    Raises:
        InputError: what `capture` refuses; an unknown metric or `how`; a target that is missing,
            not asked for, or not one token; a `reference` that is not asked for; a head that is not
            there; a text of one token for a loss; an edit that is open on the model.
        ModelError: a model that predicts no next word, or whose heads are not all seen.
        NonFiniteError: NaN or infinity in the weights, or in what the unchanged model computes.
    """
    lm = as_language_model(lm)
    refuse_unknown(metric, target, against, how)
    if how == "zero" and reference is not None:
        raise InputError("how='zero' takes no reference: give how='mean' or 'resample' with it")
    goal = Metric.of(lm, metric, target, against, texts if isinstance(texts, str) else "")
    rows = texts_of(lm, texts, least=1 if goal.last else 2)
    cap = capture(lm, min(rows, key=len))
    refuse_unfit(cap)
    pairs = _present(cap, heads)
    if how != "zero" and reference is None:
        reference = capture(lm, [row.tolist() for row in rows])
    silence = partial(_silence, lm, pairs, how, reference, seeded(seed))
    silence(slice(0, 0))  # refuses what does not fit, before any work
    unchanged, values, of = 0.0, torch.zeros(len(pairs), dtype=torch.float64), 0
    for number, ids in enumerate(rows):
        count = goal.count(len(ids))
        logits = logits_of(lm.model, ids[None], last=goal.last)
        refuse_nonfinite_logits(lm, logits)
        unchanged += count * float(goal.measure(logits, ids))
        for part, found in trials(cap, ids, len(pairs), silence, goal):
            values[part] += count * found.cpu()
            if progress:
                label = f"layer {pairs[part.stop - 1][0]}"
                progress(label, number * len(pairs) + part.stop, len(rows) * len(pairs))
        of += count
    layer, head = np.array(pairs, dtype=np.int64).T
    value = (values / of).numpy()
    frame = pd.DataFrame(
        {"layer": layer, "head": head, "value": value, "effect": value - unchanged / of}
    )
    frame.attrs = {"model": lm.name, "metric": metric, "unit": goal.unit}
    frame.attrs |= dict(zip(("target", "against"), goal.words, strict=True))
    frame.attrs |= {"how": how, "seed": seed if how == "resample" else None}
    frame.attrs |= {"unchanged": unchanged / of, "texts": len(rows)}
    given = isinstance(texts, str)
    frame.attrs["text"] = texts if given else read(lm.tokenizer, rows[0].tolist()).text
    return frame


def refuse_unknown(metric: object, target: object, against: object, how: object) -> None:
    """Refuse options of `head_effects` that no model could take.

    Raises:
        InputError: an unknown metric or `how`; a target that is missing, or not asked for.
    """
    refuse_unmeasured(metric, target, against)
    if how not in get_args(How):
        raise InputError(f"how is one of {', '.join(get_args(How))}; got {how!r}")


def _present(cap: Capture, heads: Iterable[tuple[int, int]] | None) -> list[tuple[int, int]]:
    """(layer, head) pairs in order, all of the model's for None.

    Raises:
        InputError: one that is not there.
    """
    counts = {call.layer: call.heads for call in cap.calls}
    if heads is None:
        return [(layer, head) for layer, count in counts.items() for head in range(count)]
    chosen = heads_by_layer(heads)
    assert chosen is not None
    pairs = [(layer, head) for layer in sorted(chosen) for head in sorted(chosen[layer])]
    for layer, head in pairs:
        if head >= counts.get(layer, 0):
            raise InputError(
                f"there is no head {head} in layer {layer}: the model has {len(counts)} layers of "
                f"{counts.get(layer, counts[0])} heads, both numbered from 0"
            )
    return pairs


def _silence(
    lm: LanguageModel,
    pairs: Sequence[tuple[int, int]],
    how: How,
    reference: Capture | None,
    seed: int,
    part: slice,
) -> AbstractContextManager[Any]:
    """Silence one head in each text of a batch."""
    places = [Where(heads={layer: frozenset({head})}) for layer, head in pairs[part]]
    change = Change(ByText(places), head_output=how, reference=reference, seed=seed)
    change.refuse_nonsense()
    return changed(lm, change)

"""The formula for one word, step by step, as a page to explore: `walkthrough_view`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from attnprobe.errors import InputError, NonFiniteError
from attnprobe.looking import position
from attnprobe.recompute import Which, key_heads_of
from attnprobe.records import Capture, captured, whole
from attnprobe.views.colours import SIGNED, WEIGHTS
from attnprobe.views.labels import columns_of, labels_of
from attnprobe.views.messages import messages_in
from attnprobe.views.page import View, own_page, packed
from attnprobe.views.selection import Selection, what_fits
from attnprobe.views.strips import CELLS, Strip, number, strips_picture
from attnprobe.walking import Walkthrough, walkthrough
from attnprobe.words import Words

WALK_BYTES = 8_000_000
"""The most bytes of query, key, value and output that a page holds unless told otherwise: all of
GPT-2 small at 54 tokens."""

_WIDEST = 24  # labels, in columns

# The strips of the still picture: message, column of the walkthrough's steps, the column whose
# largest number ends the colours, term, colours, whether masked cells are hatched, and where the
# colours end at least.
_STEPS = (
    ("raw", "score_raw", "score_raw", "1  q·k", SIGNED, False, 0.0),
    ("score", "score", "score", "2  q·k / √d_k", SIGNED, False, 0.0),
    ("masked", "masked_score", "score", "3  + M", SIGNED, True, 0.0),
    ("weight", "weight", "weight", "4  a = softmax", WEIGHTS, True, 1.0),
    ("brought", "weighted_norm", "weighted_norm", "5  |a·v|", WEIGHTS, True, 0.0),
    ("share", "share", "share", "5  (a·v)·o / |o|²", SIGNED, True, 1.0),
)


def walkthrough_view(
    cap: Capture,
    word: str | int | None = None,
    layer: Which = None,
    head: Which = None,
    *,
    nth: int = 0,
    text: int = 0,
    lang: str = "en",
    max_bytes: int = WALK_BYTES,
) -> View:
    """A page that walks through softmax(QKᵀ/√d_k + M)V for a word, a strip of cells for each step.

    The reader chooses another word, layer or head by mouse or keyboard, and sees how each number is
    made of those before it. The page computes all steps in float64 from query, key and value in
    float32, with the scaling and mask that attnprobe expects, and compares the end with the model's
    own head output.

    Args:
        cap: what `capture` returned.
        word: the word shown first, or its position among the words, from 0; None for the last one.
            Of a word of several tokens it is the last one's query, as in `walkthrough`.
        layer: which layers the page holds, from 0; one, several, or None for all. The first one is
            shown first.
        head: which heads, likewise.
        nth: which occurrence of a word that the text holds several times, from 0.
        text: which text of a batch.
        lang: what the page speaks: "en", "zh-Hant" (or "zh-TW"), "ja".
        max_bytes: the most bytes of query, key, value and output to put into the page, before it is
            packed.

    Returns:
        A `View`: shows itself in a notebook, and saves itself as a page.

    Raises:
        InputError: layer, head or text out of range; a word that is not in the text; layers with
            different numbers of heads; an unknown `lang`; more than `max_bytes`; a model that does
            not compute the formula.
        NonFiniteError: NaN or infinity in what the model computed.
    """
    tag, messages = messages_in(lang)
    picked = Selection.of(captured(cap), layer, head, "token", text, _WIDEST)
    words = cap.words_of(text)
    at = _last(words) if word is None else position(words, word, nth)
    _refuse_bytes(picked, whole(max_bytes, "max_bytes"))
    labels = labels_of(cap, "word", text, _WIDEST)
    data = {
        **_held(picked),
        "model": cap.lm.name if cap.lm is not None else "",
        "dtype": str(cap.call(picked.layers[0]).dtype).removeprefix("torch."),
        "word": at,
        "words": [
            {"label": label, "space": bool(one.space), "tokens": one.tokens}
            for label, one in zip(labels, words.words, strict=True)
        ],
        "tokens": picked.labels,
        "colours": {"signed": SIGNED, "weights": WEIGHTS},
        "messages": messages,
    }
    first = walkthrough(cap, at, picked.layers[0], picked.heads[0], text=text)
    heading = messages["headline"].format(
        layer=picked.layers[0], head=picked.heads[0], word=labels[at]
    )
    title = ": ".join(filter(None, (messages["title"], data["model"])))
    drawn = own_page(title, "walk", '<main id="walk"></main>', data, lang=tag)
    lines = 1 + sum(columns_of(label) + 1 for label in labels) // 100
    still = _still(picked, first, heading, words.words[at].tokens[-1], messages)
    return View(title, drawn, 860 + 29 * lines, still)


def _last(words: Words) -> int:
    """The last word, special tokens such as [SEP] left aside."""
    real = [at for at, word in enumerate(words.words) if word.kind == "word"]
    return real[-1] if real else len(words.words) - 1


def _refuse_bytes(picked: Selection, max_bytes: int) -> None:
    def size(layers: int, heads: int, tokens: int) -> int:
        vectors = 0
        rules = set()
        for layer in picked.layers[:layers]:
            call = picked.cap.call(layer)
            sizes = call.query.shape[-1] + call.value.shape[-1]
            kept = heads + len(set(key_heads_of(call, picked.heads[:heads])))
            vectors += kept * sizes  # query and output by head; key and value by key head
            rules.add(_rule(picked, layer))
        return 4 * vectors * tokens + len(rules) * tokens * tokens

    held = size(len(picked.layers), len(picked.heads), len(picked.labels))
    if held > max_bytes:
        raise InputError(
            f"walkthrough_view would hold {held:,} bytes of query, key, value and output "
            f"({picked.title}), more than max_bytes ({max_bytes:,}). What fits: "
            f"{what_fits(picked, size, max_bytes, by_word=False)}. Or raise max_bytes"
        )


def _rule(picked: Selection, layer: int) -> tuple[bool, int | None] | None:
    """What layers with the same mask have in common; None where there are no facts."""
    rule = picked.cap.call(layer).expected_mask
    return None if rule is None else (rule.causal, rule.window)


def _held(picked: Selection) -> dict[str, Any]:
    """Each layer's tensors; masks that layers share, and key heads that heads share, only once."""
    at = picked.cap.positions(picked.text)
    masks: dict[Any, dict[str, Any]] = {}
    layers = []
    for layer in picked.layers:
        found = picked.attention(layer)
        call = picked.cap.call(layer)
        assert call.head_output_model is not None
        rule = _rule(picked, layer)
        if rule not in masks:
            masks[rule] = packed(found.allowed.cpu().numpy().astype(np.uint8))
        key_heads = key_heads_of(call, picked.heads)
        kept = list(dict.fromkeys(key_heads))
        serving = [key_heads.index(one) for one in kept]
        output = call.head_output_model[picked.text, at][:, picked.heads].transpose(0, 1)
        tensors = {
            "query": found.query,  # (h, T, D)
            "key": found.key[serving],  # (k, T, D)
            "value": found.value[serving],  # (k, T, Dv)
            "output": output,  # (h, T, Dv)
        }
        layers.append(
            {
                "layer": layer,
                "scaling": found.scaling,
                "key_of": [kept.index(one) for one in key_heads],
                "allowed": list(masks).index(rule),
                **{name: packed(_float32(x, layer, name)) for name, x in tensors.items()},
            }
        )
    return {"layers": layers, "heads": picked.heads, "allowed": list(masks.values())}


def _float32(tensor: Tensor, layer: int, name: str) -> np.ndarray:
    numbers: np.ndarray = tensor.float().cpu().numpy()
    if not np.isfinite(numbers).all():
        raise NonFiniteError(f"layer {layer}'s {name} holds NaN or infinity in float32")
    return numbers


def _still(
    picked: Selection, walk: Walkthrough, headline: str, token: int, messages: dict[str, str]
) -> str:
    """The first word, layer and head as strips, up to `CELLS` tokens that end with the query."""
    call = picked.cap.call(picked.layers[0])
    count, size = len(picked.labels), call.query.shape[-1]
    part = slice(max(0, token + 1 - CELLS), max(token + 1, min(count, CELLS)))
    root = math.isclose(call.expected_scaling * math.sqrt(size), 1.0, rel_tol=1e-6)
    filled = {
        "score": {"scaling": f"{call.expected_scaling:.4g}{f' = 1/√{size}' if root else ''}"},
        **{name: {"sum": f"{walk.steps[name].sum():.4g}"} for name in ("weight", "share")},
    }
    hidden = (walk.steps["mask"] < 0).tolist()
    strips = [
        Strip(
            term=term if root or name != "score" else "2  q·k · s",
            note=messages[name].format(**filled.get(name, {})),
            values=walk.steps[column].tolist()[part],
            high=max(least, float(walk.steps[scale].abs().max())),
            stops=stops["light"],
            masked=hidden[part] if masks else [False] * len(hidden[part]),
            signed=stops is SIGNED,
        )
        for name, column, scale, term, stops, masks, least in _STEPS
    ]
    outputs = [walk.output, walk.output_model]
    high = max(float(one.abs().max()) for one in outputs)
    kept = [False] * len(walk.output)
    notes = [messages["o"].format(size=len(kept)), messages["o_model"]]
    below = [
        Strip(term, note, one.tolist(), high, SIGNED["light"], kept)
        for term, note, one in zip(("5  o = Σ a·v", "o_model"), notes, outputs, strict=True)
    ]
    heading = [messages["title"], headline]
    if part.stop - part.start < count:
        shown = {"first": part.start, "last": part.stop - 1, "count": count}
        heading.append(messages["part"].format(**shown))
    difference = float((walk.output - walk.output_model).abs().max())
    ending = messages["difference"].format(difference=number(difference))
    return strips_picture(heading, picked.labels[part], token - part.start, strips, below, ending)

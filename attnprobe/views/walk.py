"""The formula for one word, step by step, as a page to explore: `walkthrough_view`."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from attnprobe.checking.basis import basis_of
from attnprobe.errors import InputError, NonFiniteError
from attnprobe.looking import position
from attnprobe.masks import MaskRule
from attnprobe.recompute import Which, key_heads_of
from attnprobe.records import AttentionCall, Capture, captured, dtype_name, whole
from attnprobe.views.colours import SIGNED, WEIGHTS
from attnprobe.views.labels import columns_of, labels_of
from attnprobe.views.messages import messages_in
from attnprobe.views.page import View, own_page, packed
from attnprobe.views.selection import Selection, what_fits
from attnprobe.views.strips import steps_picture
from attnprobe.walking import walkthrough
from attnprobe.words import Words

WALK_BYTES = 8_000_000
"""The most bytes of query, key, value and output that a page holds unless told otherwise: all of
GPT-2 small at 54 tokens."""

_WIDEST = 24  # labels, in columns


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
    labels = labels_of(words, "word", _WIDEST)
    data = {
        **_held(picked),
        "model": cap.model_name,
        "dtype": dtype_name(cap.call(picked.layers[0]).dtype),
        "word": at,
        "words": [
            {"label": label, "space": bool(one.space), "tokens": one.tokens}
            for label, one in zip(labels, words.words, strict=True)
        ],
        "tokens": picked.labels,
        "colours": {"signed": SIGNED, "weights": WEIGHTS},
        "messages": messages,
    }
    title = ": ".join(filter(None, (messages["title"], data["model"])))
    drawn = own_page(title, "walk", '<main id="walk"></main>', data, lang=tag)
    lines = 1 + sum(columns_of(label) + 1 for label in labels) // 100
    return View(title, drawn, 860 + 29 * lines, _still(picked, at, labels[at], messages))


def _still(picked: Selection, at: int, label: str, messages: dict[str, str]) -> str:
    """The picture of the first layer and head, for the word at a position."""
    layer, head = picked.layers[0], picked.heads[0]
    tokens = picked.cap.words_of(picked.text).words[at].tokens
    heading = [
        messages["title"],
        messages["headline"].format(layer=layer, head=head, word=label),
    ]
    if len(tokens) > 1:
        last = picked.labels[tokens[-1]]
        heading.append(messages["several"].format(word=label, count=len(tokens), token=last))
    return steps_picture(
        walkthrough(picked.cap, at, layer, head, text=picked.text),
        picked.cap.call(layer),
        picked.labels,
        tokens[-1],
        heading,
        messages,
    )


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
            rules.add(_rule(call))
        return 4 * vectors * tokens + len(rules) * tokens * tokens

    held = size(len(picked.layers), len(picked.heads), len(picked.labels))
    if held > max_bytes:
        raise InputError(
            f"walkthrough_view would hold {held:,} bytes of query, key, value and output "
            f"({picked.title}), more than max_bytes ({max_bytes:,}). What fits: "
            f"{what_fits(picked, size, max_bytes, by_word=False)}. Or raise max_bytes"
        )


def _rule(call: AttentionCall) -> Any:
    """What layers with the same mask have in common."""
    rule = basis_of(call).rule
    if not isinstance(rule, MaskRule):
        return call.layer
    return rule.causal, rule.window, rule.ahead, rule.chunk


def _held(picked: Selection) -> dict[str, Any]:
    """Each layer's tensors; masks that layers share, and key heads that heads share, only once."""
    at = picked.cap.positions(picked.text)
    masks: dict[bytes, dict[str, Any]] = {}
    layers = []
    for layer in picked.layers:
        found = picked.attention(layer)
        found.refuse_terms("walkthrough_view")
        call = picked.cap.call(layer)
        assert call.head_output_model is not None
        allowed = found.allowed.cpu().numpy().astype(np.uint8)
        rule = allowed.tobytes()
        masks.setdefault(rule, packed(allowed))
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

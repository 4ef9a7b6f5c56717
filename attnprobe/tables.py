"""Attention as pandas frames: `table` and `attended`, by token."""

from __future__ import annotations

import difflib

import pandas as pd
import torch

from attnprobe.errors import InputError
from attnprobe.recompute import chosen_heads, scores, weights
from attnprobe.records import Capture


def table(
    cap: Capture, layer: int | None = None, head: int | None = None, *, text: int = 0
) -> pd.DataFrame:
    """A row for each query and each key that it may attend to.

    Args:
        cap: what `capture` returned.
        layer: from 0; None for all.
        head: from 0; None for all.
        text: which text of a batch.

    Returns:
        Columns layer, head, query_pos, query, key_pos, key, score (scaled, before softmax), weight.
        Positions count the text's own tokens from 0.

    Raises:
        InputError: layer, head or text out of range.
    """
    tokens = cap.tokens_of(text)
    layers = range(cap.layers) if layer is None else [layer]
    frames = []
    for one in layers:
        heads = chosen_heads(cap.call(one), head)
        score, weight = (
            of(cap, one, head, text=text).reshape(len(heads), len(tokens), len(tokens)).cpu()
            for of in (scores, weights)
        )
        at_head, query_pos, key_pos = (score != -float("inf")).nonzero(as_tuple=True)
        frames.append(
            pd.DataFrame(
                {
                    "layer": one,
                    "head": [heads[at] for at in at_head.tolist()],
                    "query_pos": query_pos.numpy(),
                    "query": [tokens[at] for at in query_pos.tolist()],
                    "key_pos": key_pos.numpy(),
                    "key": [tokens[at] for at in key_pos.tolist()],
                    "score": score[at_head, query_pos, key_pos].numpy(),
                    "weight": weight[at_head, query_pos, key_pos].numpy(),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def attended(
    cap: Capture,
    word: str,
    *,
    top: int = 5,
    layer: int | None = None,
    head: int | None = None,
    text: int = 0,
    nth: int = 0,
) -> pd.DataFrame:
    """Which tokens a word's token looks at, strongest first.

    Args:
        cap: what `capture` returned.
        word: a token of the text as it is read, without the spaces around it.
        top: how many rows.
        layer: from 0; None for the mean over all.
        head: from 0; None for the mean over all.
        text: which text of a batch.
        nth: which of the word's occurrences, from 0.

    Returns:
        Columns query_pos, query, key_pos, key, weight: the weight of one head, or the mean over the
        chosen layers and heads.

    Raises:
        InputError: the word is not in the text (the message lists near ones); top below 1; layer,
            head, text or nth out of range.
    """
    if top < 1:
        raise InputError(f"top must be at least 1, got {top}")
    tokens = cap.tokens_of(text)
    query_pos = _position(tokens, word, nth)
    layers = range(cap.layers) if layer is None else [layer]
    rows = [
        weights(cap, one, head, text=text).reshape(-1, len(tokens), len(tokens))[:, query_pos]
        for one in layers
    ]
    mean = torch.cat(rows).mean(0)  # (S,)
    allowed = scores(cap, layers[0], 0, text=text)[query_pos] != -float("inf")
    frame = pd.DataFrame(
        {
            "query_pos": query_pos,
            "query": tokens[query_pos],
            "key_pos": range(len(tokens)),
            "key": tokens,
            "weight": mean.cpu().numpy(),
        }
    )[allowed.cpu().numpy()]
    return frame.nlargest(top, "weight").reset_index(drop=True)


def _position(tokens: tuple[str, ...], word: str, nth: int) -> int:
    """The position of a word's nth occurrence among the tokens."""
    read = [token.strip() for token in tokens]
    found = [at for at, token in enumerate(read) if token == word.strip()]
    if not found:
        near = difflib.get_close_matches(word.strip(), dict.fromkeys(read), n=5, cutoff=0.5)
        hint = f"near ones: {', '.join(near)}" if near else f"its tokens: {' | '.join(read[:20])}"
        raise InputError(f"{word!r} is not a token of the text; {hint}")
    if not 0 <= nth < len(found):
        raise InputError(f"{word!r} occurs {len(found)} times; nth counts from 0, got {nth}")
    return found[nth]

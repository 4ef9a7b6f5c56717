"""The weights and scores of a capture, computed from query and key when asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from attnprobe.errors import InputError
from attnprobe.formula import tiles
from attnprobe.records import AttentionCall, Capture


def weights(cap: Capture, layer: int, head: int | None = None, *, text: int = 0) -> Tensor:
    """The attention weights of one layer, over one text's own tokens.

    Args:
        cap: what `capture` returned.
        layer: from 0.
        head: from 0; None for all.
        text: which text of a batch.

    Returns:
        (T, S) float64, or (H, T, S) for all heads; T and S are the text's tokens, without padding.
        Rows sum to 1, and the future is exactly 0 where the model is causal.

    Raises:
        InputError: layer, head or text out of range; the message says the range.
    """
    return _of_text(cap, layer, head, text)[1]


def scores(cap: Capture, layer: int, head: int | None = None, *, text: int = 0) -> Tensor:
    """The scores of one layer, scaled and masked with -inf; as `weights` otherwise."""
    return _of_text(cap, layer, head, text)[0]


def chosen_heads(call: AttentionCall, head: int | None) -> list[int]:
    """The heads that `head` names: itself, or all of them for None.

    Raises:
        InputError: the head is out of range.
    """
    if head is None:
        return list(range(call.heads))
    if not 0 <= head < call.heads:
        raise InputError(
            f"head {head} is out of range: layer {call.layer} has {call.heads} heads, "
            f"numbered 0 to {call.heads - 1}"
        )
    return [head]


def _of_text(cap: Capture, layer: int, head: int | None, text: int) -> tuple[Tensor, Tensor]:
    """Scores and weights of chosen heads among a text's tokens, each (H, T, S) or (T, S)."""
    call = cap.call(layer)
    heads = chosen_heads(call, head)
    at = cap.positions(text)
    if call.expected_mask is None:
        raise InputError("the mask was given whole by the caller: there is no rule to rebuild it")
    # Padding is at either end, so a text's tokens are one stretch and the diagonal stays one.
    first, last = int(at[0]), int(at[-1]) + 1
    groups = call.heads // call.key.shape[1]
    key_heads = [one // groups for one in heads]
    query = call.query[text, heads, first:last][None]  # (1, h, T, D)
    key = call.key[text, key_heads, first:last][None]
    value = call.value[text, key_heads, first:last][None]
    rule = call.expected_mask.within(len(at))
    shape = (len(heads), len(at), len(at))
    masked = torch.full(shape, -torch.inf, dtype=torch.float64, device=query.device)
    weighted = torch.zeros_like(masked)
    for tile in tiles(query, key, value, rule, call.expected_scaling):
        reach = tile.scores.shape[-1]
        masked[:, tile.start : tile.stop, :reach] = tile.scores[0]
        weighted[:, tile.start : tile.stop, :reach] = tile.weights[0]
    return (masked, weighted) if head is None else (masked[0], weighted[0])

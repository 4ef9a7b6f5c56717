"""From the two products of an attention by torch calls to the shapes that kernels have.

Pure tensors. A product of query and key may come as matmul, bmm, baddbmm or einsum, of (B, H, T, D)
or folded to (B·H, T, D).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnprobe.seam.scoring import Scores, UnfollowedError, regrouped


def begun(
    name: str, left: Tensor, right: Tensor, base: Tensor, options: dict[str, Any], output: Tensor
) -> Scores:
    """A product of query and key; baddbmm adds it to something, both with a factor."""
    key = right.transpose(-1, -2)
    scores = Scores(left, key, output.shape[:-2], output.shape, versions=_versions(left, key))
    if name != "baddbmm":
        return scores
    scores = replace(scores, scaling=float(options.get("alpha", 1)))
    beta = float(options.get("beta", 1))
    if beta and base.any():
        return scores.plus(base if beta == 1 else base.double() * beta)
    return scores


def factors(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The two factors of a product, as matmul takes them."""
    given = tensors_in((args, kwargs))
    if name == "einsum":
        return _of_einsum(args[0], given)
    left, right = given[1:3] if name == "baddbmm" else given[:2]
    return left, right


def _of_einsum(equation: Any, given: list[Tensor]) -> tuple[Tensor, Tensor]:
    """…ij,…jk->…ik is matmul as it stands, …id,…jd->…ij with the second factor transposed."""
    inputs, _, output = str(equation).replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    if len(given) == 2 and first[:-2] == second[:-2] == output[:-2] and first[-2] == output[-2]:
        if (first[-1], output[-1]) == (second[-2], second[-1]):
            return given[0], given[1]
        if (first[-1], output[-1]) == (second[-1], second[-2]):
            return given[0], given[1].transpose(-1, -2)
    raise UnfollowedError(f"it multiplies by einsum {equation}")


def may_be_scores(left: Tensor, right: Tensor) -> bool:
    """Whether a product may be of queries and keys: not with a weight, and for each text."""
    if isinstance(left, nn.Parameter) or isinstance(right, nn.Parameter):
        return False
    return min(left.dim(), right.dim()) > 2 or left.dim() == right.dim() == 2


def texts_and_heads(lead: torch.Size, texts: int | None, heads: int | None) -> tuple[int, int]:
    """B and H, from the axes of scores before T and S."""
    if len(lead) == 2 and texts in (None, lead[0]) and heads in (None, lead[1]):
        return lead[0], lead[1]
    if len(lead) == 1:
        texts = lead[0] // heads if texts is None and heads else texts
        if texts and lead[0] % texts == 0 and heads in (None, lead[0] // texts):
            return texts, lead[0] // texts
    raise UnfollowedError(
        f"its scores have axes {tuple(lead)} before queries and keys, which are not those of "
        f"{texts or 'the'} texts and {heads or 'their'} heads"
    )


def kernel_arguments(
    scores: Scores, sizes: tuple[int, int], value: Tensor, lead: torch.Size
) -> dict[str, Any]:
    """What the attention was computed of, by the names that transformers' kernels have for it."""
    if scores.versions != _versions(scores.query, scores.key):
        raise UnfollowedError("it writes into its query or key after it multiplied them")
    query, key = (_in(value.dtype, one) for one in (scores.query, scores.key))
    by_head = torch.Size((*sizes, *scores.shape[-2:]))
    hidden, bias = (
        None if one is None else regrouped(one, scores.shape, by_head) for one in scores.parts()
    )
    keys = scores.shape[-1]
    return {
        "query": _by_head(query, scores.lead, sizes),
        "key": _by_head(key, scores.lead, sizes),
        "value": _by_head(value, lead, sizes),
        "scaling": scores.scaling,
        "attention_mask": None if hidden is None else ~hidden.expand(*hidden.shape[:-1], keys),
        "position_bias": None if bias is None else bias.expand(*bias.shape[:-1], keys),
        "is_causal": False,
    }


def _by_head(tensor: Tensor, lead: torch.Size, sizes: tuple[int, int]) -> Tensor:
    """(B, H, …), or (B, 1, …) where one key head serves all."""
    if tensor.dim() == 4 and tensor.shape[0] == sizes[0] and tensor.shape[1] in (1, sizes[1]):
        return tensor
    return tensor.expand(*lead, *tensor.shape[-2:]).reshape(*sizes, *tensor.shape[-2:])


def _in(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """A tensor in the dtype of the values, from which it was cast up."""
    if tensor.dtype == dtype:
        return tensor
    narrow = tensor.to(dtype)
    if torch.finfo(dtype).eps < torch.finfo(tensor.dtype).eps or not torch.equal(
        narrow.to(tensor.dtype), tensor
    ):
        raise UnfollowedError(f"its scores are made in {tensor.dtype}, its values in {dtype}")
    return narrow


def heads_of(module: nn.Module) -> int | None:
    """A module's own number of heads, by the names in use."""
    names = ("num_attention_heads", "num_heads", "n_heads", "n_head")
    found = (getattr(module, name, None) for name in names)
    return next((one for one in found if isinstance(one, int)), None)


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(0 if one.is_inference() else one._version for one in tensors)


def tensors_in(given: Any) -> list[Tensor]:
    """The tensors among arguments, in order, those within lists too."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, dict):
        given = tuple(given.values())
    within = given if isinstance(given, tuple | list) else ()
    return [one for some in within for one in tensors_in(some)]

"""One forward of a model over texts → a `Capture`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnprobe.errors import InputError, ModelError, NonFiniteError
from attnprobe.hooks import watched
from attnprobe.keeping import Keeper
from attnprobe.loading.amounts import need_forward
from attnprobe.loading.encoding import Batch, encode
from attnprobe.models import as_language_model
from attnprobe.records import AttentionCall, Capture, LanguageModel, dtype_name

Texts = str | Sequence[str] | Tensor | Sequence[int] | Sequence[Sequence[int]]
"""One text, several, or token ids."""


def capture(
    lm: object,
    text: Texts,
    *,
    target: Texts | None = None,
    padding_side: Literal["left", "right"] | None = None,
    layers: Sequence[int] | None = None,
    device: str | torch.device | None = None,
) -> Capture:
    """Run a model once and keep each attention call's query, key, value and output.

    Args:
        lm: what `load` returns, a (model, tokenizer) pair, or a bare model with token ids.
        text: one text, several (a padded batch), token ids, or what a tokenizer returns: for a
            chat, `capture(lm, lm.tokenizer.apply_chat_template(chat))`.
        target: for an encoder-decoder, what its decoder is given: texts, which then begin with the
            model's start token, or token ids as they are.
        padding_side: where a batch is filled up; the tokenizer's own side by default. Positions
            are counted from each text's first token, so the side changes no number but rounding.
        layers: which layers' calls to keep, from 0; all by default. The model runs whole, so that
            the numbers are the same; but `verify` cannot pass what was not kept.
        device: where to keep them, such as "cpu" for a model on a GPU: each layer's tensors go
            there as soon as it has run, and the output at the end. By default they stay. What is
            computed of a capture is computed where it is kept.

    Returns:
        A `Capture`. It holds no (T, S) tensor, unless the model's own kernel returned its weights
        (eager), which are kept as `weights_model`.

    Raises:
        InputError: no text, an empty one, or one longer than the model's positions; more memory
            than `attnprobe.memory` allows, before any is taken; ids outside the vocabulary; a model
            in train mode with dropout; autocast; a layer or device that does not exist.
        ModelError: no attention call was seen; no output for each token; no model for token ids; a
            model that torch.compile has compiled, or whose weights are on "meta".
        NonFiniteError: NaN or infinity in the weights or in what was computed.
    """
    keeper = Keeper.of(layers, device)
    language_model, keeps = as_language_model(lm), None if layers is None else len(set(layers))
    return keeper.finished(
        forward(language_model, text, target, padding_side, keeper.take, keeps=keeps)
    )


def forward(
    lm: LanguageModel,
    text: Texts,
    target: Texts | None,
    padding_side: Literal["left", "right"] | None,
    take: Callable[[AttentionCall], None],
    *,
    keeps: int | None = 0,
    outputs: float = 1,
    instead: str = "",
) -> Capture:
    """As `capture`, but each call is given to `take` while the model runs, and is not kept.

    `keeps`, `outputs` and `instead` are of `need_forward`: what the caller will hold.
    """
    need = {"keeps": keeps, "outputs": outputs, "instead": instead}
    return run(lm, lambda: encode(lm, text, target, padding_side), take, need)


def run(
    lm: LanguageModel,
    encoded: Callable[[], Batch],
    take: Callable[[AttentionCall], None],
    need: dict[str, Any],
) -> Capture:
    """As `forward`, on what `encoded` gives once the model is known to be one to watch; `need` is
    given to `need_forward`."""
    model = lm.model
    refuse_dropout(model)
    seen = 0

    def take_finite(call: AttentionCall) -> None:
        nonlocal seen
        seen += 1
        refuse_nonfinite(lm, call, batch.padding if call.part == "encoder" else rows)
        take(call)

    with torch.no_grad(), watched(model, take_finite) as calls:
        batch = encoded()
        refuse_autocast(batch.inputs["input_ids"].device)
        rows = batch.padding if batch.target is None else batch.target.padding
        need_forward(model, batch.inputs, **need)
        returned = model(**batch.inputs)
    if not seen:
        reason = (
            str(calls.unseen[0]) if calls.unseen else "it has none, or none by torch's own softmax"
        )
        raise ModelError(
            f"{type(model).__name__} computed no softmax attention that attnprobe can see: {reason}"
        )
    output = output_of(returned, model, rows).detach()
    if not _finite(output) and not torch.isfinite(output[rows]).all():
        raise nonfinite(lm, "the model's output", output.dtype)
    return Capture(
        lm=lm,
        texts=batch.texts,
        input_ids=batch.inputs["input_ids"],
        padding=batch.padding,
        words=batch.words,
        calls=(),
        output=output,
        unseen=tuple(calls.unseen),
        inputs=batch.inputs,
        target=batch.target,
    )


def output_of(outputs: Any, model: nn.Module, padding: Tensor) -> Tensor:
    """A forward's logits, (B, T, V), or its last hidden state where it has no language-model head.

    Raises:
        ModelError: it has neither for each token.
    """
    for name in ("logits", "last_hidden_state", "prediction_logits"):
        output = getattr(outputs, name, None)
        if isinstance(output, Tensor) and output.dim() == 3 and output.shape[:2] == padding.shape:
            return output
    raise ModelError(
        f"{type(model).__name__} gives neither logits nor a hidden state for each token: use its "
        "language model or its base model, and return_dict=True"
    )


def refuse_dropout(model: nn.Module) -> None:
    """Refuse a forward that would be random.

    Raises:
        InputError: a model in train mode with dropout.
    """
    for name, module in model.named_modules():
        if not module.training:
            continue
        rate = module.p if isinstance(module, nn.Dropout) else 0.0
        rate = rate or getattr(module, "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise InputError(
                f"the model is in train mode with dropout {rate} at {name}: its attention would "
                "be random. Call model.eval() first"
            )


def refuse_autocast(device: torch.device) -> None:
    """Refuse a forward that would be cast, unseen, on the device of its inputs.

    Raises:
        InputError: autocast is on there.
    """
    if torch.is_autocast_enabled(device.type):
        raise InputError(
            "autocast is on: kernels would cast what they are given, unseen. Capture outside of "
            "it, with the model loaded in the dtype you want"
        )


def refuse_nonfinite(lm: LanguageModel, call: AttentionCall, rows: Tensor) -> None:
    """Refuse NaN and infinity in what was computed for tokens, (B, T) bool.

    The logits do not tell them all: some kernels make numbers of a row of NaN.

    Raises:
        NonFiniteError: there is one; the message names the first bad weight.
    """
    by_row = {"query": call.query, "head output": call.head_output_model}
    for what, tensor in by_row.items():
        if tensor is None or _finite(tensor):
            continue
        by_token = tensor.transpose(1, 2) if what == "query" else tensor
        if by_token.shape[:2] != rows.shape or not torch.isfinite(by_token[rows]).all():
            raise nonfinite(lm, f"layer {call.layer}: the {what}", call.dtype)


def _finite(tensor: Tensor) -> bool:
    """True if every number is surely finite. NaN and infinity pass on into any sum, and one sum
    costs a tenth of looking at each number; a sum may overflow by itself, though."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return math.isfinite(tensor.sum(dtype=wide))


def nonfinite(lm: LanguageModel, where: str, dtype: torch.dtype) -> NonFiniteError:
    """The error that says where NaN or infinity is, and of which weight it comes."""
    for name, parameter in lm.model.named_parameters():
        if parameter.is_meta:  # offloaded: not here to be looked at
            continue
        bad = int((~torch.isfinite(parameter)).sum())
        if bad:
            return NonFiniteError(
                f"{where} holds NaN or infinity, and so does the weight {name}: {bad} of "
                f"{parameter.numel()} numbers, the first such weight in the model"
            )
    return NonFiniteError(
        f"{where} holds NaN or infinity though every weight is finite: the computation overflows "
        f"in {dtype_name(dtype)}. Load the model with dtype float32 or bfloat16"
    )

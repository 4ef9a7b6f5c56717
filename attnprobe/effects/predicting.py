"""What a causal language model predicts for a text, and how far two predictions are apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnprobe.capturing import Texts, nonfinite, refuse_autocast, refuse_dropout
from attnprobe.errors import InputError, ModelError
from attnprobe.loading.amounts import need_forward
from attnprobe.loading.encoding import accepted, encode
from attnprobe.records import LanguageModel

TOKENS_AT_ONCE = 64
"""How many tokens' logits are compared in float64 at a time."""


def texts_of(lm: LanguageModel, text: Texts, least: int = 2) -> list[Tensor]:
    """The token ids of each text, (T,) int64: they run one by one, so that nothing is padded.

    Args:
        lm: a model that predicts the next token.
        text: as `capture` takes it.
        least: how many tokens a text needs: two, where a next one is to be known.

    Raises:
        InputError: as `capture`; a text of one token, which has no next one to predict.
        ModelError: a model that does not predict the next token, by its class or config.
    """
    refuse_encoder_decoder(lm.model)
    name = type(lm.model).__name__
    can_generate = getattr(lm.model, "can_generate", None)
    if can_generate is None or not can_generate():
        raise ModelError(
            f"{name} predicts no next token: expected a causal language model, such as "
            "AutoModelForCausalLM loads"
        )
    refuse_dropout(lm.model)
    ids = unpadded(lm, text)
    refuse_autocast(ids[0].device)
    for number, one in enumerate(ids):
        if len(one) < least:
            raise InputError(
                f"text {number} has one token, and no next one to predict: give at least two"
            )
    return ids


def unpadded(lm: LanguageModel, text: Texts) -> list[Tensor]:
    """The token ids of each text, (T,) int64.

    Raises:
        InputError: as `capture`.
    """
    batch = encode(lm, text, padding_side="right")
    return [row[here] for row, here in zip(batch.inputs["input_ids"], batch.padding, strict=True)]


def refuse_encoder_decoder(model: nn.Module) -> None:
    """Refuse a model that takes two texts.

    Raises:
        ModelError: it is one, by its config.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder: expected a model of one text, such as "
            "a causal language model"
        )


def logits_of(model: nn.Module, ids: Tensor, *, last: bool = False, outputs: float = 1) -> Tensor:
    """A forward's logits, (N, T, V), of ids (N, T); of the last token alone, (N, 1, V).

    `outputs` says how many times as much memory the caller will hold, these included.

    Raises:
        InputError: more than `attnprobe.memory` allows.
        ModelError: it has none for each token.
    """
    names = accepted(model)
    options = {"logits_to_keep": 1, "use_cache": False} if last else {"use_cache": False}
    options = {name: one for name, one in options.items() if name in names}
    few = "logits_to_keep" in options
    need_forward(model, {"input_ids": ids}, outputs=outputs / ids.shape[1] if few else outputs)
    with torch.no_grad():
        returned = model(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    logits = getattr(returned, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise ModelError(
            f"{type(model).__name__} gives no logits for each token: load it with its "
            "language-model head"
        )
    return logits[:, -1:] if last else logits


def refuse_nonfinite_logits(lm: LanguageModel, logits: Tensor) -> None:
    """Refuse logits of a model as it is, which all else is held against, that are no numbers.

    Raises:
        NonFiniteError: NaN or infinity among them; the message names the weight.
    """
    if not torch.isfinite(logits).all():
        raise nonfinite(lm, "the model's output", logits.dtype)


@dataclass(frozen=True)
class Predictions:
    """Sums over the tokens of some texts, of what was predicted beside what the model does.

    Attributes:
        tokens: how many tokens; each is followed by a prediction.
        known: those whose next token is known: all but each text's last.
        loss: over `known`, of -ln of the next token's probability, in nats.
        kl: over `tokens`, of KL(the model's own ‖ this), in nats.
        same: for how many tokens the likeliest next one is the model's own.
    """

    tokens: int = 0
    known: int = 0
    loss: float = 0.0
    kl: float = 0.0
    same: int = 0

    def __add__(self, other: Predictions) -> Predictions:
        return Predictions(
            self.tokens + other.tokens,
            self.known + other.known,
            self.loss + other.loss,
            self.kl + other.kl,
            self.same + other.same,
        )

    def means(self) -> dict[str, float]:
        """The columns loss, perplexity, top1 and kl; NaN where something was not finite."""
        if not self.tokens or not math.isfinite(self.loss + self.kl):
            return dict.fromkeys(("loss", "perplexity", "top1", "kl"), math.nan)
        loss = self.loss / self.known
        return {
            "loss": loss,
            # torch's exp: inf where Python's own raises, as the number is past float64
            "perplexity": float(torch.tensor(loss, dtype=torch.float64).exp()),
            "top1": self.same / self.tokens,
            "kl": self.kl / self.tokens,
        }


def compared(ids: Tensor, own: Tensor, given: Tensor) -> Predictions:
    """What was predicted for one text, (T,), beside the model's own, which is finite: logits of
    (T, V) each."""
    following = ids[1:]
    total = Predictions()
    for start in range(0, len(ids), TOKENS_AT_ONCE):
        rows = slice(start, start + TOKENS_AT_ONCE)
        p, q = (x[rows].double().log_softmax(-1) for x in (own, given))  # (t, V)
        answers = following[rows]  # the last row of the last block has none
        loss = -q[: len(answers)].gather(-1, answers[:, None]).sum()
        kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)  # (t,): below 0 by rounding only
        same = p.argmax(-1) == q.argmax(-1)
        total += Predictions(len(p), len(answers), float(loss), float(kl.sum()), int(same.sum()))
    return total

"""What each part of a model adds to the logit of a next word: `logit_contributions`."""

from __future__ import annotations

import html
from dataclasses import dataclass

import pandas as pd

from attnprobe.checking.report import Row, ratio_text
from attnprobe.effects.parts import Reader, parts_of
from attnprobe.effects.residual import residual, stream_of
from attnprobe.loading.continuations import NextToken, next_token
from attnprobe.looking import position
from attnprobe.records import Capture, captured, dtype_name, whole
from attnprobe.tables import styled
from attnprobe.words import Words, visible

SHOWN = 12
"""How many parts are shown where all would be too many."""


@dataclass(frozen=True, eq=False)
class LogitContributions:
    """What each part of a model adds to one logit, or to the difference of two.

    Attributes:
        title: which logit, at which token.
        of: the model, its dtype and kernel, and the text.
        frame: a row a part: part, layer, head, contribution. Parts are embedding, position (where
            positions have one of their own), then by layer each head, attention bias (b_O) and mlp,
            then final norm bias and unembedding bias; those that a model has. layer and head are
            nullable Int64, empty where a part has none; contribution is float64, in logits.
            `frame.attrs` holds model, unit, word and against (as they read in a text, or ids of a
            bare model), text, after, the word of the text before them, token, its position, and
            logit_model.
        logit_model: the model's own logit, or the difference of its two.
        bound: how far rounding alone may take the sum of the contributions from it.
        checks: the steps from parts to logit, each against the model's own, see
            `logit_contributions`.
    """

    title: str
    of: str
    frame: pd.DataFrame
    logit_model: float
    bound: float
    checks: tuple[Row, ...]

    @property
    def total(self) -> float:
        """The sum of the contributions."""
        return float(self.frame["contribution"].sum())

    @property
    def error(self) -> float:
        """How far the sum is from the model's own logit."""
        return abs(self.total - self.logit_model)

    @property
    def verified(self) -> bool:
        """Whether each step, and the sum, is within its bound."""
        return all(row.verdict == "verified" for row in self.checks)

    def top(self, count: int = SHOWN) -> pd.DataFrame:
        """The rows of the frame that count most, up or down, largest first.

        Raises:
            InputError: `count` is no whole number.
        """
        order = self.frame["contribution"].abs().sort_values(ascending=False, kind="stable").index
        return self.frame.loc[order[: whole(count, "count")]]

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        sums = (
            f"{len(self.frame)} parts add up to {self.total:.6g}, the model's own is "
            f"{self.logit_model:.6g}: error {self.error:.1e}, bound {self.bound:.1e}"
        )
        worst = max(self.checks, key=lambda row: row.ratio)
        layer = "" if worst.layer is None else f" in layer {worst.layer}"
        if self.verified:
            stands = f"{ratio_text(worst.ratio)} ({worst.check}{layer})"
            return f"VERIFIED: {sums}; each step is within its own, the worst at {stands}"
        return (
            f"MISMATCH: these are not what the model added: {worst.check}{layer}, error "
            f"{worst.error:.1e}, bound {worst.bound:.1e} ({ratio_text(worst.ratio)}); {sums}"
        )

    def __repr__(self) -> str:
        shown = _readable(self.top()).to_string(index=False, float_format="{:+.4f}".format)
        return f"{self.title}\n{self.of}\n\n{shown}\n{self._rest()}\n{self.summary}"

    def _repr_html_(self) -> str:
        shown = styled(_readable(self.top()), digits="+.4f").hide().to_html()
        title, of, rest, summary = (
            html.escape(one) for one in (self.title, self.of, self._rest(), self.summary)
        )
        return f"<h3>{title}</h3><p>{of}</p>{shown}<p>{rest}</p><p><strong>{summary}</strong></p>"

    def _rest(self) -> str:
        rest = len(self.frame) - SHOWN
        if rest <= 0:
            return "all parts"
        added = self.total - self.top()["contribution"].sum()
        return f"and {rest} smaller ones, {added:+.4f} together"


def logit_contributions(
    cap: Capture,
    word: str | int,
    against: str | int | None = None,
    *,
    after: str | int | None = None,
    nth: int = 0,
    text: int = 0,
) -> LogitContributions:
    """Take the logit of a next word apart: what each head, each MLP and each embedding adds to it.

    The last block's output x is a sum: the token's embedding, the output of each head times its
    rows of W_O, b_O, and the output of each MLP. The logit of a word is u·norm(x) + c, where u is
    the word's row of the unembedding. With the final norm's root σ frozen at what x makes it, that
    is linear: each part r adds u·(g ∘ (r - mean r))/σ, where g is the norm's weight (an RMSNorm
    subtracts no mean), and the norm's bias β adds u·β. Elhage et al. 2021, *A Mathematical
    Framework for Transformer Circuits*; nostalgebraist 2020, *interpreting GPT: the logit lens*. It
    says what a part adds by itself to this sum: not what the logit would be without the part, as
    later layers read what it adds, and σ would be another.

    The parts are the model's own numbers: its head outputs as captured, and its embeddings and MLP
    outputs of one more run. That they add up is checked, step by step:

    | check | compares | bound |
    |---|---|---|
    | `embedding` | token + position against what the first block was given | one rounding |
    | `merge` | Σ heads·W_O + b_O against the attention's output | `rounding.linear` |
    | `residual` | a block's input + attention + MLP against its output | two roundings |
    | `norm` | the norm of x against the model's own | `rounding.layer_norm`, `.rms_norm` |
    | `unembedding` | u·y + c, of the model's own norm y, against its logit | `rounding.linear` |
    | `logit` | the sum of the contributions against the model's logit | below |

    A sum stored at each addition is off by at most γ(additions)·Σ|terms|. Errors before the norm
    reach the logit by d = (g ∘ u - its mean)/σ, so the sum of the contributions may be off by
    |d|·(the bounds of the first three, over all layers) + |u|·(that of `norm`) + that of
    `unembedding`, and what summing P parts in float64 may round, γ(2E + P)·Σ|r|·|g ∘ u|/σ.

    Args:
        cap: what `capture` returned, of a GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3, Phi, Phi-3
            or GPT-NeoX (Pythia) with a language-model head.
        word: the next word, or a token id; "park" is " park", with the space before it, where the
            text goes on with one (see `attnprobe.loading.continuations`). The title says which it
            is.
        against: another next word: then it is all of the logit of `word` less that of `against`.
        after: the word of the text, or its position among the words, from 0, that comes before the
            next; of a word of several tokens it is the last one. By default the text's last token.
        nth: which occurrence of `after` in a text that holds it several times, from 0.
        text: which text of a batch.

    Raises:
        InputError: a word that is not one token, an id that the model has no logit for; an `after`
            that is not in the text; a capture without its model.
        ModelError: a model of another class, or with a W_O, norm or `lm_head` that is not a plain
            one; a model that has changed since it was captured.
    """
    words = captured(cap).words_of(text)
    at, context = _place(words, after, nth)
    stream = stream_of(cap)
    assert cap.lm is not None
    asked = [word] if against is None else [word, against]
    tokens = [next_token(cap.lm.tokenizer, one, context, cap.output.shape[-1]) for one in asked]
    ids = [one.id for one in tokens]
    place = int(cap.positions(text)[at])
    found = residual(cap, stream, text, place)
    parts = parts_of(cap, text, place, found)
    reader = Reader.of(found, ids)
    logits = cap.output[text, place, ids].double().cpu()  # (1,) or (2,)
    checks, bound = reader.checked(parts, found, logits, cap.calls[0].layer_rounding)
    frame, logit = reader.frame(parts), float(logits @ reader.sign)
    error = abs(float(frame["contribution"].sum()) - logit)
    last = words.words[words.word_of[at]].label
    frame.attrs = {"model": cap.lm.name, "text": words.text, "after": last, "token": at}
    frame.attrs |= {"word": tokens[0].word, "against": tokens[-1].word if tokens[1:] else None}
    frame.attrs |= {"unit": "logits", "logit_model": logit}
    dtype = dtype_name(cap.calls[0].dtype)
    return LogitContributions(
        title=f"What adds to {_named(tokens)}, after {last!r} (token {at})",
        of=f"{cap.lm.name} in {dtype}, {cap.calls[0].kernel} kernel: {visible(words.text)}",
        frame=frame,
        logit_model=logit,
        bound=bound,
        checks=(*parts.checks, *checks, Row("logit", None, None, error, bound)),
    )


def _place(words: Words, after: str | int | None, nth: int) -> tuple[int, str]:
    """The token that makes the prediction, and the text up to it."""
    if after is None:
        return len(words.tokens) - 1, words.text
    word = words.words[position(words, after, nth)]
    return word.tokens[-1], words.text[: word.span[1]]


def _named(tokens: list[NextToken]) -> str:
    first, *others = tokens
    less = "".join(f" less that of {one}" for one in others)
    return f"the logit of {first}{less}"


def _readable(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with nothing where a part has no layer or head."""
    places = {
        name: ["" if pd.isna(at) else str(at) for at in frame[name]] for name in ("layer", "head")
    }
    return frame.assign(**places)

"""What a picture of effects says of itself: what it shows, of which text, and from where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import pandas as pd

from attnprobe.views.labels import columns_of
from attnprobe.views.plots import shortened
from attnprobe.words import visible

LONGEST_NAME, LONGEST_TEXT = 44, 120
"""Characters of a model's name, which fits one line, and of a text: of longer ones, beginning and
end are shown."""

MEANINGS = {
    "restored": ("share of the logit difference that is restored", "restored (1: all of it)"),
    "effect": ("what silencing each head changes", "change"),
    "contribution": ("what each head adds to the logit", "contribution (logits)"),
}
"""What each column that is drawn by itself means: in the title, and beside the scale."""

_MASS = ("mean weight on {}", "weight (0 to 1)")
_KEYS = {
    "first": "the first token",
    "previous": "the token before",
    "two_before": "the last token but one",
    "same": "the token itself",
    "next": "the next token",
    "punctuation": "punctuation",
    "duplicate": "equal earlier tokens",
    "induction": "tokens behind equal earlier ones",
}

STATISTICS = {
    "entropy": ("mean entropy of the weights", "entropy (nats)"),
    "entropy_share": ("mean entropy of the weights", "share of the most there can be"),
    "largest": ("mean of each row's largest weight", _MASS[1]),
    "distance": ("mean distance looked back", "distance (tokens)"),
    "distance_without_first": (
        "mean distance looked back, without the first token",
        "distance (tokens)",
    ),
    "variability": ("variability of the weights by content", "variability (0 to 1)"),
    **{name: (_MASS[0].format(keys), _MASS[1]) for name, keys in _KEYS.items()},
    **{
        f"value_{name}": (f"mean share, by value, of {keys}", "share (0 to 1)")
        for name, keys in _KEYS.items()
    },
}
"""The same of the columns of `head_stats` and `head_roles`, none of which goes below 0."""

SILENCED = {
    "zero": "its output is zero",
    "mean": "its output is its mean",
    "resample": "its output is another token's",
}
"""What silencing a head is, by `how`."""

OTHERS = {"attention bias": "attention bias (b_O)", "mlp": "MLP"}
"""What a layer has beside its heads, by the column part."""

PATCHED = {"head_output": "the heads' outputs", "residual": "the residual stream"}


@dataclass(frozen=True)
class Caption:
    """What stands above a picture and beside its scale, a paragraph each.

    Attributes:
        heading: the model, and what is shown.
        details: of which text, how, and the numbers that it is measured from.
        unit: of the scale.
    """

    heading: list[str]
    details: list[str]
    unit: str


def caption_of(frame: pd.DataFrame, by: str, value: str, left_out: list[str]) -> Caption:
    """What is said of a column, by what `frame.attrs` holds: nothing of what it does not.

    Args:
        frame: with attrs as `head_effects`, `patch_effects`, `logit_contributions` or `head_roles`
            leave them.
        by: "head" or "position".
        value: the column.
        left_out: the parts in the frame that are not drawn.
    """
    attrs: Mapping[Any, Any] = frame.attrs
    what, unit = (MEANINGS | STATISTICS).get(value, (f"{value} by layer and {by}", value))
    details: list[str] = []
    if value == "effect" and attrs.get("metric"):
        what += f" in the {_metric(attrs)}"
        unit = f"change ({attrs.get('unit')})"
        details = _of_effect(attrs)
    elif value == "restored":
        what += f", by layer and {by}"
        details = _of_restored(attrs)
    elif value == "contribution":
        parts = set(frame["part"]) if "part" in frame else set()
        others = [called for part, called in OTHERS.items() if part in parts]
        what = what.replace("head", ", ".join(["head", *others[:-1]]) + _and(others[-1:]))
        what += _of(attrs.get("word"), attrs.get("against"))
        details = _of_contribution(attrs, left_out)
    elif "threshold" in attrs:  # what `head_roles` leaves
        details = [
            f"{attrs.get('texts')} texts of {attrs.get('tokens')} random tokens, each twice in a "
            f"row (seed {attrs.get('seed')})"
        ]
    name = shortened(str(attrs.get("model", "")), LONGEST_NAME)
    return Caption([*filter(None, [name]), what], details, unit)


def folded(paragraphs: list[str], columns: int) -> str:
    """Paragraphs in lines of so many columns at most, with two for a Chinese character."""
    lines = []
    for one in paragraphs:
        across = columns * len(one) // max(1, columns_of(one))
        lines += wrap(one, max(1, across), break_on_hyphens=False)
    return "\n".join(lines)


def _metric(attrs: Mapping[Any, Any]) -> str:
    name = str(attrs["metric"])
    if name == "loss" or attrs.get("target") is None:
        return name.replace("_", " ")
    return "logit" + _of(attrs["target"], attrs.get("against"))


def _of(word: object, against: object) -> str:
    """Of which next word a logit is, and less that of which."""
    if word is None:
        return ""
    return f" of {_word(word)}" + ("" if against is None else f" less that of {_word(against)}")


def _word(word: object) -> str:
    """A word in quotes, which no line end shall part it from, or an id."""
    return repr(word).replace(" ", "\N{NO-BREAK SPACE}") if isinstance(word, str) else f"id {word}"


def _and(last: list[str]) -> str:
    return f" and {last[0]}" if last else ""


def _text(attrs: Mapping[Any, Any], name: str) -> str:
    """A text in one line, or nothing."""
    text = attrs.get(name)
    return f"“{shortened(visible(str(text)), LONGEST_TEXT)}”" if text else ""


def _number(attrs: Mapping[Any, Any], name: str) -> str:
    number = attrs.get(name)
    return f"{number:.4g}" if isinstance(number, int | float) else "unknown"


def _of_effect(attrs: Mapping[Any, Any]) -> list[str]:
    text, count = _text(attrs, "text"), attrs.get("texts", 1)
    if text and count != 1:
        text += f" and {count - 1} more"
    how = SILENCED.get(attrs.get("how", ""), "")
    seed = "" if attrs.get("seed") is None else f" (seed {attrs['seed']})"
    unchanged = f"unchanged: {_number(attrs, 'unchanged')} {attrs.get('unit')}"
    details = [text, f"silenced: {how}{seed}" if how else ""]
    return [*filter(None, details), *([unchanged] if "unchanged" in attrs else [])]


def _of_restored(attrs: Mapping[Any, Any]) -> list[str]:
    details = []
    if attrs.get("what") in PATCHED:
        details.append(f"patched: {PATCHED[attrs['what']]}, clean into corrupt")
    if attrs.get("answer") is not None:
        details.append(f"logit{_of(attrs['answer'], attrs.get('wrong'))}:")
    return details + [
        f"{_number(attrs, name)} after the {name} {_text(attrs, f'{name}_text')}"
        for name in ("clean", "corrupt")
        if name in attrs
    ]


def _of_contribution(attrs: Mapping[Any, Any], left_out: list[str]) -> list[str]:
    details = [*filter(None, [_text(attrs, "text")])]
    if attrs.get("after") is not None:
        details.append(f"after {_word(attrs['after'])} (token {attrs.get('token')})")
    if "logit_model" in attrs:
        details.append(f"all parts add up to {_number(attrs, 'logit_model')} logits")
    if left_out:
        details.append(f"not drawn: {', '.join(left_out)}")
    return details

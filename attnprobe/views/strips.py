"""A still picture of a walkthrough, where scripts do not run: a strip of cells for each step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnprobe.records import AttentionCall
from attnprobe.views.colours import SIGNED, WEIGHTS, blended, ink_on
from attnprobe.views.labels import columns_of
from attnprobe.views.still import escaped, svg
from attnprobe.walking import Walkthrough

CELLS = 24
"""The most tokens that a picture shows: those that end with the query."""

_LABEL, _ROW, _CELL = 255, 40, 50  # pixels: the term beside a strip, a strip, the narrowest column
_COLUMN = 7.5  # pixels of a letter of a label, at most, with few exceptions
_INK, _FAINT, _MARKED = "#1b1f24", "#5b6470", "#dcebfd"  # as common.css has them
_MASKED, _HATCH = "#f3f5f8", "#c3cad3"

# The strips: message, column of the walkthrough's steps, the column whose largest number ends the
# colours, term, colours, whether masked cells are hatched, and where the colours end at least.
_STEPS = (
    ("raw", "score_raw", "score_raw", "1  q·k", SIGNED, False, 0.0),
    ("score", "score", "score", "2  q·k / √d_k", SIGNED, False, 0.0),
    ("masked", "masked_score", "score", "3  + M", SIGNED, True, 0.0),
    ("weight", "weight", "weight", "4  a = softmax", WEIGHTS, True, 1.0),
    ("brought", "weighted_norm", "weighted_norm", "5  |a·v|", WEIGHTS, True, 0.0),
    ("share", "share", "share", "5  (a·v)·o / |o|²", SIGNED, True, 1.0),
)


@dataclass(frozen=True)
class _Strip:
    """Numbers as cells.

    `term` and `note` stand beside them; the colours `stops` go from `low` to `high`; `masked` says
    which cells are hatched.
    """

    term: str
    note: str
    values: Sequence[float]
    low: float
    high: float
    stops: Sequence[str]
    masked: Sequence[bool]


def steps_picture(
    walk: Walkthrough,
    call: AttentionCall,
    labels: Sequence[str],
    token: int,
    heading: Sequence[str],
    messages: Mapping[str, str],
) -> str:
    """An SVG picture of a walkthrough.

    Args:
        walk: what is shown.
        call: the layer's.
        labels: the text's tokens.
        token: the query's position.
        heading: lines of text at the top.
        messages: what `attnprobe.views.messages` says in some language.
    """
    count = len(labels)
    part = slice(max(0, token + 1 - CELLS), max(token + 1, min(count, CELLS)))
    if part.stop - part.start < count:
        where = messages["part"].format(first=part.start, last=part.stop - 1, count=count)
        heading = [*heading, where]
    widths = [max(_CELL, round(_COLUMN * columns_of(one)) + 8) for one in labels[part]]
    below = _outputs(walk, messages)
    narrow = [max(5, min(16, sum(widths) // len(walk.output)))] * len(walk.output)

    y = 20 * len(heading) + 8
    parts = [_words(6, 20 * at + 18, line, 14) for at, line in enumerate(heading)]
    parts += _labels(labels[part], widths, y, token - part.start)
    y += 24
    for strip in _steps(walk, call, part, messages):
        parts += _drawn(strip, y, widths, numbers=True)
        y += _ROW
    for strip in below:
        parts += _drawn(strip, y, narrow, numbers=False)
        y += _ROW
    difference = float((walk.output - walk.output_model).abs().max())
    ending = messages["difference"].format(difference=_number(difference))
    parts.append(_words(6, y + 14, ending, 12))
    widest = max(columns_of(line) for line in (*heading, ending))
    width = max(_LABEL + max(sum(widths), sum(narrow)), round(8.5 * widest)) + 6
    return svg("".join(parts), width, y + 24)


def _steps(
    walk: Walkthrough, call: AttentionCall, part: slice, messages: Mapping[str, str]
) -> list[_Strip]:
    """The strips with a cell for each token."""
    size = call.query.shape[-1]
    root = math.isclose(call.expected_scaling * math.sqrt(size), 1.0, rel_tol=1e-6)
    filled = {
        "score": {"scaling": f"{call.expected_scaling:.4g}{f' = 1/√{size}' if root else ''}"},
        **{name: {"sum": f"{walk.steps[name].sum():.4g}"} for name in ("weight", "share")},
    }
    hidden = (walk.steps["mask"] < 0).tolist()[part]
    strips = []
    for name, column, scale, term, stops, masks, least in _STEPS:
        high = max(least, float(walk.steps[scale].abs().max()))
        strips.append(
            _Strip(
                term=term if root or name != "score" else "2  q·k · s",
                note=messages[name].format(**filled.get(name, {})),
                values=walk.steps[column].tolist()[part],
                low=-high if stops is SIGNED else 0.0,
                high=high,
                stops=stops["light"],
                masked=hidden if masks else [False] * len(hidden),
            )
        )
    return strips


def _outputs(walk: Walkthrough, messages: Mapping[str, str]) -> list[_Strip]:
    """The strips with a cell for each component: o, and the model's own."""
    outputs = {
        ("5  o = Σ a·v", messages["o"].format(size=len(walk.output))): walk.output.tolist(),
        ("o_model", messages["o_model"]): walk.output_model.tolist(),
    }
    high = max(abs(one) for values in outputs.values() for one in values)
    plain = [False] * len(walk.output)
    return [
        _Strip(term, note, values, -high, high, SIGNED["light"], plain)
        for (term, note), values in outputs.items()
    ]


def _labels(labels: Sequence[str], widths: Sequence[int], y: int, current: int) -> list[str]:
    parts = []
    x = _LABEL
    for at, (label, width) in enumerate(zip(labels, widths, strict=True)):
        if at == current:
            parts.append(_rect(x, y, width - 2, 20, _MARKED))
        parts.append(_words(x + width / 2 - 1, y + 15, label, 12, "middle"))
        x += width
    return parts


def _drawn(strip: _Strip, y: int, widths: Sequence[int], *, numbers: bool) -> list[str]:
    scale = f"{_number(strip.low)} … {_number(strip.high)}"
    parts = [
        _words(6, y + 13, strip.term, 13, weight="bold"),
        _words(_LABEL - 8, y + 13, scale, 10, "end"),
        _words(6, y + 28, strip.note, 11, fill=_FAINT),
    ]
    x = _LABEL
    for value, masked, width in zip(strip.values, strip.masked, widths, strict=True):
        place = (value - strip.low) / ((strip.high - strip.low) or 1.0)
        colour = blended(strip.stops, place if math.isfinite(place) else 0.5)
        fill, ink = (_MASKED, _INK) if masked else (colour, ink_on(colour))
        parts.append(_rect(x, y, width - 2, _ROW - 10, fill))
        if masked:
            parts.append(_hatched(x, y, width - 2, _ROW - 10))
        if numbers:
            parts.append(_words(x + width / 2 - 1, y + 19, _number(value), 11, "middle", ink))
        x += width
    return parts


def _number(value: float) -> str:
    """A number of three digits, as the page writes it."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "−∞" if value < 0 else "∞"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits}e{int(exponent)}".replace("-", "−")
    return f"{float(f'{value:.3g}'):g}".replace("-", "−")


def _rect(x: int, y: int, width: int, height: int, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"/>'


def _hatched(x: int, y: int, width: int, height: int) -> str:
    """Lines from the lower left to the upper right of a rectangle."""
    lines = "".join(
        f"M{x + max(0, at - height)} {y + min(at, height)}L{x + min(at, width)} "
        f"{y + max(0, at - width)}"
        for at in range(4, width + height, 8)
    )
    return f'<path stroke="{_HATCH}" d="{lines}"/>'


def _words(
    x: float,
    y: float,
    text: str,
    size: int,
    anchor: str = "start",
    fill: str = _INK,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{escaped(text)}</text>'
    )

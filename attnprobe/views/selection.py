"""What a view is asked to show, and whether a browser can draw it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnprobe.errors import InputError, NonFiniteError
from attnprobe.recompute import Attention, Shown, Which, chosen
from attnprobe.records import Capture, captured, whole
from attnprobe.stretch import Span, Stretch
from attnprobe.views.labels import labels_of
from attnprobe.words import By

Drawn = Callable[[int, int, int], int]
"""From a number of layers, of heads and of labels to what a page draws or holds: lines or bytes."""


@dataclass(frozen=True, eq=False)
class Selection:
    """Some layers and heads of one text of a capture, or of a stretch of it, by token or word."""

    cap: Capture
    layers: list[int]
    heads: list[int]
    by: By
    text: int
    stretch: Stretch
    labels: list[str]
    key_labels: list[str]

    @classmethod
    def of(
        cls,
        cap: Capture,
        layer: Which,
        head: Which,
        by: By,
        text: int,
        columns: int,
        span: Span = None,
    ) -> Selection:
        """What is asked for; labels are cut to a width of `columns`.

        Raises:
            InputError: layer, head, text or span out of range; layers with different numbers of
                heads; an unknown `by`.
        """
        if by not in ("token", "word"):
            raise InputError(f"by must be 'token' or 'word', got {by!r}")
        stretch = Stretch.of(captured(cap), text, span)
        labels = labels_of(stretch.words, by, columns)
        key_labels = labels_of(cap.key_words_of(text), by, columns) if cap.source else labels
        layers = chosen(layer, cap.layers, "layer")
        counts = {cap.call(one).heads for one in layers}
        if len(counts) > 1:
            raise InputError(
                f"the layers have {' and '.join(map(str, sorted(counts)))} heads: "
                "choose layers with the same number of heads"
            )
        heads = chosen(head, counts.pop(), "head")
        return cls(cap, layers, heads, by, text, stretch, labels, key_labels)

    @property
    def title(self) -> str:
        """What is shown, to read."""
        name = self.cap.model_name
        parts = [
            _numbered("layer", self.layers),
            _numbered("head", self.heads),
            self.stretch.title or _counted(len(self.labels), self.by),
        ]
        return ", ".join([name, *parts] if name else parts)

    def attention(self, layer: int) -> Attention:
        """The chosen heads of one layer, by token, of the whole text.

        Raises:
            NonFiniteError: a row of weights does not sum to 1.
        """
        found = Attention.of(self.cap, layer, self.heads, self.text, holds=4)
        _refuse_sums(found.shown, layer)
        return found

    def shown(self, layer: int, *, cross: bool = False) -> Shown:
        """The weights of the chosen heads of one layer; `cross` as for `Attention.of`.

        Raises:
            NonFiniteError: a row of weights does not sum to 1.
        """
        found = self.stretch.shown(layer, self.heads, cross=cross)
        _refuse_sums(found, layer)
        return found

    def weights(self) -> Tensor:
        """The weights of the chosen layers and heads, by token or word, (L, h, N, N) float64.

        Of cross attention as well, (L, h, N, M).

        Raises:
            NonFiniteError: a row does not sum to 1.
        """
        every = (self.shown(layer, cross=True).by(self.by)[0] for layer in self.layers)
        return torch.stack(list(every))

    def pairs(self, count: int) -> int:
        """How many lines one head of a text of so many tokens or words has."""
        return count * len(self.key_labels) if self.cap.source else pairs(count, self.cap.causal)


def _refuse_sums(found: Shown, layer: int) -> None:
    sums = found.weights.sum(-1)
    right = (sums - 1).abs() < 1e-6 if found.sinks is None else (sums - 0.5).abs() < 0.5 + 1e-6
    if not right.all():  # written so that NaN fails
        raise NonFiniteError(f"the weights of layer {layer} do not sum to 1 along each row")


def pairs(count: int, causal: bool) -> int:
    """The number of queries and keys of which the one may attend to the other."""
    return count * (count + 1) // 2 if causal else count * count


def refuse_size(
    picked: Selection,
    view: str,
    drawn: Drawn,
    most: int,
    *,
    what: str = "lines",
    by_word: bool = True,
    shorter: str = "a text",
    instead: str = "",
) -> None:
    """Refuse what a browser would choke on, and say what it can draw.

    Args:
        picked: what is asked for.
        view: the name of the view.
        drawn: how much it would draw.
        most: as much as it may draw, its `max_…`.
        what: it draws.
        by_word: whether the view draws less of words than of tokens.
        shorter: of what fewer words may be given.
        instead: another view, that can draw this.

    Raises:
        InputError: more than `most`.
    """
    if whole(most, f"max_{what}") < 1:
        raise InputError(f"max_{what} must be at least 1, got {most}")
    lines = drawn(len(picked.layers), len(picked.heads), len(picked.labels))
    if lines <= most:
        return
    raise InputError(
        f"{view} would draw {lines:,} {what} ({picked.title}), more than max_{what} "
        f"({most:,}): a browser chokes on it. What fits: "
        f"{what_fits(picked, drawn, most, by_word=by_word, what=shorter)}. "
        f"Or raise max_{what}{instead}"
    )


def what_fits(
    picked: Selection, size: Drawn, most: int, *, by_word: bool, what: str = "a text"
) -> str:
    """Of what is too large for a page, the parts that are not: of a size of at most `most`.

    `by_word` says whether the view can show words, and `what` of what less may be given.
    """
    layers, heads, count = len(picked.layers), len(picked.heads), len(picked.labels)
    fits = []
    words = len(picked.cap.words_of(picked.text).words)
    shorter = by_word and picked.by == "token" and words < count
    if shorter and size(layers, heads, words) <= most:
        fits.append(f"by='word' ({_counted(words, 'word')})")
    if some := _most(lambda some: size(some, heads, count) <= most, layers - 1):
        fits.append(f"at most {_counted(some, 'layer')}")
    if some := _most(lambda some: size(layers, some, count) <= most, heads - 1):
        fits.append(f"at most {_counted(some, 'head')}")
    if not fits and size(1, 1, count) <= most:
        fits.append(f"layer={picked.layers[0]}, head={picked.heads[0]}")
    some = _most(lambda some: size(layers, heads, some) <= most, count - 1)
    fits.append(f"{what} of at most {_counted(some, picked.by)}")
    return "; or ".join(fits)


def _most(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits; 0 where none does."""
    return next((some for some in range(most, 0, -1) if fits(some)), 0)


def _numbered(what: str, numbers: list[int]) -> str:
    return f"{what} {numbers[0]}" if len(numbers) == 1 else _counted(len(numbers), what)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"

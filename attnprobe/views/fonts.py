"""Labels that matplotlib can draw: installed fonts that have their characters, or code points."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from matplotlib.font_manager import (
    FontEntry,
    FontPath,
    FontProperties,
    findfont,
    fontManager,
    get_font,
)

# Chinese characters look different by country though they share code points.
_CJK = {
    "JP": ("Noto Sans CJK JP", "Noto Sans JP", "Hiragino Sans", "Yu Gothic"),
    "KR": ("Noto Sans CJK KR", "Noto Sans KR", "Apple SD Gothic Neo", "Malgun Gothic"),
    "TC": ("Noto Sans CJK TC", "Noto Sans TC", "PingFang TC", "Microsoft JhengHei"),
    "SC": ("Noto Sans CJK SC", "Noto Sans SC", "PingFang SC", "Microsoft YaHei"),
}

# Fonts of matplotlib's own that have other signs than the code points say, or boxes for all.
_NOT_FOR_TEXT = ("Last Resort", "STIXNonUnicode", "STIXSize", "cm")

_JOINERS = "\u200c\u200d"  # unseen, but Persian, Hindi and emoji are written with them


@dataclass(frozen=True)
class Lettering:
    """Texts as they can be drawn.

    Attributes:
        texts: each text, with a code point such as `<U+1F99C>` where no font has the character.
        families: font families for matplotlib to go through, the user's own first.
        lacking: the characters that no installed font has, in order.
    """

    texts: list[str]
    families: list[str]
    lacking: list[str]


def legible(texts: Sequence[str]) -> Lettering:
    """Texts made ready for matplotlib.

    Characters that are not seen, or that turn the direction of what follows, become code points
    too: they must not change a picture unnoticed, and an SVG file may not hold all of them.
    """
    characters = dict.fromkeys("".join(texts))
    drawable = {one for one in characters if _is_seen(one)}
    families, found = _families(drawable, _region("".join(texts)))
    shown = ["".join(one if one in found else _code_point(one) for one in text) for text in texts]
    return Lettering(shown, families, [one for one in characters if one in drawable - found])


def _code_point(one: str) -> str:
    return f"<U+{ord(one):04X}>"


def _is_seen(one: str) -> bool:
    return one.isprintable() or one in _JOINERS or unicodedata.category(one) == "Zs"


def _families(wanted: set[str], region: str) -> tuple[list[str], set[str]]:
    """Families that together have the characters, and those characters that they have."""
    families: list[str] = []
    found: set[str] = set()
    for family, path in chain(_users_own(), _installed(region)):
        if found == wanted:
            break
        more = _held(path, wanted - found)
        if more:
            families, found = [*families, family], found | more
    return families, found


def _users_own() -> Iterator[tuple[str, FontPath]]:
    for family in FontProperties().get_family():
        with suppress(ValueError):  # a family that rcParams name and that is not installed
            yield family, findfont(FontProperties(family=[family]), fallback_to_default=False)


def _held(path: FontPath, wanted: set[str]) -> set[str]:
    font = get_font(path)
    return {one for one in wanted if font.get_char_index(ord(one))}


def _installed(region: str) -> Iterator[tuple[str, FontPath]]:
    """One upright font of each family: first those for the region, then other sans-serif ones."""
    entries: dict[str, FontEntry] = {}
    for entry in fontManager.ttflist:
        if entry.style == "normal" and not entry.name.startswith(_NOT_FOR_TEXT):
            kept = entries.setdefault(entry.name, entry)
            if _off_regular(entry.weight) < _off_regular(kept.weight):
                entries[entry.name] = entry
    ranked = [*_CJK[region], *(name for names in _CJK.values() for name in names)]
    rank = {name: at for at, name in reversed(list(enumerate(ranked)))}
    order = sorted(
        entries, key=lambda name: (rank.get(name, len(ranked)), "Sans" not in name, name)
    )
    for name in order:
        yield name, FontPath(entries[name].fname, entries[name].index)


def _off_regular(weight: str | int) -> int:
    return abs(weight - 400) if isinstance(weight, int) else 400 * (weight not in _REGULAR)


_REGULAR = ("normal", "regular", "book", "roman")


def _region(text: str) -> str:
    """Whose Chinese characters to show: kana is Japanese, hangul Korean; else what encodes more."""
    for region, start, stop in (("JP", "\u3041", "\u30ff"), ("KR", "\uac00", "\ud7a3")):
        if any(start <= one <= stop for one in text):
            return region
    traditional, simplified = (len(text.encode(name, "ignore")) for name in ("big5", "gb2312"))
    return "TC" if traditional > simplified else "SC"

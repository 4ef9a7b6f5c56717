"""A view as one page of HTML: what it holds, how it shows itself, how it is saved."""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from attnprobe.command.printing import write
from attnprobe.errors import InputError

_HIGHEST = 900  # pixels of a frame in a notebook; what is higher scrolls

# Whatever the page holds, the browser fetches nothing for it and sends nothing. Its pictures stand
# in it.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, eq=False)
class View:
    """A picture of attention to look at: in a notebook by itself, or saved as a page.

    Attributes:
        title: what it shows.
        html: the page, in one piece: it needs no network and no other file.
        height: how high it is drawn, in pixels.
        still: an SVG picture, for where scripts do not run.
    """

    title: str
    html: str = field(repr=False)
    height: int = field(repr=False)
    still: str = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write the page to a file, in full or not at all.

        Raises:
            AttnprobeError: it cannot be written, or is no name of a file.
        """
        if not isinstance(path, str | Path) or not str(path):
            raise InputError(f"expected the name of a file to save to, got {path!r}")
        write(Path(path), self.html)

    def _repr_html_(self) -> str:
        """The page inside a frame: apart from the notebook, and from other views in it.

        Where a notebook is not trusted, what may run is taken out of it: the style and the frame,
        and what the style hid, the still picture, is left. It is a PNG, as SVG may hold scripts and
        is taken out by some too.
        """
        title = html.escape(self.title)
        inside = self.html.replace("&", "&amp;").replace('"', "&quot;")
        picture = base64.b64encode(self._picture).decode()
        return (
            "<style>.attnprobe-still { display: none !important }</style>"  # Jupyter styles img
            f'<iframe title="{title}" sandbox="allow-scripts" srcdoc="{inside}" '
            f'style="width: 100%; height: {min(self.height, _HIGHEST)}px; border: 0"></iframe>'
            f'<img class="attnprobe-still" alt="{title}" '
            f'src="data:image/png;base64,{picture}">'
        )

    def _repr_png_(self) -> bytes:
        """The still picture, for what shows a notebook without HTML: paper, some code hosts."""
        return self._picture

    @cached_property
    def _picture(self) -> bytes:
        from attnprobe.views.raster import as_png  # not for who only saves: matplotlib is slow

        return as_png(self.still)


def page(title: str, style: str, body: str, scripts: Iterable[str], *, lang: str = "en") -> str:
    """A page in one piece, that may fetch nothing.

    Args:
        title: text.
        style: CSS.
        body: HTML, what the scripts draw in.
        scripts: JavaScript, run in order.
        lang: the language of the page's own words, as HTML names it.
    """
    return f"""<!DOCTYPE html>
<html lang="{lang}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title>
<style>
{style}</style>
</head>
<body>
{body}
{"".join(f"<script>{one}</script>{chr(10)}" for one in scripts)}</body>
</html>
"""


def own_page(
    title: str,
    name: str,
    body: str,
    data: Mapping[str, Any],
    *,
    parts: Sequence[str] = (),
    lang: str = "en",
) -> str:
    """A page that attnprobe draws itself, with `name`.css and `name`.js beside this module.

    Args:
        title: text.
        name: of the style and the script, which follow common.css and common.js.
        body: HTML, the elements that the script draws in.
        data: what the script reads as `DATA`; arrays in it are `packed`.
        parts: scripts that stand before it, without their `.js`.
        lang: the language of the page's own words, as HTML names it.
    """
    own = [beside(f"{one}.js") for one in ("common", *parts, name)]
    scripts = [f"const DATA = {as_script(data)};", *own]
    return page(title, beside("common.css") + beside(f"{name}.css"), body, scripts, lang=lang)


def packed(array: np.ndarray) -> dict[str, Any]:
    """An array of uint8, uint16 or float32 as common.js's `unpack` reads it: small, and text."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    # Weights repeat little, so that counting numbers gains more than looking for what came before.
    packer = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_FILTERED)
    small = packer.compress(little.tobytes()) + packer.flush()
    return {
        "type": array.dtype.name,
        "shape": list(array.shape),
        "data": base64.b64encode(small).decode(),
    }


def as_script(data: Any) -> str:
    """Data as JSON that may stand in a script of a page: no text in it can end the script."""
    written = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        written = written.replace(mark, f"\\u{ord(mark):04x}")
    return written


@cache
def beside(name: str) -> str:
    """A style or script of attnprobe's own, a file beside this module."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")

"""A view as one page of HTML: what it holds, how it shows itself, how it is saved."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnprobe.printing import write
from attnprobe.views import libraries

_HIGHEST = 900  # pixels of a frame in a notebook; what is higher scrolls

# Whatever the page holds, the browser fetches nothing for it and sends nothing.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"

# What BertViz uses of require.js: it names jQuery and d3, and is called with them.
_REQUIRE = """window.require = {config() {}};
window.requirejs = (names, use) => use(window.$, window.d3);"""


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
            AttnprobeError: it cannot be written.
        """
        write(Path(path), self.html)

    def _repr_html_(self) -> str:
        """The page inside a frame: apart from the notebook, and from other views in it.

        Where a notebook is not trusted, what may run is taken out of it: the style and the frame,
        and what the style hid, the still picture, is left.
        """
        title = html.escape(self.title)
        inside = self.html.replace("&", "&amp;").replace('"', "&quot;")
        picture = base64.b64encode(self.still.encode()).decode()
        return (
            "<style>.attnprobe-still { display: none !important }</style>"  # Jupyter styles img
            f'<iframe title="{title}" sandbox="allow-scripts" srcdoc="{inside}" '
            f'style="width: 100%; height: {min(self.height, _HIGHEST)}px; border: 0"></iframe>'
            f'<img class="attnprobe-still" alt="{title}" '
            f'src="data:image/svg+xml;base64,{picture}">'
        )


def bertviz_page(
    title: str,
    hint: str,
    body: str,
    params: Mapping[str, Any],
    unpack: str,
    script: str,
    min_width: int,
) -> str:
    """A page that draws with one of BertViz's scripts.

    Args:
        title: text.
        hint: text, what to do with the picture.
        body: HTML, the elements that the script draws in.
        params: what the script reads as `window.bertviz_params`, once `unpack` has run over it.
        unpack: JavaScript.
        script: JavaScript, BertViz's.
        min_width: pixels; a narrower window scrolls.
    """
    scripts = (
        libraries.d3(),
        libraries.jquery(),
        _REQUIRE,
        f"window.bertviz_params = {as_script(params)};",
        unpack,
        script,
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{html.escape(title)}</title>
<style>
html {{ background: white; color: black; color-scheme: light; }}
body {{ font: 14px/1.4 'Helvetica Neue', Helvetica, Arial, sans-serif; margin: 8px; }}
header {{ color: #555; margin-bottom: 6px; }}
#vis {{ margin-top: 6px; }}
#vis svg {{ min-width: {min_width}px; }}
</style>
</head>
<body>
<header>{html.escape(title)}. {html.escape(hint)}</header>
{body}
{"".join(f"<script>{one}</script>{chr(10)}" for one in scripts)}</body>
</html>
"""


def as_script(data: Any) -> str:
    """Data as JSON that may stand in a script of a page: no text in it can end the script."""
    written = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        written = written.replace(mark, f"\\u{ord(mark):04x}")
    return written

"""BertViz's scripts in a page, as they draw a capture: how they are fed, what is changed in them.

Each piece that is changed is looked for, so that a release of BertViz that is written differently
is refused.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from attnprobe.views.libraries import Patch, bertviz, d3, jquery
from attnprobe.views.page import as_script, page

STEPS = 10_000
"""Weights stand in the page as whole numbers of this part of 1."""

# A row holds only the keys up to the query where nothing stands after it, so that no line is drawn
# for what is masked; BertViz reads a row's missing end as 0 once it is patched.
UNPACK_WEIGHTS = f"""for (const shown of window.bertviz_params.attention) {{
  shown.attn = shown.attn.map(layer => layer.map(head => {{
    let at = 0;
    return shown.left_text.map((_, query) => {{
      const keys = shown.lower ? query + 1 : shown.right_text.length;
      at += keys;
      return head.slice(at - keys, at).map(weight => weight / {STEPS});
    }});
  }}));
}}"""

# The weights are the softmax of the scores that the page shows, made from the numbers it shows.
UNPACK_NEURONS = """{
  const params = window.bertviz_params, shown = params.attention.all;
  const softmax = (scores, allowed) => {
    const highest = Math.max(...scores.filter((_, key) => allowed[key] === "1"));
    const parts = scores.map((x, key) => allowed[key] === "1" ? Math.exp(x - highest) : 0);
    const sum = parts.reduce((x, y) => x + y, 0);
    return parts.map(x => x / sum);
  };
  const dot = (query, key) => query.reduce((sum, x, at) => sum + x * key[at], 0);
  shown.attn = shown.queries.map((heads, layer) => heads.map((queries, head) =>
    queries.map((query, at) => softmax(
      shown.keys[layer][head].map(key => dot(query, key) * params.scaling[layer]),
      params.allowed[layer][at]))));
}"""

# What BertViz uses of require.js: it names jQuery and d3, and is called with them.
_REQUIRE = """window.require = {config() {}};
window.requirejs = (names, use) => use(window.$, window.d3);"""

# BertViz draws on white in colours of its own; where the reader wants a dark page, it is turned
# over, and hues stay what they are.
_STYLE = """html { background: white; color: black; color-scheme: light; }
body { font: 14px/1.4 'Helvetica Neue', Helvetica, Arial, sans-serif; margin: 8px; }
header { color: #555; margin-bottom: 6px; }
#vis { margin-top: 6px; }
@media (prefers-color-scheme: dark) { html { filter: invert(0.9) hue-rotate(180deg); } }
"""

_PARAMS: Patch = (
    "const params = PYTHON_PARAMS; // HACK: PYTHON_PARAMS is a template marker that is replaced "
    "by actual params.",
    "const params = window.bertviz_params;",
)

_PATCHES: dict[str, list[Patch]] = {
    "head_view.js": [
        _PARAMS,
        ("d3.scaleOrdinal(d3.schemeCategory10)", "d3.scaleOrdinal(params['colours'])"),
        ("const BOXWIDTH = 110;", "const BOXWIDTH = params['label_width'];"),
        # Rows without their masked end.
        ("return mat[0].map(", "return mat[mat.length - 1].map("),
        ("return d[index];", "return d[index] || 0;"),
        (
            'checkbox.on("click", function (d, i) {',
            """checkboxContainer.selectAll("text")
            .data(params['include_heads'])
            .enter()
            .append("text")
            .text(d => d)
            .attr("x", (d, i) => (i + .5) * CHECKBOX_SIZE)
            .attr("y", top + 14)
            .attr("text-anchor", "middle")
            .attr("font-size", "11px")
            .attr("pointer-events", "none");

        checkbox.on("click", function (d, i) {""",
        ),
    ],
    "model_view.js": [
        _PARAMS,
        ("LAYER_COLORS = d3.schemeCategory10;", "LAYER_COLORS = params['colours'];"),
        ("LAYER_COLORS[config.layers[layer] % 10]", "LAYER_COLORS[layer]"),
        ("const DETAIL_WIDTH = 300;", "const DETAIL_WIDTH = 140 + 2 * params['label_width'];"),
        ("const DETAIL_BOX_WIDTH = 80;", "const DETAIL_BOX_WIDTH = params['label_width'];"),
    ],
    "neuron_view.js": [
        ("const BOXWIDTH = TEXT_SIZE * 8;", "const BOXWIDTH = params['label_width'];"),
        (
            "dotProduct / Math.sqrt(config.vectorSize)",
            "dotProduct * params['scaling'][config.layer]",
        ),
        (
            'layerSelect.append($("<option />").val(i).text(i));',
            "layerSelect.append($(\"<option />\").val(i).text(params['include_layers'][i]));",
        ),
        (
            'headSelect.append($("<option />").val(i).text(i));',
            "headSelect.append($(\"<option />\").val(i).text(params['include_heads'][i]));",
        ),
    ],
}


def bertviz_page(
    title: str,
    hint: str,
    body: str,
    params: Mapping[str, Any],
    unpack: str,
    name: str,
    min_width: int,
) -> str:
    """A page that draws with one of BertViz's scripts.

    Args:
        title: text.
        hint: text, what to do with the picture.
        body: HTML, the elements that the script draws in.
        params: what the script reads as `window.bertviz_params`, once `unpack` has run over it.
        unpack: JavaScript.
        name: of BertViz's script.
        min_width: pixels; a narrower window scrolls.

    Raises:
        AttnprobeError: bertviz is not there, or not the release that its scripts were changed for.
    """
    scripts = (
        d3(),
        jquery(),
        _REQUIRE,
        f"window.bertviz_params = {as_script(params)};",
        unpack,
        bertviz(name, _PATCHES[name]),
    )
    header = f"<header>{html.escape(title)}. {html.escape(hint)}</header>"
    style = f"{_STYLE}#vis svg {{ min-width: {min_width}px; }}\n"
    return page(title, style, f"{header}\n{body}", scripts)

"""Open a page in a browser of its own, and print how long it draws and what it takes, as JSON.

`python scripts/open_page.py PAGE CONDITION`, for `bench_views.py`: a process apart, so that it can
be stopped with its browser.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
from playwright.sync_api import TimeoutError as Late

from attnprobe.views import libraries

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from browser import chromium

SECONDS = 60
"""The longest that a page may draw."""

# What BertViz uses of require.js.
REQUIRE = """window.require = {config({paths}) { this.paths = paths; }};
window.requirejs = async (names, use) => {
  for (const name of names) {
    await new Promise(done => document.head.append(Object.assign(
      document.createElement("script"), {src: `${window.require.paths[name]}.js`, onload: done})));
  }
  use(window.$, window.d3);
};"""


def cdn() -> dict[str, str]:
    """The scripts that BertViz fetches, by the last part of their address."""
    return {
        "require.min.js": REQUIRE,
        "jquery.min.js": libraries.jquery(),
        "d3.min.js": libraries.d3(),
    }


def open_page(file: Path, drawn: str) -> dict[str, float]:
    """Seconds until a page is drawn and painted, and bytes its renderers hold then; {} if late."""
    scripts = cdn()
    painted = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.route(
            "https://**/*",
            lambda route: route.fulfill(
                body=scripts[route.request.url.rpartition("/")[2]],
                content_type="text/javascript",
            ),
        )
        start = time.perf_counter()
        try:
            page.goto(file.as_uri(), timeout=1000 * SECONDS)
            page.wait_for_function(drawn, timeout=1000 * SECONDS)
            page.evaluate(painted)
        except Late:
            return {}
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "memory": renderers(psutil.Process())}


def renderers(root: psutil.Process) -> int:
    """The resident bytes of the renderer processes below a process."""
    total = 0
    for process in root.children(recursive=True):
        try:
            if "--type=renderer" in process.cmdline():
                total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # ended since it was listed
    return total


if __name__ == "__main__":
    print(json.dumps(open_page(Path(sys.argv[1]), sys.argv[2])))

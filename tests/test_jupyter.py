"""A view in a real JupyterLab, and in the page that nbconvert makes of a notebook; no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest
from browser import opened
from playwright.sync_api import Browser, Page, expect

pytest.importorskip("jupyterlab", reason="no notebook was opened: jupyterlab is not installed")
nbconvert = pytest.importorskip("nbconvert", reason="no page was made: nbconvert is not installed")

SECONDS = 90
"""How long a busy machine may take for one thing; all is polled, and none takes nearly as long."""

TOKEN = "of-the-tests"
TEXT = "The children were playing in the garden"
CODE = f"""import attnprobe as ap
cap = ap.capture(ap.load("bundled"), {TEXT!r})
ap.head_view(cap, layer=1, head=[2, 4], by="word")"""
NOTEBOOK = "window.jupyterapp?.shell.currentWidget"
LINES = 2 * 7 * 8 // 2  # two heads, seven words, each looking at itself and those before it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that JupyterLab serves, with one notebook in it that has not been run."""
    folder = tmp_path_factory.mktemp("served")
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(CODE)], metadata={"kernelspec": spec}
    )
    nbformat.write(notebook, folder / "view.ipynb")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """JupyterLab on a free port of this machine, with settings and signatures of its own."""
    own = tmp_path_factory.mktemp("jupyter")
    places = {f"JUPYTER_{name}_DIR": str(own / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": 0,
        "ServerApp.root_dir": folder,
        "ServerApp.open_browser": False,
        "ServerApp.allow_root": True,
        "IdentityProvider.token": TOKEN,
        "LabApp.news_url": None,
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        "LabApp.extension_manager": "readonly",
        "LabApp.expose_app_in_browser": True,
    }
    log = own / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *(f"--{k}={v}" for k, v in options.items())],
            env={**os.environ, **places, "IPYTHONDIR": str(own / "ipython")},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield until(lambda: _address(process, own / "RUNTIME", log), "JupyterLab starts")
    finally:
        process.terminate()
        process.wait(SECONDS)


def _address(process: subprocess.Popen[bytes], runtime: Path, log: Path) -> str | None:
    """Where the server listens, once it says so."""
    assert process.poll() is None, log.read_text()
    for file in runtime.glob("jpserver-*.json"):
        if written := file.read_text():
            return str(json.loads(written)["url"])
    return None


def until(found: Callable[[], str | None], what: str) -> str:
    """Ask again and again until there is an answer."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if (answer := found()) is not None:
            return answer
        time.sleep(0.1)
    raise AssertionError(f"not within {SECONDS} s: {what}")


@dataclass
class Lab:
    """A notebook that is open in JupyterLab, and what happened since."""

    page: Page
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    """Uncaught errors anywhere, and what frames of ours say in the console."""

    def run(self) -> None:
        """Run all cells, once the kernel is there to be asked."""
        self.page.wait_for_function(f"{NOTEBOOK}?.sessionContext.session?.kernel?.status == 'idle'")
        self.page.evaluate("() => void jupyterapp.commands.execute('notebook:run-all-cells')")

    def save(self) -> None:
        """Save the notebook, to the end."""
        self.page.evaluate("() => void jupyterapp.commands.execute('docmanager:save')")
        self.page.wait_for_function(f"!{NOTEBOOK}.context.model.dirty")

    @property
    def lines(self):
        """The lines that the view's own script has drawn inside its frame."""
        return self.page.frame_locator(".jp-OutputArea iframe").locator("svg line")

    @property
    def still(self):
        """The still picture."""
        return self.page.locator(".jp-OutputArea img.attnprobe-still")


@contextmanager
def lab(browser: Browser, server: str, name: str) -> Iterator[Lab]:
    """Open a notebook in JupyterLab, in a browser profile of its own."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    found = Lab(context.new_page())
    expect.set_options(timeout=1000 * SECONDS)
    found.page.set_default_timeout(1000 * SECONDS)
    found.page.on("request", lambda request: found.requests.append(request.url))
    found.page.on("websocket", lambda socket: found.requests.append(socket.url))
    found.page.on("pageerror", lambda error: found.errors.append(str(error)))
    found.page.on(
        "console",
        lambda said: (
            found.errors.append(said.text)
            if said.type in ("error", "warning") and said.location["url"].startswith("about:")
            else None
        ),
    )
    found.page.goto(f"{server}lab/tree/{name}?reset&token={TOKEN}")
    found.page.locator(".jp-CodeCell").wait_for()
    yield found
    context.close()
    assert found.errors == []
    assert found.requests
    local = [one for one in found.requests if urlsplit(one).hostname == "127.0.0.1"]
    away = set(found.requests) - set(local)
    assert {one for one in away if urlsplit(one).scheme not in ("data", "blob", "about")} == set()


@pytest.fixture(scope="module")
def saved(browser: Browser, server: str, folder: Path) -> Path:
    """The notebook, run and saved in JupyterLab, where its view was drawn."""
    with lab(browser, server, "view.ipynb") as open_:
        open_.run()
        expect(open_.lines).to_have_count(LINES)
        expect(open_.still).to_be_hidden()
        open_.save()
    return folder / "view.ipynb"


def test_a_view_is_drawn_when_its_cell_is_run_and_saved_with_its_still(saved):
    (cell,) = nbformat.read(saved, as_version=4).cells
    assert cell.execution_count == 1
    data = cell.outputs[-1].data
    assert set(data) == {"text/html", "image/png", "text/plain"}
    assert "".join(data["image/png"].split()) in data["text/html"]


def test_it_is_drawn_again_without_a_run_when_the_notebook_is_opened_again(browser, server, saved):
    with lab(browser, server, saved.name) as open_:
        expect(open_.lines).to_have_count(LINES)
        expect(open_.still).to_be_hidden()
        assert open_.page.locator(".jp-InputPrompt").first.text_content() == "[1]:"  # of before


def test_where_the_notebook_is_not_trusted_the_still_is_shown(browser, server, saved):
    notebook = nbformat.read(saved, as_version=4)
    notebook.cells[0].source += "  # by someone else, so not what was signed here"
    nbformat.write(notebook, saved.with_name("theirs.ipynb"))
    with lab(browser, server, "theirs.ipynb") as open_:
        expect(open_.still).to_be_visible()
        width = open_.still.evaluate("one => one.decode().then(() => one.naturalWidth)")
        assert width > 300
        assert open_.page.locator(".jp-OutputArea iframe").count() == 0


def test_it_is_drawn_in_the_page_that_nbconvert_makes(browser, saved, tmp_path):
    nothing = "data:text/javascript,"
    exporter = nbconvert.HTMLExporter(
        require_js_url=nothing, mathjax_url=nothing, mermaid_js_url=nothing
    )
    page, _ = exporter.from_filename(str(saved))
    file = tmp_path / "view.html"
    file.write_text(page, encoding="utf-8")
    with opened(browser, file) as tab:
        expect(tab.page.frame_locator("iframe").locator("svg line")).to_have_count(LINES)
        expect(tab.page.locator("img.attnprobe-still")).to_be_hidden()
        assert tab.errors == []
        assert [one for one in tab.requests if not one.startswith(("data:", "about:"))] == []

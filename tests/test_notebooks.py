"""The notebooks run without a network, and what is kept in them is what they show."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

import notebooks

SECONDS = 120
"""The most of a processor's time that a notebook may take."""

NAMES = [path.name for path in notebooks.notebooks()]

# What tqdm prints in a notebook without widgets. Anything else on stderr is a fault.
_BARS = re.compile(r"TqdmWarning|notebook_tqdm|\d+/\d+ \[.*\]|^\s*$")


def shown(notebook: NotebookNode, kind: str) -> list[str]:
    """All that a notebook shows of one kind of data; `stdout` and `stderr` are kinds too."""
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    streams = [one.text for one in outputs if one.get("name") == kind]
    return streams + [one.data[kind] for one in outputs if kind in one.get("data", {})]


def kept(name: str) -> NotebookNode:
    return nbformat.read(notebooks.FOLDER / name, as_version=4)


def of_children() -> float:
    """The processor time, in seconds, of the processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[NotebookNode, float]]:
    """Runs a copy of a notebook, offline and with an empty cache; once for all tests."""

    @cache
    def run(name: str) -> tuple[NotebookNode, float]:
        folder = tmp_path_factory.mktemp("notebook")
        copy = Path(shutil.copy(notebooks.FOLDER / name, folder))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_HUB_OFFLINE", "1")
            patch.setenv("HF_HOME", str(folder))
            before = of_children()
            return notebooks.run(copy), of_children() - before

    return run


def test_they_are_numbered_without_a_gap():
    assert [name[:3] for name in NAMES] == [f"{at:02}-" for at in range(1, len(NAMES) + 1)]
    assert len(NAMES) >= 6


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_shows_what_is_kept(name, ran):
    notebook, seconds = ran(name)
    assert shown(notebook, "stdout")[0].startswith("gpt2 cannot be loaded here. In its place:")
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    complaints = [
        line
        for text in shown(notebook, "stderr")
        for line in re.split("[\r\n]", text)
        if not _BARS.search(line)
    ]
    assert complaints == []
    assert notebooks.kinds(notebooks.tidy(notebook)) == notebooks.kinds(kept(name)), (
        "stale: run `make notebooks`"
    )
    assert 1 < seconds < SECONDS


@pytest.mark.parametrize(
    ("name", "views", "pictures", "tables", "words"),
    [
        ("01-verify-gpt2.ipynb", 0, 0, 2, ["VERIFIED", "MISMATCH"]),
        ("02-which-words.ipynb", 4, 2, 5, ["p | ark", "park", "on the token before"]),
        ("03-the-formula-step-by-step.ipynb", 0, 0, 3, ["VERIFIED", "the same but for rounding"]),
        ("04-your-own-model.ipynb", 1, 0, 3, ["VERIFIED", "texts", "off by less than 1e-05"]),
        ("05-what-each-term-does.ipynb", 0, 0, 7, ["loss without M", "no attention: "]),
        ("06-a-corpus.ipynb", 0, 3, 5, ["documents", "'verified': "]),
    ],
)
def test_it_shows_what_it_is_about(name, views, pictures, tables, words, ran):
    notebook, _ = ran(name)
    pages = shown(notebook, "text/html")
    frames = [page for page in pages if "<iframe" in page]
    assert len(frames) == views
    assert all('sandbox="allow-scripts"' in frame for frame in frames)
    assert len(shown(notebook, "image/png")) == views + pictures
    assert sum("<table" in page and "<iframe" not in page for page in pages) >= tables
    said = "\n".join(shown(notebook, "stdout"))
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_reads_well_elsewhere(name):
    notebook = kept(name)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.execution_count, cell.source
            assert not [one for one in cell.outputs if one.output_type == "error"]
    assert shown(notebook, "stdout")
    assert not shown(notebook, "stderr")
    assert not [page for page in shown(notebook, "text/html") if re.search("<iframe|<script", page)]
    written = (notebooks.FOLDER / name).read_text(encoding="utf-8")
    assert len(written) < 400_000
    seen = "\n".join(
        one for kind in ("stdout", "text/html", "text/plain") for one in shown(notebook, kind)
    )
    # Paths, addresses in memory, times: what differs from one machine and run to the next.
    for pattern in (
        r"/(home|root|Users|tmp|usr|opt|work|site-packages)\b",
        r"[A-Z]:\\",
        "0x[0-9a-f]{6}",
        r"\d s\b",
        "Warning",
    ):
        assert not re.search(pattern, seen), pattern
    assert list(notebook.metadata) == ["kernelspec", "language_info"]


def test_tidying_changes_nothing_that_is_tidy():
    for name in NAMES:
        assert notebooks.tidy(kept(name)) == kept(name)


def test_tidying_keeps_the_still_of_a_view_and_drops_what_differs():
    output = nbformat.v4.new_output
    cell = nbformat.v4.new_code_cell(
        "pass",
        metadata={"execution": {"iopub.execute_input": "2020-02-02T02:02:02Z"}},
        outputs=[
            output("stream", name="stderr", text="50%"),
            output("stream", name="stdout", text="one\n"),
            output("stream", name="stderr", text="100%"),
            output("stream", name="stdout", text="two\n"),
            output("display_data", {"text/html": "<iframe>", "image/png": "x", "text/plain": "y"}),
            output(
                "display_data", {"text/html": "<p id=T_1f2e3_row>", "text/plain": "<A at 0x7f>"}
            ),
            output("display_data", {"text/html": "<p id=T_00000_a><p id=T_1f2e3_b>"}),
        ],
    )
    tidy = notebooks.tidy(nbformat.v4.new_notebook(cells=[cell], metadata={"signature": "z"}))
    assert [dict(one.get("data", {"text": one.get("text")})) for one in tidy.cells[0].outputs] == [
        {"text": "one\ntwo\n"},
        {"image/png": "x", "text/plain": "y"},
        {"text/html": "<p id=T_00000_row>", "text/plain": "<A>"},
        {"text/html": "<p id=T_00001_a><p id=T_00000_b>"},
    ]
    assert (tidy.cells[0].id, tidy.cells[0].metadata) == ("cell-01", {})
    assert cell.outputs[0].text == "50%"  # the one given is as it was


def test_a_failing_cell_and_a_stale_notebook_are_found(tmp_path, monkeypatch, capsys):
    path = tmp_path / "01.ipynb"
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["notebooks.py", "--check"])
    cell = nbformat.v4.new_code_cell("1 + 1")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    before = path.read_bytes()
    assert notebooks.main() == 1
    assert "stale, run `make notebooks`: 01.ipynb" in capsys.readouterr().out
    assert path.read_bytes() == before
    monkeypatch.setattr("sys.argv", ["notebooks.py"])
    assert notebooks.main() == 0
    monkeypatch.setattr("sys.argv", ["notebooks.py", "--check"])
    assert notebooks.main() == 0
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), path)
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        notebooks.main()

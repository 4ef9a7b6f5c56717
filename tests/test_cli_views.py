"""The commands `view` and `report`: what they write, open and refuse."""

from __future__ import annotations

import io
import os
import tempfile
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest
import transformers
from browser import opened
from PIL import Image
from playwright.sync_api import Browser
from typer.testing import CliRunner, Result

import attnprobe as ap
from attnprobe import cli
from attnprobe.command import kinds

TEXT = "The children were playing in the green park"
HOSTILE = "</script><script>window.ran = 1</script> <img src=x onerror=window.ran=1> x\u202egpj"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments, catch_exceptions=False)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a browser was asked to open."""
    asked: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: asked.append(address) or True)
    return asked


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An sdpa that doubles the scale: a model that does not compute the formula."""
    attentions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    right = attentions["sdpa"]

    def wrong(module: Any, query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
        return right(module, 2 * query, key, value, *more, **options)

    monkeypatch.setitem(attentions._global_mapping, "sdpa", wrong)


# view


@pytest.mark.parametrize(
    ("arguments", "draw"),
    [
        (["head"], lambda cap: ap.head_view(cap)),
        (["head", "--layer", "1", "--by-word"], lambda cap: ap.head_view(cap, 1, by="word")),
        (["model", "--head", "2"], lambda cap: ap.model_view(cap, head=2)),
        (["neuron", "--layer", "3", "--head", "1"], lambda cap: ap.neuron_view(cap, 3, 1)),
        (["neuron"], lambda cap: ap.neuron_view(cap, None, None)),
        (["attention", "--span", "2:5"], lambda cap: ap.attention_view(cap, span=(2, 5))),
    ],
)
def test_a_view_is_the_page_that_the_function_makes(
    arguments: list[str], draw: Callable[[ap.Capture], ap.View], tmp_path: Path
) -> None:
    out = tmp_path / "view.html"
    result = run("view", TEXT, "--kind", *arguments, "--out", str(out))
    assert (result.exit_code, result.output) == (0, "")
    expected = draw(ap.capture(ap.load("bundled"), TEXT))
    assert out.read_text(encoding="utf-8") == expected.html
    assert list(tmp_path.iterdir()) == [out]


def test_a_heat_map_is_written_as_its_name_ends(tmp_path: Path) -> None:
    options = ("--kind", "heatmap", "--layer", "0", "--by-word")
    for name in ("grid.svg", "grid.PNG", "grid.pdf", "one.svg"):
        one = ("--head", "1") if name.startswith("one") else ()
        assert run("view", TEXT, *options, *one, "--out", str(tmp_path / name)).output == ""
    assert (tmp_path / "grid.pdf").read_bytes().startswith(b"%PDF")
    assert Image.open(io.BytesIO((tmp_path / "grid.PNG").read_bytes())).width > 1000
    grid, one = ((tmp_path / f"{name}.svg").read_text("utf-8") for name in ("grid", "one"))
    for svg in (grid, one):
        ElementTree.fromstring(svg)
    assert [f"head {head}<" in grid for head in range(6)] == [True] * 6
    assert "layer 0, head 1<" in one
    assert "playing<" in one
    part = tmp_path / "part.svg"
    assert run("view", TEXT, *options, "--span", "1:3", "--out", str(part)).output == ""
    assert "words 1 to 2 of 8<" in part.read_text("utf-8")
    assert "playing<" not in part.read_text("utf-8")


def test_characters_that_no_font_has_are_a_note(tmp_path: Path) -> None:
    out = tmp_path / "one.svg"
    options = ("--kind", "heatmap", "--layer", "0", "--head", "0", "--out", str(out))
    result = run("view", "a \x01", *options)
    assert result.exit_code == 0
    assert result.stderr.startswith("attnprobe: note: no installed font")
    assert result.stderr.count("\n") == 1


def test_open_shows_the_file(looked_at: list[str], tmp_path: Path) -> None:
    out = tmp_path / "a view.html"
    assert run("view", TEXT, "--kind", "head", "--out", str(out), "--open").output == ""
    assert looked_at == [out.as_uri()]
    assert out.exists()


@pytest.mark.parametrize(
    ("command", "suffix"),
    [
        (["view", "--kind", "model"], ".html"),
        (["view", "--kind", "heatmap"], ".svg"),
        (["report"], ".html"),
    ],
)
def test_open_alone_writes_a_temporary_file(
    command: list[str],
    suffix: str,
    looked_at: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = run(*command, "--open")
    [folder] = tmp_path.iterdir()
    [file] = folder.iterdir()
    assert result.stdout.splitlines()[0] == f"written to {file}"
    assert looked_at == [file.as_uri()]
    assert file.suffix == suffix
    assert file.stat().st_size > 10_000
    assert folder.stat().st_mode & 0o077 == 0  # the text is nobody else's


def test_without_a_browser_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _: False)
    out = tmp_path / "view.html"
    result = run("view", "--kind", "head", "--out", str(out), "--open")
    assert result.exit_code == 0
    assert result.stderr == f"attnprobe: found no browser; open {out} in one\n"


def test_a_kind_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option reaches the function that the table names."""
    got: dict[str, Any] = {}

    def drawn(cap: ap.Capture, **options: Any) -> ap.View:
        got.update(options)
        return ap.head_view(cap)

    takes = ("word", "layer", "head", "nth", "lang", "by")
    monkeypatch.setattr(ap, "drawn", drawn, raising=False)
    monkeypatch.setitem(kinds.KINDS, "walk", kinds._view("drawn", *takes))
    options = ("--word", "green", "--nth", "0", "--lang", "ja", "--layer", "0", "--by-word")
    out = tmp_path / "walk.html"
    assert run("view", TEXT, "--kind", "walk", *options, "--out", str(out)).exit_code == 0
    wanted = {"word": "green", "nth": 0, "lang": "ja", "layer": 0, "head": None, "by": "word"}
    assert got == wanted


# report


def test_report_writes_the_page_and_prints_the_verdict(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = run("report", TEXT, "--out", str(out))
    cap = ap.capture(ap.load("bundled"), TEXT)
    assert result.exit_code == 0
    assert result.stdout == f"{ap.verify(cap).summary}\n"
    assert result.stderr == ""
    page = out.read_text(encoding="utf-8")
    assert len(page) < 3_000_000
    assert '<p class="verdict verified">VERIFIED: ' in page
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.usefixtures("wrong_kernel")
def test_a_mismatch_leaves_with_1_and_has_a_page(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = run("report", TEXT, "--out", str(out))
    assert result.exit_code == 1
    assert result.stdout.startswith("MISMATCH: ")
    assert '<p class="verdict mismatch">MISMATCH: ' in out.read_text(encoding="utf-8")


def test_what_was_not_checked_leaves_with_2_and_has_a_page(tmp_path: Path) -> None:
    """Scores so large that rounding in bfloat16 may do anything to them."""
    folder = tmp_path / "large"
    sizes = {"vocab_size": 4096, "n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": 64}
    config = transformers.GPT2Config(**sizes, initializer_range=9.0, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    ap.load("bundled").tokenizer.save_pretrained(folder)
    out = tmp_path / "report.html"
    options = ("--model", str(folder), "--attn", "eager", "--dtype", "bfloat16", "--out", str(out))
    result = run("report", "hello there, you", *options)
    assert result.exit_code == 2
    assert result.stdout.startswith("NOT CHECKED: output: ")
    page = out.read_text(encoding="utf-8")
    assert '<p class="verdict not_checked">NOT CHECKED: ' in page


def test_a_hostile_text_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert run("report", HOSTILE, "--out", str(out)).exit_code == 0
    with opened(browser, out) as tab:
        shown = tab.page.locator("blockquote").text_content()
        assert shown == HOSTILE.replace("\u202e", "<U+202E>")
        assert [frame.evaluate("window.ran") for frame in tab.page.frames] == [None] * 6
        assert tab.errors + tab.requests == []


# What is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["view", "--kind", "pie", "--out", "v.html"], "unknown kind 'pie'; the kinds are head, "),
        (["view", "--out", "v.html"], "--kind"),
        (["view", "--kind", "head"], "name a file in .html with --out, or look at it"),
        (["view", "--kind", "heatmap"], "name a file in .svg with --out"),
        (["view", "--kind", "head", "--out", "v.png"], "--out: expected a name in .html, got"),
        (["view", "--kind", "head", "--out", "v"], "expected a name in .html, got v"),
        (["view", "--kind", "heatmap", "--out", "v.html"], "a name in .svg, .png, .pdf, got"),
        (["view", "--kind", "head", "--out", "no/v.html"], "there is no folder no"),
        (["view", "--kind", "head", "--out", "folder.html"], "it is not a file"),
        (["view", "--kind", "head", "--layer", "4", "--out", "v.html"], "numbered 0 to 3"),
        (["view", "--kind", "neuron", "--head", "-1", "--out", "v.html"], "numbered 0 to 5"),
        (["view", "--kind", "heatmap", "--head", "6", "--out", "v.svg"], "numbered 0 to 5"),
        (["view", "--kind", "heatmap", "--layer", "a", "--out", "v.svg"], "Invalid value"),
        (
            ["view", "--kind", "neuron", "--by-word", "--out", "v.html"],
            "--by-word does not go with --kind neuron: it takes --layer, --head",
        ),
        (["view", "--kind", "head", "--word", "park", "--out", "v.html"], "--word does not go"),
        (["view", "--kind", "model", "--nth", "0", "--out", "v.html"], "--nth does not go"),
        (["view", "--kind", "model", "--span", "1:3", "--out", "v.html"], "--span does not go"),
        (["view", "--kind", "heatmap", "--span", "1-3", "--out", "v.svg"], "--span START:STOP"),
        (["view", "--kind", "heatmap", "--span", "3:3", "--out", "v.svg"], "span 3:3 is out of"),
        (["view", "--kind", "heatmap", "--lang", "de", "--out", "v.svg"], "--lang does not go"),
        (["view", "", "--kind", "head", "--out", "v.html"], "empty"),
        (["view", "the " * 250, "--kind", "head", "--out", "v.html"], "more than max_lines"),
        (["view", "--kind", "head", "--model", "no/such", "--out", "v.html"], "no/such"),
        (["report"], "name a file in .html with --out, or look at it in a browser with --open"),
        (["report", "--out", "r.json"], "--out: expected a name in .html, got r.json"),
        (["report", "--out", "no/r.html"], "there is no folder no"),
        (["report", "", "--out", "r.html"], "empty"),
        (["report", "--dtype", "float23", "--out", "r.html"], "unknown dtype"),
        (["report", "park " * 300, "--out", "r.html"], "the model takes at most 256"),
    ],
)
def test_bad_input_leaves_with_2_a_message_and_no_file(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output
    assert [one.name for one in tmp_path.iterdir()] == ["folder.html"]


def test_an_unknown_word_is_refused_where_a_kind_takes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walked(cap: ap.Capture, word: str | None = None, **_: Any) -> Any:
        return ap.walkthrough(cap, word or "park", 0, 0)

    monkeypatch.setattr(ap, "walked", walked, raising=False)
    kind = kinds._view("walked", "word", "layer", "head", "nth")
    monkeypatch.setitem(kinds.KINDS, "walk", kind)
    out = str(tmp_path / "walk.html")
    result = run("view", TEXT, "--kind", "walk", "--word", "gren", "--out", out)
    assert result.exit_code == 2
    assert "near ones: green" in result.stderr
    result = run("view", TEXT, "--kind", "walk", "--nth", "1", "--out", out)
    assert result.exit_code == 2
    assert "--nth goes with --word" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["view", "--kind", "head"], ["report"]])
def test_a_full_disk_leaves_what_was_there(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looked_at: list[str]
) -> None:
    out = tmp_path / "page.html"
    out.write_text("of yesterday")

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    result = run(*command, "--out", str(out), "--open")
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert result.stdout == ""
    assert looked_at == []
    assert out.read_text() == "of yesterday"
    assert list(tmp_path.iterdir()) == [out]


# heads


def test_heads_of_no_text_are_their_roles(tmp_path: Path) -> None:
    out = tmp_path / "roles.csv"
    assert run("heads", "--out", str(out)).output == ""
    expected = ap.head_roles(ap.load("bundled"))
    pd.testing.assert_frame_equal(pd.read_csv(out, keep_default_na=False), expected)
    shown = run("heads").output
    assert "induction" in shown.splitlines()[8]


def test_heads_of_a_text_are_their_statistics(tmp_path: Path) -> None:
    out = tmp_path / "stats.csv"
    assert run("heads", TEXT, "--out", str(out)).output == ""
    expected = ap.head_stats(ap.capture(ap.load("bundled"), TEXT))
    pd.testing.assert_frame_equal(pd.read_csv(out), expected)
    shown = run("heads", TEXT).output
    assert "entropy" in shown
    assert "value_first" not in shown
    assert shown.endswith("more columns: --format csv\n")


def test_a_picture_of_heads_needs_a_column(tmp_path: Path) -> None:
    out = tmp_path / "heads.svg"
    assert run("heads", "--value", "induction", "--out", str(out)).output == ""
    assert "behind equal earlier" in out.read_text("utf-8")
    for arguments in (["--out", str(out)], ["--value", "induction"]):
        result = run("heads", *arguments)
        assert result.exit_code == 2
        assert "a picture shows one column: give both" in result.stderr
    result = run("heads", "--value", "no", "--out", str(out))
    assert (result.exit_code, "no column 'no'" in result.stderr) == (2, True)

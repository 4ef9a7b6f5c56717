"""`attnprobe sweep`: what it prints and writes, how it leaves, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import transformers
from hub import save_gpt2
from test_cli import run, start, terminal
from test_sweep import files_of

import attnprobe as ap

__all__ = ["terminal"]

LINE = "The children went to the garden, and counted {} steps of the old stone stairs.\n"
BOOK = "".join(LINE.format(number) for number in range(2000))
"""Three shards."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_gpt2(tmp_path_factory.mktemp("model"), seed=3, n_layer=1, n_positions=256))


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "book.txt"
    file.write_text(BOOK)
    return file


@pytest.fixture(scope="module")
def whole(model: str, book: Path) -> dict[str, bytes]:
    """What a sweep that nobody stops writes."""
    out = book.parent / "whole"
    ap.sweep(ap.load(model), book, out)
    return files_of(out)


def test_a_corpus_is_swept_and_what_was_damaged_is_said(model: str, tmp_path: Path) -> None:
    corpus = tmp_path / "a.jsonl"
    lines = ['{"body": "A cat."}', '{"body": "A dog and a cat."}', "{no json", '{"text": "x"}']
    corpus.write_text("\n".join(lines))
    out = tmp_path / "out"
    options = ("--field", "body", "--verify", "every=1", "--value", "--pairs", "3", "--tokens", "9")
    result = run("sweep", str(corpus), "--model", model, "--out", str(out), *options)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.splitlines() == [
        f"model   {model} in float32",
        "corpus  4 documents, 2 texts of at most 9 tokens, 9 tokens",
        "damaged 2, left out:",
        "        a.jsonl:3: no JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)",
        "        a.jsonl:4: no field 'body': it has text",
        "output  of 2 texts checked: 2 verified, 0 mismatch, 0 not checked",
        f"written to {out}",
    ]
    found = ap.read_sweep(out)
    assert len(found.heads) == 2
    assert found.heads["value_first"].notna().all()
    assert found.pairs.groupby(["layer", "head"]).size().max() <= 3


def test_a_mismatch_leaves_with_1(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    right = kernels["sdpa"]

    def wrong(module: Any, query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
        return right(module, 2 * query, key, value, *more, **options)

    monkeypatch.setitem(kernels._global_mapping, "sdpa", wrong)
    (tmp_path / "a.txt").write_text("The cat sat on the mat.")
    arguments = ("sweep", str(tmp_path / "a.txt"), "--model", model, "--verify", "100")
    result = run(*arguments, "--out", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert "0 verified, 1 mismatch" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere.txt", "--out", "x"], "cannot read nowhere.txt"),
        (["a.txt", "--out", "x", "--verify", "often"], "expected every=100 or the like"),
        (["a.txt", "--out", "x", "--tokens", "4000"], "the model takes at most 256"),
        (["a.txt", "--out", "a.txt"], "cannot write to a.txt"),
        (["a.txt", "--out", "."], "holds other files, and no sweep"),
    ],
)
def test_bad_input_leaves_with_2(
    options: list[str], message: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("The cat sat on the mat.")
    result = run("sweep", *options, "--model", model)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "x").exists()
    assert (tmp_path / "a.txt").read_text() == "The cat sat on the mat."


def await_part(out: Path) -> None:
    """Wait until a shard is finished."""
    until = time.monotonic() + 100
    while not [*(out / "parts").glob("[0-9]*")]:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_killed_it_goes_on_with_the_same_command(
    how: signal.Signals,
    code: int,
    model: str,
    book: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    command = ("sweep", str(book), "--model", model, "--out", str(out))
    process = start(*command)
    await_part(out)
    process.send_signal(how)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in stderr
    assert ("the same command goes on from there" in stderr) == (how is signal.SIGINT)
    assert ap.read_sweep(out).manifest["complete"] is False
    if how is signal.SIGKILL:
        with (out / "parts" / "000000" / "sums.safetensors").open("r+b") as damaged:
            damaged.seek(-4000, os.SEEK_END)
            damaged.write(bytes(range(250)) * 16)
    result = run(*command)
    assert result.exit_code == 0, result.stderr
    told = f"attnprobe: note: {out / 'parts' / '000000'} is damaged: "
    assert result.stderr.startswith(told if how is signal.SIGKILL else "")
    assert bool(result.stderr) == (how is signal.SIGKILL)
    assert files_of(out) == whole


def test_standard_input_and_progress(model: str, tmp_path: Path, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    text = tmp_path / "a.txt"
    text.write_text(BOOK[:9000])
    arguments = (
        "sweep",
        "-",
        "--model",
        model,
        "--out",
        str(tmp_path / "out"),
        "--batch-size",
        "4",
    )
    with text.open() as given:
        settings = {"TERM": "xterm", "COLUMNS": "120"}
        process = start(*arguments, stdin=given, stderr=theirs, env=settings)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # what Linux gives at the end of a terminal
        pass
    assert process.wait() == 0
    for wanted in (b" 1 document, ", b" tokens, ", b"/s, ", b" left", b"%"):
        assert wanted in shown
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["corpus"]["name"] == "stdin"
    assert manifest["corpus"]["documents"] == 1

"""What the README shows is run: every block of Python, every `attnprobe` command."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_runs_from_top_to_bottom(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes a page
    code = blocks("python")
    assert len(code) >= 2
    names = {}
    for block in code:
        exec(block, names)
    assert "VERIFIED" in capsys.readouterr().out
    assert {call.kernel for call in names["calls"]} == {"sdpa"}
    assert (tmp_path / "report.html").stat().st_size > 100_000


COMMANDS = [
    line for block in blocks("sh") for line in block.splitlines() if line.startswith("attnprobe")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(command, tmp_path):
    words = shlex.split(command, comments=True)[1:]
    if words[0] == "sweep":
        (tmp_path / "corpus").mkdir()
        (tmp_path / "corpus" / "readme.txt").write_text(README, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "attnprobe", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    if words[0] == "sweep":
        assert (tmp_path / words[words.index("--out") + 1] / "heads.parquet").is_file()
    elif "--out" in words:
        page = (tmp_path / words[words.index("--out") + 1]).read_text(encoding="utf-8")
        assert page.startswith("<!DOCTYPE html>")
    else:
        assert len(done.stdout.splitlines()) > 4


def test_the_make_targets_are_there():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    named = {word for block in blocks("sh") for word in re.findall(r"^make ([\w -]+)", block, re.M)}
    targets = {word for words in named for word in words.split()}
    expected = {"demo", "test", "lint", "type", "notebooks", "bench-views", "architectures"}
    expected |= {"bench", "mutants", "fuzz", "long-run", "test-oldest", "test-newest"}
    assert targets == expected
    for target in targets:
        assert re.search(rf"^([\w-]+ )*{target}( [\w-]+)*:", makefile, re.M)

"""The benchmark script: its tables hold what its JSON holds. What it measures is not looked at."""

import json
import subprocess
import sys
from pathlib import Path

import bench
import pytest
import torch
from bench_page import page, tables
from bench_ways import WAYS, Shape, prepared
from bench_worker import done


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick run: the numbers as JSON, the page, and what was printed."""
    folder = tmp_path_factory.mktemp("bench")
    files = folder / "numbers.json", folder / "page.md"
    bench.main(["--quick", "--json", str(files[0]), "--markdown", str(files[1])])
    return json.loads(files[0].read_text()), files[1].read_text()


def cells(text, heading):
    """A table's rows as lists of cells, the head and the rule left out."""
    lines = text.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    return rows[2:]


def test_every_way_of_this_library_has_a_row_that_holds_its_numbers(quick):
    numbers, text = quick
    shown = cells(text, "1 text of 16 tokens")
    assert [row[0] for row in shown] == list(bench.OWN.values())
    for row, found in zip(shown, numbers["rows"], strict=True):
        assert (found["tokens"], found["texts"], found["rounds"]) == (16, 1, 2)
        assert 0 < found["least"] <= found["ratio"] <= found["most"]
        assert row[1] == f"{found['ratio']:.2f} ×"
        assert row[2] == f"{found['least']:.2f} – {found['most']:.2f}"
        assert float(row[4]) == pytest.approx(found["seconds"], rel=0.01)
        for cell, name in zip(row[5:], ("peak", "held"), strict=True):
            assert float(cell.removesuffix(" MB")) == pytest.approx(found[name] / 2**20, abs=0.51)


def test_what_grows_and_starts_has_its_numbers_too(quick):
    numbers, text = quick
    sizes = ["as it is", "2 × tokens", "2 × layers", "2 × heads", "2 × texts"]
    shown = cells(text, "How time and memory grow")
    assert [row[0] for row in shown] == sizes
    flat = [cell for row in shown for cell in row[1:]]
    assert len(flat) == len(numbers["growth"]) == len(sizes) * len(bench.GROWN)
    for cell, found in zip(flat, numbers["growth"], strict=True):
        assert f", {found['ratio']:.2f} ×, " in cell
    starts = cells(text, "Start-up")
    assert [row[1] for row in starts] == [f"{one['seconds']:.2f}" for one in numbers["starts"]]


def test_the_page_names_the_machine_and_no_place(quick):
    numbers, text = quick
    assert f"torch {torch.__version__}" in text
    assert str(Path.home()) not in text
    assert str(bench.ROOT) not in text + json.dumps(numbers)
    assert page(numbers) == text  # of nothing but the numbers


def test_a_way_that_failed_and_a_library_that_is_not_there_are_told(quick):
    numbers = json.loads(json.dumps(quick[0]))
    numbers["rows"][3] = {"way": "another", "tokens": 16, "texts": 1, "failed": "too large"}
    numbers["peers"] = {"nnsight": "", "torchlens": "2.36.1"}
    assert "| another | too large |" in tables(numbers)
    text = page(numbers)
    assert "Not installed here, so not run: nnsight." in text
    assert ", torchlens 2.36.1.\n" in text


def test_where_a_worker_fails_each_of_its_ways_gets_one_of_its_own(monkeypatch):
    def run(command, **options):
        ways = json.loads(command[-1])["ways"]
        failed = len(ways) > 1 or ways == ["large"]
        found = json.dumps({way: {"ratio": 1.5} for way in ways})
        return subprocess.CompletedProcess(command, int(failed), found, "no memory")

    monkeypatch.setattr(bench.subprocess, "run", run)
    runner = bench.Runner(bench.FULL)
    found = runner.work("time", ["large", "small"], {"texts": 1, "tokens": 16})
    assert found == {"large": {"failed": "failed"}, "small": {"ratio": 1.5}}


def test_what_is_kept_is_counted_once_and_exactly():
    sizes = {"layers": 2, "heads": 3, "width": 30, "vocabulary": 101, "tokens": 16, "texts": 2}
    ways = ["plain", "hooks", "plain eager", "output attentions", "verify output"]
    done({"what": "memory", "shape": sizes, "ways": ["verify output"]})  # its buffers are there now
    found = done({"what": "memory", "shape": sizes, "ways": ways})
    logits = 4 * 2 * 16 * 101
    qkv, z, weights = 4 * 2 * 16 * 90, 4 * 2 * 16 * 30, 4 * 2 * 3 * 16 * 16
    assert found["plain"]["held"] == found["plain eager"]["held"] == logits
    assert found["hooks"]["held"] == logits + 2 * (qkv + z)
    cache = 2 * z  # a layer's keys and values
    assert found["output attentions"]["held"] == logits + 2 * (weights + cache)
    assert found["verify output"]["held"] == 0


def test_every_way_computes_the_same_logits():
    shape = Shape(layers=2, heads=3, width=30, vocabulary=101, tokens=11)
    ids = shape.ids()
    own = [way for way in bench.OWN if not way.startswith("verify")]
    assert set(bench.OWN) <= set(WAYS)
    with torch.no_grad():
        want = prepared(shape, "plain", {})(ids)
        for way in own:
            kept = prepared(shape, way, {})(ids)
            kept = kept[0] if way == "hooks" else kept
            got = kept if isinstance(kept, torch.Tensor) else getattr(kept, "output", None)
            got = kept.logits if got is None else got
            torch.testing.assert_close(got, want)


def test_a_worker_is_a_program_of_its_own():
    job = {"what": "time", "shape": bench.SMALL | {"tokens": 8, "texts": 1}, "ways": ["hooks"]}
    job |= {"rounds": 3, "limit": 1e9, "bytes": 2**33, "threads": 1}
    ran = subprocess.run(
        [sys.executable, bench.WORKER, json.dumps(job)],
        capture_output=True,
        text=True,
        check=True,
        env=bench.environment(),
    )
    found = json.loads(ran.stdout)
    assert found["hooks"]["rounds"] == 3


def test_a_way_that_took_its_time_gets_no_further_round():
    job = {"what": "time", "shape": bench.SMALL | {"tokens": 8, "texts": 1}, "ways": ["hooks"]}
    assert done(job | {"rounds": 5, "limit": 1e-9})["hooks"]["rounds"] == 1

"""The command line: what it prints, what it writes, and how it leaves."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from hub import Hub, save_gpt2
from test_encoder_decoders import bart, made, tokenizer
from typer.testing import CliRunner, Result

import attnprobe as ap
from attnprobe import cli
from attnprobe.command import printing
from attnprobe.verification import CHECKS

TEXT = "The children were playing in the green park"
LONG = "a b c d e f g h i j k l m n o p q r s t u v w x y z a b c d e f g h i j k l m n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_gpt2(tmp_path_factory.mktemp("model"), seed=3))


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An sdpa that doubles the scale: a model that does not compute the formula."""
    kernels = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    right = kernels["sdpa"]

    def wrong(module: Any, query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
        return right(module, 2 * query, key, value, *more, **options)

    monkeypatch.setitem(kernels._global_mapping, "sdpa", wrong)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments, catch_exceptions=False)


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The command in a process of its own, as a shell runs it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    command = [sys.executable, "-m", "attnprobe", *arguments]
    return subprocess.Popen(command, env=environment, text=True, encoding="utf-8", **pipes)


# verify


def test_verify_prints_every_check_and_layer_and_the_verdict_last(model: str) -> None:
    result = run("verify", "--model", model, "--attn", "eager")
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == f"model  {model} in float32, eager kernel"
    assert lines[1] == f"text   {TEXT} (8 tokens)"
    rows = [line.split() for line in lines if line.endswith("verified")]
    checks = [check for check in CHECKS if check not in ("cache", "logits")]
    places = [(check, str(layer)) for check in checks for layer in range(3)]
    assert [(row[0], row[1]) for row in rows[:-1]] == places
    assert rows[-1][0] == "logits"
    assert lines[-2].startswith("worst head: layer ")
    assert lines[-1].startswith("VERIFIED: ")


def test_verify_names_the_head_that_the_report_finds_worst(model: str) -> None:
    report = ap.verify(ap.capture(ap.load(model, attn="sdpa"), "hello there you"))
    frame = report.to_frame().dropna(subset=["head", "ratio"])
    worst = frame.loc[frame["ratio"].idxmax()]
    result = run("verify", "hello there you", "--model", model)
    assert (
        f"worst head: layer {worst['layer']}, head {worst['head']} ({worst['check']})"
        in result.stdout
    )


def test_a_check_that_cannot_be_made_has_one_row_and_a_reason(model: str) -> None:
    lines = run("verify", "--model", model, "--attn", "sdpa").stdout.splitlines()
    assert [line.split() for line in lines if line.startswith(" weights")] == [
        ["weights", "all", "not", "checked"]
    ]
    assert any(line.startswith("weights: not checked: ") for line in lines)


@pytest.mark.usefixtures("wrong_kernel")
def test_a_mismatch_leaves_with_1(model: str) -> None:
    result = run("verify", "--model", model)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("MISMATCH: ")


def test_what_was_not_checked_leaves_with_2(model: str) -> None:
    result = run("verify", "--model", model, "--checks", "mask, merge")
    assert result.exit_code == 2
    assert "output" not in result.stdout.splitlines()[3:-1]
    assert result.stdout.splitlines()[-1].startswith("NOT CHECKED: ")
    assert run("verify", "--model", model, "--checks", "output").exit_code == 0


def no_such_number(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.usefixtures("wrong_kernel")
def test_json_is_one_object_and_nothing_else(model: str) -> None:
    result = run("verify", "a [b] <c>", "--model", model, "--json")
    report = json.loads(result.stdout, parse_constant=no_such_number)
    assert result.exit_code == 1
    assert result.stdout.count("\n") == 1
    assert report["text"] == "a [b] <c>"
    assert report["verdict"] == "mismatch"
    assert {row["check"] for row in report["rows"]} == set(CHECKS) - {"cache"}


class Page(HTMLParser):
    """The text and the tags of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str | None] = []
        self.text = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_shows_texts_as_they_are(model: str, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    text = "</style><script>alert(1)</script> <img src=x onerror=alert(2)>"
    result = run("verify", text, "--model", model, "--out", str(out))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("VERIFIED: ")
    source = out.read_text(encoding="utf-8")
    page = Page(source)
    assert source.startswith("<!DOCTYPE html>")
    assert text in page.text
    assert not {"script", "img", "link", "iframe"}.intersection(page.tags)
    assert page.links == []
    assert "load with attn='eager'" in page.text  # reasons are not cut
    assert "VERIFIED: " in page.text
    assert list(tmp_path.iterdir()) == [out]


# table and attended


def test_table_as_csv_and_json_hold_the_frame(model: str) -> None:
    expected = ap.table(ap.capture(ap.load(model, attn="sdpa"), TEXT), layer=2, head=1)
    arguments = ("table", TEXT, "--model", model, "--layer", "2", "--head", "1", "--format")
    csv, as_json = run(*arguments, "csv"), run(*arguments, "json")
    assert (csv.exit_code, as_json.exit_code) == (0, 0)
    read = pd.read_csv(io.StringIO(csv.stdout), keep_default_na=False)
    expected = expected.astype({"query": str, "key": str})
    pd.testing.assert_frame_equal(read, expected, check_dtype=False, check_exact=False, rtol=1e-12)
    records = json.loads(as_json.stdout, parse_constant=no_such_number)
    assert records == expected.to_dict("records")


def test_a_long_table_is_not_cut(model: str) -> None:
    result = run("table", LONG, "--model", model, "--layer", "0")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()[2:]
    assert len(lines) == 2 * 40 * 41 // 2
    assert "…" not in result.stdout
    assert len({len(line.split()) for line in lines}) == 1


def test_tokens_are_shown_as_they_are(model: str) -> None:
    result = run("table", "[red]:cat:\n\x1b[0m", "--model", model, "--layer", "0", "--head", "0")
    assert "[" in result.stdout
    assert "red" in result.stdout
    assert ":" in result.stdout
    assert "⏎" in result.stdout
    assert "\x1b" not in result.stdout


def test_a_table_goes_to_a_file(model: str, tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    out.write_text("old")
    result = run("table", "hi you", "--model", model, "--format", "csv", "--out", str(out))
    assert (result.exit_code, result.stdout) == (0, "")
    assert len(pd.read_csv(out)) == 3 * 2 * 3
    assert list(tmp_path.iterdir()) == [out]


def test_words_of_one_word(model: str) -> None:
    cap = ap.capture(ap.load(model), "in the park in the green")
    chosen = ("--word", "the", "--layer", "1", "--head", "0", "--top", "3", "--nth", "1")
    options = ("--model", model, *chosen, "--format", "json")
    expected = ap.attended(cap, "the", top=3, layer=1, head=0, nth=1)
    result = run("words", "in the park in the green", *options)
    assert json.loads(result.stdout) == expected.to_dict("records")
    expected = ap.attended_by(cap, "the", top=3, layer=1, head=0, nth=1)
    result = run("words", "in the park in the green", *options, "--reverse")
    assert json.loads(result.stdout) == expected.to_dict("records")


def test_words_of_a_text_are_those_of_each_word(model: str) -> None:
    cap = ap.capture(ap.load(model), TEXT)
    result = run("words", TEXT, "--model", model, "--top", "2", "--how", "max", "--format", "csv")
    frame = pd.read_csv(io.StringIO(result.stdout))
    assert frame["query"].unique().tolist() == TEXT.split()
    assert frame.groupby("query_pos").size().tolist() == [1, *[2] * 7]
    expected = ap.attended(cap, "park", top=2, how="max")
    pd.testing.assert_frame_equal(frame[frame["query"] == "park"].reset_index(drop=True), expected)


def test_words_skip_the_first_and_go_to_parquet(model: str, tmp_path: Path) -> None:
    out = tmp_path / "words.parquet"
    options = ("--model", model, "--skip-first", "--format", "parquet", "--out", str(out))
    assert run("words", TEXT, *options).exit_code == 0
    frame = pd.read_parquet(out)
    assert frame.columns[-1] == "weight_without_first"
    assert 0 not in set(frame.key_pos)


ABLATE = ["ablate", "She went into the", "--metric", "logit", "--target", "house"]


def test_ablate_shows_every_head_as_a_table_a_file_and_a_picture(tmp_path: Path) -> None:
    wanted = ap.head_effects(ap.load("bundled"), ABLATE[1], "logit", target="house")
    shown = run(*ABLATE).stdout.splitlines()
    assert shown[0].split() == ["layer", "head", "value", "effect"]
    assert len(shown) == 2 + len(wanted)
    out = tmp_path / "heads.csv"
    assert run(*ABLATE, "--out", str(out)).exit_code == 0
    pd.testing.assert_frame_equal(pd.read_csv(out), wanted, atol=1e-5)
    for name, begins in (("heads.png", b"\x89PNG"), ("heads.svg", b"<?xml"), ("H.PDF", b"%PDF")):
        done = run(*ABLATE, "--how", "mean", "--out", str(tmp_path / name))
        assert (done.exit_code, done.stdout) == (0, "")
        assert (tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--metric", "logit"], "metric 'logit' needs target"),
        (["--target", "x"], "metric 'loss' takes no target, got 'x'"),
        (["--metric", "speed"], "metric is one of loss, logit, logit_difference; got 'speed'"),
        (["--how", "noise"], "how is one of zero, mean, resample; got 'noise'"),
        (["--out", "x.html"], "expected a name in .csv, .json, .parquet, .txt, .svg, .png, .pdf"),
        (["--out", "x.png", "--format", "csv"], "--format csv does not go with a name like x.png"),
        (
            ["--out", "x.csv", "--format", "json"],
            "--format json does not go with a name like x.csv",
        ),
        (["--out", "no/x.png"], "there is no folder no"),
        (
            ["--metric", "logit", "--target", "unbelievably"],
            "is not one token here but ' un' (id 581)",
        ),
    ],
)
def test_ablate_refuses_with_one_message(options: list[str], said: str) -> None:
    done = run("ablate", "She went into the", *options)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_walk_prints_every_step_or_writes_a_page(model: str, tmp_path: Path) -> None:
    options = ("--model", model, "--word", "playing", "--layer", "1", "--head", "1")
    result = run("walk", TEXT, *options)
    cap = ap.capture(ap.load(model), TEXT)
    assert result.stdout.strip() == repr(ap.walkthrough(cap, "playing", 1, 1)).strip()
    out = tmp_path / "walk.html"
    assert run("walk", TEXT, *options, "--out", str(out)).stdout == ""
    page = out.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "weighted_norm" in page


# Encoder-decoders

SOURCE, TARGET = "the children play", "a dog sleeps"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bart")
    made(bart).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def test_verify_takes_a_target(pair: str, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    arguments = ("verify", SOURCE, "--target", TARGET, "--model", pair)
    result = run(*arguments, "--out", str(out))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[1:3] == [f"text   {SOURCE} (3 tokens)", f"target {TARGET}"]
    assert lines[-1].startswith("VERIFIED: ")
    assert "cross 2" in result.stdout
    assert TARGET in Page(out.read_text(encoding="utf-8")).text
    found = json.loads(run(*arguments, "--json").stdout)
    assert (found["text"], found["target"]) == (SOURCE, TARGET)
    assert {row["part"] for row in found["rows"]} == {"encoder", "decoder", "cross", ""}


@pytest.mark.parametrize("part", ["encoder", "decoder", "cross", None])
def test_a_table_is_of_one_part(pair: str, part: str | None) -> None:
    options = ("--target", TARGET, "--model", pair, "--layer", "1", "--head", "2")
    chosen = () if part is None else ("--part", part)
    result = run("table", SOURCE, *options, *chosen, "--format", "json")
    cap = ap.capture(ap.load(pair), SOURCE, target=TARGET)
    expected = ap.table(getattr(cap, part or "decoder"), 1, 2)
    assert [row["weight"] for row in json.loads(result.stdout)] == expected["weight"].tolist()


def test_what_shows_one_text_shows_the_decoders_or_the_encoders(pair: str, tmp_path: Path) -> None:
    options = ("--target", TARGET, "--model", pair)
    result = run("words", SOURCE, *options, "--word", "dog", "--format", "json")
    assert {row["query"] for row in json.loads(result.stdout)} == {"dog"}
    chosen = ("--part", "encoder", "--layer", "0", "--head", "1")
    assert "children" in run("walk", SOURCE, *options, *chosen, "--word", "children").stdout
    for command in (["report"], ["view", "--kind", "head", "--part", "cross"]):
        out = tmp_path / f"{command[0]}.html"
        assert run(*command, SOURCE, *options, "--out", str(out)).exit_code == 0
        assert "sleeps" in out.read_text(encoding="utf-8")


COMMANDS = [
    ["verify"],
    ["table"],
    ["words"],
    ["walk", "--word", "dog", "--layer", "0", "--head", "0"],
    ["view", "--kind", "head", "--out", "v.html"],
    ["report", "--out", "r.html"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_an_encoder_decoder_without_a_target_is_told_of_it(
    command: list[str], pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*command, SOURCE, "--model", pair)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(
        "attnprobe: BartForConditionalGeneration is an encoder-decoder: give --target, "
    )


# terms


def test_terms_print_the_numbers_and_below_them_the_formulas(model: str) -> None:
    lines = run("terms", TEXT, "--model", model).stdout.splitlines()
    frame = ap.term_effects(ap.load(model), TEXT)
    assert lines[0].split() == [*frame.columns.drop(["formula", "note"])]
    for at, row in enumerate(frame.itertuples()):
        name, formula = lines[2 + at].strip(), lines[3 + len(frame) + at]
        assert name.startswith(row.term)
        assert name.split()[-4] == f"{row.loss:.4g}"
        assert formula.startswith(f"{row.term} ")
        assert formula.endswith(f"({row.note})" if row.note else row.formula)
    assert len(lines) == 3 + 2 * len(frame)


@pytest.mark.parametrize("width", [70, 100])
def test_terms_fit_a_terminal_and_break_no_number(model: str, width: int) -> None:
    frame = ap.term_effects(ap.load(model), TEXT)
    table, _, _ = printing.effects_text(frame, width).partition("\n\n")
    assert max(map(len, table.splitlines())) <= width
    losses = {f"{loss:.4g}" for loss in frame["loss"]}
    assert losses <= set(table.split())


@pytest.mark.parametrize("width", [76, 80, 100])
def test_terms_break_no_word_in_a_usual_terminal(model: str, width: int) -> None:
    frame = ap.term_effects(ap.load(model), TEXT)
    table, _, _ = printing.effects_text(frame, width).partition("\n\n")
    words = {word for term in frame["term"] for word in term.split()}
    names = {part for name in frame.columns[2:-1] for part in name.replace("_", "_ ").split()}
    assert words <= set(table.split())
    assert names <= set(table.replace("_", "_ ").split())
    assert max(map(len, table.splitlines())) <= width


def test_terms_name_the_weight_that_is_not_finite(tmp_path: Path) -> None:
    lm = ap.load("bundled")
    with torch.no_grad():
        lm.model.transformer.h[1].mlp.c_fc.weight[3, 5] = math.nan
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    done = run("terms", TEXT, "--model", str(tmp_path))
    assert done.exit_code == 2
    assert "so does the weight transformer.h.1.mlp.c_fc.weight: 1 of" in done.stderr


def test_terms_as_json_and_in_a_file_hold_the_frame(model: str, tmp_path: Path) -> None:
    frame = ap.term_effects(ap.load(model), TEXT)
    result = run("terms", TEXT, "--model", model, "--format", "json")
    rows = json.loads(result.stdout, parse_constant=no_such_number)
    assert rows[:-1] == frame[:-1].to_dict("records")
    assert rows[-1] == frame.iloc[-1].to_dict() | dict.fromkeys(
        ["entropy", "entropy_share", "future"]
    )
    out = tmp_path / "terms.csv"
    assert run("terms", TEXT, "--model", model, "--out", str(out)).stdout == ""
    pd.testing.assert_frame_equal(
        pd.read_csv(out, keep_default_na=False, na_values={"entropy": ""})[["term", "loss"]],
        frame[["term", "loss"]],
    )


# What is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", ""], "empty"),
        (["verify", LONG + " o p"], "42 tokens; the model takes at most 40"),
        (["verify", "caf\udce9"], "not UTF-8"),
        (["verify", "--checks", "output,smell"], "unknown check 'smell'"),
        (["verify", "--checks", ""], "unknown check"),
        (["verify", "--dtype", "float23"], "unknown dtype 'float23'"),
        (["verify", "--attn", "spda"], "unknown attention kernel 'spda'"),
        (["verify", "--device", "toaster"], "device 'toaster'"),
        (["verify", "--revision", "v2"], "only a hub id has revisions"),
        (["verify", "--loud"], "No such option"),
        (["table", TEXT, "--layer", "3"], "numbered 0 to 2"),
        (["table", TEXT, "--layer", "-1"], "numbered 0 to 2"),
        (["table", TEXT, "--head", "2"], "numbered 0 to 1"),
        (["table", TEXT, "--format", "xml"], "xml"),
        (["words", TEXT, "--word", "playin"], "playing"),
        (["words", TEXT, "--word", "green", "--nth", "1"], "nth"),
        (["words", TEXT, "--word", "green", "--top", "0"], "top"),
        (["words", TEXT, "--nth", "1"], "--nth goes with --word"),
        (["words", TEXT, "--reverse", "--skip-first"], "does not go with --reverse"),
        (["table", TEXT, "--out", "t.html"], "expected a name in .csv, .json, .parquet, .txt"),
        (["words", TEXT, "--how", "median"], "'mean', 'max' or 'rollout'"),
        (["words", TEXT, "--weigh", "length"], "'weight' or 'value'"),
        (["words", TEXT, "--format", "parquet"], "name a file with --out"),
        (["terms", "the"], "text 0 has one token"),
        (["terms", TEXT, "--out", "t.html"], "expected a name in .csv, .json, .parquet, .txt"),
        (["verify", "--target", "a"], "GPT2LMHeadModel has no decoder to give a target to"),
        (["table", TEXT, "--part", "cross"], "--part cross is for encoder-decoders"),
        (["table", TEXT, "--part", "middle"], "Invalid value for '--part'"),
        (["walk", TEXT], "--word"),
        (["walk", TEXT, "--word", "green", "--layer", "3", "--head", "0"], "numbered 0 to 2"),
        (["walk", TEXT, "--word", "gren", "--layer", "0", "--head", "0"], "near ones: green"),
    ],
)
def test_bad_input_leaves_with_2_and_one_message(
    model: str, arguments: list[str], said: str
) -> None:
    result = run(*arguments, "--model", model)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.output


def test_a_model_without_softmax_attention_leaves_with_2(model: str, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "mamba")
    sizes = {"vocab_size": 50257, "hidden_size": 6, "num_hidden_layers": 2}
    transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).save_pretrained(folder)
    result = run("verify", "--model", str(folder))
    assert result.exit_code == 2
    assert "attention" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("source", ["no/such/folder", "nothing.gguf", "."])
def test_an_unusable_model_leaves_with_2(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("verify", "--model", source)
    assert result.exit_code == 2
    assert result.stderr.startswith("attnprobe: ")
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("absent/report.html", "there is no folder"),
        ("folder.html", "it is not a file"),
        ("report.json", "expected a name in .html"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, out: str, said: str
) -> None:
    (tmp_path / "folder.html").mkdir()
    result = run("verify", "--model", "no/such/model", "--out", str(tmp_path / out))
    assert result.exit_code == 2
    assert said in result.stderr
    assert "no/such/model" not in result.stderr


def test_nothing_is_written_where_a_run_fails(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.html"
    out.write_text("of yesterday")
    assert run("verify", "", "--model", model, "--out", str(out)).exit_code == 2

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    result = run("verify", "--model", model, "--out", str(out))
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert out.read_text() == "of yesterday"
    assert list(tmp_path.iterdir()) == [out]


# How it starts and leaves


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"attnprobe {ap.__version__}\n")


def test_a_crash_is_no_mismatch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(cli, "_capture", crash)
    monkeypatch.setattr(sys, "argv", ["attnprobe", "verify"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 70
    assert "ZeroDivisionError: a bug" in capsys.readouterr().err


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys, attnprobe.cli\n"
        "heavy = ['torch', 'transformers', 'pandas', 'numpy', 'matplotlib', 'huggingface_hub']\n"
        "sys.argv = ['attnprobe', '--help']\n"
        "try:\n    attnprobe.cli.main()\n"
        "finally:\n    print(sorted(set(heavy) & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "verify" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_public_name_is_itself_also_after_its_module_was_imported() -> None:
    code = (
        "import attnprobe as ap\n"
        "assert set(ap.__all__) == {name for names in ap._HOMES.values() for name in names}\n"
        "for name in ap.__all__:\n    assert getattr(ap, name).__name__ == name, name\n"
        "assert not hasattr(ap, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_terminal_only_the_report_is_printed(model: str) -> None:
    """And on a stdout that cannot show √, it is written out."""
    process = start("verify", "--model", model, env={"PYTHONIOENCODING": "ascii"})
    stdout, stderr = process.communicate()
    assert process.returncode == 0
    assert stderr == ""
    assert stdout.splitlines()[-1].startswith(r"VERIFIED: the model computed softmax(QK\u1d40/")


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)


def test_progress_goes_to_stderr_where_that_is_a_terminal(
    model: str, terminal: tuple[int, int]
) -> None:
    ours, theirs = terminal
    process = start("verify", "--model", model, "--json", stderr=theirs, env={"TERM": "xterm"})
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # what Linux gives at the end of a terminal
        pass
    assert json.loads(process.communicate()[0])["verdict"] == "verified"
    assert b"logits" in shown


def test_a_reader_that_leaves_early_gets_no_traceback(model: str) -> None:
    process = start("table", LONG, "--model", model, "--format", "csv")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("text,layer,head,")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


def test_interrupted_it_leaves_with_130(tmp_path: Path) -> None:
    with Hub() as hub, hub.hanging():
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        process = start("verify", "--model", "some/model", env=settings)
        assert hub.asked.wait(timeout=60)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_without_an_output_the_exit_code_still_tells(model: str, closed: str) -> None:
    command = f"{sys.executable} -m attnprobe verify hello --model {model} --checks output"
    assert subprocess.run(f"{command} {closed}", shell=True, check=False).returncode == 0


def test_a_full_disk_is_said(model: str) -> None:
    command = f"{sys.executable} -m attnprobe verify hello --model {model} > /dev/full"
    done = subprocess.run(command, shell=True, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no space is left" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_too_long_is_said(model: str, tmp_path: Path) -> None:
    result = run("table", "hi", "--model", model, "--out", str(tmp_path / ("a" * 300 + ".csv")))
    assert result.exit_code == 2
    assert "File name too long" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_format_that_the_name_contradicts_is_refused(tmp_path):
    out = tmp_path / "t.csv"
    result = run("table", "a b", "--format", "json", "--out", str(out))
    assert result.exit_code == 2
    assert "--format json does not go with a name like t.csv" in result.stderr
    assert not out.exists()

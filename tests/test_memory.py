"""The memory guard: every public call that may take much says so before it takes it."""

import json
import re
import subprocess
import sys

import pytest
import torch
from samples import IDS

import attnprobe as ap
from attnprobe import memory

MB = 10**6


@pytest.fixture
def limit(monkeypatch):
    def set_(text):
        monkeypatch.setenv(memory.VARIABLE, text)

    return set_


def needed(error):
    """How many bytes a refusal says that would be needed."""
    number, unit = re.search(r"would take about ([\d.,]+) (\w+)", str(error)).groups()
    return float(number.replace(",", "")) * {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def test_the_limit_is_half_of_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "_free", lambda device: 100 * MB)
    memory.need(50 * MB, "this", "that")
    with pytest.raises(ap.InputError) as caught:
        memory.need(50 * MB + 1, "this", "that")
    assert str(caught.value) == (
        "this would take about 50 MB, more than half of the 100 MB free. Instead: that. Or set "
        "ATTNPROBE_MEMORY_LIMIT, such as ATTNPROBE_MEMORY_LIMIT=51MB"
    )
    monkeypatch.setattr(memory, "_free", lambda device: None)
    memory.need(10**15, "this", "that")


def test_the_variable_sets_another(limit):
    for text in ("1500", "1.5kB", " 0.0015 MB"):
        limit(text)
        memory.need(1500, "this", "that")
        with pytest.raises(ap.InputError, match=r"what ATTNPROBE_MEMORY_LIMIT allows, 1\.5 kB"):
            memory.need(1501, "this", "that")
    for text in ("", "much", "-1", "1e9", "3 TB"):
        limit(text)
        with pytest.raises(ap.InputError, match="is a number of bytes"):
            memory.need(1, "this", "that")


def test_what_is_free_is_what_the_system_says():
    told = dict(line.split(":") for line in open("/proc/meminfo"))  # noqa: SIM115, PTH123
    free = 1024 * int(told["MemAvailable"].split()[0])
    assert memory._of_machine() == pytest.approx(free, rel=0.2)
    assert 0 < memory._free(None) <= 1024 * int(told["MemTotal"].split()[0])


def test_a_control_group_of_either_version_counts(tmp_path):
    own = tmp_path / "cgroup"
    outer, inner = tmp_path / "a", tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    old = tmp_path / "memory"
    old.mkdir()
    for folder, most, used, cached in ((outer, 1000, 700, 50), (inner, "max", 300, 0)):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"file 1\ninactive_file {cached}\n")
    own.write_text("0::/a/b\n")
    assert list(memory._of_groups(own, tmp_path)) == [350]
    (inner / "memory.max").write_text("400\n")
    assert list(memory._of_groups(own, tmp_path)) == [100, 350]
    (old / "memory.limit_in_bytes").write_text("5000\n")
    (old / "memory.usage_in_bytes").write_text("6000\n")
    (old / "memory.stat").write_text("total_inactive_file 3000\n")
    own.write_text("9:name=systemd:/\n4:cpu,memory:/not/shown/here\n")
    assert list(memory._of_groups(own, tmp_path)) == [2000]
    assert list(memory._of_groups(tmp_path / "none", tmp_path)) == []


CALLS = {
    "weights": (lambda lm, cap: ap.weights(cap, 1), "head=0"),
    "weights of a head": (lambda lm, cap: ap.weights(cap, 1, 2), "a shorter text"),
    "weights by word": (lambda lm, cap: ap.weights(cap, 1, by="word"), "head=0"),
    "scores": (lambda lm, cap: ap.scores(cap, 1), "head=0"),
    "table": (lambda lm, cap: ap.table(cap), "head=0"),
    "table, wide": (lambda lm, cap: ap.table(cap, 1, 2, wide=True), "a shorter text"),
    "attended": (lambda lm, cap: ap.attended(cap), "head=0"),
    "attended, rollout": (
        lambda lm, cap: ap.attended(cap, how="rollout"),
        "how='mean' of one word",
    ),
    "attended_by": (lambda lm, cap: ap.attended_by(cap, 0), "head=0"),
    "head_stats": (lambda lm, cap: ap.head_stats(cap), "head=0"),
    "walkthrough": (lambda lm, cap: ap.walkthrough(cap, 0, 1, 2), "a shorter text"),
    "heatmap": (lambda lm, cap: ap.heatmap(cap, 1, 2), "a shorter text"),
    "heatmap_grid": (lambda lm, cap: ap.heatmap_grid(cap), "head=0"),
    "head_view": (lambda lm, cap: ap.head_view(cap), "head=0"),
    "model_view": (lambda lm, cap: ap.model_view(cap), "head=0"),
    "neuron_view": (lambda lm, cap: ap.neuron_view(cap, 1, 2), "a shorter text"),
    "attention_view": (lambda lm, cap: ap.attention_view(cap), "head=0"),
    "walkthrough_view": (lambda lm, cap: ap.walkthrough_view(cap), "head=0"),
    "report_view": (lambda lm, cap: ap.report_view(cap), r"checks=\['mask', 'output'\]"),
    "logit_contributions": (lambda lm, cap: ap.logit_contributions(cap, 5), "a shorter text"),
    "verify": (lambda lm, cap: ap.verify(cap), r"checks=\['mask', 'output'\]"),
    "verify of a model": (lambda lm, cap: ap.verify(lm, IDS), r"checks=\['mask', 'output'\]"),
    "capture": (lambda lm, cap: ap.capture(lm, [IDS, IDS]), r"layers=\[…\] or fewer texts"),
    "term_effects": (lambda lm, cap: ap.term_effects(lm, IDS), "a shorter text"),
    "head_effects": (lambda lm, cap: ap.head_effects(lm, IDS), "a shorter text"),
    "patch_effects": (lambda lm, cap: ap.patch_effects(lm, IDS, IDS[::-1], 5, 6), "layers="),
    "scale_variance": (lambda lm, cap: ap.scale_variance(lm, IDS), "a shorter text"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_would_take_more_is_refused(name, gpt2, limit):
    call, instead = CALLS[name]
    lm = gpt2()
    cap = ap.capture(lm, IDS)
    limit("100")
    with pytest.raises(ap.InputError, match=rf"would take about .* Instead: .*{instead}") as caught:
        call(lm, cap)
    assert needed(caught.value) > 100
    limit("1GB")
    if name not in ("patch_effects", "heatmap", "heatmap_grid"):
        call(lm, cap)


def test_a_kernel_that_gives_its_weights_is_stopped(gpt2, limit):
    lm = gpt2("eager")
    limit("100")
    for run in (ap.capture, ap.verify):
        with pytest.raises(ap.InputError, match=r"attn='sdpa'"):
            run(lm, IDS)
    with (
        ap.probe(lm) as calls,
        pytest.raises(ap.InputError, match=r"each further layer.*attn='sdpa'"),
    ):
        lm(torch.tensor([IDS]))
    assert len(calls) == 0
    with ap.edit(lm, scale=1.0), pytest.raises(ap.InputError, match=r"6 heads over 11 × 11 tokens"):
        lm(torch.tensor([IDS]))
    limit("10MB")
    assert ap.verify(lm, IDS).passed


def test_the_narrower_call_goes_through(gpt2, limit):
    lm = gpt2()
    cap = ap.capture(lm, IDS * 5)
    limit("150kB")
    with pytest.raises(ap.InputError, match="head=0, or fewer heads"):
        ap.weights(cap, 1)
    assert ap.weights(cap, 1, head=0).shape == (55, 55)
    with pytest.raises(ap.InputError, match="one word, which asks for its rows alone"):
        ap.attended(cap, how="rollout")
    assert len(ap.attended(cap, 54)) == 5


def test_nothing_is_taken_before_it_is_refused(gpt2, limit, monkeypatch):
    lm = gpt2()
    cap = ap.capture(lm, IDS)

    def begun(*_, **__):
        raise AssertionError("it has begun")

    limit("100")
    monkeypatch.setattr("attnprobe.recompute.softmax_weights", begun)
    lm.register_forward_pre_hook(begun)
    for call in (lambda: ap.weights(cap, 0), lambda: ap.capture(lm, IDS), lambda: ap.verify(cap)):
        with pytest.raises(ap.InputError, match="would take about"):
            call()


MEASURED = {
    "weights": "ap.weights(cap, 0)",
    "weights by word": "ap.weights(cap, 0, by='word')",
    "scores": "ap.scores(cap, 0)",
    "attended": "ap.attended(cap, layer=0)",
    "head_stats": "ap.head_stats(cap, 0)",
    "table": "ap.table(cap, 0, max_bytes=10**12)",
    "attention_view": "ap.attention_view(cap, 0, max_weights=10**12)",
    "capture": "ap.capture(eager, ids)",
    "verify": "ap.verify(wide, ids[:200])",
}

MEASURE = """
import ctypes, gc, json, os, re, sys, torch, attnprobe as ap
from transformers import GPT2Config, GPT2LMHeadModel
torch.set_num_threads(1)
def model(kernel, **sizes):
    sizes = {"n_layer": 3, "n_head": 6, "n_embd": 60, "vocab_size": 101} | sizes
    config = GPT2Config(**sizes, n_positions=900, attn_implementation=kernel, bos_token_id=0,
        eos_token_id=0)
    return GPT2LMHeadModel(config).eval()
def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
sdpa, eager, wide = model("sdpa"), model("eager"), model("sdpa", vocab_size=100_000, n_layer=1)
for name, code in json.loads(sys.argv[1]).items():
    kept = None
    for count in (20, 900):  # at first what is loaded when first used
        ids = [7 * at % 101 for at in range(count)]
        cap = ap.capture(sdpa, ids)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        open("/proc/self/clear_refs", "w").write("5")
        before = status("VmRSS")
        kept = eval(code)
    taken = status("VmHWM") - before
    os.environ["ATTNPROBE_MEMORY_LIMIT"] = "1"
    try:
        eval(code)
    except ap.InputError as error:
        print(json.dumps([name, taken, str(error)]))
    del os.environ["ATTNPROBE_MEMORY_LIMIT"]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the most that a call held")
def test_what_is_said_to_be_needed_is_what_is_taken():
    """Within a factor of two."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(MEASURED)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    ratios = {name: needed(refusal) / taken for name, taken, refusal in found}
    assert ratios.keys() == MEASURED.keys()
    assert {name: one for name, one in ratios.items() if not 0.5 < one < 2} == {}

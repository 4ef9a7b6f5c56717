"""Every mutant is reported on every kind of attention, in every dtype; a right model never is."""

import mutants
import pytest
import torch
from mutant_models import KINDS, captured, made
from mutants import DTYPES, Found, Line, found, lines
from wrong_attention import UNCHANGED, Mutant, by_hand, mutants_of, weights_rounded

import attnprobe as ap
from attnprobe.architecture.known import KNOWN_TYPES

GPT2 = KINDS[0]
CASES = [(kernel, dtype) for kernel in ("sdpa", "eager") for dtype in DTYPES]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_mutant_of_a_kind_is_caught_and_the_right_model_is_verified(kind):
    seen = 0
    for line in lines([kind], (0,), turns=True):
        row = [line.cell(column) for column in mutants.COLUMNS]
        print(line.mutant.name, line.mutant.place, row, line.checks)
        assert line.wrong == 0
        assert {dtype for _, dtype in line.runs} == set(DTYPES)
        seen += 1
    assert seen == 1 + len(mutants_of(kind))


def test_what_is_true_of_each_kind_is_what_attnprobe_knows():
    """Where attnprobe comes to know more, `told` mutants are to become caught ones."""
    for kind in KINDS:
        assert kind.facts == (kind.type in KNOWN_TYPES), kind.name
        cap = captured(kind, made(kind, "eager", torch.float32, 0), 0)
        verdicts = {row.verdict for row in ap.verify(cap, checks=["projection"]).rows}
        assert kind.projected == ("verified" in verdicts), kind.name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_mutants_are_made_of_is_right_where_nothing_is_wrong(kind):
    """The rebuilt mask and the kernel by hand, without anything wrong, are not found."""
    right = Mutant(lambda kernel, asked: by_hand(asked.seeing(asked.rule)), "kernel")
    asking = Mutant(lambda kernel, asked: kernel(asked.seeing(asked.rule)), "model")
    for kernel in kind.kernels:
        for dtype in DTYPES:
            model = made(kind, kernel, dtype, 0)
            for mutant in (right, asking):
                judged = found(mutant, kind, model, 0)
                assert judged.state != "caught", (kernel, dtype, mutant.place, judged)
                assert judged.ratio <= 1


# The table can fail


def nothing(kernel, asked):
    return kernel(asked)


def test_a_mutant_that_changes_nothing_is_missed(monkeypatch, capsys):
    idle = Mutant(nothing, "kernel")
    monkeypatch.setattr(mutants, "mutants_of", lambda kind: [idle])
    monkeypatch.setattr(Mutant, "name", "idle")
    _, line = lines([GPT2], (0,))
    assert line.wrong == len(line.every) == 6
    assert {line.cell(column) for column in mutants.COLUMNS} == {"MISSED"}
    monkeypatch.setattr("sys.argv", ["mutants.py", "--kinds", "opt"])
    assert mutants.main() == 1
    assert "JUDGED WRONGLY: opt: idle (kernel)" in capsys.readouterr().out


def test_a_false_alarm_is_told(monkeypatch, capsys):
    alarm = Found("caught", 1.1, frozenset({"output"}))
    assert Line(GPT2, UNCHANGED, {CASES[0]: [alarm]}).wrong == 1
    monkeypatch.setattr(mutants, "found", lambda *_: alarm)
    monkeypatch.setattr("sys.argv", ["mutants.py", "--kinds", "bert"])
    assert mutants.main() == 1
    assert "JUDGED WRONGLY: bert: no change (kernel)" in capsys.readouterr().out


def test_only_what_is_not_known_may_be_told():
    told = Found("told", 0.1, frozenset())
    for kind in KINDS:
        for mutant in mutants_of(kind):
            line = Line(kind, mutant, {CASES[0]: [told]})
            known = {"kernel": True, "model": kind.facts, "before": kind.projected}
            assert line.wrong == known[mutant.place]


def test_the_page_is_of_all_kinds():
    page = (mutants.PAGE).read_text(encoding="utf-8")
    assert "MISSED" not in page
    for kind in KINDS:
        for mutant in mutants_of(kind):
            assert f"| {kind.name} | {mutant.name} | {mutant.place} |" in page


# Sharp and flat scores


@pytest.mark.parametrize(("kernel", "dtype"), CASES)
@pytest.mark.parametrize("spread", [0.15, 1.5, 10.0])
def test_the_right_kernel_is_never_reported(kernel, dtype, spread):
    for kind in KINDS[:2]:
        for seed in (2, 3):
            model = made(kind, kernel, dtype, seed, spread)
            judged = found(UNCHANGED, kind, model, seed)
            assert judged.state != "caught"
            assert judged.ratio <= 1


@pytest.mark.parametrize(("kernel", "dtype"), CASES)
def test_with_sharp_scores_every_mutant_but_rounded_weights_is_caught(kernel, dtype):
    """Scores of 20 cost digits: there, weights rounded once more may lie within the rounding."""
    model = made(GPT2, kernel, dtype, 0, 10.0)
    for mutant in mutants_of(GPT2):
        if mutant.change is not weights_rounded:
            assert found(mutant, GPT2, model, 0).state == "caught", mutant.name


def test_the_hidden_mutant_is_one_of_size_not_of_luck():
    """The one that hides: float16 weights in a fused float32 kernel, behind large scores."""
    ratios = {}
    for spread in (0.5, 1.5, 20.0):
        model = made(KINDS[1], "sdpa", torch.float32, 0, spread)
        ratios[spread] = found(Mutant(weights_rounded, "kernel"), KINDS[1], model, 0).ratio
    print(ratios)
    assert ratios[0.5] > ratios[1.5] > 1 > ratios[20.0]

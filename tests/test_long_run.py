"""A short run of `make long-run`: what a long one would pile up shows here as well."""

import long_run
import pytest


def test_nothing_stays_of_captures_edits_and_views():
    found = dict(long_run.run(captures=40, views=8))
    before, warm, after = found["before"], found["20 captures"], found["40 captures"]
    for name in ("hooks", "files", "threads", "seam open"):
        assert {one[name] for one in found.values()} == {before[name]}
    assert after["tensors"] == warm["tensors"]
    assert after["objects"] - warm["objects"] < 100  # 20 captures of 4 calls, 2 edits, 1 report
    assert found["and 8 views"]["tensors"] == after["tensors"]
    assert found["and 8 views"]["objects"] - found["and 4 views"]["objects"] < 100
    assert found["and 8 views"]["memory, MB"] - warm["memory, MB"] < 50


def test_what_stays_would_be_counted(monkeypatch):
    kept = []
    real = long_run.capture

    def forgetful(lm, number):
        real(lm, number)
        kept.append(lm.model.register_forward_hook(lambda *_: None))

    monkeypatch.setattr(long_run, "capture", forgetful)
    found = long_run.run(captures=20, views=0)
    for handle in kept:
        handle.remove()
    assert found[-1][1]["hooks"] == 20
    assert found[0][1]["hooks"] == 0


def test_the_table_has_a_row_for_each_count():
    found = [("before", {"hooks": 0, "objects": 1234}), ("3 captures", {"hooks": 2, "objects": 5})]
    assert long_run.table(found).splitlines() == [
        "| after | hooks | objects |",
        "|---|--:|--:|",
        "| before | 0 | 1,234 |",
        "| 3 captures | 2 | 5 |",
    ]


@pytest.mark.parametrize("name", long_run.VIEWS)
def test_the_views_are_there(name):
    import attnprobe as ap

    assert name in ap.__all__

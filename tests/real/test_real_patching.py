"""Where SmolLM2 keeps who gets the drink: Wang et al.'s (2022) indirect objects."""

import pytest
from real_models import smollm2_path

import attnprobe as ap

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"


@pytest.fixture(scope="module")
def smollm2():
    return ap.load(smollm2_path())


def test_what_tells_the_answer_moves_from_the_second_name_to_the_last_token(smollm2):
    frame = ap.patch_effects(smollm2, CLEAN, CORRUPT, " Mary", " John", what="residual")
    assert frame.attrs["clean"] > 4
    assert frame.attrs["corrupt"] < -4
    assert frame["token"][9] == "Mary"
    restored = frame.pivot(index="layer", columns="position", values="restored")
    assert restored.shape == (30, 14)
    assert (restored.loc[:, :8] == 0).all().all()
    assert restored.loc[0, 9] == pytest.approx(1.0, abs=1e-3)
    assert restored.loc[0, 10:].abs().max() < 1e-3
    assert (restored.loc[:18, 9] > 0.9).all()
    assert (restored.loc[:18, 13].abs() < 0.1).all()
    assert (restored.loc[24:, 13] > 0.9).all()
    assert (restored.loc[24:, 9].abs() < 0.1).all()


def test_one_head_brings_back_most_of_what_any_does(smollm2):
    frame = ap.patch_effects(smollm2, CLEAN, CORRUPT, " Mary", " John", by="head")
    first, second = frame.nlargest(2, "restored").itertuples()
    assert (first.layer, first.head) == (23, 3)
    assert first.restored > 0.5 > second.restored

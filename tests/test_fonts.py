import matplotlib
import pytest
from matplotlib.font_manager import fontManager

from attnprobe.views import fonts

INSTALLED = {entry.name for entry in fontManager.ttflist}


def test_plain_text_stays_as_it_is_in_the_users_own_font():
    letters = fonts.legible(["naïve", "√d_k", "␣", "⏎"])
    assert letters == fonts.Lettering(["naïve", "√d_k", "␣", "⏎"], ["sans-serif"], [])
    with matplotlib.rc_context({"font.family": ["DejaVu Serif"]}):
        assert fonts.legible(["a"]).families == ["DejaVu Serif"]


@pytest.mark.parametrize(
    ("text", "region"),
    [
        ("東京タワー", "JP"),
        ("한국어 中文", "KR"),
        ("這國語學習", "TC"),
        ("这汉语学习", "SC"),
    ],
)
def test_chinese_characters_come_from_the_texts_own_country(text, region):
    family = f"Noto Sans CJK {region}"
    if family not in INSTALLED:
        pytest.skip(f"{family} is not installed")
    assert fonts.legible(["the", text]) == fonts.Lettering(
        ["the", text], ["sans-serif", family], []
    )


def test_what_no_font_has_is_shown_as_its_code_point(monkeypatch):
    monkeypatch.setattr(fonts, "_installed", lambda region: iter(()))
    letters = fonts.legible(["a中", "中文", "b"])
    assert letters.texts == ["a<U+4E2D>", "<U+4E2D><U+6587>", "b"]
    assert letters.families == ["sans-serif"]
    assert letters.lacking == ["中", "文"]


def test_fonts_of_boxes_and_of_formulas_are_never_used():
    names = [name for name, _ in fonts._installed("SC")]
    assert {"Last Resort High-Efficiency", "cmr10", "STIXNonUnicode"} <= INSTALLED
    assert not [name for name in names if name.startswith(("Last Resort", "cm", "STIXNon"))]
    assert len(names) == len(set(names))
    assert "DejaVu Sans" in names


@pytest.mark.parametrize("one", ["\u202e", "\u2066", "\x01", "\x00", "\uffff", "\ufeff", "\u2028"])
def test_what_is_not_seen_is_shown_as_its_code_point(one):
    letters = fonts.legible([f"a{one}b"])
    assert letters.texts == [f"a<U+{ord(one):04X}>b"]
    assert letters.lacking == []


def test_joiners_and_spaces_stay():
    assert fonts.legible(["می\u200cخواهم 10\u00a0000"]).texts == ["می\u200cخواهم 10\u00a0000"]


def test_a_font_that_is_not_installed_is_passed_over():
    with matplotlib.rc_context({"font.family": ["No Such Font", "DejaVu Sans Mono"]}):
        assert fonts.legible(["word"]).families == ["DejaVu Sans Mono"]
    with matplotlib.rc_context({"font.family": ["No Such Font"]}):
        letters = fonts.legible(["word"])
    assert letters.texts == ["word"]
    assert set(letters.families) <= INSTALLED

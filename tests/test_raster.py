"""Still pictures as PNG, against what a browser draws of the same SVG."""

from __future__ import annotations

import io

import numpy as np
import pytest
from browser import opened
from PIL import Image

import attnprobe as ap
from attnprobe.views.raster import COLOURS, SHARPNESS, as_png

IDS = [5, 17, 23, 8, 4, 42, 99, 3, 77, 61, 12]


def pixels(png: bytes, size: tuple[int, int] | None = None) -> np.ndarray:
    """(height, width, 3), from 0 to 255; scaled to a size (width, height) where one is given."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    return np.asarray(image if size is None else image.resize(size, Image.Resampling.BOX), float)


def picture(inside: str) -> str:
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="60" height="40" font-size="13" '
        f'stroke-width="2"><rect width="100%" height="100%" fill="white"/>{inside}</svg>'
    )


def test_every_element_stands_where_the_svg_says():
    svg = picture(
        '<rect x="10" y="4" width="20" height="8" fill="#ff0000"/>'
        '<path stroke="#0000ff" stroke-opacity="0.5" d="M2 30L58 30M50 2L50 20"/>'
        '<rect x="54" y="34" width="6" height="6" fill="#00ff00" fill-opacity="0.5"/>'
    )
    drawn = pixels(as_png(svg))
    assert drawn.shape == (40 * SHARPNESS, 60 * SHARPNESS, 3)

    def at(x: float, y: float) -> list[float]:
        return drawn[int(y * SHARPNESS), int(x * SHARPNESS)].tolist()

    assert at(20, 8) == [255, 0, 0]
    assert at(5, 8) == at(35, 8) == at(20, 15) == [255, 255, 255]
    assert at(30, 30) == pytest.approx([127, 127, 255], abs=4)
    assert at(50, 10) == pytest.approx([127, 127, 255], abs=4)
    assert at(45, 10) == at(30, 25) == [255, 255, 255]
    assert at(57, 37) == pytest.approx([127, 255, 127], abs=4)


def test_text_is_anchored_and_stays_text():
    def columns(inside: str) -> np.ndarray:
        return np.flatnonzero((pixels(as_png(picture(inside))) < 128).any((0, 2))) / SHARPNESS

    for anchor, first, last in (("start", 30, 60), ("end", 0, 30)):
        dark = columns(f'<text x="30" y="20" text-anchor="{anchor}">$x^2$</text>')
        assert first - 1 <= dark.min() < dark.max() <= last + 1
        assert np.ptp(dark) > 25  # five characters: no formula was made of them
    middle = columns('<text x="30" y="20" text-anchor="middle">HHH</text>')
    assert (middle.min() + middle.max()) / 2 == pytest.approx(30, abs=1)


@pytest.mark.parametrize("view", ["head", "model", "neuron"])
def test_a_browser_draws_the_same(view, gpt2, browser, tmp_path):
    cap = ap.capture(gpt2(), IDS)
    made = {
        "head": lambda: ap.head_view(cap, layer=1),
        "model": lambda: ap.model_view(cap),
        "neuron": lambda: ap.neuron_view(cap, 2, 3),
    }[view]()
    file = tmp_path / "still.html"
    file.write_text(f"<!DOCTYPE html><style>body {{ margin: 0 }}</style>{made.still}", "utf-8")
    with opened(browser, file) as tab:
        expected = pixels(tab.page.locator("svg").screenshot())
    drawn = pixels(as_png(made.still), expected.shape[1::-1])
    off = np.abs(drawn - expected)
    assert (expected < 250).mean() > 0.05  # there is something to see
    # The letters are another font's; lines stand within a pixel of each other.
    assert off.mean() < 8
    assert np.abs(drawn[:, ::-1] - expected).mean() > 1.5 * off.mean()
    assert np.abs(drawn[::-1] - expected).mean() > 1.5 * off.mean()


def test_a_picture_is_small_and_the_same_each_time(gpt2):
    view = ap.model_view(ap.capture(gpt2(n_layer=12, n_head=12), IDS))
    assert view._repr_png_() == as_png(view.still)
    assert len(view._repr_png_()) < 200_000
    assert len(np.unique(pixels(view._repr_png_()).reshape(-1, 3), axis=0)) <= COLOURS


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(KeyError, match="circle"):
        as_png(picture('<circle r="3"/>'))

"""A real browser without a network, for the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Frame, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


@dataclass
class Tab:
    """An open page, and what happened in it."""

    page: Page
    errors: list[str] = field(default_factory=list)
    """Uncaught errors, errors in the console, and dialogs."""
    requests: list[str] = field(default_factory=list)
    """What was asked for, but for the page itself."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium with an empty profile; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no page was looked at: none of {', '.join(NAMES)} is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=OPTIONS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, file: Path, *, width: int = 1200, height: int = 900) -> Iterator[Tab]:
    """A page read from a file, in a profile of its own, with the network cut off."""
    context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
    tab = Tab(context.new_page())
    tab.page.set_default_timeout(5_000)
    tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
    tab.page.on(
        "console",
        lambda said: tab.errors.append(said.text) if said.type in ("error", "warning") else None,
    )
    tab.page.on("dialog", lambda dialog: (tab.errors.append(dialog.message), dialog.dismiss()))
    address = file.resolve().as_uri()
    tab.page.on(
        "request",
        lambda request: tab.requests.append(request.url) if request.url != address else None,
    )
    tab.page.goto(address)
    yield tab
    context.close()


_CONTRASTS = """() => {
    const parts = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
    const luminance = colour => {
        const [r, g, b] = parts(colour).map(one => one / 255)
            .map(one => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = one => {
        for (; one; one = one.parentElement) {
            const colour = getComputedStyle(one).backgroundColor;
            if (parts(colour)[3] !== 0) return colour;
        }
    };
    const found = [];
    for (const one of document.querySelectorAll("body *:not(script)")) {
        const own = [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
        if (!own || !one.getClientRects().length) continue;
        const [dark, light] = [luminance(getComputedStyle(one).color), luminance(behind(one))]
            .sort((a, b) => a - b);
        found.push([`${one.tagName}#${one.id}.${one.className}`, (light + 0.05) / (dark + 0.05)]);
    }
    return found;
}"""


def contrasts(page: Page | Frame) -> list[tuple[str, float]]:
    """Each element that shows text of its own, and the contrast of the text with what is behind it.

    By WCAG 2.2's definition: 1 to 21; 4.5 is what it asks of text. Backgrounds must be opaque.
    """
    return [(name, ratio) for name, ratio in page.evaluate(_CONTRASTS)]

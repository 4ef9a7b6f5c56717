"""How large BertViz's pages and attnprobe's are, how long a browser draws, and what it holds.

`make bench-views` writes docs/views.md. Each page is of one random model of GPT-2 small's size, and
is opened in a Chromium of its own without a network. BertViz is taken as it is, with the weights of
an eager forward; the scripts that it fetches from a CDN are read from installed packages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
import transformers
from open_page import SECONDS, chromium, renderers
from real_models import gpt2_small_size
from verify_models import STORY

import attnprobe as ap

ROOT = Path(__file__).parents[1]
TOKENS = (16, 64, 128, 256, 1024)
MEMORY = 8 * 2**30
"""The most that the browser's renderers may take, in bytes."""
PAGE = 2**29
"""The largest page, in bytes: Chromium holds no longer text."""
QUICK = 5.0
"""What is drawn in less than so many seconds is drawn three times, and the median taken."""
EVERY_LINE = 10**9


@dataclass(frozen=True)
class Text:
    """One text: attnprobe's capture of it, and what BertViz asks for."""

    cap: ap.Capture
    attentions: tuple[torch.Tensor, ...]  # a layer each: (1, H, T, T)
    tokens: list[str]

    @classmethod
    def of(cls, lm: ap.LanguageModel, tokens: int) -> Text:
        """The beginning of a story, so many tokens long."""
        assert lm.tokenizer is not None
        ids = torch.tensor([lm.tokenizer(STORY)["input_ids"][:tokens]])
        model = lm.model
        model.set_attn_implementation("sdpa")
        cap = ap.capture(lm, lm.tokenizer.decode(ids[0]))
        assert cap.input_ids.shape == (1, tokens)
        model.set_attn_implementation("eager")
        with torch.no_grad():
            attentions = model(ids, output_attentions=True).attentions
        return cls(cap, attentions, lm.tokenizer.convert_ids_to_tokens(ids[0]))


@dataclass(frozen=True)
class Kind:
    """One way to show a text: what makes the page, and when it is drawn, as JavaScript."""

    name: str
    page: Callable[[Text], str]
    drawn: Callable[[int], str]


@dataclass(frozen=True)
class Drawn:
    """What came of one page."""

    size: int
    seconds: float
    memory: int


def pairs(n: int) -> int:
    """How many pairs of a token and one that it may look at."""
    return n * (n + 1) // 2


Rows = dict[str, list[Drawn | str]]
"""For each kind a cell for each text: what came of it, or why it was stopped."""


def lines(count: Callable[[int], int]) -> Callable[[int], str]:
    """Drawn is what has so many lines."""
    return lambda n: f"document.querySelectorAll('svg line').length >= {count(n)}"


def bertviz_page(name: str, text: Text) -> str:
    """A page of BertViz's own, as it is."""
    import bertviz

    made = getattr(bertviz, name)(text.attentions, text.tokens, html_action="return")
    return f"<!DOCTYPE html><html><head><meta charset=utf-8></head><body>{made.data}</body></html>"


def kinds() -> list[Kind]:
    """The rows of the table."""
    own: list[tuple[str, Callable[[Text], ap.View], Callable[[int], str]]] = [
        (
            "head_view",
            lambda text: ap.head_view(text.cap, max_lines=EVERY_LINE),
            lines(lambda n: 12 * pairs(n)),
        ),
        (
            "model_view",
            lambda text: ap.model_view(text.cap, max_lines=EVERY_LINE),
            lines(lambda n: 144 * pairs(n)),
        ),
        (
            "neuron_view, one head",
            lambda text: ap.neuron_view(text.cap, 5, 1, max_lines=EVERY_LINE),
            lines(pairs),
        ),
    ]
    if hasattr(ap, "attention_view"):
        own.append(
            (
                "attention_view",
                lambda text: ap.attention_view(text.cap, max_weights=EVERY_LINE),
                lambda n: "document.documentElement.dataset.ready === 'yes'",
            )
        )
    return [
        Kind("an empty page", lambda text: "<!DOCTYPE html>", lambda n: "true"),
        Kind(
            "BertViz head_view",
            partial(bertviz_page, "head_view"),
            lines(lambda n: 12 * n * n),
        ),
        Kind(
            "BertViz model_view",
            partial(bertviz_page, "model_view"),
            lines(lambda n: 144 * n * n),
        ),
        *(
            Kind(f"attnprobe {name}", lambda text, view=view: view(text).html, drawn)
            for name, view, drawn in own
        ),
    ]


# One page in a browser of its own, and what watches over it


def measure(file: Path, drawn: str) -> Drawn | str:
    """Open a page in a browser of its own; or why it was stopped."""
    size = file.stat().st_size
    command = [sys.executable, str(ROOT / "scripts/open_page.py"), str(file), drawn]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    start = time.monotonic()
    try:
        while worker.poll() is None:
            if renderers(psutil.Process(worker.pid)) > MEMORY:
                return "too large"
            if time.monotonic() - start > 2 * SECONDS:
                return f"> {SECONDS} s"
            time.sleep(0.1)
    finally:
        end(worker)
    assert worker.stdout is not None
    found = json.loads(worker.stdout.read())
    if not found or found["seconds"] > SECONDS:
        return f"> {SECONDS} s"
    return Drawn(size, found["seconds"], found["memory"])


def end(worker: subprocess.Popen[str]) -> None:
    """Stop a worker and its browser, if they still run."""
    if worker.poll() is None:
        for process in psutil.Process(worker.pid).children(recursive=True):
            process.kill()
        worker.kill()
    worker.wait()


def cell(kind: Kind, text: Text, folder: Path) -> Drawn | str:
    """The median of three where one is quick."""
    tokens = len(text.tokens)
    file = folder / "page.html"
    file.write_text(kind.page(text), encoding="utf-8")
    first = measure(file, kind.drawn(tokens))
    if isinstance(first, str) or first.seconds >= QUICK:
        return first
    more = [one for _ in range(2) if isinstance(one := measure(file, kind.drawn(tokens)), Drawn)]
    return sorted([first, *more], key=lambda one: one.seconds)[(1 + len(more)) // 2]


def row(kind: Kind, texts: list[Text], folder: Path) -> list[Drawn | str]:
    """A cell for each text, up to the first that fails; the rest is not tried."""
    found: list[Drawn | str] = []
    for text in texts:
        last = found[-1] if found else None
        grown = (len(text.tokens) / len(texts[len(found) - 1].tokens)) ** 2 if found else 1.0
        if isinstance(last, str):
            found.append("–")
        elif last is not None and last.size * grown > PAGE:
            found.append("too large")
        else:
            found.append(cell(kind, text, folder))
        print(f"{kind.name}, {len(text.tokens)} tokens: {found[-1]}", file=sys.stderr)
    return found


# The page of the results


def table(tokens: list[int], rows: Rows, what: Callable[[Drawn], str]) -> str:
    """One number of each cell."""
    head = " | ".join(f"{n:,} tokens" for n in tokens)
    body = "\n".join(
        f"| {name} | {' | '.join(one if isinstance(one, str) else what(one) for one in cells)} |"
        for name, cells in rows.items()
    )
    return f"| | {head} |\n|---|{'---:|' * len(tokens)}\n{body}\n"


def processor() -> str:
    """The processor's name, as Linux tells it."""
    info = Path("/proc/cpuinfo")
    found = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in found if line.startswith("model name")]
    return names[0] if names else platform.machine()


def report(tokens: list[int], rows: Rows, browser: str) -> str:
    """docs/views.md."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("bertviz", "torch", "transformers"))
    memory = psutil.virtual_memory().total / 2**30
    return f"""# Views: sizes and times

What a page takes for all 12 × 12 heads of a model of GPT-2 small's size (random weights, GPT-2's
own tokenizer), but for `neuron_view`, which is of one head. Written by `make bench-views`.

Each page was opened in a new {browser}, at 1,200 × 900 pixels, without a network; BertViz's scripts
from a CDN were read from the disk. `head_view` draws one layer at a time, of the twelve it holds;
`model_view` draws all. BertViz holds and draws every pair of tokens, attnprobe's views those that
are not masked. A page was stopped after {SECONDS} s, or where its renderers took more than
{MEMORY / 2**30:.0f} GB; a page of more than {PAGE / 2**20:.0f} MB was not tried (“too large”), nor
what is longer than what was stopped (“–”). attnprobe refuses, unless told otherwise, what is slow:
`max_lines` and `max_weights` were raised for this.

## The page

{table(tokens, rows, lambda one: read_size(one.size))}
## Seconds to draw

From the start of loading until every line, or the canvas, is drawn and painted; the median of three
where it takes less than {QUICK:.0f} s.

{table(tokens, rows, lambda one: f"{one.seconds:.1f}")}
## The browser's memory

What its renderer processes hold once the page is drawn (resident; an empty page is what they take
for themselves).

{table(tokens, rows, lambda one: read_size(one.memory))}
## The machine

{processor()}, {os.cpu_count()} cores, {memory:.0f} GB of memory, no GPU; {platform.system()},
Python {platform.python_version()}, attnprobe {ap.__version__}, {versions}.
"""


def read_size(size: float) -> str:
    mega = size / 2**20
    return f"{mega:,.1f} MB" if mega < 10 else f"{mega:,.0f} MB"


def browser_version() -> str:
    with chromium() as browser:
        return f"Chromium {browser.version}"


def main() -> int:
    """Measure all and write docs/views.md."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "views.md")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    lm = gpt2_small_size()
    texts = [Text.of(lm, tokens) for tokens in given.tokens]
    with tempfile.TemporaryDirectory() as folder:
        rows = {kind.name: row(kind, texts, Path(folder)) for kind in kinds()}
    written = report(given.tokens, rows, browser_version())
    print(written)
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

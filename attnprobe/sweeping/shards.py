"""Documents → passages → shards: the corpus, cut in the same way whoever computes it.

A shard is what is computed, written and, after a crash, not computed again. Where it begins and
ends hangs on the documents alone, so that no choice of batch size, workers or engine moves a number
from one to another, and the sums are always added up in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from attnprobe.sweeping.sources import Document

PASSAGE = 2**14
"""The most characters of a passage. Longer documents are cut, between words where there are any."""

SHARD = 2**16
"""How many characters make a shard."""


@dataclass(frozen=True)
class Passage:
    """A document, or a stretch of one."""

    document: str
    number: int  # within the document, from 0
    text: str

    @property
    def name(self) -> str:
        """What it is called where it is named."""
        return f"{self.document}, passage {self.number}" if self.number else self.document


@dataclass(eq=False)
class Shard:
    """Some passages, one after another.

    Attributes:
        number: from 0.
        damaged: names and reasons of the documents that could not be read.
        documents: how many documents end in it, read or damaged.
        size: how much of the corpus it is, in the source's own unit; of a long document, about.
    """

    number: int
    passages: list[Passage] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    documents: int = 0
    size: int = 0

    @property
    def characters(self) -> int:
        """How long its passages are."""
        return sum(len(one.text) for one in self.passages)

    @property
    def sha256(self) -> str:
        """Of all that it holds: names, texts, and what was damaged."""
        digest = hashlib.sha256()
        for one in self.passages:
            _add(digest, one.document, str(one.number), one.text)
        for pair in self.damaged:
            _add(digest, *pair)
        return digest.hexdigest()


def _add(digest: hashlib._Hash, *parts: str) -> None:
    for part in parts:
        content = part.encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)


def shards(documents: Iterable[Document]) -> Iterator[Shard]:
    """Cut a corpus into shards; at most one is held."""
    shard, length, before = Shard(0), 0, 0
    for document in documents:
        if document.damage:
            shard.damaged.append((document.name, document.damage))
        number = told = 0
        for text in passages(document.text):
            if length and length + len(text) > SHARD:
                yield shard
                shard, length = Shard(shard.number + 1), 0
            shard.passages.append(Passage(document.name, number, text))
            part = min(len(text), document.done - before - told)
            shard.size += part
            told += part
            length, number = length + len(text), number + 1
        if not number and not document.damage:
            shard.damaged.append((document.name, "empty: there is nothing to attend to"))
        shard.documents += 1
        shard.size += document.done - before - told
        before = document.done
        length += 1  # many damaged or empty ones make a shard as well
    if shard.documents or shard.passages:
        yield shard


def passages(text: Iterable[str]) -> Iterator[str]:
    """Stretches of a text of at most `PASSAGE` characters; what is white space alone is none."""
    held = ""
    for block in text:
        held += block
        while len(held) > PASSAGE:
            at = boundary(held, PASSAGE, paragraphs=True)
            if not held[:at].isspace():
                yield held[:at]
            held = held[at:]
    if held and not held.isspace():
        yield held


def boundary(text: str, limit: int, *, paragraphs: bool) -> int:
    """Where to cut a text that is longer than `limit`: in its second half after the last empty
    line, where paragraphs count, else before the last white space, else at the limit."""
    at = text.rfind("\n\n", limit // 2, limit) if paragraphs else -1
    if at >= 0:
        return at + 2
    at = max(text.rfind(space, limit // 2, limit) for space in (" ", "\n", "\t", "\u3000"))
    return at if at > 0 else limit

"""A corpus → its documents, one at a time: files, rows of a data set, an iterator, stdin."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from attnprobe.errors import InputError
from attnprobe.spans import refuse_surrogates

Corpus = str | os.PathLike[str] | IO[Any] | Iterable[Any]
"""A file, a folder of files, "-" or an open file for one text, or texts or rows in a row."""

SUFFIXES = (".txt", ".jsonl", ".parquet")
STDIN = "-"

NAMED = 500
"""How many damaged documents, or skipped files, the manifest names; all are counted."""

_READ = 2**16  # characters or bytes at a time
_ROWS = 64  # of a Parquet file at a time


class DamagedError(Exception):
    """Why a document cannot be read; caught where documents are counted."""


@dataclass(frozen=True, eq=False)
class Document:
    """One document.

    Attributes:
        name: the file, and the line (from 1) or row (from 0) in it; or its number in an iterator,
            from 0.
        text: its text in stretches of any length, as it is read.
        damage: why it cannot be read, instead.
        done: how much of the corpus is behind when it has been read, in the source's own unit.
    """

    name: str
    text: Iterable[str]
    damage: str
    done: int


@dataclass(frozen=True, eq=False)
class Source:
    """A corpus that can be read.

    Attributes:
        total: how much there is, in bytes, rows or items; None where nothing tells.
        skipped: the files of other kinds in a folder.
    """

    name: str
    total: int | None
    documents: Iterator[Document]
    skipped: tuple[str, ...] = ()

    @property
    def skipped_files(self) -> dict[str, Any]:
        """How many files were skipped, and the names of the first."""
        return {"count": len(self.skipped), "named": list(self.skipped[:NAMED])}


def source(corpus: Corpus, field: str, spool: Path) -> Source:
    """Open a corpus; what stands in its files is read later, document by document.

    Args:
        corpus: see `Corpus`.
        field: of rows and JSON objects, where the text is.
        spool: a file to keep standard input in, which can be read once only.

    Raises:
        InputError: no such file, one of another kind, a folder without any; a Parquet file without
            the field; something that holds no documents.
    """
    if isinstance(corpus, os.PathLike) or (isinstance(corpus, str) and corpus != STDIN):
        return _of_files(Path(corpus), field)
    stream = sys.stdin if isinstance(corpus, str) else corpus
    if hasattr(stream, "read"):
        content = getattr(stream, "buffer", stream)
        with spool.open("wb") as kept:
            while block := content.read(_READ):
                kept.write(block.encode() if isinstance(block, str) else block)
        name, size = getattr(stream, "name", "a stream"), spool.stat().st_size
        name = "stdin" if name == "<stdin>" else str(name)
        return Source(name, size, iter([_text_file(spool, name, size)]))
    if isinstance(corpus, Mapping) or not isinstance(corpus, Iterable):
        raise InputError(
            "expected a file, a folder, '-' for standard input, a data set's split or an iterator "
            f"of texts for a corpus, got {type(corpus).__name__}"
        )
    total = len(corpus) if isinstance(corpus, Sized) else None
    return Source(type(corpus).__name__, total, _items(corpus, field))


def _of_files(path: Path, field: str) -> Source:
    skipped: tuple[str, ...] = ()
    if path.is_dir():
        there = sorted(one for one in path.rglob("*") if one.is_file())
        files = [one for one in there if one.suffix.lower() in SUFFIXES]
        others = (one for one in there if one.suffix.lower() not in SUFFIXES)
        skipped, base = tuple(one.relative_to(path).as_posix() for one in others), path
    else:
        files, base = [path], path.parent
    if not path.exists() or not files:
        what = "in this folder there is no" if path.is_dir() else "there is no such"
        raise InputError(f"cannot read {path}: {what} file; expected {', '.join(SUFFIXES)}")
    for file in files:
        if file.suffix.lower() not in SUFFIXES:
            raise InputError(f"expected a corpus in {', '.join(SUFFIXES)}, got {file.name}")
        if file.suffix.lower() == ".parquet":
            _check_field(file, field)
    sizes = [one.stat().st_size for one in files]
    return Source(path.name, sum(sizes), _files(files, sizes, base, field), skipped)


def _files(files: list[Path], sizes: list[int], base: Path, field: str) -> Iterator[Document]:
    before = 0
    for file, size in zip(files, sizes, strict=True):
        name = file.relative_to(base).as_posix()
        match file.suffix.lower():
            case ".txt":
                yield _text_file(file, name, before + size)
            case ".jsonl":
                yield from _lines(file, name, before, field)
            case _:
                yield from _rows(file, name, before, size, field)
        before += size


def _text_file(file: Path, name: str, done: int) -> Document:
    """A file that is one document: looked through first, so that a damaged one is left out."""
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with file.open("rb") as content:
            while block := content.read(_READ):
                decoder.decode(block)
                at += len(block)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        return Document(name, (), f"not UTF-8 near byte {at + error.start}", done)
    except OSError as error:
        return Document(name, (), f"cannot be read: {error.strerror}", done)
    return Document(name, _blocks(file), "", done)


def _blocks(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8-sig") as content:
        while block := content.read(_READ):
            yield block


def _lines(file: Path, name: str, before: int, field: str) -> Iterator[Document]:
    done = before
    with file.open("rb") as content:
        for number, line in enumerate(content, 1):
            done += len(line)
            if line.strip():
                yield _document(
                    f"{name}:{number}", done, lambda line=line: _parsed(line.strip(), field)
                )


def _parsed(line: bytes, field: str) -> Any:
    """What a line of JSON holds as its text."""
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DamagedError(f"not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise DamagedError(f"expected a JSON object, got {type(found).__name__}")
    return _field(found, field)


def _field(row: Mapping[Any, Any], field: str) -> Any:
    if field not in row:
        raise DamagedError(f"no field {field!r}: it has {', '.join(map(str, row))}")
    return row[field]


def _check_field(file: Path, field: str) -> None:
    """Refuse a Parquet file that has other columns; a damaged one is a damaged document."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        names = parquet.read_schema(file).names
    except (OSError, pa.ArrowException):
        return
    if field not in names:
        raise InputError(
            f"{file.name} has no column {field!r}: it has {', '.join(names)}. Name one with field"
        )


def _rows(file: Path, name: str, before: int, size: int, field: str) -> Iterator[Document]:
    import pyarrow as pa
    from pyarrow import parquet

    at = 0
    try:
        with parquet.ParquetFile(file) as opened:
            count = max(opened.metadata.num_rows, 1)
            for batch in opened.iter_batches(_ROWS, columns=[field]):
                for cell in batch.column(0):
                    done = before + size * (at + 1) // count
                    yield _document(f"{name}:{at}", done, lambda cell=cell: _cell(cell))
                    at += 1
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        yield Document(f"{name}:{at} and after", (), f"damaged Parquet: {reason}", before + size)


def _cell(cell: Any) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        raise DamagedError(f"not UTF-8 at byte {error.start}") from None


def _items(corpus: Iterable[Any], field: str) -> Iterator[Document]:
    for number, item in enumerate(corpus):
        yield _document(
            f"document {number}",
            number + 1,
            lambda item=item: _field(item, field) if isinstance(item, Mapping) else item,
        )


def _document(name: str, done: int, read: Any) -> Document:
    """A document that is read at once, by a function that gives its text."""
    try:
        text = read()
        if not isinstance(text, str):
            raise DamagedError(f"expected text, got {type(text).__name__}")
        refuse_surrogates(text)
    except DamagedError as error:
        return Document(name, (), str(error), done)
    except InputError as error:
        return Document(name, (), str(error).partition(":")[0], done)
    return Document(name, (text,), "", done)

"""Which word looks most at which: exact counts for each head, on disk a shard at a time.

Of each word with letters or digits the row of its last token counts, the first that has seen the
whole word, and the key with the largest weight in it, whatever word that is of. Rows that look most
at the text's first token are left out: many heads rest there, whatever stands there.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnprobe.sweeping.texts import Text

MERGED = 2**20
"""How many rows of the shards' counts to merge at a time: beyond it, a part of the words is."""

_SHIFT = np.int64(32)
_NONE = np.int64(-1)

Place = tuple[int, int]
"""Layer and head."""


class PairCounter:
    """Counts the pairs of one shard."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # of each word
        self._found: dict[int, list[np.ndarray]] = {}  # by layer: (rows, H), query · 2³² + key

    def words_of(self, texts: Sequence[Text], length: int) -> tuple[np.ndarray, np.ndarray]:
        """The number of each token's word, (B, T), and where a word's last token stands."""
        numbers, ends = (
            np.zeros((len(texts), length), np.int64),
            np.zeros((len(texts), length), bool),
        )
        for at, text in enumerate(texts):
            own = [self._number(word.label) for word in text.words.words]
            numbers[at, : len(text.ends)] = np.array(own)[list(text.words.word_of)]
            ends[at, : len(text.ends)] = text.ends
        return numbers, ends

    def _number(self, word: str) -> int:
        return self._numbers.setdefault(word, len(self._numbers))

    def take(self, layer: int, words: tuple[np.ndarray, np.ndarray], strongest: np.ndarray) -> None:
        """Count one call: words as `words_of` gives them, and the strongest keys, (B, H, T)."""
        numbers, ends = words
        text, row = ends.nonzero()
        keys = strongest[text, :, row]  # (rows, H)
        pairs = (numbers[text, row] << _SHIFT)[:, None] | numbers[text[:, None], keys]
        self._found.setdefault(layer, []).append(np.where(keys > 0, pairs, _NONE))

    def drop(self, layers: Sequence[int]) -> None:
        """Forget some layers."""
        for layer in layers:
            self._found.pop(layer, None)

    def write(self, file: Path) -> None:
        """Write the counts as Parquet: a row group for each head."""
        import pyarrow as pa
        from pyarrow import parquet

        read = pa.array(list(self._numbers), pa.string())
        with parquet.ParquetWriter(file, _schema(), compression="lz4") as writer:
            for layer, found in sorted(self._found.items()):
                for head, column in enumerate(np.concatenate(found).T):
                    pairs, counts = np.unique(column[column != _NONE], return_counts=True)
                    queries, keys = pairs >> _SHIFT, pairs & np.int64(2**32 - 1)
                    size = len(pairs)
                    columns = [
                        np.full(size, layer, np.int32),
                        np.full(size, head, np.int32),
                        read.take(pa.array(queries)),
                        read.take(pa.array(keys)),
                        counts.astype(np.int64),
                    ]
                    writer.write_table(pa.table(columns, schema=_schema()), max(size, 1))


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("layer", pa.int32()),
            ("head", pa.int32()),
            ("query", pa.string()),
            ("key", pa.string()),
            ("count", pa.int64()),
        ]
    )


def most_frequent(files: Sequence[Path], top: int, left_out: set[int]) -> Any:
    """The most frequent pairs of each head over several shards: a table of pyarrow.

    Every pair is counted, not the likely ones alone: of a head with many, a part of the words is
    merged at a time, so that memory does not grow with the corpus.
    """
    import pyarrow as pa
    from pyarrow import parquet

    opened = [parquet.ParquetFile(file, read_dictionary=["query", "key"]) for file in files]
    try:
        groups: dict[Place, list[tuple[Any, int]]] = {}
        for file in opened:
            for group in range(file.num_row_groups):
                place = _place(file.metadata.row_group(group))
                if place is not None and place[0] not in left_out:
                    groups.setdefault(place, []).append((file, group))
        tables = [_of_head(place, groups[place], top) for place in sorted(groups)]
    finally:
        for file in opened:
            file.close()
    return pa.concat_tables([_schema().empty_table(), *tables])


def _place(group: Any) -> Place | None:
    """Of which head a row group is; None of an empty one."""
    if not group.num_rows:
        return None
    layer, head = (group.column(at).statistics.min for at in (0, 1))
    return layer, head


def _of_head(place: Place, groups: list[tuple[Any, int]], top: int) -> Any:
    import pyarrow as pa

    rows = sum(file.metadata.row_group(group).num_rows for file, group in groups)
    parts = -(-rows // MERGED)
    best = _schema().empty_table().select(["query", "key", "count"])
    for part in range(parts):
        found = [_part(file, group, part, parts) for file, group in groups]
        best = pa.concat_tables([best, _summed(found, top)])
        pa.default_memory_pool().release_unused()  # else it keeps what the largest head took
        # Ties go by the words, so that the same are kept whatever the order of merging.
        order = [("count", "descending"), ("query", "ascending"), ("key", "ascending")]
        best = best.sort_by(order)[:top]
    layer, head = (pa.repeat(pa.scalar(one, pa.int32()), len(best)) for one in place)
    columns = [layer, head, *(best[name].combine_chunks() for name in ("query", "key", "count"))]
    return pa.table(columns, schema=_schema())


def _summed(found: list[Any], top: int) -> Any:
    """The counts of equal pairs added up: the `top` largest, and those that are as large. `found`
    is emptied, so that memory need not hold it and what is made of it."""
    import pyarrow as pa

    some = pa.concat_tables(found)
    found.clear()
    some = some.unify_dictionaries()
    query, key = (some[name].combine_chunks() for name in ("query", "key"))
    codes = pa.table([query.indices, key.indices, some["count"]], ["query", "key", "count"])
    del some
    summed = codes.group_by(["query", "key"]).aggregate([("count", "sum")])
    del codes
    count = summed["count_sum"].to_numpy()
    if len(count) > top:
        large = pa.array(count >= np.partition(count, -top)[-top])
        summed = summed.filter(large)
    words = [query.dictionary.take(summed["query"]), key.dictionary.take(summed["key"])]
    return pa.table([*words, summed["count_sum"]], ["query", "key", "count"])


def _part(file: Any, group: int, part: int, parts: int) -> Any:
    """The pairs of a row group whose query word belongs to this part of the words."""
    import pyarrow as pa

    # One thread: for so few rows, starting others takes longer than reading.
    columns = ["query", "key", "count"]
    found = file.read_row_group(group, columns=columns, use_threads=False)
    if parts > 1:
        query = found["query"].combine_chunks()
        own = np.array([_bucket(word) % parts == part for word in query.dictionary.to_pylist()])
        found = found.filter(pa.array(own[query.indices.to_numpy()]))
    return found


def _bucket(word: str) -> int:
    return zlib.crc32(word.encode())

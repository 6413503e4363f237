"""The corpus as the index keeps it: one row per sentence, in reading order.

A sentence of n tokens owns n + 1 consecutive integers: prefix = the sentence's offset + the
prefix's length p. So one integer names a prefix, and sentence, text and next token follow from it.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int64
from numpy import ndarray

from ffmem.errors import StoreError
from ffmem.files import committing

GROUP = 512
"""Sentences in a row group: what a look-up reads."""

SCHEMA = pa.schema(
    [
        ("sentence", pa.int64()),
        ("source", pa.int32()),
        ("offset", pa.int64()),
        ("text", pa.string()),
        ("ids", pa.list_(pa.int32())),
        ("starts", pa.list_(pa.int32())),
        ("ends", pa.list_(pa.int32())),
    ]
)


class StoredSentence(NamedTuple):
    """One sentence: its text if it has one, its tokens, and where each stands in the text."""

    sentence: int
    source: int
    offset: int
    text: str | None
    ids: list[int]
    starts: list[int] | None
    ends: list[int] | None


class Totals(NamedTuple):
    """What a source came to."""

    hash: str
    n_sentences: int
    n_tokens: int

    @property
    def n_places(self) -> int:
        """Return how many integers its prefixes own."""
        return self.n_tokens + self.n_sentences


def write_sentences(
    path: Path, rows: Iterable[tuple[str | None, list[int], list[int] | None, list[int] | None]]
) -> Totals:
    """Write the (text, ids, starts, ends) of one source's sentences, and return its totals."""
    digest = hashlib.sha256()
    n_sentences = n_tokens = 0
    with committing(path) as temporary, _writer(temporary) as writer:
        group: list[StoredSentence] = []
        for text, ids, starts, ends in rows:
            offset = n_tokens + n_sentences
            group.append(StoredSentence(n_sentences, 0, offset, text, ids, starts, ends))
            content = np.asarray([len(ids), *ids], np.int64).tobytes()
            digest.update(content if text is None else text.encode() + b"\0" + content)
            n_sentences += 1
            n_tokens += len(ids)
            if len(group) == GROUP:
                writer.write_table(_table(group))
                group = []
        if group:
            writer.write_table(_table(group))
    return Totals(digest.hexdigest(), n_sentences, n_tokens)


def join_sentences(path: Path, parts: Iterable["Sentences"]) -> None:
    """Write the sentences of several corpora as one, numbers and offsets running on."""
    n_sentences = n_places = n_sources = 0
    group: list[StoredSentence] = []
    with committing(path) as temporary, _writer(temporary) as writer:
        for part in parts:
            for row in part.rows(0, part.n_sentences):
                group.append(
                    row._replace(
                        sentence=row.sentence + n_sentences,
                        source=row.source + n_sources,
                        offset=row.offset + n_places,
                    )
                )
                if len(group) == GROUP:
                    writer.write_table(_table(group))
                    group = []
            last = part.row(part.n_sentences - 1)
            n_sentences += part.n_sentences
            n_places += last.offset + len(last.ids) + 1
            n_sources += last.source + 1
        if group:
            writer.write_table(_table(group))


class Sentences:
    """A reader of `sentences.parquet`: by number, by prefix, or in ranges."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(
                f"Cannot read the sentences of the index, {path}: {error}."
                " The file is damaged or missing: make the index again."
            ) from None
        metadata = self._file.metadata
        self.n_sentences: int = metadata.num_rows
        column = SCHEMA.get_field_index("offset")
        groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
        self._first_rows = np.cumsum([0] + [group.num_rows for group in groups])
        self._first_offsets = np.array(
            [group.column(column).statistics.min for group in groups], np.int64
        )
        self._cache: tuple[int, pa.Table] | None = None

    def row(self, sentence: int) -> StoredSentence:
        """Return the sentence of a number."""
        group = int(np.searchsorted(self._first_rows, sentence, side="right")) - 1
        return _stored(self._group(group), sentence - int(self._first_rows[group]))

    def at(self, prefixes: Iterable[int]) -> dict[int, StoredSentence]:
        """Return the sentence that owns each prefix, reading every row group once."""
        found: dict[int, StoredSentence] = {}
        for prefix in sorted(set(prefixes)):
            group = int(np.searchsorted(self._first_offsets, prefix, side="right")) - 1
            table = self._group(group)
            offsets = table["offset"].to_numpy()
            found[prefix] = _stored(table, int(np.searchsorted(offsets, prefix, side="right")) - 1)
        return found

    def rows(self, first: int, n: int) -> Iterator[StoredSentence]:
        """Return the n sentences from number `first` on, a row group in memory at a time."""
        for sentence in range(first, first + n):
            yield self.row(sentence)

    def lengths(self) -> Iterator[Int64[ndarray, " sentence"]]:
        """Return the number of tokens of every sentence, a row group at a time."""
        for group in range(len(self._first_offsets)):
            ids = self._file.read_row_group(group, columns=["ids"])["ids"]
            yield np.diff(ids.combine_chunks().offsets.to_numpy()).astype(np.int64)

    def _group(self, group: int) -> pa.Table:
        if self._cache is None or self._cache[0] != group:
            self._cache = (group, self._file.read_row_group(group).combine_chunks())
        return self._cache[1]


def divided(sentence: StoredSentence, length: int, shown: Callable[[int], str]) -> tuple[str, str]:
    """Return the text before and after the first `length` tokens of a sentence.

    Both are slices of the source text. Where the place falls inside a character, the tokens that
    share it are shown as their bytes; where there is no text, all tokens as they are shown.
    """
    text, ids, starts, ends = sentence.text, sentence.ids, sentence.starts, sentence.ends
    if text is None or starts is None or ends is None:
        return "".join(map(shown, ids[:length])), "".join(map(shown, ids[length:]))
    if length == 0:
        return "", text
    first = last = length - 1
    if length == len(ids) or starts[length] >= ends[last]:
        return text[: ends[last]], text[ends[last] :]
    while first > 0 and starts[first] < ends[first - 1]:
        first -= 1
    while last + 1 < len(ids) and starts[last + 1] < ends[last]:
        last += 1
    before = text[: starts[first]] + "".join(map(shown, ids[first:length]))
    return before, "".join(map(shown, ids[length : last + 1])) + text[ends[last] :]


def _stored(table: pa.Table, row: int) -> StoredSentence:
    return StoredSentence(*(table.column(name)[row].as_py() for name in SCHEMA.names))


def _table(group: list[StoredSentence]) -> pa.Table:
    columns = zip(*group, strict=True)
    arrays = [
        pa.array(list(column), field.type) for column, field in zip(columns, SCHEMA, strict=True)
    ]
    return pa.table(arrays, schema=SCHEMA)


def _writer(path: Path) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, SCHEMA, compression="zstd", use_dictionary=False)

"""The corpus as the index keeps it: one row per sentence, in reading order.

A sentence of n tokens owns n + 1 consecutive integers: prefix = the sentence's offset + the
prefix's length p. So one integer names a prefix, and sentence, text and next token follow from it.
"""

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy import ndarray

from ffmem.errors import FfmemError, StoreError
from ffmem.files import committing

GROUP = 128
"""Sentences in a row group, the last aside: what a look-up of one sentence reads."""

KEPT = 256
"""Row groups kept in memory: some kilobytes for each of their sentences that was looked at."""

NO_PREFIX = -1
"""The prefix that is none: what stands in a slot of a list that nothing has filled."""

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
            digest.update(content(text, ids))
            n_sentences += 1
            n_tokens += len(ids)
            if len(group) == GROUP:
                writer.write_table(_table(group))
                group = []
        if group:
            writer.write_table(_table(group))
    return Totals(digest.hexdigest(), n_sentences, n_tokens)


def content(text: str | None, ids: list[int]) -> bytes:
    """Return what the hash of a source takes in of one sentence."""
    tokens = np.asarray([len(ids), *ids], np.int64).tobytes()
    return tokens if text is None else text.encode() + b"\0" + tokens


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

    def __init__(self, path: Path, file: pa.NativeFile | None = None) -> None:
        self.path = path
        with self._explaining():  # a file that is open already may lie anywhere
            self._file = pq.ParquetFile(path if file is None else file, memory_map=file is None)
        self.n_sentences: int = self._file.metadata.num_rows
        self.n_groups: int = self._file.metadata.num_row_groups
        # Read where a search looks, not for all groups: `show` must not grow with the corpus.
        self._first_offset = cache(self._read_first_offset)
        # Whoever looks at many memories meets the same groups again and again.
        self._group = lru_cache(KEPT)(self._read_group)
        self._reading = threading.Lock()  # Arrow's reader is not for several threads at once

    def row(self, sentence: int) -> StoredSentence:
        """Return the sentence of a number."""
        if not 0 <= sentence < self.n_sentences:
            raise FfmemError(
                f"There is no sentence {sentence}: the corpus has sentences 0 to"
                f" {self.n_sentences - 1}."
            )
        return next(self.rows(sentence, 1))

    def at(self, prefixes: Iterable[int]) -> dict[int, StoredSentence]:
        """Return the sentence that owns each prefix, reading every row group once."""
        ordered = sorted(set(prefixes))
        numbers = range(self.n_groups)
        groups = [bisect_right(numbers, prefix, key=self._first_offset) - 1 for prefix in ordered]
        if not ordered:
            return {}
        found: dict[int, StoredSentence] = {}
        last: StoredSentence | None = None
        for prefix, group in zip(ordered, groups, strict=True):
            if last is None or not last.offset <= prefix <= last.offset + len(last.ids):
                last = self._group(group).at(prefix)
            found[prefix] = last
        return found

    def rows(self, first: int, n: int) -> Iterator[StoredSentence]:
        """Return the n sentences from number `first` on, a row group in memory at a time."""
        past = first + n
        for group in range(first // GROUP, -(-past // GROUP)):
            begin = group * GROUP
            inside = slice(max(first - begin, 0), min(past - begin, GROUP))
            yield from _stored(self._read([group])[inside])

    def lengths(self) -> Iterator[ndarray]:
        """Return the number of tokens of every sentence (int64), a row group at a time."""
        # A plain annotation: jaxtyping would double the time that `ffmem show` takes to start.
        for group in range(self.n_groups):
            ids = self._read([group], ["ids"])["ids"]
            yield np.diff(ids.combine_chunks().offsets.to_numpy()).astype(np.int64)

    def tokens(self) -> tuple[ndarray, ndarray]:
        """Return the offset of every sentence (int64), and all tokens in a row (int32)."""
        table = self._read(list(range(self.n_groups)), ["offset", "ids"])
        ids = table["ids"].combine_chunks()
        return table["offset"].to_numpy(), ids.values.to_numpy()

    def _read_first_offset(self, group: int) -> int:
        column = self._file.metadata.row_group(group).column(SCHEMA.get_field_index("offset"))
        return int(column.statistics.min)

    def _read_group(self, group: int) -> "_Group":
        return _Group(self._read([group]))

    def _read(self, groups: list[int], columns: list[str] | None = None) -> pa.Table:
        with self._explaining(), self._reading:
            # Threads cost more than they bring for groups this small.
            return self._file.read_row_groups(groups, columns, use_threads=False)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowInvalid) as error:
            reason = " ".join(str(error).split())
            raise StoreError(
                f"Cannot read the sentences of the index, {self.path}: {reason}."
                " The file is damaged or missing: make the index again."
            ) from None


class _Group:
    """A row group in memory, whose sentences are decoded when somebody looks at them."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._offsets: list[int] = table["offset"].to_pylist()
        self._decoded: dict[int, StoredSentence] = {}

    def at(self, prefix: int) -> StoredSentence:
        """Return the sentence that owns a prefix."""
        row = bisect_right(self._offsets, prefix) - 1
        if row not in self._decoded:
            # One row alone: `take` would import all of pyarrow.compute, a tenth of a second.
            self._decoded[row] = next(_stored(self._table[row : row + 1]))
        return self._decoded[row]


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


def _stored(table: pa.Table) -> Iterator[StoredSentence]:
    columns = (table[name].to_pylist() for name in SCHEMA.names)
    return map(StoredSentence._make, zip(*columns, strict=True))


def _table(group: list[StoredSentence]) -> pa.Table:
    columns = zip(*group, strict=True)
    arrays = [
        pa.array(list(column), field.type) for column, field in zip(columns, SCHEMA, strict=True)
    ]
    return pa.table(arrays, schema=SCHEMA)


def _writer(path: Path) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, SCHEMA, compression="zstd", use_dictionary=False)

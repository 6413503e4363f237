"""`sentences.parquet`: the corpus of an index, one row per sentence, in reading order.

A sentence of n tokens owns n + 1 consecutive integers: prefix = the sentence's offset + the
prefix's length p. So one integer names a prefix; sentence, text and next token follow from it.
"""

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy import ndarray

from ffmem.errors import FfmemError
from ffmem.files import committing
from ffmem.hub import HubFile
from ffmem.indexing.tables import WRITING, TableFile, open_table, read_errors

if TYPE_CHECKING:
    from ffmem.corpus.sentences import TokenSentence

GROUP = 128
"""Sentences in a row group, which is what a look-up of one sentence reads."""

CACHED_GROUPS = 256
"""Row groups to keep in memory, at some kilobytes for each sentence that was decoded."""

NO_PREFIX = -1
"""Marks an empty slot in a list of triggers."""

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

IS_CONTENT = pa.field("is_content", pa.list_(pa.bool_()))
"""A further column, if some tokens end no prefix (`--content-only`)."""


class StoredSentence(NamedTuple):
    """A sentence: its text, if it has one, its tokens, and their character ranges in the text."""

    sentence: int
    source: int
    offset: int
    text: str | None
    ids: list[int]
    starts: list[int] | None
    ends: list[int] | None
    is_content: list[bool] | None = None
    """Whether a prefix ends at each token. None: at every token."""

    @property
    def n_prefixes(self) -> int:
        """How many prefixes it has."""
        return len(self.ids) if self.is_content is None else sum(self.is_content)


class Totals(NamedTuple):
    """Totals of a source."""

    hash: str
    n_sentences: int
    n_tokens: int
    left_out: int
    """Tokens that end no prefix."""

    @property
    def n_places(self) -> int:
        """How many integers its sentences own."""
        return self.n_tokens + self.n_sentences


def write_sentences(
    path: Path, rows: "Iterable[TokenSentence]", content_only: bool = False
) -> Totals:
    """Write the sentences of one source, and return its totals."""
    digest = hashlib.sha256()
    n_sentences = n_tokens = left_out = 0

    def sentences() -> Iterator[StoredSentence]:
        nonlocal n_sentences, n_tokens, left_out
        for row in rows:
            yield StoredSentence(n_sentences, 0, n_tokens + n_sentences, *row)
            digest.update(hash_input(row.text, row.ids))
            n_sentences += 1
            n_tokens += len(row.ids)
            left_out += len(row.ids) - row.n_prefixes

    _write(path, sentences(), content_only)
    return Totals(digest.hexdigest(), n_sentences, n_tokens, left_out)


def hash_input(text: str | None, ids: list[int]) -> bytes:
    """Return the bytes of one sentence that go into the hash of its source."""
    tokens = np.asarray([len(ids), *ids], np.int64).tobytes()
    return tokens if text is None else text.encode() + b"\0" + tokens


def join_sentences(path: Path, parts: Iterable["Sentences"]) -> None:
    """Write the sentences of several corpora as one, with numbers and offsets continued."""
    parts = list(parts)

    def sentences() -> Iterator[StoredSentence]:
        n_sentences = n_places = n_sources = 0
        for part in parts:
            for row in part.rows(0, part.n_sentences):
                yield row._replace(
                    sentence=row.sentence + n_sentences,
                    source=row.source + n_sources,
                    offset=row.offset + n_places,
                )
            last = part.row(part.n_sentences - 1)
            n_sentences += part.n_sentences
            n_places += last.offset + len(last.ids) + 1
            n_sources += last.source + 1

    _write(path, sentences(), any(part.has_content for part in parts))


def _write(path: Path, sentences: Iterable[StoredSentence], has_content: bool) -> None:
    """Commit sentences to a file, in row groups."""
    rows = iter(sentences)
    schema = SCHEMA.append(IS_CONTENT) if has_content else SCHEMA
    with (
        committing(path) as temporary,
        pq.ParquetWriter(temporary, schema, **WRITING) as writer,
    ):
        while group := list(islice(rows, GROUP)):
            columns = list(zip(*group, strict=True))[: len(schema)]
            arrays = [
                pa.array(list(column), field.type)
                for column, field in zip(columns, schema, strict=True)
            ]
            writer.write_table(pa.table(arrays, schema=schema))


class Sentences:
    """A reader of `sentences.parquet`: by number, by prefix, or in ranges."""

    def __init__(self, path: TableFile, file: pa.NativeFile | None = None) -> None:
        self.path = path
        with read_errors(self.path):
            self._file = open_table(path, []) if file is None else pq.ParquetFile(file)
        self.n_sentences: int = self._file.metadata.num_rows
        self.n_groups: int = self._file.metadata.num_row_groups
        self.has_content = IS_CONTENT.name in self._file.schema_arrow.names
        """Whether some tokens may end no prefix."""
        # Read only where a binary search looks: `show` must not get slower with the corpus.
        self._first_offset = cache(self._read_first_offset)
        self._group = lru_cache(CACHED_GROUPS)(self._read_group)
        self._reading = threading.Lock()  # Arrow's reader is not thread-safe

    def row(self, sentence: int) -> StoredSentence:
        """Return a sentence by its number."""
        if not 0 <= sentence < self.n_sentences:
            raise FfmemError(
                f"There is no sentence {sentence}: the corpus has sentences 0 to"
                f" {self.n_sentences - 1}."
            )
        return next(self.rows(sentence, 1))

    def at(self, prefixes: Iterable[int]) -> dict[int, StoredSentence]:
        """Return the sentence that owns each prefix."""
        owners: dict[int, StoredSentence] = {}
        last: StoredSentence | None = None
        wanted = sorted(set(prefixes))
        if isinstance(self.path, HubFile):  # all at once, not one request after the other
            open_table(self.path, {self._group_of(prefix) for prefix in wanted})
        for prefix in wanted:
            if last is None or not last.offset <= prefix <= last.offset + len(last.ids):
                last = self._group(self._group_of(prefix)).at(prefix)
            owners[prefix] = last
        return owners

    def _group_of(self, prefix: int) -> int:
        """Return the row group of the sentence that owns a prefix."""
        return bisect_right(range(self.n_groups), prefix, key=self._first_offset) - 1

    def rows(self, first: int, n: int) -> Iterator[StoredSentence]:
        """Yield n sentences from number `first` on, holding one row group at a time."""
        past = first + n
        for group in range(first // GROUP, -(-past // GROUP)):
            begin = group * GROUP
            inside = slice(max(first - begin, 0), min(past - begin, GROUP))
            yield from _decode(self._read([group])[inside])

    def lengths(self) -> Iterator[ndarray]:
        """Yield the number of tokens of every sentence (int64), a row group at a time."""
        # No jaxtyping: importing it would double the time that `ffmem show` takes.
        for group in range(self.n_groups):
            ids = self._read([group], ["ids"])["ids"]
            yield np.diff(ids.combine_chunks().offsets.to_numpy()).astype(np.int64)

    def contents(self) -> Iterator[ndarray | None]:
        """Yield whether each token ends a prefix, a row group at a time; None: every token does."""
        for group in range(self.n_groups):
            if not self.has_content:
                yield None
                continue
            table = self._read([group], ["ids", IS_CONTENT.name])
            rows = zip(table["ids"].to_pylist(), table[IS_CONTENT.name].to_pylist(), strict=True)
            flags = [[True] * len(ids) if one is None else one for ids, one in rows]
            yield np.array([flag for one in flags for flag in one], bool)

    def tokens(self, groups: range | None = None) -> tuple[ndarray, ndarray]:
        """Return the offset of every sentence (int64), and all tokens concatenated (int32).

        Of all row groups, or of some consecutive ones.
        """
        chosen = range(self.n_groups) if groups is None else groups
        table = self._read(list(chosen), ["offset", "ids"])
        ids = table["ids"].combine_chunks()
        return table["offset"].to_numpy(), ids.values.to_numpy()

    def _read_first_offset(self, group: int) -> int:
        column = self._file.metadata.row_group(group).column(SCHEMA.get_field_index("offset"))
        return int(column.statistics.min)

    def _read_group(self, group: int) -> "_Group":
        return _Group(self._read([group]))

    def _read(self, groups: list[int], columns: list[str] | None = None) -> pa.Table:
        with read_errors(self.path), self._reading:
            is_remote = isinstance(self.path, HubFile)
            file = open_table(self.path, groups) if is_remote else self._file
            # For groups this small, threads cost more time than they save.
            return file.read_row_groups(groups, columns, use_threads=False)


class _Group:
    """A row group in memory; decodes a sentence when it is first accessed."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._offsets: list[int] = table["offset"].to_pylist()
        self._decoded: dict[int, StoredSentence] = {}

    def at(self, prefix: int) -> StoredSentence:
        """Return the sentence that owns a prefix."""
        row = bisect_right(self._offsets, prefix) - 1
        if row not in self._decoded:
            # A slice: `take` would import all of pyarrow.compute, a tenth of a second.
            self._decoded[row] = next(_decode(self._table[row : row + 1]))
        return self._decoded[row]


def split_text(
    sentence: StoredSentence, length: int, shown: Callable[[int], str]
) -> tuple[str, str]:
    """Return the text of a sentence's first `length` tokens, and the text after them.

    Both are slices of the source text. If the split falls inside a character, the tokens that share
    the character are displayed as bytes; if the sentence has no text, all tokens are displayed.
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


def _decode(table: pa.Table) -> Iterator[StoredSentence]:
    columns = (table[name].to_pylist() for name in table.column_names)
    return (StoredSentence(*row) for row in zip(*columns, strict=True))

"""Chunks, the units of work of a run, and the batches within one.

A chunk is consecutive sentences of one source, with at least `chunk_tokens` tokens unless it is the
last. Its sentences are sorted by (length, number) and split into batches, which keeps padding low.
Both depend on the corpus and the settings alone, never on which worker reads what when.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from jaxtyping import Bool, Int, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.storage import Storage

CHUNKS_FILE = "partials/chunks.parquet"


class Chunk(NamedTuple):
    """Consecutive sentences, by their numbers in the index."""

    number: int
    first_sentence: int
    n_sentences: int
    first_prefix: int
    n_tokens: int

    @property
    def name(self) -> str:
        """Name for messages."""
        last = self.first_sentence + self.n_sentences - 1
        return f"chunk {self.number} (sentences {self.first_sentence} to {last})"


class PrefixRange(NamedTuple):
    """Which positions of a sentence are prefixes: `first` … `first` + length − 1."""

    first: int
    shortest: int
    """The length p of the prefix at position `first`."""


def prefix_range(has_start: bool, empty_prefix: bool) -> PrefixRange:
    """Return the range of prefixes: 1 ≤ p ≤ n, or 0 ≤ p < n if the empty prefix counts."""
    if empty_prefix:
        return PrefixRange(first=0, shortest=0)
    return PrefixRange(first=1 if has_start else 0, shortest=1)


class Batch(NamedTuple):
    """Sentences of similar length, padded on the right to one length."""

    tokens: Int[Tensor, "batch position"]
    """Start token, if there is one, then the sentence; padding repeats token 0."""
    lengths: list[int]
    """Tokens of each sentence, without the start token, ascending."""
    offsets: list[int]
    """The prefix number of each sentence's empty prefix."""

    @property
    def is_token(self) -> Bool[Tensor, "batch position"]:
        """Whether a position is not padding."""
        extra = self.tokens.shape[1] - self.lengths[-1]  # 1 if there is a start token
        ends = torch.tensor(self.lengths)[:, None] + extra
        return torch.arange(self.tokens.shape[1]) < ends


def cut_chunks(lengths: Iterable[Int64[ndarray, " _"]], chunk_tokens: int) -> Iterator[Chunk]:
    """Yield the chunks of a source, given its sentences' lengths in order."""
    number = first = sentence = prefix = tokens = 0
    for part in lengths:
        for length in part.tolist():
            sentence += 1
            tokens += length
            if tokens >= chunk_tokens:
                yield Chunk(number, first, sentence - first, prefix, tokens)
                prefix += tokens + sentence - first
                number, first, tokens = number + 1, sentence, 0
    if sentence > first:
        yield Chunk(number, first, sentence - first, prefix, tokens)


def write_chunks(storage: Storage, chunks: Iterable[Chunk]) -> None:
    """Write the chunks of a run to its storage, for all workers."""
    columns = zip(*(chunk[1:] for chunk in chunks), strict=True)
    names = Chunk._fields[1:]
    table = pa.table({name: np.array(column) for name, column in zip(names, columns, strict=True)})
    with storage.writing(CHUNKS_FILE) as path:
        pq.write_table(table, path)


def read_chunks(storage: Storage) -> list[Chunk]:
    """Return the chunks of a run, in order."""
    with storage.reading(CHUNKS_FILE) as file:
        table = pq.read_table(file)
    columns = (table[name].to_pylist() for name in Chunk._fields[1:])
    return [Chunk(number, *row) for number, row in enumerate(zip(*columns, strict=True))]


def batches(
    sentences: Iterable[tuple[int, list[int]]], start: int | None, batch_tokens: int
) -> Iterator[Batch]:
    """Yield the batches of (offset, ids) pairs: longest × number of sentences ≤ `batch_tokens`.

    A sentence longer than `batch_tokens` is a batch by itself.
    """
    ordered = sorted(sentences, key=lambda sentence: (len(sentence[1]), sentence[0]))
    group: list[tuple[int, list[int]]] = []
    extra = 0 if start is None else 1
    for sentence in ordered:
        if group and (len(sentence[1]) + extra) * (len(group) + 1) > batch_tokens:
            yield pad(group, start)
            group = []
        group.append(sentence)
    if group:
        yield pad(group, start)


def pad(group: list[tuple[int, list[int]]], start: int | None) -> Batch:
    """Return (offset, ids) pairs, in ascending order of length, as one batch."""
    front = [] if start is None else [start]
    longest = len(group[-1][1])
    rows = [front + ids + [0] * (longest - len(ids)) for _, ids in group]
    return Batch(
        torch.tensor(rows), [len(ids) for _, ids in group], [offset for offset, _ in group]
    )

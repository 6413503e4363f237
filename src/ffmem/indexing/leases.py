"""Leases: the units of work into which a corpus is cut, and the batches of one.

A lease is consecutive sentences of one source, closed at a number of tokens. Within it
sentences are sorted by (length, number) and cut into batches, so that a batch has next to no
padding. Both depend on the corpus and the settings alone, never on who runs them or when.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int, Int64
from numpy import ndarray
from torch import Tensor


class Lease(NamedTuple):
    """Some consecutive sentences, counted in the index' own numbers."""

    number: int
    first_sentence: int
    n_sentences: int
    first_prefix: int
    n_tokens: int


class Batch(NamedTuple):
    """Sentences of similar length, padded on the right to one length."""

    tokens: Int[Tensor, "batch position"]
    """Start token, if there is one, then the sentence; padding repeats token 0."""
    lengths: list[int]
    """Tokens of each sentence, without the start token, ascending."""
    offsets: list[int]
    """The prefix number of each sentence's empty prefix."""


def cut(lengths: Iterable[Int64[ndarray, " _"]], lease_tokens: int) -> Iterator[Lease]:
    """Return the leases of a source, from its sentences' lengths in order."""
    number = first = sentence = prefix = tokens = 0
    for part in lengths:
        for length in part.tolist():
            sentence += 1
            tokens += length
            if tokens >= lease_tokens:
                yield Lease(number, first, sentence - first, prefix, tokens)
                prefix += tokens + sentence - first
                number, first, tokens = number + 1, sentence, 0
    if sentence > first:
        yield Lease(number, first, sentence - first, prefix, tokens)


def batches(
    sentences: Iterable[tuple[int, list[int]]], start: int | None, batch_tokens: int
) -> Iterator[Batch]:
    """Return the batches of a lease's (offset, ids): longest × number ≤ `batch_tokens`.

    A sentence longer than `batch_tokens` is a batch by itself.
    """
    ordered = sorted(sentences, key=lambda sentence: (len(sentence[1]), sentence[0]))
    group: list[tuple[int, list[int]]] = []
    extra = 0 if start is None else 1
    for sentence in ordered:
        if group and (len(sentence[1]) + extra) * (len(group) + 1) > batch_tokens:
            yield padded(group, start)
            group = []
        group.append(sentence)
    if group:
        yield padded(group, start)


def padded(group: list[tuple[int, list[int]]], start: int | None) -> Batch:
    """Return (offset, ids) of ascending length as one batch."""
    front = [] if start is None else [start]
    longest = len(group[-1][1])
    rows = [front + ids + [0] * (longest - len(ids)) for _, ids in group]
    return Batch(
        torch.tensor(rows), [len(ids) for _, ids in group], [offset for offset, _ in group]
    )

"""The lists of triggers of a layer, as rows of a corpus view, and which triggers count.

Of the first 2 · top triggers, patterns are looked for in those of odd rank and tested on those of
even rank. The halves are alike: a word that only 20 sentences of the corpus contain is in 10 of
each, while ranks 1 … top would use up all 20. Identical prefixes are one piece of evidence: a
trigger counts (it is *fresh*) if no earlier trigger of its list has the same context (its last 8
units, all of them if it has fewer) or is of the same sentence. A pattern is marked in all triggers
that show it, fresh or not.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int8, Int64
from numpy import ndarray

from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.patterns.corpus_view import CorpusView


class Lists(NamedTuple):
    """All lists of one layer."""

    memory: Int64[ndarray, " list"]
    sign: Int8[ndarray, " list"]
    rows: Int64[ndarray, "list rank"]
    """−1: vacant."""
    fresh: Bool[ndarray, "list rank"]
    top: int
    """A pattern must be shown by some of the first `top` triggers."""

    @property
    def seen(self) -> Bool[ndarray, "list rank"]:
        """Return the fresh triggers in which patterns are looked for."""
        return self.fresh & (np.arange(self.rows.shape[1]) % 2 == 0)

    @property
    def held(self) -> Bool[ndarray, "list rank"]:
        """Return the fresh triggers on which patterns are tested."""
        return self.fresh & (np.arange(self.rows.shape[1]) % 2 == 1)


def n_ranks(index: Index, top: int) -> int:
    """Return how many triggers of each list are examined: one bit each in a 64-bit number."""
    return min(2 * top, 64, index.manifest.t)


def read_lists(
    index: Index, view: CorpusView, layer: int, top: int, shuffled: int | None = None
) -> Lists:
    """Return the lists of a layer; with a seed, their triggers are shuffled among them."""
    signs = {1: "prefix", -1: "negative_prefix"} if index.manifest.model.gated else {1: "prefix"}
    columns = read_columns(index.folder / layer_file("triggers", layer), list(signs.values()))
    n = n_ranks(index, top)
    numbers = np.stack([columns[name][:, :n] for name in signs.values()], axis=1)
    rows = view.rows(numbers.reshape(-1, n))
    if shuffled is not None:
        held = rows >= 0
        rows[held] = np.random.default_rng([shuffled, layer]).permutation(rows[held])
    n_memories = index.layout.widths[layer]
    return Lists(
        np.repeat(np.arange(n_memories), len(signs)),
        np.tile(np.array(list(signs), np.int8), n_memories),
        rows,
        fresh(view, rows),
        top,
    )


def fresh(view: CorpusView, rows: Int64[ndarray, "list rank"]) -> Bool[ndarray, "list rank"]:
    """Return which triggers are no repetition of an earlier one of their list."""
    n_lists, n_ranks = rows.shape
    counted = rows >= 0
    for of in (view.context, view.sentence.astype(np.uint64)):
        keys = np.where(rows >= 0, of[np.maximum(rows, 0)], np.uint64(0))
        order = np.argsort(keys, axis=1, kind="stable")  # stable: the earliest rank comes first
        ordered = np.take_along_axis(keys, order, axis=1)
        first = np.ones((n_lists, n_ranks), bool)
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        is_first = np.empty_like(first)
        np.put_along_axis(is_first, order, first, axis=1)
        counted &= is_first
    return counted

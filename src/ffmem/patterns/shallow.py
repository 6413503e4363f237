"""Shallow patterns: what the triggers of a list end with, hold or look like more often than chance.

A candidate is shown by at least three fresh triggers of odd rank, improbably so. It is then tested
on the held-out ones, of even rank, which had no part in the choice. Its base is the larger of

    (a) the mean share of the corpus' prefixes of the same lengths that show it,
    (b) the share of all triggers of the layer that show it,

so that what triggers have in common anyway is no pattern of one memory. For positions the lengths
are the pattern itself: (a) is then over all prefixes.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt64
from numpy import ndarray

from ffmem.patterns.chunk import COLUMNS, LAST_WORD, WORDS
from ffmem.patterns.code_table import BINS
from ffmem.patterns.corpus_view import CorpusView
from ffmem.patterns.lists import Lists
from ffmem.patterns.pattern import LEAST
from ffmem.patterns.shapes import SHAPES
from ffmem.patterns.significance import tail

CHOICE = 0.001
"""A candidate is as improbable as this in the triggers where it was seen."""

LEAST_LIFT = 2.0
"""So many times as often as by chance, both where it was seen and where it is tested."""

LEAST_HELD = 10
"""Fresh held-out triggers that a list must have for a test."""

COMMON = 0.3
"""Grams in a larger share of prefixes are not looked for."""


class Candidates(NamedTuple):
    """Patterns of lists, one row each."""

    owner: Int64[ndarray, " candidate"]
    entry: Int64[ndarray, " candidate"]
    """Of the view's table; for shapes −1 − bit; for others whatever their rule says."""
    n_seen: Int64[ndarray, " candidate"]
    """Fresh triggers of odd rank."""
    k_seen: Int64[ndarray, " candidate"]
    n_held: Int64[ndarray, " candidate"]
    k_held: Int64[ndarray, " candidate"]
    base_seen: Float64[ndarray, " candidate"]
    base: Float64[ndarray, " candidate"]
    """In the held-out triggers."""
    p_value: Float64[ndarray, " candidate"]
    """In the held-out triggers."""
    marks: UInt64[ndarray, " candidate"]
    """Triggers that show it, a bit per rank, fresh or not."""

    def where(self, which: ndarray) -> "Candidates":
        """Return some of the candidates."""
        return Candidates(*(column[which] for column in self))

    @classmethod
    def joined(cls, parts: list["Candidates"]) -> "Candidates":
        """Return the candidates of several rules."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class Shares:
    """How common everything is: in the corpus by length, and in the layer's triggers."""

    def __init__(self, view: CorpusView, lists: Lists) -> None:
        self.rates = view.counts / np.maximum(view.totals, 1)
        self.shape_rates = view.shape_counts / np.maximum(view.totals, 1)
        self.overall = view.counts.sum(axis=1) / max(int(view.totals.sum()), 1)
        self.seen, self.held = (
            _histogram(view, lists, which) for which in (lists.seen, lists.held)
        )
        self.n_seen, self.n_held = (which.sum(axis=1) for which in (lists.seen, lists.held))
        self.n_pool = max(int((lists.rows >= 0).sum()), 1)

    def matched(
        self, rates: Float64[ndarray, "candidate bin"], owner: Int64[ndarray, " candidate"]
    ) -> tuple[Float64[ndarray, " candidate"], Float64[ndarray, " candidate"]]:
        """Return the mean rates at the lengths of a list's seen and held-out triggers."""
        return (rates * self.seen[owner]).sum(axis=1), (rates * self.held[owner]).sum(axis=1)


def candidates(view: CorpusView, lists: Lists, shares: Shares) -> Candidates:
    """Return everything that was tested in a layer, found or not."""
    parts = []
    for column in range(len(COLUMNS)):
        entries = np.where(lists.rows >= 0, view.codes[np.maximum(lists.rows, 0), column], -1)
        place, rank = (entries >= 0).nonzero()
        found = _of_entries(view, lists, shares, place, rank, entries[place, rank])
        if column > len(WORDS):
            found = found.where(_several_words(view, lists, found.owner, found.marks))
        parts.append(found)
    place, rank, entry = _grams(view, lists, shares)
    parts.append(_of_entries(view, lists, shares, place, rank, entry))
    parts.append(_of_shapes(view, lists, shares))
    return Candidates.joined(parts)


def tested(
    lists: Lists,
    shares: Shares,
    owner: Int64[ndarray, " candidate"],
    entry: Int64[ndarray, " candidate"],
    marks: UInt64[ndarray, " candidate"],
    bases: tuple[Float64[ndarray, " candidate"], Float64[ndarray, " candidate"]],
) -> Candidates:
    """Return those of some candidates that are improbable where seen, with their tests."""
    k_seen, k_held = (
        np.bitwise_count(marks & as_marks(which)[owner]).astype(np.int64)
        for which in (lists.seen, lists.held)
    )
    n_seen, n_held = shares.n_seen[owner], shares.n_held[owner]
    chosen = (
        (k_seen >= LEAST)
        & (n_held >= LEAST_HELD)
        & (k_seen >= LEAST_LIFT * bases[0] * n_seen)
        & (tail(k_seen, n_seen, bases[0]) <= CHOICE)
    )
    found = Candidates(
        owner,
        entry,
        n_seen,
        k_seen,
        n_held,
        k_held,
        *bases,
        tail(k_held, n_held, bases[1]),
        marks,
    )
    return found.where(chosen)


def as_marks(shown: Bool[ndarray, "list rank"]) -> UInt64[ndarray, " list"]:
    """Return which ranks are marked, a bit each."""
    bits = np.uint64(1) << np.arange(shown.shape[1], dtype=np.uint64)
    marks: ndarray = np.where(shown, bits, np.uint64(0)).sum(axis=1, dtype=np.uint64)
    return marks


def generalises(found: Candidates, least_lift: float = LEAST_LIFT) -> Bool[ndarray, " candidate"]:
    """Return which candidates hold beyond where they were seen, whatever the q-value.

    As many of the held-out triggers must show it as 3 of 25, at the least lift.
    """
    enough = found.k_held * 25 >= LEAST * found.n_held
    lifted = found.k_held >= least_lift * found.base * found.n_held
    holds: ndarray = enough & lifted & (found.k_held > 0)
    return holds


def _of_entries(
    view: CorpusView,
    lists: Lists,
    shares: Shares,
    place: Int64[ndarray, " shown"],
    rank: Int64[ndarray, " shown"],
    entry: ndarray,
) -> Candidates:
    """Return the candidates among things that triggers show: (list, rank, entry), each once."""
    n_entries = len(view.kinds)
    keys = place * n_entries + entry
    distinct, counts = np.unique(keys[lists.seen[place, rank]], return_counts=True)
    kept = distinct[counts >= LEAST]
    marks = np.zeros(len(kept), np.uint64)
    if len(kept):
        where = np.searchsorted(kept, keys)
        where[where == len(kept)] = 0
        known = kept[where] == keys
        np.bitwise_or.at(marks, where[known], np.uint64(1) << rank[known].astype(np.uint64))
    owner, entries = np.divmod(kept, max(n_entries, 1))
    pool = np.bincount(entry, minlength=n_entries)[entries] / shares.n_pool
    matched = shares.matched(shares.rates[entries], owner)
    seen, held = (np.maximum(rate, pool) for rate in matched)
    return tested(lists, shares, owner, entries, marks, (seen, held))


def _grams(
    view: CorpusView, lists: Lists, shares: Shares
) -> tuple[Int64[ndarray, " shown"], Int64[ndarray, " shown"], Int64[ndarray, " shown"]]:
    """Return all grams that triggers hold, but for the commonest: (list, rank, entry)."""
    place, rank = (lists.rows >= 0).nonzero()
    slices = view.gram_slices[lists.rows[place, rank]]
    which, flat = spread(slices)
    entry = view.grams[flat].astype(np.int64)
    rare = (entry >= 0) & (shares.overall[np.maximum(entry, 0)] < COMMON)
    return place[which][rare], rank[which][rare], entry[rare]


def _of_shapes(view: CorpusView, lists: Lists, shares: Shares) -> Candidates:
    """Return the candidates among the shapes of prefixes."""
    shown = np.where(lists.rows >= 0, view.shapes[np.maximum(lists.rows, 0)], np.uint32(0))
    parts = []
    for bit, shape in enumerate(SHAPES):
        marks = as_marks((shown >> np.uint32(bit) & np.uint32(1)).astype(bool))
        owner = np.arange(len(marks))
        pool = int(np.bitwise_count(marks).sum()) / shares.n_pool
        rates = np.broadcast_to(shares.shape_rates[bit], (len(owner), len(BINS)))
        bases = shares.matched(rates, owner)
        if shape.rule == "position":
            overall = view.shape_counts[bit].sum() / max(int(view.totals.sum()), 1)
            bases = (np.full(len(owner), overall), np.full(len(owner), overall))
        seen, held = (np.maximum(base, pool) for base in bases)
        found = tested(lists, shares, owner, np.full(len(owner), -1 - bit), marks, (seen, held))
        if shape.about_word:
            found = found.where(_several_words(view, lists, found.owner, found.marks))
        parts.append(found)
    return Candidates.joined(parts)


def _several_words(
    view: CorpusView,
    lists: Lists,
    owner: Int64[ndarray, " candidate"],
    marks: UInt64[ndarray, " candidate"],
) -> Bool[ndarray, " candidate"]:
    """Return which candidates have at least three different last words: else the word is it."""
    ranks = np.arange(0, lists.rows.shape[1], 2)
    shown = (marks[:, None] >> ranks.astype(np.uint64) & np.uint64(1)).astype(bool)
    words = view.codes[np.maximum(lists.rows[owner][:, ranks], 0), LAST_WORD].astype(np.int64)
    # A word that no other row has is different from all others.
    words = np.where(words < 0, -1 - ranks, words)
    nowhere = np.iinfo(np.int64).min
    ordered = np.sort(np.where(shown, words, nowhere), axis=1)
    new = (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1) + 1
    several: ndarray = new - (ordered[:, 0] == nowhere) >= LEAST
    return several


def spread(
    slices: Int64[ndarray, "owner two"],
) -> tuple[Int64[ndarray, " member"], Int64[ndarray, " member"]]:
    """Return the members of many slices, one after the other: (which slice, place)."""
    sizes = slices[:, 1] - slices[:, 0]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    before = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return owner, np.arange(len(owner)) - before + np.repeat(slices[:, 0], sizes)


def _histogram(
    view: CorpusView, lists: Lists, which: Bool[ndarray, "list rank"]
) -> Float64[ndarray, "list bin"]:
    """Return how the lengths of a list's triggers are spread over the bins; they sum to 1."""
    bins = view.bins[np.maximum(lists.rows, 0)]
    counts = np.zeros((len(bins), len(BINS)))
    place, rank = which.nonzero()
    np.add.at(counts, (place, bins[place, rank]), 1)
    spread_over: ndarray = counts / np.maximum(which.sum(axis=1, keepdims=True), 1)
    return spread_over

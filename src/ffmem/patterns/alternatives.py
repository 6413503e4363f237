"""Several last words of one list as one pattern: “ends with one of: base, bases, camp”.

The words are chosen from the first triggers alone: each ends at least three of them, as a pattern
must, and far more often than by chance. Their base is the sum of theirs, since a prefix has one
last word.
"""

import numpy as np
from numpy import ndarray

from ffmem.patterns.chunk import LAST_WORD
from ffmem.patterns.corpus_view import CorpusView
from ffmem.patterns.lists import Lists
from ffmem.patterns.pattern import LEAST
from ffmem.patterns.shallow import Candidates, Shares, tested

MOST_WORDS = 6
LEAST_LIFT = 10.0
"""Of each word where it was seen."""

LEAST_SHARE = 0.2
"""Share of the held-out triggers that must show it: chosen so freely, few would say little."""


def alternatives(
    view: CorpusView, lists: Lists, shares: Shares
) -> tuple[Candidates, list[tuple[int, ...]]]:
    """Return one candidate per list at most, and the words of each.

    Its entry is the number of entries in the view's table + its place among the words.
    """
    entries = np.where(lists.rows >= 0, view.codes[np.maximum(lists.rows, 0), LAST_WORD], -1)
    place, rank = (entries >= 0).nonzero()
    keys = place * len(view.kinds) + entries[place, rank]
    early = lists.seen[place, rank]
    distinct, counts = np.unique(keys[early], return_counts=True)
    owner, word = np.divmod(distinct, max(len(view.kinds), 1))
    pool = np.bincount(entries[place, rank], minlength=len(view.kinds)) / shares.n_pool
    rates = np.maximum(shares.matched(shares.rates[word], owner)[0], pool[word])
    chosen = (counts >= LEAST) & (
        counts >= LEAST_LIFT * rates * np.maximum(shares.n_seen[owner], 1)
    )
    owner, word, counts = owner[chosen], word[chosen], counts[chosen]
    order = np.lexsort((word, -counts, owner))
    owner, word = owner[order], word[order]
    nth = np.arange(len(owner)) - np.searchsorted(owner, owner)
    owner, word = owner[nth < MOST_WORDS], word[nth < MOST_WORDS]
    owners, starts, sizes = np.unique(owner, return_index=True, return_counts=True)
    owners, starts, sizes = (column[sizes >= 2] for column in (owners, starts, sizes))
    words = [
        tuple(word[start : start + size].tolist())
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
    ]
    member = np.repeat(np.arange(len(owners)), sizes)
    word = np.array([one for several in words for one in several], np.int64)
    marks = _marks(view, entries, owners, member, word)
    matched = shares.matched(_summed(shares.rates[word], member, len(owners)), owners)
    total = _summed(pool[word][:, None], member, len(owners))[:, 0]
    bases = (np.maximum(matched[0], total), np.maximum(matched[1], total))
    entry = len(view.kinds) + np.arange(len(owners))
    found = tested(lists, shares, owners, entry, marks, bases)
    kept = (found.entry - len(view.kinds)).tolist()
    numbered = found._replace(entry=len(view.kinds) + np.arange(len(kept)))
    return numbered, [words[one] for one in kept]


def _marks(
    view: CorpusView, entries: ndarray, owners: ndarray, member: ndarray, word: ndarray
) -> ndarray:
    """Return which ranks end with one of the words of their list."""
    n = max(len(view.kinds), 1)
    wanted = np.sort(owners[member] * n + word)
    own = entries[owners]
    keys = owners[:, None] * n + own
    shown = (own >= 0) & np.isin(keys, wanted)
    bits = np.uint64(1) << np.arange(entries.shape[1], dtype=np.uint64)
    marks: ndarray = np.where(shown, bits, np.uint64(0)).sum(axis=1, dtype=np.uint64)
    return marks


def _summed(rows: ndarray, owner: ndarray, n: int) -> ndarray:
    found = np.zeros((n, rows.shape[1]))
    np.add.at(found, owner, rows)
    return found

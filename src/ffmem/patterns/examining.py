"""All tests of one layer: shallow candidates first, then topics in what they leave.

Which shallow patterns are taken out before topics are looked for is decided here, at a fixed
p-value: the false-discovery control comes after, over all tests of all layers together.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int32, Int64
from numpy import ndarray

from ffmem.patterns.alternatives import LEAST_SHARE, alternatives
from ffmem.patterns.around import Around
from ffmem.patterns.chunk import COLUMNS, WORDS
from ffmem.patterns.closeness import topics
from ffmem.patterns.corpus_view import CorpusView
from ffmem.patterns.describing import EFFORT, rule_of
from ffmem.patterns.lists import Lists
from ffmem.patterns.pattern import LEAST
from ffmem.patterns.selection import Option, select
from ffmem.patterns.shallow import (
    LEAST_HELD,
    Candidates,
    Shares,
    as_marks,
    candidates,
    generalises,
)
from ffmem.patterns.shapes import SHAPES
from ffmem.patterns.significance import surprise
from ffmem.patterns.topics import TopicSpace

TAKEN_OUT = 0.01
"""p-value of shallow patterns whose words say nothing of a list's topic."""

LIST_WORDS = 8
"""Words of grams taken out of all triggers of a list, at most."""


@dataclass(frozen=True)
class LayerTests:
    """Everything that was tested in one layer."""

    layer: int
    lists: Lists
    shallow: Candidates
    words: list[tuple[int, ...]]
    """Of alternatives: entries of their last words."""
    semantic: Candidates
    n_enough: int
    """Lists with enough fresh held-out triggers for a test."""


def examine(
    view: CorpusView, lists: Lists, layer: int, space: TopicSpace, around: Around, seed: int
) -> LayerTests:
    """Return the tests of one layer."""
    shares = Shares(view, lists)
    joined, words = alternatives(view, lists, shares)
    shallow = Candidates.joined([candidates(view, lists, shares), joined])
    holds = holding(view, shallow) & (shallow.p_value <= TAKEN_OUT)
    removed = _removed(view, lists, shallow, selected(view, lists, shallow, holds))
    found = topics(view, lists, space, removed, around, seed)
    enough = int((shares.n_held >= LEAST_HELD).sum())
    return LayerTests(layer, lists, shallow, words, found, enough)


def holding(view: CorpusView, found: Candidates) -> Bool[ndarray, " candidate"]:
    """Return which shallow candidates hold beyond where they were seen."""
    free = found.entry >= len(view.kinds)
    return generalises(found) & ~(free & (found.k_held < LEAST_SHARE * found.n_held))


def selected(
    view: CorpusView, lists: Lists, found: Candidates, holds: Bool[ndarray, " candidate"]
) -> list[int]:
    """Return which of the shallow candidates that hold are told, list by list."""
    places = holds.nonzero()[0]
    some = found.where(places)
    early = np.uint64((1 << lists.top) - 1)
    marks = (some.marks & early).tolist()
    fresh = (some.marks & early & as_marks(lists.fresh)[some.owner]).tolist()
    surprises = surprise(some.k_seen + some.k_held, some.n_seen + some.n_held, some.base).tolist()
    of_list: dict[int, list[Option]] = {}
    for number, (owner, entry) in enumerate(
        zip(some.owner.tolist(), some.entry.tolist(), strict=True)
    ):
        effort = EFFORT[rule_of(view.kinds, entry)]
        option = Option(number, surprises[number], marks[number], fresh[number], effort)
        of_list.setdefault(owner, []).append(option)
    chosen = [one for owner in sorted(of_list) for one in select(of_list[owner], LEAST)]
    return [int(places[one]) for one in chosen]


def is_content_word(
    view: CorpusView, entry: Int64[ndarray, " candidate"]
) -> Bool[ndarray, " candidate"]:
    """Return which candidates are single content words anywhere in a prefix."""
    known = (entry >= 0) & (entry < len(view.kinds))
    at = np.where(known, entry, 0)
    found: ndarray = known & (view.kinds[at] == len(COLUMNS)) & (view.entry_words[at, 0] >= 0)
    return found


def _removed(
    view: CorpusView, lists: Lists, found: Candidates, chosen: list[int]
) -> Int32[ndarray, "list rank slot"]:
    """Return the words of each trigger that shallow patterns explain.

    What ends a prefix is taken out of the triggers that show it, a gram out of all triggers of the
    list. A content word by itself is taken out only where at least half of the triggers hold it:
    else it is one of the words that may make a topic.
    """
    n_lists, n_ranks = lists.rows.shape
    removed = np.full((n_lists, n_ranks, len(WORDS) + LIST_WORDS), -1, np.int32)
    used = np.zeros(n_lists, np.int64)
    some = found.where(np.array(chosen, np.int64))
    minor = is_content_word(view, some.entry) & (2 * some.k_seen < some.n_seen)
    ranks = np.arange(n_ranks, dtype=np.uint64)
    for owner, entry, marks, is_minor in zip(
        some.owner.tolist(), some.entry.tolist(), some.marks, minor.tolist(), strict=True
    ):
        kind = int(view.kinds[entry]) if 0 <= entry < len(view.kinds) else None
        if kind is not None and kind >= len(COLUMNS):
            words = view.entry_words[entry]
            for word in words[words >= 0].tolist() if not is_minor else ():
                if used[owner] < LIST_WORDS:
                    removed[owner, :, len(WORDS) + used[owner]] = word
                    used[owner] += 1
            continue
        if entry < 0 and not SHAPES[-1 - entry].about_word:
            continue
        n_words = kind if kind in WORDS else 1
        shown = (marks >> ranks & np.uint64(1)).astype(bool)
        rows = lists.rows[owner, shown]
        removed[owner, shown, :n_words] = view.last_words[rows, :n_words]
    return removed

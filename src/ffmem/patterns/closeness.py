"""Semantic patterns: triggers that lie closer to one topic than random prefixes do.

A topic is the mean direction c of at least three of the first triggers in a topic space. A prefix
is about it if

    cos(prefix, c) ≥ τ(n),    τ(n): what 2, 5 or 15 % of random prefixes of n content words reach

A trigger does not vouch for itself: where it helped to make c, it is compared with c without it.
Before, the shallow part is taken out of the list's bags of words, and so is the one word that most
of the topic's triggers share: what one word carries is no topic. The held-out triggers test it.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64
from numpy import ndarray

from ffmem.patterns.around import SHARES, Around
from ffmem.patterns.corpus_view import CorpusView
from ffmem.patterns.lists import Lists
from ffmem.patterns.pattern import LEAST
from ffmem.patterns.shallow import LEAST_HELD, Candidates, as_marks, spread
from ffmem.patterns.significance import tail
from ffmem.patterns.topics import TopicSpace

LEAST_LIFT = 3.0
"""So many times as often as by chance: what is a little more usual is no topic."""

CHOICE = 0.01
"""A topic is as improbable as this in the triggers where it was seen."""

USUAL = SHARES[1]
"""How wide a topic is taken while it grows."""

TOPICS = 2
"""At most, of a list."""

SEED = 4
"""A topic starts from the trigger with the closest neighbours, and so many of them."""

ROUNDS = 2
BLOCK = 512
"""Lists at a time."""

POOL = 3000
"""Triggers of the layer that stand for all of them."""


class Found(NamedTuple):
    """Topics of some lists, one row each; rows of lists without one have no member."""

    shown: Bool[ndarray, "list rank"]
    members: Bool[ndarray, "list rank"]
    base_seen: Float64[ndarray, " list"]
    base: Float64[ndarray, " list"]


def topics(
    view: CorpusView,
    lists: Lists,
    space: TopicSpace,
    removed: Int32[ndarray, "list rank slot"],
    around: Around,
    seed: int,
) -> Candidates:
    """Return the topics of all lists of a layer that are improbable where seen, tested.

    The entry of a candidate is 0 for a list's first topic, 1 for its second.
    """
    rows = np.unique(lists.rows[lists.rows >= 0])
    # Sorted first: in whatever order the memories stand, the same are drawn.
    drawn = np.random.default_rng(seed).permutation(np.sort(lists.rows[lists.rows >= 0]))[:POOL]
    pool = Around.of(view, space, np.sort(drawn), around.least)
    parts = []
    for first in range(0, len(lists.memory), BLOCK) if len(rows) else ():
        block = slice(first, first + BLOCK)
        some = lists._replace(
            **{name: getattr(lists, name)[block] for name in ("memory", "sign", "rows", "fresh")}
        )
        parts += _of_block(view, some, space, removed[block], around, pool, first)
    return Candidates.joined(parts) if parts else nothing()


def nothing() -> Candidates:
    """Return no candidate."""
    none, zero = np.zeros(0, np.int64), np.zeros(0)
    return Candidates(none, none, none, none, none, none, zero, zero, zero, np.zeros(0, np.uint64))


def _of_block(
    view: CorpusView,
    lists: Lists,
    space: TopicSpace,
    removed: Int32[ndarray, "list rank slot"],
    around: Around,
    pool: Around,
    first: int,
) -> list[Candidates]:
    sizes = _sizes(view, lists.rows, removed)
    vectors = _vectors(view, space, lists.rows, removed)
    left = lists.seen & (sizes > 0)
    parts = []
    for number in range(TOPICS):
        members = _grown(vectors, left, around.bins(sizes), around)
        best = _shared(view, lists.rows, members, removed)
        without = np.concatenate(
            [removed, np.broadcast_to(best[:, None, None], (*removed.shape[:2], 1))], axis=2
        )
        their_sizes = _sizes(view, lists.rows, without)
        theirs = _vectors(view, space, lists.rows, without)
        members &= their_sizes > 0
        found = _compared(theirs, members, their_sizes, lists, around, pool)
        parts.append(_tested(lists, found, number, first))
        left &= ~(members | found.shown)
    return parts


def _grown(
    vectors: Float32[ndarray, "list rank axis"],
    left: Bool[ndarray, "list rank"],
    bins: Int64[ndarray, "list rank"],
    around: Around,
) -> Bool[ndarray, "list rank"]:
    """Return the triggers of the densest topic among those that are left."""
    usable = np.where(left[..., None], vectors, 0)
    close = usable @ usable.transpose(0, 2, 1)
    every = np.arange(close.shape[1])
    close[:, every, every] = -1
    nearest = np.argsort(-close, axis=2, kind="stable")[:, :, :SEED]
    density = np.take_along_axis(close, nearest, axis=2).sum(axis=2)
    density[~left] = -np.inf
    seed = density.argmax(axis=1)
    lists = np.arange(len(seed))
    members = np.zeros_like(left)
    members[lists, seed] = True
    members[lists[:, None], nearest[lists, seed]] = True
    members &= left
    for _ in range(ROUNDS):
        centres = _unit((usable * members[..., None]).sum(axis=1))
        thresholds = around.thresholds(around.cosines(centres), USUAL)
        members = left & _reaches(usable, members, bins, thresholds)
    return members


def _compared(
    vectors: Float32[ndarray, "list rank axis"],
    members: Bool[ndarray, "list rank"],
    sizes: Int64[ndarray, "list rank"],
    lists: Lists,
    around: Around,
    pool: Around,
) -> Found:
    """Return what is about the topics of some members, and how common that is.

    How wide a topic is taken is decided by the triggers where it was seen.
    """
    centres = _unit((vectors * members[..., None]).sum(axis=1))
    usual, layers = around.cosines(centres), pool.cosines(centres)
    bins, n_seen = around.bins(sizes), lists.seen.sum(axis=1)
    can = (sizes > 0) & (lists.rows >= 0) & members.any(axis=1, keepdims=True)
    best, least = None, np.zeros(0)
    for share in SHARES:
        thresholds = around.thresholds(usual, share)
        shown = _reaches(vectors, members, bins, thresholds) & can
        shares = np.maximum(around.shares(usual, thresholds), pool.shares(layers, thresholds))
        each = np.where(sizes > 0, np.take_along_axis(shares, bins, axis=1), 0.0)
        seen, held = (
            (each * which).sum(axis=1) / np.maximum(which.sum(axis=1), 1)
            for which in (lists.seen, lists.held)
        )
        found = Found(shown, members, seen, held)
        p_values = tail((shown & lists.seen).sum(axis=1), n_seen, seen)
        if best is None:
            best, least = found, p_values
            continue
        better = p_values < least
        best = Found(
            np.where(better[:, None], shown, best.shown),
            members,
            np.where(better, seen, best.base_seen),
            np.where(better, held, best.base),
        )
        least = np.minimum(p_values, least)
    assert best is not None
    return best


def _tested(lists: Lists, found: Found, number: int, first: int) -> Candidates:
    """Return the topics that are improbable where seen, with their tests."""
    n_seen, n_held = lists.seen.sum(axis=1), lists.held.sum(axis=1)
    k_seen, k_held = ((found.shown & which).sum(axis=1) for which in (lists.seen, lists.held))
    every = np.arange(len(n_seen))
    candidates = Candidates(
        every + first,
        np.full(len(every), number),
        n_seen,
        k_seen,
        n_held,
        k_held,
        found.base_seen,
        found.base,
        tail(k_held, n_held, found.base),
        as_marks(found.shown),
    )
    chosen = (
        (k_seen >= LEAST)
        & (found.members.sum(axis=1) >= LEAST)
        & (n_held >= LEAST_HELD)
        & (k_seen >= LEAST_LIFT * found.base_seen * n_seen)
        & (tail(k_seen, n_seen, found.base_seen) <= CHOICE)
    )
    return candidates.where(chosen)


def _reaches(
    vectors: Float32[ndarray, "list rank axis"],
    members: Bool[ndarray, "list rank"],
    bins: Int64[ndarray, "list rank"],
    thresholds: Float32[ndarray, "list bin"],
) -> Bool[ndarray, "list rank"]:
    """Return which triggers are about the topic of the members, none by itself."""
    total = (vectors * members[..., None]).sum(axis=1)
    others = total[:, None, :] - vectors * members[..., None]
    norms = np.linalg.norm(others, axis=2)
    cosines = (vectors * others).sum(axis=2) / np.maximum(norms, 1e-6)
    reached: ndarray = cosines >= np.take_along_axis(thresholds, bins, axis=1)
    return reached


def _shared(
    view: CorpusView,
    rows: Int64[ndarray, "list rank"],
    members: Bool[ndarray, "list rank"],
    removed: Int32[ndarray, "list rank slot"],
) -> Int32[ndarray, " list"]:
    """Return the content word that most members share; −1 where there is none."""
    place, rank = members.nonzero()
    which, at = spread(view.word_slices[rows[place, rank]])
    words = view.words[at].astype(np.int64)
    gone = (removed[place, rank][which] == words[:, None]).any(axis=1)
    n = int(view.words.max(initial=0)) + 1
    keys, counts = np.unique((place[which] * n + words)[~gone], return_counts=True)
    owner, word = np.divmod(keys, n)
    order = np.lexsort((word, -counts, owner))
    owners, first = np.unique(owner[order], return_index=True)
    best = np.full(len(rows), -1, np.int32)
    best[owners] = word[order][first]
    return best


def _sizes(
    view: CorpusView, rows: Int64[ndarray, "list rank"], removed: Int32[ndarray, "list rank slot"]
) -> Int64[ndarray, "list rank"]:
    """Return how many content words are left of each trigger."""
    slices = view.word_slices[np.maximum(rows, 0)]
    sizes = np.where(rows >= 0, slices[..., 1] - slices[..., 0], 0)
    place, rank = ((removed >= 0).any(axis=2) & (rows >= 0)).nonzero()
    which, at = spread(slices[place, rank])
    gone = (removed[place, rank][which] == view.words[at][:, None]).any(axis=1)
    np.subtract.at(sizes, (place[which[gone]], rank[which[gone]]), 1)
    return sizes


def _vectors(
    view: CorpusView,
    space: TopicSpace,
    rows: Int64[ndarray, "list rank"],
    removed: Int32[ndarray, "list rank slot"],
) -> Float32[ndarray, "list rank axis"]:
    """Return the vectors of all triggers; 0 in vacant slots."""
    flat = np.maximum(rows, 0).reshape(-1)
    found = space.vectors(view, flat, removed.reshape(len(flat), -1))
    found[rows.reshape(-1) < 0] = 0
    by_list: ndarray = found.reshape(*rows.shape, -1)
    return by_list


def _unit(vectors: Float32[ndarray, "list axis"]) -> Float32[ndarray, "list axis"]:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    found: ndarray = (vectors / np.maximum(norms, 1e-6)).astype(np.float32)
    return found

"""Shallow patterns: what a memory's triggers end with, contain or look like beyond chance.

Patterns are looked for in one half of a list's first 50 triggers and tested on the other (SEEN and
HELD_OUT in `store`). Repetitions are one piece of evidence: a trigger counts (it is *fresh*) unless
an earlier trigger of its list has the same context or is of the same sentence.

A candidate is shown by at least three fresh triggers of the seen half, improbably so. Its base rate
is the larger of

    (a) the mean share of the corpus' prefixes of the same lengths that show it,
    (b) the share of all triggers of the layer that show it,

so that what triggers have in common anyway is no pattern of one memory. For positions the lengths
are the pattern itself: (a) is then over all prefixes. If each of n triggers shows it with its own
probability pⱼ, then with the mean p̄

    P(X ≥ k) ≤ P(Binomial(n, p̄) ≥ k)    where k ≥ n·p̄ + 1 (Hoeffding 1956)

and below that bound the p-value is 1.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int8, Int32, Int64
from numpy import ndarray

from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.patterns.features import (
    BINS,
    GRAM,
    LAST_WORD,
    N_GRAM,
    N_WORDS,
    SHAPE,
    SHAPES,
    SUFFIX,
    SUFFIXES,
    CorpusFeatures,
    lookup,
    trigger_columns,
)
from ffmem.patterns.store import HELD_OUT, MIN_TRIGGERS, SEEN, TOP_TRIGGERS

MAX_CHOICE_P = 0.001
"""Largest p-value of a candidate in the triggers where it was seen."""

MIN_LIFT = 2.0
"""Least lift over chance, both where a candidate was seen and where it is tested."""

MIN_HELD = 10
"""Fresh held-out triggers that a list must have for a test."""

MAX_COMMON = 0.3
"""Grams in a larger share of prefixes are not looked for."""

MAX_GROUP, MIN_GROUP_LIFT, MIN_GROUP_SHARE = 6, 10.0, 0.2
"""“Ends with one of” has at most this many words, each with at least this lift where it was seen.
At least this share of the held-out triggers must show it: the words are chosen freely, so that a
few hits say little."""

RELATED_SHARE = 0.05
MIN_COSINE = 0.2
"""Two last words belong together if their cosine is at least this, and only this share of random
pairs is closer."""

RULES = (
    *("last-token", "last-word", *["last-n-gram"] * (N_WORDS - 1)),
    *["suffix"] * len(SUFFIXES),
    *["anywhere"] * N_GRAM,
    *(shape.rule for shape in SHAPES),
    *("last-words", "topic", "topic"),
)
"""By kind of feature; after them come groups of last words, a list's first and its second topic."""
WORD_GROUP = SHAPE + len(SHAPES)
TOPIC = WORD_GROUP + 1

EFFORT = {
    **dict.fromkeys(("last-word", "last-n-gram"), 0),
    **dict.fromkeys(("punctuation", "shape", "casing", "position"), 1),
    "last-words": 2,
    "last-token": 3,
    "suffix": 4,
    "anywhere": 5,
}
"""How hard a pattern of each rule is to read."""

ABOUT_WORD = np.array(
    [
        SUFFIX <= kind < GRAM or (kind >= SHAPE and SHAPES[kind - SHAPE].about_word)
        for kind in range(WORD_GROUP)
    ]
)
"""By kind: whether it is about the form of the last word. If there is only one such word, the word
itself is the pattern, not its form."""


class TriggerLists(NamedTuple):
    """All trigger lists of one layer, as rows of the corpus features."""

    memory: Int64[ndarray, " list"]
    sign: Int8[ndarray, " list"]
    rows: Int64[ndarray, "list rank"]
    """−1: empty."""
    fresh: Bool[ndarray, "list rank"]

    def fresh_in(self, ranks: slice) -> Bool[ndarray, "list rank"]:
        """Return the fresh triggers of some ranks: SEEN, HELD_OUT or the first TOP_TRIGGERS."""
        found = np.zeros_like(self.fresh)
        found[:, ranks] = self.fresh[:, ranks]
        return found

    @property
    def seen(self) -> Bool[ndarray, "list rank"]:
        """The fresh triggers in which patterns are looked for."""
        return self.fresh_in(SEEN)

    @property
    def held(self) -> Bool[ndarray, "list rank"]:
        """The fresh triggers on which patterns are tested."""
        return self.fresh_in(HELD_OUT)

    @property
    def first(self) -> Bool[ndarray, "list rank"]:
        """The fresh triggers among which a pattern must recur."""
        return self.fresh_in(slice(TOP_TRIGGERS))


def n_ranks(index: Index) -> int:
    """Return how many triggers of each list are examined."""
    return min(2 * TOP_TRIGGERS, index.manifest.t)


def read_lists(
    index: Index, features: CorpusFeatures, layer: int, shuffle_seed: int | None = None
) -> TriggerLists:
    """Return the lists of a layer; with a seed, their triggers are shuffled among them."""
    signs = trigger_columns(index)
    columns = read_columns(index.folder / layer_file("triggers", layer), list(signs.values()))
    n, n_memories = n_ranks(index), index.layout.widths[layer]
    numbers = np.stack([columns[name][:, :n] for name in signs.values()], axis=1)
    rows = features.rows(numbers.reshape(-1, n))
    if shuffle_seed is not None:
        there = rows >= 0
        rows[there] = np.random.default_rng([shuffle_seed, layer]).permutation(rows[there])
    return TriggerLists(
        np.repeat(np.arange(n_memories), len(signs)),
        np.tile(np.array(list(signs), np.int8), n_memories),
        rows,
        is_fresh(features, rows),
    )


def is_fresh(
    features: CorpusFeatures, rows: Int64[ndarray, "list rank"]
) -> Bool[ndarray, "list rank"]:
    """Return which triggers do not repeat an earlier one of their list."""
    fresh = rows >= 0
    for of in (features.context, features.sentence.astype(np.uint64)):
        keys = np.where(rows >= 0, of[np.maximum(rows, 0)], np.uint64(0))
        order = np.argsort(keys, axis=1, kind="stable")  # stable: the earliest rank comes first
        ordered = np.take_along_axis(keys, order, axis=1)
        first = np.ones(rows.shape, bool)
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        is_first = np.empty_like(first)
        np.put_along_axis(is_first, order, first, axis=1)
        fresh &= is_first
    return fresh


# Statistics


def tail_probability(
    k: Int64[ndarray, " test"], n: Int64[ndarray, " test"], p: Float64[ndarray, " test"]
) -> Float64[ndarray, " test"]:
    """Return how probable k or more of n are by chance, where each has mean probability p."""
    from scipy.special import bdtrc

    bound = (k >= n * p + 1) & (k > 0) & (n > 0)
    exact = bdtrc(np.maximum(k - 1, 0).astype(np.float64), np.maximum(n, 1), np.clip(p, 0.0, 1.0))
    return np.where(bound, exact, 1.0)


def surprise(k: ndarray, n: ndarray, p: ndarray) -> Float64[ndarray, " test"]:
    """Return n·KL(k/n ‖ p) in nats: what orders patterns, wide ones and sharp ones together."""
    from scipy.special import rel_entr

    share, p = k / np.maximum(n, 1), np.clip(p, 1e-12, 1 - 1e-12)
    divergence = rel_entr(share, p) + rel_entr(1 - share, 1 - p)
    return np.where(share > p, n * divergence, 0.0)


def count_distinct(
    values: Int64[ndarray, "list rank"], which: Bool[ndarray, "list rank"]
) -> Int64[ndarray, " list"]:
    """Return how many different values some ranks of each list have."""
    nothing = np.iinfo(np.int64).min
    ordered = np.sort(np.where(which, values, nothing), axis=1)
    n_new = (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1) + 1
    counted: ndarray = n_new - (ordered[:, 0] == nothing)
    return counted


class Candidates(NamedTuple):
    """Patterns of lists, one row each."""

    owner: Int64[ndarray, " candidate"]
    """The list."""
    kind: Int64[ndarray, " candidate"]
    """Kind of its feature; WORD_GROUP; TOPIC or TOPIC + 1."""
    feature: Int64[ndarray, " candidate"]
    """−1 for groups and topics."""
    n_seen: Int64[ndarray, " candidate"]
    k_seen: Int64[ndarray, " candidate"]
    n_held: Int64[ndarray, " candidate"]
    k_held: Int64[ndarray, " candidate"]
    base_seen: Float64[ndarray, " candidate"]
    base: Float64[ndarray, " candidate"]
    """In the held-out triggers."""
    p_value: Float64[ndarray, " candidate"]
    """In the held-out triggers."""
    q_value: Float64[ndarray, " candidate"]
    """After false-discovery control over all tests; 1 before."""
    shown: Bool[ndarray, "candidate rank"]
    """Triggers that show it, fresh or not."""
    words: Int32[ndarray, "candidate word"]
    """The last words of a group, as features; −1: none."""

    def where(self, which: ndarray) -> "Candidates":
        """Return some of the candidates."""
        return Candidates(*(column[which] for column in self))

    @classmethod
    def join(cls, parts: list["Candidates"]) -> "Candidates":
        """Return the candidates of several rules."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    @classmethod
    def make(
        cls,
        lists: TriggerLists,
        owner: ndarray,
        kind: ndarray | int,
        shown: ndarray,
        base_seen: ndarray,
        base: ndarray,
        feature: ndarray | None = None,
        words: ndarray | None = None,
    ) -> "Candidates":
        """Return candidates with their counts and p-values."""
        (n_seen, k_seen), (n_held, k_held) = (
            (which.sum(axis=1)[owner], (shown & which[owner]).sum(axis=1))
            for which in (lists.seen, lists.held)
        )
        n = len(owner)
        return cls(
            owner=owner,
            kind=np.broadcast_to(kind, n).astype(np.int64),
            feature=np.full(n, -1) if feature is None else feature,
            n_seen=n_seen,
            k_seen=k_seen,
            n_held=n_held,
            k_held=k_held,
            base_seen=base_seen,
            base=base,
            p_value=tail_probability(k_held, n_held, base),
            q_value=np.ones(n),
            shown=shown,
            words=(np.full((n, MAX_GROUP), -1) if words is None else words).astype(np.int32),
        )

    def improbable(self, max_p: float, min_lift: float) -> "Candidates":
        """Return those that are improbable where they were seen, and can be tested."""
        return self.where(
            (self.k_seen >= MIN_TRIGGERS)
            & (self.n_held >= MIN_HELD)
            & (self.k_seen >= min_lift * self.base_seen * self.n_seen)
            & (tail_probability(self.k_seen, self.n_seen, self.base_seen) <= max_p)
        )

    def holds(self, min_lift: float) -> Bool[ndarray, " candidate"]:
        """Return which hold beyond where they were seen, whatever the q-value.

        As many of the held-out triggers must show it as 3 of 25 (more, if it is a group of words),
        at the least lift.
        """
        enough = (self.k_held > 0) & (self.k_held * TOP_TRIGGERS >= MIN_TRIGGERS * self.n_held)
        enough &= (self.kind != WORD_GROUP) | (self.k_held >= MIN_GROUP_SHARE * self.n_held)
        holds: ndarray = enough & (self.k_held >= min_lift * self.base * self.n_held)
        return holds

    @property
    def surprise(self) -> Float64[ndarray, " candidate"]:
        """How far from chance each is in all triggers."""
        return surprise(self.k_seen + self.k_held, self.n_seen + self.n_held, self.base)


class BaseRates:
    """How common every feature is: in the corpus by length, and in the layer's triggers."""

    def __init__(self, features: CorpusFeatures, lists: TriggerLists) -> None:
        self.overall = features.counts.sum(axis=1) / max(int(features.totals.sum()), 1)
        self.by_length = features.counts / np.maximum(features.totals, 1)
        for at, shape in enumerate(SHAPES, start=features.first_shape):
            if shape.rule == "position":
                self.by_length[at] = self.overall[at]
        self.n_triggers = max(int((lists.rows >= 0).sum()), 1)
        bins = features.bins[np.maximum(lists.rows, 0)]
        self.lengths = []
        """How the lengths of each list's seen and held-out triggers are spread over the bins."""
        for which in (lists.seen, lists.held):
            counts = np.zeros((len(bins), len(BINS)))
            owner, rank = which.nonzero()
            np.add.at(counts, (owner, bins[owner, rank]), 1)
            self.lengths.append(counts / np.maximum(which.sum(axis=1, keepdims=True), 1))

    def matched(
        self, rates: Float64[ndarray, "candidate bin"], owner: ndarray, layer_rate: ndarray
    ) -> tuple[ndarray, ndarray]:
        """Return the base rates at the lengths of a list's seen and held-out triggers."""
        seen, held = (
            np.maximum((rates * lengths[owner]).sum(axis=1), layer_rate) for lengths in self.lengths
        )
        return seen, held


# Candidates


def find_shallow(features: CorpusFeatures, lists: TriggerLists) -> Candidates:
    """Return every shallow candidate of a layer with its test."""
    rates = BaseRates(features, lists)
    parts = [
        _recurring(features, lists, rates, owner, rank, feature)
        for owner, rank, feature in _shown_features(features, lists, rates)
    ]
    found = Candidates.join([*parts, _word_groups(features, lists, rates)])
    about_word = np.flatnonzero(np.append(ABOUT_WORD, False)[found.kind])
    several = _count_last_words(features, lists, found.where(about_word)) >= MIN_TRIGGERS
    return found.where(np.delete(np.arange(len(found.owner)), about_word[~several]))


def _shown_features(
    features: CorpusFeatures, lists: TriggerLists, rates: BaseRates
) -> Iterator[tuple[ndarray, ndarray, ndarray]]:
    """Yield what triggers show, as (list, rank, feature), each once: endings, grams, shapes."""
    rows = np.maximum(lists.rows, 0)
    there = lists.rows >= 0
    for kind in range(GRAM):
        shown = np.where(there, features.endings[rows, kind], -1).astype(np.int64)
        owner, rank = (shown >= 0).nonzero()
        yield owner, rank, shown[owner, rank]
    owner, rank = there.nonzero()
    which, at = spread(features.gram_slices[rows[owner, rank]])
    grams = features.grams[at].astype(np.int64)
    rare = (grams >= 0) & (rates.overall[np.maximum(grams, 0)] < MAX_COMMON)
    yield owner[which][rare], rank[which][rare], grams[rare]
    owner, rank, shape = (features.shapes[rows] & there[..., None]).nonzero()
    yield owner, rank, features.first_shape + shape


def spread(
    slices: Int64[ndarray, "owner two"],
) -> tuple[Int64[ndarray, " member"], Int64[ndarray, " member"]]:
    """Return the members of many slices, one after the other: (which slice, place)."""
    sizes = slices[:, 1] - slices[:, 0]
    owner = np.repeat(np.arange(len(sizes)), sizes)
    before = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return owner, np.arange(len(owner)) - before + np.repeat(slices[:, 0], sizes)


def _recurring(
    features: CorpusFeatures,
    lists: TriggerLists,
    rates: BaseRates,
    owner: Int64[ndarray, " shown"],
    rank: Int64[ndarray, " shown"],
    feature: Int64[ndarray, " shown"],
) -> Candidates:
    """Return the candidates among the features that triggers show, given by list and rank."""
    n_features = len(features.kinds)
    in_layer = np.bincount(feature, minlength=n_features) / rates.n_triggers
    keys = owner * n_features + feature
    distinct, counts = np.unique(keys[lists.seen[owner, rank]], return_counts=True)
    recurring = distinct[counts >= MIN_TRIGGERS]
    candidate = lookup(recurring, keys)
    shown = np.zeros((len(recurring), lists.rows.shape[1]), bool)
    shown[candidate[candidate >= 0], rank[candidate >= 0]] = True
    owner, feature = np.divmod(recurring, n_features)
    bases = rates.matched(rates.by_length[feature], owner, in_layer[feature])
    made = Candidates.make(lists, owner, features.kinds[feature], shown, *bases, feature)
    return made.improbable(MAX_CHOICE_P, MIN_LIFT)


def _count_last_words(
    features: CorpusFeatures, lists: TriggerLists, found: Candidates
) -> Int64[ndarray, " candidate"]:
    """Return how many different last words the seen triggers of each candidate have."""
    n = lists.rows.shape[1]
    words = features.endings[np.maximum(lists.rows[found.owner], 0), LAST_WORD].astype(np.int64)
    # A word that no other row has is different from all others.
    words = np.where(words < 0, -1 - np.arange(n), words)
    in_seen_half = np.zeros(n, bool)
    in_seen_half[SEEN] = True
    return count_distinct(words, found.shown & in_seen_half)


def _word_groups(features: CorpusFeatures, lists: TriggerLists, rates: BaseRates) -> Candidates:
    """Return “ends with one of” for lists with several last words that belong together.

    The words are chosen from the seen triggers alone: each ends at least three of them, far more
    often than by chance. Their base rate is the sum of theirs: a prefix has one last word.
    """
    n_features = len(features.kinds)
    last = np.where(lists.rows >= 0, features.endings[np.maximum(lists.rows, 0), LAST_WORD], -1)
    last = last.astype(np.int64)
    owner, rank = (last >= 0).nonzero()
    in_layer = np.bincount(last[owner, rank], minlength=n_features) / rates.n_triggers
    keys = (owner * n_features + last[owner, rank])[lists.seen[owner, rank]]
    distinct, counts = np.unique(keys, return_counts=True)
    owner, word = np.divmod(distinct[counts >= MIN_TRIGGERS], n_features)
    counts = counts[counts >= MIN_TRIGGERS]
    base = rates.matched(rates.by_length[word], owner, in_layer[word])[0]
    often = counts >= MIN_GROUP_LIFT * base * lists.seen.sum(axis=1)[owner]
    owner, word, counts = owner[often], word[often], counts[often]
    order = np.lexsort((word, -counts, owner))
    owners, starts = np.unique(owner[order], return_index=True)
    limit = related_limit(features)
    found, groups = [], []
    for one, several in zip(owners.tolist(), np.split(word[order], starts[1:]), strict=False):
        group = related_words(features, several, limit)
        if group:
            found.append(one)
            groups.append(group + [-1] * (MAX_GROUP - len(group)))
    lists_of, words = np.array(found, np.int64), np.array(groups, np.int64).reshape(-1, MAX_GROUP)
    there = words >= 0
    shown = (last[lists_of][:, :, None] == np.where(there, words, -2)[:, None]).any(axis=2)
    by_length = (rates.by_length[np.maximum(words, 0)] * there[..., None]).sum(axis=1)
    layer_rate = np.where(there, in_layer[np.maximum(words, 0)], 0).sum(axis=1)
    bases = rates.matched(by_length, lists_of, layer_rate)
    made = Candidates.make(lists, lists_of, WORD_GROUP, shown, *bases, words=words)
    return made.improbable(MAX_CHOICE_P, MIN_LIFT)


def related_limit(features: CorpusFeatures) -> float:
    """Return the cosine that only RELATED_SHARE of random pairs of last words exceed."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, max(len(features.endings), 1), (20_000, 2))
    words = features.endings[rows, LAST_WORD]
    words = words[(words >= 0).all(axis=1) & (words[:, 0] != words[:, 1])]
    if not len(words):
        return 1.0
    cosines = (features.neighbors[words[:, 0]] * features.neighbors[words[:, 1]]).sum(axis=1)
    return max(float(np.quantile(cosines, 1 - RELATED_SHARE)), MIN_COSINE)


def related_words(
    features: CorpusFeatures, words: Int64[ndarray, " word"], limit: float
) -> list[int]:
    """Return the first words of some that belong together, each with each; none if no two do.

    Two words, or two signs, belong together if they have the same neighbors in the corpus,
    or are forms of one word.
    """
    vectors, stems = features.neighbors[words], features.stems[words]
    same = (stems[:, None, :, None] == stems[:, None]) & (stems != 0)[:, None, :, None]
    close = (vectors @ vectors.T >= limit) | same.any(axis=(2, 3))
    is_word = stems[:, 0] != 0
    close &= is_word[:, None] == is_word
    for seed in range(len(words) - 1):
        group = [seed]
        for other in range(seed + 1, len(words)):
            if close[other, group].all() and len(group) < MAX_GROUP:
                group.append(other)
        if len(group) > 1:
            return [int(words[place]) for place in group]
    return []


def is_minor(features: CorpusFeatures, found: Candidates) -> Bool[ndarray, " candidate"]:
    """Return which candidates are single content words in fewer than half of the triggers.

    Such a word may be one of the words that make a topic.
    """
    is_word = (found.kind == GRAM) & (features.content[found.feature, 0] >= 0)
    minor: ndarray = is_word & (2 * found.k_seen < found.n_seen)
    return minor


# Selection


class Option(NamedTuple):
    """A pattern that may be shown."""

    number: int
    """An identifier of the caller."""
    surprise: float
    marks: int
    """First triggers that show it, a bit each."""
    fresh: int
    """The same, without repetitions."""
    effort: int
    """How hard it is to read; lower is better."""


WIDER_SHARE, READABLE_SHARE = 0.5, 0.6
"""Minimum surprise, relative to the best pattern, of a wider one and of a more readable one."""


def select(options: list[Option]) -> list[int]:
    """Return the numbers of the patterns to show, the most surprising first.

    A pattern is taken only if at least three of the first triggers show it that no pattern taken
    before shows. A sharp one gives way to a wider one that has all its triggers and at least three
    more; of two that mark the same, the one that is easier to read is taken.
    """
    left = sorted(options, key=lambda one: (-one.surprise, one.effort, one.number))
    taken: list[int] = []
    covered = 0
    while left := [one for one in left if (one.fresh & ~covered).bit_count() >= MIN_TRIGGERS]:
        best = max(
            (one for one in left if one is left[0] or _is_better(one, left[0])),
            key=lambda one: (one is not left[0], one.surprise, -one.effort, -one.number),
        )
        taken.append(best.number)
        covered |= best.marks
        left.remove(best)
    return taken


def _is_better(other: Option, best: Option) -> bool:
    """Return whether another pattern says what the best says, and more or better."""
    if best.marks & ~other.marks:
        return False
    n_more = (other.fresh & ~best.marks).bit_count()
    if n_more >= MIN_TRIGGERS and other.surprise >= WIDER_SHARE * best.surprise:
        return True
    return other.effort < best.effort and other.surprise >= READABLE_SHARE * best.surprise


def select_shallow(
    lists: TriggerLists, found: Candidates, holds: Bool[ndarray, " candidate"]
) -> Int64[ndarray, " selected"]:
    """Return which of the shallow candidates that hold are shown, list by list."""
    places = holds.nonzero()[0]
    some = found.where(places)
    bits = 1 << np.arange(lists.rows.shape[1])[:TOP_TRIGGERS]
    marks, fresh = (
        (shown[:, :TOP_TRIGGERS] @ bits).tolist()
        for shown in (some.shown, some.shown & lists.first[some.owner])
    )
    efforts = [EFFORT[RULES[kind]] for kind in some.kind.tolist()]
    columns = zip(range(len(places)), some.surprise.tolist(), marks, fresh, efforts, strict=True)
    of_list: dict[int, list[Option]] = {}
    for owner, columns_of_one in zip(some.owner.tolist(), columns, strict=True):
        of_list.setdefault(owner, []).append(Option(*columns_of_one))
    selected = [number for owner in sorted(of_list) for number in select(of_list[owner])]
    chosen: ndarray = places[np.array(selected, np.int64)]
    return chosen

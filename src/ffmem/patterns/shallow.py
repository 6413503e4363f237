"""Shallow patterns: what a memory's triggers end with, contain or look like too often for chance.

Of a list's first 2 · top triggers, patterns are looked for in those of odd rank and tested on those
of even rank. The halves are alike: a word that only 20 sentences contain is in 10 of each, while
ranks 1 … top would use up all 20. Repetitions are one piece of evidence: a trigger counts (it is
*fresh*) unless an earlier trigger of its list has the same context or is of the same sentence.

A candidate is shown by at least three fresh triggers of odd rank, improbably so. Its base rate is
the larger of

    (a) the mean share of the corpus' prefixes of the same lengths that show it,
    (b) the share of all triggers of the layer that show it,

so that what triggers have in common anyway is no pattern of one memory. For positions the lengths
are the pattern itself: (a) is then over all prefixes. If each of n triggers shows it with its own
probability pⱼ, then with the mean p̄

    P(X ≥ k) ≤ P(Binomial(n, p̄) ≥ k)    where k ≥ n·p̄ + 1 (Hoeffding 1956)

and below that bound the p-value is 1.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int8, Int32, Int64, UInt64
from numpy import ndarray

from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.patterns.features import (
    BINS,
    ENDINGS,
    GRAM,
    LAST_WORD,
    N_WORDS,
    SHAPES,
    CorpusFeatures,
    trigger_columns,
)
from ffmem.patterns.store import LEAST

MAX_CHOICE_P = 0.001
"""A candidate is as improbable as this in the triggers where it was seen."""

MIN_LIFT = 2.0
"""So many times as often as by chance, both where it was seen and where it is tested."""

MIN_HELD = 10
"""Fresh held-out triggers that a list must have for a test."""

MAX_COMMON = 0.3
"""Grams in a larger share of prefixes are not looked for."""

MAX_GROUP, MIN_GROUP_LIFT, MIN_GROUP_SHARE = 6, 10.0, 0.2
"""Of “ends with one of”: the most words, the least lift of each where it was seen, and the least
share of the held-out triggers (chosen so freely, few would say little)."""

RELATED_SHARE = 0.05
MIN_COSINE = 0.2
"""Two last words belong together if only this share of random pairs is closer, and not by less."""

RULES = (
    *("last-token", "last-word", *["last-n-gram"] * (N_WORDS - 1)),
    *["suffix"] * (len(ENDINGS) - N_WORDS - 1),
    *["anywhere"] * 3,
)
"""By kind of entry; shapes have their own, and `last-words` and `topic` come beside."""

EFFORT = {
    **dict.fromkeys(("last-word", "last-n-gram"), 0),
    **dict.fromkeys(("punctuation", "shape", "casing", "position"), 1),
    "last-words": 2,
    "last-token": 3,
    "suffix": 4,
    "anywhere": 5,
}
"""To read a pattern of each rule."""


class TriggerLists(NamedTuple):
    """All trigger lists of one layer, as rows of the corpus features."""

    memory: Int64[ndarray, " list"]
    sign: Int8[ndarray, " list"]
    rows: Int64[ndarray, "list rank"]
    """−1: empty."""
    fresh: Bool[ndarray, "list rank"]
    top: int
    """A pattern must recur among the first `top` triggers."""

    @property
    def seen(self) -> Bool[ndarray, "list rank"]:
        """The fresh triggers in which patterns are looked for."""
        seen: ndarray = self.fresh & (np.arange(self.rows.shape[1]) % 2 == 0)
        return seen

    @property
    def held(self) -> Bool[ndarray, "list rank"]:
        """The fresh triggers on which patterns are tested."""
        held: ndarray = self.fresh & (np.arange(self.rows.shape[1]) % 2 == 1)
        return held

    @property
    def first(self) -> Bool[ndarray, "list rank"]:
        """The fresh triggers among which a pattern must recur."""
        first: ndarray = self.fresh & (np.arange(self.rows.shape[1]) < self.top)
        return first


def n_ranks(index: Index, top: int) -> int:
    """Return how many triggers of each list are examined: one bit each in a 64-bit number."""
    return min(2 * max(top, MIN_HELD), 64, index.manifest.t)


def read_lists(
    index: Index, features: CorpusFeatures, layer: int, top: int, shuffle_seed: int | None = None
) -> TriggerLists:
    """Return the lists of a layer; with a seed, their triggers are shuffled among them."""
    signs = trigger_columns(index)
    columns = read_columns(index.folder / layer_file("triggers", layer), list(signs.values()))
    n, n_memories = n_ranks(index, top), index.layout.widths[layer]
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
        top,
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


def as_marks(shown: Bool[ndarray, "list rank"]) -> UInt64[ndarray, " list"]:
    """Return which ranks are marked, a bit each."""
    bits = np.uint64(1) << np.arange(shown.shape[1], dtype=np.uint64)
    marks: ndarray = np.where(shown, bits, np.uint64(0)).sum(axis=1, dtype=np.uint64)
    return marks


def as_ranks(marks: UInt64[ndarray, " one"], n: int) -> Bool[ndarray, "one rank"]:
    """Return which of n ranks are marked."""
    return (marks[:, None] >> np.arange(n, dtype=np.uint64) & np.uint64(1)).astype(bool)


class Candidates(NamedTuple):
    """Patterns of lists, one row each."""

    owner: Int64[ndarray, " candidate"]
    """The list."""
    entry: Int64[ndarray, " candidate"]
    """Of the features' table; for shapes −1 − bit; the number of entries for a group of words; for
    topics 0 or 1."""
    n_seen: Int64[ndarray, " candidate"]
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
    words: Int32[ndarray, "candidate word"]
    """Entries of the last words of a group; −1: none."""

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
        entry: ndarray,
        marks: ndarray,
        base_seen: ndarray,
        base: ndarray,
        words: ndarray | None = None,
    ) -> "Candidates":
        """Return candidates with their counts and p-values."""
        (n_seen, k_seen), (n_held, k_held) = (
            (
                which.sum(axis=1)[owner],
                np.bitwise_count(marks & as_marks(which)[owner]).astype(np.int64),
            )
            for which in (lists.seen, lists.held)
        )
        p_value = tail_probability(k_held, n_held, base)
        if words is None:
            words = np.full((len(owner), MAX_GROUP), -1)
        counts = (n_seen, k_seen, n_held, k_held, base_seen, base, p_value)
        return cls(owner, entry, *counts, marks, words.astype(np.int32))

    def chosen(self, max_p: float, min_lift: float) -> "Candidates":
        """Return those that are improbable where they were seen, and can be tested."""
        return self.where(
            (self.k_seen >= LEAST)
            & (self.n_held >= MIN_HELD)
            & (self.k_seen >= min_lift * self.base_seen * self.n_seen)
            & (tail_probability(self.k_seen, self.n_seen, self.base_seen) <= max_p)
        )

    def holds(self, min_lift: float) -> Bool[ndarray, " candidate"]:
        """Return which hold beyond where they were seen, whatever the q-value.

        As many of the held-out triggers must show it as 3 of 25, at the least lift.
        """
        enough = (self.k_held > 0) & (self.k_held * 25 >= LEAST * self.n_held)
        holds: ndarray = enough & (self.k_held >= min_lift * self.base * self.n_held)
        return holds

    @property
    def surprise(self) -> Float64[ndarray, " candidate"]:
        """How far from chance each is in all triggers."""
        return surprise(self.k_seen + self.k_held, self.n_seen + self.n_held, self.base)


class BaseRates:
    """How common everything is: in the corpus by length, and in the layer's triggers."""

    def __init__(self, features: CorpusFeatures, lists: TriggerLists) -> None:
        self.by_length = features.counts / np.maximum(features.totals, 1)
        self.shapes = features.shape_counts / np.maximum(features.totals, 1)
        self.overall = features.counts.sum(axis=1) / max(int(features.totals.sum()), 1)
        self.n_triggers = max(int((lists.rows >= 0).sum()), 1)
        bins = features.bins[np.maximum(lists.rows, 0)]
        self.lengths = []
        """How the lengths of each list's seen and held-out triggers are spread over the bins."""
        for which in (lists.seen, lists.held):
            counts = np.zeros((len(bins), len(BINS)))
            place, rank = which.nonzero()
            np.add.at(counts, (place, bins[place, rank]), 1)
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
    parts = []
    for column in range(GRAM):
        entries = np.where(lists.rows >= 0, features.codes[np.maximum(lists.rows, 0), column], -1)
        place, rank = (entries >= 0).nonzero()
        found = _recurring(features, lists, rates, place, rank, entries[place, rank])
        if column > N_WORDS:  # a suffix of one word is the word
            found = found.where(_has_several_words(features, lists, found))
        parts.append(found)
    place, rank = (lists.rows >= 0).nonzero()
    which, at = spread(features.gram_slices[lists.rows[place, rank]])
    entry = features.grams[at].astype(np.int64)
    rare = (entry >= 0) & (rates.overall[np.maximum(entry, 0)] < MAX_COMMON)
    place, rank = place[which][rare], rank[which][rare]
    parts.append(_recurring(features, lists, rates, place, rank, entry[rare]))
    parts += _with_shapes(features, lists, rates)
    parts.append(_word_groups(features, lists, rates))
    return Candidates.join(parts)


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
    place: Int64[ndarray, " shown"],
    rank: Int64[ndarray, " shown"],
    entry: ndarray,
) -> Candidates:
    """Return the candidates among things that triggers show: (list, rank, entry), each once."""
    n_entries = max(len(features.kinds), 1)
    keys = place * n_entries + entry
    distinct, counts = np.unique(keys[lists.seen[place, rank]], return_counts=True)
    kept = distinct[counts >= LEAST]
    marks = np.zeros(len(kept), np.uint64)
    if len(kept):
        where = np.minimum(np.searchsorted(kept, keys), len(kept) - 1)
        known = kept[where] == keys
        np.bitwise_or.at(marks, where[known], np.uint64(1) << rank[known].astype(np.uint64))
    owner, entries = np.divmod(kept, n_entries)
    in_layer = np.bincount(entry, minlength=n_entries)[entries] / rates.n_triggers
    bases = rates.matched(rates.by_length[entries], owner, in_layer)
    found = Candidates.make(lists, owner, entries, marks, *bases)
    return found.chosen(MAX_CHOICE_P, MIN_LIFT)


def _with_shapes(
    features: CorpusFeatures, lists: TriggerLists, rates: BaseRates
) -> list[Candidates]:
    """Return the candidates among the shapes of prefixes."""
    shown = np.where(lists.rows >= 0, features.shapes[np.maximum(lists.rows, 0)], np.uint32(0))
    owner = np.arange(len(shown))
    parts = []
    for bit, shape in enumerate(SHAPES):
        marks = as_marks((shown >> np.uint32(bit) & np.uint32(1)).astype(bool))
        in_layer = np.full(len(owner), int(np.bitwise_count(marks).sum()) / rates.n_triggers)
        by_length = np.broadcast_to(rates.shapes[bit], (len(owner), len(BINS)))
        if shape.rule == "position":
            overall = features.shape_counts[bit].sum() / max(int(features.totals.sum()), 1)
            by_length = np.full_like(by_length, overall)
        bases = rates.matched(by_length, owner, in_layer)
        found = Candidates.make(lists, owner, np.full(len(owner), -1 - bit), marks, *bases)
        found = found.chosen(MAX_CHOICE_P, MIN_LIFT)
        if shape.about_word:
            found = found.where(_has_several_words(features, lists, found))
        parts.append(found)
    return parts


def _has_several_words(
    features: CorpusFeatures, lists: TriggerLists, found: Candidates
) -> Bool[ndarray, " candidate"]:
    """Return which candidates have at least three different last words: else the word is it."""
    n = lists.rows.shape[1]
    shown = as_ranks(found.marks, n) & (np.arange(n) % 2 == 0)
    words = features.codes[np.maximum(lists.rows[found.owner], 0), LAST_WORD].astype(np.int64)
    # A word that no other row has is different from all others.
    words = np.where(words < 0, -1 - np.arange(n), words)
    nowhere = np.iinfo(np.int64).min
    ordered = np.sort(np.where(shown, words, nowhere), axis=1)
    n_new = (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1) + 1
    several: ndarray = n_new - (ordered[:, 0] == nowhere) >= LEAST
    return several


def _word_groups(features: CorpusFeatures, lists: TriggerLists, rates: BaseRates) -> Candidates:
    """Return “ends with one of” for lists with several last words that belong together.

    The words are chosen from the triggers of odd rank alone: each ends at least three of them, far
    more often than by chance. Their base rate is the sum of theirs: a prefix has one last word.
    """
    n_entries = max(len(features.kinds), 1)
    entries = np.where(lists.rows >= 0, features.codes[np.maximum(lists.rows, 0), LAST_WORD], -1)
    entries = entries.astype(np.int64)
    place, rank = (entries >= 0).nonzero()
    in_layer = np.bincount(entries[place, rank], minlength=n_entries) / rates.n_triggers
    keys = (place * n_entries + entries[place, rank])[lists.seen[place, rank]]
    distinct, counts = np.unique(keys, return_counts=True)
    owner, word = np.divmod(distinct[counts >= LEAST], n_entries)
    counts = counts[counts >= LEAST]
    base = rates.matched(rates.by_length[word], owner, in_layer[word])[0]
    often = counts >= MIN_GROUP_LIFT * base * lists.seen.sum(axis=1)[owner]
    owner, word, counts = owner[often], word[often], counts[often]
    order = np.lexsort((word, -counts, owner))
    owner, word = owner[order], word[order]
    owners, starts, sizes = np.unique(owner, return_index=True, return_counts=True)
    limit = related_limit(features)
    found, groups = [], []
    for one, start, size in zip(owners.tolist(), starts.tolist(), sizes.tolist(), strict=True):
        group = related_words(features, word[start : start + size], limit) if size > 1 else []
        if len(group) > 1:
            found.append(one)
            groups.append(group + [-1] * (MAX_GROUP - len(group)))
    lists_of, words = np.array(found, np.int64), np.array(groups, np.int64).reshape(-1, MAX_GROUP)
    there = words >= 0
    marks = as_marks((entries[lists_of][:, :, None] == np.where(there, words, -2)[:, None]).any(2))
    by_length = (rates.by_length[np.maximum(words, 0)] * there[..., None]).sum(axis=1)
    in_layer = np.where(there, in_layer[np.maximum(words, 0)], 0).sum(axis=1)
    bases = rates.matched(by_length, lists_of, in_layer)
    entry = np.full(len(lists_of), len(features.kinds))
    candidates = Candidates.make(lists, lists_of, entry, marks, *bases, words)
    return candidates.chosen(MAX_CHOICE_P, MIN_LIFT)


def related_limit(features: CorpusFeatures) -> float:
    """Return the cosine that only RELATED_SHARE of random pairs of last words exceed."""
    rng = np.random.default_rng(0)
    words = features.codes[rng.integers(0, max(len(features.codes), 1), (20_000, 2)), LAST_WORD]
    words = words[(words >= 0).all(axis=1) & (words[:, 0] != words[:, 1])]
    if not len(words):
        return 1.0
    cosines = (features.neighbours[words[:, 0]] * features.neighbours[words[:, 1]]).sum(axis=1)
    return max(float(np.quantile(cosines, 1 - RELATED_SHARE)), MIN_COSINE)


def related_words(
    features: CorpusFeatures, words: Int64[ndarray, " word"], limit: float
) -> list[int]:
    """Return the first words of some that belong together, each with each; none if no two do.

    Two words belong together if they stand between the same neighbours in the corpus, or have the
    same first four letters.
    """
    vectors, stems = features.neighbours[words], features.stems[words]
    close = vectors @ vectors.T >= limit
    close |= (stems[:, None] == stems) & (stems[:, None] != 0)
    for seed in range(len(words) - 1):
        group = [seed]
        for other in range(seed + 1, len(words)):
            if close[other, group].all() and len(group) < MAX_GROUP:
                group.append(other)
        if len(group) > 1:
            return [int(words[place]) for place in group]
    return []


def rule_of(features: CorpusFeatures, entry: int) -> str:
    """Return the rule that finds an entry of the table, a shape or a group of words."""
    if entry < 0:
        return SHAPES[-1 - entry].rule
    return RULES[int(features.kinds[entry])] if entry < len(features.kinds) else "last-words"


def is_content_word(
    features: CorpusFeatures, entry: Int64[ndarray, " candidate"]
) -> Bool[ndarray, " candidate"]:
    """Return which candidates are single content words anywhere in a prefix."""
    known = (entry >= 0) & (entry < len(features.kinds))
    at = np.where(known, entry, 0)
    found: ndarray = known & (features.kinds[at] == GRAM) & (features.entry_words[at, 0] >= 0)
    return found


def shallow_holds(features: CorpusFeatures, found: Candidates) -> Bool[ndarray, " candidate"]:
    """Return which shallow candidates hold beyond where they were seen."""
    is_group = found.entry >= len(features.kinds)
    few = found.k_held < MIN_GROUP_SHARE * found.n_held
    return found.holds(MIN_LIFT) & ~(is_group & few)


# Selection


class Option(NamedTuple):
    """A pattern that may be shown."""

    number: int
    """Whatever the caller knows it by."""
    surprise: float
    marks: int
    """First triggers that show it, a bit each."""
    fresh: int
    """The same, without repetitions."""
    effort: int
    """To read it: the least is best."""


WIDER_SHARE, READABLE_SHARE = 0.5, 0.6
"""Of the best pattern's surprise: what a wider one, and one that only reads better, must have."""


def select(options: list[Option]) -> list[int]:
    """Return the numbers of the patterns to show, the most surprising first.

    A pattern is taken only if at least three of the first triggers show it that no pattern taken
    before shows. A sharp one gives way to a wider one that has all its triggers and at least three
    more; of two that mark the same, the one that is easier to read is taken.
    """
    left = sorted(options, key=lambda one: (-one.surprise, one.effort, one.number))
    taken: list[int] = []
    covered = 0
    while left := [one for one in left if (one.fresh & ~covered).bit_count() >= LEAST]:
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
    if n_more >= LEAST and other.surprise >= WIDER_SHARE * best.surprise:
        return True
    return other.effort < best.effort and other.surprise >= READABLE_SHARE * best.surprise


def select_shallow(
    features: CorpusFeatures,
    lists: TriggerLists,
    found: Candidates,
    holds: Bool[ndarray, " candidate"],
) -> Int64[ndarray, " selected"]:
    """Return which of the shallow candidates that hold are shown, list by list."""
    places = holds.nonzero()[0]
    some = found.where(places)
    early = np.uint64((1 << lists.top) - 1)
    marks = (some.marks & early).tolist()
    fresh = (some.marks & as_marks(lists.first)[some.owner]).tolist()
    surprises = some.surprise.tolist()
    of_list: dict[int, list[Option]] = {}
    for number, (owner, entry) in enumerate(
        zip(some.owner.tolist(), some.entry.tolist(), strict=True)
    ):
        effort = EFFORT[rule_of(features, entry)]
        option = Option(number, surprises[number], marks[number], fresh[number], effort)
        of_list.setdefault(owner, []).append(option)
    selected = [number for owner in sorted(of_list) for number in select(of_list[owner])]
    chosen: ndarray = places[np.array(selected, np.int64)]
    return chosen

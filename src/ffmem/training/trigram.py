"""A trigram model with interpolated modified Kneser–Ney smoothing, over token ids.

    P(w | h) = max(c(hw) − D(c(hw)), 0) / c(h·) + γ(h) · P(w | h without its first token)
    γ(h) = Σ_w D(c(hw)) / c(h·);    below the unigrams: 1 / vocabulary

c counts trigrams as they occur. For bigrams and unigrams it counts the different tokens that stand
before them (continuation counts). Each order has three discounts D, for counts of 1, 2, and 3 or
more, from its counts of counts n₁ … n₄ (Chen and Goodman 1999):

    Y = n₁ / (n₁ + 2·n₂),    D(k) = k − (k + 1) · Y · nₖ₊₁ / nₖ

A context that was never seen leaves everything to the shorter one. So P(· | h) sums to 1 for every
h, and every token of the vocabulary has a share. It is the yardstick of a language model: one that
does no better has learnt no more than which three tokens follow each other.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, Integer
from numpy import ndarray

from ffmem.errors import CorpusError

LARGEST = 2_000_000
"""A trigram is one number below vocabulary³, which an int64 must hold."""

WITHOUT_COUNTS = (0.5, 1.0, 1.5)
"""The discounts of an order with too few counts to tell: some n₁ … n₄ is 0, or some D is not
above 0."""

_NOTHING = -1
"""Stands for a token before the first. Keys that begin with it are negative: none is ever seen."""


class Order(NamedTuple):
    """The n-grams of one length, as sorted numbers: a gram is its context · vocabulary + token."""

    grams: Int64[ndarray, " gram"]
    shares: Float64[ndarray, " gram"]
    """(c(hw) − D) / c(h·)"""
    contexts: Int64[ndarray, " context"]
    left: Float64[ndarray, " context"]
    """γ(h), what a context leaves to the shorter one."""
    discounts: tuple[float, float, float]

    @classmethod
    def of(
        cls, grams: Int64[ndarray, " gram"], counts: Int64[ndarray, " gram"], vocabulary: int
    ) -> "Order":
        """Return the order of these sorted n-grams and their counts."""
        discounts = _discounts(counts)
        contexts, starts, sizes = np.unique(
            grams // vocabulary, return_index=True, return_counts=True
        )
        totals = np.add.reduceat(counts, starts) if len(starts) else counts
        taken = np.array(discounts)[np.minimum(counts, 3) - 1]
        shares = (counts - taken) / np.repeat(totals, sizes)
        left = (np.add.reduceat(taken, starts) if len(starts) else taken) / totals
        return cls(grams, shares, contexts, left, discounts)

    def interpolated(
        self,
        contexts: Int64[ndarray, " word"],
        grams: Int64[ndarray, " word"],
        shorter: Float64[ndarray, " word"],
    ) -> Float64[ndarray, " word"]:
        """Return P(w | h), given that of the shorter contexts."""
        own = _found(self.grams, self.shares, grams, otherwise=0.0)
        left = _found(self.contexts, self.left, contexts, otherwise=1.0)
        found: ndarray = own + left * shorter
        return found


class Trigram(NamedTuple):
    """A trigram model of a stream of tokens."""

    vocabulary: int
    orders: tuple[Order, Order, Order]
    """Unigrams, bigrams, trigrams."""

    @classmethod
    def of(cls, ids: Integer[ndarray, " token"], vocabulary: int | None = None) -> "Trigram":
        """Return the model of a stream, over ids below `vocabulary`; by default, up to its largest.

        Name the vocabulary wherever the text to be scored may hold other tokens.
        """
        if len(ids) == 0:
            raise CorpusError("A trigram model of no tokens was asked for. Give at least one.")
        size = int(ids.max()) + 1 if vocabulary is None else vocabulary
        if size > LARGEST:
            raise CorpusError(
                f"A trigram model of {size:,} different tokens was asked for, but it can tell at"
                f" most {LARGEST:,} apart. Give a smaller vocabulary."
            )
        stream = _known(ids, size)
        pairs = stream[:-1] * size + stream[1:]
        trigrams, counts = np.unique(pairs[:-1] * size + stream[2:], return_counts=True)
        # Kinds of trigrams that end in a bigram: the tokens before it. So for unigrams.
        bigrams, before_bigrams = np.unique(trigrams % size**2, return_counts=True)
        unigrams, before_unigrams = np.unique(np.unique(pairs) % size, return_counts=True)
        return cls(
            size,
            (
                Order.of(unigrams, before_unigrams, size),
                Order.of(bigrams, before_bigrams, size),
                Order.of(trigrams, counts, size),
            ),
        )

    def probability(self, context: Sequence[int], word: int) -> float:
        """Return P(word | context), of which the last two tokens count; it may be shorter."""
        before = [_NOTHING, _NOTHING, *_known(np.array(context, np.int64), self.vocabulary)[-2:]]
        last = _known(np.array([word], np.int64), self.vocabulary)
        first, second = (np.array([token], np.int64) for token in before[-2:])
        return float(self._probabilities(first, second, last)[0])

    def probabilities(self, ids: Integer[ndarray, " token"]) -> Float64[ndarray, " token"]:
        """Return every token's probability after those before it, the first's after nothing."""
        stream = _known(ids, self.vocabulary)
        padded = np.concatenate([np.full(2, _NOTHING, np.int64), stream])
        return self._probabilities(padded[:-2], padded[1:-1], stream)

    def perplexity(self, ids: Integer[ndarray, " token"]) -> float:
        """Return exp of the mean −log P over every token of a stream."""
        if len(ids) == 0:
            raise CorpusError("The perplexity of no tokens was asked for. Give at least one.")
        return float(np.exp(-np.log(self.probabilities(ids)).mean()))

    def _probabilities(
        self,
        first: Int64[ndarray, " word"],
        second: Int64[ndarray, " word"],
        words: Int64[ndarray, " word"],
    ) -> Float64[ndarray, " word"]:
        """Return P(word | first second), from the uniform base upwards."""
        found = np.full(len(words), 1 / self.vocabulary)
        contexts = (np.zeros_like(words), second, first * self.vocabulary + second)
        for order, context in zip(self.orders, contexts, strict=True):
            found = order.interpolated(context, context * self.vocabulary + words, found)
        return found


def _discounts(counts: Int64[ndarray, " gram"]) -> tuple[float, float, float]:
    """Return D(1), D(2) and D(3 and more) from counts of counts."""
    n = [0, *(int((counts == k).sum()) for k in (1, 2, 3, 4))]
    if 0 in n[1:]:
        return WITHOUT_COUNTS
    y = n[1] / (n[1] + 2 * n[2])
    one, two, three = (k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3))
    return (one, two, three) if min(one, two, three) > 0 else WITHOUT_COUNTS


def _found(
    keys: Int64[ndarray, " key"],
    numbers: Float64[ndarray, " key"],
    asked: Int64[ndarray, " word"],
    otherwise: float,
) -> Float64[ndarray, " word"]:
    """Return the number of every key that was asked for, `otherwise` where it is not there."""
    if len(keys) == 0:
        return np.full(len(asked), otherwise)
    places = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[places] == asked, numbers[places], otherwise)


def _known(ids: Integer[ndarray, " token"], vocabulary: int) -> Int64[ndarray, " token"]:
    """Return the ids as int64, in which trigrams fit; an id outside the vocabulary is an error."""
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise CorpusError(
            f"The stream has token id {wrong}, but the trigram model's ids are 0 to"
            f" {vocabulary - 1}. Was it made with another tokenizer?"
        )
    return ids.astype(np.int64)

"""The trigram model against plain dictionaries, and as a distribution."""

from collections import Counter, defaultdict
from itertools import pairwise
from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.errors import CorpusError
from ffmem.training.trigram import WITHOUT_COUNTS, Order, Trigram

VOCABULARY = 6

streams = st.lists(st.integers(0, VOCABULARY - 2), min_size=1, max_size=60)
contexts = st.lists(st.integers(0, VOCABULARY - 1), max_size=3)


class Plain:
    """The same model, as the docstring defines it."""

    def __init__(self, stream, vocabulary):
        self.vocabulary = vocabulary
        trigrams = Counter(zip(stream, stream[1:], stream[2:], strict=False))
        bigrams = Counter(gram[1:] for gram in trigrams)
        unigrams = Counter(gram[1:] for gram in set(pairwise(stream)))
        self.counts = [unigrams, bigrams, trigrams]
        self.discounts = [self.of_order(counts) for counts in self.counts]
        self.followers = []
        for counts in self.counts:
            found = defaultdict(dict)
            for gram, count in counts.items():
                found[gram[:-1]][gram[-1]] = count
            self.followers.append(found)

    @staticmethod
    def of_order(counts):
        n1, n2, n3, n4 = (sum(c == k for c in counts.values()) for k in (1, 2, 3, 4))
        if 0 in (n1, n2, n3, n4):
            return (0.5, 1.0, 1.5)
        y = n1 / (n1 + 2 * n2)
        found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
        return found if min(found) > 0 else (0.5, 1.0, 1.5)

    def probability(self, context, word):
        context = tuple(context)[-2:]
        shorter = self.probability(context[1:], word) if context else 1 / self.vocabulary
        followers = self.followers[len(context)].get(context)
        if not followers:
            return shorter
        taken = {w: self.discounts[len(context)][min(c, 3) - 1] for w, c in followers.items()}
        total = sum(followers.values())
        own = followers[word] - taken[word] if word in followers else 0
        return own / total + sum(taken.values()) / total * shorter


@given(streams, contexts)
def test_the_probabilities_of_any_context_sum_to_one(stream, context):
    model = Trigram.of(np.array(stream), VOCABULARY)
    found = [model.probability(context, word) for word in range(VOCABULARY)]
    assert sum(found) == pytest.approx(1)
    assert min(found) > 0


@given(streams, contexts, st.integers(0, VOCABULARY - 1))
def test_plain_dictionaries_agree(stream, context, word):
    model, plain = Trigram.of(np.array(stream), VOCABULARY), Plain(stream, VOCABULARY)
    assert model.probability(context, word) == pytest.approx(plain.probability(context, word))


@pytest.fixture(scope="module")
def long():
    """A stream with every count of counts, some of whose tokens are rare."""
    random = np.random.default_rng(0)
    return np.minimum(random.zipf(1.4, 6_000), 200)


def test_plain_dictionaries_agree_where_discounts_come_from_counts(long):
    train, valid = long[:5_000], long[5_000:]
    model, plain = Trigram.of(train, 201), Plain(train.tolist(), 201)
    assert WITHOUT_COUNTS not in [order.discounts for order in model.orders]
    for order, discounts in zip(model.orders, plain.discounts, strict=True):
        assert order.discounts == pytest.approx(discounts)
    expected = [plain.probability(valid[:place], word) for place, word in enumerate(valid)]
    assert model.probabilities(valid) == pytest.approx(np.array(expected))
    assert model.perplexity(valid) == pytest.approx(exp(-sum(map(log, expected)) / len(expected)))


def test_the_probabilities_sum_to_one_after_seen_partly_seen_and_unseen_contexts(long):
    model = Trigram.of(long, 300)
    first, second = long[:2].tolist()
    for context in ([first, second], [250, first], [first, 250], [250, 251], [first], []):
        found = [model.probability(context, word) for word in range(300)]
        assert sum(found) == pytest.approx(1)
        assert min(found) > 0


def test_a_stream_that_repeats_is_predicted():
    stream = np.tile([3, 1, 4, 1, 5, 2, 6], 300)
    model = Trigram.of(stream)
    assert model.probability([3, 1], 4) > 0.99  # after 1 alone, it may be 5
    assert model.perplexity(stream) < 1.02


def test_a_model_of_one_token_knows_nothing():
    noise = np.random.default_rng(0).integers(0, 50, 100)
    assert Trigram.of(np.array([7]), 50).perplexity(noise) == pytest.approx(50)


def test_two_tokens_before_tell_more_than_one():
    random = np.random.default_rng(0)
    stream = [0, 1]
    for step in random.integers(0, 2, 21_000):
        stream.append((stream[-1] + stream[-2] + step) % 20)
    train, valid = np.array(stream[:20_000]), np.array(stream[20_000:])
    model = Trigram.of(train)
    assert model.perplexity(valid) < 2.5  # two tokens may follow any two, all 20 follow any one


def test_no_order_discounts_less_than_nothing():
    counts = np.repeat([1, 2, 3, 4], [5, 1, 20, 1])  # by the formula, D(2) = 2 − 3 · 5/7 · 20
    order = Order.of(np.arange(len(counts)), counts, len(counts))
    assert order.discounts == WITHOUT_COUNTS


def test_narrow_ids_do_not_overflow(long):
    wide = Trigram.of(long, 60_000)
    narrow = Trigram.of(long.astype(np.uint16), 60_000)
    assert narrow.perplexity(long.astype(np.uint16)) == wide.perplexity(long)


def test_the_default_vocabulary_ends_with_the_largest_id():
    assert Trigram.of(np.array([4, 2, 9])).vocabulary == 10


def test_bad_streams_are_refused():
    model = Trigram.of(np.array([0, 1, 2]))
    for wrong in (3, -1):
        with pytest.raises(CorpusError, match=rf"token id {wrong}, but .* 0 to 2"):
            model.perplexity(np.array([0, wrong]))
        with pytest.raises(CorpusError, match="another tokenizer"):
            model.probability([wrong], 0)
        with pytest.raises(CorpusError, match="another tokenizer"):
            model.probability([], wrong)
    with pytest.raises(CorpusError, match="no tokens"):
        Trigram.of(np.zeros(0, np.int64))
    with pytest.raises(CorpusError, match="no tokens"):
        model.perplexity(np.zeros(0, np.int64))
    with pytest.raises(CorpusError, match="smaller vocabulary"):
        Trigram.of(np.array([0, 3_000_000]))

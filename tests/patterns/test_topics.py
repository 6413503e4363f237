"""Vectors are sums over the words that are left; topics are closer than what is pool."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from ffmem.patterns.features import extract_features
from ffmem.patterns.shallow import TriggerLists, find_shallow, is_fresh
from ffmem.patterns.store import MIN_TRIGGERS
from ffmem.patterns.topics import (
    SHARES,
    PrefixPool,
    bag_vectors,
    find_topics,
    fit_space,
    without,
    word_bags,
)
from ffmem.progress import Progress
from tests.patterns.planted import OTHERS, TOPICS, index_of, sentences


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("topics") / "index"
    index = index_of(folder, sentences(1200), n_memories=32)
    features, words = extract_features(index, 0, Progress(quiet=True))
    return features, words, fit_space(words)


def bag(features, row):
    return features.words[slice(*features.word_slices[row])].tolist()


def test_a_bag_holds_the_content_words_of_a_prefix_once_each(corpus):
    features, words, _ = corpus
    for row in range(0, len(features.numbers), 37):
        held = bag(features, row)
        assert len(set(held)) == len(held)
        assert not {"the", "of", "and"} & {words.words[word] for word in held}


def test_removed_words_leave_the_vector_of_the_others(corpus):
    features, _, space = corpus
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(features.numbers), 200)
    removed = np.zeros((200, len(space)), bool)
    for place, row in enumerate(rows.tolist()):
        # One that is there, one that is not there.
        removed[place, [*bag(features, row)[:1], rng.integers(0, len(space))]] = True
    bags = without(word_bags(features, rows, len(space)), csr_matrix(removed))
    found = bag_vectors(bags, space)
    for place, row in enumerate(rows.tolist()):
        left = [word for word in bag(features, row) if not removed[place, word]]
        assert sorted(bags[[place]].indices.tolist()) == sorted(left)
        expected = space[left].sum(axis=0)
        norm = np.linalg.norm(expected)
        expected = expected / norm if norm > 1e-3 else 0 * expected
        np.testing.assert_allclose(found[place], expected, atol=2e-4)


def test_words_of_a_topic_lie_close(corpus):
    _, words, space = corpus
    unit = space / np.linalg.norm(space, axis=1, keepdims=True)
    of_topic = {
        topic: [words.words.index(word) for word in listed if word in words.words]
        for topic, listed in TOPICS.items()
    }
    inside = np.mean([(unit[one] @ unit[one].T).mean() for one in of_topic.values()])
    across = (unit[of_topic["naval"]] @ unit[of_topic["music"]].T).mean()
    assert inside > across + 0.3


@pytest.mark.parametrize("share", SHARES)
def test_a_stated_share_of_usual_prefixes_reaches_a_threshold_at_most(corpus, share):
    features, _, space = corpus
    pool = PrefixPool.of(features, space, features.sample)
    rng = np.random.default_rng(0)
    centres = pool.vectors[rng.integers(0, len(pool.vectors), 20)]
    cosines = centres @ pool.vectors.T
    thresholds = pool.thresholds(cosines, share)
    shares = pool.shares(cosines, thresholds)
    assert (shares <= share).all()
    assert shares.mean() > share / 3
    for bin, (start, past) in enumerate(zip(pool.starts[:-1], pool.starts[1:], strict=True)):
        counted = (cosines[:, start:past] >= thresholds[:, [bin]]).mean(axis=1)
        np.testing.assert_allclose(shares[:, bin], counted)


def listed(features, rows):
    rows = np.array(rows)
    n = len(rows)
    return TriggerLists(np.arange(n), np.ones(n, np.int8), rows, is_fresh(features, rows))


def found_in(features, space, holding):
    """Return in how many of four lists of triggers out of some rows, among random ones, one is."""
    rng = np.random.default_rng(1)
    some = [rng.permutation(holding)[:50] for _ in range(4)]
    others = [rng.permutation(len(features.numbers))[:50] for _ in range(60)]
    lists = listed(features, some + others)
    nothing = csr_matrix((lists.rows.size, len(space)), dtype=bool)
    found = find_topics(
        features, lists, space, nothing, PrefixPool.of(features, space, features.sample), 0
    )
    assert (found.k_seen >= MIN_TRIGGERS).all()
    return len({owner for owner in found.owner[found.p_value < 1e-3].tolist() if owner < 4})


def test_a_topic_is_found_among_random_triggers(corpus):
    features, words, space = corpus
    naval = {number for number, word in enumerate(words.words) if word in TOPICS["naval"]}
    rows = range(len(features.numbers))
    about = [row for row in rows if len(naval & set(bag(features, row))) >= 3]
    assert found_in(features, space, about) >= 3


def test_what_one_word_carries_is_no_topic(corpus):
    """Every word is an axis: triggers of all topics that share one are close through it alone."""
    features, words, _ = corpus
    space = np.eye(len(words.words), dtype=np.float32)
    rows = range(len(features.numbers))
    shared = [number for number, word in enumerate(words.words) if word in OTHERS]
    holding = [[row for row in rows if word in bag(features, row)] for word in shared[:8]]
    assert sum(found_in(features, space, one) for one in holding) <= 1


def test_held_out_triggers_have_no_part_in_the_choice(corpus):
    """Other triggers of even rank, the same of odd rank: the same candidates are tested."""
    features, words, space = corpus
    rng = np.random.default_rng(3)
    # The longest prefix of each sentence.
    one_each = len(features.sentence) - 1 - np.unique(features.sentence[::-1], return_index=True)[1]
    naval = {number for number, word in enumerate(words.words) if word in TOPICS["naval"]}
    about = [row for row in one_each.tolist() if len(naval & set(bag(features, row))) >= 2]
    rows = [rng.permutation(about)[:50] for _ in range(10)]
    rows = np.array(rows + [rng.permutation(one_each)[:50] for _ in range(60)])
    others = rows.copy()
    others[:, 1::2] = np.roll(rows[:, 1::2], 7, axis=0)
    both = [listed(features, some) for some in (rows, others)]
    comparable = both[0].fresh.all(axis=1) & both[1].fresh.all(axis=1)
    assert comparable.sum() > 10
    nothing = csr_matrix((rows.size, len(space)), dtype=bool)
    pool = PrefixPool.of(features, space, features.sample)
    for find in (
        lambda lists: find_topics(features, lists, space, nothing, pool, 0),
        lambda lists: find_shallow(features, lists),
    ):
        first, second = (
            {row for row in zip(*map(np.ndarray.tolist, found), strict=True) if comparable[row[0]]}
            for found in ((one.owner, one.kind, one.feature, one.k_seen) for one in map(find, both))
        )
        assert first == second != set()


def test_a_trigger_does_not_vouch_for_itself(corpus):
    """Random prefixes: a center made of five of them would otherwise be close to those five."""
    features, _, space = corpus
    pool = PrefixPool.of(features, space, features.sample)
    rng = np.random.default_rng(2)
    lists = listed(features, [rng.integers(0, len(features.numbers), 50) for _ in range(300)])
    nothing = csr_matrix((lists.rows.size, len(space)), dtype=bool)
    found = find_topics(features, lists, space, nothing, pool, 0)
    assert len(found.owner) <= 15
    assert (found.p_value < 0.01).sum() <= 3

"""Vectors are sums over the words that are left; topics are closer than what is usual."""

import numpy as np
import pytest

from ffmem.patterns.around import SHARES, Around
from ffmem.patterns.closeness import topics
from ffmem.patterns.corpus_view import look
from ffmem.patterns.lists import Lists, fresh
from ffmem.patterns.lsa import LatentSpace
from ffmem.patterns.pattern import LEAST
from ffmem.progress import Progress
from tests.patterns.planted import OTHERS, TOPICS, index_of, sentences


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("topics") / "index"
    index = index_of(folder, sentences(1200), n_memories=32)
    view, words = look(index, 0, Progress(quiet=True))
    return view, words, LatentSpace.fit(words)


def bag(view, row):
    return view.words[slice(*view.word_slices[row])].tolist()


def test_a_bag_holds_the_content_words_of_a_prefix_once_each(corpus):
    view, words, _ = corpus
    for row in range(0, len(view.numbers), 37):
        held = bag(view, row)
        assert len(set(held)) == len(held)
        assert not {"the", "of", "and"} & {words.words[word] for word in held}


def test_words_that_are_taken_out_leave_the_vector_of_the_others(corpus):
    view, _, space = corpus
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(view.numbers), 200)
    removed = np.full((200, 4), -1, np.int32)
    for place, row in enumerate(rows.tolist()):
        held = bag(view, row)
        # One that is there, the same again, one that is not there.
        removed[place, :3] = [*(held[:1] or [-1]) * 2, rng.integers(0, len(space._words))]
    found = space.vectors(view, rows, removed)
    for place, row in enumerate(rows.tolist()):
        left = [word for word in bag(view, row) if word not in removed[place].tolist()]
        expected = space._words[left].sum(axis=0)
        norm = np.linalg.norm(expected)
        expected = expected / norm if norm > 1e-3 else 0 * expected
        np.testing.assert_allclose(found[place], expected, atol=2e-4)


def test_words_of_a_topic_lie_close(corpus):
    _, words, space = corpus
    unit = space._words / np.linalg.norm(space._words, axis=1, keepdims=True)
    of_topic = {
        topic: [words.words.index(word) for word in listed if word in words.words]
        for topic, listed in TOPICS.items()
    }
    inside = np.mean([(unit[one] @ unit[one].T).mean() for one in of_topic.values()])
    across = (unit[of_topic["naval"]] @ unit[of_topic["music"]].T).mean()
    assert inside > across + 0.3


@pytest.mark.parametrize("share", SHARES)
def test_a_stated_share_of_usual_prefixes_reaches_a_threshold_at_most(corpus, share):
    view, _, space = corpus
    around = Around.of(view, space, view.sample)
    rng = np.random.default_rng(0)
    centres = around.vectors[rng.integers(0, len(around.vectors), 20)]
    cosines = around.cosines(centres)
    thresholds = around.thresholds(cosines, share)
    shares = around.shares(cosines, thresholds)
    assert (shares <= share).all()
    assert shares.mean() > share / 3
    for bin, (start, past) in enumerate(zip(around.starts[:-1], around.starts[1:], strict=True)):
        counted = (cosines[:, start:past] >= thresholds[:, [bin]]).mean(axis=1)
        np.testing.assert_allclose(shares[:, bin], counted)


def listed(view, rows):
    rows = np.array(rows)
    n = len(rows)
    return Lists(np.arange(n), np.ones(n, np.int8), rows, fresh(view, rows), 25)


def found_in(view, space, holding):
    """Return in how many of four lists of triggers out of some rows, among random ones, one is."""
    rng = np.random.default_rng(1)
    some = [rng.permutation(holding)[:50] for _ in range(4)]
    others = [rng.permutation(len(view.numbers))[:50] for _ in range(60)]
    lists = listed(view, some + others)
    nothing = np.full((*lists.rows.shape, 1), -1, np.int32)
    found = topics(view, lists, space, nothing, Around.of(view, space, view.sample), 0)
    assert (found.k_seen >= LEAST).all()
    return len({owner for owner in found.owner[found.p_value < 1e-3].tolist() if owner < 4})


def test_a_topic_is_found_among_random_triggers(corpus):
    view, words, space = corpus
    naval = {number for number, word in enumerate(words.words) if word in TOPICS["naval"]}
    rows = range(len(view.numbers))
    about = [row for row in rows if len(naval & set(bag(view, row))) >= 3]
    assert found_in(view, space, about) >= 3


def test_what_one_word_carries_is_no_topic(corpus):
    """Every word is an axis: triggers of all topics that share one are close through it alone."""
    view, words, _ = corpus
    space = LatentSpace(np.eye(len(words.words), dtype=np.float32))
    rows = range(len(view.numbers))
    shared = [number for number, word in enumerate(words.words) if word in OTHERS]
    holding = [[row for row in rows if word in bag(view, row)] for word in shared[:8]]
    assert sum(found_in(view, space, one) for one in holding) <= 1


def test_a_trigger_does_not_vouch_for_itself(corpus):
    """Random prefixes: a centre made of five of them would otherwise be close to those five."""
    view, _, space = corpus
    around = Around.of(view, space, view.sample)
    rng = np.random.default_rng(2)
    lists = listed(view, [rng.integers(0, len(view.numbers), 50) for _ in range(300)])
    nothing = np.full((*lists.rows.shape, 1), -1, np.int32)
    found = topics(view, lists, space, nothing, around, 0)
    assert len(found.owner) <= 15
    assert (found.p_value < 0.01).sum() <= 3

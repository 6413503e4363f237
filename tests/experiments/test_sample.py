"""The sample of Section 5: its laws, and its two ways to draw."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffmem.corpus.sentences import TokenSentence
from ffmem.errors import CorpusError
from ffmem.experiments.sample import draw_sample

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=40)


def sentences(lengths):
    return [TokenSentence(None, list(range(n)), None, None) for n in lengths]


def places(drawn):
    return [(example.number, p) for example, p in drawn.prefixes()]


@given(LENGTHS, st.integers(1, 50), st.integers(0, 3), st.sampled_from(["sentences", "tokens"]))
@settings(max_examples=60, deadline=None)
def test_a_sample_has_the_size_asked_for_or_all_there_is(lengths, size, seed, how):
    drawn = draw_sample(sentences(lengths), how, size, seed, 1, None)
    there = len(lengths) if how == "sentences" else sum(lengths)
    found = places(drawn)
    assert len(found) == len(set(found)) == min(size, there)
    assert found == sorted(found)
    assert all(1 <= p <= lengths[number] for number, p in found)
    if how == "sentences":
        assert len({number for number, _ in found}) == len(found)


@given(LENGTHS, st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_all_takes_every_prefix(lengths, seed):
    found = places(draw_sample(sentences(lengths), "sentences", None, seed, 1, None))
    assert found == [(i, p) for i, n in enumerate(lengths) for p in range(1, n + 1)]


def test_the_empty_prefix_is_drawn_where_it_counts():
    found = places(draw_sample(sentences([2, 1]), "sentences", None, 0, 0, None))
    assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_the_same_seed_draws_the_same_and_another_draws_others():
    lengths = [9] * 200
    same = [places(draw_sample(sentences(lengths), "sentences", 50, 7, 1, None)) for _ in range(2)]
    other = places(draw_sample(sentences(lengths), "sentences", 50, 8, 1, None))
    assert same[0] == same[1] != other


def test_a_larger_sample_holds_the_smaller_one():
    lengths = [9] * 200
    small, large = (
        set(places(draw_sample(sentences(lengths), "tokens", size, 0, 1, None)))
        for size in (50, 80)
    )
    assert small < large


def test_sentences_are_drawn_however_long_and_prefixes_of_one_uniformly():
    lengths = [4] * 6000
    drawn = places(draw_sample(sentences(lengths), "sentences", 4000, 0, 1, None))
    counts = Counter(p for _, p in drawn)
    assert set(counts) == {1, 2, 3, 4}
    assert max(abs(count - 1000) for count in counts.values()) < 5 * (1000 * 0.75) ** 0.5
    assert abs(np.mean([number for number, _ in drawn]) - 3000) < 5 * 3000 / 3**0.5 / 4000**0.5


def test_tokens_are_drawn_uniformly_over_prefixes_and_sentences_over_sentences():
    lengths = [1] * 2000 + [9] * 2000  # so many prefixes that some are dropped on the way
    by_token = places(draw_sample(sentences(lengths), "tokens", 2000, 0, 1, None))
    by_sentence = places(draw_sample(sentences(lengths), "sentences", 2000, 0, 1, None))
    short = [np.mean([number < 2000 for number, _ in found]) for found in (by_token, by_sentence)]
    assert abs(short[0] - 0.1) < 0.02
    assert abs(short[1] - 0.5) < 0.04


def test_a_sentence_longer_than_the_context_is_cut_and_counted():
    drawn = draw_sample(
        [TokenSentence("abc", [0, 1, 2], [0, 1, 2], [1, 2, 3])], "sentences", None, 0, 1, 2
    )
    (example,) = drawn.sentences
    assert example.sentence == TokenSentence("abc", [0, 1], [0, 1], [1, 2])
    assert drawn.n_cut == 1
    assert drawn.lengths.tolist() == [1, 2]


def test_next_tokens_and_lengths_are_those_of_the_prefixes():
    drawn = draw_sample(sentences([2, 1]), "sentences", None, 0, 1, None)
    assert drawn.next_tokens().tolist() == [1, -1, -1]
    assert drawn.describe() == {
        "prefixes": 3,
        "sentences": 2,
        "of_sentences": 2,
        "cut": 0,
        "corpus_hash": drawn.corpus_hash,
        "drawn": [[0, 1], [0, 2], [1, 1]],
        "lengths": {"1": 2, "2": 1},
    }


def test_a_corpus_without_a_prefix_is_an_error():
    with pytest.raises(CorpusError, match="No prefix can be drawn"):
        draw_sample(sentences([]), "sentences", 5, 0, 1, None)

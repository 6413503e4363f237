"""Planted patterns are found, called by their kind, and nothing is found where nothing is."""

import itertools
import math
from collections import Counter

import pytest

from ffmem.errors import FfmemError
from ffmem.patterns.detect import detect
from ffmem.patterns.features import BINS
from ffmem.patterns.store import MIN_TRIGGERS, TOP_TRIGGERS, Patterns
from ffmem.progress import Progress
from tests.indexing.folders import content
from tests.patterns.planted import (
    BOILERPLATE,
    LAYERS,
    MEMORIES,
    N_RARE,
    RARE,
    TOPICS,
    YEARS,
    T,
    articles,
    drawn,
    every_prefix,
    index_of,
    plant,
    sentences,
)

QUIET = Progress(quiet=True)


def about(topic):
    """Return whether a prefix is about a topic: four of its words, whatever it ends with."""
    words = set(TOPICS[topic])
    return lambda prefix: sum(word in words for word in prefix[:-1]) >= 4


PLANTED = {
    "word": lambda prefix: prefix[-1] == "base",
    "gram": lambda prefix: prefix[-2:] == ["military", "base"],
    "anywhere": lambda prefix: "military" in prefix[:-3],
    "topic": about("naval"),
    "years": lambda prefix: prefix[-1] in YEARS,
    "rare": lambda prefix: prefix[-1] == RARE,
    "boilerplate": lambda prefix: prefix == BOILERPLATE,
    "first": lambda prefix: len(prefix) == 1,
}
PLACES = {name: (0, memory) for memory, name in enumerate(PLANTED)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return index_of(tmp_path_factory.mktemp("planted") / "plain", sentences())


@pytest.fixture(scope="module")
def lists(plain):
    """One memory per planted pattern in the positive lists of layer 0, all others at random."""
    prefixes = every_prefix(plain)
    found = {}
    for seed, (layer, memory, sign) in enumerate(
        itertools.product(range(LAYERS), range(MEMORIES), (1, -1))
    ):
        found[layer, memory, sign] = drawn(prefixes, seed)
    for seed, (name, fires) in enumerate(PLANTED.items()):
        found[*PLACES[name], 1] = drawn([one for one in prefixes if fires(one[2])], seed)
    rare = found[*PLACES["rare"], 1]
    assert len(rare) == N_RARE
    found[*PLACES["rare"], 1] = rare + drawn(prefixes, 99)[: T - N_RARE]
    return found


@pytest.fixture(scope="module")
def found(plain, lists, tmp_path_factory):
    index = plant(plain, tmp_path_factory.mktemp("planted") / "index", lists)
    summary = detect(index, progress=QUIET)
    return index, Patterns(index, "automatic"), summary


def positive(patterns, name):
    return [one for one in patterns.of(PLACES[name]) if one.sign == 1]


def test_a_memory_that_fires_on_a_word_ends_with_it(found):
    (pattern,) = positive(found[1], "word")
    assert (pattern.kind, pattern.rule) == ("shallow", "last-word")
    assert (pattern.what, pattern.description) == ("base", "ends with “base”")
    assert (len(pattern.ranks), len(pattern.held_ranks), pattern.recall) == (50, pattern.held, 1.0)


def test_a_memory_that_fires_on_an_n_gram_ends_with_all_of_it(found):
    (pattern,) = positive(found[1], "gram")
    assert (pattern.kind, pattern.description) == ("shallow", "ends with “military base”")


def test_a_memory_that_fires_after_a_word_contains_it(found):
    patterns = positive(found[1], "anywhere")
    best = patterns[0]
    assert (best.kind, best.rule) == ("shallow", "anywhere")
    assert {one.kind for one in patterns} == {"shallow"}
    assert best.description.startswith("contains “military")


def test_a_memory_that_fires_on_a_topic_is_semantic_and_named_by_its_words(found):
    patterns = positive(found[1], "topic")
    best = max(patterns, key=lambda one: one.recall)
    assert (best.kind, best.rule) == ("semantic", "topic")
    words = best.what.split(", ")
    assert len(words) == 5
    assert set(words) <= set(TOPICS["naval"])
    assert best.description == f"about: {best.what}"


def test_a_word_that_the_first_25_triggers_use_up_is_confirmed(found):
    """The corpus has it 20 times: none would be left to test it on ranks 26 to 50."""
    (pattern,) = positive(found[1], "rare")
    assert pattern.description == f"ends with “{RARE}”"
    assert pattern.ranks == tuple(range(1, N_RARE + 1))
    assert pattern.held_ranks == tuple(range(2, N_RARE + 1, 2))


def test_a_memory_that_fires_on_years_ends_with_a_year(found):
    (pattern,) = positive(found[1], "years")
    assert (pattern.kind, pattern.rule, pattern.what) == ("shallow", "shape", "year")


def test_a_memory_that_fires_at_the_beginning_is_told_by_position(found):
    best = positive(found[1], "first")[0]
    assert (best.kind, best.rule, best.what) == ("shallow", "position", "first")


def test_one_prefix_in_many_sentences_is_no_pattern(found, lists):
    assert len(lists[*PLACES["boilerplate"], 1]) == 50
    assert positive(found[1], "boilerplate") == []


def test_random_triggers_have_patterns_in_few_memories(found, lists):
    planted = {(*place, 1) for place in PLACES.values()}
    owners = {
        (*one.cell[:2], one.sign)
        for layer in range(LAYERS)
        for patterns in found[1].layer(layer).values()
        for one in patterns
    }
    assert len(owners - planted) < 0.05 * (len(lists) - len(planted))


def test_shuffled_triggers_have_patterns_in_few_memories_and_none_is_kept(plain, lists, tmp_path):
    index = plant(plain, tmp_path / "index", lists)
    summary = detect(index, shuffled=True, progress=QUIET)
    assert summary.lists == len(lists) == 256
    assert summary.memories_with_pattern < 0.05 * summary.memories
    assert "SHUFFLED" in str(summary)
    assert not (index.folder / "patterns").exists()


def test_the_summary_counts_what_is_kept(found):
    _, patterns, summary = found
    kept = [
        one for layer in range(2) for several in patterns.layer(layer).values() for one in several
    ]
    assert summary.kept == Counter(one.rule for one in kept)
    assert summary.lists_with_pattern == len({(one.cell, one.sign) for one in kept})
    assert summary.lists == sum(len(patterns.lists(layer)) for layer in range(2)) == 256
    assert summary.lists_too_short_to_test == 1  # the boilerplate
    assert patterns.settings["found"] == summary.to_dict()
    assert patterns.settings["source"] == "automatic"
    assert summary.shuffled_control["lists"] == 256
    assert all(summary.tested[rule] >= n for rule, n in summary.kept.items())


def test_scores_are_those_of_a_plain_count_over_all_prefixes(found, lists):
    index, patterns, _ = found
    prefixes = every_prefix(index)
    words = {number: prefix for number, _, prefix in prefixes}
    shows = {"word": lambda prefix: prefix[-1] == "base", "years": PLANTED["years"]}
    for name, show in shows.items():
        (pattern,) = positive(patterns, name)
        held = held_out(lists[*PLACES[name], 1], words)
        bins = [bin_of(prefix) for prefix in held]
        of_bin = {bin: [p for _, _, p in prefixes if bin_of(p) == bin] for bin in set(bins)}
        share = {bin: sum(map(show, of_bin[bin])) / len(of_bin[bin]) for bin in set(bins)}
        matched = sum(share[bin] for bin in bins) / len(bins)
        pool = [words[n] for (layer, *_), numbers in lists.items() if layer == 0 for n in numbers]
        base = max(matched, sum(map(show, pool)) / len(pool))
        n, k = len(held), sum(map(show, held))
        tail = sum(math.comb(n, j) * base**j * (1 - base) ** (n - j) for j in range(k, n + 1))
        assert pattern.held == n
        assert pattern.base == pytest.approx(base)
        assert pattern.recall == pytest.approx(k / n)
        assert pattern.p_value == pytest.approx(tail)
        assert pattern.lift == pytest.approx(k / n / base)
        assert pattern.precision == pytest.approx(k / n / (k / n + base))


def bin_of(prefix):
    return sum(len(prefix) >= least for least in BINS.tolist())


def held_out(numbers, words):
    """Return the prefixes of even rank whose last eight words no earlier trigger has."""
    contexts = [words[number][-8:] for number in numbers]
    return [
        words[number]
        for rank, number in enumerate(numbers)
        if rank % 2 == 1 and contexts[rank] not in contexts[:rank]
    ]


def test_the_held_out_triggers_are_counted_as_they_are_listed(found):
    for layer in range(LAYERS):
        for several in found[1].layer(layer).values():
            for one in several:
                assert one.recall == len(one.held_ranks) / one.held
                assert sum(rank <= TOP_TRIGGERS for rank in one.ranks) >= MIN_TRIGGERS


def test_marks_are_exactly_the_triggers_that_show_it(found, lists):
    index, patterns, _ = found
    words = {number: prefix for number, _, prefix in every_prefix(index)}
    checked = 0
    for layer in range(LAYERS):
        for several in patterns.layer(layer).values():
            for one in several:
                numbers = lists[*one.cell[:2], one.sign]
                if one.rule in ("last-word", "last-words"):
                    wanted = {word.casefold() for word in one.what.split(", ")}
                    shown = [words[n][-1].casefold() in wanted for n in numbers]
                elif one.rule == "anywhere":
                    gram = f" {one.what.casefold()} "
                    shown = [gram in f" {' '.join(words[n]).casefold()} " for n in numbers]
                else:
                    continue
                ranks = tuple(rank for rank, is_shown in enumerate(shown, start=1) if is_shown)
                assert one.ranks == ranks
                assert set(one.held_ranks) <= {rank for rank in ranks if rank % 2 == 0}
                checked += 1
    assert checked >= 2


@pytest.fixture(scope="module")
def from_articles(tmp_path_factory):
    """Memory 0 fires on a topic, often in one article; memory 1 in that article alone."""
    root = tmp_path_factory.mktemp("articles")
    plain = index_of(root / "plain", articles())
    prefixes = every_prefix(plain)
    lists = {
        (layer, memory, sign): drawn(prefixes, seed)
        for seed, (layer, memory, sign) in enumerate(
            itertools.product(range(LAYERS), range(MEMORIES), (1, -1))
        )
    }
    naval = [one for one in prefixes if about("naval")(one[2])]
    inside, outside = ([one for one in naval if (one[1] < 30) == is_in] for is_in in (True, False))
    mixed = drawn(outside, 1, T - 18)
    for place, number in enumerate(drawn(inside, 1, 18)):
        mixed.insert(2 * place + place % 2, number)
    lists[0, 0, 1] = mixed
    lists[0, 1, 1] = drawn([one for one in prefixes if one[1] < 30], 2)
    index = plant(plain, root / "index", lists)
    detect(index, progress=QUIET)
    return Patterns(index, "automatic")


def test_the_words_of_a_topic_are_not_those_of_one_article(from_articles):
    topics = [one for one in from_articles.of("L0N0") if one.rule == "topic"]
    assert topics
    for one in topics:
        assert set(one.what.split(", ")) <= set(TOPICS["naval"])


def test_what_one_article_carries_is_no_topic(from_articles):
    patterns = [one for one in from_articles.of("L0N1") if one.sign == 1]
    assert {one.kind for one in patterns} == {"shallow"}


def test_the_same_index_gives_the_same_bytes_with_more_processes(found, plain, lists, tmp_path):
    index = plant(plain, tmp_path / "index", lists)
    detect(index, workers=2, progress=QUIET)
    assert content(index.folder / "patterns") == content(found[0].folder / "patterns")


def test_patterns_move_with_their_memories(found, plain, lists, tmp_path):
    moved = {
        (layer, MEMORIES - 1 - memory, sign): numbers
        for (layer, memory, sign), numbers in lists.items()
    }
    index = plant(plain, tmp_path / "index", moved)
    detect(index, progress=QUIET)
    patterns = Patterns(index, "automatic")
    for layer in range(LAYERS):
        expected = {
            MEMORIES - 1 - memory: [one._replace(cell=None) for one in several]
            for memory, several in found[1].layer(layer).items()
        }
        got = {
            memory: [one._replace(cell=None) for one in several]
            for memory, several in patterns.layer(layer).items()
        }
        assert got == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"alpha": 0.0}, "between 0 and 1"),
        ({"workers": 0}, "use a whole number at least 1"),
    ],
)
def test_what_cannot_be_done_is_refused(plain, asked, message):
    with pytest.raises(FfmemError, match=message):
        detect(plain, **asked, progress=QUIET)


def test_an_index_without_triggers_to_test_on_is_refused(tiny_index):
    with pytest.raises(FfmemError, match=r"keeps 6 triggers of each memory.*index with `t` 50"):
        detect(tiny_index, progress=QUIET)

"""Features of the corpus are those of a plain reading, prefix by prefix."""

import random
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ffmem
from ffmem.patterns import features as features_module
from ffmem.patterns.detect import detect
from ffmem.patterns.features import (
    BINS,
    GRAM,
    N_STEMS,
    SHAPE,
    SHAPES,
    CorpusFeatures,
    UnitTypes,
    extract_features,
    find_units,
    read_blocks,
    stems,
)
from ffmem.patterns.shallow import is_fresh, read_lists
from ffmem.patterns.store import Patterns
from ffmem.progress import Progress
from tests.indexing.folders import indexed, memories, write_corpus
from tests.patterns.planted import index_of, plain_units
from tests.texts import LINES

QUIET = Progress(quiet=True)

HARD = [
    *LINES,
    *(f"העיר {n} של העיתון והבסיס {n}" for n in range(20)),
    *(f"शहर में प्रेस {n} है और शहर" for n in range(20)),
    *(f"😀 wave {n} 👋🏽 at the café 戦場のヴァル" for n in range(20)),
]


@pytest.fixture(scope="module")
def hard(index_of, tmp_path_factory):
    """A gated model over text of many scripts, cut into tokens inside characters."""
    folder = tmp_path_factory.mktemp("hard")
    (folder / "hard.txt").write_text("\n".join(HARD) + "\n", encoding="utf-8")
    corpus = ffmem.Corpus(str(folder / "hard.txt"), unit="line")
    return index_of("llama", corpus, folder / "index", t=50)


@pytest.fixture(scope="module")
def wordless(tmp_path_factory):
    """A corpus of token ids alone."""
    folder = tmp_path_factory.mktemp("ids")
    rng = random.Random(0)
    ids = [[rng.randint(3, 12) for _ in range(rng.randint(2, 9))] for _ in range(80)]
    pq.write_table(pa.table({"ids": ids}), folder / "ids.parquet")
    corpus = ffmem.Corpus(str(folder / "ids.parquet"), unit="line", column="ids")
    model = memories()
    return ffmem.index(model, corpus, folder / "index", t=50, start="bos", threads=1)


@pytest.fixture(params=["hard", "wordless", "ungated_index"])
def any_index(request):
    return request.getfixturevalue(request.param)


def plain_prefixes(index):
    """Return (number, length, units) of every prefix of a corpus with text."""
    return [
        (row.offset + length, length, plain_units(row.text[: row.ends[length - 1]].casefold()))
        for row in index.sentences.rows(0, index.sentences.n_sentences)
        for length in range(1, len(row.ids) + 1)
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_counts_of_last_units_are_those_of_a_plain_reading(hard, n):
    features, _ = extract_features(hard, 0, QUIET)
    every = plain_prefixes(hard)
    units_of = {number: units for number, _, units in every}
    checked = set()
    for row, number in enumerate(features.numbers.tolist()):
        last, entry = units_of[number][-n:], int(features.endings[row, n])
        if entry < 0 or entry in checked:
            continue
        bins = [
            np.searchsorted(BINS, length, side="right") - 1
            for _, length, units in every
            if units[-n:] == last
        ]
        assert features.counts[entry].tolist() == np.bincount(bins, minlength=len(BINS)).tolist()
        checked.add(entry)
    assert len(checked) > 50


def test_grams_are_counted_in_every_prefix_that_holds_them(wordless):
    features, _ = extract_features(wordless, 0, QUIET)
    rows = list(wordless.sentences.rows(0, 80))
    prefixes = [row.ids[:length] for row in rows for length in range(1, len(row.ids) + 1)]
    for entry in ((features.kinds >= GRAM) & (features.kinds < SHAPE)).nonzero()[0].tolist():
        sentence, start, end = features.examples[entry].tolist()
        text = " ".join(wordless.token(id) for id in rows[sentence].ids)[start:end]
        wanted = [int(word[1:]) for word in text.split()]
        holds = [
            len(prefix)
            for prefix in prefixes
            if any(prefix[at : at + len(wanted)] == wanted for at in range(len(prefix)))
        ]
        bins = np.searchsorted(BINS, holds, side="right") - 1
        assert features.counts[entry].tolist() == np.bincount(bins, minlength=len(BINS)).tolist()
    assert features.totals.sum() == len(prefixes)


def test_a_corpus_read_in_small_blocks_is_the_same(any_index, monkeypatch):
    whole, words = extract_features(any_index, 0, QUIET)
    monkeypatch.setattr(features_module, "BLOCK_SENTENCES", 7)
    parts, same = extract_features(any_index, 0, QUIET)
    assert same.words == words.words
    for name in (
        *("numbers", "endings", "counts", "shapes", "totals", "kinds", "words", "context"),
        *("passage", "stems"),
    ):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


def test_what_is_saved_is_what_is_loaded(wordless, tmp_path):
    features, _ = extract_features(wordless, 0, QUIET)
    features.save(tmp_path)
    loaded = CorpusFeatures.load(tmp_path)
    for name in features.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(features, name))


def test_all_prefixes_of_a_block_are_prefixes_of_the_index(any_index):
    n = sum(len(block.numbers) for block in read_blocks(any_index, UnitTypes()))
    assert n == any_index.manifest.corpus.tokens


def test_hard_texts_are_examined_to_the_end(any_index, tmp_path):
    shutil.copytree(any_index.folder, tmp_path / "index")
    index = ffmem.open(tmp_path / "index")
    summary = detect(index, progress=QUIET)
    patterns = Patterns(index, "automatic")
    assert summary.lists == sum(len(patterns.lists(layer)) for layer in range(index.n_layers))
    for layer in range(index.n_layers):
        for several in patterns.layer(layer).values():
            for one in several:
                assert one.description.isprintable()
                assert len(one.ranks) >= 3
                assert one.q_value <= 0.05


def test_repetitions_of_a_context_or_of_a_sentence_do_not_count(hard):
    features, _ = extract_features(hard, 0, QUIET)
    lists = read_lists(hard, features, 0)
    again = np.concatenate([lists.rows[:, :25], lists.rows[:, :25]], axis=1)
    counted = is_fresh(features, again)
    assert not counted[:, 25:].any()
    for rows, kept in zip(again.tolist(), counted.tolist(), strict=True):
        seen_contexts, seen_sentences = set(), set()
        for row, is_kept in zip(rows, kept, strict=True):
            if row < 0:
                assert not is_kept
                continue
            context, sentence = int(features.context[row]), int(features.sentence[row])
            assert is_kept == (context not in seen_contexts and sentence not in seen_sentences)
            seen_contexts.add(context)
            seen_sentences.add(sentence)


def test_a_small_index_of_whole_words_is_examined(tmp_path):
    index = indexed(tmp_path / "index", write_corpus(tmp_path / "lines.txt", 200), t=50)
    assert detect(index, progress=QUIET).lists > 0


# Python's Unicode tables may be older than those of `regex`.
ASSIGNED = st.characters(exclude_categories=["Cn", "Cs"])


@given(st.text(ASSIGNED, max_size=60) | st.sampled_from(LINES))
def test_units_are_those_of_a_plain_reading(text):
    assert [text[start:end] for start, end in find_units(text)] == plain_units(text)


def test_different_words_have_different_hashes_whatever_their_case():
    types = UnitTypes()
    for n in range(20_000):
        assert types[f"w{n}"] == n
    assert len(set(types.hashes)) == 20_000
    assert types.hashes[types["W7"]] == types.hashes[7]


def test_neighbors_and_stems_bring_words_together(related):
    features, rows_of = related
    entry = {word: int(features.endings[rows[0], 1]) for word, rows in rows_of.items()}

    def cosine(one, other):
        return float(features.neighbors[entry[one]] @ features.neighbors[entry[other]])

    assert min(cosine("monday", "friday"), cosine("red", "blue")) > 0.8
    assert cosine("monday", "red") < 0.3
    stems = {word: set(features.stems[entry[word]].tolist()) - {0} for word in entry}
    assert stems["base"] & stems["bases"]
    assert not stems["port"] & stems["portuguese"]


FORMS = [
    *(("day", "days"), ("base", "bases"), ("box", "boxes"), ("study", "studies")),
    *(("study", "studied"), ("walk", "walked"), ("walks", "walking"), ("make", "making")),
    *(("run", "running"), ("named", "names"), ("church", "churches")),
]
OTHER_WORDS = [
    *(("port", "portuguese"), ("port", "porter"), ("nation", "national"), ("north", "northern")),
    *(("her", "here"), ("pass", "pas"), ("thin", "thing"), ("re", "red"), ("w", "wing")),
    *(("19", "199"), ("1990", "1990s"), ("bus", "bu"), ("this", "thi"), ("mass", "mas")),
]


@pytest.mark.parametrize(("one", "other"), FORMS)
def test_forms_of_one_word_share_a_stem(one, other):
    assert set(stems(one)) & set(stems(other))
    assert max(len(stems(one)), len(stems(other))) <= N_STEMS


@pytest.mark.parametrize(("one", "other"), OTHER_WORDS)
def test_words_that_only_begin_alike_share_none(one, other):
    assert not set(stems(one)) & set(stems(other))


@given(st.text(max_size=8))
def test_any_text_has_few_stems_and_is_one_of_them(text):
    assert text in stems(text)
    assert len(stems(text)) <= N_STEMS


ENDS = {
    "It was in 1990": {"year", "number"},
    "It was in 2001": {"year", "number"},
    "There were 2990": {"number"},
    "There were 42": {"number"},
    "On the 19th": {"mixed"},
    "The reign of Louis XIV": {"roman", "capitals"},
    "He left the NHL": {"capitals"},
    "She met Mary": {"capitalized"},
    "She met McDonald": {"camel"},
    "Mary": {"first"},
    "the well-known": {"hyphenated"},
    "a – b": set(),
    "one , two ,": {"comma"},
    "so it ended there .": {"stop"},
    "so it goes ( a": {"in-brackets"},
    "so it goes (": {"opening"},
    "so it goes ( a )": {"closing"},
    'he said " no one': {"in-quotes"},
    'he said " no "': {"quote"},
    "a year from 1 –": {"dash"},
    "as it follows :": {"colon"},
    "about ten in %": {"symbol"},
    "Mary Ann Baker and Tom Hill": {"title", "capitalized"},
    "स्टेशन में क्या है 😀": {"symbol"},
}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The shapes of every line, and of its parts, by text; each line goes on with one word."""
    lines = [f"{line} onwards" for line in ENDS] + ["So"]
    index = index_of(tmp_path_factory.mktemp("shapes") / "index", lines, n_memories=8, t=2)
    (block,) = read_blocks(index, UnitTypes())
    rows = zip(block.sentence.tolist(), block.length.tolist(), block.shapes().tolist(), strict=True)
    return {
        " ".join(lines[sentence].split()[:n]): {
            shape.name for shape, is_shown in zip(SHAPES, shapes, strict=True) if is_shown
        }
        for sentence, n, shapes in rows
    }


@pytest.mark.parametrize("text", ENDS)
def test_a_prefix_looks_as_it_should(shown, text):
    early = {"first-three"} if len(text.split()) <= 3 else set()
    assert shown[text] == ENDS[text] | early


def test_a_whole_sentence_is_told_from_its_parts(shown):
    assert "whole" in shown["It was in 1990 onwards"]
    assert shown["So"] == {"first", "first-three", "whole"}

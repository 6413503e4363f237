"""Every count of the view is that of a plain reading of the corpus, prefix by prefix."""

import random
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ffmem
from ffmem.patterns import chunk as chunk_module
from ffmem.patterns.chunk import COLUMNS, chunks
from ffmem.patterns.code_table import BINS
from ffmem.patterns.corpus_view import CorpusView, look
from ffmem.patterns.detect import detect
from ffmem.patterns.kept import Patterns
from ffmem.patterns.lists import fresh, read_lists
from ffmem.progress import Progress
from tests.indexing.folders import indexed, memories, write_corpus
from tests.patterns.planted import plain_units
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
        (row.offset + length, length, plain_units(row.text[: row.ends[length - 1]].lower()))
        for row in index.sentences.rows(0, index.sentences.n_sentences)
        for length in range(1, len(row.ids) + 1)
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_counts_of_last_units_are_those_of_a_plain_reading(hard, n):
    view, _ = look(hard, 0, QUIET)
    every = plain_prefixes(hard)
    units_of = {number: units for number, _, units in every}
    checked = set()
    for row, number in enumerate(view.numbers.tolist()):
        last, entry = units_of[number][-n:], int(view.codes[row, n])
        if entry < 0 or entry in checked:
            continue
        bins = [
            np.searchsorted(BINS, length, side="right") - 1
            for _, length, units in every
            if units[-n:] == last
        ]
        assert view.counts[entry].tolist() == np.bincount(bins, minlength=len(BINS)).tolist()
        checked.add(entry)
    assert len(checked) > 50


def test_grams_are_counted_in_every_prefix_that_holds_them(wordless):
    view, _ = look(wordless, 0, QUIET)
    rows = list(wordless.sentences.rows(0, 80))
    prefixes = [row.ids[:length] for row in rows for length in range(1, len(row.ids) + 1)]
    for entry in (view.kinds >= len(COLUMNS)).nonzero()[0].tolist():
        sentence, start, end = view.examples[entry].tolist()
        text = " ".join(wordless.token(id) for id in rows[sentence].ids)[start:end]
        wanted = [int(word[1:]) for word in text.split()]
        holds = [
            len(prefix)
            for prefix in prefixes
            if any(prefix[at : at + len(wanted)] == wanted for at in range(len(prefix)))
        ]
        bins = np.searchsorted(BINS, holds, side="right") - 1
        assert view.counts[entry].tolist() == np.bincount(bins, minlength=len(BINS)).tolist()
    assert view.totals.sum() == len(prefixes)


def test_a_corpus_read_in_small_chunks_is_the_same(any_index, monkeypatch):
    whole, words = look(any_index, 0, QUIET)
    monkeypatch.setattr(chunk_module, "SENTENCES", 7)
    parts, same = look(any_index, 0, QUIET)
    assert same.words == words.words
    for name in ("numbers", "codes", "counts", "shapes", "totals", "kinds", "words", "context"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))


def test_what_is_saved_is_what_is_loaded(wordless, tmp_path):
    view, _ = look(wordless, 0, QUIET)
    view.save(tmp_path)
    loaded = CorpusView.load(tmp_path)
    for name in view.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(view, name))


def test_all_prefixes_of_a_chunk_are_prefixes_of_the_index(any_index):
    n = sum(len(chunk.numbers) for chunk in chunks(any_index))
    assert n == any_index.manifest.corpus.tokens


def test_hard_texts_are_examined_to_the_end(any_index, tmp_path):
    shutil.copytree(any_index.folder, tmp_path / "index")
    index = ffmem.open(tmp_path / "index")
    summary = detect(index, top=10, progress=QUIET)
    patterns = Patterns(index, "automatic")
    assert summary.lists == sum(len(patterns.lists(layer)) for layer in range(index.n_layers))
    for layer in range(index.n_layers):
        for several in patterns.layer(layer).values():
            for one in several:
                assert one.description.isprintable()
                assert len(one.ranks) >= 3
                assert one.q_value <= 0.05


def test_repetitions_of_a_context_or_of_a_sentence_do_not_count(hard):
    view, _ = look(hard, 0, QUIET)
    lists = read_lists(hard, view, 0, 25)
    again = np.concatenate([lists.rows[:, :25], lists.rows[:, :25]], axis=1)
    counted = fresh(view, again)
    assert not counted[:, 25:].any()
    for rows, kept in zip(again.tolist(), counted.tolist(), strict=True):
        seen_contexts, seen_sentences = set(), set()
        for row, is_kept in zip(rows, kept, strict=True):
            if row < 0:
                assert not is_kept
                continue
            context, sentence = int(view.context[row]), int(view.sentence[row])
            assert is_kept == (context not in seen_contexts and sentence not in seen_sentences)
            seen_contexts.add(context)
            seen_sentences.add(sentence)


def test_a_small_index_of_whole_words_is_examined(tmp_path):
    index = indexed(tmp_path / "index", write_corpus(tmp_path / "lines.txt", 200), t=50)
    assert detect(index, progress=QUIET).lists > 0

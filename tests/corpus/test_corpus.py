import dataclasses
import hashlib
import itertools
import json
import tracemalloc

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ffmem import registry
from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import TokenSentence
from ffmem.errors import CorpusError
from ffmem.models.tokenizer import SubwordTokenizer, WordTokenizer

WIKITEXT = " = Bo = \n \n It isn 't 1 @.@ 5 feet . Bo 's is ! \n = = B = = \n Go . \n"


def letters():
    """A subword tokenizer of single letters; it drops those that it does not know."""
    known = {letter: id for id, letter in enumerate("abcefghilmnorstwxyBGIHT15.,!?'=@ ")}
    core = Tokenizer(models.BPE(known, []))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return SubwordTokenizer(PreTrainedTokenizerFast(tokenizer_object=core))


LETTERS = letters()
WORDS = WordTokenizer(["It", "Bo", "'s", "."])


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("It is. Go!\n\n  Bo \n", encoding="utf-8")
    return path


@pytest.fixture
def wikitext(tmp_path, monkeypatch):
    """A little WikiText-2 in the cache."""
    monkeypatch.setenv("FFMEM_CACHE", str(tmp_path))
    package = dataclasses.replace(
        registry.WIKITEXT_2["valid"], sha256=hashlib.sha256(WIKITEXT.encode()).hexdigest()
    )
    monkeypatch.setitem(registry.WIKITEXT_2, "valid", package)
    package.cached_path.parent.mkdir(parents=True)
    package.cached_path.write_text(WIKITEXT)
    return "wikitext-2:valid"


def texts(reading):
    return [sentence.text for sentence in reading]


def test_sentences_come_with_their_tokens_and_places(text_file):
    reading = Corpus(str(text_file)).sentences(WORDS)

    assert list(reading) == [
        TokenSentence("It is.", [4, 3], [0, 3], [2, 6]),
        TokenSentence("Go!", [3], [0], [3]),
        TokenSentence("Bo", [5], [0], [2]),
    ]
    assert (reading.n_lines, reading.n_sentences, reading.n_without_tokens) == (3, 3, 0)


def test_lines_are_taken_as_they_are(text_file):
    assert texts(Corpus(str(text_file), unit="line").sentences(LETTERS)) == ["It is. Go!", "  Bo "]


def test_windows_are_of_tokens(text_file):
    found = list(Corpus(str(text_file), unit="window:2").sentences(WORDS))

    assert [window.text for window in found] == ["It is.", " Go!\n\n  Bo "]
    assert [window.ids for window in found] == [[4, 3], [3, 5]]


def test_wikitext_reads_as_people_write_it_and_without_headings(wikitext):
    reading = Corpus(wikitext).sentences(LETTERS)

    assert texts(reading) == ["It isn't 1.5 feet.", "Bo's is!", "Go."]
    assert reading.n_headings == 2
    windows = Corpus(wikitext, unit="window:99").sentences(LETTERS)
    assert texts(windows) == ["\nIt isn't 1.5 feet. Bo's is!\nGo."]
    assert windows.n_headings == 2


def test_a_word_level_model_gets_wikitext_as_it_is(wikitext):
    reading = Corpus(wikitext).sentences(WORDS)

    assert texts(reading) == ["It isn 't 1 @.@ 5 feet .", "Bo 's is !", "Go ."]
    assert reading.n_headings == 2


def test_nothing_in_a_line_of_wikitext_is_changed(wikitext):
    reading = Corpus(wikitext, unit="line").sentences(LETTERS)

    assert texts(reading) == [line for line in WIKITEXT.split("\n") if line.strip()]
    assert reading.n_headings == 0


def test_a_file_is_detokenised_only_on_request(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(WIKITEXT)

    asked = Corpus(str(path), detokenize="wikitext")
    assert texts(asked.sentences(LETTERS)) == ["It isn't 1.5 feet.", "Bo's is!", "Go."]
    assert texts(Corpus(str(path)).sentences(LETTERS))[0] == "= Bo ="


def test_sentences_without_tokens_are_dropped_and_counted(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Bo\nñññ\nBo\n", encoding="utf-8")

    reading = Corpus(str(path)).sentences(LETTERS)

    assert texts(reading) == ["Bo", "Bo"]
    assert (reading.n_sentences, reading.n_without_tokens) == (2, 1)


def test_sentences_that_write_out_a_control_token_are_counted(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("the </s> press\nthe press\nthe <s> and </s>\nan <unk>\n")
    words = WordTokenizer(["the", "press"])
    for unit, n in (("line", 2), ("window:100", 1)):
        reading = Corpus(str(path), unit=unit).sentences(words)
        list(reading)
        assert reading.n_control == n
    parquet.write_table(pa.table({"ids": [[2, 4], [5]]}), tmp_path / "a.parquet")
    meant = Corpus(str(tmp_path / "a.parquet")).sentences(words)
    list(meant)
    assert meant.n_control == 0


def test_given_ids_are_taken_as_they_are(tmp_path):
    path = str(tmp_path / "a.parquet")
    parquet.write_table(pa.table({"ids": [[5, 3, 1], [], [7]]}), path)

    for unit in "sentence", "line":
        reading = Corpus(path, unit=unit).sentences(LETTERS)
        assert list(reading) == [
            TokenSentence(None, [5, 3, 1], None, None),
            TokenSentence(None, [7], None, None),
        ]
        assert reading.n_without_tokens == 1
    windows = Corpus(path, unit="window:2").sentences(LETTERS)
    assert [window.ids for window in windows] == [[5, 3], [1], [7]]


def test_many_sentences_come_in_order_and_each_with_its_own_tokens(tmp_path):
    path = tmp_path / "a.jsonl"
    numbers = ["1" * (1 + number % 7) + "5" * (number % 3) for number in range(1000)]
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in numbers))

    found = list(Corpus(str(path), column="body").sentences(LETTERS))

    assert [sentence.text for sentence in found] == numbers
    assert [len(sentence.ids) for sentence in found] == [len(text) for text in numbers]


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
def test_a_limit_counts_sentences(text_file, limit):
    reading = Corpus(str(text_file), limit=limit).sentences(WORDS)

    assert texts(reading) == ["It is.", "Go!", "Bo"][:limit]
    assert next(reading, "end") == "end"


@pytest.mark.parametrize("unit", ["sentence", "window:6"])
def test_what_follows_the_limit_is_not_counted(tmp_path, unit):
    path = tmp_path / "a.txt"
    path.write_text("".join(f" = {n} = \n\n Bo is. \n" for n in range(9)))
    for limit in range(1, 9):
        corpus = Corpus(str(path), unit, detokenize="wikitext", limit=limit)
        reading = corpus.sentences(LETTERS)
        assert len(list(reading)) == limit
        ahead = 0 if unit == "sentence" else 2  # a window that is full waits for the next line
        assert limit <= reading.n_headings <= limit + ahead


@pytest.mark.parametrize("unit", ["sentence", "line", "window:4"])
def test_a_corpus_without_sentences_is_refused_with_what_was_read(tmp_path, unit):
    path = tmp_path / "a.txt"
    path.write_text(" \n\n = Bo = \n")
    corpus = Corpus(str(path), unit=unit, detokenize="wikitext")
    if unit == "line":
        path.write_text(" \n\n\t\n")

    with pytest.raises(
        CorpusError, match=r"no sentence in .*: of 3 lines, \d are headings"
    ) as told:
        list(corpus.sentences(WORDS))
    assert ("1 are headings" in str(told.value)) == (unit != "line")
    with pytest.raises(CorpusError) as at_once:  # without a tokenizer
        corpus.check()
    assert str(at_once.value) == str(told.value)
    with path.open("a") as file:
        file.write("It is.\n")
    corpus.check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit": "word"}, "`unit` word: unknown unit"),
        ({"limit": 0}, "`limit` 0: use a whole number at least 1"),
        ({"limit": -3}, "`limit` -3"),
        ({"detokenize": "moses"}, "`detokenize` moses: unknown value. Use one of wikitext"),
    ],
)
def test_impossible_settings_are_refused_at_once(settings, message):
    with pytest.raises(CorpusError, match=message):
        Corpus("a.txt", **settings)


def test_a_description_holds_what_decides_the_sentences(text_file):
    settings = Corpus("wikitext-2:train", limit=5).describe()

    assert json.loads(json.dumps(settings)) == {
        "source": "wikitext-2:train",
        "unit": "sentence",
        "column": "text",
        "detokenize": "wikitext",
        "limit": 5,
        "content_only": False,
    }
    assert Corpus(**settings).describe() == settings
    assert Corpus("a.txt").describe()["detokenize"] is None
    assert Corpus(str(text_file)).identify()["digest"] is not None


@pytest.mark.parametrize("unit", ["sentence", "line", "window:64"])
def test_a_corpus_a_hundred_times_larger_needs_no_more_memory(tmp_path, unit):
    def peak(n_lines):
        path = tmp_path / f"{n_lines}.txt"
        path.write_text("It is Bo .\n" * n_lines)
        tracemalloc.start()
        n_read = sum(1 for _ in Corpus(str(path), unit=unit).sentences(WORDS))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert n_read >= n_lines / 20
        return peak

    peak(1)  # what is imported or cached on the way
    assert peak(10_000) < peak(100) + 1_000_000  # all sentences at once take six times that


def test_reading_starts_before_the_corpus_ends(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "Bo"}\n' * 300 + "not JSON\n")

    reading = Corpus(str(path)).sentences(WORDS)

    assert len(list(itertools.islice(reading, 256))) == 256
    with pytest.raises(CorpusError, match="Line 301"):
        list(reading)

"""Sentences that the model cannot read: found, named, and skipped only if that was asked."""

from itertools import accumulate

import pytest
import torch

import ffmem
from ffmem.errors import ModelError
from tests.indexing.folders import Steps, content, indexed, write_corpus
from tests.tiny import tiny, tiny_tokenizer

POISON = 40
"""A word that write_corpus never writes."""


def poisoned():
    """A model that overflows where it reads one word."""
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    with torch.no_grad():  # after loading, which would refuse it
        memories.model.get_input_embeddings().weight[POISON] = torch.nan
    return memories


def with_poison(path, *places):
    """Write a corpus in which some sentences hold the word."""
    lines = write_corpus(path).read_text().splitlines()
    for place in places:
        lines[place] += f" w{POISON} w3"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_run_stops_at_bad_sentences_and_names_them(tmp_path):
    corpus = with_poison(tmp_path / "corpus.txt", 17, 18)
    with pytest.raises(ModelError, match=r"Cannot read sentences 17, 18 of .*`bad_sentences` skip"):
        indexed(tmp_path / "index", corpus, poisoned())
    assert not (tmp_path / "index" / "manifest.json").exists()


def test_bad_sentences_are_left_out_when_asked_and_the_manifest_names_them(tmp_path):
    corpus = with_poison(tmp_path / "corpus.txt", 17, 41)
    index = indexed(tmp_path / "index", corpus, poisoned(), bad_sentences="skip")
    (source,) = index.manifest.corpus.sources
    assert source.skipped == [17, 41]
    assert source.skipped_tokens == sum(len(index.sentences.row(n).ids) for n in (17, 41))
    assert ffmem.verify(tmp_path / "index") == []
    for cell in index:
        memory = index[cell]
        assert not {17, 41} & {t.sentence for t in memory.triggers + memory.negative_triggers}


def test_what_is_found_in_the_others_is_as_if_bad_sentences_were_not_there(tmp_path):
    corpus = with_poison(tmp_path / "corpus.txt", 17)
    index = indexed(tmp_path / "index", corpus, poisoned(), bad_sentences="skip")
    lines = corpus.read_text().splitlines()
    (tmp_path / "without.txt").write_text("\n".join(lines[:17] + lines[18:]) + "\n")
    other = indexed(tmp_path / "other", tmp_path / "without.txt")
    for cell in index:
        mine, theirs = index[cell], other[cell]
        assert mine.stats.active_share == theirs.stats.active_share
        for one, two in zip(mine.triggers, theirs.triggers, strict=True):
            assert one.coefficient == pytest.approx(two.coefficient, rel=1e-4)
            assert one.prefix == two.prefix


def test_a_run_that_stopped_goes_on_with_the_bad_sentences_left_out(tmp_path):
    corpus = with_poison(tmp_path / "corpus.txt", 17)
    indexed(tmp_path / "whole", corpus, poisoned(), bad_sentences="skip")
    with pytest.raises(ModelError, match="Cannot read sentence 17 of the corpus"):
        indexed(tmp_path / "index", corpus, poisoned())
    indexed(tmp_path / "index", corpus, poisoned(), bad_sentences="skip")
    assert content(tmp_path / "index") == content(tmp_path / "whole")


def test_where_everything_fails_it_is_the_model_and_nothing_is_left_out(tmp_path):
    corpus = with_poison(tmp_path / "corpus.txt", *range(20, 60))
    with pytest.raises(ModelError, match=r"cannot be read|overflows on ordinary text"):
        indexed(tmp_path / "index", corpus, poisoned(), bad_sentences="skip", chunk_tokens=100)
    with pytest.raises(ModelError, match="overflows on ordinary text"):
        indexed(tmp_path / "all", with_poison(tmp_path / "all.txt", *range(60)), poisoned())


def test_a_chunk_of_bad_sentences_alone_holds_nothing(tmp_path):
    corpus = with_poison(tmp_path / "corpus.txt", *range(21, 28))
    index = indexed(tmp_path / "index", corpus, poisoned(), bad_sentences="skip", chunk_tokens=1)
    assert index.manifest.corpus.sources[0].skipped == list(range(21, 28))
    assert ffmem.verify(tmp_path / "index") == []


def test_a_bad_sentence_among_the_first_does_not_keep_a_run_from_beginning(tmp_path):
    corpus = with_poison(tmp_path / "corpus.txt", 0)
    index = indexed(tmp_path / "index", corpus, poisoned(), bad_sentences="skip", start="auto")
    assert index.manifest.corpus.sources[0].skipped == [0]


def test_left_out_sentences_stay_left_out_when_indexes_are_put_together(tmp_path):
    corpus = with_poison(tmp_path / "corpus.txt", 17)
    indexed(tmp_path / "one", corpus, poisoned(), bad_sentences="skip")
    indexed(tmp_path / "two", write_corpus(tmp_path / "more.txt", seed=5), poisoned())
    both = ffmem.merge([tmp_path / "one", tmp_path / "two"], tmp_path / "both")
    assert [source.skipped for source in both.manifest.corpus.sources] == [[17], []]
    assert ffmem.verify(tmp_path / "both") == []


@pytest.mark.parametrize("bad_sentences", ["skip", "stop"])
def test_the_bar_takes_back_what_was_read_of_a_chunk_that_fails(tmp_path, bad_sentences):
    steps = Steps()
    corpus = with_poison(tmp_path / "corpus.txt", 17)
    settings = {"chunk_tokens": 10**6, "bad_sentences": bad_sentences, "progress": steps}
    if bad_sentences == "stop":
        with pytest.raises(ModelError):
            indexed(tmp_path / "index", corpus, poisoned(), **settings)
        expected = 0
    else:
        index = indexed(tmp_path / "index", corpus, poisoned(), **settings)
        expected = index.manifest.corpus.tokens
    moves = steps.of["Triggers"]
    assert min(moves) < 0
    assert max(accumulate(moves)) <= len(corpus.read_text().split())
    assert sum(moves) == expected

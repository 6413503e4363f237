"""TopTriggers and the tokens at prefixes, against the index's own records and plain loops."""

import shutil

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ffmem
from ffmem.corpus.sentences import TokenSentence
from ffmem.indexing import triggers
from ffmem.indexing.sentences import NO_PREFIX, Sentences, write_sentences
from ffmem.indexing.tables import fixed, layer_file, read_columns, write_table
from ffmem.indexing.triggers import (
    NO_SIGN,
    NONE,
    CorpusTokens,
    corpus_tokens,
    last_tokens,
    read_following,
    top_triggers,
    trigger_table,
)
from tests.experiments.planting import context_of, with_dead_memory
from tests.indexing.folders import indexed, write_corpus


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_any_prefix_has_the_tokens_of_its_sentence(lengths):
    ids = np.arange(100, 100 + sum(lengths), dtype=np.int32)
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    offsets = np.cumsum([0, *(n + 1 for n in lengths[:-1])])
    corpus = CorpusTokens(offsets, ids)
    places = [(s, p) for s, n in enumerate(lengths) for p in range(n + 1)]
    prefixes = np.array([offsets[s] + p for s, p in places])
    assert prefixes.tolist() == list(range(len(prefixes)))

    found = corpus.at(prefixes)

    for number, (s, p) in enumerate(places):
        sentence = parts[s].tolist()
        assert found.sentence[number] == s
        assert found.length[number] == p
        assert found.last[number] == (sentence[p - 1] if p else NONE)
        assert found.next[number] == (sentence[p] if p < len(sentence) else NONE)
        assert corpus.prefix(int(prefixes[number])).tolist() == sentence[:p]
    assert corpus.following[prefixes].tolist() == found.next.tolist()
    assert corpus.following[prefixes - 1].tolist() == found.last.tolist()
    assert corpus.following[[NO_PREFIX, NO_PREFIX - 1]].tolist() == [NONE, NONE]


def test_the_tokens_of_the_corpus_are_those_of_its_sentences(index):
    rows = list(index.sentences.rows(0, index.sentences.n_sentences))
    found = corpus_tokens(index)
    assert found.offsets.tolist() == [row.offset for row in rows]
    assert found.ids.tolist() == [id for row in rows for id in row.ids]


def test_a_top_trigger_is_the_strongest_trigger_of_both_signs_that_has_a_next_token(index):
    offsets = [row.offset for row in index.sentences.rows(0, index.sentences.n_sentences)]
    for layer in range(index.n_layers):
        found = top_triggers(index, layer)
        ends = last_tokens(index, found.prefix)
        for number, memory in enumerate(index.memories(layer)):
            both = [
                next((t for t in side if t.next_token is not None), None)
                for side in (memory.triggers, memory.negative_triggers)
            ]
            some = [trigger for trigger in both if trigger is not None]
            has_triggers = bool(memory.triggers or memory.negative_triggers)
            assert found.no_trigger[number] == (not has_triggers)
            assert found.no_next[number] == (has_triggers and not some)
            if not some:
                assert found.sign[number] == NO_SIGN
                assert found.prefix[number] == NO_PREFIX
                assert found.next_token[number] == ends[number] == NONE
                continue
            head = max(some, key=lambda trigger: abs(trigger.coefficient))
            assert found.sign[number] == (1 if head is both[0] else -1)
            assert found.prefix[number] == offsets[head.sentence] + head.length
            assert index.token(int(found.next_token[number])) == head.next_token
            last = ends[number]
            assert (None if last == NONE else index.token(int(last))) == head.last_token


def test_blocks_of_the_corpus_give_the_next_tokens_of_the_whole(tmp_path, monkeypatch):
    rows = [TokenSentence(None, list(range(n, n + 1 + n % 4)), None, None) for n in range(300)]
    write_sentences(tmp_path / "sentences.parquet", rows)
    sentences = Sentences(tmp_path / "sentences.parquet")
    assert sentences.n_groups == 3
    following = CorpusTokens(*sentences.tokens()).following
    prefixes = np.arange(NO_PREFIX, len(following) - 1)[:, None]
    for groups in (1, 2, 64):
        monkeypatch.setattr(triggers, "BLOCK", groups)
        found = read_following(sentences, prefixes)
        np.testing.assert_array_equal(found, following[prefixes])


def test_listed_triggers_are_those_of_the_index_and_their_tokens(index):
    for sign in (1, -1):
        found = trigger_table(index, 1, sign)
        assert found.prefixes.shape == (index.layout.widths[0], index.manifest.t)
        for number, memory in enumerate(index.memories(1)):
            triggers = memory.triggers if sign > 0 else memory.negative_triggers
            n = len(triggers)
            assert (found.prefixes[number, n:] == NO_PREFIX).all()
            assert (found.next[number, n:] == NONE).all()
            assert (found.last[number, n:] == NONE).all()
            assert found.lengths[number, :n].tolist() == [t.length for t in triggers]
            shown = [None if i == NONE else index.token(int(i)) for i in found.next[number, :n]]
            assert shown == [t.next_token for t in triggers]


def rewritten(index, folder, **columns):
    """Return a copy of an index with other triggers of memory 0 in layer 0."""
    shutil.copytree(index.folder, folder)
    path = folder / layer_file("triggers", 0)
    table = {name: column.copy() for name, column in read_columns(path).items()}
    for name, row in columns.items():
        table[name][0] = np.resize(row, table[name].shape[1])
    arrays = {
        name: fixed(column) if column.ndim == 2 else pa.array(column)
        for name, column in table.items()
    }
    write_table(path, pa.table(arrays))
    return ffmem.open(folder)


def test_of_triggers_of_equal_strength_the_positive_one_is_taken(tiny_index, tmp_path):
    for number, (positive, negative) in enumerate([(3.0, -3.0), (3.0, -3.5), (3.5, -3.0)]):
        columns = {
            "coefficient": [positive],
            "prefix": [1],
            "negative_coefficient": [negative],
            "negative_prefix": [2],
        }
        found = top_triggers(rewritten(tiny_index, tmp_path / str(number), **columns), 0)
        assert found.sign[0] == (1 if positive >= -negative else -1)
        assert found.prefix[0] == (1 if positive >= -negative else 2)


def test_a_whole_sentence_is_passed_over_for_a_weaker_trigger(tiny_index, tmp_path):
    first = next(tiny_index.sentences.rows(0, 1))
    whole = len(first.ids)
    columns = {
        "coefficient": [9.0, 2.0, 1.0],
        "prefix": [whole, whole - 1, 1],
        "negative_coefficient": [-8.0, -1.5],
        "negative_prefix": [whole, 3],
    }
    found = top_triggers(rewritten(tiny_index, tmp_path / "index", **columns), 0)
    assert found.prefix[0] == whole - 1
    assert found.next_token[0] == first.ids[-1]


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_a_dead_memory_has_neither_triggers_nor_a_top_trigger(name, tmp_path):
    index = context_of(tmp_path / "index", with_dead_memory(name, 1, 7)).index
    found = top_triggers(index, 1)
    assert found.no_trigger[7]
    assert not found.exists[7]
    assert not found.no_next[7]
    assert (
        found.exists.sum() + found.no_next.sum() + found.no_trigger.sum() == index.layout.widths[0]
    )


def test_where_all_sentences_are_one_token_long_no_memory_has_a_top_trigger(tmp_path):
    corpus = tmp_path / "words.txt"
    corpus.write_text("\n".join(f"w{n}" for n in range(3, 20)) + "\n")
    found = top_triggers(indexed(tmp_path / "index", corpus), 0)
    assert not found.exists.any()
    assert (found.no_next ^ found.no_trigger).all()
    assert (found.prefix == NO_PREFIX).all()


def test_two_indexes_are_not_taken_for_each_other(tmp_path):
    first = indexed(tmp_path / "a", write_corpus(tmp_path / "a.txt", seed=1))
    second = indexed(tmp_path / "b", write_corpus(tmp_path / "b.txt", seed=2))
    one, other = corpus_tokens(first).ids, corpus_tokens(second).ids
    assert one.tolist() != other.tolist()
    assert corpus_tokens(first).ids.tolist() == one.tolist()

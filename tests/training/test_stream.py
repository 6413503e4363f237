import json

import pytest

from ffmem.corpus.corpus import Corpus
from ffmem.errors import CorpusError, FfmemError
from ffmem.training.record import TRAINING, Trained, read_record
from ffmem.training.stream import streams
from ffmem.training.telling import told
from tests.training.small import run, settings, write_corpus


def corpus_of(path, **options):
    return Corpus(str(path), **({"unit": "line"} | options))


def test_every_sentence_stands_behind_a_start_token(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("a b\n\nc a\n" * 30)
    other = tmp_path / "valid.txt"
    other.write_text("b d\n")
    made = streams(settings(vocabulary=3), corpus_of(path), corpus_of(other))
    assert made.train.tolist() == [2, 4, 5, 2, 6, 4] * 30
    assert made.valid.tolist() == [2, 5, 3]
    assert (made.train_record.sentences, made.train_record.tokens) == (60, 180)
    assert (made.valid_record.unknown, made.valid_record.unknown_share) == (1, 1 / 3)
    assert not made.valid_record.held_out


@pytest.mark.parametrize(("tokenizer", "mark"), [("words", "</s>"), ("bpe", "<|endoftext|>")])
def test_control_tokens_that_the_text_writes_out_are_counted_and_told(tmp_path, tokenizer, mark):
    path = tmp_path / "train.txt"
    path.write_text("a b c\n" * 60 + f"a {mark} b {mark}\n")
    other = tmp_path / "valid.txt"
    other.write_text("b c\n")
    asked = settings(tokenizer=tokenizer, vocabulary=260, bands=[5])
    made = streams(asked, corpus_of(path), corpus_of(other))
    assert (made.train_record.control, made.valid_record.control) == (2, 0)
    run(tmp_path / "out", path, valid=other, tokenizer=tokenizer, vocabulary=260, bands=[5])
    said = "\n".join(told(asked, read_record(Trained, tmp_path / "out" / TRAINING).prepared))
    assert "The text itself writes out 2 control tokens, such as </s>" in said


def test_without_a_text_for_validation_the_last_sentences_are_held_out(tmp_path):
    path = write_corpus(tmp_path / "train.txt", 400)
    made = streams(settings(), corpus_of(path), None)
    assert made.valid_record.held_out
    assert made.valid_record.sentences == 4  # 1 %
    assert made.train_record.sentences == 396
    assert len(made.valid) >= 16


def test_at_least_one_block_is_held_out(tmp_path):
    path = write_corpus(tmp_path / "train.txt", 60)
    made = streams(settings(context=64), corpus_of(path), None)
    assert made.valid_record.sentences == 5
    assert len(made.valid) >= 64 > len(made.valid) * 4 // 5


def test_the_vocabulary_does_not_know_what_is_held_out(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("a b c d\n" * 99 + "secret " * 20 + "\n")
    made = streams(settings(), corpus_of(path), None)
    assert made.valid.tolist() == [2] + [3] * 20
    assert made.vocabulary.size == 8


def test_a_corpus_smaller_than_one_batch_is_refused(tmp_path):
    path = write_corpus(tmp_path / "train.txt", 5)
    with pytest.raises(CorpusError, match=r"gives \d+ tokens to train on, less than one batch of"):
        streams(settings(batch_tokens=640), corpus_of(path), None)


def test_a_corpus_of_which_nothing_can_be_held_out_is_refused(tmp_path):
    path = write_corpus(tmp_path / "train.txt", 2)
    with pytest.raises(CorpusError, match=r"no block of 64 tokens can be held out .* --valid"):
        streams(settings(context=64), corpus_of(path), None)


def test_token_ids_are_no_text_to_train_on(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"ids": [1, 2, 3]}) + "\n")
    with pytest.raises(CorpusError, match="gives token ids"):
        streams(settings(), corpus_of(path), None)


def test_windows_are_refused_for_blocks_are_cut_anyhow(tmp_path):
    path = write_corpus(tmp_path / "train.txt")
    with pytest.raises(FfmemError, match="--context"):
        streams(settings(), corpus_of(path, unit="window:8"), None)


def test_headings_that_are_left_out_are_counted(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text(" = Title = \n A 1 @.@ 5 m tower . It isn 't tall . \n" * 60)
    options = {"unit": "sentence", "detokenize": "wikitext"}
    words = streams(settings(), corpus_of(path, **options), None)
    assert words.train_record.headings_dropped == 60
    assert words.train_record.left_out == "60 headings"
    assert ("@.@", 59) in words.vocabulary.counts  # words are as WikiText writes them
    bpe = streams(settings(tokenizer="bpe", vocabulary=300), corpus_of(path, **options), None)
    text = bpe.vocabulary.core.decode(bpe.train.tolist())
    assert "It isn't tall." in text
    assert "1.5 m tower" in text

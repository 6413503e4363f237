import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ffmem.corpus.corpus import Corpus
from ffmem.errors import CorpusError, FfmemError
from ffmem.models.tokenizer import SubwordTokenizer, WordTokenizer
from ffmem.training.data import Blocks, BPEVocabulary, WordVocabulary, make_streams
from ffmem.training.report import format_plan
from ffmem.training.train import make_plan
from tests.texts import LINES
from tests.training.small import tiny_config, write_corpus


def test_words_are_ranked_by_count_and_then_by_letters():
    words = WordVocabulary.train(["d b a c", "c b", "c e"], 4)
    assert words.counts == [("c", 3), ("b", 2), ("a", 1), ("d", 1)]
    assert words.size == 8
    assert words.encode(["d e", "c"]).tolist() == [2, 7, 3, 2, 4]


def test_special_tokens_in_the_text_are_the_special_tokens():
    words = WordVocabulary.train(["<unk> a <unk> </s>"], 9)
    assert words.counts == [("a", 1)]
    assert words.encode(["<unk> a </s>"]).tolist() == [2, 3, 4, 2]


@given(
    st.lists(
        st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<>"), max_size=20),
        max_size=5,
    )
)
def test_the_saved_dictionary_gives_the_same_ids(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("words")
    words = WordVocabulary.train([*LINES, *lines[::2]], 50)
    words.save(folder)
    read = WordTokenizer.from_file(folder / "dict.txt")
    expected = [id for line in lines for id in (2, *read.encode([line])[0].ids)]
    assert words.encode(lines).tolist() == expected


def test_plain_transformers_reads_the_same_words(tmp_path):
    words = WordVocabulary.train(LINES, 60)
    words.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    strange = ["a\x1cb river\x85of\u2003the", " the  city", "<unk> the", ""]
    for line in [*LINES, *strange]:
        assert tokenizer(line)["input_ids"] == words.encode([line]).tolist()
    assert len(tokenizer) == words.size
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 1, 3)


def test_a_bpe_covers_every_text_and_puts_its_start_token_first(tmp_path):
    bpe = BPEVocabulary.train(LINES, 300)
    assert bpe.size == 300
    bpe.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for line in [*LINES, "ᚠ\x00 never seen 🜁"]:
        ids = bpe.encode([line]).tolist()
        assert ids == tokenizer(line)["input_ids"]
        assert ids[0] == bpe.start
        assert tokenizer.decode(ids[1:]) == line
    assert SubwordTokenizer(tokenizer).own_start == bpe.start


def test_a_vocabulary_has_room_for_all_bytes():
    with pytest.raises(FfmemError, match=r"`vocabulary` 256 is too small"):
        BPEVocabulary.train(LINES, 256)


def test_the_same_text_gives_the_same_bpe():
    one, other = (BPEVocabulary.train(LINES, 300) for _ in range(2))
    assert one.fast.to_str() == other.fast.to_str()


def corpus_of(path, **options):
    return Corpus(str(path), **({"unit": "line"} | options))


def test_every_sentence_follows_a_start_token(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("a b\n\nc a\n" * 30)
    other = tmp_path / "valid.txt"
    other.write_text("b d\n")
    made = make_streams(tiny_config(vocabulary=3), corpus_of(path), corpus_of(other))
    assert made.train.tolist() == [2, 4, 5, 2, 6, 4] * 30
    assert made.valid.tolist() == [2, 5, 3]
    assert (made.train_stats.sentences, made.train_stats.tokens) == (60, 180)
    assert (made.valid_stats.unknown, made.valid_stats.unknown_share) == (1, 1 / 3)
    assert not made.valid_stats.held_out


@pytest.mark.parametrize(("tokenizer", "mark"), [("words", "</s>"), ("bpe", "<|endoftext|>")])
def test_control_tokens_in_the_text_are_counted_and_reported(tmp_path, tokenizer, mark):
    path = tmp_path / "train.txt"
    path.write_text("a b c\n" * 60 + f"a {mark} b {mark}\n")
    other = tmp_path / "valid.txt"
    other.write_text("b c\n")
    config = tiny_config(tokenizer=tokenizer, vocabulary=260, cutoffs=[5])
    made = make_streams(config, corpus_of(path), corpus_of(other))
    assert (made.train_stats.control, made.valid_stats.control) == (2, 0)
    lines = format_plan(config, make_plan(config, made))
    assert (
        "The text contains 2 control tokens, such as </s>: they are read as control tokens."
        in lines
    )


def test_without_a_validation_corpus_the_last_sentences_are_held_out(tmp_path):
    path = write_corpus(tmp_path / "train.txt", 400)
    made = make_streams(tiny_config(), corpus_of(path), None)
    assert made.valid_stats.held_out
    assert made.valid_stats.sentences == 4  # 1 %
    assert made.train_stats.sentences == 396
    assert len(made.valid) >= 16


def test_at_least_one_block_is_held_out(tmp_path):
    path = write_corpus(tmp_path / "train.txt", 60)
    made = make_streams(tiny_config(context=64), corpus_of(path), None)
    assert made.valid_stats.sentences == 5
    assert len(made.valid) >= 64 > len(made.valid) * 4 // 5


def test_the_vocabulary_is_not_made_of_what_is_held_out(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("a b c d\n" * 99 + "secret " * 20 + "\n")
    made = make_streams(tiny_config(), corpus_of(path), None)
    assert made.valid.tolist() == [2] + [3] * 20
    assert made.vocabulary.size == 8


def test_a_corpus_smaller_than_one_batch_is_refused(tmp_path):
    path = write_corpus(tmp_path / "train.txt", 5)
    with pytest.raises(CorpusError, match=r"has \d+ tokens to train on, less than one batch of"):
        make_streams(tiny_config(batch_tokens=640), corpus_of(path), None)


def test_a_corpus_of_which_nothing_can_be_held_out_is_refused(tmp_path):
    path = write_corpus(tmp_path / "train.txt", 2)
    with pytest.raises(CorpusError, match=r"too few to hold out a block of 64 tokens .* `valid`"):
        make_streams(tiny_config(context=64), corpus_of(path), None)


def test_token_ids_are_no_text_to_train_on(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"ids": [1, 2, 3]}) + "\n")
    with pytest.raises(CorpusError, match="has token ids"):
        make_streams(tiny_config(), corpus_of(path), None)


def test_windows_are_refused(tmp_path):
    path = write_corpus(tmp_path / "train.txt")
    with pytest.raises(FfmemError, match="`context`"):
        make_streams(tiny_config(), corpus_of(path, unit="window:8"), None)


def test_headings_that_are_left_out_are_counted(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text(" = Title = \n A 1 @.@ 5 m tower . It isn 't tall . \n" * 60)
    options = {"unit": "sentence", "detokenize": "wikitext"}
    config = tiny_config(cutoffs=None)
    words = make_streams(config, corpus_of(path, **options), None)
    assert words.train_stats.headings_dropped == 60
    lines = format_plan(config, make_plan(config, words))
    assert "Dropped from the corpus: 60 headings." in lines
    assert ("@.@", 59) in words.vocabulary.counts  # words are as WikiText writes them
    bpe = make_streams(
        tiny_config(tokenizer="bpe", vocabulary=300), corpus_of(path, **options), None
    )
    text = bpe.vocabulary.fast.decode(bpe.train.tolist())
    assert "It isn't tall." in text
    assert "1.5 m tower" in text


LENGTHS = st.integers(1, 60)


@given(LENGTHS, st.integers(1, 9), st.integers(0, 3), st.integers(0, 5))
def test_an_epoch_predicts_every_token_and_fewer_than_a_block_twice(length, context, seed, epoch):
    blocks = Blocks(np.arange(length), context, seed)
    n = blocks.per_epoch
    inputs, targets = blocks.batch(epoch, n)  # as many blocks as an epoch has
    assert inputs.shape == targets.shape == (n, context)
    counts = np.bincount(targets.flatten().numpy(), minlength=length)
    assert counts.min() >= 1
    assert counts.sum() - length < context
    assert ((inputs + 1) % length == targets).all()  # what follows on the ring
    assert (inputs[:, 1:] == targets[:, :-1]).all()


@given(LENGTHS, st.integers(1, 9), st.integers(1, 7))
def test_steps_take_the_blocks_of_all_epochs_one_after_the_other(length, context, size):
    blocks = Blocks(np.arange(length), context, 0)
    in_ones = [blocks.batch(number, 1)[0][0].tolist() for number in range(6 * size)]
    in_batches = [row for step in range(6) for row in blocks.batch(step, size)[0].tolist()]
    assert in_batches == in_ones


@given(LENGTHS, st.integers(1, 9), st.integers(1, 7), st.integers(1, 4))
def test_the_last_step_of_n_epochs_completes_them(length, context, size, epochs):
    blocks = Blocks(np.arange(length), context, 0)
    steps = blocks.n_steps(epochs, size)
    assert (steps - 1) * size < epochs * blocks.per_epoch <= steps * size


def test_order_and_offset_change_with_epoch_and_seed_and_with_nothing_else():
    def epoch(seed, number):
        return Blocks(np.arange(1000), 10, seed).batch(number, 100)[0].tolist()

    assert epoch(0, 0) == epoch(0, 0)
    seen = [epoch(0, 0), epoch(0, 1), epoch(1, 0)]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert seen[one] != seen[other]
        assert sorted(seen[one]) != sorted(seen[other])  # other blocks, not only another order

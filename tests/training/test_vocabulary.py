import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ffmem.errors import FfmemError
from ffmem.models.tokenizer import SubwordTokenizer, WordTokenizer
from ffmem.training.vocabulary import Pieces, Words
from tests.texts import LINES


def test_words_are_ranked_by_count_and_then_by_letters():
    words = Words.of(["d b a c", "c b", "c e"], 4)
    assert words.counts == [("c", 3), ("b", 2), ("a", 1), ("d", 1)]
    assert words.size == 8
    assert words.ids(["d e", "c"]).tolist() == [2, 7, 3, 2, 4]


def test_unk_in_the_text_is_the_one_that_is_there():
    words = Words.of(["<unk> a <unk> </s>"], 9)
    assert words.counts == [("a", 1)]
    assert words.ids(["<unk> a </s>"]).tolist() == [2, 3, 4, 2]


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="<>"), max_size=20), max_size=5))
def test_the_saved_dictionary_gives_the_same_ids(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("words")
    words = Words.of([*LINES, *lines[::2]], 50)
    words.save(folder)
    read = WordTokenizer.from_file(folder / "dict.txt")
    expected = [id for line in lines for id in (2, *read.encode([line])[0].ids)]
    assert words.ids(lines).tolist() == expected


def test_plain_transformers_reads_the_same_words(tmp_path):
    words = Words.of(LINES, 60)
    words.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    strange = ["a\x1cb river\x85of\u2003the", " the  city", "<unk> the", ""]
    for line in [*LINES, *strange]:
        assert tokenizer(line)["input_ids"] == words.ids([line]).tolist()
    assert len(tokenizer) == words.size
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 1, 3)


def test_pieces_know_every_text_and_begin_with_the_end_of_the_one_before(tmp_path):
    pieces = Pieces.of(LINES, 300)
    assert pieces.size == 300
    pieces.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for line in [*LINES, "ᚠ\x00 never seen 🜁"]:
        ids = pieces.ids([line]).tolist()
        assert ids == tokenizer(line)["input_ids"]
        assert ids[0] == pieces.start
        assert tokenizer.decode(ids[1:]) == line
    assert SubwordTokenizer(tokenizer).own_start == pieces.start


def test_a_vocabulary_has_room_for_all_bytes():
    with pytest.raises(FfmemError, match=r"--vocabulary 256 is too small"):
        Pieces.of(LINES, 256)


def test_the_same_text_gives_the_same_pieces():
    assert Pieces.of(LINES, 300).core.to_str() == Pieces.of(LINES, 300).core.to_str()

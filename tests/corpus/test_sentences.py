import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.corpus.sentences import (
    TokenSentence,
    batches,
    sentences_of_line,
    split_sentences,
    window_size,
    windows,
)
from ffmem.corpus.sources import Line
from ffmem.errors import CorpusError
from ffmem.models.tokenizer import Encoding, Tokenizer, WordTokenizer

WORDS = WordTokenizer(["a", "b", "c"])


class Bytes(Tokenizer):
    """One token per UTF-8 byte, so that characters have several."""

    word_level = False
    own_start = bos = eos = None
    controls = unlisted = frozenset()
    fingerprint = "bytes"

    def __init__(self, placed=True):
        self.placed = placed

    def encode(self, texts):
        encodings = []
        for text in texts:
            places = [place for place, letter in enumerate(text) for _ in letter.encode()]
            ends = [place + 1 for place in places]
            placed = (places, ends) if self.placed else (None, None)
            encodings.append(Encoding(list(text.encode()), *placed))
        return encodings

    def token_texts(self, size):
        return [f"⟨{byte:02x}⟩" for byte in range(size)]

    @property
    def vocabulary(self):
        return {f"{byte:02x}": byte for byte in range(256)}


PARTS = ["a", "B", ".", " ", "! ", "? ", "é", "😀", "।", "@.@", "Dr. ", "\t", ". A"]
PARAGRAPHS = st.lists(st.sampled_from(PARTS)).map("".join)


@given(PARAGRAPHS)
def test_sentences_are_slices_of_their_paragraph_in_order(text):
    place = 0
    for sentence in split_sentences(text):
        assert sentence == sentence.strip() != ""
        found = text.index(sentence, place)
        assert not text[place:found].strip(), "nothing but white space is left out"
        place = found + len(sentence)
    assert not text[place:].strip()


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("It rained. He left!", ["It rained.", "He left!"]),
        ("שלום עולם. מה נשמע? 😀 Good. ", ["שלום עולם.", "מה נשמע?", "😀 Good."]),
        (" It is 1 @.@ 5 m long . It is . ", ["It is 1 @.@ 5 m long .", "It is ."]),
        ("Dr. Smith paid 1.5 pounds.", ["Dr. Smith paid 1.5 pounds."]),
        ("  \t", []),
        ("", []),
    ],
)
def test_a_paragraph_is_cut_where_its_sentences_end(text, sentences):
    assert split_sentences(text) == sentences


def test_a_line_is_taken_as_it_is_and_a_blank_one_not_at_all():
    assert sentences_of_line(Line(0, " One.  Two. \r"), "line") == [Line(0, " One.  Two. \r")]
    assert sentences_of_line(Line(0, " One.  Two. \r"), "sentence") == [
        Line(0, "One."),
        Line(0, "Two."),
    ]
    for unit in "line", "sentence":
        assert sentences_of_line(Line(0, " \t\r"), unit) == []
        assert sentences_of_line(Line(0, None, [4, 5]), unit) == [Line(0, None, [4, 5])]


@pytest.mark.parametrize(
    "unit",
    ["word", "window", "window:", "window:0", "window:-1", "window:x", "window:" + "9" * 5000],
)
def test_an_unknown_unit_is_refused(unit):
    with pytest.raises(CorpusError, match=rf"`unit` {unit}: unknown unit\. Use sentence, line, or"):
        window_size(unit)


def test_a_unit_knows_its_window():
    assert window_size("window:128") == 128
    assert window_size("sentence") is window_size("line") is None


def documents(lists):
    return [Line(number, text) for number, texts in enumerate(lists) for text in texts]


@given(
    st.lists(st.lists(st.text("ab \t😀é.", max_size=9), min_size=1, max_size=5), max_size=3),
    st.integers(1, 7),
)
def test_the_windows_of_a_document_joined_are_the_document(lists, size):
    found = list(windows(documents(lists), Bytes(), size))

    texts = ["\n".join(texts) for texts in lists]
    assert b"".join(bytes(window.ids) for window in found) == "".join(texts).encode()
    assert "".join(window.text for window in found) == "".join(texts)
    assert sum(len(window.ids) < size for window in found) <= len(lists)
    assert all(0 < len(window.ids) <= size for window in found)
    for text, ids, starts, ends, _ in found:
        assert len(ids) == len(starts) == len(ends)
        for id, start, end in zip(ids, starts, ends, strict=True):
            assert 0 <= start <= end <= len(text)
            # A character cut by the window in front of this one has no place here.
            assert end == 0 or id in text[start:end].encode()


def test_a_window_never_crosses_documents():
    found = windows(documents([["a b", "c"], ["a"], ["b a"]]), WORDS, 2)

    assert list(found) == [
        TokenSentence("a b", [4, 5], [0, 2], [1, 3]),
        TokenSentence("\nc", [6], [1], [2]),
        TokenSentence("a", [4], [0], [1]),
        TokenSentence("b a", [5, 4], [0, 2], [1, 3]),
    ]


def test_the_text_behind_the_last_token_stays_with_it():
    [window] = windows(documents([["a b  ", "", " "]]), WORDS, 2)

    assert window == TokenSentence("a b  \n\n ", [4, 5], [0, 2], [1, 3])


def test_blank_lines_are_tokenised_with_the_line_before_them():
    seen = []

    class Listening(Bytes):
        def encode(self, texts):
            seen.extend(texts)
            return super().encode(texts)

    list(windows(documents([["", "a", "", " ", "b", ""], ["c"]]), Listening(), 3))

    assert seen == ["\n", "a\n\n \n", "b\n", "c"]


def test_windows_of_given_ids_are_cuts_of_them():
    lines = [Line(0, None, [1, 2, 3, 4, 5]), Line(1, None, []), Line(2, None, [6])]

    found = list(windows(lines, WORDS, 2))

    assert [window.ids for window in found] == [[1, 2], [3, 4], [5], [6]]
    assert all(window[2:] == (None, None, None) and window.text is None for window in found)


def test_windows_without_places_have_no_text():
    found = list(windows(documents([["ab", "c"]]), Bytes(placed=False), 3))

    assert found == [
        TokenSentence(None, [97, 98, 10], None, None),
        TokenSentence(None, [99], None, None),
    ]


@given(st.lists(st.integers(0, 1 << 20), max_size=600))
def test_batches_joined_are_the_items_and_none_is_large(weights):
    found = list(batches(weights, lambda weight: weight))

    assert [item for batch in found for item in batch] == weights
    assert [len(batch) for batch in batches([0] * 600, int)] == [256, 256, 88]
    assert all(0 < len(batch) <= 256 and sum(batch[:-1]) < 1 << 20 for batch in found)

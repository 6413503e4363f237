import re
from itertools import pairwise, starmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.corpus.sentences import TokenSentence
from ffmem.errors import StoreError
from ffmem.indexing.sentences import (
    GROUP,
    Sentences,
    StoredSentence,
    join_sentences,
    split_text,
    write_sentences,
)

LENGTHS = [1, 2, 3, 7]


def rows(n):
    """Sentences of one to seven tokens; every fifth has no text."""
    for number in range(n):
        length = LENGTHS[number % len(LENGTHS)]
        ids = list(range(number, number + length))
        if number % 5:
            places = list(range(length))
            yield "x" * length, ids, places, [place + 1 for place in places]
        else:
            yield None, ids, None, None


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentences") / "sentences.parquet"
    totals = write_sentences(path, starmap(TokenSentence, rows(2 * GROUP + 37)))
    found = Sentences(path)
    assert totals.n_sentences == found.n_sentences == 2 * GROUP + 37
    assert totals.n_places == totals.n_tokens + totals.n_sentences
    return found


def plain(n):
    """The stored sentences, numbered by hand."""
    offset, found = 0, []
    for number, row in enumerate(rows(n)):
        found.append(StoredSentence(number, 0, offset, *row))
        offset += len(row[1]) + 1
    return found


def test_what_is_written_is_read(sentences):
    expected = plain(sentences.n_sentences)
    assert list(sentences.rows(0, sentences.n_sentences)) == expected
    assert [sentences.row(n) for n in (0, GROUP - 1, GROUP, 2 * GROUP + 36)] == [
        expected[n] for n in (0, GROUP - 1, GROUP, 2 * GROUP + 36)
    ]
    lengths = [int(n) for part in sentences.lengths() for n in part]
    assert lengths == [len(row.ids) for row in expected]


@given(st.integers(0, 2 * GROUP + 36), st.integers(0, 2 * GROUP + 37))
def test_a_range_of_rows_is_a_slice(sentences, first, n):
    n = min(n, sentences.n_sentences - first)
    assert list(sentences.rows(first, n)) == plain(sentences.n_sentences)[first : first + n]


def test_every_prefix_is_found_in_its_sentence_as_a_plain_scan_finds_it(sentences):
    expected = plain(sentences.n_sentences)
    last = expected[-1]
    places = range(last.offset + len(last.ids) + 1)
    owners = {}
    for row in expected:
        for prefix in range(row.offset, row.offset + len(row.ids) + 1):
            owners[prefix] = row
    assert sentences.at(places) == owners
    some = [3, 3, 0, places[-1], 700]
    assert sentences.at(some) == {prefix: owners[prefix] for prefix in some}
    assert sentences.at([]) == {}


def test_sentences_of_parts_join_to_those_of_the_whole(tmp_path):
    every = list(rows(GROUP + 5))
    parts = []
    for number, part in enumerate((every[:50], every[50:])):
        write_sentences(tmp_path / f"{number}.parquet", starmap(TokenSentence, part))
        parts.append(Sentences(tmp_path / f"{number}.parquet"))
    join_sentences(tmp_path / "joined.parquet", parts)
    joined = Sentences(tmp_path / "joined.parquet")
    expected = plain(GROUP + 5)
    assert [row._replace(source=0) for row in joined.rows(0, GROUP + 5)] == expected
    assert [row.source for row in joined.rows(49, 2)] == [0, 1]
    # Joined again, sources run on.
    join_sentences(tmp_path / "twice.parquet", [joined, parts[0]])
    assert Sentences(tmp_path / "twice.parquet").row(GROUP + 5).source == 2


def test_the_hash_sees_text_ids_and_borders(tmp_path):
    def hashed(*given):
        return write_sentences(tmp_path / "s.parquet", starmap(TokenSentence, given)).hash

    one = hashed(("ab", [1, 2], [0, 1], [1, 2]))
    assert one == hashed(("ab", [1, 2], [0, 1], [1, 2]))
    others = [
        hashed(("ac", [1, 2], [0, 1], [1, 2])),
        hashed(("ab", [1, 3], [0, 1], [1, 2])),
        hashed((None, [1, 2], None, None)),
        hashed((None, [1], None, None), (None, [2], None, None)),
    ]
    assert len({one, *others}) == 5


@pytest.mark.parametrize("damage", ["missing", "truncated", "nonsense", "inside"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, damage):
    path = tmp_path / "sentences.parquet"
    write_sentences(path, starmap(TokenSentence, rows(GROUP)))
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "inside":  # the footer is whole, the data are not
        path.write_bytes(whole[:4] + bytes(len(whole) // 4) + whole[4 + len(whole) // 4 :])
    else:
        path.write_bytes(whole[: len(whole) // 2] if damage == "truncated" else b"nonsense")
    with pytest.raises(StoreError, match=re.escape(str(path))):
        list(Sentences(path).rows(0, GROUP))


@st.composite
def tokenized(draw):
    """A text cut into tokens of bytes at random, some inside characters, as byte-level BPE does."""
    text = draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12))
    data = text.encode()
    cuts = draw(st.sets(st.integers(1, len(data) - 1))) if len(data) > 1 else set()
    edges = [0, *sorted(cuts), len(data)]
    owners = [place for place, character in enumerate(text) for _ in character.encode()]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    starts = [owners[a] for a in edges[:-1]]
    ends = [owners[b - 1] + 1 for b in edges[1:]]
    return StoredSentence(0, 0, 0, text, list(range(len(pieces))), starts, ends), pieces


def in_hex(data):
    return "".join(f"⟨{byte:02x}⟩" for byte in data)


def shown(piece):
    """Whole characters as they are, other bytes in hex."""
    found, i = "", 0
    while i < len(piece):
        for size in (4, 3, 2, 1):
            try:
                found += piece[i : i + size].decode()
            except UnicodeDecodeError:
                continue
            i += len(piece[i : i + size])
            break
        else:
            found += in_hex(piece[i : i + 1])
            i += 1
    return found


def as_bytes(text):
    """Undo hex."""
    parts = re.split(r"((?:⟨[0-9a-f]{2}⟩)+)", text)
    return b"".join(
        bytes.fromhex(part.replace("⟨", "").replace("⟩", "")) if place % 2 else part.encode()
        for place, part in enumerate(parts)
    )


@given(tokenized(), st.data())
def test_both_sides_of_a_place_lose_nothing(sentence_and_pieces, data):
    sentence, pieces = sentence_and_pieces
    length = data.draw(st.integers(0, len(pieces)))
    before, after = split_text(sentence, length, lambda id: shown(pieces[id]))
    if not re.search("⟨[0-9a-f]{2}⟩", sentence.text):
        assert as_bytes(before) == b"".join(pieces[:length])
        assert as_bytes(after) == b"".join(pieces[length:])
    cut_inside = 0 < length < len(pieces) and sentence.starts[length] < sentence.ends[length - 1]
    if not cut_inside:
        assert before + after == sentence.text


def test_without_text_both_sides_are_the_tokens_as_shown():
    sentence = StoredSentence(0, 0, 0, None, [5, 6, 7], None, None)
    assert split_text(sentence, 2, lambda id: f" w{id}") == (" w5 w6", " w7")
    assert split_text(sentence, 0, lambda id: f" w{id}") == ("", " w5 w6 w7")


def test_what_the_context_cut_off_stays_in_the_rest():
    sentence = StoredSentence(0, 0, 0, "ab cd ef", [1, 2], [0, 2], [2, 5])
    assert split_text(sentence, 2, str) == ("ab cd", " ef")

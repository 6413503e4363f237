"""Search against a plain look at every memory of the index."""

import re
import shutil
import unicodedata
from functools import cache
from pathlib import Path

import pytest

import ffmem
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing import search
from ffmem.indexing.memory import visible_token
from ffmem.indexing.search import Search
from tests.texts import LINES

ALL = 10_000


@pytest.fixture(scope="module")
def everything(tiny_index, ungated_index):
    """Every memory of both indexes, in the order of their cells."""
    return {index.folder: [index[cell] for cell in index] for index in (tiny_index, ungated_index)}


def ranked(found):
    """[(cell, rank, is_worse_side)] as hits: most matches, better rank, lower cell."""
    by_cell = {}
    for cell, rank, side in found:
        by_cell.setdefault(cell, []).append((rank, side in ("bottom", "negative"), side))
    hits = [(str(cell), len(hit), *min(hit)[::2]) for cell, hit in by_cell.items()]
    cells = list(map(str, by_cell))
    return sorted(hits, key=lambda hit: (-hit[1], hit[2], cells.index(hit[0])))


def in_values(memories, holds):
    return ranked(
        (memory.cell, rank, side)
        for memory in memories
        for side in ("top", "bottom")
        for rank, token in enumerate(getattr(memory.value, side), start=1)
        if holds(token.token)
    )


def in_triggers(memories, holds):
    return ranked(
        (memory.cell, trigger.rank, side)
        for memory in memories
        for side, triggers in (
            ("positive", memory.triggers),
            ("negative", memory.negative_triggers),
        )
        for trigger in triggers
        if holds(trigger)
    )


def whole(trigger):
    """The prefix without a last character that is only begun."""
    return re.sub("(?:⟨[0-9a-f]{2}⟩)+$", "", trigger.prefix)


@cache
def words(text):
    """[(word without case and accents, its end)] of a text."""
    found, word = [], ""
    for place, character in enumerate(text + "\n"):
        kind = unicodedata.category(character)
        if kind[0] in "LN" or kind in ("Mn", "Mc", "Co"):
            plain = unicodedata.normalize("NFD", character.lower())
            word += "".join(c for c in plain if not "\u0300" <= c <= "\u036f")
        elif word:
            found.append((word, place))
            word = ""
    return found


def holds_words(query):
    wanted = [word for word, _ in words(query)]

    def holds(trigger):
        here = words(LINES[trigger.sentence])
        ends = [
            here[first + len(wanted) - 1][1]
            for first in range(len(here) - len(wanted) + 1)
            if [word for word, _ in here[first : first + len(wanted)]] == wanted
        ]
        return any(end <= len(whole(trigger)) for end in ends)

    return holds if wanted else lambda trigger: query in whole(trigger)


def plain(hits):
    return [(hit.cell, hit.matches, hit.rank, hit.side) for hit in hits]


@pytest.mark.parametrize(
    "query", ["the", " the", "The", "r", " r", "é", "Ã", "<|end|>", "⟨e2⟩", "⟨unused 315⟩", "zebra"]
)
def test_values_are_found_by_their_tokens_whatever_case_and_leading_space(index, everything, query):
    wanted = {query.casefold(), query.strip().casefold(), f" {query.strip().casefold()}"}
    expected = in_values(everything[index.folder], lambda token: token.casefold() in wanted)
    hits = ffmem.search(index, query, limit=ALL)
    assert plain(hits) == expected
    assert all(hit.snippet.casefold() in wanted for hit in hits)


def test_the_tokens_of_these_tests_are_there(index):
    for query in ("the", "r", "⟨e2⟩", "⟨unused 315⟩"):
        assert ffmem.search(index, query)


@pytest.mark.parametrize("query", ["^ ", "[0-9]", "^(the|of)$", r"\s\w+s$", "⟨"])
def test_values_are_found_by_regular_expression(index, everything, query):
    pattern = re.compile(query)
    expected = in_values(everything[index.folder], lambda token: bool(pattern.search(token)))
    hits = ffmem.search(index, query, regex=True, limit=ALL)
    assert plain(hits) == expected


QUERIES = [
    *("river", "RIVER", "the river", "river,runs", "one", "cafe", "café", "naive city", "12", "e"),
    *("never OR always", '"never OR always"', "NOT a word", "word*", "NEAR(the river)", "text:the"),
    *('" OR NOT *', '"', "*", "!!!", "!!! ???", "script", "<b>", "'; DROP TABLE words; --", "\0"),
    *("city\0of", "में", "म", "प्रेस", "העיר", "של העיתון", "😀", "👋🏽", "€", "^", "-the", "zebra"),
]


@pytest.mark.parametrize("query", QUERIES)
def test_triggers_are_found_by_words_that_end_within_the_prefix(index, everything, query):
    expected = in_triggers(everything[index.folder], holds_words(query))
    hits = ffmem.search(index, query, place="triggers", limit=ALL)
    assert plain(hits) == expected


@pytest.mark.parametrize("query", ["river", "naive city", "!!!", "में", "😀", "never OR always"])
def test_the_words_of_these_tests_are_there(tiny_index, query):
    hits = ffmem.search(tiny_index, query, place="triggers")
    assert hits
    for hit in hits:
        found = re.search(r"\[(.*)\]", hit.snippet).group(1)
        assert [word for word, _ in words(found)] == [word for word, _ in words(query)]


@pytest.mark.parametrize(
    "query", ["river", "the$", "^The", r"\bthe\b.*\bthe\b", "r.*", "(?i)RIVER", "th(?!e)", r"\d+"]
)
def test_triggers_are_found_by_regular_expressions_of_their_prefix(index, everything, query):
    pattern = re.compile(query)
    expected = in_triggers(
        everything[index.folder], lambda trigger: bool(pattern.search(whole(trigger)))
    )
    assert expected
    assert plain(ffmem.search(index, query, place="triggers", regex=True, limit=ALL)) == expected


@pytest.mark.parametrize("place", ["values", "triggers"])
def test_a_layer_and_a_limit_choose_among_all_hits(tiny_index, place):
    query = "the"
    every = ffmem.search(tiny_index, query, place=place, limit=ALL)
    inside = [hit for hit in every if hit.cell.startswith("L1N")]
    assert 0 < len(inside) < len(every)
    assert ffmem.search(tiny_index, query, place=place, layer=1, limit=ALL) == inside
    assert ffmem.search(tiny_index, query, place=place, limit=3) == every[:3]
    assert ffmem.search(tiny_index, query, place=place, layer=1, limit=2) == inside[:2]


@pytest.mark.parametrize(
    ("query", "options", "message"),
    [
        ("", {}, "Nothing was searched for"),
        (" \t", {"place": "triggers"}, "Nothing was searched for"),
        ("(", {"regex": True}, r"'\(' is not a regular expression"),
        ("the", {"layer": 2}, "no layer 2: the model has layers 0 to 1"),
        ("the", {"layer": -1}, "no layer -1"),
        ("the", {"place": "patterns"}, "no patterns yet"),
        ("the", {"place": "keys"}, "'keys' was given"),
    ],
)
def test_a_search_that_cannot_be_done_says_why(tiny_index, query, options, message):
    with pytest.raises(FfmemError, match=message):
        ffmem.search(tiny_index, query, **options)


@pytest.fixture
def folder(tiny_index, tmp_path):
    """A copy of the index, with its search file, in a folder of an awkward name."""
    ffmem.search(tiny_index, "the")
    return Path(shutil.copytree(tiny_index.folder, tmp_path / "an index?a=b#c%20d"))


@pytest.mark.parametrize("damage", ["missing", "nonsense", "empty", "half", "last page", "inside"])
def test_the_search_file_is_made_again_when_it_is_damaged(folder, tiny_index, damage):
    path = folder / "search.sqlite"
    content = path.read_bytes()
    path.unlink()
    damaged = {
        "nonsense": b"nonsense" * 1000,
        "empty": b"",
        "half": content[: len(content) // 2],
        "last page": content[:-4096],
        "inside": content[: 2 * 4096] + bytes(len(content) - 2 * 4096),
    }
    if damage in damaged:
        path.write_bytes(damaged[damage])
    for place in ("values", "triggers"):
        expected = ffmem.search(tiny_index, "the", place=place)
        assert ffmem.search(folder, "the", place=place) == expected
    assert path.stat().st_size == len(content)


def test_the_search_file_of_another_index_is_made_again(folder, ungated_index, tiny_index):
    ffmem.search(ungated_index, "the")
    shutil.copy(ungated_index.folder / "search.sqlite", folder / "search.sqlite")
    assert ffmem.search(folder, "the") == ffmem.search(tiny_index, "the")


def test_a_current_search_file_is_left_as_it_is(folder):
    before = (folder / "search.sqlite").stat().st_mtime_ns
    assert ffmem.search(folder, "the")
    assert (folder / "search.sqlite").stat().st_mtime_ns == before


def test_the_search_file_is_no_part_of_the_index(folder):
    assert ffmem.verify(folder) == []
    assert "search.sqlite" not in ffmem.open(folder).manifest.files


def test_a_damaged_index_is_named_when_its_search_file_is_made(folder):
    (folder / "search.sqlite").unlink()
    (folder / "triggers/layer-001.parquet").write_bytes(b"nonsense")
    with pytest.raises(StoreError, match=r"triggers/layer-001\.parquet"):
        Search(ffmem.open(folder))
    assert not list(folder.glob(".*"))


def test_a_regular_expression_that_never_ends_is_stopped(tiny_index, monkeypatch):
    monkeypatch.setattr(search, "SECONDS", 0.3)
    with pytest.raises(FfmemError, match=r"takes too long: no answer after 0\.3 seconds\. Make"):
        search._Pattern("(a|aa)+$").search("a" * 60 + "b")
    monkeypatch.setattr(search, "SECONDS", 0.0)
    with pytest.raises(FfmemError, match="takes too long"):
        ffmem.search(tiny_index, "the", place="triggers", regex=True)


def test_a_token_is_found_as_it_is_shown(tiny_index):
    token = next(t.token for t in tiny_index["L0N0"].value.top if t.token[0] == " " < t.token)
    shown = ffmem.search(tiny_index, visible_token(token), limit=1000)
    assert shown == ffmem.search(tiny_index, token, limit=1000)
    assert "L0N0" in {hit.cell for hit in shown}

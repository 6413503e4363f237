"""Search over descriptions finds what a look at every pattern would, and tells what is missing."""

import os
import re
import shutil
import sqlite3
import unicodedata
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ffmem
from ffmem.errors import FfmemError
from ffmem.indexing.filters import Filters
from ffmem.indexing.query import Query
from ffmem.indexing.search_db import NotSearchable
from ffmem.patterns.search import PatternSearch
from ffmem.patterns.store import KINDS, SOURCES, open_patterns
from ffmem.progress import Progress
from tests.patterns.planting import pattern, plant

AUTOMATIC = [
    pattern("L0N1", 1, "ends with “the”", what=" the"),
    pattern("L0N1", 2, "about rivers, and their banks", "semantic", what="rivers banks"),
    pattern("L0N1", 1, "a river before its name", "semantic", sign=-1),
    pattern("L0N5", 1, "Énde of a river", what="end"),
    pattern("L1N3", 1, "numbers; in 1984", what="1984"),
    pattern("L1N3", 2, "river — river river", "semantic"),
    pattern("L1N7", 1, "<b>bold</b> & 'quoted' \"words\"", what="* OR NEAR("),
    pattern("L1N23", 1, "नदी के किनारे", "semantic"),
]
HUMAN = [
    pattern("L0N5", 1, "rivers of Europe", "semantic", rule="person"),
    pattern("L1N3", 3, "a river again", rule="person"),
]


@pytest.fixture(scope="module")
def planted(tiny_index, tmp_path_factory):
    folder = tmp_path_factory.mktemp("patterns") / "index"
    shutil.copytree(tiny_index.folder, folder)
    index = ffmem.open(folder)
    plant(index, "automatic", *AUTOMATIC)
    plant(index, "human", *HUMAN)
    return index


@pytest.fixture
def index(planted, tmp_path):
    shutil.copytree(planted.folder, tmp_path / "index")
    return ffmem.open(tmp_path / "index")


def folded(text):
    plain = unicodedata.normalize("NFD", text.casefold())
    return "".join(one for one in plain if not ("\u0300" <= one <= "\u036f"))


def words(text):
    """Return the words of a text: letters, numbers and marks in a row."""
    inside = [
        one
        if unicodedata.category(one)[0] in "LN" or unicodedata.category(one) in ("Mn", "Mc")
        else " "
        for one in folded(text)
    ]
    return "".join(inside).split()


def holds(text, query, prefix):
    wanted, there = words(query), words(text)
    for start in range(len(there) - len(wanted) + 1):
        *first, last = there[start : start + len(wanted)]
        if first == wanted[:-1] and (last.startswith(wanted[-1]) if prefix else last == wanted[-1]):
            return True
    return False


def by_hand(query, prefix=False, layer=None):
    """Return what is found, pattern by pattern: (cell, matches, rank, side, source)."""
    found = defaultdict(list)
    for source, several in (("human", HUMAN), ("automatic", AUTOMATIC)):
        for one in several:
            if layer in (None, one.cell.layer) and holds(one.text, query, prefix):
                side = "positive" if one.sign > 0 else "negative"
                key = (one.number, SOURCES.index(source), one.sign < 0)
                found[one.cell].append((key, side, source))
    hits = []
    for cell, several in found.items():
        (number, _, _), side, source = min(several)
        hits.append((-len(several), number, cell, side, source))
    return [(str(c), -n, number, side, source) for n, number, c, side, source in sorted(hits)]


def found(search, *query, layer=None, **options):
    total, hits = search.search(Query(*query, **options), Filters(layer=layer), 0, 100)
    assert total == len(hits)
    return [(*one.match[:4], one.source) for one in hits]


QUERIES = [
    "river",
    "rivers",
    "RIVER",
    "ende",
    "the",
    "ends with",
    "1984",
    "bold",
    "words",
    "zebra",
    "river river",
    "of a river",
    "end",
    "किनारे",
    "a",
]


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("layer", [None, 0, 1])
def test_what_is_found_is_what_a_look_at_every_pattern_finds(planted, prefix, layer):
    search = PatternSearch(planted)
    for query in QUERIES:
        assert found(search, query, prefix=prefix, layer=layer) == by_hand(query, prefix, layer)
    assert by_hand("river")[0][0] == "L0N1" or by_hand("river")[0][1] >= 2


def test_pages_of_hits_make_up_the_whole(planted):
    search = PatternSearch(planted)
    total, whole = search.search(Query("river", prefix=True), limit=100)
    assert total == len(whole) == len(by_hand("river", True))
    for first in range(total):
        part = search.search(Query("river", prefix=True), offset=first, limit=1)
        assert part == (total, whole[first : first + 1])


@given(st.sampled_from(AUTOMATIC + HUMAN), st.data())
def test_what_a_word_finds_every_beginning_of_it_finds(planted, one, data):
    search = PatternSearch(planted)
    word = data.draw(st.sampled_from(words(one.text) or ["x"]))
    whole = {hit[0] for hit in found(search, word)}
    assert str(one.cell) in whole
    size = data.draw(st.integers(1, len(word)))
    if size < len(word) and unicodedata.category(word[size])[0] == "M":
        size = len(word)
    assert whole <= {hit[0] for hit in found(search, word[:size], prefix=True)}
    search.close()


def test_the_found_words_are_marked_in_the_whole_description(planted):
    search = PatternSearch(planted)
    for query in ("river", "ende of", "1984", "river river", "/"):
        _, hits = search.search(Query(query), limit=100)
        for hit in hits:
            excerpt = hit.match.excerpt
            assert words(excerpt.match) == words(query)
            assert excerpt.plain in {one.text for one in AUTOMATIC + HUMAN}
    (hit,) = search.find("1984")
    assert hit._asdict() == {
        "cell": "L1N3",
        "matches": 1,
        "rank": 1,
        "side": "positive",
        "snippet": "numbers; in [1984]",
        "kind": "shallow",
        "source": "automatic",
    }


def test_expressions_and_signs_are_found_too(planted):
    search = PatternSearch(planted)
    every = {str(one.cell) for one in AUTOMATIC + HUMAN if re.search(r"r\w+s\b", one.text)}
    assert {hit.cell for hit in search.find(r"r\w+s\b", regex=True)} == every
    assert [hit.cell for hit in search.find("—")] == ["L1N3"]
    assert [hit.cell for hit in search.find("* OR NEAR(")] == ["L1N7"]
    assert [hit.cell for hit in search.find('"')] == ["L1N7"]
    with pytest.raises(FfmemError, match="not a valid regular expression"):
        search.find("(", regex=True)
    with pytest.raises(FfmemError, match="is too large"):
        search.find("(?:(?:a{1000}){1000}){4}", regex=True)


@pytest.mark.parametrize(
    ("query", "layer", "says"),
    [(" ", None, "The query is empty"), ("a", 2, "no layer 2"), ("\ud800", None, "surrogate")],
)
def test_what_cannot_be_searched_for_is_refused(planted, query, layer, says):
    with pytest.raises(FfmemError, match=says):
        PatternSearch(planted).find(query, filters=Filters(layer=layer))


def test_an_index_without_patterns_says_how_to_find_some(tiny_index):
    with pytest.raises(FfmemError, match=r"no patterns yet\. .*`ffmem patterns detect .*index`"):
        PatternSearch(tiny_index)


def test_patterns_of_an_earlier_state_are_said_and_not_searched(index):
    manifest = index.folder / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    advice = r"has changed since its patterns were found\. .* `ffmem patterns detect /.*`\."
    with pytest.raises(FfmemError, match=advice):
        PatternSearch(ffmem.open(index.folder))
    assert open_patterns(index) == []


def test_the_file_follows_the_patterns(index):
    assert not PatternSearch(index).find("volcano")
    plant(index, "explained", pattern("L0N9", 1, "a volcano", "semantic"))
    (hit,) = PatternSearch(index).find("volcano")
    assert (hit.cell, hit.source) == ("L0N9", "explained")
    plant(index, "explained")
    assert not PatternSearch(index).find("volcano")


@pytest.mark.parametrize("damage", ["missing", "cut", "noise", "foreign", "within"])
def test_a_damaged_file_is_made_again(index, damage):
    PatternSearch(index).close()
    path = index.folder / "patterns" / "search.sqlite"
    whole = path.read_bytes()
    expected = by_hand("river")
    opened = PatternSearch(index) if damage == "within" else None
    path.unlink()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "noise":
        path.write_bytes(os.urandom(4096))
    elif damage == "foreign":
        with sqlite3.connect(path) as base:
            base.execute("CREATE TABLE other (x)")
        base.close()
    elif damage == "within":
        path.write_bytes(whole[:4096] + os.urandom(len(whole) - 4096))
        opened.close()
        opened._file.db = sqlite3.connect(path)
    assert found(opened or PatternSearch(index), "river") == expected


@pytest.mark.parametrize(
    "change", ["DELETE FROM patterns", "UPDATE patterns SET text = NULL", "DROP TABLE words"]
)
def test_a_file_that_does_not_fit_is_made_again_by_verify(index, change, capsys):
    PatternSearch(index).close()
    path = index.folder / "patterns" / "search.sqlite"
    whole = path.read_bytes()
    assert ffmem.verify(index.folder, Progress()) == []
    assert capsys.readouterr().err == ""
    with closing(sqlite3.connect(path)) as base:
        base.execute(change)
        base.commit()
    assert ffmem.verify(index.folder, Progress()) == []
    assert (
        capsys.readouterr().err == "patterns/search.sqlite was out of date and has been rebuilt.\n"
    )
    assert path.read_bytes() == whole


def test_a_file_with_nonsense_inside_is_made_again_by_a_search(index):
    PatternSearch(index).close()
    path = index.folder / "patterns" / "search.sqlite"
    with closing(sqlite3.connect(path)) as base:
        base.execute("UPDATE patterns SET text = NULL")
        base.commit()
    with closing(PatternSearch(index)) as search:
        expected = {hit.cell for hit in search.find("river")}
        assert {hit.cell for hit in search.find("[Rr]iver", regex=True)} == expected


def test_many_may_make_the_file_at_once(index):
    with ThreadPoolExecutor(8) as pool:
        several = list(pool.map(lambda _: found(PatternSearch(index), "river"), range(16)))
    assert several == [by_hand("river")] * 16


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_said(index):
    folder = index.folder / "patterns"
    folder.chmod(0o500)
    try:
        with pytest.raises(NotSearchable, match="no current search file"):
            PatternSearch(index)
    finally:
        folder.chmod(0o700)


def test_a_kind_keeps_such_patterns_and_memories_that_have_one(planted):
    every = AUTOMATIC + HUMAN
    with closing(PatternSearch(planted)) as search:
        for kind in KINDS:
            of_kind = {str(one.cell) for one in every if one.kind == kind}
            hits = search.find("river", filters=Filters(kind=kind), limit=100)
            cells = {
                str(one.cell)
                for one in every
                if one.kind == kind and holds(one.text, "river", False)
            }
            assert {hit.cell for hit in hits} == cells
            assert {hit.kind for hit in hits} <= {kind}
            mask = search.with_kind(kind)
            assert {str(cell) for cell, has in zip(planted, mask, strict=True) if has} == of_kind
            found = ffmem.search(planted, "the", "triggers", kind=kind, limit=1000)
            plain = ffmem.search(planted, "the", "triggers", limit=1000)
            assert [hit.cell for hit in found] == [hit.cell for hit in plain if hit.cell in of_kind]
        for sign, side in ((1, "positive"), (-1, "negative")):
            hits = search.find("river", filters=Filters(sign=sign), limit=100)
            assert {hit.side for hit in hits} <= {side}
            cells = {
                str(one.cell)
                for one in every
                if one.sign == sign and holds(one.text, "river", False)
            }
            assert {hit.cell for hit in hits} == cells
    assert list(ffmem.search(planted, "river")) == ["values", "triggers", "patterns"]

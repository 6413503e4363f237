"""Search against a plain look at every memory of the index."""

import errno
import re
import shutil
import sqlite3
import unicodedata
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ffmem
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing import query as query_module
from ffmem.indexing import search
from ffmem.indexing.filters import Filters
from ffmem.indexing.memory import visible_token
from ffmem.indexing.query import Expression, Query
from ffmem.indexing.search import PREFIX_END, Search, search_values
from ffmem.indexing.search_db import NotSearchable
from tests.indexing.folders import indexed, write_corpus
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
    hits = ffmem.search(index, query, "values", limit=ALL)
    assert plain(hits) == expected
    assert all(hit.snippet.casefold() in wanted for hit in hits)


def test_the_tokens_of_these_tests_are_there(index):
    for query in ("the", "r", "⟨e2⟩", "⟨unused 315⟩"):
        assert ffmem.search(index, query, "values")


@pytest.mark.parametrize("query", ["^ ", "[0-9]", "^(the|of)$", r"\s\w+s$", "⟨"])
def test_values_are_found_by_regular_expression(index, everything, query):
    pattern = re.compile(query)
    expected = in_values(everything[index.folder], lambda token: bool(pattern.search(token)))
    hits = ffmem.search(index, query, "values", regex=True, limit=ALL)
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
        ("", {}, "The query is empty"),
        (" \t", {"place": "triggers"}, "The query is empty"),
        ("(", {"regex": True}, r"'\(' is not a valid regular expression"),
        ("(?:(?:a{1000}){1000}){4}", {"regex": True}, "is too large"),
        ("(?R)", {"regex": True, "place": "triggers"}, "searches do not support"),
        ("the", {"layer": 2}, "no layer 2: the model has layers 0 to 1"),
        ("the", {"layer": -1}, "no layer -1"),
        ("the", {"layer": "1"}, "layer is '1'. It must be int"),
        ("the", {"place": "patterns"}, "no patterns yet"),
        ("the", {"place": "keys"}, "`place` keys: unknown value"),
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


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE {table} SET postings = randomblob(10 * length(postings))",
        "UPDATE {table} SET postings = randomblob(1 + length(postings))",
        "UPDATE {table} SET postings = NULL",
        "UPDATE {table} SET postings = 'text'",
    ],
)
@pytest.mark.parametrize("place", ["values", "triggers"])
@pytest.mark.parametrize("options", [{}, {"regex": True}])
def test_a_search_file_with_nonsense_inside_is_made_again(
    folder, tiny_index, change, place, options
):
    table = {"values": "tokens", "triggers": "sentences"}[place]
    with closing(sqlite3.connect(folder / "search.sqlite")) as base:
        base.execute(change.format(table=table))
        base.commit()
    expected = ffmem.search(tiny_index, "the", place=place, **options)
    assert ffmem.search(folder, "the", place=place, **options) == expected


def test_the_search_file_of_another_index_is_made_again(folder, ungated_index, tiny_index):
    ffmem.search(ungated_index, "the")
    shutil.copy(ungated_index.folder / "search.sqlite", folder / "search.sqlite")
    assert ffmem.search(folder, "the") == ffmem.search(tiny_index, "the")


def test_a_current_search_file_is_left_as_it_is(folder):
    before = (folder / "search.sqlite").stat().st_mtime_ns
    assert ffmem.search(folder, "the")["triggers"]
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
    with pytest.raises(FfmemError, match=r"takes too long: stopped after 0\.3 seconds\. Make"):
        Expression("(a|aa)+$", 0.3).search("a" * 60 + "b")
    monkeypatch.setattr(query_module, "SECONDS", 0.0)
    with pytest.raises(FfmemError, match="takes too long"):
        ffmem.search(tiny_index, "the", place="triggers", regex=True)


def test_a_token_is_found_as_it_is_shown(tiny_index):
    token = next(t.token for t in tiny_index["L0N0"].value.top if t.token[0] == " " < t.token)
    shown = ffmem.search(tiny_index, visible_token(token), "values", limit=1000)
    assert shown == ffmem.search(tiny_index, token, "values", limit=1000)
    assert "L0N0" in {hit.cell for hit in shown}


def holds_beginning(query):
    """Whether the words of the query stand in a prefix in a row, the last one perhaps longer."""
    wanted = [word for word, _ in words(query)]

    def holds(trigger):
        here = words(LINES[trigger.sentence])
        for first in range(len(here) - len(wanted) + 1):
            part = [word for word, _ in here[first : first + len(wanted)]]
            end = here[first + len(wanted) - 1][1]
            if (
                part[:-1] == wanted[:-1]
                and part[-1].startswith(wanted[-1])
                and end <= len(whole(trigger))
            ):
                return True
        return False

    return holds


def begins(query):
    forms = {query, query.lstrip(), f" {query.lstrip()}"}
    beginnings = tuple(form.casefold() for form in forms)
    return lambda token: token.casefold().startswith(beginnings)


@pytest.fixture(scope="module")
def searches(tiny_index, ungated_index):
    opened = {index.folder: Search(index) for index in (tiny_index, ungated_index)}
    yield opened
    for one in opened.values():
        one.close()


@pytest.fixture
def opened(index, searches):
    return searches[index.folder]


@pytest.mark.parametrize("query", ["t", "th", "The", " r", "riv", "⟨", "é", "zeb", "<|", "!"])
def test_a_beginning_finds_every_token_that_begins_so(index, opened, everything, query):
    expected = in_values(everything[index.folder], begins(query))
    found = opened.search(Query(query, prefix=True), "values", limit=ALL)
    assert plain(found.hits) == expected
    assert found.total == len(expected)
    for hit in found.hits:
        assert begins(query)(hit.excerpt.plain)
        assert hit.excerpt.match.strip().casefold() == query.strip().casefold()
        assert hit.excerpt.plain.startswith(hit.excerpt.match)


@pytest.mark.parametrize(
    "query", ["r", "ri", "RIV", "the r", "of the ri", "caf", "nai", "मे", "ה", "1", "in the c", "x"]
)
def test_a_beginning_finds_triggers_with_words_that_begin_so(index, opened, everything, query):
    expected = in_triggers(everything[index.folder], holds_beginning(query))
    found = opened.search(Query(query, prefix=True), "triggers", limit=ALL)
    assert plain(found.hits) == expected
    assert (found.total, found.n_examined) == (len(expected), None)


@given(
    st.sampled_from(["the river runs", "café in", "never OR always", "העיר של", "<b>bold", "1990"]),
    st.integers(1, 20),
    st.sampled_from(["values", "triggers"]),
)
@settings(max_examples=60)
def test_what_a_word_finds_every_beginning_of_it_finds(opened_both, text, length, place):
    beginning = text[: min(length, len(text))]
    if not words(beginning):
        return
    for opened in opened_both:
        whole_words = opened.search(Query(text), place, limit=ALL)
        begun = opened.search(Query(beginning, prefix=True), place, limit=ALL)
        assert {hit.cell for hit in whole_words.hits} <= {hit.cell for hit in begun.hits}
        assert whole_words.total <= begun.total


@pytest.fixture(scope="module")
def opened_both(searches):
    return list(searches.values())


def test_a_word_is_whole_once_a_space_follows_it(opened):
    assert opened.search(Query("ri ", prefix=True), "triggers").total == 0
    assert opened.search(Query("ri", prefix=True), "triggers").total > 0


@pytest.mark.parametrize("query", ["the the", "river river", "the the the", "the r"])
def test_words_that_overlap_themselves_end_where_the_first_match_ends(
    index, opened, everything, query
):
    plain_words = in_triggers(everything[index.folder], holds_words(query))
    assert plain(opened.search(Query(query), "triggers", limit=ALL).hits) == plain_words
    begun = in_triggers(everything[index.folder], holds_beginning(query))
    found = opened.search(Query(query, prefix=True), "triggers", limit=ALL)
    assert plain(found.hits) == begun


def test_some_prefix_ends_between_two_matches_that_overlap(everything, ungated_index):
    texts = {whole(t) for memory in everything[ungated_index.folder] for t in memory.triggers}
    assert any(text.lower().count("the the") and text.count(" ") < 3 for text in texts)


@pytest.mark.parametrize("place", ["values", "triggers"])
def test_parts_of_the_hits_are_the_hits(opened, place):
    every = opened.search(Query("the"), place, limit=ALL)
    assert every.total == len(every.hits) > 7
    for offset, limit in ((0, 3), (3, 4), (every.total - 1, 5), (every.total, 5)):
        part = opened.search(Query("the"), place, offset=offset, limit=limit)
        assert part.hits == every.hits[offset : offset + limit]
        assert part.total == every.total


@pytest.mark.parametrize("regex", [False, True])
def test_frequent_words_are_counted_over_the_first_sentences_and_it_is_said(
    index, opened, everything, regex
):
    every = opened.search(Query("the", regex), "triggers", limit=ALL)
    assert every.n_examined is None
    some = opened.search(Query("the", regex, max_triggers=20), "triggers", limit=ALL)
    assert 0 < some.n_examined < len(LINES)
    # The same, over the sentences that were looked at.
    holding = (lambda text: "the" in text) if regex else (lambda text: "the" in dict(words(text)))
    first = [number for number, line in enumerate(LINES) if holding(line)]
    triggering = {t.sentence for memory in everything[index.folder] for t in both(memory)}
    first = [number for number in first if number in triggering][: some.n_examined]
    holds = (lambda trigger: "the" in whole(trigger)) if regex else holds_words("the")
    expected = in_triggers(everything[index.folder], lambda t: t.sentence in first and holds(t))
    assert plain(some.hits) == expected
    assert some.total == len(expected) < every.total
    assert opened.search(Query("the", regex, max_triggers=10**9), "triggers", limit=ALL) == every


def both(memory):
    return [*memory.triggers, *memory.negative_triggers]


@pytest.mark.parametrize("query", ["river", "the river", "!!!", "में", "😀"])
@pytest.mark.parametrize("prefix", [False, True])
def test_an_excerpt_is_a_part_of_the_sentence_and_shows_where_the_prefix_ends(
    tiny_index, searches, everything, query, prefix
):
    opened = searches[tiny_index.folder]
    memories = {str(memory.cell): memory for memory in everything[tiny_index.folder]}
    hits = opened.search(Query(query, prefix=prefix), "triggers", limit=ALL).hits
    assert hits
    for hit in hits:
        memory = memories[hit.cell]
        triggers = memory.triggers if hit.side == "positive" else memory.negative_triggers
        trigger = triggers[hit.rank - 1]
        shown = hit.excerpt.plain.strip("…")
        assert shown in LINES[trigger.sentence]
        within = f"{hit.excerpt.before}{hit.excerpt.match}{hit.excerpt.after}".strip("…")
        assert within in whole(trigger)
        if hit.excerpt.rest:
            assert whole(trigger).endswith(within)


HOSTILE = [
    *(
        '"',
        '""',
        "'",
        "*",
        "a*",
        "^a",
        "-",
        "+",
        "(",
        ")",
        "NEAR(",
        "a NEAR b",
        "{text}: a",
        "text : a",
    ),
    *(
        "a AND",
        "OR",
        "NOT",
        "a OR b NOT c",
        "%",
        "_",
        "\\",
        "\x01",
        "\0",
        "a\0b",
        "\0" * 50,
        "\u0301",
    ),
    *(
        "\u202e river",
        "river\u200f",
        "\ufeff",
        "\ufffd",
        "\U0010ffff",
        "\ud7ff",
        "ﷺ",
        "ß",
        "İ",
        "ⅷ",
    ),
    *("a" * 5000, "a " * 3000, "😀" * 500, "\u0300" * 400, "' OR 1=1 --", "rank MATCH 'bm25()'"),
]


@pytest.mark.parametrize("query", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_searched_like_any_other(index, opened, everything, query, monkeypatch):
    def never(*_):
        raise AssertionError("the search file was made again")

    monkeypatch.setattr(search, "make_search_db", never)
    for place in ("values", "triggers"):
        for prefix in (False, True):
            try:
                found = opened.search(Query(query, prefix=prefix), place, limit=ALL)
            except FfmemError as error:
                assert "The query is empty" in str(error)  # noqa: PT017
                assert not query.strip()
                continue
            assert found.total == len(found.hits)
            if place == "values" and prefix:
                assert plain(found.hits) == in_values(everything[index.folder], begins(query))


@pytest.mark.parametrize("query", ["\ud800", "the \udfff", "\udc80river"])
def test_half_a_character_is_refused(tiny_index, query):
    for place in ("values", "triggers"):
        with pytest.raises(FfmemError, match="contains a lone surrogate"):
            ffmem.search(tiny_index, query, place=place)


def test_a_folder_that_may_not_be_written_to_is_told(folder, monkeypatch):
    (folder / "search.sqlite").unlink()

    def refused(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "touch", refused)
    with pytest.raises(NotSearchable, match=r"no search file .* is not writable: Permission"):
        Search(ffmem.open(folder))


@pytest.mark.parametrize("place", ["values", "triggers"])
def test_hits_show_themselves_one_memory_per_line(tiny_index, place):
    query = next(token for token in tiny_index.tokens if token.strip().isalpha()).strip()
    hits = ffmem.search(tiny_index, query, place)
    assert hits
    lines, page = str(hits).splitlines(), hits._repr_html_()
    assert [line.split()[0] for line in lines] == [hit.cell for hit in hits]
    assert page.count("<tr>") == len(hits) + 1
    none = ffmem.search(tiny_index, "<b>nothing</b>", place)
    assert str(none) == f"No memory has '<b>nothing</b>' in its {place}."
    assert "<b>" not in none._repr_html_()


# Everywhere at once, and filters


def test_a_search_everywhere_has_the_hits_and_counts_of_each_place(tiny_index):
    found = ffmem.search(tiny_index, "the", limit=3)
    assert list(found) == ["values", "triggers"]
    for place, hits in found.items():
        alone = ffmem.search(tiny_index, "the", place, limit=ALL)
        assert (hits, hits.total) == (alone[:3], len(alone))
        assert f"{place}: {len(alone)} memories" in str(found)
    assert "no patterns yet" in found.notes[0]
    shown = found.to_dict()
    assert [group["total"] for group in shown["groups"]] == [one.total for one in found.values()]
    assert shown["notes"] == found.notes
    assert found._repr_html_().count("<table>") == 2
    nothing = str(ffmem.search(tiny_index, "zebra"))
    assert nothing.startswith("No memory has 'zebra' in its values or triggers.")


@pytest.mark.parametrize("sign", [None, 1, -1])
@pytest.mark.parametrize("rank", [None, 1, 3])
def test_sign_and_rank_keep_the_matches_that_have_them(index, everything, sign, rank):
    def kept(found):
        sides = {1: ("top", "positive"), -1: ("bottom", "negative"), None: SIDES}[sign]
        return [
            (cell, at, side) for cell, at, side in found if side in sides and at <= (rank or 99)
        ]

    memories = everything[index.folder]
    holds = holds_words("the")
    triggers = kept(
        (memory.cell, one.rank, side)
        for memory in memories
        for side, ones in (("positive", memory.triggers), ("negative", memory.negative_triggers))
        for one in ones
        if holds(one)
    )
    hits = ffmem.search(index, "the", "triggers", sign=sign, rank=rank, limit=ALL)
    assert plain(hits) == ranked(triggers)
    values = kept(
        (memory.cell, at, side)
        for memory in memories
        for side in ("top", "bottom")
        for at, token in enumerate(getattr(memory.value, side), start=1)
        if token.token.strip().casefold() == "the"
    )
    hits = ffmem.search(index, "the", "values", sign=sign, rank=rank, limit=ALL)
    assert plain(hits) == ranked(values)
    unfinished = search_values(index, Query("the"), Filters(sign=sign, rank=rank), limit=ALL)
    assert plain(unfinished.hits) == ranked(values)


SIDES = ("top", "bottom", "positive", "negative")


@pytest.mark.parametrize("place", ["values", "triggers"])
def test_layer_bank_and_activity_keep_the_memories_that_have_them(index, place):
    every = ffmem.search(index, "the", place, limit=ALL)
    shares = {str(cell): index[cell].stats.active_share for cell in index}
    middle = sorted(shares.values())[len(shares) // 2]
    low = ffmem.search(index, "the", place, max_active=middle, limit=ALL)
    assert plain(low) == [hit for hit in plain(every) if shares[hit[0]] <= middle]
    high = ffmem.search(index, "the", place, min_active=middle, layer=1, limit=ALL)
    assert plain(high) == [
        hit for hit in plain(every) if shares[hit[0]] >= middle and hit[0].startswith("L1")
    ]
    assert high.total == len(high)
    assert ffmem.search(index, "the", place, bank="dense", limit=ALL) == every


@pytest.mark.parametrize(
    ("filters", "says"),
    [
        ({"rank": 0}, "rank is 0. Ranks start at 1"),
        ({"sign": 0}, "sign is 0. Use 1 or -1"),
        ({"bank": "E3"}, "no bank 'E3' in this index. There are: dense"),
        ({"bank": "E3", "layer": 1}, "no bank 'E3' in layer 1"),
        ({"kind": "deep"}, "no 'deep' patterns. Use shallow or semantic"),
        ({"min_active": 1.5}, "min_active is 1.5. It is a share"),
        ({"limit": 0}, "limit is 0"),
        ({"kind": "shallow", "place": "values"}, "no patterns yet"),
    ],
)
def test_filters_that_make_no_sense_are_refused(tiny_index, filters, says):
    with pytest.raises(FfmemError, match=says):
        ffmem.search(tiny_index, "the", **filters)


def test_a_trigger_hit_shows_where_its_prefix_ends(tiny_index, everything):
    hits = ffmem.search(tiny_index, "the", "triggers", limit=ALL)
    prefixes = {
        (str(memory.cell), side, one.rank): one
        for memory in everything[tiny_index.folder]
        for side, ones in (("positive", memory.triggers), ("negative", memory.negative_triggers))
        for one in ones
    }
    for hit, line in zip(hits, str(hits).splitlines(), strict=True):
        trigger = prefixes[hit.cell, hit.side, hit.rank]
        assert whole(trigger).endswith(hit.snippet.replace("[", "").replace("]", "")[-5:])
        assert LINES[trigger.sentence][len(whole(trigger)) :].startswith(hit.rest.rstrip("…"))
        assert line.count(PREFIX_END) == 1


def test_nothing_found_under_filters_says_so(tiny_index):
    with closing(Search(tiny_index)) as search:
        plain = search.find("no such words here", "triggers")
        filtered = search.find("no such words here", "triggers", filters=Filters(layer=1))
    assert str(plain) == "No memory has 'no such words here' in its triggers."
    assert str(filtered) == "No memory has 'no such words here' in its triggers with these filters."
    with pytest.raises(FfmemError, match=r"min_active 0\.5 is above max_active 0\.1"):
        Filters(min_active=0.5, max_active=0.1).check(tiny_index)


# Ranking


@given(st.data())
def test_hits_are_ranked_as_if_every_memory_were_sorted(tiny_index, data):
    entry = st.tuples(st.integers(0, 11), st.integers(1, 4), st.sampled_from([1, -1]))
    entries = data.draw(st.lists(entry, max_size=40, unique=True))
    first, size = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 6))
    sign = data.draw(st.sampled_from([None, 1, -1]))
    allowed = data.draw(st.sampled_from([None, range(0, 12, 2)]))
    mask = None
    if allowed is not None:
        mask = np.zeros(len(tiny_index), bool)
        mask[list(allowed)] = True
    postings = np.array(entries, search.TRIGGER_POSTING)
    kept = search._Kept(Filters(sign=sign), mask)
    keys = np.arange(len(entries)) + 100

    found = search._rank_cells(tiny_index, postings, keys, kept, slice(first, first + size))

    by_cell = {}
    for key, (cell, rank, side) in zip(keys.tolist(), entries, strict=True):
        if side in (sign or side,) and (allowed is None or cell in allowed):
            by_cell.setdefault(cell, []).append((rank, -side, key))
    expected = sorted((-len(own), min(own)[0], cell, min(own)) for cell, own in by_cell.items())[
        first : first + size
    ]
    assert found[0] == len(by_cell)
    assert found[1] == [
        (tiny_index.layout.at(cell), -count, rank, -side, key)
        for count, _, cell, (rank, side, key) in expected
    ]


def test_a_search_says_that_a_file_is_missing_as_show_does(tmp_path):
    index = indexed(tmp_path / "index", write_corpus(tmp_path / "corpus.txt"))
    assert ffmem.search(index, "w3")["triggers"]
    (index.folder / "values" / "layer-001.parquet").unlink()
    says = r"Cannot read .*values/layer-001\.parquet.* missing"
    with pytest.raises(StoreError, match=says) as one:
        ffmem.search(index.folder, "w3")
    with pytest.raises(StoreError, match=says) as two:
        print(ffmem.open(index.folder)["L1N0"])
    assert str(one.value).partition(". A file")[2] == str(two.value).partition(". A file")[2]

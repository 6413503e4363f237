import json
from dataclasses import asdict, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.errors import StoreError, name_parameters
from ffmem.records import NotARecord, Record, check_same_settings


@dataclass(frozen=True, kw_only=True)
class Inner(Record):
    share: float
    name: str | None


@dataclass(frozen=True, kw_only=True)
class Outer(Record):
    count: int
    inner: Inner | None
    inners: list[Inner]
    by_name: dict[str, str | int | None]
    sure: bool


finite = st.floats(allow_nan=False, allow_infinity=False)
inners = st.builds(Inner, share=finite, name=st.none() | st.text())
outers = st.builds(
    Outer,
    count=st.integers(),
    inner=st.none() | inners,
    inners=st.lists(inners, max_size=3),
    by_name=st.dictionaries(st.text(), st.none() | st.text() | st.integers(), max_size=3),
    sure=st.booleans(),
)


@given(outers)
def test_what_was_written_is_read_back(record):
    assert Outer.of(json.loads(record.to_json())) == record


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"count": "3"}, "count is '3', expected int"),
        ({"count": True}, "count is True, expected int"),
        ({"count": None}, "count is None, expected int"),
        ({"inner": 4}, "inner is 4, not an object"),
        ({"inners": [{"share": 1, "name": None}, {"share": 1}]}, r"inners\[1\]\.name is missing"),
        ({"inners": {}}, r"inners is \{\}, expected list"),
        ({"by_name": {"a": 1.5}}, "by_name.a is 1.5, expected str"),
        ({"sure": 1}, "sure is 1, expected bool"),
        ({"more": 1}, "more is unknown"),
    ],
)
def test_a_wrong_field_is_named(change, named):
    right = asdict(Outer(count=1, inner=None, inners=[], by_name={}, sure=True))
    with pytest.raises(NotARecord, match=named):
        Outer.of(right | change)


def test_a_missing_field_and_a_foreign_file_are_named():
    with pytest.raises(NotARecord, match="count is missing"):
        Outer.of({})
    with pytest.raises(NotARecord, match=r"it is \[\], not an object"):
        Outer.of([])


CORPUS = {"source": "a.txt", "digest": "1" * 64, "content_only": True, "limit": None}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({"t": 3}, {"t": 4}, "t: 3 → 4"),
        ({"match": "relu"}, {"match": None}, "match: relu → none"),
        ({"corpus": CORPUS}, {"corpus": CORPUS | {"limit": 5}}, "--limit: none → 5"),
        (
            {"corpus": CORPUS},
            {"corpus": CORPUS | {"content_only": False}},
            "--content-only: yes → no",
        ),
        (
            {"corpus": CORPUS},
            {"corpus": CORPUS | {"digest": "2" * 64}},
            "the files of the corpus have changed",
        ),
        (
            {"corpus": CORPUS},
            {"corpus": CORPUS | {"source": "-", "digest": None}},
            "corpus: a.txt → -",
        ),
        ({"model": {"hash": "1" * 64}}, {"model": {"hash": "2"}}, "the model has other weights"),
    ],
)
def test_other_settings_are_named_in_words(old, new, said):
    with pytest.raises(StoreError) as raised:
        check_same_settings("out holds an index", old, new)
    advice = "Use the same settings, or choose another folder."
    assert str(raised.value) == name_parameters(
        f"out holds an index with other settings: {said}. {advice}"
    )


def test_a_corpus_that_has_moved_is_the_same():
    check_same_settings("out", {"corpus": CORPUS}, {"corpus": CORPUS | {"source": "b.txt"}})

"""The rooms of adjudicators: sheets side by side, one sheet for all, still blind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.annotation.sheet import Sheet, SheetPattern
from ffmem.web.adjudicating import copied
from ffmem.web.aligned import aligned, overlap
from tests.web.studied import (
    ITEMS,
    KEYS,
    Form,
    empty_site,
    made,
    pattern,
    people,
    save,
    sheet,
    showing,
    somebody,
    visible_text,
)

KEY = KEYS[0]


@pytest.fixture
def place(tmp_path):
    return tmp_path / "study.sqlite"


@pytest.fixture
def study(place):
    with made(place, adjudicators=("Jo", "Kim")) as found:
        yield found


@pytest.fixture(scope="module")
def whole(library):
    return empty_site(library)


@pytest.fixture
def app(whole, study, place):
    return showing(whole, place)


@pytest.fixture
def handed_in(app, study):
    """Ana and Ben have handed in the first item, and the case of composition."""
    for name, patterns in (
        ("Ana", [pattern("a1", "ends with river"), pattern("a2", "cities", "semantic", [4, 5, 6])]),
        ("Ben", [pattern("b1", "towns", "semantic", [3, 4, 5, 6]), pattern("b2", "river at end")]),
    ):
        client = somebody(app, study, name)
        assert save(client, KEY, sheet(*patterns, done=True)).status_code == 200
        case = sheet(related=name == "Ana", done=True)
        assert save(client, KEYS[3], case).status_code == 200


@pytest.fixture
def jo(app, study, handed_in):
    return somebody(app, study, "Jo")


def test_an_adjudicator_comes_to_what_was_handed_in(jo):
    assert jo.get("/annotate").headers["location"] == "/adjudicate"
    page = jo.get("/adjudicate").text
    assert "0 of 2" in visible_text(page)
    assert f"/adjudicate/{KEY}" in page
    assert KEYS[1] not in page
    assert jo.get(f"/adjudicate/{KEYS[1]}").status_code == 404
    assert jo.get(f"/annotate/{KEY}").headers["location"] == f"/adjudicate/{KEY}"


def test_sheets_stand_side_by_side_and_like_patterns_in_one_row(jo):
    page = jo.get(f"/adjudicate/{KEY}").text
    table = page.split('class="side-by-side"')[1].split("</table>")[0]
    rows = [visible_text(row) for row in table.split("<tbody>")[1].split("</tr>")]
    assert any("cities" in row and "towns" in row for row in rows)
    assert any("ends with river" in row and "river at end" in row for row in rows)
    said = jo.get(f"/api/adjudicate/{KEY}").json()
    assert said["sheets"].keys() == {"Ana", "Ben"}
    assert said["own"]["sheet"] == sheet()


def test_adjudicators_are_blind_too(jo):
    cell = ITEMS[0].cell
    for path in (f"/adjudicate/{KEY}", f"/api/adjudicate/{KEY}", "/adjudicate"):
        text = jo.get(path).text
        assert cell not in text
        assert "control" not in text.lower()


def test_patterns_are_taken_without_scripts_each_once(jo, study):
    path = f"/adjudicate/{KEY}"
    Form(jo.get(path).text).set("take", "0.1").send(jo, path)
    Form(jo.get(path).text).set("take", "0").send(jo, path)
    own = study.adjudication(KEY).own.sheet
    assert [one.description for one in own.patterns] == ["cities", "ends with river"]
    assert study.adjudication(KEY).sheets["Ana"].patterns[0].id == "a1"
    assert Form(jo.get(path).text).send(jo, path, "hand-in").status_code == 303
    assert study.adjudication(KEY).own.sheet.done
    for odd in ("7", "0.9", "x", "-1"):
        form = Form(jo.get(f"/adjudicate/{KEYS[3]}").text).set("take", odd)
        assert form.send(jo, f"/adjudicate/{KEYS[3]}").status_code == 404


def test_two_adjudicators_share_one_sheet(app, study, jo):
    kim = somebody(app, study, "Kim")
    save(jo, KEY, sheet(pattern("o", "both", marks=[1])), 0, "request-jo-1")
    save(jo, KEY, sheet(pattern("o", "both", marks=[1, 2])), 1, "request-jo-2")
    joined = save(kim, KEY, sheet(pattern("o", "both", marks=[1, 5])), 1, "request-kim-1").json()
    assert joined["merged"]
    assert joined["sheet"]["patterns"][0]["marks"] == [1, 2, 5]
    assert study.adjudication(KEY).own.sheet.patterns[0].marks == {1, 2, 5}
    own = {name: study.open_item(people(study)[name], KEY).sheet for name in ("Ana", "Ben")}
    assert len(own["Ana"].patterns) == len(own["Ben"].patterns) == 2  # untouched


def test_a_case_of_composition_shows_both_answers(jo, study):
    path = f"/adjudicate/{KEYS[3]}"
    page = jo.get(path).text
    assert "related" in page.split("<tbody>")[1].split("</table>")[0]
    assert "distant" in page.split("<tbody>")[1].split("</table>")[0]
    Form(page).set("related", "no").send(jo, path, "hand-in")
    assert study.adjudication(KEYS[3]).own.sheet.related is False


def test_forms_of_adjudicators_need_their_token(jo):
    form = Form(jo.get(f"/adjudicate/{KEY}").text).set("form_token", "")
    assert form.send(jo, f"/adjudicate/{KEY}").status_code == 403


PATTERNS = st.lists(st.frozensets(st.integers(1, 8), max_size=6), max_size=4)
PEOPLE = st.dictionaries(st.sampled_from(["Ana", "Ben", "Cleo"]), PATTERNS)


@given(PEOPLE)
def test_every_pattern_stands_in_one_row_and_nobody_twice_in_any(found):
    sheets = {
        name: Sheet(tuple(SheetPattern(f"{i}", marks=marks) for i, marks in enumerate(listed)))
        for name, listed in found.items()
    }
    rows = aligned(sheets)
    placed = sorted((name, number) for row in rows for name, (number, _) in row.items())
    assert placed == sorted(
        (name, number) for name, listed in found.items() for number in range(1, len(listed) + 1)
    )
    for row in rows:
        several = [one for _, one in row.values()]
        assert all(overlap(a, b) > 0.2 for a in several for b in several if a is not b)


def test_the_closest_patterns_are_put_together():
    near, far = frozenset({1, 2, 3, 4}), frozenset({3, 4, 5})
    sheets = {
        "Ana": Sheet((SheetPattern("a", "x", "shallow", near),)),
        "Ben": Sheet((SheetPattern("b", "x", "shallow", far), SheetPattern("c", marks=near))),
    }
    assert [sorted((n, p.id) for n, (_, p) in row.items()) for row in aligned(sheets)] == [
        [("Ana", "a"), ("Ben", "c")],
        [("Ben", "b")],
    ]


def test_a_taken_pattern_has_one_name_whoever_takes_it():
    whole = Sheet((SheetPattern("a", "x", "shallow", frozenset({1})),), note="mine", done=True)
    assert copied("Ana", whole) == copied("Ana", whole)
    assert copied("Ana", whole).patterns[0].id != copied("Ben", whole).patterns[0].id
    assert (copied("Ana", whole).note, copied("Ana", whole).done) == ("", False)

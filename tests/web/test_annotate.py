"""The pages of a study: codes, blindness, saving with a version check, adjudication."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.annotation.agreement import jaccard
from ffmem.annotation.study import Sheet, SheetPattern
from ffmem.web.app import make_app
from ffmem.web.views.annotate import PRACTICE, align_patterns, copy_sheet
from tests.web.conftest import HOSTILE
from tests.web.studied import (
    ITEMS,
    JSON,
    KEYS,
    empty_site,
    made,
    pattern,
    people,
    save,
    sheet,
    showing,
    site,
    somebody,
    visible_text,
    visitor,
)

FIRST = KEYS[0]


@pytest.fixture
def place(tmp_path):
    return tmp_path / "study.sqlite"


@pytest.fixture
def study(place):
    return made(place, adjudicators=("Jo", "Kim"))


@pytest.fixture(scope="module")
def whole(catalog):
    return empty_site(catalog)


@pytest.fixture
def app(whole, study, place):
    return showing(whole, place)


@pytest.fixture
def ana(app, study):
    return somebody(app, study, "Ana")


# Codes


def test_without_a_study_the_page_says_how_to_make_one(catalog):
    answer = visitor(make_app(catalog)).get("/annotate")
    assert answer.status_code == 200
    assert "<pre>ffmem annotate init tiny " in answer.text
    assert "`" not in answer.text
    for place in ("/layers", "/search", "/trace"):  # nobody annotates, so nothing is hidden
        assert f'<a href="{place}"' in answer.text


def test_a_study_made_or_removed_while_the_server_runs_is_noticed(catalog, tmp_path):
    place = tmp_path / "later.sqlite"
    client = visitor(site(catalog, place))
    assert "No study yet" in client.get("/annotate").text
    made(place)
    assert "No study yet" not in client.get("/annotate").text
    place.unlink()
    assert "No study yet" in client.get("/annotate").text


def test_without_a_code_there_is_a_form_and_nothing_else(app):
    client = visitor(app)
    page = client.get("/annotate")
    assert page.status_code == 200
    assert 'name="code"' in page.text
    assert client.get(f"/annotate/{FIRST}").headers["location"] == "/annotate"
    assert client.get(f"/api/annotate/{FIRST}").status_code == 401
    assert client.get("/api/annotate").status_code == 401
    assert save(client, FIRST, sheet()).status_code == 401


@pytest.mark.parametrize("wrong", ["x", "wrong-code-of-somebody", "é" * 20, "a\x00b", "9" * 5_000])
def test_a_wrong_code_is_refused_in_words(app, wrong):
    client = visitor(app)
    for answer in (
        client.post("/annotate", data={"code": wrong}),
        client.get("/annotate", params={"code": wrong}),
    ):
        assert answer.status_code == 403
        assert "Nobody in this study has this code." in answer.text
        assert "set-cookie" not in answer.headers


def test_a_link_with_the_code_sets_a_cookie_and_leaves_the_address(app, study):
    client, code = visitor(app), people(study)["Ana"].code
    answer = client.get("/annotate", params={"code": code})
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("ffmem-annotator-8800=")
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert code not in answer.text
    assert 'content="0; url=/annotate/guide"' in answer.text  # never begun: the guide first
    assert client.get("/annotate").status_code == 200
    save(client, FIRST, sheet(pattern()))
    again = client.get("/annotate", params={"code": code})
    assert 'content="0; url=/annotate"' in again.text


def test_leaving_forgets_the_code_in_this_browser_only(app, study, ana):
    other = somebody(app, study, "Ana")
    assert ana.post("/annotate/leave").status_code == 303
    assert 'name="code"' in ana.get("/annotate").text
    assert "0 of 4" in visible_text(other.get("/annotate").text)


# What annotators see


def test_the_queue_tells_how_far_somebody_is(ana):
    save(ana, KEYS[0], sheet(pattern(), done=True))
    save(ana, KEYS[1], sheet(pattern(), done=False))
    said = ana.get("/api/annotate").json()
    assert (said["done"], said["of"]) == (1, 4)
    states = {item["key"]: item["state"] for item in said["items"]}
    assert [states[key] for key in KEYS] == ["handed in", "begun", "not begun", "not begun"]
    page = ana.get("/annotate")
    assert "1 of 4" in visible_text(page.text)
    assert f'href="/annotate/{KEYS[1]}">Continue' in page.text
    assert page.headers["cache-control"] == "no-store"


def bare(answer, key):
    """Return an answer's text without key, place and neighbors."""
    text = re.sub(r'"next": ?"\w+"', "", answer.text.replace("&#34;", '"'))
    text = text.replace(key, "KEY")
    text = re.sub(r"\bItem \d", "Item N", text)
    text = re.sub(r'"place": ?\d', "", text)
    return re.sub(r'<span>(<a id="previous"|<kbd>\]).*?</span></p>', "", text)


def test_nothing_tells_a_control_from_a_memory(ana):
    for path in ("/annotate/", "/api/annotate/"):
        answers = [ana.get(path + key) for key in KEYS[:3]]
        pages = {bare(answer, key) for answer, key in zip(answers, KEYS[:3], strict=True)}
        assert len(pages) == 1
        told = [{n: v for n, v in a.headers.items() if n != "content-length"} for a in answers]
        assert told[0] == told[1] == told[2]
        assert "control" not in answers[1].text.lower()


def test_neither_memory_nor_layer_nor_others_sheets_are_served(app, study, ana):
    save(somebody(app, study, "Ben"), FIRST, sheet(pattern(description="Ben's"), done=True))
    for item in ITEMS:
        content = ana.get(f"/api/annotate/{item.key}").json()
        assert content.keys() == {
            *("version", "sheet", "problems", "next", "sheets"),
            *("key", "form", "texts", "words", "place", "of"),
        }
        assert content["sheets"] is None
        page = ana.get(f"/annotate/{item.key}").text
        for text in (page, json.dumps(content), ana.get("/annotate").text):
            assert item.cell is None or item.cell not in text
            assert "Ben" not in text


def test_the_texts_are_there_in_full_and_do_nothing(ana):
    page = ana.get(f"/annotate/{FIRST}").text
    for line in HOSTILE[:2]:
        assert line in visible_text(page)
    assert "<script>document" not in page
    assert "<img src=x" not in page


def test_what_people_write_does_nothing_either(app, study, ana):
    hostile = "\"><script>alert(1)</script>{{ 7*7 }} 'x'"
    for client in (ana, somebody(app, study, "Ben")):
        written = sheet(pattern(description=hostile), note=hostile, done=True)
        assert save(client, FIRST, written).status_code == 200
    for client in (ana, somebody(app, study, "Jo")):
        page = client.get(f"/annotate/{FIRST}").text
        assert "<script>alert" not in page
        assert "{{ 7*7 }}" in page


def test_the_page_holds_the_sheet_for_its_script(ana):
    save(ana, FIRST, sheet(pattern(marks=[3, 1])))
    page = ana.get(f"/annotate/{FIRST}").text
    state = json.loads(re.search(r'data-state="([^"]*)"', page)[1].replace("&#34;", '"'))
    assert state == {
        "version": 1,
        "sheet": sheet(pattern(marks=[1, 3])),
        "problems": ["Pattern 1 is marked in 2 of the texts; a pattern occurs in at least 3."],
        "next": ana.get(f"/api/annotate/{FIRST}").json()["next"],
    }


def test_the_guide_has_a_pattern_in_three_texts_or_more(app):
    page = visitor(app).get("/annotate/guide")
    assert sum(shows for _, _, shows, _ in PRACTICE) == 4
    assert "Four of six texts" in page.text


# Saving


def test_a_sheet_is_saved_and_the_same_sheet_twice_is_one_save(ana, study):
    first = save(ana, FIRST, sheet(pattern(marks=[1, 2])))
    assert first.json()["version"] == 1
    assert first.json()["sheet"]["patterns"] == [pattern(marks=[1, 2])]
    assert "marked in 2 of the texts" in first.json()["problems"][0]
    assert save(ana, FIRST, sheet(pattern(marks=[1, 2]))).json()["version"] == 1
    assert len(study.history("Ana", FIRST)) == 1


def test_resuming_elsewhere_shows_the_same(app, study, ana):
    save(ana, FIRST, sheet(pattern()))
    there = somebody(app, study, "Ana").get(f"/api/annotate/{FIRST}").json()
    assert (there["version"], there["sheet"]["patterns"]) == (1, [pattern()])


def test_a_save_from_an_older_version_gets_the_newer_one_and_may_overwrite_it(ana, study):
    save(ana, FIRST, sheet(pattern(marks=[1])))
    save(ana, FIRST, sheet(pattern(marks=[1, 2])), 1)
    answer = save(ana, FIRST, sheet(pattern(marks=[1, 3])), 1)
    assert answer.status_code == 409
    content = answer.json()
    assert (content["version"], content["sheet"]["patterns"][0]["marks"]) == (2, [1, 2])
    assert "version 2 is newer" in content["error"]
    assert "L1N17" not in answer.text
    assert save(ana, FIRST, sheet(pattern(marks=[1, 3])), 2).json()["version"] == 3
    marks = [sorted(one.sheet.patterns[0].marks) for one in study.history("Ana", FIRST)]
    assert marks == [[1], [1, 2], [1, 3]]


def test_what_occurs_in_fewer_than_three_texts_cannot_be_handed_in(ana):
    answer = save(ana, FIRST, sheet(pattern(marks=[1, 2]), done=True))
    assert answer.status_code == 422
    assert "a pattern occurs in at least 3" in answer.json()["error"]
    assert not ana.get(f"/api/annotate/{FIRST}").json()["sheet"]["done"]


def test_after_handing_in_the_next_open_item_is_named(ana):
    order = [item["key"] for item in ana.get("/api/annotate").json()["items"]]
    handed = save(ana, order[0], sheet(no_pattern=True, done=True)).json()
    assert handed["next"] == order[1]
    save(ana, order[1], sheet(no_pattern=True, done=True))
    assert save(ana, order[2], sheet(no_pattern=True, done=True)).json()["next"] == order[3]
    assert save(ana, order[3], sheet(related=False, done=True)).json()["next"] is None


def test_a_case_of_composition_is_answered(ana, study):
    page = ana.get(f"/annotate/{KEYS[3]}").text
    for word in ("␣later", "␣bit", "␣earlier"):
        assert word in page
    assert save(ana, KEYS[3], sheet(pattern())).status_code == 422
    assert save(ana, KEYS[3], sheet(related=True, done=True)).status_code == 200
    now = study.open_item(people(study)["Ana"], KEYS[3]).sheet
    assert (now.related, now.done) == (True, True)


# Requests that should not be


ELSEWHERE = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:9999"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    {"sec-fetch-site": "same-site"},
]


@pytest.mark.parametrize("headers", ELSEWHERE, ids=str)
def test_pages_of_other_sites_cannot_write(ana, study, headers):
    body = {"base": 0, "sheet": sheet(pattern())}
    answers = [
        ana.post(f"/api/annotate/{FIRST}", json=body, headers={**JSON, **headers}),
        ana.post("/annotate", data={"code": people(study)["Ben"].code}, headers=headers),
        ana.post("/annotate/leave", headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [403] * 3
    assert not study.history("Ana", FIRST)
    assert ana.get(f"/api/annotate/{FIRST}").status_code == 200  # still Ana


def test_pages_of_this_site_can(ana):
    for headers in (
        {"origin": "http://127.0.0.1:8800", "sec-fetch-site": "same-origin"},
        {"origin": "null", "sec-fetch-site": "same-origin"},  # the browser hides the origin
        {},
    ):
        body = {"base": 0, "sheet": sheet(pattern())}
        headers = {**JSON, **headers}
        assert ana.post(f"/api/annotate/{FIRST}", json=body, headers=headers).status_code == 200


def test_json_needs_the_header(ana, study):
    body = {"base": 0, "sheet": sheet(pattern())}
    assert ana.post(f"/api/annotate/{FIRST}", json=body).status_code == 403
    assert not study.history("Ana", FIRST)


def test_nobody_opens_what_is_anothers(catalog, tmp_path):
    place = tmp_path / "split.sqlite"
    study = made(place, orders={"Ana": KEYS[:2], "Ben": KEYS[2:]})
    ana = somebody(site(catalog, place), study, "Ana")
    for key in (KEYS[2], "nowhere", "x" * 300, "%00", "%ff%fe", "9" * 5_000):
        assert ana.get(f"/annotate/{key}").status_code == 404
        assert ana.get(f"/api/annotate/{key}").status_code == 404
        assert save(ana, key, sheet(pattern())).status_code == 404


@pytest.mark.parametrize(
    "odd",
    [
        sheet(pattern(marks=[7])),
        sheet(pattern(marks=[0])),
        sheet(pattern(description="x" * 501)),
        sheet(*(pattern(f"p-{i}") for i in range(31))),
        sheet(pattern(), pattern()),
        sheet(pattern(kind="deep")),
        sheet(pattern(id="")),
        sheet(pattern(marks=["one"])),
        sheet(pattern(description="\ud83d")),
        sheet(note="\x00"),
        sheet(related=True),
        {"patterns": "none"},
        [],
    ],
    ids=lambda odd: json.dumps(odd)[:40],
)
def test_odd_sheets_are_refused_and_not_saved(ana, study, odd):
    answer = save(ana, FIRST, odd)
    assert answer.status_code == 422
    assert answer.json()["error"]
    assert not study.history("Ana", FIRST)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[" * 100_000, b'{"sheet":' * 12_000, b'{"base": ' + b"9" * 5_000 + b"}"),
        b'{"base": 1e999, "sheet": {}}',
        b'{"base": NaN, "sheet": {}}',
        b'{"base": 0, "sheet": {"patterns": [{"id": "a", "marks": [' + b"9" * 5_000 + b"]}]}}",
        *(b'{"base": -1, "sheet": {}}', b'{"base": 99999999999999999999, "sheet": {}}'),
        b"\xff\xfe\x00",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_a_hostile_body_is_refused_and_breaks_nothing(ana, study, body):
    headers = {**JSON, "content-type": "application/json"}
    answer = ana.post(f"/api/annotate/{FIRST}", content=body, headers=headers)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]
    assert not study.history("Ana", FIRST)


@pytest.mark.parametrize(
    "form", [b"", b"code=%ff%fe", b"code=" + b"9" * 100_000, b"code=a&" * 3_000, b"\xff" * 9]
)
def test_a_hostile_form_is_refused_and_breaks_nothing(app, form):
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = visitor(app).post("/annotate", content=form, headers=headers)
    assert 400 <= answer.status_code < 500


def test_too_much_is_refused(ana):
    assert save(ana, FIRST, sheet(note="x" * 200_000)).status_code == 413


# Adjudication


@pytest.fixture
def jo(app, study):
    """An adjudicator; Ana and Ben have handed in the first item and the case of composition."""
    for name, patterns in (
        ("Ana", [pattern("a1", "ends with river"), pattern("a2", "cities", "semantic", [4, 5, 6])]),
        ("Ben", [pattern("b1", "towns", "semantic", [3, 4, 5, 6]), pattern("b2", "river at end")]),
    ):
        client = somebody(app, study, name)
        assert save(client, FIRST, sheet(*patterns, done=True)).status_code == 200
        case = sheet(related=name == "Ana", done=True)
        assert save(client, KEYS[3], case).status_code == 200
    return somebody(app, study, "Jo")


def test_an_adjudicator_gets_what_was_handed_in(jo):
    page = jo.get("/annotate").text
    assert "0 of 2" in visible_text(page)
    assert f"/annotate/{FIRST}" in page
    assert KEYS[1] not in page
    assert jo.get(f"/annotate/{KEYS[1]}").status_code == 404


def test_sheets_stand_side_by_side_and_like_patterns_in_one_row(jo):
    page = jo.get(f"/annotate/{FIRST}").text
    table = page.split('class="side-by-side"')[1].split("</table>")[0]
    rows = [visible_text(row) for row in table.split("<tbody>")[1].split("</tr>")]
    assert any("cities" in row and "towns" in row for row in rows)
    assert any("ends with river" in row and "river at end" in row for row in rows)
    said = jo.get(f"/api/annotate/{FIRST}").json()
    assert said["sheets"].keys() == {"Ana", "Ben"}
    assert said["sheet"] == sheet()


def test_adjudicators_are_blind_too(jo):
    for path in (f"/annotate/{FIRST}", f"/api/annotate/{FIRST}", "/annotate"):
        text = jo.get(path).text
        assert ITEMS[0].cell not in text
        assert "control" not in text.lower()


def test_a_case_of_composition_shows_both_answers(jo):
    table = jo.get(f"/annotate/{KEYS[3]}").text.split("<tbody>")[1].split("</table>")[0]
    assert "related" in table
    assert "distant" in table


def test_two_adjudicators_share_one_sheet(app, study, jo):
    kim = somebody(app, study, "Kim")
    save(jo, FIRST, sheet(pattern("o", "both", marks=[1])))
    newest = save(kim, FIRST, sheet(pattern("o", "both", marks=[5])))
    assert (newest.status_code, newest.json()["version"]) == (409, 1)
    joined = sheet(pattern("o", "both", marks=[1, 5]))
    assert save(kim, FIRST, joined, 1).json()["version"] == 2
    assert jo.get(f"/api/annotate/{FIRST}").json()["sheet"] == joined
    own = [study.open_item(people(study)[name], FIRST).sheet for name in ("Ana", "Ben")]
    assert [len(one.patterns) for one in own] == [2, 2]  # untouched


PATTERNS = st.lists(st.frozensets(st.integers(1, 8), max_size=6), max_size=4)


@given(st.dictionaries(st.sampled_from(["Ana", "Ben", "Cleo"]), PATTERNS))
def test_every_pattern_stands_in_one_row_and_nobody_twice_in_any(found):
    sheets = {
        name: Sheet(tuple(SheetPattern(f"{i}", marks=marks) for i, marks in enumerate(listed)))
        for name, listed in found.items()
    }
    rows = align_patterns(sheets)
    placed = sorted((name, number) for row in rows for name, (number, _) in row.items())
    assert placed == sorted(
        (name, number) for name, listed in found.items() for number in range(1, len(listed) + 1)
    )
    for row in rows:
        several = [one for _, one in row.values()]
        assert all(jaccard(a, b) > 0.2 for a in several for b in several if a is not b)


def test_the_closest_patterns_are_put_together():
    near, far = frozenset({1, 2, 3, 4}), frozenset({3, 4, 5})
    sheets = {
        "Ana": Sheet((SheetPattern("a", "x", "shallow", near),)),
        "Ben": Sheet((SheetPattern("b", "x", "shallow", far), SheetPattern("c", marks=near))),
    }
    assert [sorted((n, p.id) for n, (_, p) in row.items()) for row in align_patterns(sheets)] == [
        [("Ana", "a"), ("Ben", "c")],
        [("Ben", "b")],
    ]


def test_a_taken_pattern_has_one_id_whoever_takes_it():
    whole = Sheet((SheetPattern("a", "x", "shallow", frozenset({1})),), note="mine", done=True)
    assert copy_sheet("Ana", whole) == copy_sheet("Ana", whole)
    assert copy_sheet("Ana", whole).patterns[0].id != copy_sheet("Ben", whole).patterns[0].id
    assert replace(copy_sheet("Ana", whole), patterns=()) == Sheet()

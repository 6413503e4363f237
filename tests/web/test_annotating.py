"""The rooms of annotators: codes, blindness, saving, and the form without scripts."""

import json
import re

import pytest

from ffmem.web.app import make_app
from ffmem.web.guide import PRACTICE, checked
from ffmem.web.studies import Studies
from tests.web.conftest import HOSTILE
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
    with made(place) as found:
        yield found


@pytest.fixture(scope="module")
def whole(library):
    return empty_site(library)


@pytest.fixture
def app(whole, study, place):
    return showing(whole, place)


@pytest.fixture
def ana(app, study):
    return somebody(app, study, "Ana")


def test_without_a_study_the_page_says_how_to_make_one(library):
    answer = visitor(make_app(library, studies=Studies())).get("/annotate")
    assert answer.status_code == 404
    assert "ffmem annotate init tiny" in answer.text


def test_a_study_made_while_the_server_runs_is_found(library, tmp_path):
    place = tmp_path / "later.sqlite"
    client = visitor(site(library, place))
    assert client.get("/annotate").status_code in (404, 500)
    made(place).close()
    assert client.get("/annotate").status_code == 200


def test_without_a_code_there_is_a_form_and_nothing_else(app):
    client = visitor(app)
    page = client.get("/annotate")
    assert page.status_code == 200
    assert 'name="code"' in page.text
    assert client.get(f"/annotate/{FIRST}").headers["location"] == "/annotate"
    assert client.get(f"/api/annotate/{FIRST}").status_code == 401
    assert client.get("/api/annotate").status_code == 401
    assert save(client, FIRST, sheet()).status_code == 401


@pytest.mark.parametrize("wrong", ["x", "wrong-code-of-somebody", "é" * 20, "a\x00b"])
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


def test_leaving_forgets_the_code_on_this_machine_only(app, study, ana):
    other = somebody(app, study, "Ana")
    assert ana.post("/annotate/leave").status_code == 303
    assert 'name="code"' in ana.get("/annotate").text
    assert "0 of 4" in visible_text(other.get("/annotate").text)


def test_the_queue_tells_how_far_somebody_is(ana):
    save(ana, KEYS[0], sheet(pattern(), done=True))
    save(ana, KEYS[1], sheet(pattern(), done=False))
    said = ana.get("/api/annotate").json()
    assert (said["done"], said["of"]) == (1, 4)
    states = {item["key"]: item["state"] for item in said["items"]}
    assert [states[key] for key in KEYS] == ["handed in", "begun", "not begun", "not begun"]
    page = ana.get("/annotate")
    assert "1 of 4" in visible_text(page.text)
    assert f'href="/annotate/{KEYS[1]}">Go on' in page.text
    assert page.headers["cache-control"] == "no-store"


def bare(answer, key):
    """Return an answer's bytes without what is new in each: key, place, numbers made for it."""
    text = answer.text.replace(key, "KEY")
    text = re.sub(r"p-[0-9a-f]{12}", "NEW", text)
    text = re.sub(r'(name="request" value=")[^"]+', r"\1", text)
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


def test_neither_memory_nor_layer_nor_coefficient_is_served(ana):
    for item in ITEMS:
        content = ana.get(f"/api/annotate/{item.key}").json()
        assert content.keys() == {
            *("version", "sheet", "problems", "can_undo", "can_redo", "merged", "next"),
            *("key", "form", "texts", "words", "place", "of"),
        }
        page = ana.get(f"/annotate/{item.key}").text
        for text in (page, json.dumps(content), ana.get("/annotate").text):
            assert item.cell is None or item.cell not in text


def test_the_texts_are_there_in_full_and_do_nothing(ana):
    page = ana.get(f"/annotate/{FIRST}").text
    for line in HOSTILE[:2]:
        assert line in visible_text(page)
    assert "<script>document" not in page
    assert "<img src=x" not in page


def test_what_people_write_does_nothing_either(ana):
    hostile = "\"><script>alert(1)</script>{{ 7*7 }} 'x'"
    saved = save(ana, FIRST, sheet(pattern(description=hostile), note=hostile))
    assert saved.status_code == 200
    page = ana.get(f"/annotate/{FIRST}").text
    assert "<script>alert" not in page
    assert "{{ 7*7 }}" in page
    form = dict(Form(page).fields)
    assert form["description.p-1"] == hostile
    assert form["note"] == hostile


def test_a_sheet_is_saved_and_the_same_request_counts_once(ana, study):
    first = save(ana, FIRST, sheet(pattern(marks=[1, 2])))
    assert first.json()["version"] == 1
    assert first.json()["sheet"]["patterns"] == [pattern(marks=[1, 2])]
    assert "marked in 2 of the texts" in first.json()["problems"][0]
    assert save(ana, FIRST, sheet(pattern(marks=[1, 2]))).json()["version"] == 1
    assert len(study.history(people(study)["Ana"], FIRST)) == 1


def test_resuming_elsewhere_shows_the_same(app, study, ana):
    save(ana, FIRST, sheet(pattern()))
    there = somebody(app, study, "Ana").get(f"/api/annotate/{FIRST}").json()
    assert there["sheet"]["patterns"] == [pattern()]
    assert there["can_undo"]


def test_two_windows_keep_each_others_marks(ana):
    save(ana, FIRST, sheet(pattern(marks=[1])))
    save(ana, FIRST, sheet(pattern(marks=[1, 2])), 1, "window-one-1")
    joined = save(ana, FIRST, sheet(pattern(marks=[1, 3])), 1, "window-two-1").json()
    assert joined["merged"]
    assert joined["sheet"]["patterns"][0]["marks"] == [1, 2, 3]


def test_words_that_both_changed_are_a_conflict_with_both_sides(ana):
    save(ana, FIRST, sheet(pattern(description="one")))
    save(ana, FIRST, sheet(pattern(description="two")), 1, "window-one-1")
    answer = save(ana, FIRST, sheet(pattern(description="three")), 1, "window-two-1")
    assert answer.status_code == 409
    content = answer.json()
    assert content["version"] == 2
    assert content["sheet"]["patterns"][0]["description"] == "two"
    assert "'two'" in content["error"]


def test_what_recurs_in_fewer_than_three_texts_cannot_be_handed_in(ana):
    answer = save(ana, FIRST, sheet(pattern(marks=[1, 2]), done=True))
    assert answer.status_code == 422
    assert "a pattern recurs in at least 3" in answer.json()["error"]
    assert not ana.get(f"/api/annotate/{FIRST}").json()["sheet"]["done"]


def test_after_handing_in_the_next_open_item_is_named(ana):
    order = [item["key"] for item in ana.get("/api/annotate").json()["items"]]
    handed = save(ana, order[0], sheet(no_pattern=True, done=True)).json()
    assert handed["next"] == order[1]
    save(ana, order[1], sheet(no_pattern=True, done=True))
    assert save(ana, order[2], sheet(no_pattern=True, done=True)).json()["next"] == order[3]
    assert save(ana, order[3], sheet(related=False, done=True)).json()["next"] is None


def test_undo_and_redo_go_through_what_was_saved(ana):
    save(ana, FIRST, sheet(pattern(marks=[1])))
    save(ana, FIRST, sheet(pattern(marks=[1, 2])), 1, "request-0002")
    step = {"base": 2, "request": "request-0003"}
    headers = {"x-ffmem": "test"}
    back = ana.post(f"/api/annotate/{FIRST}/undo", json=step, headers=headers).json()
    assert back["sheet"]["patterns"][0]["marks"] == [1]
    assert back["can_redo"]
    again = ana.post(f"/api/annotate/{FIRST}/undo", json=step, headers=headers).json()
    assert again["version"] == back["version"]  # the same request is one step
    step = {"base": back["version"], "request": "request-0004"}
    forth = ana.post(f"/api/annotate/{FIRST}/redo", json=step, headers=headers).json()
    assert forth["sheet"]["patterns"][0]["marks"] == [1, 2]


ELSEWHERE = [
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:9999"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    {"sec-fetch-site": "same-site"},
]


@pytest.mark.parametrize("headers", ELSEWHERE, ids=str)
def test_pages_of_other_sites_cannot_write(app, ana, study, headers):
    body = {"base": 0, "request": "request-0001", "sheet": sheet(pattern())}
    answers = [
        ana.post(f"/api/annotate/{FIRST}", json=body, headers={"x-ffmem": "1", **headers}),
        Form(ana.get(f"/annotate/{FIRST}").text).send(ana, f"/annotate/{FIRST}", headers=headers),
        ana.post("/annotate", data={"code": people(study)["Ben"].code}, headers=headers),
        ana.post("/annotate/leave", headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [403] * 4
    assert not study.history(people(study)["Ana"], FIRST)
    assert ana.get(f"/api/annotate/{FIRST}").status_code == 200  # still Ana


def test_pages_of_this_site_can(ana):
    for number, headers in enumerate(
        (
            {"origin": "http://127.0.0.1:8800", "sec-fetch-site": "same-origin"},
            {"origin": "null", "sec-fetch-site": "same-origin"},  # a form whose origin is hidden
            {},
        )
    ):
        body = {"base": 0, "request": f"request-{number:04}", "sheet": sheet(pattern())}
        headers = {"x-ffmem": "1", **headers}
        assert ana.post(f"/api/annotate/{FIRST}", json=body, headers=headers).status_code == 200


def test_json_needs_the_header_and_a_form_its_token(ana, study):
    body = {"base": 0, "request": "request-0001", "sheet": sheet(pattern())}
    assert ana.post(f"/api/annotate/{FIRST}", json=body).status_code == 403
    form = Form(ana.get(f"/annotate/{FIRST}").text).set("form_token", "0" * 64)
    assert form.send(ana, f"/annotate/{FIRST}").status_code == 403
    ben = somebody(ana.app, study, "Ben")
    foreign = Form(ben.get(f"/annotate/{FIRST}").text)
    assert foreign.send(ana, f"/annotate/{FIRST}").status_code == 403
    assert not study.history(people(study)["Ana"], FIRST)


def test_nobody_opens_what_is_anothers(library, tmp_path):
    place = tmp_path / "split.sqlite"
    with made(place, orders={"Ana": KEYS[:2], "Ben": KEYS[2:]}) as study:
        ana = somebody(site(library, place), study, "Ana")
        for key in (KEYS[2], "nowhere", "x" * 300, "%00"):
            assert ana.get(f"/annotate/{key}").status_code == 404
            assert ana.get(f"/api/annotate/{key}").status_code == 404
            assert save(ana, key, sheet(pattern())).status_code == 404
        assert ana.get("/adjudicate").status_code == 404
        assert ana.get(f"/adjudicate/{KEYS[0]}").status_code == 404
        assert ana.get(f"/api/adjudicate/{KEYS[0]}").status_code == 404


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
        sheet(related=True),
        {"patterns": "none"},
        {},
        [],
    ],
    ids=lambda odd: json.dumps(odd)[:40],
)
def test_odd_sheets_are_refused_and_not_saved(ana, study, odd):
    answer = save(ana, FIRST, odd)
    assert answer.status_code == 422
    assert answer.json()["error"]
    assert not study.history(people(study)["Ana"], FIRST)


def test_too_much_is_refused(ana):
    assert save(ana, FIRST, sheet(note="x" * 200_000)).status_code == 413
    assert save(ana, FIRST, sheet(), base=-1).status_code == 422
    assert save(ana, FIRST, sheet(pattern()), base=7).status_code == 422
    assert save(ana, FIRST, sheet(pattern()), request="short").status_code == 422
    form = Form(ana.get(f"/annotate/{FIRST}").text)
    form.fields += [["x", "y"]] * 3_000
    assert form.send(ana, f"/annotate/{FIRST}").status_code == 422


def test_the_form_without_scripts_does_it_all(ana, study):
    path = f"/annotate/{FIRST}"
    form = Form(ana.get(path).text)
    id = form.blank
    form.set(f"description.{id}", "ends with river").set(f"mark.{id}", 1, 2)
    assert form.send(ana, path).headers["location"] == path
    assert form.send(ana, path).status_code == 303  # sent twice, as browsers do
    person = people(study)["Ana"]
    (one,) = study.open_item(person, FIRST).sheet.patterns
    assert (one.id, one.description, one.kind, one.marks) == (id, "ends with river", None, {1, 2})
    assert len(study.history(person, FIRST)) == 1
    # Not yet: the sheet is kept, and the page says why.
    form = Form(ana.get(path).text)
    assert form.send(ana, path, "hand-in").headers["location"] == path
    page = ana.get(path).text
    assert "a pattern recurs in at least 3" in visible_text(page)
    form = Form(page).set(f"mark.{id}", 1, 2, 5).set(f"kind.{id}", "semantic")
    after = form.send(ana, path, "hand-in").headers["location"]
    assert after.startswith("/annotate/")
    assert after != path
    assert study.open_item(person, FIRST).sheet.done
    # Taken back, undone, and the pattern removed for “none”.
    Form(ana.get(path).text).send(ana, path, "take-back")
    assert not study.open_item(person, FIRST).sheet.done
    Form(ana.get(path).text).send(ana, path, "undo")
    assert study.open_item(person, FIRST).sheet.done
    Form(ana.get(path).text).send(ana, path, "redo")
    form = Form(ana.get(path).text).set(f"remove.{id}", 1).set("no_pattern", 1)
    form.send(ana, path)
    now = study.open_item(person, FIRST).sheet
    assert (now.patterns, now.no_pattern) == ((), True)


def test_a_form_that_somebody_overtook_shows_both(ana, study):
    path = f"/annotate/{FIRST}"
    save(ana, FIRST, sheet(pattern(description="before", marks=[1])))
    form = Form(ana.get(path).text)
    save(ana, FIRST, sheet(pattern(description="theirs", marks=[1, 2])), 1, "request-0002")
    form.set("description.p-1", "mine").set("mark.p-1", 1, 3)
    answer = form.send(ana, path)
    assert answer.status_code == 409
    assert "yours is “mine”, theirs “theirs”" in visible_text(answer.text)
    assert Form(answer.text).send(ana, path).status_code == 303
    (one,) = study.open_item(people(study)["Ana"], FIRST).sheet.patterns
    assert (one.description, one.marks) == ("mine", {1, 2, 3})


def test_a_form_handed_in_elsewhere_meanwhile_loses_nothing(ana, study):
    path = f"/annotate/{FIRST}"
    save(ana, FIRST, sheet(pattern()))
    form = Form(ana.get(path).text).set("mark.p-1", 1, 2, 3, 4)
    save(ana, FIRST, sheet(pattern(), done=True), 1, "request-0002")
    form.send(ana, path)
    assert study.open_item(people(study)["Ana"], FIRST).sheet.patterns[0].marks == {1, 2, 3, 4}


def test_a_case_of_composition_is_answered_without_scripts(ana, study):
    key = KEYS[3]
    page = ana.get(f"/annotate/{key}").text
    for word in ("␣later", "␣bit", "␣earlier"):
        assert word in page
    Form(page).set("related", "yes").send(ana, f"/annotate/{key}", "hand-in")
    now = study.open_item(people(study)["Ana"], key).sheet
    assert (now.related, now.done) == (True, True)
    assert save(ana, key, sheet(pattern()), 1, "request-0002").status_code == 422


def test_what_follows_a_text_is_shown_on_request_only(ana):
    plain = ana.get(f"/annotate/{FIRST}").text
    assert 'class="columns work"' in plain
    asked = ana.get(f"/annotate/{FIRST}?rest=1").text
    assert 'class="columns work with-rest"' in asked


def test_the_guides_practice_is_checked(app):
    client = visitor(app)
    right = [rank for rank, text in enumerate(PRACTICE, start=1) if text.shows]
    page = client.get("/annotate/guide", params={"mark": right, "kind": "semantic"})
    assert "Just so." in page.text
    wrong = client.get("/annotate/guide", params={"mark": [1, 2], "kind": "shallow"}).text
    assert "Text 2 does not show it." in wrong
    assert "Text 3 shows it too." in wrong
    assert "It is semantic" in wrong
    assert checked(right, None).says == ["Is it shallow or semantic? Choose one."]
    assert len(right) >= 3

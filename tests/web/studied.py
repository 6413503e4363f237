"""What tests of a study's pages share: small studies, and the people who take part."""

import json
import re
from html import unescape

from starlette.testclient import TestClient

from ffmem.annotation.study import (
    COMPOSITION,
    CONTROL,
    TRIGGERS,
    AnnotationStudy,
    Item,
    Plan,
    Text,
)
from ffmem.web.app import make_app
from tests.web.conftest import HOSTILE

ADDRESS = "http://127.0.0.1:8800"
JSON = {"x-ffmem": "test"}

WORDS = (" later", " bit", " earlier")


def shown(text, rest=" and on"):
    words = text.rsplit(" ", 1)
    return Text(text, f" {words[-1]}" if len(words) > 1 else text, rest[:4], rest)


def texts(n=6):
    """Return texts of which some would do something, were they not escaped."""
    plain = [shown(f"Text {i} of the old city near the river") for i in range(1, n + 1)]
    return (*plain[: n - 2], *map(shown, HOSTILE[:2]))


ITEMS = (
    Item("aaaa000001", TRIGGERS, "L1N17", 1, texts()),
    Item("bbbb000002", CONTROL, "L0N23", 1, texts()),
    Item("cccc000003", TRIGGERS, "L0N5", -1, texts()),
    Item("dddd000004", COMPOSITION, None, 0, (Text("She came a little", None, None, ""),), WORDS),
)
"""A memory, a control and a memory with the very same texts, and a case of composition."""

KEYS = tuple(item.key for item in ITEMS)


def planned(orders=None, adjudicators=("Judge",)):
    return Plan(ITEMS, orders or {"Ana": KEYS, "Ben": KEYS}, tuple(adjudicators), {"asked": {}})


def made(place, **plan):
    return AnnotationStudy.create(place, planned(**plan))


def people(study):
    return {person.name: person for person in study.people()}


def empty_site(catalog):
    """Return an application: making one takes longer than most tests."""
    return make_app(catalog)


def showing(whole, place):
    """Return an application that shows another study now."""
    whole.state.site.db = str(place)
    return whole


def site(catalog, place):
    return showing(empty_site(catalog), place)


def visitor(app):
    return TestClient(app, ADDRESS, follow_redirects=False)


def somebody(app, study, name):
    """Return the browser of somebody who has entered their code."""
    client = visitor(app)
    answer = client.post("/annotate", data={"code": people(study)[name].code})
    assert answer.status_code == 303
    return client


def pattern(id="p-1", description="ends with river", kind="shallow", marks=(1, 2, 3)):
    return {"id": id, "description": description, "kind": kind, "marks": list(marks)}


def sheet(*patterns, **more):
    plain = {"patterns": list(patterns), "no_pattern": False, "related": None, "note": ""}
    return {**plain, "done": False, **more}


def save(client, key, content, base=0):
    body = json.dumps({"base": base, "sheet": content})  # ASCII, whatever the characters
    headers = {**JSON, "content-type": "application/json"}
    return client.post(f"/api/annotate/{key}", content=body, headers=headers)


def visible_text(page):
    """Return the words of a page, whatever elements they stand in."""
    return " ".join(unescape(re.sub(r"<[^>]+>", "", page)).split())

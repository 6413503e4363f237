"""What tests of the annotators' rooms share: small studies, and those who take part."""

import re
from html import unescape
from html.parser import HTMLParser
from urllib.parse import urlencode

from starlette.testclient import TestClient

from ffmem.annotation.item import COMPOSITION, CONTROL, TRIGGERS, Item, Shown
from ffmem.annotation.plan import Plan
from ffmem.annotation.study import AnnotationStudy
from ffmem.web.app import make_app
from ffmem.web.studies import Studies
from tests.web.conftest import HOSTILE

ADDRESS = "http://127.0.0.1:8800"
JSON = {"x-ffmem": "test"}

WORDS = (" later", " bit", " earlier")


def shown(text, rest=" and on"):
    words = text.rsplit(" ", 1)
    return Shown(text, f" {words[-1]}" if len(words) > 1 else text, rest[:4], rest)


def texts(n=6):
    """Return texts of which some would do something, were they not escaped."""
    plain = [shown(f"Text {i} of the old city near the river") for i in range(1, n + 1)]
    return (*plain[: n - 2], *map(shown, HOSTILE[:2]))


ITEMS = (
    Item("aaaa000001", TRIGGERS, "L1N17", 1, texts()),
    Item("bbbb000002", CONTROL, "L0N23", 1, texts()),
    Item("cccc000003", TRIGGERS, "L0N5", -1, texts()),
    Item("dddd000004", COMPOSITION, None, 0, (Shown("She came a little", None, None, ""),), WORDS),
)
"""A memory, a control and a memory with the very same texts, and a case of composition."""

KEYS = tuple(item.key for item in ITEMS)


def planned(orders=None, adjudicators=("Judge",)):
    return Plan(ITEMS, orders or {"Ana": KEYS, "Ben": KEYS}, tuple(adjudicators), {"asked": {}})


def made(place, **plan):
    return AnnotationStudy.create(place, planned(**plan))


def people(study):
    return {person.name: person for person in study.people()}


def empty_site(library):
    """Return an application, and its studies: making one takes longer than most tests."""
    studies = Studies()
    return make_app(library, studies=studies), studies


def showing(whole, place):
    """Return an application that shows another study now."""
    app, studies = whole
    studies.url = f"sqlite:///{place}"
    return app


def site(library, place):
    return showing(empty_site(library), place)


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


def save(client, key, content, base=0, request="request-0001", **options):
    body = {"base": base, "request": request, "sheet": content}
    return client.post(f"/api/annotate/{key}", json=body, headers=JSON, **options)


class Form(HTMLParser):
    """The form of an item as a browser without scripts would send it."""

    def __init__(self, page):
        super().__init__()
        self.fields, self._area, self._inside = [], None, False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "form":
            self._inside = given.get("id") == "sheet"
        if not self._inside or "disabled" in given:
            return
        if tag == "input" and given.get("name"):
            ticked = given.get("type") not in ("checkbox", "radio") or "checked" in given
            if ticked:
                self.fields.append([given["name"], given.get("value", "")])
        if tag == "textarea":
            self._area = [given["name"], ""]
            self.fields.append(self._area)

    def handle_endtag(self, tag):
        if tag == "textarea":
            self._area = None
        if tag == "form":
            self._inside = False

    def handle_data(self, data):
        if self._area is not None:
            self._area[1] += data

    @property
    def blank(self):
        """The id of the pattern that is not there yet."""
        return [value for name, value in self.fields if name == "pattern"][-1]

    def set(self, name, *values):
        """Let a field have these values, and no others."""
        self.fields = [field for field in self.fields if field[0] != name]
        self.fields += [[name, str(value)] for value in values]
        return self

    def send(self, client, path, what="save", headers=None):
        body = urlencode([*map(tuple, self.fields), ("what", what)])
        headers = {"content-type": "application/x-www-form-urlencoded", **(headers or {})}
        return client.post(path, content=body, headers=headers)


def visible_text(page):
    """Return the words of a page, whatever elements they stand in."""
    return " ".join(unescape(re.sub(r"<[^>]+>", "", page)).split())

"""The trace page and its twins: the library's own numbers, whole states, limits, hostile text."""

from html.parser import HTMLParser
from urllib.parse import parse_qs, urlsplit

import pytest
from pydantic import TypeAdapter

import ffmem
from ffmem.causal.edits import Edits
from ffmem.causal.opened import opened
from ffmem.web.limits import MOST_CHARACTERS, MOST_EDITS, MOST_GENERATED, MOST_TOKENS
from ffmem.web.runs import ABLATED, Question, Runs
from ffmem.web.trace_answers import EffectAnswer, TraceAnswer

TEXT = "The river runs"
EDITS = {"off": "L1N3", "scale": "L0N2=40", "set": "L0N5=-2.5"}
TAKEN = {"off": ["L1N3"], "scale": {"L0N2": 40.0}, "set": {"L0N5": -2.5}}


@pytest.fixture(scope="module", params=["tiny", "plain"])
def name(request):
    return request.param


@pytest.fixture
def folder(name, served_folder, ungated_folder):
    return {"tiny": served_folder, "plain": ungated_folder}[name]


class Page(HTMLParser):
    """What a browser would make of a page: its tags, links and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append((tag, given))
        if tag == "a":
            self.links.append(given["href"])

    def handle_data(self, data):
        self.text += data


def query(href):
    return {name: value[-1] for name, value in parse_qs(urlsplit(href).query).items()}


def test_a_program_gets_what_the_library_gives(client, name, folder):
    asked = {"index": name, "text": TEXT, "position": 2, "generate": 4, **EDITS}
    answer = client.get("/api/trace", params=asked)
    assert answer.status_code == 200
    expected = ffmem.trace(folder, TEXT, position=2, generate=4, grid=True, **TAKEN)
    assert answer.json() == expected.to_dict()
    TypeAdapter(TraceAnswer).validate_python(answer.json(), strict=True)


def test_no_edit_stays_in_the_model_that_everybody_shares(client, name, folder):
    plain = {"index": name, "text": "Another prompt"}
    client.get("/api/trace", params={**plain, **EDITS})
    assert client.get("/api/trace", params=plain).json() == (
        ffmem.trace(folder, "Another prompt", grid=True).to_dict()
    )


def test_exact_effects_are_the_librarys(client, name, folder):
    cells = ["L0N1", "L1N3", "L1N20"]
    asked = {"index": name, "text": TEXT, "cells": ",".join(cells), "top": 2}
    answer = client.get("/api/effect", params=asked)
    expected = ffmem.effect(folder, TEXT, cells=cells, candidates=0, top=2)
    assert answer.json() == expected.to_dict()
    TypeAdapter(EffectAnswer).validate_python(answer.json(), strict=True)
    chosen = client.get("/api/effect", params={"index": name, "text": TEXT, "candidates": 9}).json()
    assert chosen == ffmem.effect(folder, TEXT, candidates=9).to_dict()
    target = expected.top[3].token
    other = client.get("/api/effect", params={**asked, "target": target}).json()
    assert other["target"]["token"] == target


def test_the_page_tells_the_same_numbers(client, name, folder):
    asked = {"index": name, "text": TEXT, "generate": 3, **EDITS}
    answer = client.get("/trace", params=asked)
    assert answer.status_code == 200
    text = Page(answer.text).text
    found = ffmem.trace(folder, TEXT, generate=3, grid=True, **TAKEN)
    for layer in found.edited.layers:
        for memory in layer.memories:
            assert str(memory.cell) in text
    for part in ("L1N3 off", "L0N2 × 40", "L0N5 = −2.5"):
        assert part in text
    titles = [given.get("title", "") for tag, given in Page(answer.text).tags if tag == "a"]
    for position in range(len(found.tokens)):
        assert any(title.startswith(f"L1 at {position} ") for title in titles)


def test_every_link_of_the_page_keeps_prompt_and_edits(client, name):
    asked = {"index": name, "text": "a & b = c? #1 ␣", "view": "ff", **EDITS}
    page = Page(client.get("/trace", params=asked).text)
    kept = {"index": name, "text": asked["text"], **EDITS}
    whole = 0
    for link in page.links:
        parts = urlsplit(link)
        if parts.path not in ("/trace", "/m/L0N2", "/layer/0") or not parts.query:
            continue
        given = query(link)
        assert given["text"] == kept["text"]
        assert given["index"] == name
        whole += {key: given.get(key) for key in kept} == kept
    assert whole > 20


def test_an_address_from_a_link_shows_the_same_page_again(client):
    first = Page(client.get("/trace", params={"text": TEXT, **EDITS}).text)
    link = next(link for link in first.links if "position=1&layer=0" in link)
    answer = client.get(link.split("#")[0])
    assert answer.status_code == 200
    current = [given for tag, given in Page(answer.text).tags if given.get("aria-current")]
    picked = [given["title"] for given in current if given.get("title", "").startswith("L0 at 1 ")]
    assert len(picked) == 1
    assert ("details", "open") in [
        (tag, "open") for tag, given in Page(answer.text).tags if "open" in given
    ]


def test_without_a_prompt_there_is_a_form_and_something_to_try(client):
    answer = client.get("/trace", params={"off": "L1N3"})
    page = Page(answer.text)
    assert answer.status_code == 200
    tries = [query(link) for link in page.links if "text=" in link]
    assert len(tries) == 3
    assert {one["off"] for one in tries} == {"L1N3"}
    assert ("textarea") in [tag for tag, _ in page.tags]


def test_a_typed_prompt_keeps_its_lines_and_forgets_the_old_place(client):
    asked = {"text": "a\r\nb", "typed": 1, "position": 1, "layer": 1, "off": "L1N3", "view": "ff"}
    answer = client.get("/trace", params=asked, follow_redirects=False)
    assert answer.status_code == 303
    assert query(answer.headers["location"]) == {"text": "a\nb", "off": "L1N3", "view": "ff"}


HOSTILE = [
    "</textarea><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\" onfocus='x' {{ 7*7 }}",
    "a\u202eb\u05d0 \U0001f600 \x1b[31m",
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_prompt_is_text_and_nothing_else(client, hostile):
    calm = Page(client.get("/trace", params={"text": TEXT, "generate": 0}).text)
    asked = {"text": hostile, "generate": 5, "effects": 1, "off": "L1N3"}
    answer = client.get("/trace", params=asked)
    assert answer.status_code == 200
    page = Page(answer.text)
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in calm.tags} | {"h3", "aside", "b"}
    scripts = [given["src"] for tag, given in page.tags if tag == "script"]
    assert all(source.startswith("/static/") for source in scripts)
    for _, given in page.tags:
        assert not [key for key in given if key.startswith("on") or key == "style"]
    assert hostile in page.text


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"text": "x" * (MOST_CHARACTERS + 1)}, 422, "characters; the page takes"),
        ({"text": "x y " * 900}, 422, "Shorten it"),
        ({"text": TEXT, "generate": MOST_GENERATED + 1}, 422, "the page writes 0 to"),
        ({"text": TEXT, "generate": -1}, 422, "the page writes 0 to"),
        ({"text": TEXT, "position": 99}, 422, "Position 99 was asked for"),
        ({"text": TEXT, "off": "L7N1"}, 404, "There is no memory L7N1"),
        ({"text": TEXT, "off": "nothing"}, 404, "not the name of a memory"),
        ({"text": TEXT, "set": "L0N1=1e39"}, 422, "cannot hold"),
        ({"text": TEXT, "set": "L0N1=1,L0N1=2"}, 422, "twice"),
        (
            {"text": TEXT, "off": ",".join(f"L0N{n}" for n in range(MOST_EDITS + 1))},
            422,
            "memories are edited; the page takes",
        ),
        ({"text": TEXT, "index": "other"}, 404, "There is no index"),
    ],
)
def test_what_is_too_much_or_not_there_is_told_in_a_sentence(client, asked, status, said):
    for path in ("/trace", "/api/trace"):
        answer = client.get(path, params=asked)
        told = answer.json()["error"] if path == "/api/trace" else Page(answer.text).text
        assert said in told
        assert answer.status_code == status or path == "/trace"  # a page may have begun already
        assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("path", "asked", "status", "said"),
    [
        ("/trace", {"text": TEXT, "layer": 2}, 404, "There is no layer 2"),
        ("/trace", {"text": TEXT, "view": "sideways"}, 422, "view"),
        ("/api/trace", {}, 422, "The prompt is empty"),
        ("/api/trace", {"text": TEXT, "top": 0}, 422, "Give 1 to"),
        ("/api/trace", {"text": TEXT, "top": 10**30}, 422, "Give 1 to"),
        ("/api/effect", {"text": TEXT, "cells": "L0N99"}, 404, "There is no memory L0N99"),
        ("/api/effect", {"text": TEXT, "candidates": -1}, 422, "0 or more"),
        ("/api/effect", {"text": TEXT, "candidates": ABLATED}, 422, "Ask for fewer"),
        ("/api/effect", {"text": TEXT, "candidates": 0}, 422, "nothing to measure"),
        ("/api/effect", {"text": TEXT, "target": "no such token"}, 422, "not one token"),
    ],
)
def test_each_question_has_its_answer(client, path, asked, status, said):
    answer = client.get(path, params=asked)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text[:300]


def test_effects_on_request_stand_beside_the_memories_and_say_how_many(client, served_folder):
    asked = {"text": TEXT, "generate": 0}
    assert "Δ log p when off" not in client.get("/trace", params=asked).text
    text = Page(client.get("/trace", params={**asked, "effects": 1}).text).text
    trace = ffmem.trace(served_folder, TEXT)
    cells = [memory.cell for layer in trace.layers for memory in layer.memories]
    found = ffmem.effect(served_folder, TEXT, cells=cells, candidates=0, top=len(cells))
    assert f"All {len(cells)} memories" in text
    for memory in found.memories:
        assert f"{memory.change:+.3f}".replace("-", "−") in text


@pytest.fixture
def at(served_folder):
    return opened(served_folder, device="cpu")


@pytest.fixture
def passes(at):
    """Counts forward passes of the model."""
    seen = []
    handle = at.memories.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    yield seen
    handle.remove()


def question(**more):
    return Question(**{"text": TEXT, "generate": 2, **more})


def test_nothing_is_computed_twice(at, passes):
    runs = Runs()
    first = runs.trace(at, "a", question(edits=Edits.of(off=["L1N3"])))
    assert len(passes) == 8  # read, grid and two tokens, of both runs
    assert runs.trace(at, "a", question(edits=Edits.of(off=["L1N3"]))) == first
    assert len(passes) == 8
    runs.trace(at, "a", question(edits=Edits.of(off=["L1N3", "L0N1"])))
    assert len(passes) == 12  # the edited half
    runs.trace(at, "a", question(position=1))
    assert len(passes) == 13  # one position


def test_what_is_remembered_is_what_would_be_computed(at):
    edits = [
        Edits(),
        Edits.of(off=["L1N3"]),
        Edits.of(scale={"L1N3": 2.0}),
        Edits.of(set={"L1N3": 2}),
    ]
    asked = [question(edits=edit, position=n % 2 or None) for n, edit in enumerate(edits)]
    fresh = [Runs().trace(at, "a", one) for one in asked]
    runs = Runs()
    for one, expected in zip(asked * 2, fresh * 2, strict=True):
        assert runs.trace(at, "a", one) == expected


def test_memory_stays_bounded_and_answers_stay_right(at):
    runs = Runs(room=200)
    expected = [Runs().trace(at, "a", question(text=f"Prompt {n}")) for n in range(3)]
    for _ in range(2):
        for n, answer in enumerate(expected):
            assert runs.trace(at, "a", question(text=f"Prompt {n}")) == answer
            assert runs._held == sum(size for size, _ in runs._kept.values()) <= 200


def test_a_prompt_of_too_many_tokens_is_refused_before_it_runs(at, passes):
    at.memories.context = None
    with pytest.raises(ffmem.FfmemError, match=rf"the page takes {MOST_TOKENS}\."):
        Runs().trace(at, "a", question(text="x y " * MOST_TOKENS))
    assert passes == []

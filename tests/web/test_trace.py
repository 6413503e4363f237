"""The trace page and its twins: the catalog's own numbers, whole states, limits, hostile text."""

import re
from html.parser import HTMLParser
from urllib.parse import parse_qs, urlsplit

import pytest
from starlette.testclient import TestClient

import ffmem
from ffmem.cells import Cell
from ffmem.interventions.edits import Edits
from ffmem.interventions.forward import open_model
from ffmem.models.tokenizer import SubwordTokenizer
from ffmem.web.app import make_app
from ffmem.web.state import MAX_CHARACTERS, MAX_EDITS, State
from ffmem.web.views.trace import (
    MAX_ABLATED,
    MAX_GENERATED,
    MAX_TOKENS,
    N_COLUMNS,
    PartCache,
    TracePage,
    ViewOptions,
    run_trace,
)
from ffmem.web.worker import ModelWorker

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
        ({"text": "x" * (MAX_CHARACTERS + 1)}, 422, "characters; the page takes"),
        ({"text": "x y " * 900}, 422, "Shorten it"),
        ({"text": TEXT, "generate": MAX_GENERATED + 1}, 422, "The page generates 0 to"),
        ({"text": TEXT, "generate": -1}, 422, "The page generates 0 to"),
        ({"text": TEXT, "position": 99}, 422, "Position 99 is not in the prompt"),
        ({"text": TEXT, "off": "L7N1"}, 404, "There is no memory L7N1"),
        ({"text": TEXT, "off": "nothing"}, 404, "not the name of a memory"),
        ({"text": TEXT, "set": "L0N1=1e39"}, 422, "Activations overflow float32"),
        ({"text": TEXT, "set": "L0N1=1,L0N1=2"}, 422, "twice"),
        (
            {"text": TEXT, "off": ",".join(f"L0N{n}" for n in range(MAX_EDITS + 1))},
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
        ("/trace", {"text": TEXT, "layer": 2}, 404, "No layer 2"),
        ("/trace", {"text": TEXT, "view": "sideways"}, 422, "view"),
        ("/api/trace", {}, 422, "The prompt is empty"),
        ("/api/trace", {"text": TEXT, "top": 0}, 422, "Use 1 to"),
        ("/api/trace", {"text": TEXT, "top": 10**30}, 422, "Use 1 to"),
        ("/api/effect", {"text": TEXT, "cells": "L0N99"}, 404, "There is no memory L0N99"),
        ("/api/effect", {"text": TEXT, "candidates": -1}, 422, "0 or more"),
        ("/api/effect", {"text": TEXT, "candidates": MAX_ABLATED}, 422, "Use fewer"),
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
    return open_model(served_folder, device="cpu")


@pytest.fixture
def passes(at):
    """Counts forward passes of the model."""
    seen = []
    handle = at.memories.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    yield seen
    handle.remove()


def traced(at, cache, text=TEXT, position=None, **edits):
    return run_trace(
        at, cache, "a", State(text=text, position=position), Edits.of(**edits), generate=2
    )


def test_nothing_is_computed_twice(at, passes):
    cache = PartCache()
    first = traced(at, cache, off=["L1N3"])
    assert len(passes) == 8  # layers, grid and two tokens, of both runs
    assert traced(at, cache, off=["L1N3"]) == first
    assert len(passes) == 8
    traced(at, cache, off=["L1N3", "L0N1"])
    assert len(passes) == 12  # the edited half
    traced(at, cache, position=1)
    assert len(passes) == 13  # one position


def test_what_is_remembered_is_what_would_be_computed(at):
    edits = [{}, {"off": ["L1N3"]}, {"scale": {"L1N3": 2.0}}, {"set": {"L1N3": 2}}]
    asked = [{"position": n % 2 or None, **edit} for n, edit in enumerate(edits)]
    fresh = [traced(at, PartCache(), **one) for one in asked]
    cache = PartCache()
    for one, expected in zip(asked * 2, fresh * 2, strict=True):
        assert traced(at, cache, **one) == expected


def test_memory_stays_bounded_and_answers_stay_right(at):
    cache = PartCache(capacity=200)
    expected = [traced(at, PartCache(), f"Prompt {n}") for n in range(3)]
    for _ in range(2):
        for n, answer in enumerate(expected):
            assert traced(at, cache, f"Prompt {n}") == answer
            assert cache.size == sum(size for size, _ in cache.parts.values()) <= 200


def test_a_prompt_of_too_many_tokens_is_refused_before_it_runs(at, passes):
    at.memories.context = None
    with pytest.raises(ffmem.FfmemError, match=rf"the page takes {MAX_TOKENS}\."):
        traced(at, PartCache(), "x y " * MAX_TOKENS)
    assert passes == []


# A visit that another site started


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_link_from_another_site_shows_the_filled_in_form_and_runs_nothing(client, site, worked):
    asked = {"text": "A prompt of its own", "position": 1, "view": "ff", **EDITS}
    headers = {"sec-fetch-site": site, "sec-fetch-mode": "navigate"}
    answer = client.get("/trace", params=asked, headers=headers)
    page = Page(answer.text)
    assert answer.status_code == 200
    assert asked["text"] in page.text
    assert "Run this prompt?" in page.text
    assert worked == []
    run = next(given["href"] for tag, given in page.tags if given.get("class") == "button go")
    assert query(run) == {key: str(value) for key, value in asked.items()}
    answer = client.get(run, headers={"sec-fetch-site": "same-origin"})
    assert "Top memories" in answer.text
    assert len(worked) == 1


@pytest.fixture
def worked(client, monkeypatch):
    """The requests whose jobs the worker ran."""
    seen, run = [], ModelWorker.run

    async def counted(self, served, job, request):
        seen.append(request)
        return await run(self, served, job, request)

    monkeypatch.setattr(ModelWorker, "run", counted)
    return seen


def test_the_worker_knows_whose_request_it_runs(client, worked):
    """So that it can drop work whose client has gone."""
    for path in ("/trace", "/api/trace", "/api/effect"):
        client.get(path, params={"text": TEXT})
    assert [request.url.path for request in worked] == ["/trace", "/api/trace", "/api/effect"]


# The page's own numbers and links

OFF = Cell(1, 3)
STATE = State(text=TEXT, off=(OFF,), scale=((Cell(0, 2), 40.0),))


@pytest.fixture(scope="module", params=["served_folder", "ungated_folder"])
def place(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def model(place):
    """The model of the index, loaded once."""
    return ffmem.load(ffmem.open(place).manifest.model.source, device="cpu")


@pytest.fixture(scope="module")
def trace(place, model):
    return ffmem.trace(
        place, TEXT, off=[OFF], scale={"L0N2": 40.0}, generate=3, grid=True, model=model
    )


@pytest.fixture(scope="module")
def plain(place, model):
    return ffmem.trace(place, TEXT, grid=True, model=model)


@pytest.mark.parametrize("view", ["before", "ff", "after"])
@pytest.mark.parametrize("run", ["plain", "edited", "changes"])
def test_the_grid_shows_the_chosen_vector_of_the_chosen_run(trace, view, run):
    page = TracePage(trace, STATE, ViewOptions(view=view, run=run))
    rows = page.grid_rows()
    vector = {"before": "residual", "ff": "ff", "after": "output"}[view]
    shown = trace.grid if run == "plain" else trace.edited_grid
    assert [layer for layer, _ in rows] == list(reversed(range(len(trace.layers))))
    changed = 0
    for layer, cells in rows:
        for position, cell in enumerate(cells):
            point = shown[layer][position]
            token = getattr(point, vector)
            other = getattr(trace.grid[layer][position], vector)
            assert (cell.token, cell.case) == (token.token, point.case)
            assert cell.shade == f"p{round(token.probability * 10)}"
            assert cell.changed == (token.id != other.id)
            changed += cell.changed
            asked = query(cell.href)
            assert (asked["position"], asked["layer"]) == (str(position), str(layer))
            assert asked["off"] == "L1N3"
            assert cell.href.endswith(f"#L{layer}")
            assert cell.title.startswith(f"L{layer} at {position} ")
    if run != "plain":
        assert page.n_changed() == changed > 0


def test_bars_are_absolute_and_every_token_has_its_own_number(client, served_folder):
    """Also those that one of the two runs does not have among its most probable."""
    text = client.get("/trace", params={"text": TEXT, "generate": 0, **EDITS}).text
    found = ffmem.trace(served_folder, TEXT, **TAKEN)
    rows = found.output_changes
    lists = [{one.id for one in run.output_top} for run in (found.plain, found.edited)]
    assert {row.id for row in rows} == lists[0] | lists[1]
    assert lists[0] != lists[1]
    table = text.partition('<table class="predictions">')[2].partition("</table>")[0]
    widths = [float(width) for width in re.findall(r'rect width="([\d.]+)%"', table)]
    expected = [100 * p for row in rows for p in (row.probability, row.edited_probability)]
    assert widths == pytest.approx(expected, abs=0.006)
    assert "≤" not in table


def test_the_probabilities_of_both_runs_are_those_of_whole_lists(place, model):
    n = 200
    found = ffmem.trace(place, TEXT, off=[OFF], scale={"L0N2": 40.0}, top=n, model=model)
    some = ffmem.trace(place, TEXT, off=[OFF], scale={"L0N2": 40.0}, top=5, model=model)
    before = {one.id: one.probability for one in found.output_top}
    after = {one.id: one.probability for one in found.edited.output_top}
    for row in some.output_changes:
        assert row.probability == pytest.approx(before.get(row.id, row.probability), rel=1e-6)
        assert row.edited_probability == pytest.approx(after[row.id], rel=1e-6)
    assert [row.id for row in some.output_changes[:5]] == [one.id for one in some.edited.output_top]


def test_memories_are_those_of_the_run_that_is_shown(trace):
    for run, layers in (("plain", trace.layers), ("edited", trace.edited.layers)):
        page = TracePage(trace, STATE, ViewOptions(run=run))
        assert page.shown.layers == layers
        for layer in layers:
            assert [memory for memory, _ in page.memory_rows(layer)] == layer.memories


def test_one_layer_is_open_the_chosen_one_or_where_the_prediction_settles(trace, plain):
    assert TracePage(trace, STATE, ViewOptions(layer=0)).selected == 0
    assert TracePage(plain, State(text=TEXT), ViewOptions()).selected == plain.saturation


def memory_rows(page):
    return [pair for layer in page.shown.layers for pair in page.memory_rows(layer)]


def test_one_click_switches_a_memory_off_and_another_on_again(trace):
    page = TracePage(trace, STATE, ViewOptions(run="plain", view="ff"))
    seen = set()
    for memory, row in memory_rows(page):
        asked = query(row.toggle)
        off = set(asked.get("off", "").split(",")) - {""}
        if row.edit is None:
            assert off == {"L1N3", str(memory.cell)}
            assert asked["scale"] == "L0N2=40"
        else:
            assert off == {"L1N3"} - {str(memory.cell)}
        assert (asked["view"], asked["run"], asked["text"]) == ("ff", "plain", TEXT)
        seen.add(row.edit is None)
    assert True in seen


def test_nobody_is_offered_more_edits_than_are_taken(place, monkeypatch, model):
    numbers = {str(Cell(layer, memory)): 1.0 for layer in range(2) for memory in range(6)}
    state = State(text=TEXT, scale=tuple((Cell.parse(c), n) for c, n in numbers.items()))
    page = TracePage(
        ffmem.trace(place, TEXT, scale=numbers, grid=True, model=model), state, ViewOptions()
    )
    assert all(row.toggle for _, row in memory_rows(page))
    monkeypatch.setattr("ffmem.web.views.trace.MAX_EDITS", len(numbers))
    for _, row in memory_rows(page):
        assert (row.toggle is None) == (row.edit is None)


def test_effects_are_beside_their_memories_with_signed_bars(place, plain, model):
    cells = TracePage(plain, State(), ViewOptions(layer=1)).listed_cells()
    effect = ffmem.effect(place, TEXT, cells=cells[:12], candidates=0, top=12, model=model)
    page = TracePage(plain, State(text=TEXT), ViewOptions(effects=True), effect)
    changes = {memory.cell: memory.change for memory in effect.memories}
    rows = memory_rows(page)
    assert {m.cell: row.change for m, row in rows if row.change is not None} == changes
    most = max(map(abs, changes.values()))
    for _, row in rows:
        begin, width = row.bar
        if row.change is not None:
            assert width == pytest.approx(50 * abs(row.change) / most)
            assert begin == pytest.approx(50 - width if row.change < 0 else 50)


def test_the_open_layers_memories_are_measured_first_then_the_largest_shares(plain):
    cells = TracePage(plain, State(), ViewOptions(layer=0)).listed_cells()
    n = len(plain.layers[0].memories)
    assert {cell.layer for cell in cells[:n]} == {0}
    shares = {memory.cell: memory.share for layer in plain.layers for memory in layer.memories}
    rest = [shares[str(cell)] for cell in cells[n:]]
    assert rest == sorted(rest, reverse=True)
    assert len(set(cells)) == len(shares)


def test_a_long_prompt_is_shown_in_parts_that_meet(place, model):
    trace = ffmem.trace(place, "a b c d e f " * 4, grid=True, model=model)
    assert len(trace.tokens) > N_COLUMNS
    page = TracePage(trace, State(text="x"), ViewOptions())
    assert trace.position in page.positions
    assert page.later is None
    assert int(query(page.earlier)["first"]) == max(0, page.positions.start - N_COLUMNS)
    first = TracePage(trace, State(text="x"), ViewOptions(first=0))
    assert first.positions == range(N_COLUMNS)
    assert first.earlier is None
    assert query(first.later)["first"] == str(N_COLUMNS)
    _, cells = first.grid_rows()[0]
    assert len(cells) == N_COLUMNS
    assert cells[5].token == trace.grid[-1][5].output.token


def test_an_address_holds_only_what_is_not_the_default():
    assert ViewOptions().extra() == {}
    options = ViewOptions(view="ff", layer=0, effects=True, target=" in")
    assert options.extra() == {"view": "ff", "layer": 0, "effects": 1, "target": " in"}
    assert options.extra(view=None) == {"view": None, "layer": 0, "effects": 1, "target": " in"}


def test_the_chat_checkbox_is_there_unless_the_model_has_no_template(catalog, monkeypatch):
    with TestClient(make_app(catalog, ModelWorker(device="cpu")), "http://127.0.0.1:8800") as one:
        assert 'type="checkbox" name="chat"' in one.get("/trace").text  # not loaded: unknown
        assert "predicts" in one.get("/trace", params={"text": TEXT}).text.lower()
        assert 'name="chat"' not in one.get("/trace").text
        monkeypatch.setattr(SubwordTokenizer, "has_chat", True)
        assert 'type="checkbox" name="chat"' in one.get("/trace").text

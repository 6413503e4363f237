"""The page of a memory shows what the library knows of it."""

import re
from dataclasses import asdict
from html import unescape
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from starlette.testclient import TestClient

import ffmem
from ffmem.cells import Cell
from ffmem.indexing.memory import visible, visible_token
from ffmem.web.app import make_app
from ffmem.web.layer_table import Wanted, chosen, layer_table
from ffmem.web.views.memory import (
    BEFORE,
    ending,
    folded,
    histogram,
    intervals,
    side,
    token_texts,
)
from ffmem.web.worker import Worker
from tests.web.conftest import HOSTILE


@pytest.fixture(params=["tiny", "plain"])
def shelf(request, library):
    """Both indexes, one after the other."""
    return library.shelves[request.param]


def text_of(page):
    """Return the words of a page, without its tags."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", "\x00", page))).replace("\x00", "")


@pytest.mark.parametrize("cell", ["L0N0", "L1N3", "L1N17"])
def test_it_shows_every_trigger_and_both_ends_of_the_value(client, shelf, cell):
    page = client.get(f"/m/{cell}", params={"index": shelf.name})
    assert page.status_code == 200
    memory = shelf.index[cell]
    shown = text_of(page.text)
    for trigger in (*memory.triggers, *memory.negative_triggers):
        tail = visible(trigger.prefix)[1 - BEFORE :]
        assert re.sub(r"\s+", " ", tail).strip() in shown
        assert visible_token(trigger.next_token) in shown
    for token in (*memory.value.top[:10], *memory.value.bottom[:10]):
        assert visible_token(token.token) in shown


def test_what_a_corpus_holds_is_text_never_markup(client, library):
    index, seen = library.shelf().index, 0
    for cell in index:
        memory = index[cell]
        if not any(t.prefix[:9] in HOSTILE[0] for t in memory.triggers):
            continue
        page = client.get(f"/m/{cell}").text
        scripts = re.findall(r"<script[^>]*>[^<]*", page)
        assert all(re.fullmatch(r'<script[^>]* src="/static/[a-z]+\.js">', one) for one in scripts)
        assert "<img" not in page
        assert not re.search(r"<[^>]* on[a-z]+=", page)
        assert not re.search(r"<[^>]* style=", page)
        seen += 1
        if seen == 20:
            break
    assert seen, "some memory is triggered by a hostile sentence"


def test_names_in_any_form_lead_to_the_one_page(client):
    for name in ("1.3", "1:3", "1/3", "l1n3", "L1D3"):
        answer = client.get(f"/m/{name}?off=L0N1", follow_redirects=False)
        assert answer.status_code == 307
        assert answer.headers["location"] == "/m/L1N3?off=L0N1"


@pytest.mark.parametrize("name", ["L99N0", "L0N99999", "elephant", "L0", "..%2F..%2Fetc%2Fpasswd"])
def test_an_unknown_memory_is_told_in_words(client, name):
    page = client.get(f"/m/{name}")
    assert page.status_code == 404
    assert "memory" in page.text
    assert client.get(f"/api/m/{name}").status_code == 404


def test_neighbours_stand_in_reading_order(client, library):
    index = library.shelf().index
    last = index.layout.widths[0] - 1
    page = client.get(f"/m/L0N{last}").text
    assert 'rel="next" href="/m/L1N0"' in page
    assert f'rel="prev" href="/m/L0N{last - 1}"' in page
    assert 'rel="prev"' not in client.get("/m/L0N0").text
    assert 'rel="next"' not in client.get(f"/m/L{index.n_layers - 1}N{last}").text


def test_every_link_keeps_the_edits_and_the_prompt(client):
    page = client.get("/m/L1N3?off=L0N1&set=L0N2=2.5&text=a%26b").text
    for address in re.findall(r'href="(/(?:m|layer|trace|search|figures)[^"]*)"', page):
        if address in ("/m/L1N3?index=tiny", "/m/L1N3?text=a%26b"):
            continue  # the permalink, and what clears the edits
        address = unescape(address)
        if "/trace?" in address and "text=a%26b" not in address:
            assert "off=L0N1" in address  # a trigger's own text
            continue
        assert "text=a%26b" in address
        assert "off=L0N1" in address or "set=L0N2=2.5" in address


def test_one_click_switches_a_memory_off_and_another_on_again(client):
    page = client.get("/m/L1N3?off=L0N1").text
    assert 'href="/m/L1N3?off=L0N1,L1N3"' in page
    again = client.get("/m/L1N3?off=L0N1,L1N3").text
    assert "L1N3 off · undo" in again
    assert 'href="/m/L1N3?off=L0N1"' in again


@pytest.mark.parametrize("by", ["value", "key"])
def test_similar_memories_are_the_librarys_neighbours(client, shelf, by):
    expected = ffmem.neighbours(shelf.index, "L1N3", by=by, n=10, device="cpu")
    answer = client.get("/api/m/L1N3/similar", params={"index": shelf.name, "by": by}).json()
    assert [one["cell"] for one in answer["memories"]] == [str(one.cell) for one in expected]
    assert [one["cosine"] for one in answer["memories"]] == pytest.approx(
        [one.cosine for one in expected]
    )
    assert answer["layers_searched"] == list(range(shelf.index.n_layers))
    for one in answer["memories"]:
        value = shelf.index[one["cell"]].value
        end = value.top if one["cosine"] >= 0 else value.bottom
        assert one["value_top"] == [token.token for token in end[:6]]
    page = client.get("/m/L1N3", params={"index": shelf.name, "similar": by}).text
    for one in expected:
        assert f">{one.cell}</a>" in page


def test_next_and_previous_keep_the_sorting_and_the_filters(client, shelf):
    wanted = Wanted("-max", least=1.0)
    order = chosen(shelf.index, layer_table(shelf.index, 1), wanted).tolist()
    asked = {"index": shelf.name, "sort": "-max", "least": 1}
    for place in (0, 1, len(order) - 1):
        page = client.get(f"/m/L1N{order[place]}", params=asked).text
        for rel, other in (("prev", place - 1), ("next", place + 1)):
            found = re.search(f'rel="{rel}" href="([^"]*)"', page)
            assert bool(found) == (0 <= other < len(order))
            if found:
                link = unescape(found[1])
                assert urlsplit(link).path == f"/m/L1N{order[other]}"
                assert parse_qs(urlsplit(link).query)["sort"] == ["-max"]
    listed = client.get("/layer/1", params=asked).text
    assert re.search(rf'href="/m/L1N{order[0]}\?[^"]*sort=-max', listed)
    changed = re.search(r'href="([^"]*)">Switch off', client.get("/m/L1N3?sort=-max").text)[1]
    assert "sort=-max" in changed


def test_coefficients_at_every_token_are_the_models(client, shelf):
    first, other = (shelf.index["L1N3"].triggers[i] for i in (0, 3))
    asked = {"index": shelf.name, "at": f"{first.sentence}:{first.length},{other.sentence}:1"}
    found = client.get("/api/m/L1N3/coefficients", params=asked).json()
    assert [(one["sentence"], one["length"]) for one in found] == [
        (first.sentence, first.length),
        (other.sentence, 1),
    ]
    assert found[0]["coefficients"][-1] == pytest.approx(first.coefficient, rel=1e-4)
    assert len(found[0]["tokens"]) == len(found[0]["coefficients"]) == first.length
    assert "".join(found[0]["tokens"]) == first.prefix.lstrip()


@pytest.mark.parametrize(
    "at", ["", "1", "a:b", "1:0", "0:99999", "99999999:1", "-1:1", "0:1," * 40, "0:" + "9" * 5000]
)
def test_prefixes_that_are_not_there_are_refused_in_words(client, at):
    answer = client.get("/api/m/L1N3/coefficients", params={"at": at})
    assert answer.status_code == (200 if at == "" else 422)


def test_intervals_cover_every_sampled_prefix_once_and_show_what_lies_in_them(client, shelf):
    for cell in list(shelf.index)[::17]:
        memory, sample = shelf.index[cell], shelf.index.sample(cell)
        found = intervals(shelf.index, memory)
        assert sum(one.sampled for one in found.intervals) == len(sample) == found.sample
        for one in found.intervals:
            assert one.low <= one.high
            numbers = [example.coefficient for example in one.examples]
            assert all(one.low <= m <= one.high for m in numbers)
            assert numbers == sorted(numbers, key=lambda m: -abs(m))
            assert bool(numbers) or not one.sampled
        if memory.triggers:
            assert found.intervals[0].high == memory.triggers[0].coefficient
    answer = client.get(f"/api/m/{cell}/intervals", params={"index": shelf.name}).json()
    assert answer == asdict(found)


def test_an_interval_is_a_page(client, library):
    index = library.shelf().index
    found = intervals(index, index["L1N3"]).intervals
    page = client.get("/m/L1N3").text
    for number, one in enumerate(found):
        assert f'href="/m/L1N3?interval={number}"' in page
        here = client.get(f"/m/L1N3?interval={number}").text
        shown = text_of(here)
        for example in one.examples:
            tail = visible(example.prefix)[1 - BEFORE :]
            assert re.sub(r"\s+", " ", tail).strip() in shown
        percentiles = re.findall(r'class="percentile"[^>]*>p([\d.]+)', here)
        sample = index.sample(Cell(1, 3))
        for percentile, example in zip(percentiles, one.examples, strict=True):
            m = np.float32(example.coefficient)
            weaker = (sample <= m) if m >= 0 else (sample >= m)
            assert float(percentile) == pytest.approx(100 * weaker.mean(), rel=1e-3)
    assert client.get(f"/m/L1N3?interval={len(found)}").status_code == 404
    assert client.get("/m/L1N3?interval=-1").status_code == 404


def test_without_a_model_the_page_says_that_last_tokens_alone_are_tinted(library):
    app = make_app(library, Worker(device="cpu"))
    with TestClient(app, "http://127.0.0.1:8800") as visitor:
        page = visitor.get("/m/L1N3").text
        assert "without the model, its coefficient alone is known" in text_of(page)
        assert "memory.js" not in page
        visitor.get("/api/m/L1N3/similar")  # loads it
        page = visitor.get("/m/L1N3").text
        assert "the coefficient at each token" in text_of(page)
        assert "memory.js" in page


def test_the_model_colours_every_token(client, shelf):
    page = client.get("/m/L1N3", params={"index": shelf.name, "tokens": "true"}).text
    memory = shelf.index["L1N3"]
    first = memory.triggers[0]
    pieces = re.findall(r'<span class="t ([^"]*)" title="([^"]*)">', page)
    ranks = [trigger.length for trigger in memory.triggers]
    own = pieces[: ranks[0]]
    assert "last" in own[-1][0]
    assert float(own[-1][1]) == pytest.approx(first.coefficient, rel=1e-2)


def test_json_is_what_show_prints(client, shelf):
    answer = client.get("/api/m/L1N3", params={"index": shelf.name})
    assert answer.json() == shelf.index["L1N3"].to_dict() | {"patterns": []}


def test_alike_are_those_that_end_in_the_same_words(library):
    memory = library.shelf().index["L1N3"]
    shown = [fold.shown for fold in side(memory, 1, np.array([])).folds]
    folds = folded(shown + shown)
    assert [fold.shown for fold in folds] == shown
    assert all(fold.alike == [fold.shown] for fold in folds)
    assert ending("In 1990 the river rose by 12 feet") == ending(
        "Later, 3 the River rose by 7 feet"
    )
    assert ending("the river rose by 12 feet") != ending("the river rose by 12 inches")


def test_percentiles_are_of_the_sample_in_the_direction_of_the_sign(library):
    index = library.shelf().index
    for cell in list(index)[::13]:
        sample = index.sample(cell)
        for sign in (1, -1):
            for fold in side(index[cell], sign, sample).folds:
                for one in (fold.shown, *fold.alike):
                    m = np.float32(one.trigger.coefficient)
                    weaker = (sample <= m) if sign > 0 else (sample >= m)
                    assert float(one.percentile) == pytest.approx(100 * weaker.mean(), rel=1e-3)
    assert side(index["L1N3"], 1, np.array([])).folds[0].shown.percentile == ""


def test_folding_loses_no_trigger(library):
    for name in library.shelves:
        index = library.shelves[name].index
        for cell in list(index)[::11]:
            memory = index[cell]
            for sign, triggers in ((1, memory.triggers), (-1, memory.negative_triggers)):
                found = side(memory, sign, index.sample(cell))
                ranks = [
                    one.trigger.rank for fold in found.folds for one in (fold.shown, *fold.alike)
                ]
                assert sorted(ranks) == [trigger.rank for trigger in triggers]
                assert found.n == len(triggers)


def test_pieces_put_together_are_the_prefix(library):
    for name in library.shelves:
        index = library.shelves[name].index
        for trigger in index["L1N3"].triggers:
            row = index.sentences.row(trigger.sentence)
            whole = len(row.ids)
            assert "".join(token_texts(row, whole, index.token)) == row.text.lstrip()


def test_the_picture_of_coefficients_stands_in_its_box():
    for sample in (np.zeros(9), np.array([1.0]), np.arange(512.0), np.array([-3.0, 0, 0, 900])):
        bars = histogram(sample)
        assert bars
        for x, y, width, height in bars:
            assert 0 <= x <= x + width <= 100
            assert 0 <= y <= 30
            assert height > 0
            assert y + height == pytest.approx(30, abs=0.02)
    assert histogram(np.array([])) == []

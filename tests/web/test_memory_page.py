"""The page of a memory shows what the catalog knows of it."""

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
from ffmem.web.layer_table import LayerQuery, layer_table, sort_memories
from ffmem.web.views.memory import (
    BEFORE,
    ending,
    group_triggers,
    histogram,
    intervals,
    token_texts,
    trigger_list,
)
from ffmem.web.worker import ModelWorker
from tests.web.conftest import HOSTILE


@pytest.fixture(params=["tiny", "plain"])
def served(request, catalog):
    """Both indexes, one after the other."""
    return catalog.get(request.param)


def text_of(page):
    """Return the words of a page, without its tags."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", "\x00", page))).replace("\x00", "")


@pytest.mark.parametrize("cell", ["L0N0", "L1N3", "L1N17"])
def test_it_shows_every_trigger_and_both_ends_of_the_value(client, served, cell):
    page = client.get(f"/m/{cell}", params={"index": served.name})
    assert page.status_code == 200
    memory = served.index[cell]
    shown = text_of(page.text)
    for trigger in (*memory.triggers, *memory.negative_triggers):
        tail = visible(trigger.prefix)[1 - BEFORE :]
        assert re.sub(r"\s+", " ", tail).strip() in shown
        assert visible_token(trigger.next_token) in shown
    for token in (*memory.value.top[:10], *memory.value.bottom[:10]):
        assert visible_token(token.token) in shown


def test_what_a_corpus_holds_is_text_never_markup(client, catalog):
    index, seen = catalog.get().index, 0
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


def test_neighbours_stand_in_reading_order(client, catalog):
    index = catalog.get().index
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
def test_similar_memories_are_the_librarys_neighbours(client, served, by):
    expected = ffmem.neighbours(served.index, "L1N3", by=by, n=10, device="cpu")
    answer = client.get("/api/m/L1N3/similar", params={"index": served.name, "by": by}).json()
    assert [one["cell"] for one in answer["memories"]] == [str(one.cell) for one in expected]
    assert [one["cosine"] for one in answer["memories"]] == pytest.approx(
        [one.cosine for one in expected]
    )
    assert answer["layers_searched"] == list(range(served.index.n_layers))
    for one in answer["memories"]:
        value = served.index[one["cell"]].value
        end = value.top if one["cosine"] >= 0 else value.bottom
        assert one["value_top"] == [token.token for token in end[:6]]
    page = client.get("/m/L1N3", params={"index": served.name, "similar": by}).text
    for one in expected:
        assert f">{one.cell}</a>" in page


def test_next_and_previous_keep_the_sorting_and_the_filters(client, served):
    query = LayerQuery("-max", least=1.0)
    order = sort_memories(served.index, layer_table(served.index, 1), query).tolist()
    asked = {"index": served.name, "sort": "-max", "least": 1}
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


def test_coefficients_at_every_token_are_the_models(client, served):
    first, other = (served.index["L1N3"].triggers[i] for i in (0, 3))
    asked = {"index": served.name, "at": f"{first.sentence}:{first.length},{other.sentence}:1"}
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


def test_intervals_cover_every_sampled_prefix_once_and_show_what_lies_in_them(client, served):
    for cell in list(served.index)[::17]:
        memory, sample = served.index[cell], served.index.sample(cell)
        found = intervals(served.index, memory)
        assert sum(one.sampled for one in found) == len(sample)
        for one in found:
            assert one.low <= one.high
            numbers = [example.coefficient for example in one.examples]
            assert all(one.low <= m <= one.high for m in numbers)
            assert numbers == sorted(numbers, key=lambda m: -abs(m))
            assert bool(numbers) or not one.sampled
        if memory.triggers:
            assert found[0].high == memory.triggers[0].coefficient
    answer = client.get(f"/api/m/{cell}/intervals", params={"index": served.name}).json()
    assert answer == {
        "cell": str(cell),
        "sample": len(sample),
        "intervals": list(map(asdict, found)),
    }


def test_an_interval_is_a_page(client, catalog):
    index = catalog.get().index
    found = intervals(index, index["L1N3"])
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


def test_without_a_model_the_page_says_that_last_tokens_alone_are_tinted(catalog):
    app = make_app(catalog, ModelWorker(device="cpu"))
    with TestClient(app, "http://127.0.0.1:8800") as visitor:
        page = visitor.get("/m/L1N3").text
        assert "the index stores no other coefficients" in text_of(page)
        assert "memory.js" not in page
        visitor.get("/api/m/L1N3/similar")  # loads it
        page = visitor.get("/m/L1N3").text
        assert "the coefficient at each token" in text_of(page)
        assert "memory.js" in page


def test_the_model_colors_every_token(client, served):
    page = client.get("/m/L1N3", params={"index": served.name, "tokens": "true"}).text
    memory = served.index["L1N3"]
    first = memory.triggers[0]
    pieces = re.findall(r'<span class="t ([^"]*)" title="([^"]*)">', page)
    ranks = [trigger.length for trigger in memory.triggers]
    own = pieces[: ranks[0]]
    assert "last" in own[-1][0]
    assert float(own[-1][1]) == pytest.approx(first.coefficient, rel=1e-2)


def test_json_is_what_show_prints(client, served):
    answer = client.get("/api/m/L1N3", params={"index": served.name})
    assert answer.json() == served.index["L1N3"].to_dict() | {"patterns": []}


def test_alike_are_those_that_end_in_the_same_words(catalog):
    memory = catalog.get().index["L1N3"]
    shown = [group.first for group in trigger_list(memory, 1, np.array([])).groups]
    groups = group_triggers(shown + shown)
    assert [group.first for group in groups] == shown
    assert all(group.alike == [group.first] for group in groups)
    assert ending("In 1990 the river rose by 12 feet") == ending(
        "Later, 3 the River rose by 7 feet"
    )
    assert ending("the river rose by 12 feet") != ending("the river rose by 12 inches")


def test_percentiles_are_of_the_sample_in_the_direction_of_the_sign(catalog):
    index = catalog.get().index
    for cell in list(index)[::13]:
        sample = index.sample(cell)
        for sign in (1, -1):
            for group in trigger_list(index[cell], sign, sample).groups:
                for one in (group.first, *group.alike):
                    m = np.float32(one.trigger.coefficient)
                    weaker = (sample <= m) if sign > 0 else (sample >= m)
                    assert float(one.percentile) == pytest.approx(100 * weaker.mean(), rel=1e-3)
    assert trigger_list(index["L1N3"], 1, np.array([])).groups[0].first.percentile == ""


def test_folding_loses_no_trigger(catalog):
    for name in catalog.folders:
        index = catalog.get(name).index
        for cell in list(index)[::11]:
            memory = index[cell]
            for sign, triggers in ((1, memory.triggers), (-1, memory.negative_triggers)):
                found = trigger_list(memory, sign, index.sample(cell))
                ranks = [
                    one.trigger.rank
                    for group in found.groups
                    for one in (group.first, *group.alike)
                ]
                assert sorted(ranks) == [trigger.rank for trigger in triggers]
                assert found.n == len(triggers)


def test_pieces_put_together_are_the_prefix(catalog):
    for name in catalog.folders:
        index = catalog.get(name).index
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


def test_the_key_stands_beside_the_value(client, served):
    index = served.index
    for cell in list(index)[::7]:
        memory = index[cell]
        page = client.get(f"/m/{cell}", params={"index": served.name}).text
        card = page.partition('id="key"')[2].partition("</section>")[0]
        for token in memory.keys.tokens[:10]:
            assert visible_token(token.token) in unescape(card)
        assert memory.keys.weight_class in card
        shown = client.get(f"/api/m/{cell}", params={"index": served.name}).json()
        assert shown["key"] == memory.keys.to_dict()


def test_a_sign_case_lists_its_triggers_alone(client, catalog):
    index = catalog.get().index
    for cell in list(index)[:6]:
        memory = index[cell]
        for number, case in enumerate(memory.sign_cases):
            page = client.get(f"/m/{cell}?case={number}")
            assert page.status_code == 200
            assert page.text.count('class="trigger"') == len(case.triggers)
            assert case.note is None or case.note in unescape(page.text)
    answer = client.get(f"/m/{cell}?case=4")
    assert answer.status_code == 404


def test_an_ungated_memory_has_no_sign_cases(client, catalog):
    assert not catalog.get("plain").index.manifest.model.gated
    assert "Sign case" not in client.get("/m/L0N0?index=plain").text
    assert client.get("/m/L0N0?index=plain&case=0").status_code == 404

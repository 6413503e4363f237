"""The room of search: what one box finds, on the page and for programs."""

import errno
import html
import re
import shutil
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import ffmem
from ffmem.indexing.query import Query
from ffmem.indexing.search import Search
from ffmem.web.app import make_app
from ffmem.web.catalog import Catalog
from ffmem.web.views import search as view

INDEXES = ["tiny", "plain"]


def answer(client, **parameters):
    response = client.get("/api/search", params=parameters)
    assert response.status_code == 200, response.text
    return response.json()


def group(found, name):
    return next((group for group in found["groups"] if group["name"] == name), None)


def page(client, status=200, **parameters):
    response = client.get("/search", params=parameters)
    assert response.status_code == status, response.text
    return response.text


def text_of(page):
    """What a reader sees, tags taken out."""
    return html.unescape(re.sub(r"<[^>]*>", "", page))


@pytest.fixture(scope="module")
def indexes(catalog):
    return {name: catalog.get(name).index for name in INDEXES}


@pytest.fixture(scope="module")
def values(indexes):
    """What the value of every memory promotes and suppresses, by index and cell."""
    return {
        name: {
            str(memory.cell): memory.value
            for layer in range(index.n_layers)
            for memory in index.memories(layer)
        }
        for name, index in indexes.items()
    }


@pytest.mark.parametrize("name", INDEXES)
@pytest.mark.parametrize("query", ["the", " the", "river", "the river", "zebra", "!", "é"])
@pytest.mark.parametrize("prefix", [False, True])
def test_the_answer_is_what_the_library_finds(client, indexes, values, name, query, prefix):
    index = indexes[name]
    found = answer(client, q=query, index=name, prefix=prefix, limit=200)
    assert (found["index"], found["query"], found["regex"]) == (name, query, False)
    assert [group["name"] for group in found["groups"]] == ["values", "triggers"]
    search = Search(index)
    for place in ("values", "triggers"):
        wanted = search.search(Query(query, prefix=prefix), place, limit=200)
        here = group(found, place)
        assert (here["total"], here["at_least"], here["sentences"]) == (wanted.total, False, None)
        assert len(here["hits"]) == len(wanted.hits)
        for entry, hit in zip(here["hits"], wanted.hits, strict=True):
            assert entry["cell"] == hit.cell == f"L{entry['layer']}N{entry['memory']}"
            assert (entry["matches"], entry["rank"], entry["side"]) == hit[1:4]
            parts = (entry["before"], entry["match"], entry["after"], entry["rest"])
            assert parts == hit.excerpt
            value = values[name][hit.cell]
            turned = name == "tiny" and hit.side in ("bottom", "negative")
            tokens = [token.token for token in (value.bottom if turned else value.top)[:6]]
            assert entry["tokens"] == ([] if prefix else tokens)
    search.close()


@pytest.mark.parametrize("form", ["L1N3", "l1n3", "1.3", "1:3", "1/3", "L1D3", " L1N3 "])
def test_a_memory_is_found_by_any_form_of_its_name_first_of_all(client, indexes, form):
    found = answer(client, q=form)
    first = found["groups"][0]
    assert (first["name"], first["total"], first["hits"][0]["cell"]) == ("memories", 1, "L1N3")
    tokens = [token.token for token in indexes["tiny"]["L1N3"].value.top[:6]]
    assert first["hits"][0]["tokens"] == tokens
    assert 'href="/m/L1N3"' in page(client, q=form)
    assert group(answer(client, q=form, layer=0), "memories") is None
    assert group(answer(client, q=form, **{"in": "values"}), "memories") is None


@pytest.mark.parametrize("form", ["L1", "l1", " L1 ", "layer 1", "Layer1"])
def test_a_layer_is_found_by_its_name(client, form):
    first = answer(client, q=form)["groups"][0]
    assert (first["name"], first["total"]) == ("layers", 1)
    assert (first["hits"][0]["layer"], first["hits"][0]["memory"]) == (1, None)
    assert 'href="/layer/1"' in page(client, q=form).partition('id="results"')[2]
    assert group(answer(client, q=form, layer=0), "layers") is None


@pytest.mark.parametrize("form", ["L2", "L", "1", "L1N", "xL1", "L" + "9" * 100])
def test_other_texts_are_no_layer(client, form):
    assert group(answer(client, q=form), "layers") is None


def test_a_memory_that_is_not_there_is_only_text(client):
    found = answer(client, q="L99N1")
    assert group(found, "memories") is None
    assert group(found, "values")["total"] == 0


def test_between_slashes_stands_an_expression(client, indexes):
    found = answer(client, q="/^ ?[a-z]$/", limit=200)
    assert found["regex"]
    search = Search(indexes["tiny"])
    wanted = search.search(Query("^ ?[a-z]$", regex=True), "values", limit=200)
    assert group(found, "values")["total"] == wanted.total > 0
    assert not answer(client, q="/the")["regex"]
    assert not answer(client, q="//")["regex"]
    search.close()


def test_a_page_shows_one_group_page_by_page(client, indexes):
    everything = answer(client, q="the", limit=200, **{"in": "triggers"})
    assert [group["name"] for group in everything["groups"]] == ["triggers"]
    cells = [hit["cell"] for hit in everything["groups"][0]["hits"]]
    assert len(cells) > 25
    shown = []
    for number in range(1, 2 + len(cells) // 25):
        text = page(client, q="the", page=number, **{"in": "triggers"})
        shown += re.findall(r'<li class="hit[^>]*><a class="mono" href="/m/(L\d+N\d+)"', text)
    assert shown == cells
    offset = answer(client, q="the", offset=7, limit=3, **{"in": "triggers"})["groups"][0]
    assert [hit["cell"] for hit in offset["hits"]] == cells[7:10]
    assert "There is no page 999" in page(client, q="the", page=999, **{"in": "triggers"})


def test_a_page_of_all_groups_tells_counts_and_leads_on(client):
    found = answer(client, q="the")
    text = page(client, q="the", off="L0N1")
    for place in ("values", "triggers"):
        total = group(found, place)["total"]
        assert f"{total} memories" in text_of(text)
        assert f"in={place}" in text
    assert 'href="/m/L0N' in text
    assert "off=L0N1" in text


def test_a_layer_alone(client):
    found = answer(client, q="the", layer=1, limit=200)
    hits = [hit for one in found["groups"] for hit in one["hits"]]
    assert hits
    assert {hit["layer"] for hit in hits} == {1}
    assert "in layer 1 only" in text_of(page(client, q="the", layer=1))


def test_empty_fields_of_the_form_mean_all(client):
    assert page(client, q="the", layer="", **{"in": ""}) == page(client, q="the")


def test_what_is_found_is_escaped_and_marked(client):
    text = page(client, q="script", **{"in": "triggers"})
    assert "<mark>script</mark>" in text
    assert "<script>document" not in text
    assert "&lt;" in text
    text = page(client, q="<b>\"'&")
    assert "<b>\"'" not in text
    assert "&lt;b&gt;" in text


@pytest.mark.parametrize("name", INDEXES)
def test_nothing_found_says_what_was_searched_and_what_else_to_try(client, name):
    text = text_of(page(client, q="zebra (", index=name))
    assert "Nothing found for" in text
    assert "What was searched" in text
    assert "What else to try" in text
    raw = page(client, q="zebra (", index=name, layer=1, **{"in": "values"})
    assert "All layers" in raw
    assert "Values and triggers" in raw
    # The links work: the letters themselves, as an expression.
    link = html.unescape(re.search(r'href="(/search[^"]*zebra%5C[^"]*)"', raw)[1])
    assert client.get(link).status_code == 200


def test_without_a_query_the_page_tells_what_there_is_and_each_example_finds_something(client):
    text = page(client)
    assert "What you can search for" in text
    links = re.findall(r'class="example" href="([^"]*)"', text)
    assert len(links) >= 3
    for link in links:
        assert "Nothing found" not in client.get(html.unescape(link)).text


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"q": "/(/"}, "'(' is not a valid regular expression"),
        ({"q": "/(?:(?:a{1000}){1000}){4}/"}, "is too large"),
        ({"q": "/(?R)/"}, "searches do not support"),
        ({"q": "x" * 201}, "has 201 characters; the page takes 200"),
        ({"q": "the", "layer": 9}, "There is no layer 9"),
        ({"q": "\ud800".encode("utf-8", "surrogatepass")}, None),
    ],
)
def test_what_cannot_be_searched_is_a_sentence(client, parameters, message):
    response = client.get("/api/search", params=parameters)
    if message is None:  # taken for other characters on the way in
        assert response.status_code == 200
        return
    assert response.status_code == 422
    assert message in response.json()["error"]
    text = text_of(page(client, 422, **parameters))
    assert message in text
    assert "Search" in text


def test_nothing_to_search_for_is_told_to_programs(client):
    response = client.get("/api/search")
    assert response.status_code == 422
    assert "The query is empty" in response.json()["error"]


@pytest.mark.parametrize(
    "parameters",
    [{"in": "keys"}, {"layer": "x"}, {"offset": -1}, {"limit": 0}, {"limit": 10**9}, {"prefix": 7}],
)
def test_parameters_that_make_no_sense_are_told(client, parameters):
    response = client.get("/api/search", params={"q": "the"} | parameters)
    assert response.status_code == 422
    assert "Invalid request" in response.json()["error"]


def test_an_expression_that_never_ends_is_stopped_soon(client, monkeypatch):
    monkeypatch.setattr(view, "MAX_SECONDS", 0.0)
    response = client.get("/api/search", params={"q": "/(a|aa)+$/"})
    assert response.status_code == 422
    assert "takes too long: stopped after 0 seconds" in response.json()["error"]


def test_frequent_words_are_counted_in_part_and_the_page_says_so(client, monkeypatch):
    every = group(answer(client, q="the"), "triggers")
    monkeypatch.setattr(view, "MAX_TRIGGERS", {True: 10, False: 20})
    some = group(answer(client, q="the"), "triggers")
    assert some["at_least"]
    assert some["total"] <= every["total"]
    assert some["sentences"] > 0
    text = text_of(page(client, q="the", **{"in": "triggers"}))
    assert f"at least {some['total']} memories" in text
    assert f"over the first {some['sentences']} sentences that contain it" in text
    typing = group(answer(client, q="the", prefix=1), "triggers")
    assert typing["sentences"] <= some["sentences"]


def test_an_index_that_cannot_be_made_searchable_can_be_browsed(
    served_folder, tmp_path, monkeypatch
):
    folder = Path(shutil.copytree(served_folder, tmp_path / "tiny"))
    (folder / "search.sqlite").unlink(missing_ok=True)

    def refused(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "touch", refused)
    with TestClient(make_app(Catalog.open([folder])), "http://127.0.0.1:8800") as client:
        response = client.get("/api/search", params={"q": "the"})
        assert response.status_code == 422
        assert "no search file (search.sqlite)" in response.json()["error"]
        assert str(tmp_path) not in response.text
        assert "You can browse all" in text_of(page(client, 422, q="the"))
        assert client.get("/m/L0N0").status_code == 200
        assert page(client)


def test_the_same_search_in_many_threads_gives_the_same(client):
    from concurrent.futures import ThreadPoolExecutor

    queries = ["the", "river", "city", "/r.*/"] * 6
    expected = {query: answer(client, q=query) for query in set(queries)}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: answer(client, q=query), queries))
    assert found == [expected[query] for query in queries]


def test_the_groups_of_a_search_are_documented(client):
    schema = client.get("/api/openapi.json").json()
    assert "/api/search" in schema["paths"]
    assert {"SearchResponse", "Group", "Hit"} <= set(schema["components"]["schemas"])


FILTERS = {"sign": "-1", "rank": 3, "max_active": 0.9, "bank": "dense"}


@pytest.mark.parametrize("name", INDEXES)
def test_filters_in_the_address_are_those_of_the_library(client, indexes, name):
    found = answer(client, q="the", index=name, limit=200, **FILTERS)
    for place in ("values", "triggers"):
        wanted = ffmem.search(
            indexes[name], "the", place, sign=-1, rank=3, max_active=0.9, bank="dense", limit=200
        )
        here = group(found, place)
        assert here["total"] == wanted.total
        assert [hit["cell"] for hit in here["hits"]] == [hit.cell for hit in wanted]
    text = page(client, q="the", index=name, **FILTERS)
    assert "filtered" in text
    for field, value in (("rank", "3"), ("max_active", "0.9")):
        assert re.search(rf'name="{field}"[^>]* value="{value}"', text)
    assert '<option value="-1" selected>' in text
    assert "sign=-1&amp;rank=3" in text  # links of this page keep them


@pytest.mark.parametrize(
    "filters", [{"rank": 0}, {"sign": 2}, {"kind": "deep"}, {"min_active": -1}, {"bank": "E3"}]
)
def test_filters_that_make_no_sense_are_refused(client, filters):
    assert client.get("/api/search", params={"q": "the", **filters}).status_code in (400, 422)
    assert client.get("/search", params={"q": "the", **filters}).status_code == 422


def test_empty_fields_of_the_form_are_no_filters(client):
    empty = dict.fromkeys(("sign", "rank", "kind", "min_active", "max_active", "bank"), "")
    assert answer(client, q="the", **empty)["groups"] == answer(client, q="the")["groups"]

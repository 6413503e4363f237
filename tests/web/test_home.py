"""The front page says what this is, and leads everywhere."""

import re
from html import unescape
from urllib.parse import parse_qs, urlsplit

import pytest

from ffmem.experiments.base import check_claims as claims
from ffmem.web.catalog import ServedIndex
from ffmem.web.views.home import FEATURED, find_examples, layer_bars


@pytest.fixture(scope="module")
def measured(catalog):
    """The index that has results; `plain` has none."""
    return catalog.get("tiny")


def test_it_tells_model_corpus_and_how_the_index_was_made(client, catalog):
    for name, served in [(name, one.current()) for name, one in catalog.folders.items()]:
        page = unescape(client.get("/", params={"index": name}).text)
        manifest = served.index.manifest
        model, source = manifest.model, manifest.corpus.sources[0]
        facts = (served.model, model.family, model.activation, manifest.dtype, manifest.projection)
        for told in (*facts, "lines.txt", manifest.coefficient, *manifest.versions.values()):
            assert told in page
        assert f"{model.layers} × {model.layout.per_layer}" in page
        assert f"{source.sentences:,}" in page
        for whole in (model.hash, manifest.corpus.hash, manifest.tokenizer):
            assert f'title="{whole}">{whole[:12]}…' in page


def test_no_folder_of_the_machine_is_shown(client, served_folder):
    for address in ("/", "/api/home"):
        assert str(served_folder.parent) not in client.get(address).text


def test_programs_get_the_same(client, catalog):
    answer = client.get("/api/home").json()
    manifest = catalog.get().index.manifest
    assert answer["indexes"] == list(catalog.folders)
    assert answer["model"]["hash"] == manifest.model.hash
    assert answer["made"]["t"] == manifest.t
    assert answer["corpus"][0]["tokens"] == manifest.corpus.sources[0].tokens
    assert len(answer["layers"]) == manifest.model.layers


def test_every_layer_is_one_click_away(client, catalog):
    page = client.get("/?off=L0N1").text
    for layer in range(catalog.get().index.n_layers):
        assert f'href="/layer/{layer}?off=L0N1"' in page


def test_without_results_it_names_the_command_and_still_has_a_picture(client):
    page = client.get("/?index=plain").text
    assert "ffmem report plain --corpus VALID --out plain-report" in page
    assert 'data-spec="/api/home/spec?index=plain"' in page
    assert client.get("/api/home?index=plain").json()["claims"] == []
    assert client.get("/api/home/spec?index=plain&theme=dark").json()["vconcat"]
    assert client.get("/api/home/picture?index=plain").text.startswith("<svg")


def test_with_results_it_shows_figures_and_every_verdict(client, measured):
    page = unescape(client.get("/").text)
    judged = claims(list(measured.results.values()))
    answer = client.get("/api/home").json()
    assert [one["claim"] for one in answer["claims"]] == [one.claim for one in judged]
    assert sum(answer["verdicts"].values()) == len(judged)
    for one in judged:
        assert one.claim in page
    shown = re.findall(r'data-spec="/api/figures/([^/"]*)/spec"', page)
    assert sorted(shown) == sorted(FEATURED)
    assert f"{len(FEATURED)} of {len(measured.results)} figures" in page


def test_the_strip_is_as_high_as_the_agreement_of_each_layer(measured):
    rates = {row["layer"]: row["rate"] for row in measured.results["agreement"].rows}
    found = layer_bars(measured)
    assert [step.layer for step in found] == [0, 1]
    assert max(step.height for step in found) == 100
    for step in found:
        assert step.height == pytest.approx(100 * rates[step.layer] / max(rates.values()))
    bare = layer_bars(ServedIndex("bare", measured.index, {}))
    assert max(step.height for step in bare) == 100


def test_examples_are_memories_of_the_index_and_their_tokens_are_searches(client, catalog):
    index = catalog.get().index
    page = client.get("/").text
    links = [unescape(found) for found in re.findall(r'<a [^>]*href="([^"]*)"', page)]
    assert find_examples(index)
    for one in find_examples(index):
        assert f"/m/{one.cell}" in links
        searches = [parse_qs(urlsplit(link).query).get("q") for link in links]
        assert [one.token] in searches
    assert any(link.startswith("/trace?text=") for link in links)


def test_examples_are_unusual_not_merely_frequent(catalog):
    """By the last token: share · log(share ÷ share of the layer), the largest of the layer."""
    index = catalog.get().index
    for one in find_examples(index):
        cell = index.layout.resolve(one.cell)
        memory = index[cell]
        layer = [
            trigger.last_token
            for other in index.memories(cell.layer)
            for trigger in (*other.triggers, *other.negative_triggers)
        ]
        shares = [
            [trigger.last_token for trigger in triggers].count(one.token) / len(triggers)
            for triggers in (memory.triggers, memory.negative_triggers)
            if triggers
        ]
        assert max(shares) > 2 * layer.count(one.token) / len(layer)


def test_a_random_memory_is_any_memory_of_the_index_or_of_a_layer(client, catalog):
    index = catalog.get().index
    cells = set()
    for _ in range(40):
        answer = client.get("/random?off=L0N1", follow_redirects=False)
        assert answer.status_code == 303
        assert answer.headers["cache-control"] == "no-store"
        place = urlsplit(answer.headers["location"])
        assert place.query == "off=L0N1"
        cells.add(index.layout.resolve(place.path.removeprefix("/m/")))
        assert client.get("/api/random?layer=1").json()["cell"].startswith("L1N")
    assert len(cells) > 5
    assert {cell.layer for cell in cells} == {0, 1}


def test_a_random_memory_of_no_layer_is_a_sentence(client):
    assert client.get("/random?layer=7").status_code == 404
    assert "layers 0 to 1" in client.get("/api/random?layer=-1").json()["error"]
    assert client.get("/api/random?layer=x").status_code == 422


def test_the_search_box_works_without_a_script_and_keeps_the_state(client):
    page = client.get("/?off=L0N1&index=plain").text
    (form,) = re.findall(r'<form class="ask".*?</form>', page, re.DOTALL)
    assert 'action="/search"' in form
    assert 'name="q"' in form
    assert '<input type="hidden" name="off" value="L0N1">' in form
    assert '<input type="hidden" name="index" value="plain">' in form

"""The page of a layer: every column sorts, filters stay in links, odd requests get sentences."""

import re
import statistics
from dataclasses import asdict
from html import unescape
from urllib.parse import parse_qs, urlsplit

import pytest
from markupsafe import escape

from ffmem.indexing.memory import visible_token
from ffmem.web.layer_table import LayerQuery, layer_page
from tests.web.conftest import HOSTILE


@pytest.fixture(params=["tiny", "plain"])
def served(request, catalog):
    """Both indexes, one after the other."""
    return catalog.get(request.param)


def links_of(page):
    """Return the addresses of a page's links."""
    return [unescape(found) for found in re.findall(r'<a [^>]*href="([^"]*)"', page)]


def cells_of(page):
    """Return the memories of a page in their order."""
    return re.findall(r'<td><a class="mono" href="[^"]*">(L\d+N\d+)</a>', page)


def test_page_and_api_show_the_same_memories_in_the_same_order(client, served):
    for sort in ("memory", "-max", "top", "-followed", "agreement"):
        asked = {"index": served.name, "sort": sort}
        page = client.get("/layer/1", params=asked)
        answer = client.get("/api/layer/1", params=asked).json()
        assert page.status_code == 200
        assert cells_of(page.text) == [one["cell"] for one in answer["rows"]]
        assert answer["rows"] == [
            asdict(one) for one in layer_page(served.index, 1, LayerQuery(sort)).rows
        ]
        assert answer["memories"] == answer["found"] == served.index.layout.widths[0]


def test_every_heading_sorts_and_sorts_the_other_way_the_second_time(client, served):
    page = client.get("/layer/0", params={"index": served.name}).text
    sorts = [link for link in links_of(page) if link.startswith("/layer/0?") and "sort=" in link]
    assert len(sorts) >= 9
    for link in sorts:
        once = client.get(link)
        assert once.status_code == 200
        (column,) = parse_qs(urlsplit(link).query)["sort"]
        other = column[1:] if column.startswith("-") else f"-{column}"
        again = [parse_qs(urlsplit(found).query).get("sort") for found in links_of(once.text)]
        assert [other] in again
        assert 'aria-sort="' in once.text


def test_filters_and_state_stay_in_the_links_of_the_page(client):
    asked = {"index": "tiny", "off": "L0N3", "text": "a & b", "has": "e", "least": "1"}
    page = client.get("/layer/0", params=asked).text
    sorts = [link for link in links_of(page) if link.startswith("/layer/0?") and "sort=" in link]
    for link in sorts:
        query = parse_qs(urlsplit(link).query)
        assert query["has"] == ["e"]
        assert query["least"] == ["1.0"]
        assert query["off"] == ["L0N3"]
        assert query["text"] == ["a & b"]
    (spec,) = re.findall(r'data-spec="([^"]*)"', page)
    answer = client.get(unescape(spec))
    passing = [point["cell"] for point in answer.json()["data"]["values"] if point["passes"]]
    assert set(passing) == {
        one["cell"] for one in client.get("/api/layer/0", params=asked).json()["rows"]
    }


def test_previous_and_next_layer_stop_at_the_ends(client):
    first, last = (client.get(f"/layer/{layer}").text for layer in (0, 1))
    assert 'rel="next" href="/layer/1"' in first
    assert 'rel="prev"' not in first
    assert 'rel="prev" href="/layer/0"' in last
    assert 'rel="next"' not in last


def test_every_layer_is_picked_with_the_same_sorting_and_filters(client):
    page = client.get("/layer/0?sort=-max&has=e").text
    for layer in (0, 1):
        assert f'<a href="/layer/{layer}?sort=-max&amp;has=e"' in page
    assert 'rel="next" href="/layer/1?sort=-max&amp;has=e"' in page


def test_a_table_over_all_layers_says_what_each_layer_says(client, served):
    asked = {"index": served.name}
    answer = client.get("/api/layers", params=asked).json()
    page = client.get("/layers", params=asked).text
    assert [one["layer"] for one in answer["layers"]] == list(range(served.index.n_layers))
    for one in answer["layers"]:
        rows = layer_page(served.index, one["layer"], LayerQuery()).rows
        known = [row for row in rows if row.agreement != "none"]
        agree = sum(row.agreement == "agrees" for row in known) / len(known)
        assert one["memories"] == served.index.layout.widths[one["layer"]]
        assert one["agreement"] == pytest.approx(agree)
        assert one["patterns"] == {}
        assert one["active_share"]["median"] == pytest.approx(
            statistics.median(row.active_share for row in rows)
        )
        assert f'href="/layer/{one["layer"]}?index={served.name}"' in page


def test_empty_fields_of_the_form_are_no_filters(client):
    asked = {"has": "", "least": "", "most": "", "agreement": "", "index": "tiny"}
    answer = client.get("/api/layer/0", params=asked)
    assert answer.json()["found"] == answer.json()["memories"]


@pytest.mark.parametrize(
    ("address", "status", "said"),
    [
        ("/layer/2", 404, "layers 0 to 1"),
        ("/layer/-1", 404, "layers 0 to 1"),
        ("/layer/five", 422, "layer"),
        ("/layer/0?sort=size", 422, "Sort by memory"),
        ("/layer/0?sort=--max", 422, "Sort by memory"),
        ("/layer/0?page=0", 404, "pages 1 to 1"),
        ("/layer/0?page=99999999999999999999", 404, "pages 1 to 1"),
        ("/layer/0?page=two", 422, "page"),
        ("/layer/0?least=nan", 422, "least"),
        ("/layer/0?most=101", 422, "most"),
        ("/layer/0?agreement=perhaps", 422, "There are: agrees"),
        ("/layer/0?index=elsewhere", 404, "elsewhere"),
        (f"/layer/0?has={'x' * 5000}", 422, "5,000 characters"),
    ],
)
def test_odd_requests_are_answered_with_a_sentence(client, address, status, said):
    page, answer = client.get(address), client.get(f"/api{address}")
    assert page.status_code == answer.status_code == status
    assert said in answer.json()["error"]
    assert said in unescape(page.text)


@pytest.mark.parametrize("kind", ["spec", "picture"])
def test_pictures_refuse_what_the_table_refuses(client, kind):
    assert client.get(f"/api/layer/9/{kind}").status_code == 404
    assert client.get(f"/api/layer/0/{kind}?sort=size").status_code == 422
    assert client.get(f"/api/layer/0/{kind}?theme=sepia").status_code == 422


def test_the_still_picture_is_there_for_those_without_a_script(client):
    page = client.get("/layer/0?index=tiny").text
    (image,) = re.findall(r'<noscript>.*?<img src="([^"]*)" alt="[^"]+"', page, re.DOTALL)
    drawn = client.get(unescape(image))
    assert drawn.headers["content-type"] == "image/svg+xml"
    assert drawn.text.startswith("<svg")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_filter_is_shown_as_text(client, hostile):
    page = client.get("/layer/0", params={"has": hostile})
    assert page.status_code == 200
    assert hostile in unescape(page.text)
    for sign in ("<script>document", "<img src=x", "<!-- a comment"):
        assert sign not in page.text


def test_tokens_that_are_markup_are_escaped(client, catalog):
    """Some token of the tiny vocabulary is `<`: it stands in many rows."""
    page = client.get("/layer/0?index=tiny&has=<").text
    answer = client.get("/api/layer/0?index=tiny&has=<").json()
    matches = {one["match"]["token"] for one in answer["rows"]}
    assert matches
    for token in matches:
        assert f'<bdi class="tok">{escape(visible_token(token))}</bdi>' in page

"""The circuit page and its twins: everything is in the URL, and works without a script."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest

import ffmem
from tests.web.test_trace import Page

TEXT = "The river runs"


@pytest.fixture(scope="module")
def found(client):
    return client.get("/api/circuit", params={"text": TEXT, "nodes": 6}).json()


def page(client, **parameters):
    response = client.get("/circuit", params={"text": TEXT, "nodes": 6, **parameters})
    assert response.status_code == 200
    return response.text


def test_the_api_gives_what_the_function_gives(found, served_folder):
    expected = ffmem.circuit(str(served_folder), TEXT, nodes=6, device="cpu").to_dict()
    assert [one["id"] for one in found["nodes"]] == [one["id"] for one in expected["nodes"]]
    assert found["faithfulness"] == pytest.approx(expected["faithfulness"], abs=1e-4)
    assert found["ablation"] == "mean"


def test_the_page_leads_to_memories_and_pins_nodes(client, found):
    first = found["nodes"][0]
    shown = Page(page(client))
    assert f"/m/{first['cell']}" in "".join(shown.links)
    assert any(name == "svg" for name, _ in shown.tags)
    pin = next(link for link in shown.links if "pin=" in link)
    assert parse_qs(urlsplit(pin).query)["pin"] == [first["id"]]
    pinned = page(client, pin=first["id"])
    assert "unpin" in pinned
    assert "Group them as" in pinned
    assert re.search(r'class="node \w+ pinned"', pinned)


def test_pinned_nodes_become_a_group_that_is_switched_off(client, found):
    ids = ",".join(one["id"] for one in found["nodes"][:2])
    parameters = {"text": TEXT, "nodes": 6, "pin": ids, "name": "two of them"}
    response = client.get("/circuit", params=parameters, follow_redirects=False)
    assert response.status_code == 303
    query = parse_qs(urlsplit(response.headers["location"]).query)
    assert query["groups"] == [f"two of them:{ids}"]
    assert "pin" not in query
    assert "name" not in query
    grouped = Page(client.get(response.headers["location"]).text)
    off = next(link for link in grouped.links if "without=" in link)
    text = client.get(off).text
    assert "Without two of them" in text
    assert "off · undo" in text
    parameters = {"text": TEXT, "nodes": 6, "groups": f"a:{ids}", "without": "a"}
    one = client.get("/api/circuit", params=parameters).json()
    (group,) = one["groups"]
    assert one["switched_off"]["logit"] == pytest.approx(one["logit"] - group["exact"], abs=1e-4)


def test_the_viewers_file(client, found):
    first = found["nodes"][0]
    parameters = {"text": TEXT, "nodes": 6, "pin": first["id"]}
    viewer = client.get("/api/circuit/viewer", params=parameters).json()
    assert len(viewer["qParams"]["pinnedIds"]) == 1
    assert len(viewer["nodes"]) == len(found["nodes"]) + len(found["ends"]) + 1


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"nodes": 0}, "1 to 64 nodes"),
        ({"nodes": 65}, "1 to 64 nodes"),
        ({"pin": "L0N3"}, "is not a node"),
        ({"groups": "a"}, "is not a group"),
        ({"groups": "<b>:L0N3@1"}, "cannot name a group"),
        ({"without": "a"}, "There is no group"),
        ({"target": "two words"}, "not one token"),
        ({"text": "word " * 200}, "Shorten it"),
    ],
)
def test_bad_requests(client, parameters, message):
    response = client.get("/api/circuit", params={"text": TEXT, **parameters})
    assert response.status_code in (404, 422), response.text
    assert message in str(response.json())


def test_hostile_text_stays_text(client):
    text = page(client, text="<script>document.title='owned'</script> was", nodes=2)
    assert "<script>document" not in text


def test_without_a_prompt_the_page_says_what_it_does(client):
    assert "What you will see" in client.get("/circuit").text


def test_a_memorys_page_shows_what_feeds_it(client):
    assert "Find them" in client.get("/m/L1N3").text
    assert 'id="sources"' not in client.get("/m/L0N3").text
    shown = client.get("/m/L1N3", params={"sources": 1, "text": TEXT}).text
    assert "Lower memories whose values match its keys" in shown
    assert "On your prompt" in shown
    twin = client.get("/api/m/L1N3/sources", params={"text": TEXT}).json()
    assert twin["by_weights"][0]["cell"].startswith("L0N")
    assert twin["on_prompt"]

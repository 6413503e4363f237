"""Patterns on the pages: what was seen, by whom, how well it holds; everything escaped."""

import html
import re
import shutil
from dataclasses import asdict

import pytest
from starlette.testclient import TestClient

import ffmem
from ffmem.web.app import make_app
from ffmem.web.catalog import Catalog
from ffmem.web.layer_table import LayerQuery, layer_page
from ffmem.web.patterns import (
    CHOICES,
    PatternCount,
    RowPattern,
    count_patterns,
    layer_patterns,
    memory_patterns,
    stored_patterns,
)
from ffmem.web.worker import ModelWorker
from tests.patterns.planting import pattern, plant

EVIL = "<script>document.title='owned'</script> {{ 7 * 7 }} \"onclick=x\""
SCORES = {
    "held_ranks": (8, 9),
    "held": 6,
    "precision": 0.9,
    "recall": 0.33,
    "base": 0.01,
    "lift": 40.2,
    "p_value": 1e-5,
    "q_value": 1e-3,
}
AUTOMATIC = [
    pattern("L1N3", 1, "ends with “river”", what="river", **SCORES),
    pattern("L1N3", 2, EVIL, "semantic", rule="topic", what="boats", ranks=(2, 4, 5)),
    pattern("L1N3", 1, "about bridges", "semantic", sign=-1, ranks=(1, 2, 6)),
    pattern("L1N9", 1, "about bridges", "semantic"),
    pattern("L0N2", 1, "numbers", ranks=(3, 4, 5)),
]
HUMAN = [pattern("L1N3", 1, "rivers of Europe", "semantic", rule="person", ranks=(1, 3, 5))]


@pytest.fixture(scope="module")
def visited(served_folder, tmp_path_factory):
    """A site with one index and patterns of two sources, and the index."""
    folder = tmp_path_factory.mktemp("with-patterns") / "tiny"
    shutil.copytree(served_folder, folder)
    index = ffmem.open(folder)
    plant(index, "automatic", *AUTOMATIC)
    plant(index, "human", *HUMAN)
    app = make_app(Catalog.open([folder]), ModelWorker(device="cpu"))
    with TestClient(app, "http://127.0.0.1:8800") as visitor:
        yield visitor, index


@pytest.fixture
def changing(visited, tmp_path):
    """A site over a copy that a test may change."""
    _, index = visited
    shutil.copytree(index.folder, tmp_path / "tiny")
    app = make_app(Catalog.open([tmp_path / "tiny"]), ModelWorker(device="cpu"))
    with TestClient(app, "http://127.0.0.1:8800") as visitor:
        yield visitor, ffmem.open(tmp_path / "tiny")


def text_of(page):
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", page)).split())


def test_a_memory_shows_each_pattern_with_kind_source_and_scores(visited):
    client, _ = visited
    page = client.get("/m/L1N3").text
    text = text_of(page)
    assert "rivers of Europe" in text
    assert "semantic, m > 0 · people · shown by 3 of the first 12 triggers" in text
    assert (
        "shallow, m > 0 · detected · shown by 3 of the first 12 triggers, 2 of 6 held out;"
        " 40 × more often than by chance" in text
    )
    assert "(source: automatic): Found by a program; not the paper's protocol." in text
    assert text.index("rivers of Europe") < text.index("ends with “river”")
    assert page.count('class="dot shallow"') == 1
    assert page.count('class="dot semantic"') == 3


def test_each_trigger_carries_the_numbers_of_what_it_shows(visited):
    client, index = visited
    page = client.get("/m/L1N3").text
    view = memory_patterns(index, index["L1N3"])
    marked = dict(re.findall(r'<div class="trigger" id="([tm]\d+)" data-patterns="([\d ]+)"', page))
    expected = {}
    for one, label in zip([*HUMAN, *AUTOMATIC[:3]], range(1, 5), strict=True):
        for rank in (*one.ranks, *one.held_ranks):
            expected.setdefault(f"{'t' if one.sign > 0 else 'm'}{rank}", []).append(str(label))
    assert marked == {place: " ".join(labels) for place, labels in expected.items()}
    assert [one.label for one in view.views] == [1, 2, 3, 4]
    # Every number leads to its pattern, every pattern to its first trigger.
    targets = set(re.findall(r'id="([^"]+)"', page))
    assert set(re.findall(r'class="mark \w+" href="#([^"]+)"', page)) <= targets


def test_nothing_of_a_pattern_becomes_markup(visited):
    client, _ = visited
    paths = ["/m/L1N3", "/layer/1?has=script", "/search?q=owned", "/search?q=owned&in=patterns"]
    for path in paths:
        page = client.get(path).text
        assert "<script>document" not in page
        assert "&lt;script&gt;document" in page
        assert "{{ 7 * 7 }}" in page
        assert '"onclick=x"' not in page


def test_json_has_the_patterns_of_a_memory(visited):
    client, _ = visited
    answer = client.get("/api/m/L1N3").json()
    assert answer["cell"] == "L1N3"
    assert [one["source"] for one in answer["patterns"]] == ["human"] + ["automatic"] * 3
    first = answer["patterns"][1]
    assert first | SCORES | {"held_ranks": [8, 9]} == first
    assert (first["ranks"], first["of"], first["sign"]) == ([1, 2, 3], 12, 1)
    assert answer["patterns"][0]["lift"] is None


def test_a_memory_without_patterns_says_so_in_a_line(visited, client):
    ours, _ = visited
    page = ours.get("/m/L0N0").text
    assert "No pattern was found in these triggers." in page
    assert "patterns.js" not in page
    nobody = text_of(client.get("/m/L0N0").text)
    assert "No patterns were detected in this index yet: run ffmem patterns detect tiny." in nobody


@pytest.mark.parametrize("choice", CHOICES)
def test_a_layer_can_be_filtered_by_patterns(visited, choice):
    client, index = visited
    planted = {}
    for one in [*HUMAN, *AUTOMATIC]:
        if one.cell.layer == 1:
            planted.setdefault(one.cell.memory, set()).add(one.kind)
    wanted = {
        memory
        for memory in range(index.layout.widths[0])
        for kinds in [planted.get(memory, set())]
        if (choice in kinds) or (choice == "any" and kinds) or (choice == "none" and not kinds)
    }
    answer = client.get("/api/layer/1", params={"pattern": choice}).json()
    assert {row["memory"] for row in answer["rows"]} == wanted
    assert answer["found"] == len(wanted)
    page = client.get("/layer/1", params={"pattern": choice}).text
    assert f'<option value="{choice}" selected>{choice} ({len(wanted)})' in page


def test_the_text_filter_looks_into_descriptions_too(visited):
    client, index = visited
    found = layer_page(index, 1, LayerQuery(has="BRIDGES"))
    by_pattern = {row.memory: row.pattern for row in found.rows}
    assert {3, 9} <= set(by_pattern)
    assert by_pattern[3] == RowPattern("about bridges", "semantic", "automatic", -1, 3)
    tokens = layer_page(index, 1, LayerQuery(has="e"))
    assert all(row.match or row.pattern for row in tokens.rows)
    assert layer_patterns(index, 1).first(3, "europe").source == "human"
    page = text_of(client.get("/layer/1?has=bridges").text)
    assert "about bridges +3" in page
    assert "source: human, automatic." in page


def test_an_unknown_choice_is_refused_in_a_sentence(client):
    answer = client.get("/api/layer/1?pattern=deep")
    assert answer.status_code == 422
    assert "There is no pattern 'deep'. There are: shallow, semantic, any, none." in answer.text


def test_a_layer_without_patterns_looks_as_before(client):
    page = client.get("/layer/1").text
    assert 'name="pattern"' not in page
    assert "Token contains" in page
    assert client.get("/api/layer/1?pattern=any").json()["found"] == 0


def test_one_box_finds_patterns_in_a_group_of_their_own(visited, client):
    ours, _ = visited
    answer = ours.get("/api/search?q=river&prefix=1").json()
    assert [group["name"] for group in answer["groups"]] == ["values", "triggers", "patterns"]
    group = answer["groups"][-1]
    assert (group["total"], group["at_least"]) == (1, False)
    (hit,) = group["hits"]
    assert (hit["cell"], hit["matches"], hit["rank"], hit["side"]) == ("L1N3", 2, 1, "positive")
    assert (hit["kind"], hit["source"]) == ("semantic", "human")
    assert hit["before"] + hit["match"] + hit["after"] == "rivers of Europe"
    page = text_of(ours.get("/search?q=bridges&in=patterns").text)
    assert "patterns of 2 memories" in page
    assert "semantic · detected, source: automatic · m < 0" in page
    names = [group["name"] for group in client.get("/api/search?q=the").json()["groups"]]
    assert names == ["values", "triggers"]
    nothing = client.get("/search?q=the&in=patterns")
    assert nothing.status_code == 200
    assert "ffmem patterns detect" in text_of(nothing.text)


def test_the_front_page_counts(visited, client):
    ours, index = visited
    assert count_patterns(index) == [
        PatternCount("human", lists=1, memories=1, shallow=0, semantic=1),
        PatternCount("automatic", lists=4, memories=3, shallow=2, semantic=3),
    ]
    assert ours.get("/api/home").json()["patterns"] == list(map(asdict, count_patterns(index)))
    page = text_of(ours.get("/").text)
    assert (
        "detected by a program (source: automatic): 3 of 48 memories have at least one; 2 shallow"
        in page
    )
    assert client.get("/api/home").json()["patterns"] == []


def test_patterns_that_are_written_while_the_site_runs_are_shown(changing):
    client, index = changing
    assert "a volcano" not in client.get("/m/L0N0").text
    plant(index, "explained", pattern("L0N0", 1, "a volcano", "semantic", rule="explained"))
    page = text_of(client.get("/m/L0N0").text)
    assert "a volcano" in page
    assert "Described by a language model; not the paper's protocol." in page
    assert client.get("/api/search?q=volcano").json()["groups"][-1]["total"] == 1


def test_patterns_of_an_earlier_state_are_said_and_not_shown(changing):
    client, index = changing
    manifest = index.folder / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    assert stored_patterns(index).sources == []
    for path in ("/m/L1N3", "/layer/1", "/search?q=zebra"):
        page = text_of(client.get(path).text)
        assert "(source: automatic) from before this index changed" in page
        assert "rivers of Europe" not in page


def cut(path):
    path.write_bytes(path.read_bytes()[:20])


DAMAGES = {
    "manifest": lambda index: cut(index.folder / "patterns/human/manifest.json"),
    "layer": lambda index: cut(index.folder / "patterns/automatic/found/layer-001.parquet"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_patterns_do_not_take_the_memory_from_sight(changing, damage):
    client, index = changing
    damage(index)
    for path in ("/m/L1N3", "/layer/1", "/layers", "/"):
        page = client.get(path)
        assert page.status_code == 200
        assert "cannot be read; `ffmem verify`" in text_of(page.text)
        assert str(index.folder) not in page.text
    for path in ("/api/m/L1N3", "/api/search?q=river"):
        assert str(index.folder) not in client.get(path).text

"""Every kind of memory in the explorer: places, what coefficients are, and where no value is."""

import json
import re
from html import unescape

import pytest
from starlette.testclient import TestClient

import ffmem
from ffmem.cells import Cell
from ffmem.indexing.memory import NO_VALUE, NO_VALUES
from ffmem.web.app import make_app
from ffmem.web.catalog import Catalog
from ffmem.web.layer_table import OF_VALUES
from ffmem.web.views.memory import snippets
from ffmem.web.worker import ModelWorker
from tests.conftest import DENSE, OURS, text_model
from tests.tiny import HEADS, MEMORIES

PAGES = ("/", "/layer/1", "/m/L1N17", "/search", "/search?q=river", "/trace", "/figures")
TEXT = "The river runs through"


@pytest.fixture(scope="module")
def folders(tokenizer, corpus_file, tmp_path_factory):
    """An index of each kind, named by it, of a model that lies in a folder."""
    root = tmp_path_factory.mktemp("kinds")
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    for kind in DENSE:
        text_model(OURS[kind]).save_pretrained(root / "models" / kind)
        tokenizer.save_pretrained(root / "models" / kind)
        ffmem.index(str(root / "models" / kind), corpus, root / kind, t=6, threads=1)
    return [root / kind for kind in DENSE]


@pytest.fixture(scope="module")
def indexes(folders):
    return Catalog.open(folders)


@pytest.fixture(scope="module")
def visitor(indexes):
    app = make_app(indexes, ModelWorker(device="cpu"))
    with TestClient(app, "http://127.0.0.1:8800") as client:
        yield lambda address, kind, **more: client.get(
            address.partition("?")[0], params={"index": kind, **_query(address), **more}
        )


def _query(address):
    return dict(part.split("=") for part in address.partition("?")[2].split("&") if part)


def words(page):
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", "", page)))


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("address", PAGES)
def test_every_page_opens_and_those_of_a_lambda_layer_say_that_no_value_is_static(
    visitor, kind, address
):
    page = visitor(address, kind)
    assert page.status_code == 200
    assert ("no static value" in words(page.text)) == (kind == "lambda")


@pytest.mark.parametrize("kind", DENSE)
def test_the_page_of_a_memory_says_what_show_says(visitor, indexes, kind):
    memory = indexes.get(kind).index["L1N17"]
    page = words(visitor("/m/L1N17", kind).text)
    assert visitor("/api/m/L1N17", kind).json() == memory.to_dict() | {"patterns": []}
    if memory.head_slot:
        assert str(memory.head_slot) in page
    if memory.kind.note:
        assert memory.kind.note in page
    assert (NO_VALUE in page) == (kind == "lambda")
    assert ("promotes" in page) == (kind != "lambda")


@pytest.mark.parametrize("kind", DENSE)
def test_a_layer_lists_its_memories_by_what_is_known_of_them(visitor, indexes, kind):
    index = indexes.get(kind).index
    answer = visitor("/api/layer/1", kind, sort="-max").json()
    assert answer["found"] == MEMORIES
    assert answer["notes"] == index.manifest.model.kind.notes
    for row in answer["rows"]:
        memory = index[row["cell"]]
        assert row["max"] == pytest.approx(memory.stats.max)
        assert row["place"] == (memory.head_slot and memory.head_slot.to_dict())
        if kind == "lambda":
            assert (row["top"], row["bottom"], row["probability"]) == ([], [], None)
            assert (row["agreement"], row["followed"], row["followable"]) == (None, None, None)
        else:
            assert row["top"][0] == memory.value.top[0].token
    page = words(visitor("/layer/1", kind).text)
    assert ("Agreement" in page) == (kind != "lambda")
    for note in index.manifest.model.kind.notes:
        assert note in page


def test_what_needs_values_is_refused_where_there_are_none(visitor):
    for name in OF_VALUES:
        refused = visitor("/api/layer/1", "lambda", sort=name)
        assert refused.status_code == 422
        assert f"sorted by {name}" in refused.json()["error"]
    assert visitor("/layer/1", "lambda", agreement="agrees").status_code == 422
    assert visitor("/api/layer/1/spec", "lambda", agreement="agrees").status_code == 422
    for address in ("/search", "/api/search"):
        refused = visitor(address, "lambda", q="river", **{"in": "values"})
        assert refused.status_code == 422
        assert "Cannot search in values" in unescape(refused.text)
    assert visitor("/layer/1", "lambda", has="river").status_code == 200


def test_a_search_of_everything_leaves_values_out_where_there_are_none(visitor):
    found = visitor("/api/search", "lambda", q="river").json()
    assert [group["name"] for group in found["groups"]] == ["triggers"]
    assert NO_VALUES in found["notes"]
    assert found["groups"][0]["total"]
    assert all(hit["tokens"] == [] for hit in found["groups"][0]["hits"])
    named = visitor("/api/search", "lambda", q="L1N17").json()
    assert named["groups"][0]["hits"][0]["cell"] == "L1N17"
    found = visitor("/api/search", "persistent", q="river").json()
    assert [group["name"] for group in found["groups"]] == ["values", "triggers"]


def test_pictures_of_a_layer_show_weights_by_their_mean_and_no_agreement_without_values(visitor):
    fields = {}
    for kind in DENSE:
        spec = visitor("/api/layer/1/spec", kind).json()
        encoding = spec["encoding"]
        fields[kind] = encoding["x"]["field"]
        assert ("field" in encoding["color"]) == (kind != "lambda")
        told = {tip["field"] for tip in encoding["tooltip"]}
        for row in spec["data"]["values"]:
            assert told | {fields[kind], encoding["y"]["field"], "passes", "url"} == set(row)
        assert ("place" in told) == (kind in ("persistent", "lambda"))
        assert visitor("/api/layer/1/picture", kind).status_code == 200
        assert visitor("/api/home/picture", kind).status_code == 200
    weights = {kind for kind, field in fields.items() if field == "mean"}
    assert weights == {"softmax", "persistent"}


def test_home_names_the_kind_and_what_must_be_known_of_it(visitor, indexes):
    for kind in DENSE:
        model = indexes.get(kind).index.manifest.model
        told = visitor("/api/home", kind).json()["model"]
        assert (told["memory"], told["has_values"]) == (kind, kind != "lambda")
        assert told["notes"] == model.kind.notes
        page = words(visitor("/", kind).text)
        for note in model.kind.notes:
            assert note in page
    size = MEMORIES // HEADS
    assert f"persistent, {HEADS} heads × {size} slots" in words(visitor("/", "persistent").text)


@pytest.mark.parametrize("kind", DENSE)
def test_a_prompt_is_traced_and_a_memory_switched_off(visitor, kind):
    page = visitor("/trace", kind, text=TEXT, off="L1N17", generate=2)
    assert page.status_code == 200
    assert "L1N17 off" in words(page.text)
    assert ("no static values" in words(page.text)) == (kind == "lambda")
    answer = visitor("/api/trace", kind, text=TEXT, grid=False).json()
    assert all(layer["memories"] for layer in answer["layers"])
    assert (answer.get("values") == "input") == (kind == "lambda")


@pytest.mark.parametrize("kind", DENSE)
def test_tokens_are_colored_and_neighbours_found(visitor, indexes, kind):
    page = visitor("/m/L1N17", kind, tokens="true").text
    first = indexes.get(kind).index["L1N17"].triggers[0]
    titles = re.findall(r'<span class="t [^"]*" title="([^"]*)">', page)[: first.length]
    assert float(titles[-1].replace("−", "-")) == pytest.approx(first.coefficient, rel=1e-2)
    near = visitor("/api/m/L1N17/similar", kind, by="key").json()
    assert near["memories"]
    assert near["value_note"] == (NO_VALUES if kind == "lambda" else None)
    by_value = visitor("/api/m/L1N17/similar", kind, by="value")
    assert by_value.status_code == (422 if kind == "lambda" else 200)
    assert ("similar=value" in page) == (kind != "lambda")


@pytest.mark.parametrize("kind", ["relu", "persistent", "lambda"])
def test_the_code_to_copy_switches_the_memory_off(indexes, kind):
    import torch

    from ffmem.interventions.edits import Edits
    from ffmem.interventions.forward import apply_edits

    model = indexes.get(kind).index.manifest.model
    found = snippets("x", model, Cell(1, 3))
    assert list(found) == ["ffmem", "Hugging Face"]
    names = {}
    exec(found["Hugging Face"].replace('"MODEL"', json.dumps(model.source)), names)
    ids = torch.tensor([[3, 9, 20, 7, 11, 12]])
    with torch.no_grad():
        hooked = names["model"](ids).logits
        names["handle"].remove()
        plain = names["model"](ids).logits
    memories = ffmem.load(model.source, device="cpu")
    with apply_edits(memories, Edits.of(off=["L1N3"])):
        edited = memories.logits(ids)
    assert torch.allclose(hooked, edited, atol=1e-4)
    assert not torch.allclose(hooked, plain, atol=1e-6)

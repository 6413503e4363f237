"""Layers that differ in width, some without memories, through everything that reads memories."""

import csv
import gzip
import json
import shutil
from itertools import pairwise

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from starlette.testclient import TestClient
from torch.nn.functional import cosine_similarity

import ffmem
from ffmem.annotation.sampling import draw_plan
from ffmem.cli import cli
from ffmem.errors import FfmemError, UnknownCell
from ffmem.experiments.base import NAMES
from ffmem.indexing import worker
from ffmem.indexing.partials import Partials
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.interventions.checkpoint import edit_weights
from ffmem.interventions.compare import compare
from ffmem.interventions.edits import Edits
from ffmem.interventions.forward import apply_edits
from ffmem.models.load import describe
from ffmem.models.memories import Memories
from ffmem.patterns.store import Patterns
from ffmem.web.app import make_app
from ffmem.web.catalog import Catalog
from ffmem.web.worker import ModelWorker
from tests.conftest import text_model
from tests.indexing.folders import content, indexed, write_corpus
from tests.tiny import WIDTHS, ragged, tiny_tokenizer

THERE = [layer for layer, width in enumerate(WIDTHS) if width]
EMPTY = [layer for layer, width in enumerate(WIDTHS) if not width]
PROMPT = "w5 w9 w12 w7"


def cells(index):
    return [f"L{layer}N{memory}" for layer in THERE for memory in range(index.layout.widths[layer])]


@pytest.fixture(scope="module")
def model():
    return ffmem.load(ragged(), tiny_tokenizer())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt", n=90)


@pytest.fixture(scope="module")
def index(model, corpus, tmp_path_factory):
    return indexed(tmp_path_factory.mktemp("ragged") / "index", corpus, model, t=24)


@pytest.fixture(scope="module")
def with_patterns(index):
    ffmem.detect(index)
    return index


# The index.


def test_every_layer_has_its_own_width(model, index):
    assert model.layout.widths == index.layout.widths == WIDTHS
    assert len(index) == sum(WIDTHS)
    assert list(map(str, index)) == cells(index)
    assert "181 memories in 6 layers of" in repr(index)
    assert describe(model)["memories"] == WIDTHS


def test_files_of_a_layer_have_a_row_for_each_of_its_memories(index):
    for kind in ("triggers", "stats", "samples", "values"):
        for layer, width in enumerate(WIDTHS):
            table = pq.read_table(index.folder / layer_file(kind, layer))
            assert table.num_rows == width
            assert table["memory"].to_pylist() == list(range(width))


def test_every_memory_is_that_of_its_layer(model, index):
    """The strongest prefix of each memory, read anew, has the coefficient that the index says."""
    sentences = list(index.sentences.rows(0, index.sentences.n_sentences))
    strongest = [torch.full((width,), -torch.inf) for width in WIDTHS]
    for sentence in sentences:
        for layer, found in enumerate(model.trace(torch.tensor([[0, *sentence.ids]]))):
            if WIDTHS[layer]:
                best = found.coefficients[0, 1:].amax(dim=0)
                strongest[layer] = torch.maximum(strongest[layer], best)
    for layer in range(len(WIDTHS)):
        shown = list(index.memories(layer))
        assert [memory.cell.memory for memory in shown] == list(range(WIDTHS[layer]))
        for memory, expected in zip(shown, strongest[layer].tolist(), strict=True):
            assert memory.stats.max == pytest.approx(expected, rel=1e-4, abs=1e-6)
            assert memory.to_dict() == index[str(memory.cell)].to_dict()


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ("L0N0", "layer 0 has no memories"),
        ("L4N7", "layer 4 has memories 0 to 6"),
        ("L6N0", "the model has layers 0 to 5"),
        ("L2E0N0", "layer 2 has memories 0 to 149"),
    ],
)
def test_a_memory_that_is_not_there_is_refused_with_what_is(model, index, cell, found):
    asked = (
        lambda: index[cell],
        lambda: ffmem.trace(model, PROMPT, off=[cell]),
        lambda: ffmem.effect(model, PROMPT, cells=[cell]),
        lambda: ffmem.neighbours(model, cell),
    )
    for ask in asked:
        with pytest.raises(UnknownCell, match=f"no memory {cell}: {found}"):
            ask()


class Killed(BaseException):
    """Stands for the end of the process."""


def test_a_killed_run_resumes_and_ends_in_the_same_bytes(tmp_path, monkeypatch, model, corpus):
    monkeypatch.setattr(worker, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(worker, "COMMIT_SHARE", 0.0)
    indexed(tmp_path / "whole", corpus, model)
    commit, n = Partials.commit, iter(range(9))

    def killed(self, *given):
        commit(self, *given)
        if next(n) == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Partials, "commit", killed)
        with pytest.raises(Killed):
            indexed(tmp_path / "killed", corpus, model)
    so_far = ffmem.Index(tmp_path / "killed", unfinished=True)
    assert [len(list(so_far.memories(layer))) for layer in range(len(WIDTHS))] == WIDTHS
    indexed(tmp_path / "killed", corpus, model)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_extending_equals_merging_and_both_are_sound(tmp_path, model):
    a, b = (write_corpus(tmp_path / f"{x}.txt", n=40, seed=ord(x)) for x in "ab")
    indexed(tmp_path / "a", a, model)
    indexed(tmp_path / "b", b, model)
    ffmem.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    ffmem.extend(tmp_path / "a", ffmem.Corpus(str(b), unit="line"), model=model)
    assert content(tmp_path / "a") == content(tmp_path / "merged")
    assert ffmem.verify(tmp_path / "merged") == []


def test_a_search_finds_all_memories_that_hold_a_word_and_no_others(index):
    def holding(place, layer=None):
        found = ffmem.search(index, "w7", place, limit=1000, layer=layer)
        return {hit.cell for hit in found}

    by_value, by_trigger = set(), set()
    for cell in index:
        memory = index[cell]
        ends = [token.token for token in (*memory.value.top, *memory.value.bottom)]
        texts = [one.prefix for one in (*memory.triggers, *memory.negative_triggers)]
        by_value |= {str(cell)} if "w7" in ends else set()
        by_trigger |= {str(cell)} if any("w7" in text.split() for text in texts) else set()
    assert holding("values") == by_value
    assert holding("triggers") == by_trigger
    for layer in range(len(WIDTHS)):
        inside = {cell for cell in by_trigger if cell.startswith(f"L{layer}N")}
        assert holding("triggers", layer) == inside


def test_a_file_with_a_row_too_few_is_not_sound(index, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(index.folder, folder)
    path = folder / layer_file("stats", 4)
    pq.write_table(pq.read_table(path)[:6], path)
    assert any("stats/layer-004.parquet" in problem for problem in ffmem.verify(folder))


# The model at work.


def test_a_trace_shows_layers_without_memories_without_them(model, index):
    found = ffmem.trace(index, PROMPT, model=model, top=200, grid=True)
    assert [len(layer.memories) for layer in found.layers] == WIDTHS
    for layer in EMPTY:
        shown = found.layers[layer]
        assert (shown.ff_top, shown.active, shown.memories) == ([], None, [])
        assert shown.case == "residual"
        assert all(place.ff is None and place.case == "residual" for place in found.grid[layer])
    for layer in THERE:
        assert found.layers[layer].ff_top
        assert all(place.ff is not None for place in found.grid[layer])
        assert all(memory.percentile is not None for memory in found.layers[layer].memories)
    assert str(found).count(" – ") >= len(EMPTY)
    best = ffmem.trace(index, PROMPT, model=model, top=1)
    assert [len(layer.memories) for layer in best.layers] == [min(1, width) for width in WIDTHS]
    json.dumps(found.to_dict(), allow_nan=False)


def test_effects_are_those_of_the_model_with_the_memory_off(model):
    found = ffmem.effect(model, PROMPT, cells=cells(model), candidates=0, top=200, integrated=True)
    tokens = torch.tensor([[0, *(int(word[1:]) for word in PROMPT.split())]])

    def log_p():
        return float(model.logits(tokens)[0, -1].log_softmax(0)[found.target.id])

    clean = log_p()
    assert sorted(str(one.cell) for one in found.memories) == sorted(cells(model))
    for one in found.memories[:40]:
        with apply_edits(model, Edits.of(off=[one.cell])):
            assert log_p() - clean == pytest.approx(one.change, abs=1e-4)
    for name in ("gradient", "direct", "integrated"):
        assert found.correlation[name] > 0.5


def test_candidates_are_the_memories_of_largest_estimates(model):
    every = ffmem.effect(model, PROMPT, cells=cells(model), candidates=0, top=200)
    strongest = max(every.memories, key=lambda one: abs(one.gradient))
    (chosen,) = ffmem.effect(model, PROMPT, candidates=1).memories
    assert chosen.cell == strongest.cell


@pytest.mark.parametrize("by", ["value", "key"])
def test_neighbours_are_looked_for_in_all_layers(model, by):
    read = model.output_directions if by == "value" else model.keys
    own = read(4)[3]
    cosines = {
        f"L{layer}N{memory}": float(cosine_similarity(read(layer)[memory], own, dim=0))
        for layer, width in enumerate(WIDTHS)
        for memory in range(width)
    }
    del cosines["L4N3"]
    expected = sorted(cosines, key=lambda cell: -abs(cosines[cell]))
    assert [str(one.cell) for one in ffmem.neighbours(model, "L4N3", by=by, n=300)] == expected


def test_an_edit_in_the_weights_is_the_edit_of_the_coefficients(model):
    tokens = torch.tensor([[0, 5, 9, 12]])
    edits = Edits.of(off=["L4N6", "L2N149"], scale={"L1N0": -2.0})
    rewritten = edit_weights(model, edits)
    with apply_edits(model, edits):
        expected = model.logits(tokens)
    other = Memories(rewritten.model, tiny_tokenizer())
    torch.testing.assert_close(other.logits(tokens), expected, rtol=1e-4, atol=1e-4)


# What reads a whole index.


def test_a_comparison_has_a_row_for_each_memory_and_each_layer_with_some(tmp_path, corpus):
    models = [ffmem.load(ragged(seed), tiny_tokenizer()) for seed in (0, 1)]
    indexes = [indexed(tmp_path / str(seed), corpus, one, t=4) for seed, one in enumerate(models)]
    (tmp_path / "out").mkdir()
    found = compare(*indexes, tmp_path / "out", first_model=models[0], second_model=models[1])
    assert [row["layer"] for row in found.rows] == THERE
    assert [row["value_cosine"]["n"] for row in found.rows] == [WIDTHS[n] for n in THERE]
    assert found.settings["memories"] == WIDTHS
    assert "6 layers with 181 memories in total" in str(found)
    table = pq.read_table(tmp_path / "out" / "memories.parquet")
    names = zip(table["layer"].to_pylist(), table["memory"].to_pylist(), strict=True)
    assert [f"L{layer}N{memory}" for layer, memory in names] == cells(indexes[0])
    first = found.changed[0]
    cosine = cosine_similarity(
        *(one.values(first["layer"])[first["memory"]] for one in models), dim=0
    )
    assert first["value_cosine"] == pytest.approx(float(cosine), abs=1e-5)
    same = compare(indexes[0], indexes[0], tmp_path / "out", models=False)
    assert same.overall["rbo"]["mean"] == 1


def test_indexes_of_other_widths_are_not_compared(tmp_path, index, corpus):
    model = ragged()
    model.model.layers[4].mlp = ragged().model.layers[1].mlp
    other = indexed(tmp_path / "other", corpus, ffmem.load(model, tiny_tokenizer()), t=24)
    with pytest.raises(FfmemError, match=r"memories: \[0, 24, 150, 0, 7, 0\] in the first"):
        ffmem.compare(index, other, tmp_path / "out", models=False)


def test_exports_hold_every_memory(index, tmp_path):
    ffmem.export(index, "jsonl", tmp_path / "out.jsonl")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [index[cell].to_dict() for cell in index]
    ffmem.export(index, "csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        assert list(dict.fromkeys(row["cell"] for row in csv.DictReader(file))) == cells(index)
    ffmem.export(index, "neuronpedia", tmp_path / "out")
    found: dict[int, int] = {}
    for path in (tmp_path / "out").glob("v1/*/*/features/batch-*.jsonl.gz"):
        for line in gzip.decompress(path.read_bytes()).splitlines():
            layer = int(json.loads(line)["layer"].partition("-")[0])
            found[layer] = found.get(layer, 0) + 1
    per_layer = {found[layer] / WIDTHS[layer] for layer in found}
    assert sorted(found) == THERE
    assert len(per_layer) == 1


def test_patterns_are_kept_layer_by_layer(with_patterns):
    kept = Patterns(with_patterns, "automatic")
    for layer, width in enumerate(WIDTHS):
        listed = {(one.cell.memory, one.sign) for one in kept.lists(layer)}
        columns = read_columns(with_patterns.folder / layer_file("triggers", layer))
        expected = {
            (memory, sign)
            for sign, name in ((1, "prefix"), (-1, "negative_prefix"))
            for memory in range(width)
            if columns[name][memory, 0] != NO_PREFIX
        }
        assert listed == expected
    assert ffmem.verify(with_patterns.folder) == []


def test_a_study_draws_from_layers_that_have_memories(index):
    plan = draw_plan(index, per_layer=8, controls=0)
    drawn = [ffmem.Cell.parse(item.cell).layer for item in plan.items]
    assert {layer: drawn.count(layer) for layer in THERE} == {1: 8, 2: 8, 4: 7}
    assert plan.settings["counts"]["layers_with_fewer"] == {"4": 7}
    assert plan.settings["index"]["memories"] == WIDTHS


@pytest.fixture(scope="module")
def reported(with_patterns, model, corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    ffmem.report(with_patterns, out, str(corpus), sample=20, per_layer=3, triggers=4, model=model)
    return out


def test_experiments_speak_of_layers_that_have_memories(reported):
    """The residual alone is there in every layer; y, and what memories do, is not."""
    for name in NAMES:
        result = json.loads((reported / f"{name}.json").read_text())
        layers = {row["layer"] for row in result["rows"] if "layer" in row}
        if name in ("residual-prediction", "residual-probability"):
            assert layers == set(range(len(WIDTHS))), name
        elif name == "predictive-values":
            assert layers <= set(THERE)
        elif layers:
            assert layers == set(THERE), name
        assert result["settings"]["memories"] == WIDTHS
        assert all(row.get("n") != 0 for row in result["rows"] if name != "max-probability"), name
    composed = json.loads((reported / "last-layer-composition.json").read_text())
    assert composed["layer"] == 4
    page = (reported / "report.html").read_text()
    assert "6 layers with 181 memories in total" in page


def test_predictive_values_are_named_by_their_numbers(reported, index):
    rows = json.loads((reported / "predictive-values.json").read_text())["rows"]
    assert len(rows) == 100
    for row in rows[:20]:
        memory = index[row["cell"]]
        assert (memory.cell.layer, memory.cell.memory) == (row["layer"], row["memory"])
        end = memory.value.top if row["sign"] > 0 else memory.value.bottom
        assert end[0].token == row["token"]


def test_the_random_control_of_predictive_values_is_drawn_from_the_upper_layers(reported):
    also = json.loads((reported / "predictive-values.json").read_text())
    assert also["upper_from"] == 4
    assert also["random_control"]["n"] == WIDTHS[4]


# The explorer.


@pytest.fixture(scope="module")
def visitor(with_patterns, reported):
    catalog = Catalog.open([with_patterns.folder], [reported])
    with TestClient(
        make_app(catalog, ModelWorker(device="cpu")), "http://127.0.0.1:8800"
    ) as client:
        yield client


def test_the_front_page_tells_how_many_memories_there_are(visitor):
    page = visitor.get("/")
    assert page.status_code == 200
    assert "181 memories of" in page.text
    assert "0 to 150" in page.text
    assert page.text.count("no memories") == len(EMPTY)
    assert 'href="/layer/1"' in page.text
    assert visitor.get("/api/home").json()["model"]["memories"] == WIDTHS
    for path in ("/api/home/spec", "/api/home/picture", "/figures"):
        assert visitor.get(path).status_code == 200


@pytest.mark.parametrize("layer", range(len(WIDTHS)))
def test_every_layer_has_a_page(visitor, layer):
    page, answer = visitor.get(f"/layer/{layer}"), visitor.get(f"/api/layer/{layer}").json()
    assert page.status_code == 200
    assert answer["memories"] == answer["found"] == WIDTHS[layer]
    assert ("This layer has no memories" in page.text) == (layer in EMPTY)
    assert visitor.get(f"/layer/{layer}?pattern=any&has=w7&sort=-max").status_code == 200
    for path in (f"/api/layer/{layer}/spec", f"/api/layer/{layer}/picture"):
        assert visitor.get(path).status_code == 200


def test_memories_lead_to_each_other_past_layers_that_have_none(visitor, index):
    for before, after in pairwise(cells(index)):
        if before.partition("N")[0] != after.partition("N")[0] or after.endswith("N1"):
            assert f'rel="next" href="/m/{after}"' in visitor.get(f"/m/{before}").text
            assert f'rel="prev" href="/m/{before}"' in visitor.get(f"/m/{after}").text
    assert visitor.get("/m/L0N0").status_code == 404
    assert visitor.get("/m/2.149").url.path == "/m/L2N149"


def test_random_memories_are_there(visitor, index):
    drawn = {visitor.get("/api/random").json()["cell"] for _ in range(60)}
    assert drawn <= set(cells(index))
    assert {cell[:2] for cell in drawn} == {"L1", "L2"} | {cell[:2] for cell in drawn}
    assert visitor.get("/api/random?layer=4").json()["cell"].startswith("L4N")
    answer = visitor.get("/api/random?layer=0")
    assert answer.status_code == 404
    assert "Layer 0 has no memories" in answer.text


def test_the_search_page_searches_all_layers(visitor):
    for query in ("", "?q=w7", "?q=L4N6", "?q=zzz", "?q=w7&layer=0", "?q=zzz&layer=4"):
        assert visitor.get(f"/search{query}").status_code == 200
    assert "6 layers with 181 memories" in visitor.get("/search").text
    found = visitor.get("/api/search?q=L4N6").json()["groups"][0]
    assert [hit["cell"] for hit in found["hits"]] == ["L4N6"]


# A family whose layers are of three kinds, in a folder as users have it.


@pytest.fixture(scope="module")
def nemotron(tokenizer, corpus_file, tmp_path_factory):
    root = tmp_path_factory.mktemp("nemotron")
    text_model("nemotron_h").save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    lines = ffmem.Corpus(str(corpus_file), unit="line")
    ffmem.index(str(root / "model"), lines, root / "index", t=12, threads=1)
    return root


def run(*words):
    result = CliRunner().invoke(cli, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_commands_read_a_model_of_mixed_layers(nemotron, corpus_file):
    assert json.loads(run("show", nemotron / "index", "L4N3", "--json"))["cell"] == "L4N3"
    traced = json.loads(run("trace", nemotron / "index", "The river", "--json", "--generate", 2))
    assert [len(layer["memories"]) for layer in traced["layers"]] == [10, 10, 0, 0, 10]
    effects = json.loads(run("effect", nemotron / "index", "The river", "--json"))
    assert len(effects["memories"]) == 20
    run("neighbours", nemotron / "index", "L4N3")
    out, lines = nemotron / "edited", ["--corpus", corpus_file]
    run("edit", nemotron / "index", "--off", "L4N3", "--out", out, *lines)
    assert not ffmem.load(out).values(4)[3].any()
    run("report", nemotron / "index", *lines, "--out", nemotron / "report", "--sample", 20)


def test_the_trace_page_shows_layers_without_memories(nemotron):
    catalog = Catalog.open([nemotron / "index"], [])
    with TestClient(
        make_app(catalog, ModelWorker(device="cpu")), "http://127.0.0.1:8800"
    ) as client:
        for view in ("before", "ff", "after"):
            page = client.get("/trace", params={"text": "The river", "view": view, "off": "L4N3"})
            assert page.status_code == 200
            assert page.text.count("no memories") == 2
        answer = client.get("/api/trace", params={"text": "The river"}).json()
        assert answer["layers"][2]["active"] is None
        assert answer["grid"][2][0]["ff"] is None
        measured = client.get("/trace", params={"text": "The river", "effects": 1})
        assert "memories listed below were measured" in measured.text
        similar = client.get("/api/m/L4N3/similar").json()
        assert len(similar["memories"]) == 10

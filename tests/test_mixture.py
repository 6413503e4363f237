"""A mixture of experts through everything that reads an index: tables, exports, pages, studies."""

import csv
import gzip
import json
import math
import shutil
from collections import Counter

import pytest
import torch
from click.testing import CliRunner
from starlette.testclient import TestClient
from torch.nn.functional import cosine_similarity

import ffmem
from ffmem.annotation.sampling import draw_plan
from ffmem.cells import BankRecord, Layout
from ffmem.cli import cli
from ffmem.experiments.base import NAMES
from ffmem.indexing.tidy import SCHEMAS
from ffmem.patterns.store import Patterns
from ffmem.web.app import make_app
from ffmem.web.catalog import Catalog
from ffmem.web.experts import N_TOKENS
from ffmem.web.worker import ModelWorker
from tests.tiny import EXPERT, N_EXPERTS

BANKS = ["S", *(f"E{number}" for number in range(N_EXPERTS))]
CELLS = [f"L0N{n}" for n in range(24)] + [f"L1{bank}N{n}" for bank in BANKS for n in range(EXPERT)]


@pytest.fixture(scope="module")
def index(expert_index, tmp_path_factory):
    """A copy with patterns."""
    folder = tmp_path_factory.mktemp("mixture") / "index"
    shutil.copytree(expert_index.folder, folder)
    ffmem.detect(folder)
    return ffmem.open(folder)


@pytest.fixture(scope="module")
def model(expert_index):
    return ffmem.load(expert_index.manifest.model.source)


@pytest.fixture(scope="module")
def routing(index, model):
    """(last token, w of every bank of layer 1) of every prefix, each sentence run alone."""
    found = []
    start = index.manifest.start.id
    for row in index.sentences.rows(0, index.sentences.n_sentences):
        ids = [*([] if start is None else [start]), *row.ids]
        weights = model.trace(torch.tensor([ids]))[1].weights[0].tolist()
        found += list(zip(row.ids, weights[len(ids) - len(row.ids) :], strict=True))
    return found


def run(*words):
    result = CliRunner().invoke(cli, list(map(str, words)))
    assert result.exit_code == 0, result.output
    return result.stdout


# Names and tables


def test_banks_are_where_the_names_of_their_memories_say():
    layout = Layout(
        [
            [BankRecord(size=3)],
            [
                BankRecord(size=2, kind="shared", count=2),
                BankRecord(size=4, kind="expert", count=3),
                BankRecord(size=1, kind="expert"),
            ],
            [],
        ]
    )
    assert layout.n_experts == [0, 4, 0]
    for layer in range(3):
        listed = [
            (layer, bank.name, memory)
            for bank in layout.banks(layer)
            for memory in range(layout.widths[layer])[bank.memories]
        ]
        cells = [layout.cell(layer, memory) for memory in range(layout.widths[layer])]
        assert listed == [(cell.layer, cell.bank, cell.memory) for cell in cells]
    assert layout.banks(1)[0].label == "shared expert 0"
    assert layout.banks(1)[4].label == "expert 2"


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_table_names_the_bank(index, name):
    assert index.table(name, layer=1).schema == SCHEMAS[name]
    rows = index.table(name, columns=["cell", "layer", "bank", "memory"]).to_pylist()
    assert rows
    for row in rows:
        cell = index.layout.resolve(row["cell"])
        assert (row["layer"], row["memory"]) == (cell.layer, cell.memory)
        assert row["bank"] == (cell.bank or "dense")
    if name in ("stats", "samples", "values"):
        assert list(dict.fromkeys(row["cell"] for row in rows)) == CELLS


@pytest.mark.parametrize("by", ["value", "key"])
def test_neighbours_are_named_by_their_experts(model, by):
    read = model.output_directions if by == "value" else model.keys
    every = torch.cat([read(0), read(1)])
    own = every[CELLS.index("L1E3N4")]
    cosines = {
        cell: float(cosine_similarity(one, own, dim=0))
        for cell, one in zip(CELLS, every, strict=True)
        if cell != "L1E3N4"
    }
    expected = sorted(cosines, key=lambda cell: -abs(cosines[cell]))[:20]
    assert [str(one.cell) for one in ffmem.neighbours(model, "L1E3N4", by=by, n=20)] == expected


def test_exports_name_the_banks(index, tmp_path):
    ffmem.export(index, "jsonl", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["cell"] for line in lines] == CELLS
    assert [line.get("bank") for line in lines[23:37]] == [None, *["S"] * 12, "E0"]
    ffmem.export(index, "csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(dict.fromkeys(row["cell"] for row in rows)) == CELLS
    for row in rows:
        assert row["bank"] == (index.layout.resolve(row["cell"]).bank or "dense")
    ffmem.export(index, "parquet", tmp_path / "tables")
    assert {path.stem for path in (tmp_path / "tables").iterdir()} == set(SCHEMAS)


def test_a_csv_names_the_bank_of_a_memory_without_triggers(tmp_path, index_of, corpus_file):
    short = tmp_path / "short.txt"
    short.write_text("a b\n")
    made = index_of("deepseek_v3", ffmem.Corpus(str(short), unit="line"), tmp_path / "index")
    ffmem.export(made, "csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    silent = [row for row in rows if not row["rank"]]
    assert silent
    for row in silent:
        assert row["bank"] == (made.layout.resolve(row["cell"]).bank or "dense")


def test_neuronpedia_gets_the_experts_and_no_hook_that_reads_something_else(index, tmp_path):
    ffmem.export(index, "neuronpedia", tmp_path / "out")
    assert "2 layers with 96 memories in total, some in experts" in (
        tmp_path / "out" / "README.md"
    ).read_text(encoding="utf-8")
    for path in (tmp_path / "out").glob("v1/*/*/features/batch-0.jsonl.gz"):
        features = [json.loads(one) for one in gzip.decompress(path.read_bytes()).splitlines()]
        notes = json.loads((path.parents[1] / "source.jsonl").read_text())["notes"]
        is_dense = features[0]["layer"].startswith("0-")
        assert len(features) == (24 if is_dense else 72)
        assert {one["hookName"] for one in features} == {
            "blocks.0.mlp.hook_post" if is_dense else ""
        }
        assert ("S 0 to 11, E0 12 to 23" in notes) == (not is_dense)


# Patterns, search, studies


def test_patterns_of_experts_are_kept_shown_and_found(index):
    kept = Patterns(index, "automatic")
    found = [pattern for layer in (0, 1) for of in kept.layer(layer).values() for pattern in of]
    in_experts = [pattern for pattern in found if pattern.cell.bank]
    assert in_experts
    name = str(in_experts[0].cell)
    assert in_experts[0].text in run("patterns", "show", index.folder, name)
    word = max(in_experts[0].description.split(), key=len).strip("“”\"'")
    assert name in run("search", index.folder, word, "--in", "patterns", "--limit", 100)
    assert ffmem.verify(index.folder) == []


def test_search_names_memories_of_experts(index):
    for place in ("values", "triggers"):
        hits = ffmem.search(index, "river", place, limit=1000)
        assert {hit.cell for hit in hits} <= set(CELLS)
        assert any("E" in hit.cell for hit in hits)


def test_a_study_draws_every_memory_with_triggers_alike(index):
    plan = draw_plan(index, per_layer=72, controls=0)
    able = [cell for cell in CELLS if index[cell].triggers or index[cell].negative_triggers]
    assert sorted(item.cell for item in plan.items) == sorted(able)
    assert {index.layout.resolve(item.cell).bank for item in plan.items} == {"", *BANKS}


def test_showing_a_memory_says_of_what_its_shares_are(index, routing):
    text = run("show", index.folder, "L1E3N4")
    share = sum(weights[BANKS.index("E3")] != 0 for _, weights in routing) / len(routing)
    assert f"expert 3: reached by {share:.1%} of tokens" in text
    assert "the router's weight times m" in text


# The explorer


@pytest.fixture(scope="module")
def reported(index, model, corpus_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    ffmem.report(index, out, corpus, sample=20, per_layer=3, triggers=4, model=model)
    return out


@pytest.fixture(scope="module")
def visitor(index, reported):
    app = make_app(Catalog.open([index.folder], [reported]), ModelWorker(device="cpu"))
    with TestClient(app, "http://127.0.0.1:8800") as client:
        yield client


def test_a_report_speaks_of_experts(reported):
    for name in NAMES:
        settings = json.loads((reported / f"{name}.json").read_text())["settings"]
        assert settings["experts"] == [0, N_EXPERTS]
    page = (reported / "report.html").read_text(encoding="utf-8")
    assert "5 routed experts in 1 layer" in page
    assert "L5E12N345 is memory 345 of expert 12" in page


def test_a_layer_lists_its_banks_as_the_router_chose(visitor, routing):
    assert visitor.get("/api/layer/0").json()["banks"] == []
    banks = visitor.get("/api/layer/1").json()["banks"]
    page = visitor.get("/layer/1").text
    assert [bank["bank"] for bank in banks] == BANKS
    for number, bank in enumerate(banks):
        weights = [of_prefix[number] for _, of_prefix in routing if of_prefix[number] != 0]
        assert bank["share"] == pytest.approx(len(weights) / len(routing))
        assert bank["mean_weight"] == pytest.approx(sum(weights) / len(weights), rel=1e-4)
        assert bank["memories"] == EXPERT
        assert bank["kind"] == ("shared" if bank["bank"] == "S" else "expert")
        assert f'href="/layer/1/{bank["bank"]}"' in page
    assert "in 6 banks" in page
    assert "in 6 banks" not in visitor.get("/layer/0").text


def ranked(taken, there):
    """Plain loops: tokens by n · log(lift), with how often they are taken, and of how many."""
    overall = sum(taken.values()) / sum(there.values())
    scores = {}
    for id, n in taken.items():
        lift = n / there[id] / overall
        if lift > 1:
            scores[id] = (-n * math.log(lift), id, n, there[id], lift)
    return [scores[id] for id in sorted(scores, key=scores.__getitem__)][:N_TOKENS]


@pytest.mark.parametrize("bank", BANKS)
def test_an_expert_takes_the_tokens_that_the_router_gave_it(visitor, index, routing, bank):
    """The corpus has fewer prefixes than the sample takes, so the sample is all of them."""
    assert len(index.sampled_prefixes) == len(routing)
    there = Counter(id for id, _ in routing)
    routed = Counter(id for id, weights in routing if weights[BANKS.index(bank)] != 0)
    in_triggers = {
        (one.sentence, one.length)
        for memory in index.memories(1)
        if memory.cell.bank == bank
        for one in (*memory.triggers, *memory.negative_triggers)
    }
    of_triggers = Counter(index.sentences.row(s).ids[p - 1] for s, p in in_triggers)
    answer = visitor.get(f"/api/layer/1/{bank}").json()
    assert answer["prefixes"] == len(routing)
    assert answer["expert"]["bank"] == bank
    for name, taken in (("sample_tokens", routed), ("trigger_tokens", of_triggers)):
        expected = [] if bank == "S" else ranked(taken, there)
        assert [(one["id"], one["routed"], one["of"]) for one in answer[name]] == [
            (id, n, of) for _, id, n, of, _ in expected
        ]
        for one, (*_, lift) in zip(answer[name], expected, strict=True):
            assert one["lift"] == pytest.approx(lift)
            assert one["token"] == index.token(one["id"])


def test_the_page_of_an_expert_lists_its_memories_alone(visitor, index):
    answer = visitor.get("/api/layer/1/E3?sort=-max").json()
    own = sorted(
        (memory for memory in index.memories(1) if memory.cell.bank == "E3"),
        key=lambda memory: -memory.stats.max,
    )
    assert [row["cell"] for row in answer["rows"]] == [str(memory.cell) for memory in own]
    for row, memory in zip(answer["rows"], own, strict=True):
        assert row["active_share"] == pytest.approx(memory.stats.active_share)
        assert row["active_routed"] == pytest.approx(memory.stats.expert.active_share)
    page = visitor.get("/layer/1/E3?sort=-max").text
    assert "/m/L1E3N4?" in page
    assert "/m/L1E2N4" not in page
    assert 'href="/layer/1/E4?sort=-max"' in page
    assert "expert 3 of layer 1 · 12 memories" in page
    points = visitor.get("/api/layer/1/spec?bank=E3").json()["data"]["values"]
    assert {point["url"] for point in points} == {f"/m/L1E3N{n}" for n in range(EXPERT)}
    assert visitor.get("/layer/1/S").status_code == 200
    assert visitor.get("/api/layer/1/e3").json()["expert"]["bank"] == "E3"


def test_active_shares_of_routed_prefixes_sort_and_a_dense_layer_has_none(visitor):
    rows = visitor.get("/api/layer/1?sort=-active_routed").json()["rows"]
    shares = [row["active_routed"] for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert all(row["active_routed"] >= row["active_share"] for row in rows)
    dense = visitor.get("/api/layer/0").json()["rows"]
    assert {row["active_routed"] for row in dense} == {None}
    assert "of routed" in visitor.get("/layer/1").text
    assert "of routed" not in visitor.get("/layer/0").text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/api/layer/1/E5", "Layer 1 has no expert 'E5'. It has S, E0, E1, E2, E3, E4."),
        ("/api/layer/0/E1", "Layer 0 has no expert 'E1'. It has no experts."),
        ("/api/layer/1?bank=dense", "Layer 1 has no expert 'dense'."),
        ("/api/layer/7/E1", "No layer 7"),
    ],
)
def test_an_expert_that_is_not_there_is_not_found(visitor, path, message):
    answer = visitor.get(path)
    assert answer.status_code == 404
    assert message in answer.json()["error"]
    assert visitor.get(path.removeprefix("/api")).status_code == 404


def test_the_page_of_a_memory_says_how_its_expert_is_reached(visitor, index):
    page = visitor.get("/m/L1E3N4").text
    stats = index["L1E3N4"].stats.expert
    assert 'href="/layer/1/E3"' in page
    assert f"{100 * stats.share:.1f} % of tokens" in page
    assert f"{100 * stats.active_share:.1f} % of these" in page
    assert "register_forward_pre_hook" not in page
    dense = visitor.get("/m/L0N4").text
    assert "of tokens" not in dense
    assert 'rel="next" href="/m/L1E4N0"' in visitor.get("/m/L1E3N11").text
    inside = visitor.get("/m/L1E3N11?bank=E3").text
    assert 'rel="next"' not in inside
    assert 'rel="prev" href="/m/L1E3N10?bank=E3"' in inside


def test_the_search_finds_an_expert_by_its_name(visitor):
    for text in ("L1E3", "layer 1 e3"):
        (group, *_) = visitor.get("/api/search", params={"q": text}).json()["groups"]
        assert (group["name"], group["hits"][0]["bank"]) == ("experts", "E3")
    assert 'href="/layer/1/E3"' in visitor.get("/search?q=L1E3").text
    names = [group["name"] for group in visitor.get("/api/search?q=L0E3").json()["groups"]]
    assert "experts" not in names
    assert "L1E4" in visitor.get("/search").text


@pytest.mark.parametrize(
    "path",
    ["/", "/layers", "/search?q=river", "/figures", "/trace?text=The+river", "/random?layer=1"],
)
def test_other_pages_show_a_mixture(visitor, path):
    answer = visitor.get(path)
    assert answer.status_code == 200


def test_pages_over_all_layers_count_experts(visitor):
    assert "5 per layer, in 1 of 2 layers" in visitor.get("/").text
    assert [one["experts"] for one in visitor.get("/api/layers").json()["layers"]] == [0, 5]
    assert "5 experts" in visitor.get("/layers").text
    for name in NAMES:
        assert visitor.get(f"/figures/{name}").status_code == 200

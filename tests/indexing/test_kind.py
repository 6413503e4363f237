"""Every kind of memory in an index: what it says of its coefficients, values and places."""

import csv
import gzip
import json
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import ffmem
from ffmem.cli import cli
from ffmem.errors import NoStaticValues
from ffmem.indexing.memory import NO_VALUE, NO_VALUES, Kind
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.indexing.tidy import SCHEMAS
from tests.conftest import DENSE, OURS, text_model
from tests.indexing.folders import content, indexed, memories, write_corpus
from tests.tiny import HEADS, MEMORIES

WORDS = "river"
"""Stands in many sentences of the corpus."""


@pytest.fixture(params=DENSE)
def any_kind(request, kind_index):
    """An index of each kind, one after the other."""
    return kind_index(request.param)


@given(st.integers(1, 16), st.integers(1, 64), st.data())
def test_head_and_number_name_a_memory(heads, size, data):
    memory = data.draw(st.integers(0, heads * size - 1))
    for name, number in (("persistent", "slot"), ("lambda", "distance")):
        slot = Kind(name, memories=heads * size, groups=heads).head_slot(memory)
        assert slot.head * size + slot.number == memory
        assert 0 <= slot.number < size
        assert slot.to_dict() == {"head": slot.head, number: slot.number}
    for name in (None, "relu", "gelu", "swiglu", "softmax"):
        assert Kind(name, memories=heads * size).head_slot(memory) is None


def test_an_index_is_sound_and_knows_its_kind(any_kind):
    assert ffmem.verify(any_kind.folder) == []
    model = any_kind.manifest.model
    assert OURS[model.memory].endswith(model.memory) or model.memory == "relu"
    assert model.has_values == (model.memory != "lambda")
    assert model.groups == (HEADS if model.memory in ("persistent", "lambda") else 1)
    assert model.gated == (model.memory == "swiglu")


def test_the_manifest_defines_the_coefficient_of_its_kind(kind_index):
    said = {kind: kind_index(kind).manifest.coefficient for kind in DENSE}
    assert said["relu"] == said["gelu"] == Kind().definition
    assert said["swiglu"] == Kind(gated=True).definition
    assert said["softmax"].startswith("m = softmax(x·Kᵀ)")
    assert said["persistent"].startswith("m = attention weight on the slot")
    assert said["lambda"].startswith("m = q·E")
    assert "no static value" in said["lambda"]


def test_weights_of_a_softmax_are_always_active_and_said_to_be(kind_index):
    for kind in ("softmax", "persistent"):
        index = kind_index(kind)
        stats = read_columns(index.folder / layer_file("stats", 1))
        assert (stats["active"] == index.manifest.corpus.prefixes).all()
        assert 0 <= stats["min"].min() <= stats["max"].max() <= 1
        memory = index["L1N17"]
        assert memory.stats.active_share == 1
        assert "on every prefix" in str(memory)
        assert memory.to_dict()["coefficient_note"] in str(memory)
    assert "attention weight on the slot" in str(kind_index("persistent")["L1N17"])


def test_softmax_memories_share_a_sum_of_one(kind_index):
    index = kind_index("softmax")
    for layer in range(index.n_layers):
        sample = read_columns(index.folder / layer_file("samples", layer))["coefficient"]
        np.testing.assert_allclose(sample.sum(0), 1, atol=1e-5)


def test_a_memory_of_a_head_says_where_it_sits(kind_index):
    size = MEMORIES // HEADS
    for kind, name in (("persistent", "slot"), ("lambda", "distance")):
        memory = kind_index(kind)["L1N17"]
        place = {"head": 17 // size, name: 17 % size}
        assert memory.to_dict()["place"] == place
        assert f"head {17 // size}, {name} {17 % size}" in str(memory)
        assert f"head {17 // size}, {name} {17 % size}" in memory._repr_html_()
    assert "place" not in kind_index("relu")["L1N17"].to_dict()


def test_a_lambda_memory_is_silent_where_no_token_is_so_far_back(kind_index):
    index = kind_index("lambda")
    assert index.manifest.start.id is not None
    found = 0
    for cell in index:
        distance = index[cell].head_slot.number
        for trigger in index[cell].triggers:
            assert trigger.length >= distance  # the start token counts as one
            found += trigger.length < distance + 2
    assert found, "some trigger is as short as can be"


# A lambda layer has no static values.


def test_no_values_are_written_and_show_says_so(kind_index):
    index = kind_index("lambda")
    assert not (index.folder / "values").exists()
    assert not any(name.startswith("values") for name in index.manifest.files)
    assert json.loads((index.folder / "manifest.json").read_text())["model"]["has_values"] is False
    assert index.manifest.projection == "none"
    memory = index["L1N17"]
    assert memory.to_dict()["value"] is None
    assert memory.to_dict()["value_note"] == NO_VALUE
    assert NO_VALUE in str(memory)
    assert "promotes" not in str(memory)
    assert NO_VALUE in memory._repr_html_()
    shown = CliRunner().invoke(cli, ["show", str(index.folder), "L1N17"])
    assert NO_VALUE in shown.stdout
    shown = CliRunner().invoke(cli, ["show", str(index.folder), "L1N17", "--json"])
    assert json.loads(shown.stdout)["value_note"] == NO_VALUE


def test_other_kinds_have_values_and_no_note(kind_index):
    for kind in set(DENSE) - {"lambda"}:
        shown = kind_index(kind)["L1N17"].to_dict()
        assert shown["value"]["top"]
        assert "value_note" not in shown
        assert ffmem.search(kind_index(kind), shown["value"]["top"][0]["token"])["values"]


def test_values_cannot_be_searched_where_there_are_none_and_triggers_can(any_kind):
    hits = ffmem.search(any_kind, WORDS, "triggers", limit=100)
    expected = {
        str(cell)
        for cell in any_kind
        for trigger in (*any_kind[cell].triggers, *any_kind[cell].negative_triggers)
        if WORDS in trigger.prefix.casefold().split()
    }
    assert expected <= {hit.cell for hit in hits}
    if any_kind.manifest.model.has_values:
        return
    with pytest.raises(NoStaticValues, match=r"Cannot search in values.*`place` triggers"):
        ffmem.search(any_kind, WORDS, "values")
    assert list(ffmem.search(any_kind, WORDS)) == ["triggers"]


@pytest.mark.parametrize("kind", DENSE)
def test_patterns_are_found_and_searched_in_every_kind(kind, index_of, corpus_file, tmp_path):
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    index = index_of(OURS[kind], corpus, tmp_path / "index", t=20)
    ffmem.detect(index)
    table = index.table("patterns", columns=["cell", "description"])
    ending = {row["cell"] for row in table.to_pylist() if "ends" in row["description"]}
    assert {hit.cell for hit in ffmem.search(index, "ends", "patterns", limit=1000)} == ending


def test_exports_hold_nothing_where_no_value_is_and_say_why(kind_index, tmp_path):
    index = kind_index("lambda")
    ffmem.export(index, "jsonl", tmp_path / "out.jsonl")
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        shown = json.loads(line)
        assert (shown["value"], shown["value_note"]) == (None, NO_VALUE)
        assert set(shown["place"]) == {"head", "distance"}
    ffmem.export(index, "csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *SCHEMAS["triggers"].names,
        *("value_top", "value_bottom", "place", "value_note"),
    ]
    for row in rows:
        assert (row["value_top"], row["value_bottom"], row["value_note"]) == ("", "", NO_VALUE)
        assert row["place"] == str(index[row["cell"]].head_slot)


@pytest.mark.parametrize("kind", ["lambda", "persistent", "softmax"])
def test_neuronpedia_is_told_what_the_memories_are(kind_index, tmp_path, kind):
    index = kind_index(kind)
    ffmem.export(index, "neuronpedia", tmp_path / "out")
    readme = (tmp_path / "out" / "README.md").read_text()
    for note in index.manifest.model.kind.notes:
        assert note in readme
    (source,) = (tmp_path / "out").glob("v1/*/1-*")
    assert index.manifest.model.kind.notes[-1] in (source / "source.jsonl").read_text()
    with gzip.open(source / "features" / "batch-0.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(rows) == index.layout.widths[0]
    for row in rows:
        for name in ("pos_str", "pos_values", "neg_str", "neg_values"):
            assert bool(row[name]) == (kind != "lambda")
    assert ("mlp" in rows[0]["hookName"]) == (kind == "softmax")
    assert (NO_VALUES in readme) == (kind == "lambda")


def test_a_folder_of_values_that_should_not_be_there_is_told(kind_index, tmp_path):
    folder = shutil.copytree(kind_index("lambda").folder, tmp_path / "index")
    shutil.copytree(kind_index("relu").folder / "values", folder / "values")
    assert any("values/layer-000.parquet is in the folder" in one for one in ffmem.verify(folder))


# The laws of indexes hold for every kind.


@pytest.mark.parametrize("kind", ["softmax", "persistent", "lambda"])
def test_extended_and_merged_are_the_same_bytes(tmp_path, kind):
    model = memories(OURS[kind])
    first = write_corpus(tmp_path / "first.txt", n=30)
    second = write_corpus(tmp_path / "second.txt", n=30, seed=5)
    for name, corpus in (("a", first), ("b", second), ("extended", first)):
        indexed(tmp_path / name, corpus, model)
    ffmem.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    corpus = ffmem.Corpus(str(second), unit="line")
    ffmem.extend(tmp_path / "extended", corpus, model=model)
    assert content(tmp_path / "extended") == content(tmp_path / "merged")
    assert ffmem.verify(tmp_path / "merged") == ffmem.verify(tmp_path / "extended") == []


def test_workers_write_the_same_bytes_of_persistent_memories(tmp_path, tokenizer, corpus_file):
    text_model(OURS["persistent"]).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    options = {"t": 3, "chunk_tokens": 60, "threads": 1}
    for name, workers in (("here", None), ("there", 1)):
        ffmem.index(str(tmp_path / "model"), corpus, tmp_path / name, workers=workers, **options)
    assert content(tmp_path / "here") == content(tmp_path / "there")


@pytest.mark.parametrize("kind", ["softmax", "persistent"])
def test_values_are_read_as_they_reach_the_stream(kind_index, tokenizer, kind):
    index, model = kind_index(kind), text_model(OURS[kind])
    read = ffmem.load(model, tokenizer)
    with torch.no_grad():
        values = model.model.layers[1].memory.values.matrix().T
        logits = read.head.folded(values[17:18])[0]
    for shown in index["L1N17"].value.top:
        assert shown.logit == pytest.approx(float(logits[shown.id]), abs=1e-4)


def test_an_index_of_an_older_version_opens(kind_index, tmp_path):
    folder = shutil.copytree(kind_index("relu").folder, tmp_path / "index")
    written = json.loads((folder / "manifest.json").read_text())
    for name in ("memory", "groups", "has_values"):
        del written["model"][name]
    (folder / "manifest.json").write_text(json.dumps(written))
    index = ffmem.open(folder)
    assert index["L1N17"].to_dict() == kind_index("relu")["L1N17"].to_dict()
    assert index.manifest.model.kind == Kind(None, False, MEMORIES, 1, True)
    assert ffmem.verify(folder) == []

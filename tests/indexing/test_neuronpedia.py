"""The export for Neuronpedia, read back and compared with the index."""

import gzip
import json
import shutil

import pytest
from transformers import AutoModelForCausalLM, set_seed

import ffmem
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing import export as export_module
from ffmem.indexing.export import CREATOR, EMPTY, export, model_id, owner
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.tables import layer_file, read_columns
from tests.conftest import VOCABULARY
from tests.indexing.folders import content
from tests.tiny import TINY

FEATURE = {
    *("modelId", "layer", "index", "sourceSetName", "creatorId", "maxActApprox", "frac_nonzero"),
    *("pos_str", "pos_values", "neg_str", "neg_values", "hookName", "hasVector", "vector"),
    *EMPTY,
}
ACTIVATION = {
    *("id", "modelId", "layer", "index", "creatorId", "dataSource", "dataIndex", "tokens"),
    *("values", "maxValue", "minValue", "maxValueTokenIndex", "dfaValues", "dfaMaxValue"),
    *("dfaTargetIndex", "lossValues", "logitContributions", "binMin", "binMax", "binContains"),
    "qualifyingTokenIndex",
}


def written(index, folder):
    ffmem.export(index, "neuronpedia", folder)
    return folder


def rows(path):
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def read(folder, kind):
    """Every row of a kind, by source and batch."""
    found = {}
    for path in sorted(folder.glob(f"v1/*/*/{kind}/batch-*.jsonl.gz")):
        found.setdefault(path.parts[-3], []).append(rows(path))
    return found


@pytest.fixture(scope="module")
def exported(tiny_index, ungated_index, tmp_path_factory):
    root = tmp_path_factory.mktemp("neuronpedia")
    return {
        index.folder: written(index, root / str(number))
        for number, index in enumerate((tiny_index, ungated_index))
    }


@pytest.fixture
def folder(index, exported):
    return exported[index.folder]


def source_of(index, layer, negative, folder):
    [release] = {
        json.loads(path.read_text())["name"] for path in folder.glob("v1/*/*/release.jsonl")
    }
    return f"{layer}-{release}{'-negative' if negative else ''}"


def sides(index):
    return [False, True] if index.manifest.model.gated else [False]


@pytest.fixture(scope="module")
def everything(tiny_index, ungated_index):
    """Every memory of both indexes."""
    return {
        index.folder: {
            memory.cell[:2]: memory for layer in range(2) for memory in index.memories(layer)
        }
        for index in (tiny_index, ungated_index)
    }


@pytest.fixture
def memories(index, everything):
    assert len(everything[index.folder]) == len(index)
    return everything[index.folder]


def test_every_memory_is_a_feature_with_its_value_and_numbers(index, folder, memories):
    features = read(folder, "features")
    assert len(features) == index.n_layers * len(sides(index))
    for layer in range(index.n_layers):
        for negative in sides(index):
            source = source_of(index, layer, negative, folder)
            [batch] = features[source]
            assert [feature["index"] for feature in batch] == [
                str(number) for number in range(index.layout.widths[0])
            ]
            for feature in batch:
                memory = memories[layer, int(feature["index"])]
                sign, top, bottom = 1, memory.value.top, memory.value.bottom
                if negative:
                    sign, top, bottom = -1, bottom, top
                assert set(feature) == FEATURE
                assert (feature["layer"], feature["creatorId"]) == (source, CREATOR)
                assert feature["pos_str"] == [token.token for token in top]
                assert feature["pos_values"] == [sign * token.logit for token in top]
                assert feature["neg_str"] == [token.token for token in bottom]
                assert feature["neg_values"] == [sign * token.logit for token in bottom]
                assert feature["frac_nonzero"] == memory.stats.active_share
                largest = -memory.stats.min if negative else memory.stats.max
                assert feature["maxActApprox"] == largest


def test_every_trigger_is_an_activation_whose_last_token_alone_has_a_value(index, folder, memories):
    activations = read(folder, "activations")
    start = index.manifest.start.token
    assert start is not None
    seen = set()
    for layer in range(index.n_layers):
        for negative in sides(index):
            source = source_of(index, layer, negative, folder)
            [batch] = activations[source]
            expected = [
                (cell, trigger)
                for cell in index
                if cell.layer == layer
                for trigger in (
                    memories[cell[:2]].negative_triggers
                    if negative
                    else memories[cell[:2]].triggers
                )
            ]
            assert len(batch) == len(expected)
            for activation, (cell, trigger) in zip(batch, expected, strict=True):
                assert set(activation) == ACTIVATION
                assert (activation["layer"], activation["index"]) == (source, str(cell.memory))
                ids = index.sentences.row(trigger.sentence).ids
                assert activation["tokens"] == [start, *map(index.token, ids)]
                last = activation["maxValueTokenIndex"]
                assert last == trigger.length
                shown = start if trigger.length == 0 else trigger.last_token
                assert activation["tokens"][last] == shown
                coefficient = -trigger.coefficient if negative else trigger.coefficient
                assert activation["values"] == [
                    coefficient if place == last else 0 for place in range(len(ids) + 1)
                ]
                assert activation["maxValue"] == coefficient == max(activation["values"]) > 0
                assert activation["minValue"] == min(activation["values"])
                assert activation["dataIndex"] == str(trigger.sentence)
                seen.add(activation["id"])
    assert len(seen) == sum(len(batch) for [batch] in activations.values())


def test_both_signs_and_hard_characters_are_within_these_exports(exported, tiny_index):
    folder = exported[tiny_index.folder]
    tokens = {
        token
        for batches in read(folder, "activations").values()
        for batch in batches
        for row in batch
        for token in row["tokens"]
    }
    assert any("⟨" in token for token in tokens)
    assert any(path.name.endswith("-negative") for path in folder.glob("v1/*/*"))


def test_model_release_set_and_source_name_each_other(index, folder):
    for place in folder.glob("v1/*/*"):
        model, release, sourceset, source = (
            json.loads((place / f"{kind}.jsonl").read_text())
            for kind in ("model", "release", "sourceset", "source")
        )
        assert model["id"] == place.parent.name
        assert (model["layers"], model["neuronsPerLayer"]) == (
            index.n_layers,
            index.layout.widths[0],
        )
        assert sourceset["modelId"] == source["modelId"] == model["id"]
        assert sourceset["releaseName"] == release["name"]
        assert source["setName"] == sourceset["name"]
        assert source["id"] == place.name
        assert place.name.partition("-")[2] == sourceset["name"]
        assert source["num_prompts"] == index.manifest.corpus.sentences
        assert not (place / "explanations").exists()


def test_the_readme_says_what_is_not_known(index, folder):
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "all other values are not known and written as 0" in text
    assert ("-negative" in text) == index.manifest.model.gated
    assert index.manifest.projection in text
    assert "{" not in text


def test_the_same_index_gives_the_same_bytes(index, folder, tmp_path):
    again = written(index, tmp_path / "again")
    assert content(again) == content(folder)


def test_another_index_of_the_model_gives_other_sources(tiny_index, exported, index_of, tmp_path):
    (tmp_path / "more.txt").write_text("the river\nthe city of rivers\n")
    corpus = ffmem.Corpus(str(tmp_path / "more.txt"), unit="line")
    other = index_of("llama", corpus, tmp_path / "index")
    folders = (exported[tiny_index.folder], written(other, tmp_path / "out"))
    first, second = ({path.name for path in folder.glob("v1/*/*")} for folder in folders)
    assert not first & second


def test_many_memories_are_written_in_batches(tokenizer, corpus_file, tmp_path, monkeypatch):
    set_seed(0)
    llama = TINY["llama"]
    config = llama.__class__.from_dict(
        llama.to_dict() | {"vocab_size": VOCABULARY, "intermediate_size": 260}
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    loaded = ffmem.load(model, tokenizer)
    index = ffmem.index(loaded, corpus, tmp_path / "index", t=1, threads=1, start="none")
    monkeypatch.setattr(export_module, "BATCH", 256)
    folder = written(index, tmp_path / "out")
    for batches in read(folder, "features").values():
        assert [len(batch) for batch in batches] == [256, 4]
        numbers = [int(feature["index"]) for batch in batches for feature in batch]
        assert numbers == list(range(260))
    for source, batches in read(folder, "activations").items():
        layer, _, name = source.partition("-")
        for number, batch in enumerate(batches):
            cells = {int(activation["index"]) // 256 for activation in batch}
            assert cells == {number}
        kind = "negative_triggers" if name.endswith("-negative") else "triggers"
        column = f"{kind.removesuffix('triggers')}prefix"
        prefixes = read_columns(index.folder / layer_file("triggers", int(layer)), [column])
        assert sum(map(len, batches)) == (prefixes[column] != NO_PREFIX).sum()
        # Without a start token the prefix of length p ends at p − 1.
        first = batches[0][0]
        trigger = getattr(index[f"L{layer}N{first['index']}"], kind)[0]
        assert first["maxValueTokenIndex"] == trigger.length - 1
        assert first["tokens"][first["maxValueTokenIndex"]] == trigger.last_token


def test_what_is_there_already_is_left_alone(tiny_index, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(FfmemError, match=r"exists already\. Choose a new folder"):
            ffmem.export(tiny_index, "neuronpedia", tmp_path / name)
    with pytest.raises(FfmemError, match="There is no folder"):
        ffmem.export(tiny_index, "neuronpedia", tmp_path / "nowhere" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link"]


def test_an_export_that_fails_leaves_nothing_behind(tiny_index, tmp_path):
    shutil.copytree(tiny_index.folder, tmp_path / "index")
    (tmp_path / "index/values/layer-001.parquet").write_bytes(b"nonsense")
    with pytest.raises(StoreError):
        ffmem.export(tmp_path / "index", "neuronpedia", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_every_memory_is_told_of(tiny_index, tmp_path):
    steps = []
    export(tiny_index, "neuronpedia", tmp_path / "out", steps.append)
    assert sum(steps) == len(tiny_index)


@pytest.mark.parametrize(
    ("source", "name", "by"),
    [
        ("smollm2-135m", "smollm2-135m", "unknown"),
        ("EleutherAI/Pythia-70m@step1", "pythia-70m", "EleutherAI"),
        ("models/My Model.Q4_K.gguf", "my-model-q4_k", "unknown"),
        ("/", "model", "unknown"),
        ("in memory", "in-memory", "unknown"),
    ],
)
def test_a_model_gets_a_name_that_an_address_can_hold(source, name, by):
    assert (model_id(source), owner(source)) == (name, by)

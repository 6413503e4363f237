"""Experiments as users run them: files, seeds, faults."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

import ffmem
from ffmem.cli import cli
from ffmem.errors import CorpusError, FfmemError, StoreError
from ffmem.experiments.base import NAMES, ExperimentResult, corpus_like, find_all
from tests.experiments.planting import measured
from tests.indexing.folders import indexed, memories, write_corpus
from tests.tiny import TINY, tiny_tokenizer

FIELDS = {
    "patterns": "layer source shallow both semantic uncovered patterns_per_key n",
    "token-removal": "layer token how mean median q1 q3 n",
    "agreement": "layer rate low high n no_next uniform unigram permutation last_token_rate",
    "next-token-rank": "layer median q1 q3 n",
    "max-probability": "low high n rate",
    "predictive-values": "cell token probability precision",
    "active-memories": "layer definition mean q1 median q3 n",
    "zero-agreement": "layer target memories share n chance",
    "stop-words": "group stop_word_share short_prefix_share n",
    "residual-prediction": "layer residual_share output_share decided_share n",
    "residual-probability": "layer mean q1 median q3 n",
    "prediction-cases": "layer residual agreement ffn composition broken_agreement n",
    "last-layer-composition": "prefix residual_top ff_top output_top similarity related",
    "neural-memory": "layer cosine entropy top1_mass n",
}
ALSO = {
    "patterns": "sources protocol",
    "max-probability": "auc",
    "predictive-values": "upper_share with_agreeing_trigger random_control",
    "last-layer-composition": "related_share",
}


@pytest.fixture(scope="module")
def results(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    return folder, {result.experiment: result for result in measured(made, folder, NAMES)}


def test_every_experiment_of_the_contract_is_there():
    assert tuple(one.name for one in find_all()) == NAMES == tuple(FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_an_experiment_writes_its_rows_and_figures(results, name):
    folder, found = results
    content = json.loads((folder / f"{name}.json").read_text())
    assert list(content)[:5] == ["experiment", "paper", "settings", "rows", "quoted"]
    assert content["experiment"] == name
    assert content["rows"]
    for row in content["rows"]:
        assert set(FIELDS[name].split()) <= set(row)
    assert set(ALSO.get(name, "").split()) <= set(content)
    assert content["settings"]["seed"] == 0
    assert content["settings"]["projection"] == "folded"
    assert (folder / f"{name}.svg").read_text().startswith("<svg")
    assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert ExperimentResult.read(folder / f"{name}.json") == found[name]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(made, results, tmp_path):
    folder, _ = results
    measured(made, tmp_path / "again", NAMES)
    for path in (tmp_path / "again").iterdir():
        if path.suffix != ".pdf":  # the PDF's text is the same, its ids of fonts may not be
            assert path.read_bytes() == (folder / path.name).read_bytes(), path.name
    measured(made, tmp_path / "other", ["token-removal"], seed=1)
    assert (tmp_path / "other/token-removal.json").read_bytes() != (
        folder / "token-removal.json"
    ).read_bytes()


def test_one_experiment_alone_is_the_same_as_among_all(made, results, tmp_path):
    folder, _ = results
    for name in ("active-memories", "prediction-cases", "neural-memory", "zero-agreement"):
        measured(made, tmp_path, name)
        assert (tmp_path / f"{name}.json").read_bytes() == (folder / f"{name}.json").read_bytes()


def test_a_sample_larger_than_the_corpus_takes_all_and_says_so(made, tmp_path, capsys):
    from ffmem.progress import Progress

    (result,) = measured(made, tmp_path, "active-memories", progress=Progress(), sample=10_000)
    assert result.settings["sample"]["requested"] == 10_000
    assert result.settings["sample"]["prefixes"] == 20
    assert "has 20 sentences to draw from. Using all of them." in capsys.readouterr().err


def test_section_5_says_which_prefixes_it_drew_of_which_corpus_with_how_many_threads(
    made, results, tmp_path
):
    _, model, valid = made
    _, found = results
    read = ffmem.index(model, ffmem.Corpus(str(valid), unit="line"), tmp_path / "read")
    for experiment in find_all():
        settings = found[experiment.name].settings
        assert ("threads" in settings) == ("sample" in settings) == bool(experiment.metrics)
        if experiment.metrics:
            assert settings["threads"] == torch.get_num_threads()
            assert settings["sample"]["corpus_hash"] == read.manifest.corpus.sources[0].hash
            drawn = settings["sample"]["drawn"]
            assert [sentence for sentence, _ in drawn] == list(range(20))
            lengths = [len(line.split()) for line in valid.read_text().splitlines()]
            assert all(1 <= p <= lengths[sentence] for sentence, p in drawn)


def test_every_prefix_and_uniform_draws_can_be_asked_for(made, tmp_path):
    (every,) = measured(made, tmp_path, "residual-prediction", sample="all")
    (uniform,) = measured(made, tmp_path, "residual-prediction", sample=15, draw="tokens")
    tokens = sum(len(line.split()) for line in made[2].read_text().splitlines())
    assert every.settings["sample"]["requested"] == "all"
    assert every.rows[0]["n"] == tokens
    assert uniform.rows[0]["n"] == 15
    assert uniform.settings["sample"]["draw"] == "tokens"


def test_sentences_of_one_token_and_tokens_without_text_are_read(made, tmp_path):
    (tmp_path / "short.txt").write_text("w3\nw4\nw5\n")
    pq.write_table(pa.table({"ids": [[3], [4, 5], [6, 7, 8]]}), tmp_path / "ids.parquet")
    from_sample = [one.name for one in find_all() if one.metrics]
    for corpus in ("short.txt", "ids.parquet"):
        found = measured(made, tmp_path / "out", from_sample, corpus=str(tmp_path / corpus))
        assert {result.settings["sample"]["prefixes"] for result in found} == {3}


def test_a_model_of_one_layer_is_measured(tmp_path):
    config = TINY["llama"].__class__.from_dict(TINY["llama"].to_dict() | {"num_hidden_layers": 1})
    model = ffmem.load(AutoModelForCausalLM.from_config(config), tiny_tokenizer())
    index = indexed(tmp_path / "index", write_corpus(tmp_path / "train.txt", n=20), model)
    made = (index, model, write_corpus(tmp_path / "valid.txt", n=8))
    path = ffmem.report(index, tmp_path / "out", str(made[2]), model=model, per_layer=2, triggers=2)
    assert path.exists()
    rows = json.loads((tmp_path / "out/residual-prediction.json").read_text())["rows"]
    assert [row["output_share"] for row in rows] == [1.0]


def test_an_index_without_any_next_token_is_measured(tmp_path):
    (tmp_path / "words.txt").write_text("".join(f"w{number}\n" for number in range(3, 40)))
    model = memories("opt")
    index = indexed(tmp_path / "index", tmp_path / "words.txt", model)
    made = (index, model, tmp_path / "words.txt")
    found = {result.experiment: result for result in measured(made, tmp_path / "out", NAMES)}
    for row in found["agreement"].rows:
        assert row["n"] == 0
        assert row["rate"] is row["low"] is row["permutation"] is None
        assert row["no_next"] + row["no_trigger"] == model.layout.widths[0]
    assert all(row["n"] == 0 for row in found["token-removal"].rows)
    assert all(row["precision"] is None for row in found["predictive-values"].rows)


def test_figure_2_is_left_out_among_others_where_there_are_no_patterns(made, tmp_path, capsys):
    from ffmem.progress import Progress

    index = indexed(tmp_path / "bare", write_corpus(tmp_path / "train.txt", n=20), made[1])
    bare = (index, *made[1:])
    found = measured(bare, tmp_path / "out", ["patterns", "agreement"], progress=Progress())
    assert [result.experiment for result in found] == ["agreement"]
    assert "Skipping Figure 2." in (told := capsys.readouterr().err)
    assert "ffmem patterns detect" in told
    with pytest.raises(StoreError, match="ffmem patterns detect"):
        measured(bare, tmp_path / "out", "patterns", corpus=None)


def test_what_is_missing_or_wrong_is_told_before_the_model_is_loaded(made, tmp_path):
    index, _, valid = made
    with pytest.raises(CorpusError, match=r"runs the model on prefixes.*`corpus`"):
        ffmem.experiment("active-memories", index, tmp_path, model="nowhere")
    with pytest.raises(CorpusError, match=r"missing\.txt"):
        ffmem.experiment(
            "agreement", index, tmp_path, corpus=str(tmp_path / "missing.txt"), model="nowhere"
        )
    with pytest.raises(FfmemError, match=r"Unknown experiment 'figure-3'.*token-removal"):
        ffmem.experiment("figure-3", index, tmp_path, corpus=str(valid))
    with pytest.raises(StoreError, match="There is no index"):
        ffmem.experiment("agreement", tmp_path / "nothing", tmp_path)


def test_another_model_is_refused_by_its_hash(made, tmp_path):
    other = memories("llama", seed=1)
    with pytest.raises(StoreError) as error:
        ffmem.experiment("agreement", made[0], tmp_path, model=other)
    assert other.fingerprint()[:12] in str(error.value)
    assert made[1].fingerprint()[:12] in str(error.value)


def test_a_foreign_file_is_not_taken_for_a_result(tmp_path):
    (tmp_path / "x.json").write_text('{"experiment": "agreement"}')
    with pytest.raises(StoreError, match="is not an experiment's result"):
        ExperimentResult.read(tmp_path / "x.json")


def test_a_report_asks_for_its_corpus_and_a_sample_for_a_number(made, tmp_path):
    folder = str(made[0].folder)
    done = CliRunner().invoke(cli, ["report", folder, "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "--corpus" in done.output
    arguments = ["experiment", "agreement", folder, "--out", str(tmp_path), "--sample", "many"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 2
    assert "neither a number nor 'all'" in done.output


def test_a_corpus_is_read_as_the_index_read_its_own(made, tmp_path):
    index = made[0]
    assert corpus_like(index, "x.txt").unit == "line"
    assert corpus_like(index, "x.txt", unit="sentence").unit == "sentence"
    assert corpus_like(index, "wikitext-2:valid").detokenize == "wikitext"


def test_a_sample_says_how_its_corpus_was_read_where_that_differs(made, tmp_path):
    (usual,) = measured(made, tmp_path, "active-memories")
    corpus = corpus_like(made[0], made[2], unit="window:4", limit=3)
    (other,) = measured(made, tmp_path, "active-memories", corpus=corpus)
    assert not {"unit", "column", "limit"} & set(usual.settings["sample"])
    assert other.settings["sample"]["unit"] == "window:4"
    assert other.settings["sample"]["limit"] == other.settings["sample"]["prefixes"] == 3


def test_a_damaged_corpus_of_the_index_is_told(made, tmp_path):
    import shutil

    folder = shutil.copytree(made[0].folder, tmp_path / "index")
    (folder / "sentences.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(StoreError, match=r"Cannot read .*sentences.parquet: .*damaged or missing"):
        ffmem.experiment("agreement", folder, tmp_path, model=made[1])


def test_a_place_that_cannot_take_results_is_told_before_the_model_is_loaded(made, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="Cannot write to the folder"):
            ffmem.experiment("agreement", made[0], out, model="nowhere")
    with pytest.raises(StoreError, match=r"is an index\. Choose another folder"):
        ffmem.experiment("agreement", made[0], made[0].folder, model="nowhere")
    with pytest.raises(FfmemError):
        ffmem.experiment("agreement", made[0], tmp_path / "new", model="nowhere")
    assert not (tmp_path / "new").exists()  # nothing came of it


def test_ids_of_another_vocabulary_are_told(made, tmp_path):
    pq.write_table(pa.table({"ids": [[3], [4, 999]]}), tmp_path / "ids.parquet")
    with pytest.raises(CorpusError, match="Sentence 1 of the corpus has token id 999"):
        measured(made, tmp_path / "out", "active-memories", corpus=str(tmp_path / "ids.parquet"))


def test_options_without_use_are_refused(made, tmp_path):
    arguments = ["experiment", "agreement", str(made[0].folder), "--out", str(tmp_path)]
    done = CliRunner().invoke(cli, [*arguments, "--limit", "3"])
    assert done.exit_code == 2
    assert "--limit: pass --corpus too" in done.output
    with pytest.raises(FfmemError, match="`sample` '5': use a whole number"):
        measured(made, tmp_path, "active-memories", sample="5")
    assert measured(made, tmp_path, "active-memories", corpus=made[2])


def test_a_model_of_an_index_in_memory_is_asked_for(made, tmp_path):
    with pytest.raises(FfmemError, match="was built from a model in memory"):
        ffmem.experiment("agreement", made[0], tmp_path)

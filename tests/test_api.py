"""The public names: sorted, importable, documented."""

import inspect
import os
import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import click
import pytest

import ffmem
from ffmem.cli import cli
from ffmem.corpus.corpus import Corpus
from ffmem.errors import CorpusError, FfmemError, ModelError, StoreError
from ffmem.experiments.base import ExperimentConfig
from ffmem.indexing.config import BuildOptions, IndexConfig
from ffmem.parallel import ExecutionConfig
from ffmem.training.config import TrainConfig
from tests.conftest import text_model


def test_public_names_are_sorted_and_importable():
    assert ffmem.__all__ == sorted(ffmem.__all__)
    assert dir(ffmem) == ffmem.__all__
    for name in ffmem.__all__:
        assert getattr(ffmem, name) is not None


def test_every_public_name_is_documented():
    for name in ffmem.__all__:
        thing = getattr(ffmem, name)
        assert inspect.getdoc(thing), name
        if inspect.isclass(thing):
            for method, function in inspect.getmembers(thing, inspect.isfunction):
                if not method.startswith("_") and function.__module__.startswith("ffmem"):
                    assert inspect.getdoc(function), f"{name}.{method}"


def test_public_functions_name_and_type_all_their_parameters():
    for name in ffmem.__all__:
        thing = getattr(ffmem, name)
        if inspect.isfunction(thing):
            for parameter in inspect.signature(thing).parameters.values():
                assert parameter.kind is not parameter.VAR_KEYWORD, name
                assert parameter.annotation is not parameter.empty, f"{name}: {parameter.name}"
            assert inspect.signature(thing).return_annotation is not inspect.Signature.empty


CONFIGS = {
    "index": (IndexConfig, BuildOptions),
    "estimate": (IndexConfig, ExecutionConfig),
    "extend": (BuildOptions,),
    "train": (TrainConfig,),
    "experiment": (ExperimentConfig,),
    "report": (ExperimentConfig,),
}


@pytest.mark.parametrize(("name", "config"), [(n, c) for n, some in CONFIGS.items() for c in some])
def test_the_parameters_of_a_function_are_the_fields_of_its_config(name, config):
    parameters = inspect.signature(getattr(ffmem, name)).parameters
    for field in fields(config):
        parameter = parameters[field.name]
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        assert (parameter.default, parameter.annotation) == (default, field.type), field.name


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("index", {"model", "corpus", "out", "adapter", "dtype", "progress"}),
        ("estimate", {"model", "corpus", "adapter", "dtype", "device", "progress"}),
        ("extend", {"folder", "corpus", "model", "adapter", "progress"}),
        ("train", {"corpus", "out", "valid", "progress"}),
    ],
)
def test_a_function_has_no_option_that_is_not_in_its_config(name, own):
    options = {field.name for config in CONFIGS[name] for field in fields(config)}
    assert set(inspect.signature(getattr(ffmem, name)).parameters) == options | own


def command_of(function):
    """Return the command that calls a function: `ffmem patterns detect` calls `ffmem.detect`."""
    name = "patterns" if function in ("detect", "explain") else function
    command = cli.get_command(click.Context(cli), name)
    return command.commands[function] if name == "patterns" else command


@pytest.mark.parametrize(
    "name",
    [
        *("index", "extend", "edit", "trace", "effect", "experiment", "report"),
        *("detect", "explain", "compare", "search", "serve", "neighbours"),
    ],
)
def test_a_command_and_its_function_have_the_same_options_and_defaults(name):
    command = command_of(name)
    defaults = command.make_context(name, ["x"] * 9, resilient_parsing=True).params
    parameters = dict(inspect.signature(getattr(ffmem, name)).parameters)
    if name == "compare":  # of two indexes, or of two models
        parameters |= inspect.signature(ffmem.compare_models).parameters
    own = {"as_json", "dry_run", "no_report", "no_models", "open_browser", "name"}
    if name == "report":  # of one index, or with --compare of several reports
        own |= {"folders", "compare"}
    shared = own | {field.name for field in fields(Corpus)}
    for option, value in defaults.items():
        if option in parameters and isinstance(parameters[option].default, str | int | float):
            given = {"generate": 0, "seed": 0, "steps": 20}.get(option) if value is None else value
            assert given == parameters[option].default, option
        else:
            assert option in parameters or option in shared, option


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'indexer'"):
        _ = ffmem.indexer


def test_importing_and_opening_loads_no_heavy_library(tiny_index):
    code = (
        "import sys, ffmem\n"
        f"index = ffmem.open({str(tiny_index.folder)!r})\n"
        "index['L0N0']._repr_html_(); ffmem.search(index, 'the'); ffmem.verify(index.folder)\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'datasets', 'sentencex', 'gguf'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(ffmem.__file__).parent.parent)},
    )
    assert done.stdout == "[]\n"


def test_a_model_in_memory_needs_its_tokenizer(model_folder):
    memories = ffmem.load(model_folder)
    with pytest.raises(ModelError, match=r"load\(model, tokenizer\)"):
        ffmem.load(memories.model)


def test_a_finished_index_is_opened_again_and_another_one_refused(
    tiny_index, tokenizer, corpus_file, capfd
):
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    memories = ffmem.load(text_model("llama"), tokenizer)
    again = ffmem.index(memories, corpus, tiny_index.folder, t=6)
    assert again["L0N0"] == tiny_index["L0N0"]
    for other in ({"t": 7}, {"t": 6, "prefixes": "all"}, {"t": 6, "start": "none"}):
        with pytest.raises(StoreError, match="holds a finished index with other settings"):
            ffmem.index(memories, corpus, tiny_index.folder, **other)
    assert capfd.readouterr() == ("", "")  # the library is silent


def test_extending_gives_the_index_of_both_corpora(index_of, model_folder, corpus_file, tmp_path):
    lines = corpus_file.read_text().splitlines()
    parts = []
    for name, part in (("a", lines[:10]), ("b", lines[10:])):
        (tmp_path / f"{name}.txt").write_text("\n".join(part) + "\n")
        parts.append(ffmem.Corpus(str(tmp_path / f"{name}.txt"), unit="line"))
    index = ffmem.index(model_folder, parts[0], tmp_path / "index", t=6, threads=1)
    n_before = index.manifest.corpus.sentences
    extended = ffmem.extend(tmp_path / "index", parts[1])
    assert extended.manifest.corpus.sentences == n_before + len(lines) - 10
    assert len(extended.manifest.corpus.sources) == 2
    assert ffmem.verify(tmp_path / "index") == []


@pytest.mark.parametrize("text", ["", "\n \n", " = Only = \n\n = = Headings = = \n"])
def test_an_empty_corpus_is_refused_before_the_model_is_loaded(text, tiny_index, tmp_path):
    (tmp_path / "empty.txt").write_text(text)
    corpus = ffmem.Corpus(str(tmp_path / "empty.txt"), detokenize="wikitext")
    index, out = tiny_index, tmp_path / "out"  # made of a model in memory, so none can be loaded
    for call in (
        lambda: ffmem.index("no-such-model", corpus, out),
        lambda: ffmem.estimate("no-such-model", corpus),
        lambda: ffmem.extend(index.folder, corpus),
        lambda: ffmem.experiment("active-memories", index, out, corpus=corpus),
        lambda: ffmem.report(index, out, corpus),
        lambda: ffmem.edit(index, out, off=["L0N1"], corpus=corpus),
    ):
        with pytest.raises(CorpusError, match=r"is empty\. Use|no sentence in .*empty\.txt"):
            call()


def test_a_misspelled_option_is_refused(tiny_index, model_folder, tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'sed'"):
        ffmem.experiment("agreement", tiny_index, tmp_path / "out", sed=1, model=model_folder)


def test_another_dtype_beside_a_model_in_memory_is_refused(tiny_index, model_folder, tmp_path):
    model = ffmem.load(model_folder)
    with pytest.raises(ffmem.FfmemError, match="bfloat16 does not match the model in memory"):
        ffmem.experiment("agreement", tiny_index, tmp_path / "out", model=model, dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"t": 0}, "`t` 0: use a whole number at least 1 and at most 10,000"),
        (
            {"t": 99_999_999_999},
            "`t` 99999999999: use a whole number at least 1 and at most 10,000",
        ),
        ({"threads": 100_000}, "`threads` 100000: use a whole number"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_any_work(options, message, tmp_path):
    with pytest.raises(ffmem.FfmemError, match=message):
        ffmem.index("no-such-model", "no-such-corpus", tmp_path / "index", **options)


def test_an_adapter_is_not_ignored_where_the_model_is_loaded(model_folder, corpus_file, tmp_path):
    memories = ffmem.load(model_folder)
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    for call in (
        lambda: ffmem.index(memories, corpus, tmp_path / "a", adapter="lora"),
        lambda: ffmem.estimate(memories, corpus, adapter="lora"),
        lambda: ffmem.compare_models(memories, None, corpus, tmp_path / "b", adapter="lora"),
        lambda: ffmem.trace(memories, "the", adapter="lora"),
    ):
        with pytest.raises(FfmemError, match=r"loaded already\. Pass adapter to ffmem\.load"):
            call()
    with pytest.raises(FfmemError, match="bfloat16 does not match the model in memory"):
        ffmem.trace(memories, "the", dtype="bfloat16")


def test_an_open_index_is_opened_as_it_is(tiny_index):
    assert ffmem.open(tiny_index) is tiny_index

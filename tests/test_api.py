"""The public names: sorted, importable, documented."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ffmem
from ffmem.errors import ModelError, StoreError
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


def test_a_misspelled_option_is_refused(tiny_index, model_folder, tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'sed'"):
        ffmem.experiment("agreement", tiny_index, tmp_path / "out", sed=1, model=model_folder)


def test_another_dtype_beside_a_model_in_memory_is_refused(tiny_index, model_folder, tmp_path):
    model = ffmem.load(model_folder)
    with pytest.raises(ffmem.FfmemError, match="bfloat16 was asked for beside a model in memory"):
        ffmem.experiment("agreement", tiny_index, tmp_path / "out", model=model, dtype="bfloat16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"t": 0}, "-t 0: give a whole number at least 1 and at most 10,000"),
        (
            {"t": 99_999_999_999},
            "-t 99999999999: give a whole number at least 1 and at most 10,000",
        ),
        ({"threads": 100_000}, "--threads 100000: give a whole number"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_any_work(options, message, tmp_path):
    with pytest.raises(ffmem.FfmemError, match=message):
        ffmem.index("no-such-model", "no-such-corpus", tmp_path / "index", **options)

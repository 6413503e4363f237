"""The commands about patterns, as people and scripts call them."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import ffmem
from ffmem.cli import cli
from ffmem.errors import FfmemError, UnknownCell
from tests.indexing.folders import indexed, write_corpus
from tests.patterns.endpoints import serving


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An index whose lists reach beyond rank 50, with patterns."""
    root = tmp_path_factory.mktemp("commands")
    corpus = write_corpus(root / "lines.txt", 150)
    index = indexed(root / "index", corpus, t=60, prefixes="best", chunk_tokens=500)
    ffmem.detect(index, workers=1)
    return index


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made.folder, tmp_path / "index")


def run(*arguments):
    done = CliRunner().invoke(cli, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def first_pattern(index):
    patterns = ffmem.patterns_of(index)
    return next(
        found[0]
        for layer in range(index.n_layers)
        for _, found in sorted(patterns.layer(layer).items())
    )


def test_detection_is_told_in_words_and_as_json(folder):
    assert run("patterns", "detect", folder, "--workers", 1).stdout.startswith("source: automatic")
    told = json.loads(run("patterns", "detect", folder, "--workers", 1, "--json").stdout)
    assert told["lists_with_pattern"] > 0
    assert told["shuffled_control"]["lists"] == 2 * told["memories"] - told.get("empty", 0)
    shuffled = json.loads(run("patterns", "detect", folder, "--shuffled", "--json").stdout)
    assert shuffled["shuffled"]
    assert shuffled["memories_with_pattern"] < 0.05 * shuffled["memories"]


def test_patterns_are_shown_searched_and_exported(made, folder, tmp_path):
    one = first_pattern(made)
    cell, text = str(one.cell), one.description
    assert text in run("patterns", "show", folder, cell).stdout
    assert text in run("show", folder, cell).stdout
    shown = json.loads(run("show", folder, cell, "--json").stdout)["patterns"]
    assert shown == json.loads(run("patterns", "show", folder, cell, "--json").stdout)
    assert (shown[0]["source"], shown[0]["ranks"]) == ("automatic", list(one.ranks))
    hits = json.loads(run("search", folder, one.what, "--in", "patterns", "--json").stdout)
    assert cell in {hit["cell"] for hit in hits}
    assert "shallow, automatic" in run("search", folder, one.what, "--in", "patterns").stdout
    out = tmp_path / "patterns.parquet"
    assert run("patterns", "export", folder, out).stderr.startswith("Wrote ")
    assert {"source": "automatic", "cell": cell}.items() <= pq.read_table(out).to_pylist()[
        0
    ].items()


def test_an_index_without_patterns_names_the_command(made, folder, tmp_path):
    shutil.rmtree(folder / "patterns")
    for arguments in (
        ("patterns", "show", folder, "L0N0"),
        ("patterns", "export", folder, tmp_path / "out.csv"),
        ("search", folder, "a", "--in", "patterns"),
    ):
        with pytest.raises(FfmemError, match="ffmem patterns detect"):
            run(*arguments)
    assert "Patterns" not in run("show", folder, "L0N0").stdout


def test_a_memory_is_shown_even_if_its_patterns_are_damaged(made, folder):
    cell = str(first_pattern(made).cell)
    path = folder / f"patterns/automatic/found/layer-{first_pattern(made).cell.layer:03d}.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    done = run("show", folder, cell)
    assert done.stdout.startswith(cell)
    assert "Cannot show its patterns." in done.stderr
    assert "ffmem patterns detect" in done.stderr


def test_a_memory_that_the_model_has_not_has_no_patterns_either(made):
    with pytest.raises(UnknownCell):
        ffmem.patterns_of(made).of("L99N1")


def test_lists_that_are_too_short_to_test_are_explained(tmp_path):
    index = indexed(tmp_path / "index", write_corpus(tmp_path / "few.txt", 12), t=30)
    told = str(ffmem.detect(index, workers=1))
    assert "Nothing could be tested" in told
    assert "control" not in told


def test_a_language_model_is_asked_and_its_patterns_shown(folder):
    with serving() as server:
        done = run("patterns", "explain", folder, "L0N7", "--model", "m", "--url", server.url)
    assert "patterns of 1 memory" in done.stdout
    assert "source: explained" in run("patterns", "show", folder, "L0N7").stdout

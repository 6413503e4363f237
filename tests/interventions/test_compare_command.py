"""`ffmem compare` as people and programs use it."""

import json
import re
import shutil

import pytest
from click.testing import CliRunner

from ffmem import cli
from ffmem.errors import FfmemError, StoreError
from tests.interventions.pairs import index_of, model
from tests.interventions.test_compare import plant_key


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    index_of(folder / "first", model())
    index_of(folder / "second", model(edit=plant_key))
    return folder


def run(*arguments):
    done = CliRunner().invoke(cli.cli, ["compare", *map(str, arguments)])
    if isinstance(done.exception, FfmemError):
        raise done.exception
    return done


def test_the_command_prints_a_summary_and_says_what_it_wrote(folders, tmp_path):
    out = tmp_path / "out"
    done = run(folders / "first", folders / "second", "--out", out, "--no-models")
    assert done.exit_code == 0
    assert re.search(r"^L1N5 +change 0\.\d", done.stdout, re.MULTILINE)
    assert done.stdout.endswith(f"compare.svg and compare.pdf to {out}.\n")
    assert "The models are not read" in done.stderr
    assert (out / "compare.json").exists()


def test_json_is_the_file(folders, tmp_path):
    options = ("--out", tmp_path, "--no-models", "--json", "--top", 1)
    done = run(folders / "first", folders / "second", *options)
    assert json.loads(done.stdout) == json.loads((tmp_path / "compare.json").read_text())


def test_a_folder_that_is_no_index_or_no_place_to_write_is_told(folders, tmp_path):
    with pytest.raises(StoreError, match="There is no index at nowhere"):
        run(folders / "first", "nowhere", "--out", tmp_path)
    both = (folders / "first", folders / "second")
    with pytest.raises(StoreError, match=r"is an index\. Choose another folder"):
        run(*both, "--out", folders / "second", "--no-models")


def test_a_model_that_is_gone_is_told_with_the_option_that_helps(folders, tmp_path):
    with pytest.raises(FfmemError, match=r"--first-model\. --no-models .* compares the"):
        run(folders / "first", folders / "second", "--out", tmp_path)


def test_both_folders_and_a_place_are_needed(folders):
    assert run(folders / "first", "--out", "x").exit_code == 2
    assert run(folders / "first", folders / "second").exit_code == 2
    assert run(folders / "first", folders / "second", "--out", "x", "--top", 0).exit_code == 2


def test_a_damaged_index_is_refused_and_nothing_is_left_behind(folders, tmp_path):
    shutil.copytree(folders / "second", tmp_path / "damaged")
    path = tmp_path / "damaged" / "stats" / "layer-000.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"is damaged: stats/layer-000\.parquet"):
        run(folders / "first", tmp_path / "damaged", "--out", tmp_path / "new", "--no-models")
    assert not (tmp_path / "new").exists()

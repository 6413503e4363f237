"""Laws of whole comparisons, planted changes that must come first, and the command."""

import json
import re
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

import ffmem
from ffmem import cli
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.memory import NO_VALUES
from ffmem.interventions.checkpoint import edit_weights
from ffmem.interventions.compare import check_comparable, compare, summarize
from ffmem.interventions.edits import Edits
from tests.conftest import OURS
from tests.indexing.folders import content as files_of
from tests.interventions.pairs import compared, index_of, model
from tests.tiny import tiny, tiny_tokenizer

FAMILIES = ("llama", "gpt2", "opt")
"""Gated, ungated, and one whose lists may be empty; our own kinds come below."""

PAIR = {"first": "second", "second": "first"}


def plant_key(memories):
    """Give one memory of the last layer another key."""
    keys = memories.keys(memories.n_layers - 1).data
    keys[5] = 2 * torch.randn(keys.shape[1], generator=torch.Generator().manual_seed(7))


def plant_value(memories):
    values = memories.values(memories.n_layers - 1).data
    values[7] = torch.randn(values.shape[1], generator=torch.Generator().manual_seed(7))


def switch_off(memories):
    memories.values(memories.n_layers - 1).data[9] = 0


def plant_all(memories):
    for plant in (plant_key, plant_value, switch_off):
        plant(memories)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_index_compared_with_itself_is_the_same_in_everything(name, tmp_path):
    memories = model(name)
    found = compared(tmp_path, memories, memories)
    expected = {"change": 0, "value_change": 0, "active_change": 0}
    for column, numbers in found.numbers.items():
        known = numbers[~np.isnan(numbers)]
        assert len(known), column
        assert (known == expected.get(column, 1)).all(), column
    assert found.changed == found.changed_values == []
    assert found.overall["below_half"] == 0
    assert "No memory's triggers changed, nor its value." in str(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_planted_changes_are_found_and_come_first(name, tmp_path):
    """A key, a value and a switched-off value of the last layer: nothing else can change."""
    found = compared(tmp_path, model(name), model(name, plant_all))
    layer = len(found.rows) - 1
    cells = [row["cell"] for row in found.changed]
    # The key's memory has other triggers; the others have the same and differ by their values.
    assert cells == [f"L{layer}N5", f"L{layer}N9", f"L{layer}N7"]
    key, off, value = found.changed
    assert key["change"] > 0.1
    assert (key["value_cosine"], key["value_change"]) == (1, 0)
    assert off["change"] in (0, None)  # none: in one family nothing triggers it
    assert off["value_cosine"] is None
    assert (off["value_norm_ratio"], off["value_change"]) == (0, 1)
    assert value["change"] == 0
    assert value["value_cosine"] < 0.9
    assert {row["cell"] for row in found.changed_values} == {*cells[1:]}
    assert found.rows[0]["rbo"]["mean"] == 1
    assert found.rows[layer]["rbo"]["mean"] < 1


def test_the_other_way_around_everything_mirrors(tmp_path):
    one, other = model(), model(seed=1)
    there = compared(tmp_path, one, other)
    indexes = [ffmem.open(tmp_path / name) for name in ("second", "first")]
    (tmp_path / "back").mkdir()
    back = compare(*indexes, tmp_path / "back", first_model=other, second_model=one, top=5)
    for name, numbers in there.numbers.items():
        mirrored = back.numbers[name]
        if name.endswith("ratio"):
            mirrored = 1 / mirrored
        elif name == "active_change":
            mirrored = -mirrored
        np.testing.assert_allclose(numbers, mirrored, rtol=1e-12, err_msg=name)
    assert [row["cell"] for row in there.changed] == [row["cell"] for row in back.changed]
    for row, mirror in zip(there.changed, back.changed, strict=True):
        for side, opposite in PAIR.items():
            assert row[side] == mirror[opposite]
    for side, opposite in PAIR.items():
        assert there.settings[side] == back.settings[opposite]


def test_a_comparison_is_written_whole_and_twice_with_the_same_bytes(tmp_path):
    first, second = model(), model(edit=plant_all)
    found = compared(tmp_path, first, second)
    before = files_of(tmp_path / "out")
    assert set(before) == {"compare.json", "memories.parquet", "compare.svg", "compare.pdf"}
    compared(tmp_path, first, second)
    assert files_of(tmp_path / "out") == before
    assert json.loads(before["compare.json"]) == found.to_dict()
    table = pq.read_table(tmp_path / "out" / "memories.parquet")
    assert table["layer"].to_pylist() == [0] * 24 + [1] * 24
    assert table["memory"].to_pylist() == [*range(24)] * 2
    assert table.column_names[2:] == list(found.numbers)
    for name, numbers in found.numbers.items():
        expected = [None if np.isnan(number) else number for number in numbers.tolist()]
        assert table[name].to_pylist() == expected


def test_settings_name_both_models_and_what_differs(tmp_path):
    first, second = model(), model(edit=plant_value)
    settings = compared(tmp_path, first, second).settings
    assert settings["first"]["index"] == str(tmp_path / "first")
    assert settings["first"]["model_hash"] == first.fingerprint()
    assert settings["second"]["model_hash"] == second.fingerprint()
    assert settings["second"]["model"] == "in memory"
    assert settings["differences"] == {}
    assert settings["models"] is True


def test_an_index_of_another_dtype_is_compared_and_the_difference_told(tmp_path, capsys):
    first = model()
    second = ffmem.load(tiny("llama").to(torch.bfloat16), tiny_tokenizer())
    found = compared(tmp_path, first, second, progress=ffmem.progress.Progress())
    assert found.settings["differences"] == {"dtype": ["float32", "bfloat16"]}
    assert "differ in dtype: float32 and bfloat16." in capsys.readouterr().err
    assert found.overall["value_cosine"]["median"] > 0.999


def test_without_models_the_values_numbers_are_missing_and_that_is_told(tmp_path, capsys):
    first, second = model(), model(edit=plant_all)
    say = ffmem.progress.Progress()
    found = compared(tmp_path, first, second, models=False, progress=say)
    assert "models are not read: value_cosine" in capsys.readouterr().err
    assert found.overall["value_cosine"] == dict.fromkeys(("mean", "q1", "median", "q3")) | {"n": 0}
    assert [row["cell"] for row in found.changed] == ["L1N5"]
    assert found.changed[0]["value_cosine"] is None
    assert found.changed_values == []
    assert "The models were not read" in str(found)
    assert found.overall["value_tokens"]["n"] == 48


def test_models_are_found_where_the_indexes_say_or_where_they_are_now(tmp_path, model_folder):
    corpus = ffmem.Corpus(str(tmp_path / "lines.txt"), unit="line")
    (tmp_path / "lines.txt").write_text("one line\nanother line of it\n")
    folder = shutil.copytree(model_folder, tmp_path / "model")
    index = ffmem.index(str(folder), corpus, tmp_path / "index", t=3, threads=1, start="eos")
    found = compare(index, index, tmp_path, device="cpu")
    assert found.overall["value_cosine"]["mean"] == 1
    moved = folder.rename(tmp_path / "moved")
    with pytest.raises(FfmemError, match=r"If it has moved, pass its location with `first_model`"):
        compare(index, index, tmp_path, device="cpu")
    again = compare(index, index, tmp_path, first_model=moved, second_model=moved, device="cpu")
    assert again.to_dict() == found.to_dict()


def test_only_as_many_changed_memories_as_asked_for_are_listed(tmp_path):
    one, other = model(), model(seed=1)
    found = compared(tmp_path, one, other, top=3)
    assert len(found.changed) == len(found.changed_values) == 3
    changes = np.sort(found.numbers["change"])[::-1]
    assert [row["change"] for row in found.changed] == changes[:3].tolist()


def test_what_does_not_match_is_refused_before_anything_is_written(tmp_path):
    memories = model()
    first = index_of(tmp_path / "first", memories)
    second = index_of(tmp_path / "second", memories, t=4)
    with pytest.raises(StoreError, match="t: 3 in the first, 4 in the second"):
        compare(first, second, tmp_path / "out", models=False)
    with pytest.raises(FfmemError, match="top must be 1"):
        compare(first, first, tmp_path / "out", top=0)
    with pytest.raises(FfmemError, match="either models"):
        compare(first, first, tmp_path / "out", models=False, second_model=memories)
    assert not (tmp_path / "out").exists()


def test_the_summary_of_a_layer_leaves_out_what_does_not_exist():
    jaccard = np.array([0.2, 0.4, 0.5, 1.0, np.nan])
    row = summarize({"jaccard": jaccard, "rbo": np.full(5, np.nan)})
    assert row["jaccard"]["n"] == 4
    assert row["jaccard"]["median"] == pytest.approx(0.45)
    assert row["below_half"] == 0.5
    assert row["rbo"] == {"mean": None, "q1": None, "median": None, "q3": None, "n": 0}


def test_the_readable_summary_names_the_most_changed_first_with_both_triggers(tmp_path):
    found = compared(tmp_path, model(), model(edit=plant_all))
    text = str(found)
    assert text.index("L1N5 ") < text.index("L1N9 ") < text.index("L1N7 ")
    best = found.changed[0]
    for side in ("first", "second"):
        assert best[side]["trigger"]["prefix"] in text
    assert "cosine –" in text  # a value of zeros has none
    assert "Most changed values" in text


# Every kind of memory


SLOTS = [OURS[kind] for kind in ("softmax", "persistent", "lambda")]
VALUES = {"value_tokens", "value_cosine", "value_norm_ratio", "value_change"}


@pytest.mark.parametrize("name", SLOTS)
def test_a_model_is_the_same_as_itself(name, tmp_path):
    memories = model(name)
    found = compared(tmp_path, memories, memories)
    expected = {"change": 0, "value_change": 0, "active_change": 0}
    for column, numbers in found.numbers.items():
        known = numbers[~np.isnan(numbers)]
        assert bool(len(known)) == (memories.has_values or column not in VALUES), column
        assert (known == expected.get(column, 1)).all(), column
    assert found.changed == found.changed_values == []


@pytest.mark.parametrize("name", SLOTS)
def test_an_edit_of_the_last_layer_is_found(name, tmp_path):
    before = model(name)
    after = ffmem.load(edit_weights(before, Edits.of(off=["L1N5"])).model, tiny_tokenizer())
    found = compared(tmp_path, before, after)
    assert [row["cell"] for row in found.changed] == ["L1N5"]
    row = found.changed[0]
    if before.has_values:
        assert (row["value_change"], row["value_norm_ratio"]) == (1, 0)
        assert [one["cell"] for one in found.changed_values] == ["L1N5"]
    else:
        assert row["change"] == 1  # nothing triggers it any more
        assert row["second"]["max"] == 0
        assert all(row[column] is None for column in VALUES)
        assert found.changed_values == []


def test_a_comparison_of_lambda_layers_says_that_there_are_no_values(tmp_path):
    found = compared(tmp_path, model(OURS["lambda"]), model(OURS["lambda"], seed=1))
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert content["settings"]["values"] == "input"
    assert content["settings"]["models"] is False
    assert NO_VALUES in str(found)
    assert "cosine of the values" not in str(found)
    header = next(line for line in str(found).splitlines() if line.startswith("layer"))
    assert "cosine" not in header
    assert "⇒" not in str(found)
    assert (tmp_path / "out" / "compare.svg").exists()


def test_kinds_are_not_compared_with_each_other(tmp_path):
    softmax = index_of(tmp_path / "softmax", model(OURS["softmax"]))
    persistent = index_of(tmp_path / "persistent", model(OURS["persistent"]))
    with pytest.raises(StoreError, match="memory: softmax in the first, persistent in the second"):
        check_comparable(softmax, persistent)


# The command


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    index_of(folder / "first", model())
    index_of(folder / "second", model(edit=plant_key))
    return folder


def run_compare(*arguments):
    done = CliRunner().invoke(cli.cli, ["compare", *map(str, arguments)])
    if isinstance(done.exception, FfmemError):
        raise done.exception
    return done


def test_the_command_prints_a_summary_and_says_what_it_wrote(folders, tmp_path):
    out = tmp_path / "out"
    done = run_compare(folders / "first", folders / "second", "--out", out, "--no-models")
    assert done.exit_code == 0
    assert re.search(r"^L1N5 +change 0\.\d", done.stdout, re.MULTILINE)
    assert done.stdout.endswith(f"compare.svg and compare.pdf to {out}.\n")
    assert "The models are not read" in done.stderr
    assert (out / "compare.json").exists()


def test_json_is_the_file(folders, tmp_path):
    options = ("--out", tmp_path, "--no-models", "--json", "--top", 1)
    done = run_compare(folders / "first", folders / "second", *options)
    assert json.loads(done.stdout) == json.loads((tmp_path / "compare.json").read_text())


def test_a_folder_that_is_no_index_or_no_place_to_write_is_told(folders, tmp_path):
    with pytest.raises(StoreError, match="There is no index at nowhere"):
        run_compare(folders / "first", "nowhere", "--out", tmp_path)
    both = (folders / "first", folders / "second")
    with pytest.raises(StoreError, match=r"is an index\. Choose another folder"):
        run_compare(*both, "--out", folders / "second", "--no-models")


def test_a_model_that_is_gone_is_told_with_the_option_that_helps(folders, tmp_path):
    with pytest.raises(FfmemError, match=r"--first-model\. .* --no-models compares the"):
        run_compare(folders / "first", folders / "second", "--out", tmp_path)


def test_both_folders_and_a_place_are_needed(folders):
    assert run_compare(folders / "first", "--out", "x").exit_code == 2
    both = folders / "first", folders / "second"
    assert run_compare(*both).exit_code == 2
    assert run_compare(*both, "--out", "x", "--top", 0).exit_code == 2


def test_a_damaged_index_is_refused_and_nothing_is_left_behind(folders, tmp_path):
    shutil.copytree(folders / "second", tmp_path / "damaged")
    path = tmp_path / "damaged" / "stats" / "layer-000.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"is damaged: stats/layer-000\.parquet"):
        run_compare(
            folders / "first", tmp_path / "damaged", "--out", tmp_path / "new", "--no-models"
        )
    assert not (tmp_path / "new").exists()

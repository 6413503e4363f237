"""Laws of whole comparisons, and planted changes that must come first."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import ffmem
from ffmem.errors import FfmemError, StoreError
from ffmem.interventions.compare import compare, summarize
from tests.experiments.planting import FAMILIES
from tests.indexing.folders import content
from tests.interventions.pairs import compared, index_of, model
from tests.tiny import tiny, tiny_tokenizer

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
    before = content(tmp_path / "out")
    assert set(before) == {"compare.json", "memories.parquet", "compare.svg", "compare.pdf"}
    compared(tmp_path, first, second)
    assert content(tmp_path / "out") == before
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
    with pytest.raises(FfmemError, match=r"If it has moved, pass its location with --first-model"):
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

"""Comparisons of our own models, of every kind of memory."""

import json

import numpy as np
import pytest

import ffmem
from ffmem.errors import StoreError
from ffmem.indexing.memory import NO_VALUES
from ffmem.interventions.checkpoint import edit_weights
from ffmem.interventions.compare import check_comparable
from ffmem.interventions.edits import Edits
from tests.conftest import OURS
from tests.interventions.pairs import compared, index_of, model
from tests.tiny import tiny_tokenizer

VALUES = {"value_tokens", "value_cosine", "value_norm_ratio", "value_change"}


@pytest.mark.parametrize("name", OURS.values())
def test_a_model_is_the_same_as_itself(name, tmp_path):
    memories = model(name)
    found = compared(tmp_path, memories, memories)
    expected = {"change": 0, "value_change": 0, "active_change": 0}
    for column, numbers in found.numbers.items():
        known = numbers[~np.isnan(numbers)]
        assert bool(len(known)) == (memories.has_values or column not in VALUES), column
        assert (known == expected.get(column, 1)).all(), column
    assert found.changed == found.changed_values == []


@pytest.mark.parametrize("name", OURS.values())
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
    assert "cosine" not in str(found).splitlines()[5]
    assert "⇒" not in str(found)
    assert (tmp_path / "out" / "compare.svg").exists()


def test_kinds_are_not_compared_with_each_other(tmp_path):
    softmax = index_of(tmp_path / "softmax", model(OURS["softmax"]))
    persistent = index_of(tmp_path / "persistent", model(OURS["persistent"]))
    with pytest.raises(StoreError, match="memory: softmax in the first, persistent in the second"):
        check_comparable(softmax, persistent)

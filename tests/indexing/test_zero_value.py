"""A memory whose value is zero, as one that was switched off in the weights, promotes nothing."""

import csv

import pytest

import ffmem
from ffmem.indexing.memory import ZERO_VALUE
from ffmem.interventions.checkpoint import edit_weights
from ffmem.interventions.edits import Edits
from tests.conftest import OURS, text_model
from tests.texts import LINES


@pytest.fixture(params=["llama", "gpt2", *(OURS[kind] for kind in ("relu", "persistent"))])
def index(request, tokenizer, tmp_path):
    before = ffmem.load(text_model(request.param), tokenizer)
    model = edit_weights(before, Edits.of(off=["L1N3"])).model
    (tmp_path / "corpus.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return ffmem.index(ffmem.load(model, tokenizer), tmp_path / "corpus.txt", tmp_path / "index")


def test_nothing_stands_at_its_ends_and_everything_says_so(index, tmp_path):
    memory = index["L1N3"]
    assert (memory.value.top, memory.value.bottom) == ([], [])
    assert memory.to_dict()["value"] is None
    assert memory.to_dict()["value_note"] == ZERO_VALUE
    assert ZERO_VALUE in str(memory)
    assert "promotes  " not in str(memory)
    ffmem.export(index, "csv", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["cell"] == "L1N3"]
    assert {row["value_top"] for row in rows} == {""}
    assert index["L1N4"].value.top


def test_search_does_not_find_it_by_a_token(index):
    first = {
        hit.cell
        for id in range(3)
        for hit in ffmem.search(index, index.token(id), "values", limit=500)
    }
    assert "L1N3" not in first
    top = index["L1N4"].value.top[0].token
    assert "L1N4" in {hit.cell for hit in ffmem.search(index, top, "values", limit=500)}

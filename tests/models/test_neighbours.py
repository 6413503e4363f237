"""Neighbours against all cosines, one by one."""

import json

import pytest
import torch
from torch.nn.functional import cosine_similarity

import ffmem
from ffmem.cells import Cell
from ffmem.errors import FfmemError, UnknownCell
from ffmem.models.memories import neighbourhood, neighbours
from tests.test_cli import run
from tests.tiny import tiny, tiny_tokenizer

FAMILIES = ["gpt2", "llama", "gemma2", "granite", "phi3"]


@pytest.mark.parametrize("by", ["value", "key"])
@pytest.mark.parametrize("name", FAMILIES)
def test_neighbours_are_the_memories_of_largest_cosine(name, by):
    memories = ffmem.load(tiny(name), tiny_tokenizer())
    read = memories.output_directions if by == "value" else memories.keys
    own = read(1)[5]
    plain = {
        Cell(layer, memory): float(cosine_similarity(read(layer)[memory], own, dim=0))
        for layer in range(memories.n_layers)
        for memory in range(memories.layout.widths[0])
        if (layer, memory) != (1, 5)
    }
    expected = sorted(plain, key=lambda cell: -abs(plain[cell]))[:7]
    found = neighbours(memories, Cell(1, 5), by, 7)
    assert [one.cell for one in found] == expected
    assert [one.cosine for one in found] == pytest.approx([plain[c] for c in expected], abs=1e-5)


def test_a_planted_twin_and_its_opposite_come_first():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    memories.values(1)[3] = 2 * memories.values(0)[9]
    memories.values(1)[4] = -memories.values(0)[9]
    first, second = neighbours(memories, Cell(0, 9), n=2)
    assert (first.cell, second.cell) == (Cell(1, 3), Cell(1, 4))
    assert (first.cosine, second.cosine) == pytest.approx((1.0, -1.0), abs=1e-5)


def test_a_value_of_zeros_has_no_neighbours_and_is_nobodys():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    memories.values(0)[9] = 0
    assert neighbours(memories, Cell(0, 9)) == []
    everybody = neighbours(memories, Cell(0, 1), n=1000)
    assert len(everybody) == memories.n_layers * memories.layout.widths[0] - 2


def test_the_model_stays_as_it_is():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    before = memories.values(0).clone()
    neighbours(memories, Cell(0, 1))
    assert torch.equal(memories.values(0), before)


@pytest.mark.parametrize(
    ("cell", "by", "n", "error"),
    [
        (Cell(9, 0), "value", 1, UnknownCell),
        (Cell(0, 0), "gate", 1, FfmemError),
        (Cell(0, 0), "value", 0, FfmemError),
    ],
)
def test_what_is_not_there_cannot_be_asked_for(cell, by, n, error):
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    with pytest.raises(error):
        neighbours(memories, cell, by, n)


def test_the_command_and_the_function_say_the_same(model_folder):
    code, out, _ = run("neighbours", model_folder, "L0N3", "--by", "key", "--limit", 3, "--json")
    assert code == 0
    found = ffmem.neighbours(model_folder, "L0N3", by="key", n=3)
    assert json.loads(out) == [{"cell": str(c), "cosine": cosine} for c, cosine in found]
    assert run("neighbours", model_folder, "L0N3")[1].count("\n") == 10
    assert run("neighbours", model_folder, "L99N3")[0] == 1


def test_when_the_time_is_over_the_nearest_layers_were_searched():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    whole = neighbourhood(memories, Cell(1, 3), n=9999)
    assert whole.layers == list(range(memories.n_layers))
    assert whole.found == neighbours(memories, Cell(1, 3), n=9999)
    alone = neighbourhood(memories, Cell(1, 3), n=9999, seconds=-1.0)
    assert alone.layers == [1]
    assert alone.found == [one for one in whole.found if one.cell.layer == 1]

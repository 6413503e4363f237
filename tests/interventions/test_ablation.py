"""Ablations that share passes against one whole pass each, in every family."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ffmem
from ffmem.cells import Cell
from ffmem.interventions import effect as module
from ffmem.interventions.edits import Edits
from ffmem.interventions.effect import ablate
from ffmem.interventions.forward import PartialForward, apply_edits
from tests.tiny import TINY, read, tiny, tiny_tokenizer

IDS = [0, 5, 9, 2, 17, 30, 8]
TARGET = 11


@pytest.fixture(scope="module", params=list(TINY))
def memories(request):
    return read(request.param)


def log_p(memories, at):
    return memories.logits(torch.tensor([IDS]))[0, at].double().log_softmax(dim=0)[TARGET]


def one_by_one(memories, cells, at, positions=None):
    """One whole forward pass per memory."""
    clean, found = log_p(memories, at), []
    for cell in cells:
        with apply_edits(memories, Edits.of(off=[cell], positions=positions)):
            found.append(log_p(memories, at) - clean)
    return torch.stack(found)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """A few rows in each, from several layers."""
    monkeypatch.setattr("ffmem.interventions.forward.BATCH_TOKENS", 30)
    monkeypatch.setattr(module, "OVERHEAD", 1000)


def compare(memories, at, positions):
    cells = [
        Cell(layer, memory)
        for memory in range(0, memories.layout.widths[0], 7)
        for layer in reversed(memories.layout.memory_layers)
    ]
    steps = []
    found = ablate(PartialForward(memories, IDS, at), TARGET, cells, positions, steps.append)
    expected = one_by_one(memories, cells, at, positions)
    assert float(expected.abs().max()) > 1e-3
    assert float((found - expected).abs().max()) <= 1e-4
    assert sum(steps) == len(cells)


def test_a_change_is_that_of_a_whole_pass(memories):
    compare(memories, 3, None)


@pytest.mark.parametrize("name", ["llama", "opt", "bloom", "falcon", "gemma2"])
def test_memories_are_off_where_they_are_told_to_be(name):
    compare(ffmem.load(tiny(name), tiny_tokenizer()), 6, [1, 6])


def test_a_memory_that_rests_changes_nothing():
    memories = ffmem.load(tiny("opt"), tiny_tokenizer())
    memories.bank(1).keys.bias[4] = -1000
    found = ablate(PartialForward(memories, IDS, 6), TARGET, [Cell(1, 4)])
    assert abs(float(found[0])) < 1e-6


def cost(layers, cuts, n_layers, n_tokens):
    return sum(
        (n_layers - layers[begin] + 1) * ((end - begin) * n_tokens + module.OVERHEAD)
        for begin, end in pairwise(cuts)
    )


def every_way(n, most):
    """All ways to cut n rows into batches of at most so many."""
    if n == 0:
        return [[0]]
    return [[*cuts, n] for begin in range(max(0, n - most), n) for cuts in every_way(begin, most)]


@given(
    st.lists(st.integers(0, 11), max_size=9).map(sorted), st.integers(1, 9), st.integers(1, 2000)
)
def test_rows_are_cut_the_cheapest_way(layers, most, n_tokens):
    cuts = module.cheapest_cuts(layers, 12, n_tokens, most)
    assert cuts in every_way(len(layers), most)
    cheapest = min(cost(layers, way, 12, n_tokens) for way in every_way(len(layers), most))
    assert cost(layers, cuts, 12, n_tokens) == cheapest

"""A memory's coefficient along a text is the one that every prefix of it would have."""

import pytest
import torch

from ffmem.causal.along import along
from ffmem.cells import Cell
from ffmem.errors import UnknownCell
from tests.tiny import TINY, read


@pytest.mark.parametrize("name", TINY)
def test_every_token_has_the_coefficient_of_the_prefix_that_ends_there(name):
    memories = read(name)
    texts = [[5, 9, 2, 30, 7], [11], [4, 4, 8]]
    cell = Cell(memories.n_layers - 1, 3)
    for start in (None, 0):
        found = along(memories, cell, texts, start)
        assert [len(numbers) for numbers in found] == [5, 1, 3]
        for ids, numbers in zip(texts, found, strict=True):
            for length, number in enumerate(numbers, start=1):
                prefix = [*([] if start is None else [start]), *ids[:length]]
                last = memories.trace(torch.tensor([prefix]))[cell.layer].coefficients
                expected = last.reshape(-1, memories.layout.widths[0])[-1, 3]
                assert number == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def test_an_unknown_memory_is_refused():
    with pytest.raises(UnknownCell):
        along(read("llama"), Cell(99, 0), [[1]], None)

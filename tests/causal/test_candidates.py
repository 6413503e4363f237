"""Who is measured, and rank correlations against scipy's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

import ffmem
from ffmem.causal.candidates import candidates, named_cells, rank_correlation
from ffmem.causal.estimates import Estimates
from ffmem.cells import Cell, Layout
from ffmem.errors import FfmemError, UnknownCell
from tests.tiny import tiny, tiny_tokenizer


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=1, max_size=12))
def test_a_rank_correlation_is_spearmans(pairs):
    one, other = ([float(pair[side]) for pair in pairs] for side in (0, 1))
    found = rank_correlation(one, other)
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(float(spearmanr(one, other).statistic), abs=1e-12)


LAYOUT = Layout.dense([3, 0, 3])


def numbers(*rows):
    return torch.tensor([number for row in rows for number in row], dtype=torch.float64)


def test_the_largest_of_each_estimate_are_taken_in_turn():
    gradient = numbers([9, 0, -8], [0, 7, 0])
    direct = numbers([0, -5, 0], [0, 4, 3])
    found = candidates(LAYOUT, Estimates(gradient, direct, None), 4)
    assert list(map(str, found)) == ["L0N0", "L0N1", "L0N2", "L2N1"]
    assert candidates(LAYOUT, Estimates(gradient, None, None), 2) == [Cell(0, 0), Cell(0, 2)]


@given(st.integers(0, 8), st.integers(0, 3))
def test_there_are_as_many_as_asked_for_none_twice(n, seed):
    torch.manual_seed(seed)
    found = candidates(LAYOUT, Estimates(*(torch.randn(6).double() for _ in range(3))), n)
    assert len(found) == len(set(found)) == min(n, 6)


def test_named_memories_come_on_top_and_only_once():
    estimated = Estimates(numbers([3, 2, 1]), None, None)
    found = candidates(Layout.dense([3]), estimated, 1, [Cell(0, 0), Cell(0, 2)])
    assert found == [Cell(0, 0), Cell(0, 2)]


def test_a_memory_that_is_not_there_and_no_memory_at_all_are_refused():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    assert named_cells(memories, ["0.3", (1, 2)], 0) == [Cell(0, 3), Cell(1, 2)]
    with pytest.raises(UnknownCell, match="L9N0"):
        named_cells(memories, ["L9N0"], 5)
    with pytest.raises(FfmemError, match="nothing to measure"):
        named_cells(memories, [], 0)

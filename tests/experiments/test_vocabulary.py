"""Top, rank and probability of tokens, as their definitions say."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffmem.experiments.predictions import gaps
from ffmem.experiments.vocabulary import log_totals, probabilities, ranks, tops

ROWS = st.lists(st.integers(-3, 3), min_size=2, max_size=8)


@given(ROWS, st.data())
def test_top_rank_and_probability_are_as_defined(row, data):
    token = data.draw(st.integers(0, len(row) - 1))
    logits = torch.tensor([row], dtype=torch.float32)
    assert tops(logits).tolist() == [row.index(max(row))]
    assert ranks(logits, np.array([token])).tolist() == [sum(z > row[token] for z in row)]
    (found,) = probabilities(logits, log_totals(logits), np.array([token]))
    assert found == pytest.approx(np.exp(row[token]) / np.exp(row).sum(), rel=1e-5)


@given(ROWS)
def test_a_gap_is_between_the_first_two_and_leaves_the_logits_as_they_were(row):
    logits = torch.tensor([row], dtype=torch.float32)
    first, second, *_ = sorted(row, reverse=True)
    assert gaps(logits).tolist() == [first - second]
    assert logits.tolist() == [[float(z) for z in row]]

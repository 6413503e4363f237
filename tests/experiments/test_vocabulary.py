"""Top, rank and probability of tokens, as their definitions say."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffmem.experiments.vocabulary import BLOCK, SLICE, log_totals, probabilities, ranks, tops

ROWS = st.lists(st.integers(-3, 3), min_size=2, max_size=8)


def laid_out(row, by_token):
    """Logits of three vectors, the middle one as given, in one of the two layouts."""
    logits = torch.tensor([row[::-1], row, [0.0] * len(row)], dtype=torch.float32)
    return logits.T.contiguous().T if by_token else logits


@given(ROWS, st.booleans(), st.data())
def test_top_rank_and_probability_are_as_defined(row, by_token, data):
    token = data.draw(st.integers(0, len(row) - 1))
    logits, tokens = laid_out(row, by_token), np.full(3, token)
    assert tops(logits).tokens[1] == row.index(max(row))
    assert tops(logits).logits[1] == max(row)
    assert ranks(logits, tokens)[1] == sum(z > row[token] for z in row)
    found = probabilities(logits, log_totals(logits, tops(logits).logits), tokens)[1]
    assert found == pytest.approx(np.exp(row[token]) / np.exp(row).sum(), rel=1e-5)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("n", [BLOCK, BLOCK + 1, SLICE - 1, SLICE, 2 * SLICE + BLOCK // 2])
def test_a_vocabulary_of_many_slices_is_read_as_a_whole(n, by_token):
    numbers = np.random.default_rng(n).integers(-300, 300, n).astype(np.float32)
    logits, tokens = laid_out(numbers.tolist(), by_token), np.array([0, n - 1, n // 2])
    plain = logits.numpy()
    assert tops(logits).tokens.tolist() == plain.argmax(axis=1).tolist()
    own = plain[np.arange(3), tokens][:, None]
    assert ranks(logits, tokens).tolist() == (plain > own).sum(axis=1).tolist()
    exact = np.log(np.exp(plain.astype(float)).sum(axis=1))
    assert log_totals(logits, tops(logits).logits).numpy() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("n", [BLOCK - 3, 3 * BLOCK + 5])
def test_the_last_token_can_be_the_top(n):
    logits = torch.zeros(2, n)
    logits[0, -1] = 1
    assert tops(logits).tokens.tolist() == [n - 1, 0]


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=3 * BLOCK), st.booleans())
def test_a_gap_is_between_the_first_two_and_the_logits_stay_as_they_were(row, by_token):
    logits = laid_out(row, by_token)
    before = logits.clone()
    first, second, *_ = sorted(row, reverse=True)
    assert tops(logits).gaps[1] == first - second
    assert torch.equal(logits, before)

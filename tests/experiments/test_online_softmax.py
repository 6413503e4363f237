"""Top, rank and probability of tokens, as their definitions say, however they are sliced."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffmem.experiments.projection import BLOCK, SLICE, OnlineSoftmax, ranks

ROWS = st.lists(st.integers(-3, 3), min_size=2, max_size=8)


def laid_out(row, by_token):
    """Logits of three vectors, the middle one as given, in one of the two layouts."""
    logits = torch.tensor([row[::-1], row, [0.0] * len(row)], dtype=torch.float32)
    return logits.T.contiguous() if by_token else logits.T


def online(logits, cuts=(), targets=None):
    """An online softmax that gets the vocabulary in pieces."""
    found = OnlineSoftmax(targets)
    for piece in torch.tensor_split(logits, sorted(cuts)):
        found.update(piece)
    return found


@given(ROWS, st.booleans(), st.data())
def test_top_rank_and_probability_are_as_defined(row, by_token, data):
    token = data.draw(st.integers(0, len(row) - 1))
    cuts = data.draw(st.lists(st.integers(1, len(row) - 1), unique=True))
    logits, tokens = laid_out(row, by_token), np.full(3, token)
    found = online(logits, cuts, targets=tokens)
    assert found.tops[1] == row.index(max(row))
    assert found.logits[1] == max(row)
    assert found.target_logits[1] == row[token]
    assert ranks(logits, found.target_logits)[1] == sum(z > row[token] for z in row)
    expected = np.exp(row[token]) / np.exp(row).sum()
    assert found.probabilities[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("n", [BLOCK, BLOCK + 1, SLICE - 1, SLICE, 2 * SLICE + BLOCK // 2])
def test_a_vocabulary_of_many_slices_is_read_as_a_whole(n, by_token):
    numbers = np.random.default_rng(n).integers(-300, 300, n).astype(np.float32)
    logits, tokens = laid_out(numbers.tolist(), by_token), np.array([0, n - 1, n // 2])
    plain = logits.numpy()
    found = online(logits, (n // 3, n // 2), targets=tokens)
    assert found.tops.tolist() == plain.argmax(axis=0).tolist()
    own = plain[tokens, np.arange(3)]
    assert ranks(logits, found.target_logits).tolist() == (plain > own).sum(axis=0).tolist()
    sums = np.exp(plain.astype(float) - plain.max(axis=0)).sum(axis=0)
    exact = np.exp(own.astype(float) - plain.max(axis=0)) / sums
    assert found.probabilities == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("n", [BLOCK - 3, 3 * BLOCK + 5])
def test_the_last_token_can_be_the_top(n):
    logits = torch.zeros(n, 2)
    logits[-1, 0] = 1
    assert online(logits).tops.tolist() == [n - 1, 0]


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=3 * BLOCK), st.booleans())
def test_the_logits_stay_as_they_were(row, by_token):
    logits = laid_out(row, by_token)
    before = logits.clone()
    online(logits, targets=np.zeros(3, np.int64))
    assert torch.equal(logits, before)

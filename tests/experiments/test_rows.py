import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.experiments.rows import format_layers, lower_layers, trend, upper_layers


@given(st.integers(1, 100), st.integers(2, 16))
def test_layers_below_and_from_a_layer_on_are_all_layers(n_layers, paper_layer):
    parts = lower_layers(n_layers, paper_layer - 1) + upper_layers(n_layers, paper_layer)
    assert parts == list(range(n_layers))


def test_the_papers_layers_are_themselves_in_a_model_of_16():
    assert upper_layers(16, 11) == list(range(10, 16))
    assert lower_layers(16, 10) == list(range(10))


def test_relative_depth_decides_in_a_model_of_30():
    assert [layer + 1 for layer in upper_layers(30, 11)] == list(range(20, 31))
    assert format_layers(upper_layers(30, 10)) == "layers 18–30"
    assert upper_layers(1, 11) == [0]
    assert lower_layers(1, 10) == []


@given(st.lists(st.integers(-5, 5), min_size=3, max_size=12))
def test_the_trend_is_the_correlation_of_ranks(values):
    found = trend(values)
    if len(set(values)) == 1:
        assert found is None
        return
    ranks = [
        sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values
    ]
    n = len(values)
    mean = (n - 1) / 2
    covariance = sum((i - mean) * (rank - mean) for i, rank in enumerate(ranks))
    scale = sum((i - mean) ** 2 for i in range(n)) * sum((rank - mean) ** 2 for rank in ranks)
    assert found == pytest.approx(covariance / scale**0.5)


def test_the_trend_of_a_straight_line_is_1():
    assert trend([1, 5, 7, 8]) == pytest.approx(1)
    assert trend([3, 2, 1]) == pytest.approx(-1)
    assert trend([1, 2]) is None

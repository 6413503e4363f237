"""The table of docs/memories.md: what a softmax over its keys loses of a feed-forward layer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.softmax_view import fit_softmax, neural_memory, softmax_loss
from ffmem.models.load import load
from tests.tiny import tiny, tiny_tokenizer

TOKENS = torch.tensor([[0, 3, 14, 15, 9, 26], [0, 5, 35, 8, 9, 7]])


@settings(max_examples=10)
@given(st.floats(0.2, 5), st.sampled_from([-2.0, 0.5, 30.0]))
def test_the_fit_finds_a_planted_softmax_memory(temperature, scale):
    torch.manual_seed(0)
    scores, values = torch.randn(30, 20), torch.randn(20, 8)
    fit = fit_softmax(scores, values, scale * neural_memory(scores, values, temperature))
    assert fit.loss < 1e-5
    assert fit.temperature == pytest.approx(temperature, rel=0.02)
    assert fit.scale == pytest.approx(scale, rel=0.02)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_other_scale_or_temperature_loses_less_of_a_layer(name):
    memories = load(tiny(name), tiny_tokenizer())
    for row, trace in zip(softmax_loss(memories, [TOKENS]), memories.trace(TOKENS), strict=True):
        layer = row["layer"]
        x, y = trace.ff_input[:, 1:].flatten(0, 1), trace.value_output[:, 1:].flatten(0, 1)
        target = y - memories.bias(layer)
        scores = x @ memories.keys(layer).T + memories.key_bias(layer)

        def loss(temperature, scale, scores=scores, target=target, layer=layer):
            weights = (scores / temperature).softmax(1)
            missed = target - scale * weights @ memories.values(layer)
            return float((missed**2).sum() / (target**2).sum())

        assert 0 <= row["loss"] <= row["constant"] + 1 <= 2
        assert loss(row["temperature"], row["scale"]) == pytest.approx(row["loss"], abs=1e-4)
        for factor in (0.9, 1.1):
            assert loss(row["temperature"], factor * row["scale"]) >= row["loss"] - 1e-4
            assert loss(factor * row["temperature"], row["scale"]) >= row["loss"] - 1e-4


def test_a_softmax_memory_loses_nothing():
    for row in softmax_loss(load(tiny("ffmem_adaptive softmax"), tiny_tokenizer()), [TOKENS]):
        assert row["loss"] < 1e-5
        assert row["temperature"] == pytest.approx(1, rel=0.02)
        assert row["scale"] == pytest.approx(1, rel=0.02)

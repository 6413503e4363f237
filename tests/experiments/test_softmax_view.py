"""The exact view against the models' own layers; the softmax view against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.testing import assert_close
from transformers.activations import ACT2FN

from ffmem.errors import CorpusError
from ffmem.experiments.softmax_view import (
    MAX_RATIO,
    attention_over_slots,
    constant_loss,
    feed_forward_as_attention,
    fit_softmax_view,
    gated_as_attention,
    longest_share,
    neural_memory,
    softmax_loss,
)
from ffmem.models.load import load
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.memories import FeedForward, GatedMemory
from tests.tiny import read, tiny_tokenizer

OURS = ["ffmem_adaptive", "ffmem_adaptive gelu"]
PLAIN = ["gpt2", "opt", "gpt_neox", "gptj", "falcon", "bloom", "nemotron", *OURS]
GATED = ["llama", "llama with biases", "phi3", "gemma2", "qwen3", "ffmem_adaptive swiglu"]
TOKENS = torch.tensor([[1, 5, 9, 33, 12, 7], [1, 40, 41, 8, 60, 3]])

sizes = st.tuples(*(st.integers(1, 40) for _ in range(3)))


def parts(place, memory, hidden, seed=0):
    """x, K, b_K, V, b of random numbers."""
    torch.manual_seed(seed)
    shapes = ((place, hidden), (memory, hidden), (memory,), (memory, hidden), (hidden,))
    return [torch.randn(shape) / hidden**0.5 for shape in shapes]


def near(found, expected):
    """1e-5, of the largest number where that is above 1."""
    bound = 1e-5 * max(1.0, float(expected.abs().max()))
    assert float((found - expected).abs().max()) <= bound


@pytest.mark.parametrize("name", PLAIN)
def test_a_feed_forward_layer_is_attention_over_its_memories(name):
    memories = read(name)
    f = ACT2FN[memories.activation]
    for layer, trace in enumerate(memories.trace(TOKENS)):
        found = feed_forward_as_attention(
            trace.ff_input.flatten(0, 1),
            memories.keys(layer),
            memories.key_bias(layer),
            memories.values(layer),
            memories.bias(layer),
            f,
        )
        near(found, trace.value_output.flatten(0, 1))


@pytest.mark.parametrize("name", GATED)
def test_a_gated_layer_is_attention_with_the_product_of_two_scores_as_kernel(name):
    memories = read(name)
    for layer, trace in enumerate(memories.trace(TOKENS)):
        found = gated_as_attention(
            trace.ff_input.flatten(0, 1),
            (memories.keys(layer), memories.key_bias(layer)),
            (memories.up_keys(layer), memories.up_bias(layer)),
            memories.values(layer),
            memories.bias(layer),
            ACT2FN[memories.activation],
        )
        near(found, trace.value_output.flatten(0, 1))


def config(memory, hidden):
    return AdaptiveConfig(
        band_sizes=[8],
        band_widths=[hidden],
        hidden_size=hidden,
        intermediate_size=memory,
        num_attention_heads=1,
    )


@given(sizes, st.sampled_from(["relu", "gelu"]))
def test_feed_forward_memories_are_attention_at_every_size(size, name):
    _, memory, hidden = size
    x, *weights = parts(*size)
    layer = FeedForward(config(memory, hidden), name)
    layer.keys.weight.data, layer.keys.bias.data = weights[0], weights[1]
    layer.values.weight.data, layer.values.bias.data = weights[2].T, weights[3]
    found = feed_forward_as_attention(x, *weights, ACT2FN[name])
    near(found, layer(x[None])[0].detach())


@given(sizes)
def test_gated_memories_are_attention_at_every_size(size):
    _, memory, hidden = size
    x, gate, zeros, values, _ = parts(*size)
    up, zeros = gate.flip(0) + 0.1, torch.zeros_like(zeros)
    layer = GatedMemory(config(memory, hidden))
    layer.keys.weight.data, layer.up.weight.data = gate, up
    layer.values.weight.data = values.T
    found = gated_as_attention(
        x, (gate, zeros), (up, zeros), values, torch.zeros(hidden), functional.silu
    )
    near(found, layer(x[None])[0].detach())


@given(sizes, st.integers(0, 9))
def test_the_exact_view_is_a_sum_over_memories(size, seed):
    x, keys, key_bias, values, bias = parts(*size, seed)
    expected = torch.stack(
        [
            bias
            + sum(
                max(float(row @ key) + float(b), 0) * value
                for key, b, value in zip(keys, key_bias, values, strict=True)
            )
            for row in x
        ]
    )
    near(feed_forward_as_attention(x, keys, key_bias, values, bias, torch.relu), expected)


@given(sizes, st.integers(1, 4))
def test_with_a_softmax_as_kernel_attention_over_slots_is_plain_attention(size, heads):
    place, slot, width = size
    torch.manual_seed(0)
    query = torch.randn(place, heads, width)
    keys, values = torch.randn(2, heads, slot, width)
    expected = functional.scaled_dot_product_attention(query.transpose(0, 1), keys, values)
    found = attention_over_slots(
        query, keys, values, lambda scores: (scores / width**0.5).softmax(dim=-1)
    )
    assert_close(found.transpose(0, 1), expected, atol=1e-5, rtol=1e-5)


@given(sizes, st.floats(0.1, 10))
def test_neural_memory_is_a_softmax_at_a_temperature(size, temperature):
    x, keys, key_bias, values, _ = parts(*size)
    weights = ((x @ keys.T + key_bias) / temperature).softmax(dim=1)
    near(neural_memory(x, keys, key_bias, values, temperature), weights @ values)


@settings(max_examples=15)
@given(st.floats(0.2, 5), st.sampled_from([-2.0, 0.5, 30.0]))
def test_the_fit_finds_a_planted_softmax_memory(temperature, scale):
    x, keys, key_bias, values, _ = parts(30, 20, 8)
    made = scale * neural_memory(x, keys, key_bias, values, temperature)
    fit = fit_softmax_view(x, keys, key_bias, values, made)
    assert fit.loss < 1e-5
    assert fit.temperature == pytest.approx(temperature, rel=0.02)
    assert fit.scale == pytest.approx(scale, rel=0.02)
    assert not fit.at_bound


@settings(max_examples=15)
@given(sizes, st.integers(0, 9))
def test_no_other_scale_or_temperature_loses_less(size, seed):
    x, keys, key_bias, values, bias = parts(*size, seed)
    nothing = torch.zeros_like(bias)
    wanted = feed_forward_as_attention(x, keys, key_bias, values, nothing, functional.gelu)
    fit = fit_softmax_view(x, keys, key_bias, values, wanted)

    def loss(temperature, scale):
        view = scale * neural_memory(x, keys, key_bias, values, temperature)
        return float(((view - wanted) ** 2).sum() / (wanted**2).sum())

    assert 0 <= fit.loss <= 1
    assert loss(fit.temperature, fit.scale) == pytest.approx(fit.loss, abs=1e-4)
    for factor in (0.5, 0.9, 1.1, 2):
        assert loss(fit.temperature, factor * fit.scale) >= fit.loss - 1e-4
        if not fit.at_bound:
            assert loss(factor * fit.temperature, fit.scale) >= fit.loss - 1e-4


def test_longer_keys_are_fitted_at_a_higher_temperature():
    x, keys, key_bias, values, _ = parts(30, 20, 8)
    wanted = torch.relu(x @ keys.T + key_bias) @ values
    fit = fit_softmax_view(x, keys, key_bias, values, wanted)
    longer = fit_softmax_view(x, 8 * keys, 8 * key_bias, values, wanted)
    assert longer.temperature == pytest.approx(8 * fit.temperature, rel=1e-3)
    assert longer.loss == pytest.approx(fit.loss, abs=1e-6)


def test_a_temperature_at_the_end_of_the_search_is_told():
    x, keys, key_bias, values, _ = parts(30, 20, 8)
    winners = (x @ keys.T + key_bias).argmax(dim=1)
    fit = fit_softmax_view(x, keys, key_bias, values, values[winners])
    spread = float((x @ keys.T + key_bias).std(dim=1, correction=0).mean())
    assert fit.at_bound
    assert fit.temperature == pytest.approx(spread / MAX_RATIO, rel=1e-4)


def test_a_constant_output_is_wholly_explained_by_a_constant():
    row = torch.tensor([1.0, -2.0])
    assert constant_loss(row.repeat(5, 1)) == 0
    assert constant_loss(torch.stack([row, -row])) == 1


def test_the_longest_hundredth_is_of_places():
    read = torch.ones(200, 1)
    read[[3, 150, 151], 0] = 10.0
    assert longest_share(read) == pytest.approx(200 / (300 + 197))
    assert longest_share(torch.ones(1, 1)) == 1


def test_what_cannot_be_fitted_is_refused():
    x, keys, key_bias, values, _ = parts(3, 4, 5)
    with pytest.raises(ValueError, match="nothing to fit"):
        fit_softmax_view(x, keys, key_bias, values, torch.zeros(3, 5))
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be above 0"):
            neural_memory(x, keys, key_bias, values, temperature)


@pytest.mark.parametrize("name", ["opt", "gpt2", "llama", "gemma2", "ffmem_adaptive"])
def test_the_loss_of_a_model_is_that_of_its_layers_behind_the_first_position(name):
    memories = read(name)
    rows = softmax_loss(memories, [TOKENS[:1], TOKENS[1:, :4]])
    traces = zip(memories.trace(TOKENS[:1]), memories.trace(TOKENS[1:, :4]), strict=True)
    assert [row["layer"] for row in rows] == list(range(memories.n_layers))
    for layer, (row, both) in enumerate(zip(rows, traces, strict=True)):
        x = torch.cat([trace.ff_input[0, 1:] for trace in both])
        wanted = torch.cat([trace.value_output[0, 1:] for trace in both]) - memories.bias(layer)
        scores = x @ memories.keys(layer).T + memories.key_bias(layer)
        view = row["scale"] * (scores / row["temperature"]).softmax(1) @ memories.values(layer)
        expected = float(((wanted - view) ** 2).sum() / (wanted**2).sum())
        assert row["n"] == 5 + 3
        assert row["loss"] == pytest.approx(expected, abs=1e-4)
        assert 0 <= row["loss"] <= 1


def test_a_softmax_memory_loses_nothing():
    for row in softmax_loss(read("ffmem_adaptive softmax"), [TOKENS]):
        assert row["loss"] < 1e-5
        assert row["temperature"] == pytest.approx(1, rel=0.02)
        assert row["scale"] == pytest.approx(1, rel=0.02)


def test_a_layer_that_adds_nothing_has_no_loss():
    memories = read("opt")
    model = type(memories.model)(memories.model.config)
    model.load_state_dict(memories.model.state_dict())
    model.model.decoder.layers[1].fc1.bias.data[:] = -1e4
    rows = softmax_loss(load(model, tiny_tokenizer()), [TOKENS])
    assert rows[0]["loss"] is not None
    assert rows[1] == {"layer": 1, "n": 10} | dict.fromkeys(
        ["temperature", "scale", "loss", "at_bound", "constant", "longest"]
    )


def test_texts_of_one_token_are_refused():
    with pytest.raises(CorpusError, match="second token"):
        softmax_loss(read("opt"), [TOKENS[:, :1]])

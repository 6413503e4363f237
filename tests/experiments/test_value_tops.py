"""top(m·v) under both kinds of heads, against projecting every m·v by itself."""

import numpy as np
import pytest
import torch

from ffmem.experiments import values
from ffmem.experiments.values import AdaptiveTops, PlainTops
from tests.experiments.planting import context_of
from tests.indexing.folders import memories as load

COEFFICIENTS = (0.01, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0)


def projected(memories, layer, coefficients):
    values = memories.output_directions(layer)
    found = [memories.head.folded(c * values).double().argmax(dim=1) for c in coefficients]
    return torch.stack(found).numpy()


@pytest.mark.parametrize("seed", range(8))
def test_an_adaptive_softmax_is_weighed_band_by_band(seed, monkeypatch):
    monkeypatch.setattr(values, "PAIRS", 100)  # many chunks
    memories = load("ffmem_adaptive", seed)
    for layer in range(memories.n_layers):
        tops = AdaptiveTops(memories, layer)
        c = np.repeat(
            np.array(COEFFICIENTS, np.float32)[:, None], memories.layout.widths[0], axis=1
        )
        assert (tops.at(c) == projected(memories, layer, COEFFICIENTS)).all()
        assert (tops.plain == projected(memories, layer, [1.0])[0]).all()


def test_words_of_all_bands_win_somewhere_and_the_coefficient_matters():
    found = []
    for seed in range(8):
        found.append(projected(load("ffmem_adaptive", seed), 0, COEFFICIENTS))
    tokens = np.concatenate(found, axis=1)
    assert {int(band) for band in np.digitize(tokens, [32, 48]).ravel()} == {0, 1, 2}
    assert (tokens[0] != tokens[-1]).any()


@pytest.mark.parametrize("seed", range(4))
def test_a_negative_coefficient_of_a_gated_memory_promotes_what_minus_v_does(seed, monkeypatch):
    monkeypatch.setattr(values, "PAIRS", 100)
    memories = load("ffmem_adaptive swiglu", seed)
    signed = np.array([c * sign for c in COEFFICIENTS for sign in (-1, 1)], np.float32)
    random = np.random.default_rng(seed)
    for layer in range(memories.n_layers):
        tops = AdaptiveTops(memories, layer)
        expected = projected(memories, layer, signed.tolist())
        every = np.repeat(signed[:, None], memories.layout.widths[0], axis=1)
        assert (tops.at(every) == expected).all()
        # Signs and sizes mixed within a row.
        places = random.integers(0, len(signed), (9, memories.layout.widths[0]))
        columns = np.arange(memories.layout.widths[0])
        assert (tops.at(signed[places]) == expected[places, columns]).all()


def test_an_inactive_memory_stands_for_its_value():
    memories = load("ffmem_adaptive")
    tops = AdaptiveTops(memories, 0)
    assert (tops.at(np.zeros((1, memories.layout.widths[0]), np.float32)) == tops.plain).all()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
def test_a_plain_head_needs_the_sign_alone(tmp_path, name):
    context = context_of(tmp_path / "index", name)
    for layer in range(context.memories.n_layers):
        tops = PlainTops(context.index, layer)
        signs = (2.5, -0.5)
        c = np.repeat(
            np.array(signs, np.float32)[:, None], context.memories.layout.widths[0], axis=1
        )
        assert (tops.at(c) == projected(context.memories, layer, signs)).all()
        assert (tops.plain == tops.at(c)[0]).all()

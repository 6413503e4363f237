"""Compositions of the last layer: which are shown, what of them, and how they are judged."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ffmem.experiments import last_layer_composition as composition
from ffmem.experiments.base import find
from ffmem.experiments.last_layer_composition import cosines, embeddings
from ffmem.experiments.metrics import Predictions
from tests.experiments.planting import KINDS, LAMBDA
from tests.experiments.test_forward import make_context

last_layer_composition = find("last-layer-composition").run


@pytest.fixture(scope="module", params=["gpt2", "llama", "ffmem_adaptive", *KINDS, LAMBDA])
def context(request, tmp_path_factory):
    return make_context(tmp_path_factory.mktemp("context"), request.param)


def test_every_row_is_a_composition_and_shows_its_tokens(context):
    result = last_layer_composition(context)
    head, start = context.memories.head, context.index.manifest.start.id
    tokens = context.index.token
    found = context.measured(Predictions).cases()["composition"][:, -1]
    assert len(result.rows) == min(100, found.sum()) == result.also["n"]
    assert result.also["compositions"] == found.sum()
    examples = {example.number: example for example in context.prompt_sample.sentences}
    for row in result.rows:
        ids = examples[row["sentence"]].sentence.ids
        p = row["length"]
        last = context.memories.trace(torch.tensor([[start, *ids[:p]]]))[-1]
        readings = {
            "residual": head.logits(last.residual[0, -1:]),
            "ff": head.folded(last.ff_output[0, -1:]),
            "output": head.logits(last.layer_output[0, -1:]),
        }
        for name, logits in readings.items():
            first = [tokens(id) for id in logits[0].topk(5).indices.tolist()]
            assert row[f"{name}_top5"] == first
            assert row[f"{name}_top"] == first[0]
        assert row["output_top"] not in (row["residual_top"], row["ff_top"])
        assert row["prefix"].split() == [tokens(id) for id in ids[:p]]
        assert row["next_token"] == (tokens(ids[p]) if p < len(ids) else None)


def test_no_more_than_a_hundred_are_drawn_and_the_seed_decides_which(context, monkeypatch):
    monkeypatch.setattr(composition, "CASES", 3)
    first = last_layer_composition(context).rows
    assert len(first) == 3
    assert first == last_layer_composition(context).rows
    monkeypatch.setattr(context, "config", replace(context.config, seed=5))
    assert first != last_layer_composition(context).rows


def test_related_is_what_lies_above_the_threshold(context):
    result = last_layer_composition(context)
    threshold = result.also["threshold"]
    for row in result.rows:
        assert row["related"] == (row["similarity"] > threshold)
        assert -1.001 <= row["similarity"] <= 1.001
    related = [row["related"] for row in result.rows]
    assert result.also["related_share"] == sum(related) / len(related)


def test_few_random_pairs_of_predictions_lie_above_the_threshold(context):
    threshold = last_layer_composition(context).also["threshold"]
    final = context.measured(Predictions).final
    left, right = (side.ravel() for side in np.meshgrid(final, final))
    different = left != right
    found = cosines(embeddings(context.memories), left[different], right[different]).numpy()
    assert abs((found > threshold).mean() - 0.05) < 0.05


def test_an_adaptive_models_words_are_compared_by_how_they_enter(context):
    vectors = embeddings(context.memories)
    assert len(vectors) == context.memories.vocabulary
    if context.memories.head.adaptive:
        token = torch.tensor([[40]])
        expected = context.memories.model.get_input_embeddings()(token)[0, 0]
        assert torch.allclose(vectors[40], expected)
    else:
        assert torch.equal(vectors, context.memories.head.embedding)


def test_a_model_that_always_says_the_same_has_no_threshold():
    vectors = torch.eye(4)
    random = np.random.default_rng(0)
    assert composition._threshold(vectors, np.array([2, 2, 2]), random) is None

import math
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ffmem import progress
from ffmem.errors import ModelError
from ffmem.networks.model import AdaptiveLM
from ffmem.progress import Progress
from ffmem.training.config import KINDS
from ffmem.training.train import match_parameters
from ffmem.training.trainer import (
    format_numbers,
    learning_rate,
    make_optimizer,
    model_config,
    new_model,
    perplexity,
)
from tests.training.small import tiny_config


@given(st.integers(2, 400), st.floats(1e-5, 1))
def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth(steps, peak):
    warmup = tiny_config().warmup_steps(steps)
    rates = [learning_rate(step, steps, warmup, peak) for step in range(steps)]
    for step, (rate, following) in enumerate(pairwise(rates)):
        assert rate <= following if step < warmup else rate > following
    assert max(rates) == peak == rates[warmup]
    assert min(rates) > 0
    assert 0.1 * peak <= learning_rate(steps, steps, warmup, peak) <= 0.1001 * peak


def test_warm_up_is_linear():
    rates = [learning_rate(step, 100, 4, 8.0) for step in range(5)]
    assert rates == [2, 4, 6, 8, 8]


def test_a_warm_up_longer_than_the_run_only_rises():
    assert [learning_rate(step, 3, 10, 10.0) for step in range(3)] == [1, 2, 3]


def count(config, memory, memories):
    """The parameters that one token reaches."""
    model = AdaptiveLM(model_config(config, 40, 2, memory, memories))
    share = config.top_experts / config.experts
    return sum(
        round(weight.numel() * (share if ".experts." in name else 1))
        for name, weight in model.named_parameters()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_number_of_memories_matches_better(kind):
    config = tiny_config(memory=kind, match="relu", memories=40, layers=1)
    memories, parameters, target = match_parameters(config, 40, 2)
    assert target == count(config, "relu", 40)
    assert parameters == count(config, kind, memories)
    distances = [abs(count(config, kind, n) - target) for n in range(1, 60)]
    assert abs(parameters - target) == min(distances)


def test_without_matching_there_are_as_many_memories_as_asked():
    assert match_parameters(tiny_config(), 40, 2) == (12, count(tiny_config(), "relu", 12), None)
    assert match_parameters(tiny_config(memories=None), 40, 2)[0] == 64


def test_a_model_that_is_larger_with_a_single_memory_cannot_be_matched():
    config = tiny_config(memory="lambda", match="persistent", memories=1, key_width=64, layers=1)
    with pytest.raises(ModelError, match=r"`match` persistent: .* even with a single memory"):
        match_parameters(config, 40, 2)


def test_clusters_of_the_vocabulary_end_at_the_cutoffs():
    config = model_config(tiny_config(width=64, heads=2, cutoffs=[10, 25]), 40, 2, "relu", 12)
    assert (config.band_sizes, config.band_widths) == ([10, 15, 15], [64, 16, 8])
    config = model_config(tiny_config(cutoffs=None), 40, 2, "relu", 12)
    assert (config.band_sizes, config.band_widths) == ([40], [16])


def test_cutoffs_beyond_the_vocabulary_are_refused():
    with pytest.raises(ModelError, match=r"`cutoffs` 10,40: the vocabulary has only 40 tokens"):
        model_config(tiny_config(cutoffs=[10, 40]), 40, 2, "relu", 12)


def test_matrices_decay_and_norms_biases_and_embeddings_do_not():
    model = AdaptiveLM(model_config(tiny_config(), 40, 2, "relu", 12))
    optimizer = make_optimizer(model, 0.1)
    names = {id(weight): name for name, weight in model.named_parameters()}
    decayed, others = (
        {names[id(weight)] for weight in group["params"]} for group in optimizer.param_groups
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert decayed | others == set(names.values())
    assert all("embedding" in n or "norm" in n or n.endswith("bias") for n in others)
    assert any("memory.keys.weight" in n for n in decayed)
    assert not any("embedding" in n or "norm" in n or n.endswith("bias") for n in decayed)


@pytest.fixture(scope="module")
def model():
    config = tiny_config(dropout=0.5)
    return new_model(model_config(config, 40, 2, "relu", 12), 0, torch.device("cpu")).train()


@pytest.mark.parametrize("length", [1, 7, 16, 17, 40])
@pytest.mark.parametrize("n_blocks", [1, 2, 100])
def test_every_token_counts_once_whatever_the_blocks(model, length, n_blocks):
    context = 8
    stream = np.random.default_rng(length).integers(0, 40, length).astype(np.int32)
    found = perplexity(model, stream, context, n_blocks)
    assert model.training  # dropout is on again, and was off
    ring = [*stream.tolist(), int(stream[0])]
    total = 0.0
    with torch.no_grad():
        model.eval()
        for place in range(length):
            before = ring[place // context * context : place + 1]
            log_p = model(torch.tensor([before])).logits[0, -1]
            total -= float(log_p[ring[place + 1]])
        model.train()
    assert found == pytest.approx(math.exp(total / length), rel=1e-5)


def test_a_model_in_evaluation_stays_there(model):
    model.eval()
    perplexity(model, np.arange(9, dtype=np.int32), 8, 2)
    assert not model.training
    model.train()


def test_numbers_are_formatted_in_one_line():
    assert format_numbers(2.0, None, 1234.4) == "loss 2.000, perplexity 7.4, 1,234 tokens/s"
    assert format_numbers(2.0, 9.0, 1.0) == "loss 2.000, perplexity 7.4, valid 9.0, 1 tokens/s"
    assert "∞" in format_numbers(1e4, None, 1.0)


def test_without_a_terminal_a_line_is_printed_now_and_then(monkeypatch, capsys):
    with Progress().bar("Training", 100, "steps", 1, lambda: "loss 2.000") as step:
        step(1)
        assert capsys.readouterr().err == ""
        monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
        step(10)
        assert capsys.readouterr().err == "Training 12/100: loss 2.000\n"
    with Progress().bar("Values", 100, "layers") as step:
        step(0)
        assert capsys.readouterr().err == ""
        step(1)
    assert re.fullmatch(r"Values 1/100: \S+ layers/s\n", capsys.readouterr().err)
    with Progress(quiet=True).bar("Training", 100, "steps", 1, lambda: "loss 2.000") as step:
        step(1)
    assert capsys.readouterr().err == ""

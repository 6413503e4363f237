import math

import numpy as np
import pytest
import torch

from ffmem.training.evaluation import perplexity
from ffmem.training.network import config_of, new_model
from tests.training.small import settings


@pytest.fixture(scope="module")
def model():
    given = settings(dropout=0.5)
    return new_model(config_of(given, 40, 2, "relu", 12), 0, torch.device("cpu")).train()


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

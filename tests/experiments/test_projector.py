"""Three vectors read as each by itself, where rounding could show: tiny y, half precision."""

import numpy as np
import pytest
import torch

import ffmem
from ffmem.experiments.projection import Projector
from tests.tiny import tiny, tiny_tokenizer

TOKENS = torch.tensor([[0, 3, 14, 15, 9, 26], [0, 5, 35, 8, 9, 7]])
PLACES = torch.cartesian_prod(torch.arange(2), torch.arange(6))


def read(memories, trace):
    """What a layer's vectors predict, and how each is read by itself."""
    projector, head = Projector(memories), memories.head
    found = projector.read(trace, projector.final(trace))
    plain = {
        "residual_top": head.logits(trace.residual),
        "ff_top": head.folded(trace.ff_output),
        "output_top": head.logits(trace.layer_output),
    }
    return found, plain


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi", "cohere", "ffmem_adaptive"])
def test_a_y_that_is_lost_beside_its_residual_is_read_as_it_is(name):
    memories = ffmem.load(tiny(name), tiny_tokenizer())
    for trace in memories.trace(TOKENS, PLACES):
        small, large = 1e-6 * trace.ff_output, 30 * trace.residual
        beside = trace._replace(ff_output=small, residual=large, layer_output=large + small)
        found, plain = read(memories, beside)
        y = plain["ff_top"]
        assert found.ff_top[:, 0].tolist() == y.argmax(dim=1).tolist()
        same = found.ff_top[:, 0] == found.residual_top[:, 0]
        assert (found.ff_residual_rank[:, 0] == 0).tolist() == same.tolist()


@pytest.mark.parametrize("name", ["llama", "phi", "cohere", "gemma2", "olmo2", "ffmem_adaptive"])
def test_half_precision_is_read_to_its_own_rounding(name):
    memories = ffmem.load(tiny(name).to(torch.bfloat16), tiny_tokenizer())
    for trace in memories.trace(TOKENS, PLACES):
        found, plain = read(memories, trace)
        for column, logits in plain.items():
            tops = torch.from_numpy(getattr(found, column))
            rounding = 2**-7 * logits.abs().amax(dim=1)
            assert (logits.gather(1, tops)[:, 0] >= logits.amax(dim=1) - rounding).all()
        final = torch.from_numpy(found.output_top)
        shares = plain["residual_top"].softmax(dim=1).gather(1, final).numpy()
        np.testing.assert_allclose(found.residual_final_probability, shares, rtol=0.1)


def test_a_layer_that_adds_nothing_says_the_first_token_of_all_equals():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    trace = memories.trace(
        TOKENS.repeat(4, 1), torch.cartesian_prod(torch.arange(8), torch.arange(6))
    )[0]
    nothing = trace._replace(ff_output=0 * trace.residual, layer_output=trace.residual)
    found, _ = read(memories, nothing)
    assert not found.ff_top.any()
    assert not found.ff_residual_rank.any()

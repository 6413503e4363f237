"""Estimates against finite differences, exact sums and whole ablations, in every family."""

import pytest
import torch
from torch.testing import assert_close

import ffmem
from ffmem.causal.editing import editing
from ffmem.causal.edits import Edits
from ffmem.causal.estimates import direct, estimates, frozen_slope, gradient, integrated
from ffmem.causal.upward import Upward
from tests.conftest import OURS
from tests.tiny import TINY, read, tiny, tiny_tokenizer

IDS = [0, 5, 9, 2, 17, 30, 8]
AT, TARGET = 5, 11
SOME = ("bloom", "falcon", "gpt_neox", "granite", "llama", "opt", "phi", *OURS.values())


@pytest.fixture(scope="module", params=list(TINY))
def memories(request):
    return read(request.param)


def log_p(memories):
    return float(memories.logits(torch.tensor([IDS]))[0, AT].double().log_softmax(dim=0)[TARGET])


def edited(memories, **edits):
    with editing(memories, Edits.of(**edits)):
        return log_p(memories)


def difference(memories, cell, step, positions):
    """How fast log p rises when a coefficient shrinks, by two steps around it."""
    more = edited(memories, scale={cell: 1 + step}, positions=positions)
    less = edited(memories, scale={cell: 1 - step}, positions=positions)
    return (less - more) / (2 * step)


def by_layer(memories, estimate):
    return estimate.split(memories.layout.widths)


def compare_slopes(memories, positions):
    found = gradient(Upward(memories, IDS, AT), TARGET, positions)
    assert found.shape == (len(memories.layout),)
    for layer in memories.layout.memory_layers:
        for memory in (0, 7):
            slope = pytest.approx(
                float(by_layer(memories, found)[layer][memory]), abs=1e-3, rel=1e-2
            )
            # A large step may cross the kink of a ReLU; a small one is noisier.
            steps = (0.02, 0.002, 0.0005)
            assert any(
                slope == difference(memories, f"L{layer}N{memory}", step, positions)
                for step in steps
            )


def test_the_gradient_is_the_slope_when_a_coefficient_shrinks(memories):
    compare_slopes(memories, None)


@pytest.mark.parametrize("name", ["llama", "opt", "bloom", "falcon", "gemma2"])
def test_the_gradient_is_summed_where_memories_are_off(name):
    compare_slopes(ffmem.load(tiny(name), tiny_tokenizer()), [1, 5])


def frozen_log_p(head, h, sigma):
    """log softmax(cap(folded(h)/σ₀ + s·c)), as it is defined."""
    if head.adaptive:
        return head.output.log_probabilities(h)[0, TARGET]
    logits = head.folded(h) / sigma + head.scale * head.constant()
    if head.cap is not None:
        logits = head.cap * (logits / head.cap).tanh()
    return logits.double().log_softmax(dim=1)[0, TARGET]


def test_g_is_the_slope_of_log_p_with_the_norm_frozen(memories):
    upward = Upward(memories, IDS, AT)
    g, h = frozen_slope(upward, TARGET), upward.output
    sigma = memories.head.denominator(h)
    torch.manual_seed(0)
    for _ in range(3):
        way = torch.randn(1, memories.hidden)
        way = way * 0.01 * sigma / way.norm()
        more = frozen_log_p(memories.head, h + way, sigma)
        less = frozen_log_p(memories.head, h - way, sigma)
        found = 2 * float(way[0] @ g)
        assert found == pytest.approx(float(more - less), rel=2e-2, abs=1e-5)


def test_direct_parts_sum_to_what_the_layer_adds(memories):
    upward = Upward(memories, IDS, AT)
    found = direct(upward, TARGET)
    if memories.row.output_norm is not None:
        assert found is None
        return
    g = frozen_slope(upward, TARGET)
    for layer, trace in enumerate(upward.layers):
        if memories.row.post_norm is None:
            y = trace.ff_output[0] - memories.multiplier * memories.bias(layer)
        elif memories.bias(layer).any():
            continue  # the norm sees m · V + b together
        else:
            y = trace.ff_output[0]
        assert float(by_layer(memories, found)[layer].sum()) == pytest.approx(
            -float(g @ y), rel=1e-3, abs=1e-4
        )


def test_direct_is_exact_where_everything_behind_a_memory_is_linear():
    """No final norm, and an infinitesimal value: the last layer's direct effect is its change."""
    memories = ffmem.load(tiny("ffmem_adaptive"), tiny_tokenizer())
    memories.values(1).mul_(1e-2)
    upward = Upward(memories, IDS, AT)
    found, clean = direct(upward, TARGET), log_p(memories)
    for memory in range(0, memories.layout.widths[0], 5):
        change = edited(memories, off=[(1, memory)]) - clean
        assert float(by_layer(memories, found)[1][memory]) == pytest.approx(
            change, rel=5e-2, abs=5e-6
        )


def test_away_from_the_position_nothing_is_direct():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    upward = Upward(memories, IDS, AT)
    assert not direct(upward, TARGET, [0, 3]).any()
    assert_close(direct(upward, TARGET, [0, AT]), direct(upward, TARGET))


def layer_off(memories, layer, positions=None):
    every = [(layer, memory) for memory in range(memories.layout.widths[0])]
    return edited(memories, off=every, positions=positions) - log_p(memories)


@pytest.mark.parametrize("name", SOME)  # behind a norm of y, the slope at 0 has no bound
def test_integrated_gradients_are_complete(name):
    memories, positions = ffmem.load(tiny(name), tiny_tokenizer()), [1, 2, AT]
    upward = Upward(memories, IDS, AT)
    found = integrated(upward, TARGET, 60, positions)
    for layer in memories.layout.memory_layers:
        exact = layer_off(memories, layer, positions)
        assert float(by_layer(memories, found)[layer].sum()) == pytest.approx(
            exact, rel=2e-2, abs=2e-2
        )


def test_more_steps_come_closer():
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    upward = Upward(memories, IDS, AT)
    exact = layer_off(memories, 0)
    errors = [
        abs(float(by_layer(memories, integrated(upward, TARGET, steps))[0].sum()) - exact)
        for steps in (1, 4, 40)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-2 * abs(exact)  # the middles of the steps, not their ends


def test_steps_may_be_more_than_a_batch_holds(monkeypatch):
    memories = ffmem.load(tiny("llama"), tiny_tokenizer())
    upward = Upward(memories, IDS, AT)
    whole = integrated(upward, TARGET, 7)
    monkeypatch.setattr("ffmem.causal.upward.BATCH_TOKENS", 2 * len(IDS))
    assert_close(integrated(upward, TARGET, 7), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SOME)
def test_the_model_stays_frozen_and_keeps_no_gradient(name):
    memories = ffmem.load(tiny(name), tiny_tokenizer())
    before = memories.logits(torch.tensor([IDS]))
    found = estimates(Upward(memories, IDS, AT), TARGET, steps=2)
    assert found.integrated is not None
    assert not any(p.requires_grad or p.grad is not None for p in memories.model.parameters())
    assert torch.equal(memories.logits(torch.tensor([IDS])), before)

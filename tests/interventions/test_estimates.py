"""Estimates against finite differences, exact sums and whole ablations, in every family."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from torch.testing import assert_close

import ffmem
from ffmem.cells import Cell, Layout
from ffmem.interventions.edits import Edits
from ffmem.interventions.estimates import (
    choose_candidates,
    direct,
    estimate,
    frozen_slope,
    gradient,
    integrated,
    rank_correlation,
)
from ffmem.interventions.forward import apply_edits
from ffmem.interventions.partial_forward import PartialForward
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
    with apply_edits(memories, Edits.of(**edits)):
        return log_p(memories)


def difference(memories, cell, step, positions):
    """How fast log p rises when a coefficient shrinks, by two steps around it."""
    more = edited(memories, scale={cell: 1 + step}, positions=positions)
    less = edited(memories, scale={cell: 1 - step}, positions=positions)
    return (less - more) / (2 * step)


def by_layer(memories, estimate):
    return estimate.split(memories.layout.widths)


def compare_slopes(memories, positions):
    found = gradient(PartialForward(memories, IDS, AT), TARGET, positions)
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
    compare_slopes(read(name), [1, 5])


def frozen_log_p(head, h, sigma):
    """log softmax(cap(folded(h)/σ₀ + s·c)), as it is defined."""
    if head.adaptive:
        return head.output.log_probabilities(h)[0, TARGET]
    logits = head.folded(h) / sigma + head.scale * head.constant()
    if head.cap is not None:
        logits = head.cap * (logits / head.cap).tanh()
    return logits.double().log_softmax(dim=1)[0, TARGET]


def test_g_is_the_slope_of_log_p_with_the_norm_frozen(memories):
    forward = PartialForward(memories, IDS, AT)
    g, h = frozen_slope(forward, TARGET), forward.output
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
    forward = PartialForward(memories, IDS, AT)
    found = direct(forward, TARGET)
    if memories.row.output_norm is not None:
        assert found is None
        return
    g = frozen_slope(forward, TARGET)
    for layer, trace in enumerate(forward.layers):
        if memories.row.post_norm is None:
            y = trace.ff_output[0] - memories.output_scale(layer) * memories.bias(layer)
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
    forward = PartialForward(memories, IDS, AT)
    found, clean = direct(forward, TARGET), log_p(memories)
    for memory in range(0, memories.layout.widths[0], 5):
        change = edited(memories, off=[(1, memory)]) - clean
        assert float(by_layer(memories, found)[1][memory]) == pytest.approx(
            change, rel=5e-2, abs=5e-6
        )


def test_away_from_the_position_nothing_is_direct():
    memories = read("llama")
    forward = PartialForward(memories, IDS, AT)
    assert not direct(forward, TARGET, [0, 3]).any()
    assert_close(direct(forward, TARGET, [0, AT]), direct(forward, TARGET))


def layer_off(memories, layer, positions=None):
    every = [(layer, memory) for memory in range(memories.layout.widths[0])]
    return edited(memories, off=every, positions=positions) - log_p(memories)


@pytest.mark.parametrize("name", SOME)  # behind a norm of y, the slope at 0 has no bound
def test_integrated_gradients_are_complete(name):
    memories, positions = read(name), [1, 2, AT]
    forward = PartialForward(memories, IDS, AT)
    found = integrated(forward, TARGET, 60, positions)
    for layer in memories.layout.memory_layers:
        exact = layer_off(memories, layer, positions)
        assert float(by_layer(memories, found)[layer].sum()) == pytest.approx(
            exact, rel=2e-2, abs=2e-2
        )


def test_more_steps_come_closer():
    memories = read("llama")
    forward = PartialForward(memories, IDS, AT)
    exact = layer_off(memories, 0)
    errors = [
        abs(float(by_layer(memories, integrated(forward, TARGET, steps))[0].sum()) - exact)
        for steps in (1, 4, 40)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-2 * abs(exact)  # the middles of the steps, not their ends


def test_steps_may_be_more_than_a_batch_holds(monkeypatch):
    memories = read("llama")
    forward = PartialForward(memories, IDS, AT)
    whole = integrated(forward, TARGET, 7)
    monkeypatch.setattr("ffmem.interventions.partial_forward.BATCH_TOKENS", 2 * len(IDS))
    assert_close(integrated(forward, TARGET, 7), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SOME)
def test_the_model_stays_frozen_and_keeps_no_gradient(name):
    memories = read(name)
    before = memories.logits(torch.tensor([IDS]))
    found = estimate(PartialForward(memories, IDS, AT), TARGET, steps=2)
    assert found["integrated"] is not None
    assert not any(p.requires_grad or p.grad is not None for p in memories.model.parameters())
    assert torch.equal(memories.logits(torch.tensor([IDS])), before)


# Which memories are measured


@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=1, max_size=12))
def test_a_rank_correlation_is_spearmans(pairs):
    one, other = ([float(pair[side]) for pair in pairs] for side in (0, 1))
    found = rank_correlation(*(torch.tensor(numbers) for numbers in (one, other)))
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(float(spearmanr(one, other).statistic), abs=1e-12)


LAYOUT = Layout.dense([3, 0, 3])


def numbers(*rows):
    return torch.tensor([number for row in rows for number in row], dtype=torch.float64)


def test_the_largest_of_each_estimate_are_taken_in_turn():
    gradient = numbers([9, 0, -8], [0, 7, 0])
    direct = numbers([0, -5, 0], [0, 4, 3])
    found = choose_candidates(LAYOUT, {"gradient": gradient, "direct": direct}, 4)
    assert list(map(str, found)) == ["L0N0", "L0N1", "L0N2", "L2N1"]
    assert choose_candidates(LAYOUT, {"gradient": gradient, "direct": None}, 2) == [
        Cell(0, 0),
        Cell(0, 2),
    ]


@given(st.integers(0, 8), st.integers(0, 3))
def test_there_are_as_many_as_asked_for_none_twice(n, seed):
    torch.manual_seed(seed)
    found = choose_candidates(LAYOUT, {name: torch.randn(6).double() for name in "abc"}, n)
    assert len(found) == len(set(found)) == min(n, 6)


def test_named_memories_come_on_top_and_only_once():
    estimated = {"gradient": numbers([3, 2, 1])}
    found = choose_candidates(Layout.dense([3]), estimated, 1, [Cell(0, 0), Cell(0, 2)])
    assert found == [Cell(0, 0), Cell(0, 2)]

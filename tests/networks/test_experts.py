"""Our mixture of experts: who runs it, what no token reaches, and how its load is balanced."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from ffmem.errors import ModelError
from ffmem.models import experts as reader
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.experts import Experts, Router, Routes, balance_loss, reading_routes
from tests.tiny import tiny

TOKENS = torch.tensor([[2, 5, 13, 31, 20, 63, 40], [2, 0, 11, 12, 21, 48, 9]])


@st.composite
def routes(draw):
    n_experts = draw(st.integers(1, 5))
    n_choices = draw(st.integers(1, n_experts))
    scores = torch.randn(
        draw(st.integers(1, 9)),
        n_experts,
        generator=torch.Generator().manual_seed(draw(st.integers(0, 1000))),
        dtype=torch.float64,
    )
    p = (draw(st.sampled_from([0.1, 1.0, 10.0])) * scores).softmax(-1)
    weights, experts = p.topk(n_choices)
    return Routes(p, experts, weights)


@given(routes())
def test_the_load_balancing_loss_is_its_formula(routes):
    p, chosen = routes.probabilities.tolist(), routes.experts.tolist()
    n_experts, n_choices = len(p[0]), len(chosen[0])
    expected = 0.0
    for expert in range(n_experts):
        share = sum(expert in row for row in chosen) / (len(chosen) * n_choices)
        expected += n_experts * share * sum(row[expert] for row in p) / len(p)
    found = float(balance_loss(routes))
    assert found == pytest.approx(expected)
    assert 0 < found <= n_experts + 1e-9


def test_an_even_load_has_the_loss_one_and_a_single_expert_the_largest():
    even = torch.full((8, 4), 0.25)
    turns = torch.stack([torch.arange(8) % 4, (torch.arange(8) + 1) % 4], dim=1)
    assert float(balance_loss(Routes(even, turns, even[:, :2]))) == pytest.approx(1)
    one = torch.zeros(8, 4)
    one[:, 2] = 1
    alone = torch.full((8, 1), 2)
    assert float(balance_loss(Routes(one, alone, one[:, :1]))) == pytest.approx(4)


def test_the_loss_moves_probability_away_from_experts_with_a_large_share():
    scores = torch.zeros(6, 3, requires_grad=True)
    busy = torch.zeros(6, 1, dtype=torch.long)  # all tokens go to expert 0
    balance_loss(Routes(scores.softmax(-1), busy, torch.ones(6, 1))).backward()
    assert (scores.grad[:, 0] > 0).all()
    assert (scores.grad[:, 1:] < 0).all()


def of_tokens(unreached=None):
    """Experts with random weights, tokens for them, and where these go: never to one of them."""
    torch.manual_seed(0)
    config = AdaptiveConfig(
        memory="moe",
        band_sizes=[4],
        band_widths=[6],
        hidden_size=6,
        num_attention_heads=1,
        intermediate_size=5,
        num_experts=4,
    )
    module = Experts(config).double()
    for weight in module.parameters():
        torch.nn.init.normal_(weight)
    scores = torch.randn(9, 4, dtype=torch.float64)
    if unreached is not None:
        scores[:, unreached] = -50
    weights, chosen = scores.softmax(-1).topk(2)
    return config, module, torch.randn(9, 6, dtype=torch.float64), chosen, weights


@pytest.mark.parametrize("implementation", ["batched_mm", reader.IMPLEMENTATION])
@pytest.mark.parametrize("unreached", [None, 0, 3])
def test_our_loop_computes_what_the_implementations_of_the_table_do(implementation, unreached):
    config, module, x, chosen, weights = of_tokens(unreached)
    found = {}
    for name in ("eager", implementation):
        config._experts_implementation = name
        found[name] = module(x, chosen, weights).detach()
    assert_close(found["eager"], found[implementation])


def test_an_expert_that_no_token_reaches_learns_nothing():
    config, module, x, chosen, weights = of_tokens(1)
    config._experts_implementation = "eager"
    module(x, chosen, weights).square().sum().backward()
    for weight in module.parameters():
        reached = [bool(grad.any()) for grad in weight.grad]
        assert reached == [True, False, True, True]


def test_routers_are_read_in_the_order_of_layers_and_only_inside():
    model = tiny("ffmem_adaptive moe")
    routers = [module for module in model.modules() if isinstance(module, Router)]
    with torch.no_grad(), reading_routes(routers) as found:
        model(TOKENS)
        model(TOKENS)
    assert len(found) == 2 * len(routers) == 4
    for one, again in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, one, again))
        assert_close(one.weights.sum(-1), torch.ones(TOKENS.numel()))
    assert not torch.equal(found[0].probabilities, found[1].probabilities)
    model(TOKENS)
    assert len(found) == 4


@pytest.mark.parametrize(("n_experts", "n_choices"), [(2, 3), (0, 0), (4, 0)])
def test_a_token_reaches_at_least_one_expert_and_at_most_all(n_experts, n_choices):
    message = rf"_per_tok {n_choices} does not fit num_experts {n_experts}\."
    with pytest.raises(ModelError, match=message):
        AdaptiveConfig(memory="moe", num_experts=n_experts, num_experts_per_tok=n_choices)


def test_only_a_mixture_says_that_it_has_experts():
    dense, mixture = AdaptiveConfig(), AdaptiveConfig(memory="moe")
    assert (dense.num_experts, dense.num_experts_per_tok, dense.shared_expert) == (0, 0, False)
    assert (mixture.num_experts, mixture.num_experts_per_tok) == (8, 2)

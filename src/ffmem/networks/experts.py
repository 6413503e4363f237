"""A mixture of experts: each token reaches a few of many small feed-forward layers.

    p = softmax(x · Rᵀ),    w = the k largest of p, divided by their sum
    y = Σₑ wₑ · (mₑ · Vₑ + bₑ) over these k experts,    mₑ = relu(x · Kₑᵀ + b_K,ₑ)

A shared expert, if there is one, is a feed-forward layer that every token reaches: its output is
added with the weight 1. Nothing limits how many tokens an expert takes; a loss keeps them even
(Fedus et al. 2021, over k choices as in Mixtral):

    L = E · Σₑ fₑ · Pₑ,    fₑ = the expert's share of the choices,    Pₑ = the mean of pₑ

L is 1 if all experts have the same share, and at most E. Its gradient comes from P alone.

Weights are stacked as in the models of transformers, whose table of implementations may run them.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import use_experts_implementation

from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.memories import FeedForward


class Routes(NamedTuple):
    """Where a router sends tokens."""

    probabilities: Float[Tensor, "token expert"]
    experts: Int64[Tensor, "token choice"]
    weights: Float[Tensor, "token choice"]
    """What the output of each is multiplied with; they sum to 1."""


class Router(nn.Module):
    """Chooses the experts of every token."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.n_choices = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.init_std = 0.1 / config.hidden_size**0.5  # all experts start about as probable

    def forward(self, x: Float[Tensor, "token hidden"]) -> Routes:
        """Return the probability of every expert, and the k most probable."""
        scores = functional.linear(x, self.weight)
        wide = torch.promote_types(scores.dtype, torch.float32)
        probabilities = scores.softmax(dim=-1, dtype=wide)
        largest, experts = probabilities.topk(self.n_choices, dim=-1)
        weights = largest / largest.sum(dim=-1, keepdim=True)
        return Routes(probabilities, experts, weights.to(x.dtype))


@use_experts_implementation(has_gate=False, has_bias=True)
class Experts(nn.Module):
    """The routed experts of a layer, with the names that transformers gives stacked weights."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        n, size, hidden = config.num_experts, config.intermediate_size, config.hidden_size
        self.up_proj = nn.Parameter(torch.empty(n, size, hidden))
        """The keys of each expert."""
        self.up_proj_bias = nn.Parameter(torch.empty(n, size))
        self.down_proj = nn.Parameter(torch.empty(n, hidden, size))
        """The values of each expert, in columns."""
        self.down_proj_bias = nn.Parameter(torch.empty(n, hidden))
        self.act_fn = nn.ReLU()

    def forward(
        self,
        hidden_states: Float[Tensor, "token hidden"],
        top_k_index: Int64[Tensor, "token choice"],
        top_k_weights: Float[Tensor, "token choice"],
    ) -> Float[Tensor, "token hidden"]:
        """Return Σ w · (m · V + b) of every token, one expert after the other.

        A sum over the choices of a token has the order of the experts, so results do not depend on
        threads.
        """
        stacks = (self.up_proj, self.up_proj_bias, self.down_proj, self.down_proj_bias)
        each = zip(*(stack.unbind() for stack in stacks), strict=True)
        output = torch.zeros_like(hidden_states)
        for expert, (keys, key_bias, values, bias) in enumerate(each):
            tokens, choices = torch.where(top_k_index == expert)
            x = hidden_states.index_select(0, tokens)
            m = self.act_fn(functional.linear(x, keys, key_bias))
            part = functional.linear(m, values, bias) * top_k_weights[tokens, choices, None]
            output = output.index_add(0, tokens, part.to(output.dtype))
        return output


class ExpertMemory(nn.Module):
    """A router with its experts, and a shared expert if the config has one."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_expert = FeedForward(config, "relu") if config.shared_expert else None

    def forward(
        self, x: Float[Tensor, "batch position hidden"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return y."""
        tokens = x.flatten(0, 1)
        routes = self.router(tokens)
        output: Tensor = self.experts(tokens, routes.experts, routes.weights).view(x.shape)
        return output if self.shared_expert is None else output + self.shared_expert(x)


def balance_loss(routes: Routes) -> Float[Tensor, ""]:
    """Return L of one layer: 1 if all experts have the same share."""
    n_experts = routes.probabilities.shape[1]
    counts = torch.bincount(routes.experts.flatten(), minlength=n_experts)
    shares = counts / routes.experts.numel()
    return n_experts * (shares * routes.probabilities.mean(dim=0)).sum()


@contextmanager
def reading_routes(routers: Sequence[Router]) -> Iterator[list[Routes]]:
    """Collect where routers send tokens in every forward pass, in the order they run."""
    found: list[Routes] = []

    def read(_: nn.Module, args: tuple[Any, ...], routes: Routes) -> None:
        found.append(routes)

    with ExitStack() as hooks:
        for router in routers:
            hooks.callback(router.register_forward_hook(read).remove)
        yield found

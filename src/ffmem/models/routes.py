"""Changed routes: which experts run in a forward pass, whatever the router says.

    off      w → 0: the expert adds nothing, not even its bias; the others keep their weights
    forbid   the router chooses among the other experts: the next best takes its place
    force    the router chooses the expert, and the best of the others beside it

Of forbidden and forced routes only the choice changes. The router's scores stay as they are, and
the family's own code makes weights from the scores of those that were chosen.

Routers compute their scores and choose in one function, so no hook lies in between. But they
choose by `torch.topk` over the experts, and torch lets us see that call: while the module that has
the router runs, we take the k best by other scores, and return them with their own. A router that
does not choose so, such as PhiMoE's, is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ffmem.errors import ModelError
from ffmem.models.banks import Bank, ExpertBank, LayerBanks
from ffmem.text import pluralize

Where = Callable[[Int64[Tensor, " token"]], Bool[Tensor, " token"]]
"""Whether routes change at a token, counted through the sentences of the batch."""


@contextmanager
def switch_off(bank: Bank, where: Where) -> Iterator[None]:
    """Run every forward pass without the output of an expert."""

    def drop(experts: Tensor, weights: Tensor) -> Tensor:
        return weights.masked_fill((experts == number) & _rows(where, experts), 0)

    def clear(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        rows = output.reshape(-1, output.shape[-1])
        return rows.masked_fill(_rows(where, rows), 0).view(output.shape)

    if isinstance(bank, ExpertBank):
        number = bank.number
        with bank.experts.weighing(drop):
            yield
        return
    handle = bank.values.register_forward_hook(clear)
    try:
        yield
    finally:
        handle.remove()


def _rows(where: Where, tokens: Tensor) -> Bool[Tensor, "token 1"]:
    return where(torch.arange(len(tokens), device=tokens.device))[:, None]


@contextmanager
def change_routes(
    banks: LayerBanks, forbid: Sequence[int], force: Sequence[int], where: Where
) -> Iterator[None]:
    """Run every forward pass with routes to some experts of a layer forbidden or forced."""
    assert banks.experts is not None
    assert banks.input is not None
    n_choices = banks.experts.n_experts + banks.experts.n_identities
    choice = _Choice(banks.routed[0].layer, n_choices, forbid, force, where)
    with ExitStack() as hooks:
        hooks.enter_context(choice)
        hooks.callback(banks.input.register_forward_pre_hook(choice.begin).remove)
        hooks.callback(banks.input.register_forward_hook(choice.end, always_call=True).remove)
        hooks.enter_context(banks.experts.weighing(choice.check))
        yield


class _Choice(TorchFunctionMode):
    """Takes the place of top-k over the experts of one layer while its module runs."""

    def __init__(
        self, layer: int, n_experts: int, forbid: Sequence[int], force: Sequence[int], where: Where
    ) -> None:
        super().__init__()
        self.layer, self.n_experts = layer, n_experts
        self.forbid, self.force, self.where = list(forbid), list(force), where
        self.runs = False
        """Whether the layer's module is running."""
        self.has_chosen = False

    def begin(self, *_: Any) -> None:
        self.runs, self.has_chosen = True, False

    def end(self, *_: Any) -> None:
        self.runs = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self.runs and func in (torch.topk, Tensor.topk):
            return self._choose(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _choose(
        self, topk: Callable[..., Any], input: Tensor, k: int, dim: int = -1, **options: Any
    ) -> Any:
        """Return the k best experts by changed scores, with their own scores."""
        if input.shape[-1] != self.n_experts or dim % input.dim() != input.dim() - 1:
            return topk(input, k, dim, **options)
        self.has_chosen = True
        changed = input.reshape(-1, self.n_experts).clone()
        rows = self.where(torch.arange(len(changed), device=changed.device))
        for experts, score in ((self.forbid, -torch.inf), (self.force, torch.inf)):
            changed[rows.nonzero(), torch.tensor(experts, device=rows.device).long()] = score
        chosen = topk(changed.view(input.shape), k, dim, **options).indices
        return torch.return_types.topk((input.gather(-1, chosen), chosen))

    def check(
        self, experts: Int64[Tensor, "token choice"], weights: Float[Tensor, "token choice"]
    ) -> Tensor:
        """Raise unless the choice that arrives at the experts is the changed one."""
        if not self.has_chosen:
            raise ModelError(
                f"The router of layer {self.layer} does not choose its experts by top-k, so ffmem"
                " cannot forbid or force routes there. You can switch an expert off."
            )
        here = experts[_rows(self.where, experts)[:, 0]]
        k, left = experts.shape[-1], self.n_experts - len(self.forbid)
        if any((here == expert).any() for expert in self.forbid):
            raise ModelError(
                f"The router of layer {self.layer} chooses {k} of {self.n_experts} experts for"
                f" each token, and the edits leave only {pluralize(left, 'experts')}. Forbid fewer."
            )
        if not all((here == expert).any(dim=-1).all() for expert in self.force):
            raise ModelError(
                f"The router of layer {self.layer} chooses {k} experts for each token, so"
                f" {len(self.force)} cannot be forced. Force fewer."
            )
        return weights

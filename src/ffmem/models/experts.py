"""Mixtures of experts: each routed expert is a bank of memories.

    FF(x) = Σₑ wₑ · (mₑ · Vₑ + bₑ),    mₑ = f(x · Kₑᵀ)        coefficient = wₑ · mₑ

The router sends each token to a few experts e with weights wₑ. What multiplies a value is wₑ · mₑ:
that is the coefficient. A token that is not routed to an expert has the coefficient 0 there.

Experts have no linear maps of their own that could be hooked: their weights are stacked. But
transformers lets us register the function that runs them, one for all families that use its table;
the few families that do not use it get the same function in place of their module's forward. It
sorts the tokens by expert, computes one expert after the other, and shows its coefficients to
readers while they are in the cache:

    c = w · f(x · Kₑᵀ)    →    readers, edits    →    output += c · Vₑ + w · bₑ
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ffmem.errors import MixtureOfExperts, ModelError

IMPLEMENTATION = "ffmem"
"""Name of our function in transformers' table of experts implementations."""

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ExpertRows(NamedTuple):
    """What one expert computes for the tokens that are routed to it."""

    expert: int
    tokens: Int64[Tensor, " row"]
    """Their numbers in the batch, counted through all sentences, padding included; ascending."""
    weights: Float[Tensor, "row 1"]
    """The router's weights."""
    inputs: Float[Tensor, "row input"]
    """x, as the expert gets it."""
    gate: Float[Tensor, "row memory"] | None
    """The gate's pre-activation; None if the experts are not gated."""
    coefficients: Float[Tensor, "row memory"]
    """w · m; the model's own tensor."""


ReadExpert = Callable[[ExpertRows], None]
EditExpert = Callable[[ExpertRows], Tensor]
"""Returns the coefficients that replace those of an expert, or what is added to its output."""
WeighChoices = Callable[[Int64[Tensor, "token choice"], Float[Tensor, "token choice"]], Tensor]
"""Maps the router's (experts, weights) to the weights that replace them."""


@dataclass(eq=False)
class RoutedExperts:
    """The routed experts of one layer: their stacked weights, and how the module runs them.

    Stacks are [expert, out, in], or [expert, in, out] if transposed. If gated, the output of the
    first map has the gate's numbers and the others: one after the other, or interleaved.
    """

    module: nn.Module
    """Its forward runs the experts."""
    input_weight: Callable[[int], Tensor]
    """The weights [out, in] from the input to what is activated, of an expert."""
    value_weight: Callable[[int], Tensor]
    """The weights [hidden, memory] of the values, of an expert."""
    activate: Callable[[Tensor], Tensor]
    """From the output of the first map to m."""
    n_experts: int
    size: int
    """Memories of an expert."""
    width: int
    """Width of the experts' input and output; that of the residual stream unless latent."""
    gated: bool
    keys_and_ups: Callable[[int], tuple[Tensor, Tensor]] | None = None
    """The gate's keys and the others of an expert, if the first map is stored as two."""
    input_bias: Tensor | None = None
    value_bias: Tensor | None = None
    interleaved: bool = False
    scales_input: bool = False
    """Whether the router's weight multiplies the input, and so not the values."""
    constant: Tensor | None = None
    """What the module adds to every token, whatever its experts."""
    n_identities: int = 0
    """Experts beyond those with weights, which give their input back."""
    new_forward: Callable[..., Any] | None = None
    """Replaces the module's forward if it does not use transformers' table."""
    runs_router: bool = False
    """Whether the module runs the router too, and shared experts if there are some."""

    def __post_init__(self) -> None:
        self.n_runs = 0
        """Passes so far; a model that bypasses us does not count them up."""
        self.readers: list[ReadExpert] = []
        self.edits: list[EditExpert] = []
        self.additions: list[EditExpert] = []
        self.needed: Bool[Tensor, " token"] | None = None
        """The tokens to compute; None for all. Nothing depends on padding, so it may stay out."""
        self.passed_on: Float[Tensor, "token width"] | None = None
        """What experts that give their input back have added in the last pass."""
        self.weighings: list[WeighChoices] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave the copy of a module without this object, which reads the original's weights."""

    # Weights of one expert

    def keys(self, expert: int) -> Float[Tensor, "memory input"]:
        """Return K of an expert, a view of the weights; in gated models, the gate's."""
        if self.keys_and_ups is not None:
            return self.keys_and_ups(expert)[0]
        return self.input_weight(expert)[self.score_rows(of_gate=True)]

    def up_keys(self, expert: int) -> Float[Tensor, "memory input"]:
        """Return U of an expert, a view of the weights; its product with x multiplies the gate."""
        if self.keys_and_ups is not None:
            return self.keys_and_ups(expert)[1]
        return self.input_weight(expert)[self.score_rows(of_gate=False)]

    def key_bias(self, expert: int) -> Float[Tensor, " memory"]:
        """Return the bias added to x · Kᵀ."""
        return self._bias_of(expert)[self.score_rows(of_gate=True)]

    def up_bias(self, expert: int) -> Float[Tensor, " memory"]:
        """Return the bias added to x · Uᵀ."""
        return self._bias_of(expert)[self.score_rows(of_gate=False)]

    def values(self, expert: int) -> Float[Tensor, "memory width"]:
        """Return V of an expert, one value per row: a view of the weights."""
        return self.value_weight(expert).T

    def bias(self, expert: int) -> Float[Tensor, " width"]:
        """Return b of an expert."""
        weight = self.value_weight(expert)
        return weight.new_zeros(self.width) if self.value_bias is None else self.value_bias[expert]

    def _bias_of(self, expert: int) -> Tensor:
        if self.input_bias is not None:
            return self.input_bias[expert]
        weight = self.input_weight(expert)
        return weight.new_zeros(len(weight))

    def score_rows(self, of_gate: bool) -> slice:
        """Return which outputs of the first map are the gate's, or the others."""
        if not self.gated:
            return slice(None)
        if self.interleaved:
            return slice(0 if of_gate else 1, None, 2)
        return slice(0, self.size) if of_gate else slice(self.size, None)

    # The pass

    def run(
        self,
        x: Float[Tensor, "token width"],
        experts: Int64[Tensor, "token choice"],
        weights: Float[Tensor, "token choice"],
    ) -> Float[Tensor, "token width"]:
        """Return Σₑ wₑ · (mₑ · Vₑ + bₑ) of every token, and show coefficients to readers.

        A choice of weight 0 is no choice: models that let a token skip its expert give it one.
        """
        self.n_runs += 1
        for weigh in self.weighings:
            weights = weigh(experts, weights)
        chosen = experts.reshape(-1)
        order = chosen.sort(stable=True).indices
        flat_weights = weights.reshape(-1)[order]
        tokens = order // experts.shape[-1]
        used = flat_weights != 0
        if self.needed is not None:
            used &= self.needed.to(used.device)[tokens]
        if not used.all():
            order, tokens, flat_weights = order[used], tokens[used], flat_weights[used]
        counts = torch.bincount(chosen[order], minlength=self.n_experts).tolist()
        if len(counts) > self.n_experts + self.n_identities:
            raise ModelError(
                f"The router chose expert {len(counts) - 1}, but the layer has weights of"
                f" {self.n_experts} experts. Use the config.json that belongs to the weights."
            )
        output = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        if self.n_identities:
            identity = (experts >= self.n_experts).to(output.dtype)
            self.passed_on = (weights * identity).sum(1, keepdim=True) * x
            output += self.passed_on
        begin = 0
        for expert, count in enumerate(counts[: self.n_experts]):
            if count:
                rows = slice(begin, begin + count)
                part = self._run_one(expert, x, tokens[rows], flat_weights[rows, None])
                output.index_add_(0, tokens[rows], part.to(output.dtype))
                begin += count
        return output.to(x.dtype)

    def _run_one(self, expert: int, x: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return w · (m · V + b) of the tokens that are routed to an expert."""
        inputs = x.index_select(0, tokens)
        if self.scales_input:
            inputs = inputs * weights.to(inputs.dtype)
        weight = self.input_weight(expert)
        bias = None if self.input_bias is None else self.input_bias[expert]
        scores = functional.linear(inputs.to(weight.dtype), weight, bias)
        m = self.activate(scores)
        coefficients = m if self.scales_input else (m * weights).to(m.dtype)
        gate = scores[:, self.score_rows(of_gate=True)] if self.gated else None
        for edit in self.edits:
            shown = ExpertRows(expert, tokens, weights, inputs, gate, coefficients)
            coefficients = edit(shown)
        for read in self.readers:
            read(ExpertRows(expert, tokens, weights, inputs, gate, coefficients))
        output = functional.linear(coefficients, self.value_weight(expert))
        for add in self.additions:
            rows = ExpertRows(expert, tokens, weights, inputs, gate, coefficients)
            output = output + add(rows).to(output.dtype)
        if self.value_bias is not None:
            output = output + (self.value_bias[expert] * weights).to(output.dtype)
        return output

    @contextmanager
    def reading(self, read: ReadExpert) -> Iterator[None]:
        """Call `read` with what every expert computes, in the order of experts, in every pass."""
        self.readers.append(read)
        try:
            yield
        finally:
            self.readers.remove(read)

    @contextmanager
    def editing(self, edit: EditExpert) -> Iterator[None]:
        """Replace the coefficients of every expert, where it runs, by what `edit` returns."""
        self.edits.append(edit)
        try:
            yield
        finally:
            self.edits.remove(edit)

    @contextmanager
    def adding(self, add: EditExpert) -> Iterator[None]:
        """Add to the output of every expert, where it runs, what `add` returns."""
        self.additions.append(add)
        try:
            yield
        finally:
            self.additions.remove(add)

    @contextmanager
    def weighing(self, weigh: WeighChoices) -> Iterator[None]:
        """Replace the router's weights by what `weigh` returns, in every pass."""
        self.weighings.append(weigh)
        try:
            yield
        finally:
            self.weighings.remove(weigh)

    def own_forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the module computes by its family's own code."""
        if self.new_forward is not None:
            output: Any = type(self.module).forward(self.module, *args, **kwargs)
        else:
            config: Any = self.module.config
            before, config._experts_implementation = config._experts_implementation, "eager"
            try:
                output = self.module.forward(*args, **kwargs)
            finally:
                config._experts_implementation = before
        found: Tensor = output if isinstance(output, Tensor) else output[0]
        return found


# Modules that run experts, found by what they have


def install(model: PreTrainedModel) -> None:
    """Make every module with routed experts run them by `RoutedExperts.run`.

    The results are the model's own, up to rounding.
    """
    found = [experts for module in model.modules() if (experts := routed_experts(module))]
    if any(experts.new_forward is None for experts in found):
        model.set_experts_implementation(IMPLEMENTATION)
    for experts in found:
        if experts.new_forward is not None:
            module = experts.module
            module.forward = MethodType(experts.new_forward, module)


def routed_experts(module: nn.Module) -> RoutedExperts | None:
    """Return the experts that a module runs; None if it runs none. A module has one such object."""
    known: RoutedExperts | None = module.__dict__.get("_ffmem_experts")
    if known is None or known.module is not module:  # a copy of a model copies the object
        known = next(filter(None, (find(module) for find in _FINDERS)), None)
        if known is not None:
            module.__dict__["_ffmem_experts"] = known
    return known


def find_experts(block: nn.Module) -> tuple[str, RoutedExperts] | None:
    """Return the path and the routed experts of a layer; None if it has none."""
    for path, module in block.named_modules():
        experts = routed_experts(module)
        if experts is not None:
            return path, experts
    return None


def check_experts(family: str, path: str, experts: RoutedExperts) -> None:
    """Raise unless the weights of experts are plain numbers in matrices of the right shapes."""
    for name, weight in experts.module.named_parameters():
        if weight.dtype not in PLAIN_DTYPES:
            raise MixtureOfExperts(family, f"{path}.{name} is {weight.dtype}")
    first, second = experts.input_weight(0).shape, experts.value_weight(0).shape
    scores = experts.size * (2 if experts.gated else 1)
    if first != (scores, experts.width) or second != (experts.width, experts.size):
        found = f"{path} has keys of shape {tuple(first)} and values of shape {tuple(second)}"
        raise MixtureOfExperts(family, found)


def _stacks(module: Any, *names: str) -> bool:
    """Return whether a module has stacks of matrices by these names."""
    weights = [getattr(module, name, None) for name in names]
    return all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)


def _is_in_table(module: nn.Module) -> bool:
    """Return whether a module takes its function from transformers' table."""
    return hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


def _table_experts(module: Any) -> RoutedExperts | None:
    """Return the experts of a module that takes its function from transformers' table.

    None if it has no plain stacks, as quantized experts, or a norm behind each expert.
    """
    if not _is_in_table(module) or module.has_post_expert_norm:
        return None
    name = "gate_up_proj" if module.has_gate else "up_proj"
    if not _stacks(module, name, "down_proj"):
        return None
    transposed = bool(module.is_transposed)

    def matrix(name: str, expert: int) -> Tensor:
        weight: Tensor = getattr(module, name)[expert]
        return weight.T if transposed else weight

    width, size = matrix("down_proj", 0).shape
    return RoutedExperts(
        module=module,
        input_weight=partial(matrix, name),
        value_weight=partial(matrix, "down_proj"),
        activate=module._apply_gate if module.has_gate else module.act_fn,
        n_experts=len(module.down_proj),
        size=size,
        width=width,
        gated=bool(module.has_gate),
        input_bias=getattr(module, f"{name}_bias") if module.has_bias else None,
        value_bias=module.down_proj_bias if module.has_bias else None,
        interleaved=not module.is_concatenated,
    )


def _run_table(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run the experts of a module: our entry in transformers' table."""
    return _experts_of(module).run(hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _run_table)


def _experts_of(module: nn.Module) -> RoutedExperts:
    experts = routed_experts(module)
    assert experts is not None, "only modules with experts come here"
    return experts


def _glu(activation: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    """Return f(gate) ⊙ up, of two halves."""
    gate, up = scores.chunk(2, dim=-1)
    return activation(gate) * up


# Modules that do not use transformers' table. They are known by their weights


def _scaled_input_experts(module: Any) -> RoutedExperts | None:
    """Return experts whose input the router's score multiplies, so that m has it already.

    Their own module runs every expert on every token, with an input of zeros if not routed.
    """
    experts: Any = getattr(module, "experts", None)
    router, shared = getattr(module, "router", None), getattr(module, "shared_expert", None)
    if not isinstance(router, nn.Linear) or shared is None:
        return None
    if _is_in_table(experts) or not _stacks(experts, "gate_up_proj", "down_proj"):
        return None
    size, width = experts.down_proj.shape[1:]
    return RoutedExperts(
        module=module,
        input_weight=lambda expert: experts.gate_up_proj[expert].T,
        value_weight=lambda expert: experts.down_proj[expert].T,
        activate=partial(_glu, experts.act_fn),
        n_experts=len(experts.down_proj),
        size=size,
        width=width,
        gated=True,
        scales_input=True,
        new_forward=_run_scaled_input,
        runs_router=True,
    )


def _run_scaled_input(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = module.router(x)
    weights, chosen = scores.topk(module.top_k, dim=1)
    return module.shared_expert(x) + _experts_of(module).run(x, chosen, weights), logits


def _flat_experts(module: Any) -> RoutedExperts | None:
    """Return experts that lie below each other in three matrices, "expert·memory hidden"."""
    maps: Any = getattr(module, "mlp", None)
    size = getattr(module, "ffn_hidden_size", None)
    if size is None or not all(hasattr(maps, name) for name in ("w1", "v1", "w2")):
        return None

    def rows(weight: Tensor, expert: int) -> Tensor:
        return weight[expert * size : (expert + 1) * size]

    return RoutedExperts(
        module=module,
        input_weight=lambda expert: torch.cat([rows(maps.w1, expert), rows(maps.v1, expert)]),
        keys_and_ups=lambda expert: (rows(maps.w1, expert), rows(maps.v1, expert)),
        value_weight=lambda expert: rows(maps.w2, expert).T,
        activate=partial(_glu, maps.activation_fn),
        n_experts=len(maps.w2) // size,
        size=size,
        width=maps.w2.shape[1],
        gated=True,
        new_forward=_run_flat,
    )


def _run_flat(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    output = _experts_of(module).run(x, top_k_index, top_k_weights)
    return output.view(hidden_states.shape[0], -1, x.shape[-1])


def _sorting_router_experts(module: Any) -> RoutedExperts | None:
    """Return experts whose router sorts the tokens itself, with a linear map before and after."""
    first: Any = getattr(module, "input_linear", None)
    second: Any = getattr(module, "output_linear", None)
    has_parts = hasattr(module, "activation") and hasattr(module, "router")
    if not has_parts or not _stacks(first, "weight") or not _stacks(second, "weight"):
        return None
    return RoutedExperts(
        module=module,
        input_weight=lambda expert: first.weight[expert],
        value_weight=lambda expert: second.weight[expert],
        activate=partial(_glu, module.activation),
        n_experts=len(second.weight),
        size=second.weight.shape[2],
        width=second.weight.shape[1],
        gated=True,
        new_forward=_run_sorted,
        runs_router=True,
        constant=module.bias,
    )


def _run_sorted(module: Any, layer_input: Tensor) -> Tensor:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    order, _, sorted_weights, counts, _ = module.router(x)
    chosen, weights = torch.empty_like(order), torch.empty_like(sorted_weights)
    numbers = torch.arange(len(counts), device=order.device)
    chosen[order] = numbers.repeat_interleave(torch.tensor(counts, device=order.device))
    weights[order] = sorted_weights
    shape = (len(x), module.router.top_k)
    output = _experts_of(module).run(x, chosen.view(shape), weights.view(shape))
    bias: Tensor = module.bias
    return output.view(layer_input.shape) + bias


def _identity_experts(module: Any) -> RoutedExperts | None:
    """Return experts beyond which the router knows some that give their input back."""
    n_identities = getattr(module, "zero_expert_num", None)
    if n_identities is None or not _stacks(module, "gate_up_proj", "down_proj"):
        return None
    width, size = module.down_proj.shape[1:]
    return RoutedExperts(
        module=module,
        input_weight=lambda expert: module.gate_up_proj[expert],
        value_weight=lambda expert: module.down_proj[expert],
        activate=partial(_glu, module.act_fn),
        n_experts=len(module.down_proj),
        size=size,
        width=width,
        gated=True,
        n_identities=n_identities,
        new_forward=_run_table,
    )


_FINDERS = (
    *(_table_experts, _scaled_input_experts, _flat_experts),
    *(_sorting_router_experts, _identity_experts),
)

"""Relevance: gradients of a pass whose nonlinear steps are held fixed (RelP, arXiv 2508.21258).

    norm         N(h) = γ ⊙ (h − mean(h)) / σ + β        σ is held
    attention    Σ a · v                                 the pattern a is held
    router       Σ w · expert(x)                         the weights w are held
    memory       m = f(g)                                m/g is held:  m = (m/g) · g
    gated        m = f(g) · u                            ½ · (m/g) · g + ½ · (m/u) · u

The pass computes what the model computes; only its gradient differs. Everything is now linear in
the tokens' vectors x₀ and in the biases, so every number s that is linear in the stream is the sum
of their relevances. (Where coefficients are a softmax, they are a pattern: held, and ends
themselves.) Law, exact:

    s = Σ x₀ · ∂s/∂x₀ + Σ b · ∂s/∂b

A model breaks this law if it has a step that no rule reaches, such as a state-space layer. So the
law is checked on every prompt, and where it fails there is no relevance.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ffmem.interventions.forward import BankRows, Place
from ffmem.interventions.partial_forward import PartialForward
from ffmem.models.banks import Bank, DenseBank, ExpertBank
from ffmem.models.experts import ExpertRows, RoutedExperts
from ffmem.models.memories import Memories
from ffmem.models.modules import first_tensor

BOUND, HALF_BOUND = 1e-3, 3e-2
"""How far the law may be off, of the sum of all parts' sizes, in float32 and in half precision."""


# The rules


class _HoldPatterns(TorchFunctionMode):
    """Runs operations with the gradients of the rules, whichever module calls them."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if function in _HELD:
            return function(*args, **kwargs).detach()
        rule = _RULES.get(function)
        return function(*args, **kwargs) if rule is None else rule(*args, **kwargs)


_HELD = {
    *(functional.softmax, torch.softmax, Tensor.softmax),  # patterns and routers
    *(torch.sigmoid, Tensor.sigmoid, functional.sigmoid),  # gates and routers
    *(torch.rsqrt, Tensor.rsqrt),  # 1/σ
}
"""Operations whose results are held fixed."""


def _attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attend with a pattern that is held: it depends on queries and keys alone."""
    return functional.scaled_dot_product_attention(
        query.detach(), key.detach(), value, *args, **kwargs
    )


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
    **__: Any,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    part = input - input.mean(dim=axes, keepdim=True)
    sigma = (part.float().pow(2).mean(dim=axes, keepdim=True) + eps).sqrt()
    return _scale(part, sigma, weight, bias)


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    sigma = (input.float().pow(2).mean(dim=axes, keepdim=True) + eps).sqrt()
    return _scale(input, sigma, weight, None)


def _scale(part: Tensor, sigma: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    normed = part / sigma.detach().to(part.dtype)
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


_RULES: dict[Any, Callable[..., Tensor]] = {
    functional.scaled_dot_product_attention: _attend,
    **dict.fromkeys((functional.layer_norm, torch.layer_norm), _layer_norm),
    **dict.fromkeys((functional.rms_norm, torch.rms_norm), _rms_norm),
}


def hold_factors(m: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Return m with the gradient Σ (m/f) · df / n over its n factors; 0 where f is 0."""
    m = m.detach()
    parts = [torch.where(f == 0, 0, m / f).detach() * f for f in factors]
    linear = torch.stack(parts).mean(dim=0)
    return m + linear - linear.detach()


@contextmanager
def linear_rules(memories: Memories, one: Tensor) -> Iterator[None]:
    """Run every forward pass with the gradients of the rules.

    `one` is 1, and stands for the constant in a factor u + 1, so that relevance can reach it.
    """
    with ExitStack() as hooks:
        hooks.enter_context(_HoldPatterns())
        for layer, banks in enumerate(memories.banks):
            products: dict[tuple[int, str], Tensor] = {}
            for bank in [] if is_pattern(memories, layer) else banks.dense:
                for name, module in (("keys", bank.keys), ("up", bank.up)):
                    if module is not None:
                        keep = partial(_keep_product, products, (bank.offset, name))
                        hooks.callback(module.register_forward_hook(keep).remove)
            edit = partial(_hold_dense, memories, layer, products, one)
            hooks.enter_context(banks.editing(edit))
            if banks.experts is not None:
                of_expert = partial(_hold_expert, banks.experts, one)
                hooks.enter_context(banks.experts.editing(of_expert))
        yield


def is_pattern(memories: Memories, layer: int) -> bool:
    """Return whether the coefficients of a layer are weights of a softmax or of a lambda layer."""
    row = memories.rows[layer]
    return row.softmax_groups is not None or row.input_values


def _keep_product(
    products: dict[tuple[int, str], Tensor],
    key: tuple[int, str],
    _: nn.Module,
    args: tuple[Any, ...],
    output: Any,
) -> None:
    products[key] = output


def _hold_dense(
    memories: Memories,
    layer: int,
    products: dict[tuple[int, str], Tensor],
    one: Tensor,
    bank: Bank,
    m: Float[Tensor, "row memory"],
    _: Tensor,
) -> Tensor:
    """Apply the rule of a memory to a dense bank, whose products are x · Kᵀ and x · Uᵀ."""
    if isinstance(bank, ExpertBank):
        return m
    if is_pattern(memories, layer):
        return m.detach()
    gate = products[bank.offset, "keys"].reshape(len(m), -1)[:, : bank.size]
    if not bank.gated:
        return hold_factors(m, [gate])
    up = products[bank.offset, "up"].reshape(len(m), -1)[:, -bank.size :]
    return hold_factors(m, [gate, up + one * _up_offset(memories, bank)])


def _hold_expert(experts: RoutedExperts, one: Tensor, rows: ExpertRows) -> Tensor:
    """Apply the rule of a memory to one expert."""
    inputs = rows.inputs.to(rows.coefficients.dtype)
    keys, bias = experts.keys(rows.expert), experts.key_bias(rows.expert)
    gate = functional.linear(inputs, keys, bias)
    if not experts.gated:
        return hold_factors(rows.coefficients, [gate])
    keys, bias = experts.up_keys(rows.expert), experts.up_bias(rows.expert)
    up = functional.linear(inputs, keys, bias)

    def activate(scores: Tensor, up: Tensor) -> Tensor:
        halves = torch.zeros(1, 2 * experts.size, dtype=inputs.dtype, device=inputs.device)
        halves[:, experts.score_rows(of_gate=True)] = scores
        halves[:, experts.score_rows(of_gate=False)] = up
        return experts.activate(halves)

    offset = _offset(activate, rows.coefficients)
    return hold_factors(rows.coefficients, [gate, up + one * offset])


def _up_offset(memories: Memories, bank: DenseBank) -> float:
    if memories.rows[bank.layer].inner_norm is not None:
        return 0.0  # m is a norm of the product, and m/u is held all the same

    def activate(scores: Tensor, up: Tensor) -> Tensor:
        return memories.activate(bank.layer, scores.expand(1, bank.size), up.expand(1, bank.size))

    return _offset(activate, bank.values.get_parameter("weight"))


def _offset(activate: Callable[[Tensor, Tensor], Tensor], like: Tensor) -> float:
    """Return c of a gated memory m = f(g) · (u + c): 0, or 1 in GPT-OSS and its kin."""
    one = torch.ones(1, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        at_0, at_1 = activate(one, 0 * one)[0, 0], activate(one, one)[0, 0]
    return 0.0 if at_0 == 0 else float(at_0 / (at_1 - at_0))


# A pass that is kept for its gradients


class BankPass(NamedTuple):
    """The coefficients of one bank in a pass."""

    layer: int
    memories: range
    """The numbers of the bank's memories in the layer."""
    positions: Int64[Tensor, " row"]
    """The token of each row."""
    computed: Float[Tensor, "row memory"]
    """m, as the layers below give it."""
    used: Float[Tensor, "row memory"]
    """m, as the values are multiplied with it: gradients are taken here."""


BankSlopes = list[tuple[BankPass, Tensor]]
"""The slope of a number at the coefficients of every bank, by row and memory."""


class GradientPass:
    """A pass over a prompt with repeated gradients: by the rules, or plain ones.

    `cut` are places at which gradients end: the coefficient there is given, and does not depend on
    what is below.
    """

    def __init__(
        self, forward: PartialForward, *, linear: bool = True, cut: Sequence[Place] = ()
    ) -> None:
        self.forward = forward
        self.banks: list[BankPass] = []
        self.cut = list(cut)
        self.computed: list[Tensor] = [torch.zeros(())] * len(cut)
        """The coefficient of every cut place, as the layers below give it."""
        memories = forward.memories
        self._values = torch.zeros(len(cut), dtype=memories.dtype, requires_grad=True)
        self._one = torch.ones((), dtype=memories.dtype, requires_grad=True)
        self._held: list[Tensor] = []
        """Coefficients that are patterns, and so depend on nothing."""
        self._biases = [
            parameter
            for block in memories.blocks
            for name, parameter in block.named_parameters()
            if name.endswith("bias")
        ]
        with ExitStack() as stack, torch.enable_grad(), self._tracked_biases():
            stack.enter_context(linear_rules(memories, self._one) if linear else nullcontext())
            handle = memories.blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True)
            stack.callback(handle.remove)
            layers = memories.layout.memory_layers
            self.output = forward.run(0, 1, {one: partial(self._change, one) for one in layers})

    @contextmanager
    def _tracked_biases(self) -> Iterator[None]:
        """Let gradients reach the biases, which belong to the model."""
        for bias in self._biases:
            bias.requires_grad_(True)
        try:
            yield
        finally:
            for bias in self._biases:
                bias.requires_grad_(False)

    def _enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        self.inputs = first_tensor(args, kwargs).detach().clone().requires_grad_()
        """x₀, what the first block reads: "1 position hidden"."""
        # A copy, because Falcon changes its input in place.
        if args:
            return (self.inputs.clone(), *args[1:]), kwargs
        return args, kwargs | {next(iter(kwargs)): self.inputs.clone()}

    def _change(self, layer: int, rows: BankRows) -> Tensor:
        """Keep the coefficients of a bank, and cut them where gradients end."""
        computed = used = rows.coefficients
        if not computed.requires_grad:
            computed = used = computed.detach().requires_grad_()
            self._held.append(used)
        positions = rows.tokens % self.forward.n_tokens
        here = [
            (number, int(row), place.memory - rows.memories.start)
            for number, place in enumerate(self.cut)
            if place.layer == layer and place.memory in rows.memories
            for row in (positions == place.position).nonzero()[:, 0]
        ]
        if here:
            numbers, row, memory = (list(column) for column in zip(*here, strict=True))
            for number, r, m in here:
                self.computed[number] = computed[r, m]
            given = self._values[numbers].to(used.device, used.dtype)
            given = computed.detach()[row, memory] + given
            used = computed.index_put((torch.tensor(row), torch.tensor(memory)), given)
        self.banks.append(BankPass(layer, rows.memories, positions, computed, used))
        return used

    def sum_by_memory(
        self, slopes: "BankSlopes", positions: Sequence[int] | None = None
    ) -> Float[Tensor, " memory"]:
        """Return Σ m · slope over all or some positions, of all memories."""
        layout = self.forward.memories.layout
        found = torch.zeros(len(layout), dtype=torch.float64)
        for bank, slope in slopes:
            parts = (bank.used.detach().double() * slope.double()).cpu()
            if positions is not None:
                parts = parts[torch.isin(bank.positions.cpu(), torch.tensor(positions))]
            first = layout.starts[bank.layer] + bank.memories.start
            found[first : first + len(bank.memories)] += parts.sum(dim=0)
        return found

    def slopes(self, slope: Float[Tensor, " hidden"]) -> "BankSlopes":
        """Return ∂(slope · o)/∂m of every bank, at every token."""
        found = self._gradients([bank.used for bank in self.banks], self.output, slope)
        return list(zip(self.banks, found, strict=True))

    def slopes_of_place(self, number: int) -> "BankSlopes":
        """Return the same slopes of the coefficient at a cut place."""
        found = self._gradients([bank.used for bank in self.banks], self.computed[number], None)
        return list(zip(self.banks, found, strict=True))

    def to_output(self, slope: Float[Tensor, " hidden"]) -> tuple[Tensor, Tensor]:
        """Return the slopes of slope · o: at each cut place, and of each token x₀ · ∂/∂x₀."""
        return self._ends(self.output, slope)

    def to_place(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the same slopes of the coefficient at a cut place."""
        computed = self.computed[number]
        return self._ends(computed, None)

    def _ends(self, of: Tensor, slope: Tensor | None) -> tuple[Tensor, Tensor]:
        at_places, at_inputs = self._gradients([self._values, self.inputs], of, slope)
        # One vector per token; in models with several residual streams, several.
        parts = self.forward.memories.streams.by_token(self.inputs.detach() * at_inputs)
        by_token = parts[0].double().flatten(1).sum(dim=1)
        return at_places.double().cpu(), by_token.cpu()

    def completeness_error(self, slope: Float[Tensor, " hidden"]) -> float:
        """Return how far slope · o is from the sum of all relevances, of the sum of their sizes."""
        ends = [self.inputs, self._one, *self._held, *self._biases]
        with self._tracked_biases():
            found = self._gradients(ends, self.output, slope)
        parts = torch.cat(
            [
                (end.detach() * one).double().flatten().cpu()
                for end, one in zip(ends, found, strict=True)
            ]
        )
        whole = float(self.output.detach()[0].to(slope).double() @ slope.double())
        size = max(float(parts.abs().sum()), 1e-12)
        return abs(float(parts.sum()) - whole) / size

    def is_complete(self, slope: Float[Tensor, " hidden"]) -> bool:
        """Return whether the rules reach every step of the model, on this prompt."""
        is_half = self.forward.memories.dtype in (torch.bfloat16, torch.float16)
        return self.completeness_error(slope) <= (HALF_BOUND if is_half else BOUND)

    def _gradients(
        self, ends: Sequence[Tensor], of: Tensor, slope: Tensor | None
    ) -> tuple[Tensor, ...]:
        outputs = None if slope is None else slope[None].to(of)
        return torch.autograd.grad(
            of, ends, outputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )

"""The self-check: test the paper's equations on a model before it is read.

    m = f(x · Kᵀ + b_K)     gated: m = f(x · Kᵀ) ⊙ (x · Uᵀ); softmax: m ~ exp(x · Kᵀ) in a group
    m · V + b = output of the value map     experts: Σ w · (m · V + b) = output of all together
    r + y = o               post-norm blocks: norm(r + y) = o; several streams: y = o − r
    head(o_last) = the model's logits
    folded(h) = s · σ(h) · (z(h) − c)
    coefficients of a prefix do not depend on later tokens

An error is the largest difference, relative to the largest number that was expected.
"""

import math
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ffmem.errors import MixtureOfExperts, ModelError, SelfCheckFailed, one_line
from ffmem.models.banks import DenseBank, ExpertBank
from ffmem.models.experts import ExpertRows, RoutedExperts
from ffmem.models.families import RERUN
from ffmem.models.memories import Memories
from ffmem.models.modules import first_tensor, get_module, sorted_weights
from ffmem.models.trace import LayerTrace

BOUND = 1e-4
"""Largest error allowed in float32: a hundred times that of rounding, far below a real mistake."""

HALF_BOUND = 2e-2
"""Largest error allowed in bfloat16 and float16, which round by up to 2⁻⁹ after each of the few
steps of an equation (measured on SmolLM2-135M: 6.4e-3). A real mistake has an error near 1."""


class SelfCheck(NamedTuple):
    """Measured errors, the largest over all layers."""

    key_error: float
    value_error: float
    residual_error: float
    causal_error: float
    head_error: float
    fold_error: float
    tokens: int
    """Number of tokens in the check."""


LAWS = {
    "key_error": "m = f(x · Kᵀ)",
    "value_error": "m · V + b = output of the value map",
    "residual_error": "r + y = o",
    "causal_error": "coefficients of a prefix do not depend on later tokens",
    "head_error": "head(o) = the model's logits",
    "fold_error": "folded(h) = s · σ(h) · (z(h) − c)",
}
"""The equation that each error belongs to."""


def self_check(memories: Memories) -> SelfCheck:
    """Return the error of every equation on a few tokens; raise if one is too large."""
    _check_weights_finite(memories)
    tokens = _make_tokens(memories)
    try:
        expert_errors = _expert_errors(memories, tokens)
        all_traces = memories.trace(tokens)
    except ModelError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError) as broken:
        raise SelfCheckFailed(
            f"This {memories.family!r} model does not run ({one_line(broken)}). Either its config"
            " does not match its weights, or one of its files is damaged."
        ) from broken
    for layer, trace in enumerate(all_traces):
        _check_trace_finite(memories, layer, trace)
    traces = {layer: all_traces[layer] for layer in memories.layout.memory_layers}
    by_layer = {
        "key_error": [
            max(_key_error(memories, *item), expert_errors.get(item[0], 0.0))
            for item in traces.items()
        ],
        "value_error": [_value_error(memories, *item) for item in traces.items()],
        "residual_error": [_residual_error(memories, *item) for item in traces.items()],
        "causal_error": _causal_errors(memories, tokens, traces),
    }
    for name, errors in by_layer.items():
        for layer, error in zip(traces, errors, strict=True):
            _check_error(memories, name, error, f"layer {layer}")
    head_error, fold_error = _head_errors(memories, tokens, all_traces[-1].layer_output)
    _check_error(memories, "head_error", head_error, "the output head")
    _check_error(memories, "fold_error", fold_error, "the output head")
    largest = {name: max(errors) for name, errors in by_layer.items()}
    return SelfCheck(**largest, head_error=head_error, fold_error=fold_error, tokens=tokens.numel())


def _make_tokens(memories: Memories) -> Int[Tensor, "batch position"]:
    """Return two short sequences of pseudo-random tokens, always the same."""
    length = min(8, memories.context or 8)
    embeddings = getattr(memories.model.get_input_embeddings(), "num_embeddings", None)
    size = min(memories.vocabulary, embeddings or memories.vocabulary)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(size, (2, length), generator=generator)


def _key_error(memories: Memories, layer: int, trace: LayerTrace) -> float:
    """Return the error of m = f(x · Kᵀ).

    It is computed in the dtype of the model: f and the gate amplify the rounding of their inputs.
    """
    x, row = trace.ff_input, memories.row
    if memories.banks[layer].routed:
        return 0.0  # its banks may have different inputs: `_expert_errors`
    scores = functional.linear(x, memories.keys(layer), memories.key_bias(layer))
    if row.softmax_groups is not None:
        groups = getattr(memories.config, row.softmax_groups)
        # The softmax may also give weight to tokens; only the sum over memories shows how much.
        mass = trace.coefficients.unflatten(-1, (groups, -1)).sum(-1, keepdim=True)
        shares = scores.unflatten(-1, (groups, -1)).softmax(-1)
        return _relative_error((mass * shares).flatten(-2), trace.coefficients)
    if row.input_values:  # coefficients are zero where there is no token to make a value from
        masked = torch.where(trace.coefficients == 0, 0.0, scores)
        return _relative_error(masked, trace.coefficients)
    return _relative_error(_from_keys(memories, memories.bank(layer), x), trace.coefficients)


def _from_keys(memories: Memories, bank: DenseBank, x: Tensor) -> Tensor:
    """Return f(x · Kᵀ), times w, of a bank that every token reaches."""
    scores = functional.linear(x, bank.key_rows(), bank.key_bias())
    up = functional.linear(x, bank.up_rows(), bank.up_bias()) if bank.gated else None
    coefficients = memories.activate(bank.layer, scores, up)
    return coefficients * bank.weights(x) if bank.is_weighted else coefficients


def _expert_errors(memories: Memories, tokens: Int[Tensor, "batch position"]) -> dict[int, float]:
    """Return, for layers with experts, how far banks are from their keys and the model's code."""
    errors: dict[int, float] = {}
    inputs: dict[DenseBank, Tensor] = {}

    def note(layer: int, found: Tensor, expected: Tensor) -> None:
        errors[layer] = max(errors.get(layer, 0.0), _relative_error(found, expected))

    def read(experts: RoutedExperts, layer: int, rows: ExpertRows) -> None:
        own = [(experts.keys(rows.expert), experts.key_bias(rows.expert))]
        if experts.gated:
            own.append((experts.up_keys(rows.expert), experts.up_bias(rows.expert)))
        scores = [functional.linear(rows.inputs, *weights) for weights in own]
        joined = (
            torch.stack(scores, -1).flatten(-2) if experts.interleaved else torch.cat(scores, -1)
        )
        m = experts.activate(joined)
        note(layer, m if experts.scales_input else m * rows.weights, rows.coefficients)

    def save_input(bank: DenseBank, _: nn.Module, args: tuple[Any, ...]) -> None:
        inputs[bank] = args[0]

    def read_dense(bank: DenseBank, coefficients: Tensor, *_: Tensor | None) -> None:
        note(bank.layer, _from_keys(memories, bank, inputs.pop(bank)), coefficients)

    def read_expert(bank: ExpertBank, rows: ExpertRows) -> None:
        pass  # read before the layer multiplies it

    def compare(
        experts: RoutedExperts,
        layer: int,
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        note(layer, first_tensor(output, {}), experts.own_forward(*args, **kwargs))

    with ExitStack() as stack:
        before = {}
        for layer, banks in enumerate(memories.banks):
            experts = banks.experts
            if experts is not None:
                before[layer] = experts.n_runs
                stack.enter_context(experts.reading(partial(read, experts, layer)))
                for bank in banks.dense:
                    handle = bank.keys.register_forward_pre_hook(partial(save_input, bank))
                    stack.callback(handle.remove)
                stack.enter_context(banks.reading(read_dense, read_expert))
                hook = partial(compare, experts, layer)
                handle = experts.module.register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
        if before:
            memories.forward(tokens)
    for layer, n_runs in before.items():
        experts = memories.banks[layer].experts
        if experts is None or experts.n_runs == n_runs:
            raise MixtureOfExperts(
                memories.family, f"layer {layer} computes them with other code than ffmem's"
            )
    return errors


def _value_error(memories: Memories, layer: int, trace: LayerTrace) -> float:
    """Return the error of m · V + b; V is computed from the input where it is not static."""
    if not memories.has_values:
        positions = range(trace.coefficients.shape[1])
        products = [
            torch.stack([m[n] @ memories.values_at(layer, x, n) for n in positions])
            for m, x in zip(trace.coefficients, trace.ff_input, strict=True)
        ]
        return _relative_error(torch.stack(products), trace.value_output)
    product = memories.bias_at(layer, trace).float()
    for bank in memories.banks[layer]:
        product = (
            product + trace.coefficients[..., bank.memories].float() @ bank.value_rows().float()
        )
    return _relative_error(product, trace.value_output)


def _residual_error(memories: Memories, layer: int, trace: LayerTrace) -> float:
    """Return the error of r + y = o, and of y as the post-norm of the value map's output."""
    row, block = memories.rows[layer], memories.blocks[layer]
    output = trace.residual + trace.ff_output
    if row.output_norm is not None:
        output = get_module(block, row.output_norm)(output)
    error = _relative_error(output, trace.layer_output)
    if row.post_norm is not None and row.residual != RERUN:
        y = get_module(block, row.post_norm)(trace.value_output) * memories.output_scale(layer)
        error = max(error, _relative_error(y, trace.ff_output))
    return error


def _causal_errors(
    memories: Memories, tokens: Int[Tensor, "batch position"], traces: dict[int, LayerTrace]
) -> list[float]:
    """Return by layer how much earlier coefficients change when the last token changes."""
    others = tokens.clone()
    others[:, -1] = (tokens[:, -1] + 1) % (int(tokens.max()) + 1)
    changed = memories.trace(others)
    return [
        _relative_error(changed[layer].coefficients[:, :-1], trace.coefficients[:, :-1])
        for layer, trace in traces.items()
    ]


def _head_errors(
    memories: Memories,
    tokens: Int[Tensor, "batch position"],
    output: Float[Tensor, "batch position hidden"],
) -> tuple[float, float]:
    """Return the errors of logits and of `folded` on the last layer's output."""
    head, stream = memories.head, output.flatten(0, 1)
    logits = head.logits(stream)
    head_error = _relative_error(logits, memories.logits(tokens).flatten(0, 1))
    folded = head.folded(stream)
    if not head.linear:
        is_same = head.adaptive and head.norm.module is None
        return head_error, _relative_error(folded, logits) if is_same else 0.0
    sigma = head.denominator(stream).to(folded.device)[:, None]
    z, c = head.unscaled(stream), head.constant()
    expected = head.scale * sigma * (z - c)
    size = head.scale * sigma * torch.maximum(z.abs(), c.abs())  # z − c may cancel
    return head_error, float((folded - expected).abs().max() / size.abs().max())


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number expected."""
    expected = expected.float()
    largest = expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((found.float().to(expected.device) - expected).abs().max() / largest)


def _check_error(memories: Memories, name: str, error: float, where: str) -> None:
    """Raise if an error is larger than rounding explains."""
    bound = BOUND if memories.dtype in (torch.float32, torch.float64) else HALF_BOUND
    if not error <= bound:
        what = f"the relative error is {error:.1e}, and {bound:.0e} is allowed"
        if not math.isfinite(error):
            what = "the result is not finite"
        raise SelfCheckFailed(
            f"The self-check failed: “{LAWS[name]}” does not hold for this {memories.family!r}"
            f" model. In {where}, {what}. ffmem cannot read this model; please report it."
        )


def _check_weights_finite(memories: Memories) -> None:
    """Raise if a weight is NaN or infinite."""
    prefix = memories.row.blocks + "."
    for name, weight in sorted_weights(memories.model):
        if not weight.numel():
            continue
        low, high = torch.aminmax(weight)  # propagates NaN, and copies nothing
        if not (torch.isfinite(low) and torch.isfinite(high)):
            layer = name.removeprefix(prefix).partition(".")[0]
            where = f"in layer {layer}, " if name.startswith(prefix) else ""
            raise SelfCheckFailed(
                f"This {memories.family!r} model has weights that are NaN or infinite"
                f" ({where}{name}). Its file is damaged, or its dtype cannot represent them."
            )


def _check_trace_finite(memories: Memories, layer: int, trace: LayerTrace) -> None:
    """Raise if a layer computed NaN or infinity."""
    for name, tensor in trace._asdict().items():
        if tensor is not None and not torch.isfinite(tensor).all():
            raise SelfCheckFailed(
                f"Layer {layer} of this {memories.family!r} model computes numbers that are not"
                f" finite ({name}). Load it in float32 or bfloat16."
            )

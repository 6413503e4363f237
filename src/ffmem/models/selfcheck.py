"""The self-check: the paper's equations, proved on the model at hand before it is read.

    m = f(x · Kᵀ + b_K)     gated: m = f(x · Kᵀ) ⊙ (x · Uᵀ); softmax: m ~ exp(x · Kᵀ) in a group
    m · V + b = what the value map gave
    r + y = o               post-norm blocks: norm(r + y) = o
    head(o_last) = the model's logits
    folded(h) = s · σ(h) · (z(h) − c)
    what follows a prefix does not change its coefficients

Each error is the largest difference, as a share of the largest number that it is compared with.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from ffmem.errors import ModelError, SelfCheckFailed, one_line
from ffmem.models.memories import Memories
from ffmem.models.split import weights
from ffmem.models.trace import LayerTrace

BOUND = 1e-4
"""The largest error in float32: a hundred times what rounding does, far below a wrong reading."""

HALF_BOUND = 2e-2
"""The largest error in bfloat16 and float16: numbers are rounded by up to 2⁻⁹ after each of the
few steps that an equation takes (measured on SmolLM2-135M: 6.4e-3), while a wrong
reading is off by about as much as the numbers themselves."""


class SelfCheck(NamedTuple):
    """The measured errors, the largest over all layers."""

    key_error: float
    value_error: float
    residual_error: float
    causal_error: float
    head_error: float
    fold_error: float
    tokens: int
    """How many tokens were read."""


LAWS = {
    "key_error": "m = f(x · Kᵀ)",
    "value_error": "m · V + b = what the value map gave",
    "residual_error": "r + y = o",
    "causal_error": "what follows a prefix does not change its coefficients",
    "head_error": "head(o) = the model's logits",
    "fold_error": "folded(h) = s · σ(h) · (z(h) − c)",
}
"""What each error is an error of."""


def check(memories: Memories) -> SelfCheck:
    """Return the errors of every equation on a few tokens; raise if one does not hold."""
    _refuse_non_finite_weights(memories)
    tokens = _tokens(memories)
    try:
        trace = memories.trace(tokens)
    except ModelError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError) as broken:
        raise SelfCheckFailed(
            f"This {memories.family!r} model does not run ({one_line(broken)}): its config does not"
            " fit its weights, or a file of it is damaged."
        ) from broken
    for layer, found in enumerate(trace):
        _refuse_non_finite(memories, layer, found)
    having = [pair for pair in enumerate(trace) if memories.layout.widths[pair[0]]]
    by_layer = {
        "key_error": [_key_error(memories, *pair) for pair in having],
        "value_error": [_value_error(memories, *pair) for pair in having],
        "residual_error": [_residual_error(memories, *pair) for pair in having],
        "causal_error": _causal_errors(memories, tokens, having),
    }
    for name, errors in by_layer.items():
        for (layer, _), error in zip(having, errors, strict=True):
            _refuse_large(memories, name, error, f"layer {layer}")
    head_error, fold_error = _head_errors(memories, tokens, trace[-1].layer_output)
    _refuse_large(memories, "head_error", head_error, "the output head")
    _refuse_large(memories, "fold_error", fold_error, "the output head")
    largest = {name: max(errors) for name, errors in by_layer.items()}
    return SelfCheck(**largest, head_error=head_error, fold_error=fold_error, tokens=tokens.numel())


def _tokens(memories: Memories) -> Int[Tensor, "batch position"]:
    """Return two short sequences of fixed pseudo-random tokens that the model can read."""
    length = min(8, memories.context or 8)
    embeddings = getattr(memories.model.get_input_embeddings(), "num_embeddings", None)
    size = min(memories.vocabulary, embeddings or memories.vocabulary)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(size, (2, length), generator=generator)


def _key_error(memories: Memories, layer: int, found: LayerTrace) -> float:
    """Return the error of the coefficients, computed anew from the keys.

    In the dtype of the model, for f and the gate amplify what rounding does to their inputs.
    """
    x, row = found.ff_input, memories.row
    scores = functional.linear(x, memories.keys(layer), memories.key_bias(layer))
    if row.softmax_groups is not None:
        groups = getattr(memories.config, row.softmax_groups)
        # What the softmax leaves to others, such as tokens, is known from the sum alone.
        mass = found.coefficients.unflatten(-1, (groups, -1)).sum(-1, keepdim=True)
        shares = scores.unflatten(-1, (groups, -1)).softmax(-1)
        return _error((mass * shares).flatten(-2), found.coefficients)
    if row.input_values:  # a coefficient is there where a token is, for its value is made of it
        return _error(torch.where(found.coefficients == 0, 0.0, scores), found.coefficients)
    coefficients = ACT2FN[memories.activation](scores)
    if memories.gated:
        up = functional.linear(x, memories.up_keys(layer), memories.up_bias(layer))
        coefficients = coefficients * up
    return _error(coefficients, found.coefficients)


def _value_error(memories: Memories, layer: int, found: LayerTrace) -> float:
    """Return the error of m · V + b, with V made of the input where it is not static."""
    if not memories.has_values:
        places = range(found.coefficients.shape[1])
        read = [
            [row[n] @ memories.values_at(layer, x, n) for n in places]
            for row, x in zip(found.coefficients, found.ff_input, strict=True)
        ]
        return _error(torch.stack([torch.stack(row) for row in read]), found.value_output)
    product = found.coefficients.float() @ memories.values(layer).float()
    return _error(product + memories.bias(layer).float(), found.value_output)


def _residual_error(memories: Memories, layer: int, found: LayerTrace) -> float:
    """Return the error of r + y."""
    output = found.residual + found.ff_output
    if memories.row.output_norm is not None:
        output = memories.blocks[layer].get_submodule(memories.row.output_norm)(output)
    return _error(output, found.layer_output)


def _head_errors(
    memories: Memories,
    tokens: Int[Tensor, "batch position"],
    output: Float[Tensor, "batch position hidden"],
) -> tuple[float, float]:
    """Return the errors of the head on the last layer's output, and of `folded`."""
    head, stream = memories.head, output.flatten(0, 1)
    logits = head.logits(stream)
    head_error = _error(logits, memories.logits(tokens).flatten(0, 1))
    folded = head.folded(stream)
    if head.adaptive:
        unnormed = head.norm.module is None
        return head_error, _error(folded, logits) if unnormed else 0.0
    sigma = head.denominator(stream).to(folded.device)[:, None]
    z, c = head.unscaled(stream), head.constant()
    law = head.scale * sigma * (z - c)
    size = head.scale * sigma * torch.maximum(z.abs(), c.abs())  # z − c may cancel
    return head_error, float((folded - law).abs().max() / size.abs().max())


def _causal_errors(
    memories: Memories, tokens: Int[Tensor, "batch position"], trace: list[tuple[int, LayerTrace]]
) -> list[float]:
    """Return how far coefficients of all positions but the last depend on the last token."""
    others = tokens.clone()
    others[:, -1] = (tokens[:, -1] + 1) % (int(tokens.max()) + 1)
    again = memories.trace(others)
    return [
        _error(again[layer].coefficients[:, :-1], found.coefficients[:, :-1])
        for layer, found in trace
    ]


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the largest number expected."""
    expected = expected.float()
    largest = expected.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((found.float().to(expected.device) - expected).abs().max() / largest)


def _refuse_large(memories: Memories, name: str, error: float, where: str) -> None:
    """Raise if an error is larger than rounding explains."""
    bound = BOUND if memories.dtype in (torch.float32, torch.float64) else HALF_BOUND
    if not error <= bound:
        off = f"it is off by {error:.1e} of the largest number, where {bound:.0e} is allowed"
        if not math.isfinite(error):
            off = "numbers come out that are not finite"
        raise SelfCheckFailed(
            f"This {memories.family!r} model does not keep the law “{LAWS[name]}” as ffmem"
            f" reads it: in {where} {off}. ffmem will not read it; please report the model."
        )


def _refuse_non_finite_weights(memories: Memories) -> None:
    """Raise if a weight is NaN or infinite."""
    prefix = memories.row.blocks + "."
    for name, weight in weights(memories.model):
        if not weight.numel():
            continue
        low, high = torch.aminmax(weight)  # NaN passes through, and nothing is copied
        if not (torch.isfinite(low) and torch.isfinite(high)):
            layer = name.removeprefix(prefix).partition(".")[0]
            where = f"in layer {layer}, " if name.startswith(prefix) else ""
            raise SelfCheckFailed(
                f"This {memories.family!r} model has a weight that is no number ({where}{name})."
                " Its file is damaged, or its dtype too small for it."
            )


def _refuse_non_finite(memories: Memories, layer: int, found: LayerTrace) -> None:
    """Raise if a layer computed a NaN or an infinity."""
    for name, tensor in found._asdict().items():
        if tensor is not None and not torch.isfinite(tensor).all():
            raise SelfCheckFailed(
                f"Layer {layer} of this {memories.family!r} model computes numbers that are not"
                f" finite ({name}). Load it in float32 or bfloat16."
            )

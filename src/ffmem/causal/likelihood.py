"""How likely a token is, given the last layer's output: log p, in a form that has a gradient.

    log p(w | h) = log softmax(cap(s · (U · P · N(h) + b)))[w]

`models.head` computes the same logits, in place and so without a gradient. `frozen` holds the σ of
the final norm fixed, so that what stands before the softmax is linear in h but for a cap:

    N₀(h) = γ ⊙ (h − mean(h)) / σ₀ + β
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.models.head import Head

ROWS_AT_ONCE = 64
"""How many vectors' logits are held at once where no gradient is asked for."""


def log_probabilities(
    head: Head, stream: Float[Tensor, "row hidden"]
) -> Float[Tensor, "row vocab"]:
    """Return log p of every token, in float64 from the logits on."""
    weight = next(head.output.parameters())
    return _read(head, head.norm.apply(stream.to(weight.dtype)))


def log_probability(
    head: Head, stream: Float[Tensor, "row hidden"], target: int
) -> Float[Tensor, " row"]:
    """Return log p of one token for each vector."""
    parts = stream.split(ROWS_AT_ONCE)
    return torch.cat([log_probabilities(head, rows)[:, target] for rows in parts])


def frozen(
    head: Head, stream: Float[Tensor, "row hidden"], sigma: Float[Tensor, " row"]
) -> Float[Tensor, "row vocab"]:
    """Return log p of every token with the final norm dividing by a given σ."""
    norm = head.norm
    normed = norm.fold(stream) / sigma[:, None].to(stream.device)
    return _read(head, normed + norm.offset.to(normed.device))


def _read(head: Head, normed: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
    """Return log p of normed vectors."""
    z = head.raw(normed).double()
    if head.adaptive:
        return z  # log-probabilities already
    if head.bias is not None:
        z = z + head.bias.double()
    z = z * head.scale
    if head.cap is not None:
        z = head.cap * (z / head.cap).tanh()
    return z.log_softmax(dim=1)

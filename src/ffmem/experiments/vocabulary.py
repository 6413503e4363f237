"""Questions to rows of logits: the top token, the rank of a token, its probability.

On the CPU the top and the rank go through numpy: its argmax takes the first of equals and is five
times as fast as torch's, its counting, row by row within the cache, also.
"""

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy import ndarray
from torch import Tensor

ROWS = 8


def tops(logits: Float[Tensor, "row vocab"]) -> Int64[ndarray, " row"]:
    """Return the token of the largest logit of each row, ties to the lower id."""
    if logits.device.type == "cpu":
        return np.asarray(logits.numpy().argmax(axis=1))
    return _host(logits.argmax(dim=1))


def ranks(
    logits: Float[Tensor, "row vocab"], tokens: Int64[ndarray, " row"]
) -> Int64[ndarray, " row"]:
    """Return how many tokens of each row have a larger logit than its token: 0 for the top."""
    if logits.device.type == "cpu":
        rows = logits.numpy()
        counts = [
            np.count_nonzero(row > row[token]) for row, token in zip(rows, tokens, strict=True)
        ]
        return np.asarray(counts, np.int64)
    return _host((logits > _at(logits, tokens)[:, None]).sum(dim=1))


def log_totals(logits: Float[Tensor, "row vocab"]) -> Float[Tensor, " row"]:
    """Return the log-sum-exp of each row."""
    if logits.device.type != "cpu":
        return logits.logsumexp(dim=1)
    # A few rows at a time stay in the cache, and need no fresh array of the size of all.
    room = torch.empty_like(logits[:ROWS])
    found = []
    for part in logits.split(ROWS):
        top = part.amax(dim=1, keepdim=True)
        powers = torch.sub(part, top, out=room[: len(part)]).exp_()
        found.append(top.squeeze(1) + powers.sum(dim=1).log())
    return torch.cat(found)


def probabilities(
    logits: Float[Tensor, "row vocab"],
    totals: Float[Tensor, " row"],
    tokens: Int64[ndarray, " row"],
) -> Float64[ndarray, " row"]:
    """Return the probability of one token in each row, given the rows' log-sum-exps."""
    return np.asarray(np.exp(_host(_at(logits, tokens).double() - totals.double())))


def _at(
    logits: Float[Tensor, "row vocab"], tokens: Int64[ndarray, " row"]
) -> Float[Tensor, " row"]:
    chosen = torch.from_numpy(tokens).to(logits.device)
    return logits.gather(1, chosen[:, None]).squeeze(1)


def _host(tensor: Tensor) -> ndarray:
    return np.asarray(tensor.cpu().numpy())

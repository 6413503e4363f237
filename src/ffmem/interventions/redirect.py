"""Redirect a memory: the nearest value that promotes a token.

    min ‖v′ − v‖    so that    σ · (ℓ_t(v′) − ℓ_w(v′)) ≥ δ    for every other token w

ℓ(v) are the folded logits of a value as it reaches the stream, as `show` lists them; they are
linear in v. t is the token, σ the sign of the coefficients it is made for, and δ the lead, in
standard deviations of ℓ(v). So v′ is the projection of v onto the intersection of half-spaces, one
per token. Few of them bind: starting from none, the tokens that lead most are added, and the small
problem is solved exactly by non-negative least squares (Lawson and Hanson 1974, ch. 23), until no
token is in the way.

Some tokens no value can promote: their embedding lies among those of others (Demeter et al. 2020).
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from scipy.optimize import nnls
from torch import Tensor

from ffmem.errors import ModelError, NoStaticValues
from ffmem.interventions.edits import Edit, Edits, MemoryWeights
from ffmem.interventions.forward import find_target
from ffmem.models.banks import Bank
from ffmem.models.head import TILE
from ffmem.models.memories import Memories

MARGIN = 0.5
"""The token's lead by default, in standard deviations of the value's logits."""
STEP = 16
"""Tokens that are added at a time."""
MOST_STEPS = 100
TOLERANCE = 1e-5
"""Relative to the lead: how far a token may violate its constraint."""


def solve_redirects(memories: Memories, edits: Edits) -> Edits:
    """Return the edits with a new value for every memory that is redirected."""
    solved = [
        _solve(memories, edit) if edit.how == "redirect" and edit.weights is None else edit
        for edit in edits
    ]
    return replace(edits, edits=tuple(solved))


@torch.no_grad()
def _solve(memories: Memories, edit: Edit) -> Edit:
    assert edit.token is not None
    assert edit.sign is not None
    cell = memories.layout.resolve(edit.cell)
    if not memories.has_values:
        raise NoStaticValues(f"{cell} cannot be redirected.")
    token = find_target(memories, edit.token)
    bank = memories.banks[cell.layer].at(cell.memory)
    value = bank.stored_values()[cell.memory - bank.offset].cpu().double().numpy()
    readings = Readings.of(memories, bank)
    spread = float(readings.logits(value).std())
    margin = MARGIN if edit.margin is None else edit.margin
    if not spread:
        raise ModelError(
            f"The value of {cell} promotes nothing: all its logits are the same. Redirect another"
            " memory; or write a fact into this one, with `ffmem write`."
        )
    found = nearest_value(edit.sign * value, readings, token, margin * spread)
    if found is None:
        raise ModelError(
            f"No value can promote {edit.token!r} above all other tokens: its embedding lies among"
            " those of others. Choose another token."
        )
    weights = MemoryWeights(value=as_numbers(edit.sign * found, bank.dtype))
    shown = memories.tokenizer.token_texts(memories.vocabulary)[token]
    return replace(edit, token=shown, margin=margin, weights=weights)


def nearest_value(
    value: Float[ndarray, " width"],
    readings: "Readings",
    token: int,
    lead: float,
    base: Float[ndarray, " vocab"] | float = 0.0,
) -> Float[ndarray, " width"] | None:
    """Return the nearest vector whose logit of a token leads all others; None if there is none.

    `base` are logits that are there already, to which those of the vector are added.
    """
    base = np.broadcast_to(np.asarray(base, dtype=np.float64), (len(readings.embedding),))
    found, binding = value, np.zeros(0, dtype=np.int64)
    for _ in range(MOST_STEPS):
        logits = base + readings.logits(found)
        gaps = logits + lead - logits[token]
        gaps[token] = -np.inf
        gaps[binding] = -np.inf
        worst = np.argsort(-gaps, kind="stable")[:STEP]
        worst = worst[gaps[worst] > TOLERANCE * lead]
        if not len(worst):
            return found
        binding = np.concatenate([binding, worst])
        normals = readings.rows(np.array([token])) - readings.rows(binding)
        ahead = base[token] - base[binding] + normals @ value
        change = _least_distance(normals, lead - ahead)
        if change is None:
            return None
        found = value + change
    raise ModelError(f"The nearest value was not found in {MOST_STEPS} steps. Please report this.")


def _least_distance(
    normals: Float[ndarray, "row width"], bounds: Float[ndarray, " row"]
) -> Float[ndarray, " width"] | None:
    """Return the shortest x with normals · x ≥ bounds; None if there is none.

    The non-negative u that brings [normalsᵀ; boundsᵀ] · u nearest to (0, …, 0, 1) leaves a residual
    (−x, 1) / (1 + ‖x‖²), which is 0 if no x exists.
    """
    scale = max(float(np.abs(bounds).max()), np.finfo(np.float64).tiny)
    system = np.vstack([normals.T, bounds[None] / scale])
    target = np.zeros(len(system))
    target[-1] = 1.0
    weights, distance = nnls(system, target, maxiter=100 * len(bounds) + 1000)
    residual = target - system @ weights
    if distance < 1e-9 or residual[-1] <= 1e-18:
        return None
    change: ndarray = -residual[:-1] / residual[-1] * scale
    return change


# Values as a bank stores them


class Readings(NamedTuple):
    """How stored values are read: logits = s · U · Mᵀ · v."""

    embedding: Float[Tensor, "vocab inner"]
    """U"""
    to_inner: Float[Tensor, "width inner"]
    """M: post-norm, multiplier, final norm and projection, all folded."""
    scale: float = 1.0

    @classmethod
    def of(cls, memories: Memories, bank: Bank) -> "Readings":
        """Return how the values of a bank are read."""
        head, width = memories.head, bank.stored_values().shape[1]
        to_stream = memories.to_directions(bank.layer)
        directions = to_stream(bank.from_stored(torch.eye(width, device=memories.device)))
        to_inner = directions @ head.part_map().to(directions.device)
        return cls(head.embedding, to_inner.to(head.embedding.device), head.scale)

    def logits(self, value: Float[ndarray, " width"]) -> Float[ndarray, " vocab"]:
        """Return the folded logits of a value."""
        inner = torch.from_numpy(value).to(self.to_inner) @ self.to_inner
        tiles = [tile.float() @ inner for tile in self.embedding.split(TILE)]
        return self.scale * torch.cat(tiles).cpu().double().numpy()

    def rows(self, tokens: Int[ndarray, " row"]) -> Float[ndarray, "row width"]:
        """Return what each of these tokens' logits multiplies a value with."""
        chosen = self.embedding[torch.from_numpy(tokens)].double()
        return self.scale * (chosen @ self.to_inner.double().T).cpu().numpy()


def as_numbers(row: Float[ndarray, " width"], dtype: torch.dtype) -> tuple[float, ...]:
    """Return a vector as the dtype stores it, in as few digits as identify its numbers."""
    digits = 17 if dtype == torch.float64 else 9
    stored = torch.from_numpy(np.asarray(row, dtype=np.float64)).to(dtype).double()
    return tuple(float(f"{number:.{digits}g}") for number in stored.tolist())

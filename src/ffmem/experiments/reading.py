"""Questions to rows of logits: the top token, how far it leads, its probability, a token's rank.

    log Σ exp(z) = top + log Σ exp(z − top)

A slice of the vocabulary is read as soon as it is computed, while it lies in the cache: reading it
from memory later would take as long as the arithmetic on it. Tokens are rows here and the vectors
of the model columns, so that the logits of one token lie side by side.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy import ndarray
from torch import Tensor

SLICE = 2048
"""Tokens at a time."""

BLOCK = 64
"""The top is looked for in the block of so many tokens that has the largest logit."""


class Reading:
    """What the logits of some vectors say, slice by slice.

    Law: however a vocabulary is sliced, the same comes out, totals but for rounding.
    """

    def __init__(
        self, totals: bool = False, watched: Int64[ndarray, " vector"] | None = None
    ) -> None:
        self.n_tokens = 0
        """Read so far."""
        self.tokens: Int64[Tensor, " vector"]
        """The top of each vector; ties to the lower id."""
        self.logits: Float[Tensor, " vector"]
        """Its logit."""
        self.seconds: Float[Tensor, " vector"]
        """The second largest logit, the same of two equals."""
        self.sums: Float[Tensor, " vector"] | None = None
        """Σ exp(z − top), if `totals` are asked for."""
        self.of_watched: Float[Tensor, " vector"]
        """The logit of each vector's `watched` token."""
        self.totals = totals
        self.room: Float[Tensor, "token vector"]
        """To compute in: fresh memory costs as much as the arithmetic in it."""
        self.watched = None if watched is None else torch.from_numpy(watched)

    @classmethod
    def of(cls, logits: Float[Tensor, "token vector"], totals: bool = False) -> "Reading":
        """Return the reading of a whole vocabulary."""
        found = cls(totals)
        found.take(logits)
        return found

    def take(self, logits: Float[Tensor, "token vector"]) -> None:
        """Read the next tokens' logits, which stay as they are."""
        for part in logits.split(SLICE):
            if not self.n_tokens:
                self._begin(part)
            before = self.logits
            self._find_top(part)
            if self.sums is not None:
                room = torch.sub(part, self.logits, out=self.room[: len(part)])
                # Below e⁻⁸⁷ float32 is denormal, five times as slow, and nothing beside the top.
                fresh = room.clamp_(min=-87).exp_().sum(dim=0)
                self.sums = self.sums * (before - self.logits).exp() + fresh
            if self.watched is not None:
                self._watch(part)
            self.n_tokens += len(part)

    def _begin(self, part: Float[Tensor, "token vector"]) -> None:
        self.logits = part.new_full((part.shape[1],), -torch.inf)
        self.seconds = self.logits
        self.tokens = torch.zeros(part.shape[1], dtype=torch.long, device=part.device)
        self.of_watched = self.logits.clone()
        if self.watched is not None:
            self.watched = self.watched.to(part.device)
        if self.totals:
            self.sums = torch.zeros_like(self.logits)
            self.room = part.new_empty(SLICE, part.shape[1])

    def _find_top(self, part: Float[Tensor, "token vector"]) -> None:
        # argmax itself is twenty times as slow as amax.
        blocks = blocked(part, torch.amax)
        largest, block = blocks.max(dim=0)
        blocks.scatter_(0, block[None], -torch.inf)
        others = blocks.amax(dim=0)
        (better,) = (largest > self.logits).nonzero(as_tuple=True)
        # Of vectors whose top stays: the largest of this slice may be their second.
        seconds = torch.maximum(self.seconds, largest)
        if len(better):
            steps = torch.arange(BLOCK, device=part.device)
            places = BLOCK * block[better, None] + steps
            last = len(part) - 1
            inside = part[places.clamp(max=last), better[:, None]]
            inside.masked_fill_(places > last, -torch.inf)
            top, within = inside.max(dim=1)
            inside.scatter_(1, within[:, None], -torch.inf)
            rest = torch.maximum(others[better], inside.amax(dim=1))
            seconds[better] = torch.maximum(self.logits[better], rest)
            self.tokens[better] = self.n_tokens + BLOCK * block[better] + within
            self.logits = self.logits.index_copy(0, better, top)
        self.seconds = seconds

    def _watch(self, part: Float[Tensor, "token vector"]) -> None:
        assert self.watched is not None
        places = self.watched - self.n_tokens
        (here,) = ((places >= 0) & (places < len(part))).nonzero(as_tuple=True)
        self.of_watched[here] = part[places[here], here]

    @property
    def leads(self) -> Float[Tensor, " vector"]:
        """How far each top stands above the second; 0 of two equals."""
        return self.logits - self.seconds

    @property
    def tops(self) -> Int64[ndarray, " vector"]:
        """The top tokens, for the host."""
        return _host(self.tokens)

    def probabilities(self, logits: Float[Tensor, " vector"]) -> Float64[ndarray, " vector"]:
        """Return the probability of one token of each vector, given its logit."""
        assert self.sums is not None  # `totals` were asked for
        of_top = (logits.double() - self.logits.double()).exp()
        return _host(of_top / self.sums.double())

    def choose(
        self,
        vectors: Int64[Tensor, " some"],
        of_vector: Int64[Tensor, " pair"],
        tokens: Int64[Tensor, " pair"],
        logits: Float[Tensor, "token vector"],
    ) -> None:
        """Take the top of some vectors from candidates, whose logits are now known better.

        Candidates come as pairs, tokens ascending; each vector has one at least.
        """
        own = logits[tokens, vectors[of_vector]]
        best = own.new_full((len(vectors),), -torch.inf)
        best.scatter_reduce_(0, of_vector, own, "amax")
        first = torch.full_like(vectors, self.n_tokens)
        wins = own == best[of_vector]
        first.scatter_reduce_(0, of_vector[wins], tokens[wins], "amin")
        self.tokens[vectors] = first


def blocked(
    logits: Float[Tensor, "token vector"], reduce: Callable[..., Tensor]
) -> Float[Tensor, "block vector"]:
    """Return the largest (or smallest) logit of each block of tokens; the last may be shorter."""
    whole = len(logits) // BLOCK * BLOCK
    blocks = reduce(logits[:whole].unflatten(0, (-1, BLOCK)), dim=1)
    if whole < len(logits):
        blocks = torch.cat([blocks, reduce(logits[whole:], dim=0, keepdim=True)])
    return blocks


def at(
    logits: Float[Tensor, "token vector"], tokens: Int64[Tensor, " vector"]
) -> Float[Tensor, " vector"]:
    """Return the logit of one token of each vector."""
    return logits.gather(0, tokens[None].to(logits.device)).squeeze(0)


def ranks(
    logits: Float[Tensor, "token vector"], own: Float[Tensor, " vector"]
) -> Int64[ndarray, " vector"]:
    """Return how many tokens of each vector have a larger logit than its `own`: 0 for the top."""
    counts = torch.zeros_like(own)  # of ones in float32: exact up to 16 million
    room = torch.empty_like(logits[:SLICE])
    for part in logits.split(SLICE):
        counts += torch.gt(part, own, out=room[: len(part)]).sum(dim=0)
    return _host(counts.long())


def _host(tensor: Tensor) -> ndarray:
    return np.asarray(tensor.cpu().numpy())

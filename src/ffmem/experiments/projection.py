"""What r, y and o of a layer predict, through two vocabulary projections.

y costs none of its own. With z the logits before scale and cap, c their constant part and σ a
vector's own norm denominator:

    folded(y) = s · ( σ_o·(z_o − c) − σ_r·(z_r − c) )

Where two tokens are so close that rounding could swap them, y is projected after all; so it is in
half precision, and where o is not r + y. An adaptive softmax is not linear: its bands are
subtracted before each is normalized, and it is read as a whole.

A slice of the vocabulary is projected and read before the next, while it lies in the cache: reading
it from memory later would take as long as the arithmetic on it. Tokens are rows here and the
vectors of the model columns, so that the logits of one token lie side by side.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.experiments.predictions import Predictions
from ffmem.models.head import Head
from ffmem.models.memories import Memories
from ffmem.models.modules import device_of
from ffmem.models.trace import LayerTrace

SLICE = 2048
"""Tokens at a time."""

BLOCK = 64
"""The top is looked for in the block of so many tokens that has the largest logit."""

CLOSE = 1e-4
"""Two tokens are close whose logits under y differ by less than this share of max|z_o| · σ_o.

Rounding moved none by more than 2.3e-6 of it in SmolLM2-135M; wider models round more."""

EVEN = 16
"""Vectors are projected in multiples of this: an odd number takes half as long again."""

SHARPENED = 32
"""Vectors whose close tokens are projected together: all of their tokens may be close."""


class Reading:
    """Top token, lead, probability and rank in the logits of some vectors, slice by slice.

        log Σ exp(z) = top + log Σ exp(z − top)

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
        self.buffer: Float[Tensor, "token vector"]
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
                buffer = torch.sub(part, self.logits, out=self.buffer[: len(part)])
                # Below e⁻⁸⁷ float32 is denormal, five times as slow, and nothing beside the top.
                fresh = buffer.clamp_(min=-87).exp_().sum(dim=0)
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
            self.buffer = part.new_empty(SLICE, part.shape[1])

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
    buffer = torch.empty_like(logits[:SLICE])
    for part in logits.split(SLICE):
        counts += torch.gt(part, own, out=buffer[: len(part)]).sum(dim=0)
    return _host(counts.long())


def _host(tensor: Tensor) -> ndarray:
    return np.asarray(tensor.cpu().numpy())


class Vectors(NamedTuple):
    """Some rows of a layer's trace."""

    residual: Float[Tensor, "vector hidden"]
    ff_output: Float[Tensor, "vector hidden"]
    output: Float[Tensor, "vector hidden"]


class Slice(NamedTuple):
    """The logits of some tokens under r, y and o; good until the next slice comes."""

    residual: Float[Tensor, "token vector"]
    ff_output: Float[Tensor, "token vector"]
    output: Float[Tensor, "token vector"]
    largest: Float[Tensor, " vector"]
    """max|z_o|, of which y's logits are a difference."""


class Projector:
    """Reads the three vectors of a layer."""

    def __init__(self, memories: Memories, budget: int = 128 << 20, details: bool = True) -> None:
        self.head: Head = memories.head
        self.vocabulary = memories.vocabulary
        self.details = details
        self.adds_up = memories.row.output_norm is None and memories.dtype == torch.float32
        self.constants = self.head.cluster_constants() if self.adds_up else []
        self.constant = any(bool(band.any()) for band in self.constants)
        self.rows = max(1, budget // (4 * memories.vocabulary * EVEN)) * EVEN
        self.buffers: dict[str, Tensor] = {}

    @torch.inference_mode()
    def final(self, last: LayerTrace) -> Int64[ndarray, " row"]:
        """Return the model's own predictions."""
        n, found = len(last.layer_output), []
        for some in self._parts(n):
            reading = Reading()
            for logits in self._stream_slices(last.layer_output[some]):
                reading.take(logits)
            found.append(reading.tops)
        return np.concatenate(found)[:n]

    @torch.inference_mode()
    def read(self, trace: LayerTrace, final: Int64[ndarray, " row"]) -> Predictions:
        """Return what one layer's vectors predict, as columns of one layer."""
        n, parts = len(final), []
        for some in self._parts(n):
            part = Vectors(trace.residual[some], trace.ff_output[some], trace.layer_output[some])
            parts.append(self._part(part, final[some.numpy()]))
        joined = (np.concatenate(columns)[:n, None] for columns in zip(*parts, strict=True))
        return Predictions(*joined)

    def _parts(self, n: int) -> Iterator[Int64[Tensor, " _"]]:
        """Divide rows into parts of one size, a multiple of `EVEN`; the last row fills the last."""
        size = math.ceil(n / math.ceil(n / self.rows) / EVEN) * EVEN
        for first in range(0, n, size):
            yield torch.arange(first, first + size).clamp(max=n - 1)

    def _part(self, vectors: Vectors, final: Int64[ndarray, " vector"]) -> list[ndarray]:
        of_r = Reading(totals=True, watched=final)
        of_y, of_o = Reading(totals=self.details), Reading(totals=self.details)
        y_logits = self._buffer("y", self.vocabulary, len(final))
        r_logits = self._buffer("r", self.vocabulary, len(final)) if self.details else None
        largest, n_read = torch.zeros(1, device=y_logits.device), 0
        for some in self._slices(vectors, y_logits):
            of_r.take(some.residual)
            of_y.take(some.ff_output)
            of_o.take(some.output)
            largest = torch.maximum(largest, some.largest)
            if r_logits is not None:
                r_logits[n_read : of_r.n_tokens] = some.residual
            n_read = of_r.n_tokens
        if self.adds_up:
            self._sharpen(of_y, y_logits, vectors, largest)
        found = {
            "residual_top": of_r.tops,
            "ff_top": of_y.tops,
            "output_top": of_o.tops,
            "residual_top_probability": of_r.probabilities(of_r.logits),
            "residual_final_probability": of_r.probabilities(of_r.of_watched),
            "ff_residual_rank": ranks(y_logits, at(y_logits, of_r.tokens)),
        }
        if r_logits is not None:
            of_final = at(y_logits, torch.from_numpy(final))
            found |= {
                "residual_final_rank": ranks(r_logits, of_r.of_watched),
                "output_top_probability": of_o.probabilities(of_o.logits),
                "ff_final_rank": ranks(y_logits, of_final),
                "ff_top_probability": of_y.probabilities(at(y_logits, of_y.tokens)),
                "ff_final_probability": of_y.probabilities(of_final),
                "ff_residual_probability": of_y.probabilities(at(y_logits, of_r.tokens)),
            }
        nothing = Predictions.empty(len(final), 1)
        return [found.get(n, of_none[:, 0]) for n, of_none in nothing._asdict().items()]

    def _sharpen(
        self,
        of_y: Reading,
        y_logits: Float[Tensor, "token vector"],
        vectors: Vectors,
        largest: Float[Tensor, " vector"],
    ) -> None:
        """Project y itself on tokens that are too close to its top for a difference to tell."""
        sigma = self.head.denominator(vectors.output).to(largest.device)
        rounding = CLOSE * abs(self.head.scale) * largest * sigma
        (close,) = (of_y.leads < rounding).nonzero(as_tuple=True)
        for places in close.split(SHARPENED) if len(close) else ():
            least = (of_y.logits - rounding)[places]
            tokens, of_place = (y_logits[:, places] >= least).nonzero(as_tuple=True)
            part = vectors.ff_output[places.to(vectors.ff_output.device)]
            y_logits[tokens, places[of_place]] = self._exact(part, of_place, tokens)
            of_y.choose(places, of_place, tokens, y_logits)

    def _exact(
        self,
        part: Float[Tensor, "part hidden"],
        of_part: Int64[Tensor, " pair"],
        tokens: Int64[Tensor, " pair"],
    ) -> Float[Tensor, " pair"]:
        """Return what parts of the stream give single tokens."""
        # Beside a large residual, every token can be close: then all of U is read once.
        if self.head.adaptive or len(tokens) > self.vocabulary // 8:
            return self.head.folded(part)[of_part, tokens]
        rows = self.head.pre_unembed_part(part)[of_part]
        return (self.head.embedding[tokens] * rows).sum(dim=1) * self.head.scale

    def _slices(self, vectors: Vectors, y_logits: Float[Tensor, "token vector"]) -> Iterator[Slice]:
        """Return the vocabulary slice by slice; y's logits stay in `y_logits`."""
        if self.head.adaptive:
            yield self._whole(vectors, y_logits)
            return
        n, head, first = len(vectors.residual), self.head, 0
        sigma_r, sigma_o = (
            head.denominator(stream).to(y_logits.device)
            for stream in (vectors.residual, vectors.output)
        )
        streams = head.pre_unembed(torch.cat([vectors.residual, vectors.output]))
        parts = None if self.adds_up else head.pre_unembed_part(vectors.ff_output)
        for z, of_part in self._products(streams, parts):
            of_r, of_o = z[:, :n], z[:, n:]
            y = y_logits[first : first + len(z)]
            if of_part is not None:
                y.copy_(of_part)
            else:
                torch.mul(of_o, sigma_o, out=y).addcmul_(of_r, sigma_r, value=-1)
                if self.constant:
                    c = self.constants[0][first : first + len(z), None]
                    y.addcmul_(c, sigma_r - sigma_o)
            if head.scale != 1:
                y.mul_(head.scale)
            largest = torch.maximum(
                blocked(of_o, torch.amax).amax(dim=0), -blocked(of_o, torch.amin).amin(dim=0)
            )
            head.combine_clusters([z])
            yield Slice(of_r, y, of_o, largest)
            first += len(z)

    def _stream_slices(
        self, stream: Float[Tensor, "vector hidden"]
    ) -> Iterator[Float[Tensor, "token vector"]]:
        """Return the logits of vectors of the residual stream, slice by slice."""
        if self.head.adaptive:
            yield self.head.logits(stream).T
            return
        for z, _ in self._products(self.head.pre_unembed(stream), None):
            yield self.head.combine_clusters([z])

    def _products(
        self,
        streams: Float[Tensor, "vector width"],
        parts: Float[Tensor, "part width"] | None,
    ) -> Iterator[tuple[Float[Tensor, "token vector"], Float[Tensor, "token part"] | None]]:
        """Return U · h of every vector, and of parts, slice by slice in one buffer.

        U · hᵀ, for the logits of one token are to lie side by side; b is added to those of the
        stream. Both at once: the wider product is the faster one.
        """
        n, weight, bias = len(streams), self.head.embedding, self.head.bias
        right = (streams if parts is None else torch.cat([streams, parts])).T
        buffer = self._buffer("z", SLICE, right.shape[1]).to(weight.dtype)
        for first in range(0, len(weight), SLICE):
            left = weight[first : first + SLICE]
            z = torch.mm(left, right, out=buffer[: len(left)]).float()
            if bias is not None:
                z[:, :n].add_(bias[first : first + SLICE, None].float())
            yield z[:, :n], None if parts is None else z[:, n:]

    def _whole(self, vectors: Vectors, y_logits: Float[Tensor, "token vector"]) -> Slice:
        """Return the logits of the whole vocabulary under an adaptive softmax."""
        head = self.head
        below, above = head.cluster_logits(vectors.residual), head.cluster_logits(vectors.output)
        largest = torch.stack([band.abs().amax(dim=1) for band in above]).amax(dim=0)
        of_r, of_o = head.combine_clusters(below), head.combine_clusters(above)
        if self.adds_up:
            sigma_r, sigma_o = (
                head.denominator(stream).to(largest.device)[:, None]
                for stream in (vectors.residual, vectors.output)
            )
            shares = [
                sigma_o * (z_o - c) - sigma_r * (z_r - c)
                for z_r, z_o, c in zip(below, above, self.constants, strict=True)
            ]
            y_logits.copy_(head.combine_part_clusters(shares).T)
        else:
            y_logits.copy_(head.folded(vectors.ff_output).T)
        return Slice(of_r.T, y_logits, of_o.T, largest)

    def _buffer(self, name: str, n_tokens: int, n: int) -> Float[Tensor, "token vector"]:
        """Return memory for logits, the same again where it is large enough."""
        buffer, size = self.buffers.get(name), n_tokens * n
        if buffer is None or len(buffer) < size:
            buffer = self.buffers[name] = torch.empty(size, device=device_of(self.head.output))
        return buffer[:size].view(n_tokens, n)

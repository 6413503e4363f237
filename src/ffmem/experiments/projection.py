"""What r, y and o of a layer predict: three vocabulary projections, read slice by slice.

A slice of the vocabulary is projected and read before the next one, while it is in the cache:
reading it from memory later would take as long as computing it. Rows are tokens here, and columns
the model's vectors, so that the logits of one token are contiguous. An adaptive softmax is read as
a whole.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.experiments.metrics import Predictions
from ffmem.models.head import Head
from ffmem.models.memories import Memories
from ffmem.models.modules import device_of
from ffmem.models.trace import LayerTrace

SLICE = 2048
"""Tokens at a time."""

BLOCK = 64
"""Tokens per block: the top is searched in the block with the largest logit."""

LOGIT_BYTES = 128 << 20
"""Bytes of logits of y at a time."""

EVEN = 16
"""Vectors are projected in multiples of this: an odd number takes half as long again."""


class OnlineSoftmax:
    """Top token, probabilities and ranks in the logits of some vectors, slice by slice.

        log Σ exp(z) = top + log Σ exp(z − top)

    Law: however a vocabulary is sliced, the same comes out, totals but for rounding.
    """

    def __init__(self, targets: Int64[ndarray, " vector"] | None = None) -> None:
        self.n_tokens = 0
        """Read so far."""
        self.tokens: Int64[Tensor, " vector"]
        """The top of each vector; ties to the lower id."""
        self.logits: Float[Tensor, " vector"]
        """Its logit."""
        self.sums: Float[Tensor, " vector"]
        """Σ exp(z − top), if there are targets."""
        self.target_logits: Float[Tensor, " vector"]
        """The logit of each vector's target token."""
        self.buffer: Float[Tensor, "token vector"]
        """Scratch memory: allocating it anew would cost as much as the arithmetic."""
        self.targets = None if targets is None else torch.from_numpy(targets)

    def update(self, logits: Float[Tensor, "token vector"]) -> None:
        """Read the next tokens' logits, which stay as they are."""
        for part in logits.split(SLICE):
            if not self.n_tokens:
                self._begin(part)
            before = self.logits
            self._find_top(part)
            if self.targets is not None:
                buffer = torch.sub(part, self.logits, out=self.buffer[: len(part)])
                # Below e⁻⁸⁷ float32 is denormal, five times as slow, and nothing beside the top.
                fresh = buffer.clamp_(min=-87).exp_().sum(dim=0)
                self.sums = self.sums * (before - self.logits).exp() + fresh
                places = self.targets - self.n_tokens
                (here,) = ((places >= 0) & (places < len(part))).nonzero(as_tuple=True)
                self.target_logits[here] = part[places[here], here]
            self.n_tokens += len(part)

    def _begin(self, part: Float[Tensor, "token vector"]) -> None:
        self.logits = part.new_full((part.shape[1],), -torch.inf)
        self.tokens = torch.zeros(part.shape[1], dtype=torch.long, device=part.device)
        self.target_logits = self.logits.clone()
        if self.targets is not None:
            self.targets = self.targets.to(part.device)
            self.sums = torch.zeros_like(self.logits)
            self.buffer = part.new_empty(SLICE, part.shape[1])

    def _find_top(self, part: Float[Tensor, "token vector"]) -> None:
        # argmax itself is twenty times as slow as amax.
        whole = len(part) // BLOCK * BLOCK
        blocks = torch.amax(part[:whole].unflatten(0, (-1, BLOCK)), dim=1)
        if whole < len(part):
            blocks = torch.cat([blocks, torch.amax(part[whole:], dim=0, keepdim=True)])
        largest, block = blocks.max(dim=0)
        (better,) = (largest > self.logits).nonzero(as_tuple=True)
        if len(better):
            places = BLOCK * block[better, None] + torch.arange(BLOCK, device=part.device)
            last = len(part) - 1
            inside = part[places.clamp(max=last), better[:, None]]
            top, within = inside.masked_fill_(places > last, -torch.inf).max(dim=1)
            self.tokens[better] = self.n_tokens + BLOCK * block[better] + within
            self.logits = self.logits.index_copy(0, better, top)

    @property
    def tops(self) -> Int64[ndarray, " vector"]:
        """The top tokens, for the host."""
        return np.asarray(self.tokens.cpu().numpy())

    @property
    def probabilities(self) -> Float64[ndarray, " vector"]:
        """The probability of each vector's target token."""
        of_top = (self.target_logits.double() - self.logits.double()).exp()
        return np.asarray((of_top / self.sums.double()).cpu().numpy())


def ranks(
    logits: Float[Tensor, "token vector"], own: Float[Tensor, " vector"]
) -> Int64[ndarray, " vector"]:
    """Return how many tokens of each vector have a larger logit than its `own`: 0 for the top."""
    counts = torch.zeros_like(own)  # of ones in float32: exact up to 16 million
    buffer = torch.empty_like(logits[:SLICE])
    for part in logits.split(SLICE):
        counts += torch.gt(part, own, out=buffer[: len(part)]).sum(dim=0)
    return np.asarray(counts.long().cpu().numpy())


class Projector:
    """Reads the three vectors of a layer."""

    def __init__(self, memories: Memories) -> None:
        self.head: Head = memories.head
        self.vocabulary = memories.vocabulary
        self.rows = max(1, LOGIT_BYTES // (4 * memories.vocabulary * EVEN)) * EVEN
        self.buffers: dict[str, Tensor] = {}

    @torch.inference_mode()
    def final(self, last: LayerTrace) -> Int64[ndarray, " row"]:
        """Return the model's own predictions."""
        n, found = len(last.layer_output), []
        for some in self._parts(n):
            softmax = OnlineSoftmax()
            for logits, _ in self._slices(last.layer_output[some], None):
                softmax.update(logits)
            found.append(softmax.tops)
        return np.concatenate(found)[:n]

    @torch.inference_mode()
    def read(self, trace: LayerTrace, final: Int64[ndarray, " row"]) -> Predictions:
        """Return what one layer's vectors predict, as columns of one layer."""
        n, parts = len(final), []
        for some in self._parts(n):
            streams = torch.cat([trace.residual[some], trace.layer_output[some]])
            parts.append(self._part(streams, trace.ff_output[some], final[some.numpy()]))
        joined = (np.concatenate(columns)[:n, None] for columns in zip(*parts, strict=True))
        return Predictions(*joined)

    def _parts(self, n: int) -> Iterator[Int64[Tensor, " _"]]:
        """Split rows into parts of one size, a multiple of `EVEN`; the last row fills them up."""
        size = math.ceil(n / math.ceil(n / self.rows) / EVEN) * EVEN
        for first in range(0, n, size):
            yield torch.arange(first, first + size).clamp(max=n - 1)

    def _part(
        self,
        streams: Float[Tensor, "stream hidden"],
        ff_output: Float[Tensor, "vector hidden"],
        final: Int64[ndarray, " vector"],
    ) -> list[ndarray]:
        """Return the columns of some rows; `streams` are their r, then their o."""
        n = len(final)
        of_r, of_y, of_o = OnlineSoftmax(final), OnlineSoftmax(), OnlineSoftmax()
        y_logits = self._buffer("y", self.vocabulary, n)
        for of_stream, of_part in self._slices(streams, ff_output):
            assert of_part is not None  # the slices have parts
            y_logits[of_y.n_tokens : of_y.n_tokens + len(of_part)] = of_part
            of_r.update(of_stream[:, :n])
            of_o.update(of_stream[:, n:])
            of_y.update(of_part)
        of_top_r = y_logits.gather(0, of_r.tokens[None]).squeeze(0)
        return [of_r.tops, of_y.tops, of_o.tops, of_r.probabilities, ranks(y_logits, of_top_r)]

    def _slices(
        self,
        streams: Float[Tensor, "stream hidden"],
        parts: Float[Tensor, "part hidden"] | None,
    ) -> Iterator[tuple[Float[Tensor, "token stream"], Float[Tensor, "token part"] | None]]:
        """Return the logits of residual-stream vectors, and of parts, slice by slice.

        The next slice overwrites it. All vectors share one product, since wide ones are faster.
        """
        head, n = self.head, len(streams)
        if head.adaptive:
            yield head.logits(streams).T, None if parts is None else head.folded(parts).T
            return
        right = head.pre_unembed(streams)
        if parts is not None:
            right = torch.cat([right, head.pre_unembed_part(parts)])
        weight, bias = head.embedding, head.bias
        buffer = self._buffer("z", SLICE, len(right)).to(weight.dtype)
        for first in range(0, len(weight), SLICE):
            left = weight[first : first + SLICE]
            z = torch.mm(left, right.T, out=buffer[: len(left)]).float()
            if bias is not None:
                z[:, :n].add_(bias[first : first + SLICE, None].float())
            if parts is not None and head.scale != 1:
                z[:, n:].mul_(head.scale)
            yield head.combine_clusters([z[:, :n]]), None if parts is None else z[:, n:]

    def _buffer(self, name: str, n_tokens: int, n: int) -> Float[Tensor, "token vector"]:
        """Return memory for logits, the same again where it is large enough."""
        buffer, size = self.buffers.get(name), n_tokens * n
        if buffer is None or len(buffer) < size:
            buffer = self.buffers[name] = torch.empty(size, device=device_of(self.head.output))
        return buffer[:size].view(n_tokens, n)

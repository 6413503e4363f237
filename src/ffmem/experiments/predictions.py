"""What residual, feed-forward output and layer output predict, layer by layer (Figures 9 to 11).

    top(h) = argmax of h's logits;   r and o are read by the head, y is read folded

y costs no projection of its own. With z the logits before scale and cap, c their constant part
and σ a vector's own norm denominator:

    folded(y) = s · ( σ_o·(z_o − c) − σ_r·(z_r − c) )

Where two tokens are so close that rounding could swap them, y is projected after all; so it is in
half precision, and where o is not r + y.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from numpy import ndarray
from torch import Tensor

from ffmem.experiments.vocabulary import SLICE, Tops, log_totals, probabilities, ranks, tops
from ffmem.models.head import Head
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace

CLOSE = 1e-4
"""Two tokens are close whose logits under y differ by less than this share of max|z_o| · σ_o.

Rounding moved none by more than 2.3e-6 of it in SmolLM2-135M; wider models round more."""

EVEN = 16
"""Rows are projected in multiples of this: an odd number of them takes half as long again."""

DETAILS = frozenset(
    {
        "ff_top_probability",
        "output_top_probability",
        "residual_final_rank",
        "ff_final_rank",
        "ff_final_probability",
        "ff_residual_probability",
    }
)
"""Columns that no figure shows: a third of the time that reading logits takes."""

CASES = ("residual", "agreement", "ffn", "composition")


class Predictions(NamedTuple):
    """By example and layer. `final` is the model's own prediction, top(o) of the last layer.

    `DETAILS` are NaN or −1 where they were not asked for.
    """

    residual_top: Int64[ndarray, "example layer"]
    ff_top: Int64[ndarray, "example layer"]
    output_top: Int64[ndarray, "example layer"]
    residual_top_probability: Float64[ndarray, "example layer"]
    ff_top_probability: Float64[ndarray, "example layer"]
    output_top_probability: Float64[ndarray, "example layer"]
    residual_final_rank: Int64[ndarray, "example layer"]
    residual_final_probability: Float64[ndarray, "example layer"]
    ff_final_rank: Int64[ndarray, "example layer"]
    ff_final_probability: Float64[ndarray, "example layer"]
    ff_residual_rank: Int64[ndarray, "example layer"]
    """Of top(r) under y."""
    ff_residual_probability: Float64[ndarray, "example layer"]

    @classmethod
    def empty(cls, n_examples: int, n_layers: int) -> "Predictions":
        """Return room for some examples: NaN and −1 where nothing is read."""
        shape = (n_examples, n_layers)
        return cls(
            *(
                np.full(shape, np.nan) if "probability" in name else np.full(shape, -1, np.int64)
                for name in cls._fields
            )
        )

    @property
    def final(self) -> Int64[ndarray, " example"]:
        """The model's prediction."""
        return self.output_top[:, -1]

    def cases(self) -> dict[str, ndarray]:
        """Return which case each example is in each layer (Figure 11); every one is in one."""
        kept = self.output_top == self.residual_top
        agreed = self.output_top == self.ff_top
        found = (kept & ~agreed, kept & agreed, ~kept & agreed, ~kept & ~agreed)
        return dict(zip(CASES, found, strict=True))


class Projector:
    """Reads the three vectors of a layer through two vocabulary projections."""

    def __init__(self, memories: Memories, budget: int = 64 << 20, details: bool = True) -> None:
        self.head: Head = memories.head
        self.details = details
        self.adds_up = memories.row.output_norm is None and memories.dtype == torch.float32
        self.constants = self.head.band_constants() if self.adds_up else []
        self.constant = any(bool(band.any()) for band in self.constants)
        self.rows = max(1, budget // (4 * memories.vocabulary * EVEN)) * EVEN
        self.room: Tensor | None = None
        if self.adds_up and not self.head.adaptive:
            size, device = 2 * self.rows * memories.vocabulary, self.head.embedding.device
            self.room = torch.empty(size, device=device)

    @torch.inference_mode()
    def final(self, last: LayerTrace) -> Int64[ndarray, " row"]:
        """Return the model's own predictions."""
        found = []
        for some in self._parts(len(last.layer_output)):
            bands = self.head.bands(last.layer_output[some], self.room)
            found.append(tops(self.head.read_bands(bands)).tokens)
        return np.concatenate(found)[: len(last.layer_output)]

    @torch.inference_mode()
    def read(self, trace: LayerTrace, final: Int64[ndarray, " row"]) -> Predictions:
        """Return what one layer's vectors predict, as columns of one layer."""
        n, parts = len(final), []
        for some in self._parts(n):
            vectors = (trace.residual[some], trace.ff_output[some], trace.layer_output[some])
            parts.append(self._part(*vectors, final[some.numpy()]))
        joined = (np.concatenate(columns)[:n, None] for columns in zip(*parts, strict=True))
        return Predictions(*joined)

    def _parts(self, n: int) -> Iterator[Int64[Tensor, " _"]]:
        """Divide rows into parts of one size, a multiple of `EVEN`; the last row fills the last."""
        size = math.ceil(n / math.ceil(n / self.rows) / EVEN) * EVEN
        for first in range(0, n, size):
            yield torch.arange(first, first + size).clamp(max=n - 1)

    def _part(
        self,
        residual: Float[Tensor, "row hidden"],
        ff_output: Float[Tensor, "row hidden"],
        output: Float[Tensor, "row hidden"],
        final: Int64[ndarray, " row"],
    ) -> list[ndarray]:
        # Both at once: the wider product is the faster one, and reads the embedding once.
        n, found = len(residual), {}
        both = self.head.bands(torch.cat([residual, output]), self.room)
        below, above = [band[:n] for band in both], [band[n:] for band in both]
        logits = self._logits(below)
        top_r = tops(logits)
        totals = log_totals(logits, top_r.logits)
        found["residual_top_probability"] = probabilities(logits, totals, top_r.tokens)
        found["residual_final_probability"] = probabilities(logits, totals, final)
        if self.details:
            found["residual_final_rank"] = ranks(logits, final)

        sigma_r, sigma_o = self._sigma(residual), self._sigma(output)
        scale = largest(above) * sigma_o if self.adds_up else sigma_o
        logits = self._logits(above)
        top_o = tops(logits)
        if self.details:
            totals = log_totals(logits, top_o.logits)
            found["output_top_probability"] = probabilities(logits, totals, top_o.tokens)
        del logits

        logits, top_y = self._ff_logits(ff_output, (below, sigma_r), (above, sigma_o), scale)
        found["ff_residual_rank"] = ranks(logits, top_r.tokens)
        if self.details:
            totals = log_totals(logits, top_y.logits)
            found["ff_final_rank"] = ranks(logits, final)
            for name, tokens in (
                ("ff_top", top_y.tokens),
                ("ff_final", final),
                ("ff_residual", top_r.tokens),
            ):
                found[f"{name}_probability"] = probabilities(logits, totals, tokens)
        found |= {"residual_top": top_r.tokens, "ff_top": top_y.tokens, "output_top": top_o.tokens}
        nothing = Predictions.empty(len(final), 1)
        return [found.get(n, of_none[:, 0]) for n, of_none in nothing._asdict().items()]

    def _sigma(self, stream: Float[Tensor, "row hidden"]) -> Float[Tensor, " row"]:
        """Return σ of each vector where it is needed; nothing elsewhere."""
        if not self.adds_up:
            return stream.new_zeros(len(stream))
        return self.head.denominator(stream).to(self.constants[0].device)

    def _logits(self, bands: list[Float[Tensor, "row _"]]) -> Float[Tensor, "row vocab"]:
        """Return the logits of `bands`, which stay as they are if they are needed again."""
        head = self.head
        if self.adds_up and not head.adaptive and (head.scale != 1 or head.cap is not None):
            bands = [band.clone() for band in bands]
        return head.read_bands(bands)

    def _ff_logits(
        self,
        ff_output: Float[Tensor, "row hidden"],
        residual: "Share",
        output: "Share",
        scale: Float[Tensor, " row"],
    ) -> tuple[Float[Tensor, "row vocab"], Tops]:
        """Return y's logits from r's and o's, projecting it where they are not sharp enough.

        In place: a fresh array of this size costs as much as the arithmetic on it.
        """
        if not self.adds_up:
            logits = self.head.folded(ff_output)
            return logits, tops(logits)
        for c, below, above in zip(self.constants, residual[0], output[0], strict=True):
            if self.constant:
                below.sub_(c)
                above.sub_(c)
            subtract(above, output[1], below, residual[1])
        logits = self.head.read_part(residual[0])
        top = tops(logits)
        close = top.gaps < CLOSE * abs(self.head.scale) * scale.to(logits.device)
        if close.any():
            logits[close] = self.head.folded(ff_output[close.to(ff_output.device)])
            top = tops(logits)
        return logits, top


Share = tuple[list[Tensor], Tensor]
"""The bands of a vector of the stream, and its σ: σ · (z − c) is how it reads folded."""


def subtract(
    above: Float[Tensor, "row vocab"],
    sigma_above: Float[Tensor, " row"],
    below: Float[Tensor, "row vocab"],
    sigma_below: Float[Tensor, " row"],
) -> None:
    """Turn `below` into σ·above − σ·below, a slice of the vocabulary at a time in the cache."""
    for one, other in zip(above.T.split(SLICE), below.T.split(SLICE), strict=True):
        other.mul_(-sigma_below).addcmul_(one, sigma_above)


def largest(bands: list[Float[Tensor, "row _"]]) -> Float[Tensor, " row"]:
    """Return the largest |z| of each row."""
    ends = [torch.maximum(band.amax(dim=1), -band.amin(dim=1)) for band in bands]
    return torch.stack(ends).amax(dim=0)

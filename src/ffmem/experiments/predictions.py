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

from ffmem.experiments.vocabulary import log_totals, probabilities, ranks, tops
from ffmem.models.head import Head
from ffmem.models.memories import Memories
from ffmem.models.trace import LayerTrace

CLOSE = 1e-4
"""Two tokens are close whose logits under y differ by less than this share of max|z_o| · σ_o.

Rounding moved none by more than 2.3e-6 of it in SmolLM2-135M; wider models round more."""

EVEN = 16
"""Rows are projected in multiples of this: an odd number of them takes half as long again."""

CASES = ("residual", "agreement", "ffn", "composition")


class Predictions(NamedTuple):
    """By example and layer. `final` is the model's own prediction, top(o) of the last layer."""

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
        """Return room for some examples."""
        return cls(
            *(
                np.zeros((n_examples, n_layers), float if "probability" in name else np.int64)
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

    def __init__(self, memories: Memories, budget: int = 64 << 20) -> None:
        self.head: Head = memories.head
        self.adds_up = memories.row.output_norm is None and memories.dtype == torch.float32
        self.constants = self.head.band_constants() if self.adds_up else []
        self.constant = any(bool(band.any()) for band in self.constants)
        self.rows = max(1, budget // (4 * memories.vocabulary * EVEN)) * EVEN
        self.rooms: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.adds_up and not self.head.adaptive:
            size, device = self.rows * memories.vocabulary, self.head.embedding.device
            self.rooms = (torch.empty(size, device=device), torch.empty(size, device=device))

    @torch.inference_mode()
    def final(self, last: LayerTrace) -> Int64[ndarray, " row"]:
        """Return the model's own predictions."""
        found = []
        for some in self._parts(len(last.layer_output)):
            bands = self.head.bands(last.layer_output[some], self.rooms[0])
            found.append(tops(self.head.read_bands(bands)))
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
        bands = self.head.bands(residual, self.rooms[0])
        logits = self._logits(bands)
        residual_top = tops(logits)
        totals = log_totals(logits)
        residual_top_p = probabilities(logits, totals, residual_top)
        residual_rank = ranks(logits, final)
        residual_p = probabilities(logits, totals, final)
        shares = self._shares(bands, residual)

        bands = self.head.bands(output, self.rooms[1])
        scale = self._scale(bands, output)
        logits = self._logits(bands)
        output_top = tops(logits)
        output_p = probabilities(logits, log_totals(logits), output_top)
        for of_output, of_residual in zip(self._shares(bands, output), shares, strict=True):
            of_residual.neg_().add_(of_output)
        del bands, logits

        logits = self._ff_logits(ff_output, shares, scale)
        ff_top = tops(logits)
        totals = log_totals(logits)
        return [
            *(residual_top, ff_top, output_top),
            *(residual_top_p, probabilities(logits, totals, ff_top), output_p),
            *(residual_rank, residual_p),
            *(ranks(logits, final), probabilities(logits, totals, final)),
            *(ranks(logits, residual_top), probabilities(logits, totals, residual_top)),
        ]

    def _scale(
        self, bands: list[Float[Tensor, "row _"]], output: Float[Tensor, "row hidden"]
    ) -> Float[Tensor, " row"]:
        """Return max|z_o| · σ_o, by which closeness is told; nothing where nobody asks."""
        if not self.adds_up:
            return output.new_zeros(len(output))
        return largest(bands) * self.head.denominator(output).to(bands[0].device)

    def _logits(self, bands: list[Float[Tensor, "row _"]]) -> Float[Tensor, "row vocab"]:
        """Return the logits of `bands`, which stay as they are if they are needed again."""
        head = self.head
        if self.adds_up and not head.adaptive and (head.scale != 1 or head.cap is not None):
            bands = [band.clone() for band in bands]
        return head.read_bands(bands)

    def _shares(
        self, bands: list[Float[Tensor, "row _"]], stream: Float[Tensor, "row hidden"]
    ) -> list[Float[Tensor, "row _"]]:
        """Turn bands into σ · (z − c): what a vector is, read folded, before the scale.

        In place: a fresh array of this size costs as much as the arithmetic on it.
        """
        if not self.adds_up:
            return []
        sigma = self.head.denominator(stream)[:, None]
        for band, c in zip(bands, self.constants, strict=True):
            if self.constant:
                band.sub_(c)
            band.mul_(sigma.to(band.device))
        return bands

    def _ff_logits(
        self,
        ff_output: Float[Tensor, "row hidden"],
        shares: list[Float[Tensor, "row _"]],
        scale: Float[Tensor, " row"],
    ) -> Float[Tensor, "row vocab"]:
        """Return y's logits from its shares, projecting it where they are not sharp enough."""
        if not self.adds_up:
            return self.head.folded(ff_output)
        logits = self.head.read_part(shares)
        close = gaps(logits) < CLOSE * abs(self.head.scale) * scale.to(logits.device)
        if close.any():
            logits[close] = self.head.folded(ff_output[close.to(ff_output.device)])
        return logits


def largest(bands: list[Float[Tensor, "row _"]]) -> Float[Tensor, " row"]:
    """Return the largest |z| of each row."""
    ends = [torch.maximum(band.amax(dim=1), -band.amin(dim=1)) for band in bands]
    return torch.stack(ends).amax(dim=0)


def gaps(logits: Float[Tensor, "row vocab"]) -> Float[Tensor, " row"]:
    """Return how far each row's largest logit stands above its second."""
    found = torch.from_numpy(tops(logits)).to(logits.device)[:, None]
    largest = logits.gather(1, found)
    logits.scatter_(1, found, -torch.inf)
    second = logits.amax(dim=1)
    logits.scatter_(1, found, largest)
    return largest.squeeze(1) - second

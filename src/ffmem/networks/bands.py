"""Adaptive input and adaptive softmax: a vocabulary in bands, frequent words first.

Band b has embeddings E_b of its own width and a projection P_b to the width of the model. The way
in and the way out share them:

    input:    x = P_b · E_b[w]
    output:   log p(w) = h·E₀[w] − Z                                          w in band 0
              log p(w) = h·C_b − Z + (h·P_b)·E_b[w] − LSE((h·P_b)·E_bᵀ)       w in band b
              Z = LSE(h·[E₀ ; C]ᵀ)

Two traps. The way out uses E₀ itself, without P₀, so frequent words have other directions on the
way out than on the way in. And the order of words under log p(· | c·h) depends on c across bands.
"""

import math
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.drawn import DrawnEmbedding, DrawnLinear


class Band(nn.Module):
    """A range of the vocabulary: E_b and P_b.

    At the start every word should be about as probable. On the way in frequent words have unit
    size, for P₀ makes up for what E₀ lacks. Words of the other bands must stay smaller: the vector
    of a word in the stream meets itself on the way out, with the logit √hidden · |P_b · E_b[w]|².
    """

    def __init__(self, size: int, width: int, hidden: int, is_first: bool) -> None:
        super().__init__()
        self.embedding = DrawnEmbedding(size, width, 0.5 / math.sqrt(width))
        gain = 2.0 if is_first else 0.5
        self.projection = DrawnLinear(width, hidden, gain / math.sqrt(hidden))

    def forward(self, words: Int[Tensor, " word"]) -> Float[Tensor, "word hidden"]:
        """Return the input vectors of words, counted from the start of the band."""
        vectors: Tensor = self.projection(self.embedding(words))
        return vectors


class AdaptiveInput(nn.Module):
    """From tokens to vectors, each band at its own width."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.hidden = config.hidden_size
        self.bands = nn.ModuleList(
            Band(size, width, config.hidden_size, is_first=band == 0)
            for band, (size, width) in enumerate(
                zip(config.band_sizes, config.band_widths, strict=True)
            )
        )
        self.ranges = list(pairwise(accumulate(config.band_sizes, initial=0)))

    def forward(
        self, tokens: Int[Tensor, "batch position"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return the unscaled vector of every token."""
        flat = tokens.flatten()
        weight = self.bands[0].get_parameter("projection.weight")
        vectors, n_found = weight.new_zeros(len(flat), self.hidden), 0
        for band, (start, end) in zip(self.bands, self.ranges, strict=True):
            (places,) = torch.where((start <= flat) & (flat < end))
            vectors = vectors.index_copy(0, places, band(flat[places] - start).to(vectors.dtype))
            n_found += len(places)
        if n_found < len(flat):
            raise IndexError(f"A token is outside the vocabulary of {self.ranges[-1][1]} words.")
        return vectors.view(*tokens.shape, self.hidden)


class Classes(nn.Module):
    """C: one vector for each band but the first. With a single band there is none."""

    def __init__(self, n_classes: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_classes, hidden))
        self.deviation = 0.1 / math.sqrt(hidden)

    def forward(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row class"]:
        """Return h · Cᵀ."""
        return functional.linear(hidden, self.weight)


class AdaptiveSoftmax(nn.Module):
    """From vectors to log-probabilities; its bands are those of the adaptive input."""

    def __init__(self, config: AdaptiveConfig, bands: nn.ModuleList) -> None:
        super().__init__()
        self.bands = bands
        self.class_proj = Classes(len(bands) - 1, config.hidden_size)
        self.ends = list(accumulate(config.band_sizes))

    def forward(
        self, hidden: Float[Tensor, "batch position hidden"]
    ) -> Float[Tensor, "batch position vocab"]:
        """Return the log-probability of every word at every position."""
        rows = self.log_probabilities(hidden.flatten(0, 1))
        return rows.view(*hidden.shape[:2], -1)

    def log_probabilities(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Return the log-probability of every word, given vectors of the last layer's space."""
        return self.normalised(self.band_logits(hidden))

    def loss(
        self, hidden: Float[Tensor, "row hidden"], words: Int[Tensor, " row"]
    ) -> Float[Tensor, ""]:
        """Return the mean of −log p(word) over rows whose word is not negative.

        Law: it is that of `log_probabilities`; a tail is computed for its own words alone.
        """
        rows = torch.where(words >= 0)[0]
        if len(rows) < len(words):
            hidden, words = hidden[rows], words[rows]
        head = words.clone()
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=wide)
        for band, (start, end) in enumerate(pairwise(self.ends)):
            (here,) = torch.where((start <= words) & (words < end))
            head[here] = self.ends[0] + band
            if len(here):
                logits = self._tail_logits(hidden[here], self.bands[band + 1]).to(wide)
                total = total + functional.cross_entropy(
                    logits, words[here] - start, reduction="sum"
                )
        logits = self._head_logits(hidden).to(wide)
        total = total + functional.cross_entropy(logits, head, reduction="sum")
        return total / len(words)

    def band_logits(self, hidden: Float[Tensor, "row hidden"]) -> list[Float[Tensor, "row _"]]:
        """Return the part that is linear in the vectors: h·[E₀ ; C]ᵀ, then (h·P_b)·E_bᵀ."""
        _, *tails = self.bands
        return [self._head_logits(hidden), *(self._tail_logits(hidden, band) for band in tails)]

    def _head_logits(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row _"]:
        words = functional.linear(hidden, self.bands[0].get_parameter("embedding.weight"))  # no P₀
        return torch.cat([words, self.class_proj(hidden)], dim=1)

    def _tail_logits(
        self, hidden: Float[Tensor, "row hidden"], band: nn.Module
    ) -> Float[Tensor, "row _"]:
        narrow = hidden @ band.get_parameter("projection.weight")
        return functional.linear(narrow, band.get_parameter("embedding.weight"))

    def normalised(self, band_logits: list[Float[Tensor, "row _"]]) -> Float[Tensor, "row vocab"]:
        """Return the log-probabilities that belong to the logits of each band."""
        head, *tails = [logits.log_softmax(dim=-1) for logits in band_logits]
        n_words = head.shape[1] - len(tails)
        words, classes = head[:, :n_words], head[:, n_words:]
        return torch.cat(
            [words, *(tail + classes[:, [band]] for band, tail in enumerate(tails))], dim=1
        )

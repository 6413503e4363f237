"""Adaptive input and adaptive softmax (Baevski & Auli 2019): a vocabulary in clusters.

Cluster b of the vocabulary (the most frequent words are cluster 0, the head) has embeddings E_b of
its own width and a projection P_b to the width of the model. Input and softmax share both:

    input:    x = P_b · E_b[w]
    softmax:  log p(w) = h·E₀[w] − Z                                          w in the head
              log p(w) = h·C_b − Z + (h·P_b)·E_b[w] − LSE((h·P_b)·E_bᵀ)       w in tail cluster b
              Z = LSE(h·[E₀ ; C]ᵀ)

Two traps: the softmax uses E₀ without P₀, so frequent words have other directions at the output
than at the input; and the ranking of words under log p(· | c·h) depends on c across clusters.

Saved models call the clusters `bands`, in the names of their weights and in their config.
"""

import math
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ffmem.networks.config import AdaptiveConfig


class InitLinear(nn.Linear):
    """`nn.Linear` without bias, initialized with its own standard deviation."""

    def __init__(self, in_features: int, out_features: int, init_std: float) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.init_std = init_std


class InitEmbedding(nn.Embedding):
    """`nn.Embedding`, initialized with its own standard deviation."""

    def __init__(self, size: int, width: int, init_std: float) -> None:
        super().__init__(size, width)
        self.init_std = init_std


class VocabularyCluster(nn.Module):
    """A range of the vocabulary: E_b and P_b.

    Before training, every word should be about as probable. Input vectors of frequent words have
    unit size, since P₀ makes up for the small E₀. Vectors of rare words must stay smaller: the
    softmax meets a word's own input vector with the logit √hidden · |P_b · E_b[w]|².
    """

    def __init__(self, size: int, width: int, hidden: int, is_head: bool) -> None:
        super().__init__()
        self.embedding = InitEmbedding(size, width, 0.5 / math.sqrt(width))
        gain = 2.0 if is_head else 0.5
        self.projection = InitLinear(width, hidden, gain / math.sqrt(hidden))

    def forward(self, words: Int[Tensor, " word"]) -> Float[Tensor, "word hidden"]:
        """Return the input vectors of words, counted from the start of the cluster."""
        vectors: Tensor = self.projection(self.embedding(words))
        return vectors


class AdaptiveInput(nn.Module):
    """From token ids to vectors, each cluster with its own width."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.hidden = config.hidden_size
        sizes = zip(config.band_sizes, config.band_widths, strict=True)
        self.bands = nn.ModuleList(
            VocabularyCluster(size, width, config.hidden_size, is_head=number == 0)
            for number, (size, width) in enumerate(sizes)
        )
        self.ranges = list(pairwise(accumulate(config.band_sizes, initial=0)))

    def forward(
        self, tokens: Int[Tensor, "batch position"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return the unscaled vector of every token."""
        flat = tokens.flatten()
        weight = self.bands[0].get_parameter("projection.weight")
        vectors, n_found = weight.new_zeros(len(flat), self.hidden), 0
        for cluster, (start, end) in zip(self.bands, self.ranges, strict=True):
            (rows,) = torch.where((start <= flat) & (flat < end))
            vectors = vectors.index_copy(0, rows, cluster(flat[rows] - start).to(vectors.dtype))
            n_found += len(rows)
        if n_found < len(flat):
            raise IndexError(f"A token is outside the vocabulary of {self.ranges[-1][1]} words.")
        return vectors.view(*tokens.shape, self.hidden)


class ClassProj(nn.Module):
    """C: one vector for each tail cluster; with a single cluster there is none."""

    def __init__(self, n_classes: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_classes, hidden))
        self.init_std = 0.1 / math.sqrt(hidden)

    def forward(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row class"]:
        """Return h · Cᵀ."""
        return functional.linear(hidden, self.weight)


class AdaptiveSoftmax(nn.Module):
    """From vectors to log-probabilities, with the clusters of the adaptive input."""

    def __init__(self, config: AdaptiveConfig, bands: nn.ModuleList) -> None:
        super().__init__()
        self.bands = bands
        self.class_proj = ClassProj(len(bands) - 1, config.hidden_size)
        self.cutoffs = list(accumulate(config.band_sizes))

    def forward(
        self, hidden: Float[Tensor, "batch position hidden"]
    ) -> Float[Tensor, "batch position vocab"]:
        """Return the log-probability of every word at every position."""
        rows = self.log_probabilities(hidden.flatten(0, 1))
        return rows.view(*hidden.shape[:2], -1)

    def log_probabilities(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Return the log-probability of every word."""
        return self.normalize(self.cluster_logits(hidden))

    def loss(
        self, hidden: Float[Tensor, "row hidden"], words: Int[Tensor, " row"]
    ) -> Float[Tensor, ""]:
        """Return the mean of −log p(word) over rows whose word is not negative.

        Law: equal to that of `log_probabilities`; a tail is only computed for its own words.
        """
        rows = torch.where(words >= 0)[0]
        if len(rows) < len(words):
            hidden, words = hidden[rows], words[rows]
        head = words.clone()
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=wide)
        for tail, (start, end) in enumerate(pairwise(self.cutoffs)):
            (rows,) = torch.where((start <= words) & (words < end))
            head[rows] = self.cutoffs[0] + tail
            if len(rows):
                logits = self._tail_logits(hidden[rows], self.bands[tail + 1]).to(wide)
                total = total + functional.cross_entropy(
                    logits, words[rows] - start, reduction="sum"
                )
        logits = self._head_logits(hidden).to(wide)
        total = total + functional.cross_entropy(logits, head, reduction="sum")
        return total / len(words)

    def cluster_logits(self, hidden: Float[Tensor, "row hidden"]) -> list[Float[Tensor, "row _"]]:
        """Return the part that is linear in the vectors: h·[E₀ ; C]ᵀ, then (h·P_b)·E_bᵀ."""
        _, *tails = self.bands
        return [self._head_logits(hidden), *(self._tail_logits(hidden, tail) for tail in tails)]

    def _head_logits(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row _"]:
        words = functional.linear(hidden, self.bands[0].get_parameter("embedding.weight"))  # no P₀
        return torch.cat([words, self.class_proj(hidden)], dim=1)

    def _tail_logits(
        self, hidden: Float[Tensor, "row hidden"], tail: nn.Module
    ) -> Float[Tensor, "row _"]:
        narrow = hidden @ tail.get_parameter("projection.weight")
        return functional.linear(narrow, tail.get_parameter("embedding.weight"))

    def normalize(self, cluster_logits: list[Float[Tensor, "row _"]]) -> Float[Tensor, "row vocab"]:
        """Return the log-probabilities that belong to the logits of all clusters."""
        head, *tails = [logits.log_softmax(dim=-1) for logits in cluster_logits]
        n_words = head.shape[1] - len(tails)
        words, classes = head[:, :n_words], head[:, n_words:]
        return torch.cat(
            [words, *(tail + classes[:, [number]] for number, tail in enumerate(tails))], dim=1
        )

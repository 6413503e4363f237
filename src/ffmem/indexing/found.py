"""What was found in a part of a corpus, be it one lease or the whole; parts merge.

merge(found(A), found(B)) == found(A ∪ B), exactly, in any order
"""

from collections.abc import Iterator
from typing import NamedTuple

from ffmem.indexing.sample import Sample
from ffmem.indexing.statistics import Statistics
from ffmem.indexing.triggers import Triggers


class Found(NamedTuple):
    """Triggers, statistics and sample of a part of a corpus."""

    positive: Triggers
    negative: Triggers | None
    """The most negative coefficients; gated models only."""
    statistics: Statistics
    sample: Sample

    @classmethod
    def nothing(cls, n_layers: int, n_memories: int, t: int, gated: bool) -> "Found":
        """Return what an empty corpus gives."""
        return cls(
            Triggers.empty(n_layers, n_memories, t),
            Triggers.empty(n_layers, n_memories, t) if gated else None,
            Statistics.empty(n_layers, n_memories),
            Sample.empty(n_layers, n_memories),
        )

    def merge(self, other: "Found") -> "Found":
        """Return what two disjoint parts of a corpus give together."""
        negative = None
        if self.negative is not None and other.negative is not None:
            negative = self.negative.merge(other.negative)
        return Found(
            self.positive.merge(other.positive),
            negative,
            self.statistics.merge(other.statistics),
            self.sample.merge(other.sample),
        )

    def shifted(self, places: int) -> "Found":
        """Return the same findings in a corpus that has `places` more prefixes in front."""
        return Found(
            self.positive.shifted(places),
            None if self.negative is None else self.negative.shifted(places),
            self.statistics,
            self.sample.shifted(places),
        )

    def lists(self) -> list[Triggers]:
        """Return the lists of triggers, the positive one first."""
        return [self.positive] if self.negative is None else [self.positive, self.negative]

    def layers(self) -> "Iterator[Found]":
        """Return the same findings layer by layer, each as the findings of a one-layer model."""
        for layer in range(len(self.positive.coefficients)):
            one = slice(layer, layer + 1)
            counted = (column[one] for column in self.statistics[1:])
            yield Found(
                Triggers(*(column[one] for column in self.positive)),
                None if self.negative is None else Triggers(*(c[one] for c in self.negative)),
                Statistics(self.statistics.n_prefixes, *counted),
                self.sample._replace(coefficients=self.sample.coefficients[one]),
            )

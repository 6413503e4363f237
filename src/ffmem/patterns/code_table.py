"""All codes that prefixes share, and in how many prefixes of the corpus each is, by length."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64
from numpy import ndarray

from ffmem.patterns.chunk import COLUMNS, GRAMS, NONE, Chunk
from ffmem.patterns.pattern import LEAST
from ffmem.patterns.shapes import SHAPES

BINS = np.array([0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129])
"""Least length of each bin of lengths; the last is open."""


@dataclass(frozen=True)
class Held:
    """What rows hold, still as codes."""

    numbers: ndarray
    sentence: ndarray
    length: ndarray
    context: ndarray
    shapes: ndarray
    codes: ndarray
    begins: ndarray
    ends: ndarray
    last_words: ndarray
    gram_slices: ndarray
    grams: ndarray
    gram_sizes: ndarray
    gram_examples: ndarray
    gram_words: ndarray


class CodeTable:
    """All codes that rows share, and their counts over the corpus."""

    def __init__(self, codes: ndarray, kinds: ndarray, examples: ndarray, words: ndarray) -> None:
        self.codes, self.kinds, self.examples, self.words = codes, kinds, examples, words
        self.counts = np.zeros((len(codes), len(BINS)), np.int64)
        self.shape_counts = np.zeros((len(SHAPES), len(BINS)), np.int64)
        self.totals = np.zeros(len(BINS), np.int64)

    @classmethod
    def of(cls, held: Held) -> "CodeTable":
        """Return the table of codes that at least three rows, or sentences of rows, hold."""
        codes, kinds = [], []
        for column in range(len(COLUMNS)):
            distinct, n = np.unique(held.codes[:, column], return_counts=True)
            codes.append(distinct[(n >= LEAST) & (distinct != NONE)])
            kinds.append(np.full(len(codes[-1]), column))
        # What stands first in a sentence is capitalised: an example from within it shows better.
        order = np.lexsort((held.gram_examples[:, 1] <= 0, held.grams))
        ordered = held.grams[order]
        new = np.ones(len(order), bool)
        new[1:] = ordered[1:] != ordered[:-1]
        sizes = np.diff(np.append(new.nonzero()[0], len(order)))
        firsts = order[new][sizes >= LEAST]
        codes.append(held.grams[firsts])
        kinds.append(held.gram_sizes[firsts] + len(COLUMNS) - 1)
        n_ends = sum(map(len, codes[:-1]))
        examples = np.concatenate([np.full((n_ends, 3), -1), held.gram_examples[firsts]])
        words = np.concatenate([np.zeros((n_ends, GRAMS), np.uint64), held.gram_words[firsts]])
        joined = np.concatenate(codes)
        ascending = np.argsort(joined)
        return cls(
            joined[ascending],
            np.concatenate(kinds)[ascending].astype(np.int8),
            examples[ascending],
            words[ascending],
        )

    def entries(self, codes: ndarray) -> Int32[ndarray, "..."]:
        """Return the entries of codes, −1 for those without."""
        if not len(self.codes):
            return np.full(codes.shape, -1, np.int32)
        place = np.searchsorted(self.codes, codes)
        place[place == len(self.codes)] = 0
        return np.where(self.codes[place] == codes, place, -1).astype(np.int32)

    def count(self, chunk: Chunk) -> None:
        """Count the prefixes of a chunk."""
        bins = bins_of(chunk.length)
        self.totals += np.bincount(bins, minlength=len(BINS))
        for bit in range(len(SHAPES)):
            shown = (chunk.shapes >> np.uint32(bit) & np.uint32(1)).astype(bool)
            self.shape_counts[bit] += np.bincount(bins[shown], minlength=len(BINS))
        for column in range(len(COLUMNS)):
            entries = self.entries(chunk.codes[:, column])
            known = entries >= 0
            np.add.at(self.counts, (entries[known], bins[known]), 1)
        entries = self.entries(chunk.grams.code)
        known = entries >= 0
        least = chunk.grams.length[known]
        # The last prefix of a sentence is the sentence, or one token less for the authors' code.
        longest = np.zeros(len(chunk.texts), np.int64)
        np.maximum.at(longest, chunk.sentence, chunk.length)
        longest = longest[chunk.grams.sentence[known]]
        for bin, low in enumerate(BINS):
            high = BINS[bin + 1] if bin + 1 < len(BINS) else np.iinfo(np.int64).max
            n = np.minimum(longest + 1, high) - np.maximum(least, low)
            np.add.at(self.counts[:, bin], entries[known], np.maximum(n, 0))


def bins_of(lengths: Int64[ndarray, " many"]) -> Int64[ndarray, " many"]:
    """Return the bin of each length."""
    return np.searchsorted(BINS, lengths, side="right") - 1

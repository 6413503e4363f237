"""The prefixes that Section 5 runs the model on.

    sentences   one uniformly drawn prefix of each of `size` sentences (the paper's sample)
    tokens      `size` prefixes, uniformly over all prefixes of all sentences
    all         every prefix

Drawn are the prefixes with the smallest hash of (seed, place in the corpus). So the same seed draws
the same prefixes, the corpus is read once as a stream, and only the sample is held in memory.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt64
from numpy import ndarray

from ffmem.corpus.sentences import TokenSentence
from ffmem.errors import CorpusError
from ffmem.indexing.results import hash_places
from ffmem.indexing.sentences import hash_input


class SampledSentence(NamedTuple):
    """A sentence of which prefixes were drawn."""

    number: int
    """The sentence's place in the corpus."""
    sentence: TokenSentence
    """Cut at the model's context."""
    lengths: list[int]
    """The lengths p of the prefixes that were drawn, ascending."""


class PromptSample(NamedTuple):
    """The sample, in the order of the corpus."""

    sentences: list[SampledSentence]
    n_read: int
    """Sentences of the corpus."""
    n_cut: int
    """Sentences longer than the context, cut there."""
    corpus_hash: str
    """SHA-256 of the whole corpus, as an index of it records it."""

    @property
    def lengths(self) -> Int64[ndarray, " prefix"]:
        """The length p of every prefix."""
        return np.array([p for _, p in self.prefixes()], np.int64)

    def prefixes(self) -> list[tuple[SampledSentence, int]]:
        """Return every prefix as its sentence and its length."""
        return [(one, p) for one in self.sentences for p in one.lengths]

    def next_tokens(self) -> Int64[ndarray, " prefix"]:
        """Return the token that follows each prefix, −1 where the sentence ends."""
        found = [
            one.sentence.ids[p] if p < len(one.sentence.ids) else -1 for one, p in self.prefixes()
        ]
        return np.array(found, np.int64)

    def digest(self) -> str:
        """Return the SHA-256 of every sampled sentence and the lengths drawn of it."""
        digest = hashlib.sha256()
        for one in self.sentences:
            digest.update(repr(one).encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return what a result says about its sample: enough to draw the same prefixes again."""
        histogram = Counter(self.lengths.tolist())
        return {
            "prefixes": len(self.lengths),
            "sentences": len(self.sentences),
            "of_sentences": self.n_read,
            "cut": self.n_cut,
            "corpus_hash": self.corpus_hash,
            "lengths": {str(p): histogram[p] for p in sorted(histogram)},
            "drawn": [[one.number, p] for one, p in self.prefixes()],
        }


def draw_sample(
    sentences: Iterable[TokenSentence],
    how: str,
    size: int | None,
    seed: int,
    shortest: int,
    longest: int | None,
) -> PromptSample:
    """Return the sample of a corpus: prefixes of `shortest` tokens or more.

    Sentences are cut at `longest` tokens. A corpus with fewer sentences (or prefixes) than `size`
    gives all it has.
    """
    n_read = n_cut = 0
    read = hashlib.sha256()

    def candidates() -> Iterator[tuple[int, int, int, TokenSentence]]:
        """Yield (hash, sentence, length) of every prefix that may be drawn, with its sentence."""
        nonlocal n_read, n_cut
        for number, sentence in enumerate(sentences):
            n_read += 1
            read.update(hash_input(sentence.text, sentence.ids))
            if longest is not None and len(sentence.ids) > longest:
                n_cut += 1
                sentence = sentence.cut(longest)
            lengths = np.arange(shortest, len(sentence.ids) + 1)
            if sentence.is_content is not None:
                lengths = lengths[np.array(sentence.is_content, bool)[lengths - 1]]
            if not len(lengths):
                continue
            if how == "sentences" and size is not None:
                place = np.array([number])
                lengths = lengths[_hashes(seed, "length", place) % len(lengths)]
                hashes = _hashes(seed, "sentence", place)
            else:
                # No two prefixes share a number: no sentence has 2²⁴ tokens.
                hashes = _hashes(seed, "token", number * (1 << 24) + lengths)
            for hashed, length in zip(hashes.tolist(), lengths.tolist(), strict=True):
                yield hashed, number, length, sentence

    # The smallest hashes, ties to the earlier prefix; then in the order of the corpus.
    drawn = list(candidates()) if size is None else heapq.nsmallest(size, candidates())
    if not drawn:
        raise CorpusError(
            f"No prefix can be drawn: none of {n_read:,} sentences has {shortest} tokens or more."
            " Use a corpus of longer sentences."
        )
    drawn.sort(key=itemgetter(1, 2))
    found = []
    for number, group in groupby(drawn, key=itemgetter(1)):
        prefixes = list(group)
        found.append(
            SampledSentence(number, prefixes[0][3], [length for _, _, length, _ in prefixes])
        )
    return PromptSample(found, n_read, n_cut, read.hexdigest())


def _hashes(seed: int, what: str, places: Int64[ndarray, " place"]) -> UInt64[ndarray, " place"]:
    return hash_places(hashlib.sha256(f"{what} {seed}".encode()).hexdigest(), places)

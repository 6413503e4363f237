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
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64, UInt64
from numpy import ndarray

from ffmem.corpus.sentences import TokenSentence
from ffmem.errors import CorpusError
from ffmem.indexing.results import hash_places
from ffmem.indexing.sentences import hash_input


class Example(NamedTuple):
    """A sentence of which prefixes were drawn."""

    number: int
    """The sentence's place in the corpus."""
    sentence: TokenSentence
    """Cut at the model's context."""
    lengths: list[int]
    """The lengths p of the prefixes that were drawn, ascending."""


class PromptSample(NamedTuple):
    """The sample, in the order of the corpus."""

    examples: list[Example]
    n_read: int
    """Sentences of the corpus."""
    cut: int
    """Sentences longer than the context, cut there."""
    corpus_hash: str
    """SHA-256 of everything that was read, as an index of the same corpus records it."""

    @property
    def lengths(self) -> Int64[ndarray, " prefix"]:
        """The length p of every prefix."""
        return np.array([p for example in self.examples for p in example.lengths], np.int64)

    def prefixes(self) -> list[tuple[Example, int]]:
        """Return every prefix as its sentence and its length."""
        return [(example, p) for example in self.examples for p in example.lengths]

    def next_tokens(self) -> Int64[ndarray, " prefix"]:
        """Return the token behind each prefix, −1 where the sentence ends."""
        found = [
            example.sentence.ids[p] if p < len(example.sentence.ids) else -1
            for example, p in self.prefixes()
        ]
        return np.array(found, np.int64)

    def digest(self) -> str:
        """Return the SHA-256 over every sentence of the sample and the lengths drawn of it."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(repr(example).encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Return what a result says about its sample: enough to draw the same prefixes again."""
        histogram = Counter(self.lengths.tolist())
        return {
            "prefixes": len(self.lengths),
            "sentences": len(self.examples),
            "of_sentences": self.n_read,
            "cut": self.cut,
            "corpus_hash": self.corpus_hash,
            "lengths": {str(p): histogram[p] for p in sorted(histogram)},
            "drawn": [[example.number, p] for example, p in self.prefixes()],
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
    # The sample so far, largest hash first, ties to the earlier prefix; and its sentences.
    heap: list[tuple[int, int, int]] = []
    held: dict[int, Example] = {}
    n_read = cut = 0
    read = hashlib.sha256()
    for number, sentence in enumerate(sentences):
        n_read += 1
        read.update(hash_input(sentence.text, sentence.ids))
        if longest is not None and len(sentence.ids) > longest:
            cut += 1
            sentence = sentence.cut(longest)
        example = Example(number, sentence, [])
        for hashed, length in _candidates(example, how, size, seed, shortest):
            candidate = (-hashed, -number, -length)
            if size is not None and len(heap) >= size:
                if candidate < heap[0]:
                    continue
                _, other, dropped = heapq.heapreplace(heap, candidate)
                lengths = (example if -other == number else held[-other]).lengths
                lengths.remove(-dropped)
                if not lengths and -other != number:
                    del held[-other]
            elif size is not None:
                heapq.heappush(heap, candidate)
            example.lengths.append(length)
        if example.lengths:
            held[number] = example
    if not held:
        raise CorpusError(
            f"No prefix can be drawn: of {n_read:,} sentences none has {shortest} tokens or more."
            " Give a corpus of longer sentences."
        )
    return PromptSample(list(held.values()), n_read, cut, read.hexdigest())


def _candidates(
    example: Example, how: str, size: int | None, seed: int, shortest: int
) -> Iterable[tuple[int, int]]:
    """Return the prefixes of a sentence that may be drawn: the hash and the length of each."""
    n, place = len(example.sentence.ids), np.array([example.number], np.int64)
    if n < shortest:
        return []
    lengths = np.arange(shortest, n + 1)
    if example.sentence.is_content is not None:
        lengths = lengths[np.array(example.sentence.is_content, bool)[lengths - 1]]
    if not len(lengths):
        return []
    if size is None:
        return ((0, length) for length in lengths.tolist())
    if how == "sentences":
        length = int(lengths[int(_hashes(seed, "length", place)[0]) % len(lengths)])
        return [(int(_hashes(seed, "sentence", place)[0]), length)]
    # A number for each (sentence, length) that no other has, far beyond any sentence's length.
    hashes = _hashes(seed, "token", example.number * (1 << 24) + lengths)
    return zip(hashes.tolist(), lengths.tolist(), strict=True)


def _hashes(seed: int, what: str, places: Int64[ndarray, " place"]) -> UInt64[ndarray, " place"]:
    return hash_places(hashlib.sha256(f"{what} {seed}".encode()).hexdigest(), places)

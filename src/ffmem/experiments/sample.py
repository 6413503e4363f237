"""The prefixes that Section 5 runs the model on.

    sentences   one uniformly drawn prefix of each of `size` sentences (the paper's sample)
    tokens      `size` prefixes, uniformly over all prefixes of all sentences
    all         every prefix

Drawn are the prefixes with the smallest hash of (seed, place in the corpus). So the same seed draws
the same prefixes, the corpus is read once as a stream, and only the sample is held in memory.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
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


class Candidates(NamedTuple):
    """Prefixes that may be drawn."""

    hashes: UInt64[ndarray, " prefix"]
    numbers: Int64[ndarray, " prefix"]
    lengths: Int64[ndarray, " prefix"]

    def smallest(self, size: int) -> "Candidates":
        """Return those of the `size` smallest hashes, ties to the earlier prefix."""
        kept = np.lexsort((self.lengths, self.numbers, self.hashes))[:size]
        return Candidates(*(column[kept] for column in self))


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

    def prefixes(self) -> Iterator[tuple[Example, int]]:
        """Return every prefix as its sentence and its length."""
        return ((example, p) for example in self.examples for p in example.lengths)

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
    kept = Candidates(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    held: dict[int, TokenSentence] = {}
    waiting: list[Candidates] = []
    n_read = cut = n_waiting = 0
    read = hashlib.sha256()
    for number, sentence in enumerate(sentences):
        n_read += 1
        read.update(hash_input(sentence.text, sentence.ids))
        if longest is not None and len(sentence.ids) > longest:
            cut += 1
            sentence = _cut(sentence, longest)
        found = _candidates(
            number, len(sentence.ids), "all" if size is None else how, seed, shortest
        )
        held[number] = sentence
        waiting.append(found)
        n_waiting += len(found.numbers)
        if size is not None and n_waiting > size + 10_000:
            kept, held = _pruned([kept, *waiting], held, size)
            waiting, n_waiting = [], 0
    kept, held = _pruned([kept, *waiting], held, size)
    if not held:
        raise CorpusError(
            f"No prefix can be drawn: of {n_read:,} sentences none has {shortest} tokens or more."
            " Give a corpus of longer sentences."
        )
    return PromptSample(list(_examples(kept, held)), n_read, cut, read.hexdigest())


def _cut(sentence: TokenSentence, longest: int) -> TokenSentence:
    """Return the first tokens of a sentence; its text stays whole."""
    starts, ends = (part and part[:longest] for part in (sentence.starts, sentence.ends))
    return TokenSentence(sentence.text, sentence.ids[:longest], starts, ends)


def _candidates(number: int, n: int, how: str, seed: int, shortest: int) -> Candidates:
    """Return the prefixes of one sentence of n tokens that may be drawn, with their hashes."""
    if n < shortest:
        nothing = np.zeros(0, np.int64)
        return Candidates(nothing.astype(np.uint64), nothing, nothing)
    place = np.array([number], np.int64)
    if how == "sentences":
        chosen = _mixed(seed, "length", place) % np.uint64(n - shortest + 1)
        lengths = shortest + chosen.astype(np.int64)
        return Candidates(_mixed(seed, "sentence", place), place, lengths)
    lengths = np.arange(shortest, n + 1, dtype=np.int64)
    # A number for each (sentence, length) that no other has, far beyond any sentence's length.
    places = number * (1 << 24) + lengths
    hashes = _mixed(seed, "token", places) if how == "tokens" else np.zeros(len(places), np.uint64)
    return Candidates(hashes, np.repeat(place, len(lengths)), lengths)


def _mixed(seed: int, what: str, places: Int64[ndarray, " place"]) -> UInt64[ndarray, " place"]:
    return hash_places(hashlib.sha256(f"{what} {seed}".encode()).hexdigest(), places)


def _pruned(
    parts: list[Candidates], held: dict[int, TokenSentence], size: int | None
) -> tuple[Candidates, dict[int, TokenSentence]]:
    """Return the candidates that are still in the running, and their sentences."""
    joined = Candidates(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
    kept = joined.smallest(len(joined.numbers) if size is None else size)
    return kept, {number: held[number] for number in np.unique(kept.numbers).tolist()}


def _examples(kept: Candidates, held: dict[int, TokenSentence]) -> Iterator[Example]:
    """Return the drawn sentences in the order of the corpus."""
    lengths: dict[int, list[int]] = {number: [] for number in sorted(held)}
    for number, length in zip(kept.numbers.tolist(), kept.lengths.tolist(), strict=True):
        lengths[number].append(length)
    for number, drawn in lengths.items():
        yield Example(number, held[number], sorted(drawn))

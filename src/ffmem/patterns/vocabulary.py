"""The content words of a corpus, and how many sentences hold each.

A content word has letters, is no stop word of English, and is neither in very few sentences nor in
very many. What topics are made of; numbers, names of one sentence and function words are left out.
"""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int32, Int64, UInt64
from numpy import ndarray

from ffmem.patterns.chunk import Chunk

MOST_WORDS = 30_000
LEAST_SENTENCES = 3
MOST_SHARE = 0.1
"""Of the sentences; a more common word is no content word."""

FITTED = 40_000
"""Sentences whose bags of words are kept, to learn which words go together."""

TOGETHER = 50
"""Sentences in a row that are kept together where not all are."""


@dataclass(frozen=True)
class Vocabulary:
    """Content words by number, and bags of them."""

    codes: UInt64[ndarray, " word"]
    """Ascending."""
    words: tuple[str, ...]
    sentences: Int64[ndarray, " word"]
    """How many sentences hold a word."""
    n_sentences: int
    bags: Int32[ndarray, " held"]
    """Content words of some sentences, one after the other."""
    bag_starts: Int64[ndarray, " start"]
    """Where the bags begin, and the end."""

    @classmethod
    def starting(cls, n_sentences: int, seed: int) -> "_Gathering":
        """Return an empty vocabulary that takes chunks of a corpus."""
        rng = np.random.default_rng([seed, n_sentences])
        n_runs = -(-n_sentences // TOGETHER)
        runs = np.sort(rng.choice(n_runs, min(FITTED // TOGETHER, n_runs), replace=False))
        chosen = (runs[:, None] * TOGETHER + np.arange(TOGETHER)).reshape(-1)
        return _Gathering(n_sentences, chosen[chosen < n_sentences])

    def numbers(self, codes: UInt64[ndarray, "..."]) -> Int32[ndarray, "..."]:
        """Return the numbers of words by their codes, −1 for others."""
        if not len(self.codes):
            return np.full(codes.shape, -1, np.int32)
        place = np.searchsorted(self.codes, codes)
        place[place == len(self.codes)] = 0
        return np.where(self.codes[place] == codes, place, -1).astype(np.int32)


@dataclass
class _Gathering:
    """A vocabulary while the corpus is read."""

    n_sentences: int
    chosen: Int64[ndarray, " sentence"]
    texts: dict[int, str] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    kept: list[tuple[ndarray, ndarray]] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Take in the words of a chunk."""
        grams = chunk.grams
        single = (grams.size == 1).nonzero()[0]
        codes, first, counts = np.unique(grams.code[single], return_index=True, return_counts=True)
        for code, place, n in zip(
            codes.tolist(), single[first].tolist(), counts.tolist(), strict=True
        ):
            if code not in self.texts:
                text = chunk.texts[grams.sentence[place]]
                self.texts[code] = text[grams.start[place] : grams.end[place]].casefold()
            self.counts[code] = self.counts.get(code, 0) + n
        sentences = grams.sentence[single] + chunk.first
        wanted = np.isin(sentences, self.chosen)
        self.kept.append((sentences[wanted], grams.code[single][wanted]))

    def closed(self) -> Vocabulary:
        """Return the content words of what was read."""
        from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

        most = max(MOST_SHARE * self.n_sentences, 2 * LEAST_SENTENCES)
        listed = sorted(
            (-n, text, code)
            for code, n in self.counts.items()
            if LEAST_SENTENCES <= n <= most
            and (text := self.texts[code]) not in ENGLISH_STOP_WORDS
            and (len(text) > 2 or not text.isascii())
            and any(map(str.isalpha, text))
        )[:MOST_WORDS]
        by_code = sorted((code, text, -n) for n, text, code in listed)
        codes = np.array([code for code, _, _ in by_code], np.uint64)
        words = Vocabulary(
            codes,
            tuple(text for _, text, _ in by_code),
            np.array([n for _, _, n in by_code], np.int64),
            self.n_sentences,
            np.zeros(0, np.int32),
            np.zeros(1, np.int64),
        )
        owners = np.concatenate([owner for owner, _ in self.kept])
        numbers = words.numbers(np.concatenate([held for _, held in self.kept]))
        owners, numbers = owners[numbers >= 0], numbers[numbers >= 0]
        starts = np.searchsorted(owners, np.append(self.chosen, self.n_sentences))
        return Vocabulary(
            words.codes, words.words, words.sentences, self.n_sentences, numbers, starts
        )

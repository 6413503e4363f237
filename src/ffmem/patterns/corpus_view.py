"""What the detector knows of a corpus: the prefixes it looks at, and how common everything is.

Two passes over the corpus, a chunk at a time, for all memories together:

1. Every prefix that triggers some memory, and a random sample of prefixes, keeps its codes.
2. Every code that at least three of them share is counted over all prefixes of the corpus, by
   length:   base(code, length bin) = prefixes of the bin that show it / prefixes of the bin

What is held grows with the trigger lists, not with the corpus.
"""

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from jaxtyping import Int8, Int32, Int64, UInt32, UInt64
from numpy import ndarray

from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.patterns.chunk import Chunk, chunks
from ffmem.patterns.code_table import CodeTable, Held, bins_of
from ffmem.patterns.vocabulary import Vocabulary
from ffmem.progress import Progress

SAMPLE = 3000
"""Random prefixes."""


@dataclass(frozen=True)
class CorpusView:
    """Prefixes with their codes, and the counts of all codes. A *row* is one such prefix."""

    numbers: Int64[ndarray, " row"]
    """Ascending: the integers that name the prefixes."""
    sentence: Int64[ndarray, " row"]
    length: Int64[ndarray, " row"]
    context: UInt64[ndarray, " row"]
    shapes: UInt32[ndarray, " row"]
    codes: Int32[ndarray, "row column"]
    """What a prefix ends with, as entries of the table; −1: nothing that recurs."""
    begins: Int32[ndarray, "row column"]
    """First character of what a prefix ends with; in the column of tokens the token's id."""
    ends: Int64[ndarray, " row"]
    """Last character + 1."""
    last_words: Int32[ndarray, "row back"]
    """Content words among the last units, the last first; −1: none."""
    gram_slices: Int64[ndarray, "row two"]
    """Which of `grams` a prefix holds: from, to."""
    grams: Int32[ndarray, " gram"]
    word_slices: Int64[ndarray, "row two"]
    """Which of `words` a prefix holds: from, to."""
    words: Int32[ndarray, " word"]
    """Content words of the sentences, each where it first stands."""
    sample: Int64[ndarray, " sampled"]
    """Rows of the random prefixes."""

    kinds: Int8[ndarray, " entry"]
    """Column of a code, or the number of columns + n − 1 for a gram of n units."""
    counts: Int64[ndarray, "entry bin"]
    """Prefixes of the corpus that show a code."""
    examples: Int64[ndarray, "entry three"]
    """(sentence, first character, last + 1) of one place where a gram stands."""
    entry_words: Int32[ndarray, "entry part"]
    """Content words of a gram; −1: none, or no gram."""
    shape_counts: Int64[ndarray, "shape bin"]
    totals: Int64[ndarray, " bin"]

    @property
    def bins(self) -> Int64[ndarray, " row"]:
        """Return the bin of every row's length."""
        return bins_of(self.length)

    def rows(self, numbers: Int64[ndarray, "..."]) -> Int64[ndarray, "..."]:
        """Return the rows of prefixes; −1 for vacant slots."""
        found = np.searchsorted(self.numbers, numbers)
        return np.where(numbers == NO_PREFIX, -1, found)

    def save(self, folder: Path) -> None:
        """Write every array to a folder."""
        for field in fields(self):
            np.save(folder / f"{field.name}.npy", getattr(self, field.name), allow_pickle=False)

    @classmethod
    def load(cls, folder: Path) -> "CorpusView":
        """Return what was saved, mapped from the disk: many processes share its memory."""
        names = [field.name for field in fields(cls)]
        return cls(
            *(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names)
        )


def look(index: Index, seed: int, progress: Progress) -> tuple[CorpusView, Vocabulary]:
    """Return the view of an index's corpus and its content words."""
    rng = np.random.default_rng([seed, index.manifest.corpus.tokens])
    wanted, sample = _wanted(index, rng)
    words = Vocabulary.starting(index.sentences.n_sentences, seed)
    parts = []
    with progress.bar("corpus", 2 * index.sentences.n_sentences, "sentences") as step:
        for chunk in chunks(index):
            words.add(chunk)
            parts.append(_part(chunk, wanted))
            step(len(chunk.texts))
        vocabulary = words.closed()
        held = _joined(parts)
        del parts
        table = CodeTable.of(held)
        for chunk in chunks(index):
            table.count(chunk)
            step(len(chunk.texts))
    return _view(held, table, vocabulary, np.searchsorted(held.numbers, sample)), vocabulary


def _wanted(
    index: Index, rng: np.random.Generator
) -> tuple[Int64[ndarray, " row"], Int64[ndarray, " sampled"]]:
    """Return all prefixes of triggers and of a random sample, ascending; and the sample."""
    signs = ["prefix", "negative_prefix"] if index.manifest.model.gated else ["prefix"]
    found = []
    for layer in range(index.n_layers):
        columns = read_columns(index.folder / layer_file("triggers", layer), signs)
        found.append(np.unique(np.concatenate([columns[name].reshape(-1) for name in signs])))
    lengths = np.concatenate(list(index.sentences.lengths()))
    starts = np.concatenate([[0], np.cumsum(lengths + 1)])[:-1]
    n = int(lengths.sum())
    tokens = np.sort(rng.choice(n, min(SAMPLE, n), replace=False))
    owner = np.searchsorted(np.cumsum(lengths), tokens, side="right")
    least = 0 if index.manifest.compat == "ff-layers" else 1
    sample = starts[owner] + tokens - (np.cumsum(lengths) - lengths)[owner] + least
    wanted = np.unique(np.concatenate([*found, sample]))
    return wanted[wanted != NO_PREFIX], sample


def _part(chunk: Chunk, wanted: Int64[ndarray, " row"]) -> Held:
    """Return what the wanted prefixes of a chunk hold."""
    place = np.searchsorted(chunk.numbers, wanted)
    place[place == len(chunk.numbers)] = 0
    rows = place[chunk.numbers[place] == wanted]
    grams = chunk.grams
    inside = np.isin(grams.sentence, chunk.sentence[rows])
    place_of = np.concatenate([[0], np.cumsum(inside)])
    # Grams lie in order of (sentence, length): those of a prefix are the first of its sentence.
    most = int(chunk.n_tokens.max(initial=0)) + 2
    keys = grams.sentence * most + grams.length
    first = np.searchsorted(keys, chunk.sentence[rows] * most)
    past = np.searchsorted(keys, chunk.sentence[rows] * most + chunk.length[rows], side="right")
    sentences = grams.sentence[inside] + chunk.first
    return Held(
        chunk.numbers[rows],
        chunk.sentence[rows] + chunk.first,
        chunk.length[rows],
        chunk.context[rows],
        chunk.shapes[rows],
        chunk.codes[rows],
        chunk.begins[rows].astype(np.int32),
        chunk.ends[rows],
        chunk.last_words[rows],
        np.stack([place_of[first], place_of[past]], axis=1),
        grams.code[inside],
        grams.size[inside],
        np.stack([sentences, grams.start[inside], grams.end[inside]], axis=1),
        grams.words[inside],
    )


def _joined(parts: list[Held]) -> Held:
    """Return the rows of all chunks."""
    n_grams = np.cumsum([0, *(len(part.grams) for part in parts)])
    columns = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(Held)
        if field.name != "gram_slices"
    }
    slices = [part.gram_slices + before for part, before in zip(parts, n_grams, strict=False)]
    return Held(**columns, gram_slices=np.concatenate(slices))


def _view(
    held: Held, table: CodeTable, vocabulary: Vocabulary, sample: Int64[ndarray, " sampled"]
) -> CorpusView:
    words = np.where(held.gram_sizes == 1, vocabulary.numbers(held.grams), -1)
    place_of = np.concatenate([[0], np.cumsum(words >= 0)])
    return CorpusView(
        held.numbers,
        held.sentence,
        held.length,
        held.context,
        held.shapes,
        table.entries(held.codes),
        held.begins,
        held.ends,
        vocabulary.numbers(held.last_words),
        held.gram_slices,
        table.entries(held.grams),
        place_of[held.gram_slices],
        words[words >= 0].astype(np.int32),
        sample,
        table.kinds,
        table.counts,
        table.examples,
        vocabulary.numbers(table.words),
        table.shape_counts,
        table.totals,
    )

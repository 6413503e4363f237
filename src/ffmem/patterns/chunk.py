"""Some sentences of the corpus, and what every prefix of them ends with and holds: as numbers.

A *code* is a 64-bit number for one thing that a prefix may show: its last token, its last one to
four units, the last letters of its last word, or a run of one to three units anywhere in it (a
*gram*; it begins and ends with a word). The same thing has the same code in every chunk.
A prefix that ends inside a word ends with the part that it shows; a gram is of whole units only.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt32, UInt64
from numpy import ndarray

from ffmem.indexing.sentences import StoredSentence
from ffmem.indexing.store import Index
from ffmem.patterns.shapes import Ends, shapes
from ffmem.patterns.units import Units, mixed

SENTENCES = 4096
"""In a chunk: what is in memory at a time does not grow with the corpus."""

TOKEN, WORDS, SUFFIXES = 0, (1, 2, 3, 4), (2, 3, 4)
COLUMNS = ("last-token", *(f"last-{n}" for n in WORDS), *(f"suffix-{n}" for n in SUFFIXES))
"""What a prefix ends with, one code each."""
LAST_WORD = 1
"""The column of the last unit."""

GRAMS = 3
"""Longest gram, in units."""

SAME = 8
"""Prefixes whose last 8 units are the same (all units of shorter ones) count as one."""

NONE = np.uint64(0)


@dataclass(frozen=True)
class Grams:
    """The grams of every sentence where they first stand complete, in reading order."""

    sentence: Int64[ndarray, " gram"]
    """Counted from the chunk's first."""
    length: Int64[ndarray, " gram"]
    """Least length of a prefix that holds the gram."""
    code: UInt64[ndarray, " gram"]
    start: Int64[ndarray, " gram"]
    """Characters of the sentence."""
    end: Int64[ndarray, " gram"]
    size: Int64[ndarray, " gram"]
    words: UInt64[ndarray, "gram part"]
    """Codes of its units as grams of one, the first first."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive sentences with the codes of all their prefixes."""

    first: int
    """Number of the first sentence."""
    texts: list[str]
    n_tokens: Int64[ndarray, " sentence"]
    numbers: Int64[ndarray, " prefix"]
    """The integers that name the prefixes."""
    sentence: Int64[ndarray, " prefix"]
    length: Int64[ndarray, " prefix"]
    codes: UInt64[ndarray, "prefix column"]
    begins: Int64[ndarray, "prefix column"]
    """Where in the sentence's text the thing of a code begins; it ends with the prefix. In the
    column of tokens: the token's id."""
    ends: Int64[ndarray, " prefix"]
    context: UInt64[ndarray, " prefix"]
    """The same for prefixes that count as one."""
    last_words: UInt64[ndarray, "prefix back"]
    """Codes, as grams, of the last units, the last first."""
    shapes: UInt32[ndarray, " prefix"]
    grams: Grams


def chunks(index: Index) -> Iterator[Chunk]:
    """Return the whole corpus, a chunk at a time."""
    spaced = not has_spaces(index)
    # The authors' prefixes are 0 … n − 1, all others 1 … n.
    least = 0 if index.manifest.compat == "ff-layers" else 1
    for first in range(0, index.sentences.n_sentences, SENTENCES):
        n = min(SENTENCES, index.sentences.n_sentences - first)
        rows = list(index.sentences.rows(first, n))
        texts, token_ends = zip(*(shown(index, row, spaced) for row in rows), strict=True)
        yield _chunk(first, rows, list(texts), list(token_ends), least)


def has_spaces(index: Index) -> bool:
    """Return whether tokens bring their spaces along, as subwords do and whole words do not."""
    return any(" " in token for token in index.tokens if token.strip())


def shown(index: Index, row: StoredSentence, spaced: bool) -> tuple[str, list[int]]:
    """Return a sentence's text, and where each token ends in it."""
    if row.text is not None and row.ends is not None:
        return row.text, row.ends
    tokens = [index.token(id) + " " * spaced for id in row.ids]
    ends = np.cumsum([len(token) for token in tokens]) - spaced
    return "".join(tokens), ends.tolist()


def _chunk(
    first: int,
    rows: list[StoredSentence],
    texts: list[str],
    token_ends: list[list[int]],
    least: int,
) -> Chunk:
    units = Units.of(texts)
    n_tokens = np.array([len(row.ids) for row in rows], np.int64)
    sentence = np.repeat(np.arange(len(rows)), n_tokens + 1)
    length = np.arange(len(sentence)) - np.repeat(_sums(n_tokens + 1)[:-1], n_tokens + 1)
    places = units.first[sentence] + np.concatenate([[0, *ends] for ends in token_ends])
    tokens = np.concatenate([[-1, *row.ids] for row in rows])
    grams = _grams(units, sentence, length, places)
    allowed = length >= 1 if least else length < n_tokens[sentence]
    sentence, length, places, tokens = (
        column[allowed] for column in (sentence, length, places, tokens)
    )
    n_before = units.before[units.first]
    unit = units.before[places] - 1
    ends = Ends(
        sentence,
        places,
        unit,
        unit + 1 - n_before[sentence],
        length,
        length == n_tokens[sentence],
    )
    offsets = np.array([row.offset for row in rows], np.int64)
    codes, begins, context, last_words = _codes(units, ends, tokens)
    return Chunk(
        first,
        texts,
        n_tokens,
        offsets[sentence] + length,
        sentence,
        length,
        codes,
        np.column_stack([tokens, begins[:, 1:] - units.first[sentence][:, None]]),
        places - units.first[sentence],
        context,
        last_words,
        shapes(units, ends),
        grams,
    )


def _codes(
    units: Units, ends: Ends, tokens: Int64[ndarray, " prefix"]
) -> tuple[
    UInt64[ndarray, "prefix column"],
    Int64[ndarray, "prefix column"],
    UInt64[ndarray, " prefix"],
    UInt64[ndarray, "prefix back"],
]:
    """Return what each prefix ends with, where that begins, its context and its last words."""
    n = len(tokens)
    codes, begins = np.zeros((n, len(COLUMNS)), np.uint64), np.zeros((n, len(COLUMNS)), np.int64)
    unit = np.maximum(ends.unit, 0)
    start = units.starts[unit] if len(units.starts) else np.zeros(n, np.int64)
    end = np.minimum(units.ends[unit], ends.place) if len(units.starts) else start
    whole = units.hashes(units.starts, units.ends)
    run = np.where(ends.n_units > 0, units.hashes(start, end), NONE)
    context, last = run.copy(), run
    last_words = np.zeros((n, len(WORDS)), np.uint64)
    codes[:, TOKEN] = np.where(tokens >= 0, _code(tokens.astype(np.uint64), TOKEN), NONE)
    for back in range(SAME):
        has = ends.n_units > back
        earlier = np.maximum(unit - back, 0)
        if back:
            run = np.where(has, mixed(run * np.uint64(3) + whole[earlier]), run)
            context = np.where(has, run, mixed(context))
        if back < len(WORDS):
            codes[:, back + 1] = np.where(has, _code(run, back + 1), NONE)
            begins[:, back + 1] = units.starts[earlier]
            unit_hash = whole[earlier] if back else last
            last_words[:, back] = np.where(has, _code(unit_hash, len(COLUMNS) + 1), NONE)
    size = end - start
    is_word = (ends.n_units > 0) & units.is_word[unit] & (units.ends[unit] <= ends.place)
    for column, letters in enumerate(SUFFIXES, start=len(WORDS) + 1):
        has = is_word & (size >= letters + 2)
        begin = np.where(has, end - letters, start)
        codes[:, column] = np.where(has, _code(units.hashes(begin, end), column), NONE)
        begins[:, column] = begin
    return codes, begins, context, last_words


def _grams(
    units: Units,
    sentence: Int64[ndarray, " token"],
    length: Int64[ndarray, " token"],
    places: Int64[ndarray, " token"],
) -> Grams:
    """Return the grams of all sentences, each where its sentence first has it."""
    owner = np.searchsorted(units.first, units.starts, side="right") - 1
    # The first token whose end reaches a unit's end is where the unit is complete.
    reached = np.searchsorted(places, units.ends)
    inside = reached < len(places)
    inside[inside] = sentence[reached[inside]] == owner[inside]  # else the sentence was cut before
    whole = units.hashes(units.starts, units.ends)
    parts = []
    run = whole
    for size in range(1, GRAMS + 1):
        begin, end = np.arange(len(whole) - size + 1), np.arange(size - 1, len(whole))
        run = run if size == 1 else mixed(run[:-1] * np.uint64(3) + whole[size - 1 :])
        keep = (owner[begin] == owner[end]) & units.is_word[begin] & units.is_word[end]
        keep &= inside[end]
        begin, end = begin[keep], end[keep]
        code = _code(run[keep], len(COLUMNS) + size)
        parts.append((owner[end], length[reached[end]], code, begin, end, np.full(len(end), size)))
    owners, lengths, codes, begin, end, sizes = (
        np.concatenate(part) for part in zip(*parts, strict=True)
    )
    order = np.lexsort((lengths, codes, owners))
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(owners[order]) != 0) | (codes[order][1:] != codes[order][:-1])
    kept = order[new]
    kept = kept[np.lexsort((codes[kept], lengths[kept], owners[kept]))]
    first = units.first[owners[kept]]
    return Grams(
        owners[kept],
        lengths[kept],
        codes[kept],
        units.starts[begin[kept]] - first,
        units.ends[end[kept]] - first,
        sizes[kept],
        _parts(_code(whole, len(COLUMNS) + 1), begin[kept], sizes[kept]),
    )


def _parts(
    codes: UInt64[ndarray, " unit"], begin: Int64[ndarray, " gram"], size: Int64[ndarray, " gram"]
) -> UInt64[ndarray, "gram part"]:
    """Return the codes of the units of grams."""
    places = np.arange(GRAMS)
    units = np.minimum(begin[:, None] + places, max(len(codes) - 1, 0))
    return np.where(places < size[:, None], codes[units], NONE)


def _code(numbers: UInt64[ndarray, " many"], kind: int) -> UInt64[ndarray, " many"]:
    """Return codes that differ between kinds of things; never NONE."""
    return mixed(numbers * np.uint64(31) + np.uint64(kind)) | np.uint64(1)


def _sums(numbers: Int64[ndarray, " many"]) -> Int64[ndarray, " more"]:
    return np.concatenate([[0], np.cumsum(numbers)])

"""What prefixes end with, contain and look like, as numbers, and how common each of it is.

A text is a sequence of *units*: words, and other signs one by one (scripts without spaces, such as
Chinese, give one unit per character). A *code* is a 64-bit hash of something that a prefix shows,
without case:

    its last token, its last one to four units, the last two to four letters of its last word,
    or a run of one to three units anywhere in it (a *gram*: it begins and ends with a word)

A prefix that ends inside a word ends with the part that it shows; a gram has whole units only.
*Shapes* are what a prefix looks like whatever its words: one bit each.

Two passes over the corpus serve all memories: the first keeps the codes of every prefix that
triggers a memory, and of a random sample; the second counts every code that recurs in them over all
prefixes of the corpus, by length. Memory grows with the trigger lists, not with the corpus.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int8, Int32, Int64, UInt32, UInt64
from numpy import ndarray

from ffmem.indexing.sentences import NO_PREFIX, StoredSentence
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.patterns.store import LEAST
from ffmem.progress import Progress

CHUNK = 4096
"""Sentences in memory at a time."""

SAMPLE = 3000
"""Random prefixes."""

N_WORDS, SUFFIXES, N_GRAM = 4, (2, 3, 4), 3
TOKEN, LAST_WORD = 0, 1
ENDINGS = ("last-token", *(f"last-{n + 1}" for n in range(N_WORDS)), *(f"-{n}" for n in SUFFIXES))
"""What a prefix ends with: the columns of `codes`. A gram of n units has the kind
len(ENDINGS) + n − 1."""
GRAM = len(ENDINGS)

SAME = 8
"""Prefixes with the same last 8 units (all units of shorter ones) have the same context."""

PASSAGE = 200
"""Sentences of one passage, at most: about as many as an article has. At most a twentieth of the
corpus."""

BINS = np.array([0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129])
"""Least length of each bin of prefix lengths; the last is open."""

NONE = np.uint64(0)
"""The code of nothing."""


class Shape(NamedTuple):
    """One thing that a prefix can look like."""

    name: str
    rule: str
    description: str
    about_word: bool = False
    """Whether it is about the last word, which then says nothing about the topic."""


SHAPES = (
    Shape("year", "shape", "a year at the end (1066, 1990)", True),
    Shape("number", "shape", "a number at the end", True),
    Shape("mixed", "shape", "letters and digits in one word at the end (19th, F1)", True),
    Shape("roman", "shape", "a Roman numeral at the end (II, XIV)", True),
    Shape("capitals", "casing", "a word in capitals at the end (NHL)", True),
    Shape("capitalised", "casing", "a capitalised word at the end, not at the beginning", True),
    Shape("camel", "casing", "a capital inside the last word (McDonald)", True),
    Shape("hyphenated", "shape", "the later part of a hyphenated word at the end", True),
    Shape("inside-word", "shape", "ends inside a word", True),
    Shape("comma", "punctuation", "ends with a comma"),
    Shape("stop", "punctuation", "ends with a full stop, question or exclamation mark"),
    Shape("opening", "punctuation", "ends with an opening bracket"),
    Shape("closing", "punctuation", "ends with a closing bracket"),
    Shape("quote", "punctuation", "ends with a quotation mark or apostrophe"),
    Shape("dash", "punctuation", "ends with a dash or hyphen"),
    Shape("colon", "punctuation", "ends with a colon or semicolon"),
    Shape("symbol", "punctuation", "ends with a symbol (%, /, $)"),
    Shape("first", "position", "the first token of a sentence"),
    Shape("first-three", "position", "among the first three tokens of a sentence"),
    Shape("whole", "position", "a whole sentence"),
    Shape("in-brackets", "punctuation", "inside brackets"),
    Shape("in-quotes", "punctuation", "inside quotation marks"),
    Shape("title", "casing", "mostly capitalised words, as in titles and lists of names"),
)
"""In the order of their bits."""

_BIT = {shape.name: 1 << bit for bit, shape in enumerate(SHAPES)}
_INNER = ("word", "upper-first", "double", "opened", "closed", "hyphen")
_BIT |= {name: 1 << len(SHAPES) + bit for bit, name in enumerate(_INNER)}
"""Further properties of units, which shapes of whole prefixes follow from."""
_SHOWN_BITS = np.uint32((1 << len(SHAPES)) - 1)

_TITLE_WORDS, _TITLE_SHARE = 4, 0.75

_SIGNS = {
    "comma": ",،、，",
    "stop": ".!?…。！？।",
    "colon": ":;：；",
    "quote": "\"'`",
    "double": '"',
    "opened": "“«„",
    "closed": "”»",
    "hyphen": "-\u2010\u2011",
}
_CATEGORIES = {"Ps": "opening", "Pe": "closing", "Pi": "quote", "Pf": "quote", "Pd": "dash"}


class UnitTypes(dict[str, int]):
    """Numbers of distinct units, given as they come, with what follows from their characters."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: list[int] = []
        self.shapes: list[int] = []
        self.suffixes: list[tuple[int, ...]] = []
        self.stems: list[int] = []
        """Of the first four letters; 0 for shorter units."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        folded = text.casefold()
        self.hashes.append(hash_text(folded))
        self.shapes.append(_unit_shapes(text))
        long = [n for n in SUFFIXES if len(folded) >= n + 2]
        self.suffixes.append(tuple(hash_text(folded[-n:]) if n in long else 0 for n in SUFFIXES))
        self.stems.append(hash_text(folded[:4]) if len(folded) >= 4 else 0)
        return number


def hash_text(text: str) -> int:
    """Return 64 bits that stand for a text; the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def find_units(text: str) -> list[tuple[int, int]]:
    """Return where the units of a text begin and end."""
    return [match.span() for match in _unit_expression().finditer(text)]


def _unit_expression() -> Any:
    import regex

    alone = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
    word = r"[\p{L}\p{N}\p{Co}\p{Mn}\p{Mc}]"
    # The library caches the compiled expression.
    return regex.compile(rf"[{word}&&[{alone}]]|[{word}--[{alone}]]+|[^\p{{Z}}\p{{C}}]", regex.V1)


def _unit_shapes(text: str) -> int:
    """Return what a unit looks like, by its characters alone."""
    first = unicodedata.category(text[0])
    if not (first[0] in "LN" or first in ("Co", "Mn", "Mc")):
        names = {_CATEGORIES[first]} if first in _CATEGORIES else set()
        names |= {name for name, signs in _SIGNS.items() if text in signs}
        if not names & {shape.name for shape in SHAPES}:
            names.add("symbol")
        return sum(_BIT[name] for name in names)
    kinds = [unicodedata.category(character) for character in text]
    n, upper, lower = len(text), sum(k in ("Lu", "Lt") for k in kinds), kinds.count("Ll")
    digits, starts_upper = kinds.count("Nd"), first in ("Lu", "Lt")
    is_number = digits == n
    shown = {
        "word": True,
        "upper-first": starts_upper,
        "year": is_number and n == 4 and (text[0] == "1" or text[:2] == "20"),
        "number": is_number,
        "mixed": digits > 0 and upper + lower > 0,
        "roman": n >= 2 and all(character in "IVXLC" for character in text),
        "capitals": upper == n >= 2,
        "capitalised": starts_upper and lower > 0 and upper == 1,
        "camel": upper > starts_upper and lower > 0 and digits == 0,
    }
    return sum(_BIT[name] for name, is_shown in shown.items() if is_shown)


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
    """Counted from the chunk's first."""
    length: Int64[ndarray, " prefix"]
    codes: UInt64[ndarray, "prefix ending"]
    begins: Int64[ndarray, "prefix ending"]
    """Where in the text the thing of a code begins; it ends with the prefix. For a token: its
    id."""
    ends: Int64[ndarray, " prefix"]
    context: UInt64[ndarray, " prefix"]
    last_words: UInt64[ndarray, "prefix back"]
    """Codes, as grams, of the last units, the last first."""
    shapes: UInt32[ndarray, " prefix"]
    grams: "Grams"
    neighbours: UInt64[ndarray, "unit three"]
    """Codes, as last words, of every unit, and hashes of the units before and after it."""


@dataclass(frozen=True)
class Grams:
    """The grams of every sentence where they are first complete, by sentence and length."""

    sentence: Int64[ndarray, " gram"]
    length: Int64[ndarray, " gram"]
    """Least length of a prefix that contains the gram."""
    code: UInt64[ndarray, " gram"]
    start: Int64[ndarray, " gram"]
    """Characters of the sentence."""
    end: Int64[ndarray, " gram"]
    size: Int64[ndarray, " gram"]
    words: UInt64[ndarray, "gram part"]
    """Codes of its units as grams of one."""


def read_chunks(index: Index, types: UnitTypes) -> Iterator[Chunk]:
    """Yield the whole corpus, a chunk at a time."""
    # The authors' prefixes are 0 … n − 1, all others 1 … n.
    least = 0 if index.manifest.compat == "ff-layers" else 1
    for first in range(0, index.sentences.n_sentences, CHUNK):
        n = min(CHUNK, index.sentences.n_sentences - first)
        yield _chunk(index, list(index.sentences.rows(first, n)), least, types)


def sentence_text(index: Index, row: StoredSentence) -> tuple[str, list[int]]:
    """Return a sentence's text, and where each token ends in it."""
    if row.text is not None and row.ends is not None:
        return row.text, row.ends
    space = _space_between_tokens(index)
    tokens = [index.token(id) + space for id in row.ids]
    return "".join(tokens), (np.cumsum([len(token) for token in tokens]) - len(space)).tolist()


@lru_cache(8)
def _space_between_tokens(index: Index) -> str:
    """Return what separates tokens: subwords bring their spaces along, whole words do not."""
    return "" if any(" " in token for token in index.tokens if token.strip()) else " "


class _Units(NamedTuple):
    """The units of a chunk's sentences. Places count characters of all its texts together."""

    sentence: ndarray
    start: ndarray
    end: ndarray
    type: ndarray


def _chunk(index: Index, rows: list[StoredSentence], least: int, types: UnitTypes) -> Chunk:
    texts, token_ends = zip(*(sentence_text(index, row) for row in rows), strict=True)
    base = np.cumsum([0, *(len(text) + 1 for text in texts)])[:-1]
    spans = [find_units(text) for text in texts]
    owner = np.repeat(np.arange(len(rows)), [len(one) for one in spans])
    flat = np.array([span for one in spans for span in one], np.int64).reshape(-1, 2)
    kind = [types[text[s:e]] for text, one in zip(texts, spans, strict=True) for s, e in one]
    units = _Units(
        owner, flat[:, 0] + base[owner], flat[:, 1] + base[owner], np.array(kind, np.int64)
    )
    n_tokens = np.array([len(row.ids) for row in rows], np.int64)
    sentence = np.repeat(np.arange(len(rows)), n_tokens + 1)
    length = np.arange(len(sentence)) - np.repeat(
        np.cumsum(n_tokens + 1) - n_tokens - 1, n_tokens + 1
    )
    places = base[sentence] + np.concatenate([[0, *ends] for ends in token_ends])
    tokens = np.concatenate([[-1, *row.ids] for row in rows])
    grams = _grams(units, sentence, length, places, types, base)
    kept = length >= 1 if least else length < n_tokens[sentence]
    sentence, length, places, tokens = (each[kept] for each in (sentence, length, places, tokens))
    # The last unit of each prefix, which may be cut.
    first_unit = np.searchsorted(owner, np.arange(len(rows)))
    last = np.searchsorted(units.start, places) - 1
    n_units = last + 1 - first_unit[sentence]
    has = n_units > 0
    cut = np.zeros(len(last), bool)
    cut[has] = units.end[last[has]] > places[has]
    shown = np.where(has, units.type[np.maximum(last, 0)] if len(owner) else 0, -1)
    for at in cut.nonzero()[0].tolist():
        text, origin = texts[sentence[at]], base[sentence[at]]
        shown[at] = types[text[units.start[last[at]] - origin : places[at] - origin]]
    ends = _Ends(last, n_units, shown, cut, length, length == n_tokens[sentence])
    codes, begins, context, last_words = _endings(units, ends, tokens, types)
    offsets = np.array([row.offset for row in rows], np.int64)
    return Chunk(
        rows[0].sentence,
        list(texts),
        n_tokens,
        offsets[sentence] + length,
        sentence,
        length,
        codes,
        np.column_stack([tokens, begins[:, 1:] - base[sentence][:, None]]),
        places - base[sentence],
        context,
        last_words,
        _shapes(units, ends, types),
        grams,
        _neighbours(units, types),
    )


class _Ends(NamedTuple):
    """Where prefixes end."""

    unit: ndarray
    """The last unit, whole; meaningless where there is none."""
    n_units: ndarray
    shown: ndarray
    """Type of the last unit as far as the prefix shows it; −1: none."""
    cut: ndarray
    length: ndarray
    is_whole: ndarray


def _endings(
    units: _Units, ends: _Ends, tokens: Int64[ndarray, " prefix"], types: UnitTypes
) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    """Return what each prefix ends with, where that begins, its context and its last words."""
    n = len(tokens)
    codes, begins = np.zeros((n, GRAM), np.uint64), np.zeros((n, GRAM), np.int64)
    last_words = np.zeros((n, N_WORDS), np.uint64)
    codes[:, TOKEN] = np.where(tokens >= 0, _code(tokens.astype(np.uint64), TOKEN), NONE)
    if not len(units.type):
        return codes, begins, np.zeros(n, np.uint64), last_words
    hashes = np.array(types.hashes, np.uint64)
    whole = hashes[units.type]
    run = np.where(ends.shown >= 0, hashes[ends.shown], NONE)
    context, last = run.copy(), run
    for back in range(SAME):
        has = ends.n_units > back
        unit = np.maximum(ends.unit - back, 0)
        if back:
            run = np.where(has, _mix(run * np.uint64(3) + whole[unit]), run)
            context = np.where(has, run, _mix(context))
        if back < N_WORDS:
            codes[:, back + 1] = np.where(has, _code(run, back + 1), NONE)
            begins[:, back + 1] = units.start[unit]
            last_words[:, back] = np.where(has, _code(whole[unit] if back else last, GRAM), NONE)
    is_word = _has(types, "word")[ends.shown] & (ends.shown >= 0) & ~ends.cut
    suffixes = np.array(types.suffixes, np.uint64)[ends.shown]
    for place, letters in enumerate(SUFFIXES):
        has = is_word & (suffixes[:, place] != NONE)
        column = N_WORDS + 1 + place
        codes[:, column] = np.where(has, _code(suffixes[:, place], column), NONE)
        begins[:, column] = units.end[np.maximum(ends.unit, 0)] - letters
    return codes, begins, context, last_words


def _shapes(units: _Units, ends: _Ends, types: UnitTypes) -> UInt32[ndarray, " prefix"]:
    """Return the shapes of prefixes, a bit each."""
    found = np.zeros(len(ends.unit), np.uint32)

    def mark(name: str, shown: Bool[ndarray, " prefix"]) -> None:
        found[shown] |= np.uint32(_BIT[name])

    has = ends.n_units > 0
    if len(units.type):
        found |= np.where(has, np.array(types.shapes, np.uint32)[ends.shown], np.uint32(0))
        unit, start = np.maximum(ends.unit, 0), ends.unit + 1 - ends.n_units
        found[(ends.n_units == 1)] &= ~np.uint32(_BIT["capitalised"])
        mark("inside-word", ends.cut)
        hyphen = _has(types, "hyphen")[units.type]
        before, earlier = np.maximum(unit - 1, 0), np.maximum(unit - 2, 0)
        joined = (units.end[before] == units.start[unit]) & hyphen[before]
        joined &= (units.end[earlier] == units.start[before]) & ~hyphen[earlier]
        is_word = (found & np.uint32(_BIT["word"])) > 0
        mark("hyphenated", has & is_word & joined & (ends.n_units > 2))

        def count(name: str, past: ndarray) -> Int64[ndarray, " prefix"]:
            """Count units of a property from the sentence's first to the one before `past`."""
            sums = np.concatenate([[0], np.cumsum(_has(types, name)[units.type])])
            n: ndarray = sums[past] - sums[start]
            return n

        depth = count("opening", ends.unit) - count("closing", ends.unit + 1)
        mark("in-brackets", has & (depth > 0))
        quotes = count("double", ends.unit) % 2
        quotes = quotes + count("opened", ends.unit) - count("closed", ends.unit + 1)
        mark("in-quotes", has & (quotes > 0) & ((found & np.uint32(_BIT["double"])) == 0))
        n_words, n_upper = count("word", ends.unit + 1), count("upper-first", ends.unit + 1)
        mark("title", has & (n_words >= _TITLE_WORDS) & (n_upper >= _TITLE_SHARE * n_words))
    mark("first", ends.length == 1)
    mark("first-three", (ends.length >= 1) & (ends.length <= 3))
    mark("whole", ends.is_whole)
    return found & _SHOWN_BITS


def _has(types: UnitTypes, name: str) -> Bool[ndarray, " type"]:
    """Return which types of units have a property."""
    return (np.array(types.shapes, np.uint32) & np.uint32(_BIT[name])) > 0


def _grams(
    units: _Units,
    sentence: ndarray,
    length: ndarray,
    places: ndarray,
    types: UnitTypes,
    base: ndarray,
) -> Grams:
    """Return the grams of all sentences, each where its sentence first has it."""
    # The first token whose end reaches a unit's end is where the unit is complete.
    reached = np.searchsorted(places, units.end)
    inside = reached < len(places)
    inside[inside] = sentence[reached[inside]] == units.sentence[inside]  # else it was cut before
    whole = np.array(types.hashes, np.uint64)[units.type]
    is_word = _has(types, "word")[units.type]
    parts, run = [], whole
    for size in range(1, N_GRAM + 1):
        begin, end = np.arange(len(whole) - size + 1), np.arange(size - 1, len(whole))
        run = run if size == 1 else _mix(run[:-1] * np.uint64(3) + whole[size - 1 :])
        keep = (units.sentence[begin] == units.sentence[end]) & is_word[begin] & is_word[end]
        keep &= inside[end]
        begin, end, code = begin[keep], end[keep], _code(run[keep], GRAM + size - 1)
        sizes = np.full(len(end), size)
        parts.append((units.sentence[end], length[reached[end]], code, begin, end, sizes))
    owner, lengths, codes, begin, end, sizes = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((lengths, codes, owner))
    new = np.ones(len(order), bool)
    new[1:] = (np.diff(owner[order]) != 0) | (codes[order][1:] != codes[order][:-1])
    kept = order[new]
    kept = kept[np.lexsort((codes[kept], lengths[kept], owner[kept]))]
    owner, begin, end, sizes = owner[kept], begin[kept], end[kept], sizes[kept]
    part = np.minimum(begin[:, None] + np.arange(N_GRAM), max(len(whole) - 1, 0))
    words = np.where(np.arange(N_GRAM) < sizes[:, None], _code(whole, GRAM)[part], NONE)
    starts, past = units.start[begin] - base[owner], units.end[end] - base[owner]
    return Grams(owner, lengths[kept], codes[kept], starts, past, sizes, words)


def _neighbours(units: _Units, types: UnitTypes) -> UInt64[ndarray, "unit three"]:
    whole = np.array(types.hashes, np.uint64)[units.type]
    same = units.sentence[1:] == units.sentence[:-1]
    found = np.zeros((len(whole), 3), np.uint64)
    found[:, 0] = _code(whole, LAST_WORD)
    found[1:, 1] = np.where(same, whole[:-1], NONE)
    found[:-1, 2] = np.where(same, whole[1:], NONE)
    return found


def word_codes(words: list[str]) -> UInt64[ndarray, " word"]:
    """Return the codes of words as grams."""
    return _code(np.array([hash_text(word) for word in words], np.uint64), GRAM)


def _code(numbers: ndarray, kind: int) -> ndarray:
    """Return codes that differ between kinds of things; never NONE."""
    return _mix(numbers * np.uint64(31) + np.uint64(kind)) | np.uint64(1)


def _mix(numbers: ndarray) -> ndarray:
    """Return numbers whose every bit depends on every bit of the given ones (splitmix64)."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: ndarray = numbers ^ (numbers >> np.uint64(31))
    return found


# Content words

MAX_CONTENT_WORDS = 30_000
MIN_SENTENCES = 3
MAX_SHARE = 0.1
"""A word in more of the sentences is no content word."""

FITTED_SENTENCES = 40_000
"""Sentences from which content words and topics are learned, in runs of RUN."""
RUN = 50


@dataclass(frozen=True)
class Vocabulary:
    """The content words of a corpus: what topics are made of."""

    words: list[str]
    codes: UInt64[ndarray, " word"]
    """Ascending, as grams of one unit."""
    share: ndarray
    """Share of the sentences that contain a word."""
    idf: ndarray
    tfidf: Any
    """Sentences in reading order × words: a sparse matrix, rows of length 1."""

    @classmethod
    def fit(cls, index: Index, seed: int) -> "Vocabulary":
        """Return the content words: with letters, no English stop word, neither rare nor common."""
        from scipy.sparse import csr_matrix
        from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS, TfidfVectorizer

        n = index.sentences.n_sentences
        n_runs = -(-n // RUN)
        rng = np.random.default_rng([seed, n])
        runs = np.sort(rng.choice(n_runs, min(FITTED_SENTENCES // RUN, n_runs), replace=False))
        texts = (
            sentence_text(index, row)[0]
            for first in (runs * RUN).tolist()
            for row in index.sentences.rows(first, min(RUN, n - first))
        )

        def content_words(text: str) -> list[str]:
            units = (text[start:end].casefold() for start, end in find_units(text))
            return [
                unit
                for unit in units
                if unit not in ENGLISH_STOP_WORDS
                and (len(unit) > 2 or not unit.isascii())
                and any(map(str.isalpha, unit))
            ]

        n_fitted = min(FITTED_SENTENCES, n)
        vectorizer = TfidfVectorizer(
            analyzer=content_words,
            binary=True,
            min_df=MIN_SENTENCES,
            max_df=max(int(MAX_SHARE * n_fitted), 2 * MIN_SENTENCES),
            max_features=MAX_CONTENT_WORDS,
        )
        try:
            tfidf = vectorizer.fit_transform(texts)
        except ValueError:  # there is none
            nothing = np.zeros(0)
            return cls([], nothing.astype(np.uint64), nothing, nothing, csr_matrix((0, 0)))
        words = vectorizer.get_feature_names_out().tolist()
        codes = word_codes(words)
        order = np.argsort(codes)
        tfidf = tfidf[:, order]
        share = tfidf.getnnz(axis=0) / tfidf.shape[0]
        return cls(
            [words[place] for place in order], codes[order], share, vectorizer.idf_[order], tfidf
        )

    def numbers(self, codes: UInt64[ndarray, "..."]) -> Int32[ndarray, "..."]:
        """Return the numbers of words by their codes, −1 for others."""
        return _places(self.codes, codes)


def _places(ascending: UInt64[ndarray, " known"], codes: ndarray) -> Int32[ndarray, "..."]:
    """Return where codes are among some; −1 for those that are not."""
    if not len(ascending):
        return np.full(codes.shape, -1, np.int32)
    place = np.minimum(np.searchsorted(ascending, codes), len(ascending) - 1)
    return np.where(ascending[place] == codes, place, -1).astype(np.int32)


# The corpus

HASHED = 1024
"""Columns for the units before a word, and for those after it."""
NEIGHBOUR_AXES = 50


@dataclass(frozen=True)
class CorpusFeatures:
    """Prefixes with their codes, and the counts of all codes. A *row* is one such prefix."""

    numbers: Int64[ndarray, " row"]
    """Ascending: the integers that name the prefixes."""
    sentence: Int64[ndarray, " row"]
    length: Int64[ndarray, " row"]
    context: UInt64[ndarray, " row"]
    shapes: UInt32[ndarray, " row"]
    codes: Int32[ndarray, "row ending"]
    """What a prefix ends with, as entries; −1: nothing that recurs."""
    begins: Int32[ndarray, "row ending"]
    """First character of what a prefix ends with; for a token its id."""
    ends: Int64[ndarray, " row"]
    """Last character + 1."""
    last_words: Int32[ndarray, "row back"]
    """Content words among the last units, the last first; −1: none."""
    gram_slices: Int64[ndarray, "row two"]
    """Which of `grams` a prefix contains: from, to."""
    grams: Int32[ndarray, " gram"]
    word_slices: Int64[ndarray, "row two"]
    """Which of `words` a prefix contains: from, to."""
    words: Int32[ndarray, " word"]
    """Content words of the sentences, each where it first stands, in reading order."""
    passage: Int64[ndarray, " row"]
    """Which part of the corpus a prefix is from: about an article."""
    sample: Int64[ndarray, " sampled"]
    """Rows of the random prefixes."""

    kinds: Int8[ndarray, " entry"]
    """Column of a code in `codes`, or GRAM + n − 1 for a gram of n units."""
    counts: Int64[ndarray, "entry bin"]
    """Prefixes of the corpus that show an entry, by length."""
    examples: Int64[ndarray, "entry three"]
    """(sentence, first character, last + 1) of one place where a gram stands."""
    entry_words: Int32[ndarray, "entry part"]
    """Content words of a gram; −1: none, or no gram."""
    neighbours: Float32[ndarray, "entry axis"]
    """Of last words: what stands before and after them in the corpus, as a unit vector."""
    stems: UInt64[ndarray, " entry"]
    """Of last words: the same for words with the same first four letters; 0: shorter."""
    shape_counts: Int64[ndarray, "shape bin"]
    totals: Int64[ndarray, " bin"]

    @property
    def bins(self) -> Int64[ndarray, " row"]:
        """The bin of every row's length."""
        return bins_of(self.length)

    def rows(self, numbers: Int64[ndarray, "..."]) -> Int64[ndarray, "..."]:
        """Return the rows of prefixes; −1 for empty slots."""
        return np.where(numbers == NO_PREFIX, -1, np.searchsorted(self.numbers, numbers))

    def save(self, folder: Path) -> None:
        """Write every array to a folder."""
        for field in fields(self):
            np.save(folder / f"{field.name}.npy", getattr(self, field.name), allow_pickle=False)

    @classmethod
    def load(cls, folder: Path) -> "CorpusFeatures":
        """Return what was saved, mapped from the disk: many processes share its memory."""
        names = [field.name for field in fields(cls)]
        return cls(
            *(np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names)
        )


def bins_of(lengths: Int64[ndarray, " many"]) -> Int64[ndarray, " many"]:
    """Return the bin of each length."""
    return np.searchsorted(BINS, lengths, side="right") - 1


def trigger_columns(index: Index) -> dict[int, str]:
    """Return the columns with the prefixes of triggers, by sign."""
    return {1: "prefix", -1: "negative_prefix"} if index.manifest.model.gated else {1: "prefix"}


def extract_features(
    index: Index, seed: int, progress: Progress
) -> tuple[CorpusFeatures, Vocabulary]:
    """Return the features of all triggers of an index, and its content words."""
    rng = np.random.default_rng([seed, index.manifest.corpus.tokens])
    wanted, sample = _wanted_prefixes(index, rng)
    vocabulary = Vocabulary.fit(index, seed)
    types = UnitTypes()
    parts = []
    with progress.bar("Corpus", 2 * index.sentences.n_sentences, "sentences") as step:
        for chunk in read_chunks(index, types):
            parts.append(_keep(chunk, wanted))
            step(len(chunk.texts))
        kept = _join(parts)
        del parts
        table = _Table(kept)
        for chunk in read_chunks(index, types):
            table.count(chunk)
            step(len(chunk.texts))
    words = np.where(kept["gram_sizes"] == 1, vocabulary.numbers(kept["grams"]), -1)
    n_words = np.concatenate([[0], np.cumsum(words >= 0)])
    n = index.sentences.n_sentences
    features = CorpusFeatures(
        numbers=kept["numbers"],
        sentence=kept["sentence"],
        length=kept["length"],
        context=kept["context"],
        shapes=kept["shapes"],
        codes=_places(table.codes, kept["codes"]),
        begins=kept["begins"],
        ends=kept["ends"],
        last_words=vocabulary.numbers(kept["last_words"]),
        gram_slices=kept["gram_slices"],
        grams=_places(table.codes, kept["grams"]),
        word_slices=n_words[kept["gram_slices"]],
        words=words[words >= 0].astype(np.int32),
        passage=kept["sentence"] // min(max(n // 20, 1), PASSAGE),
        sample=np.searchsorted(kept["numbers"], sample),
        kinds=table.kinds,
        counts=table.counts,
        examples=table.examples,
        entry_words=vocabulary.numbers(table.words),
        neighbours=table.neighbour_vectors(),
        stems=table.stems(types),
        shape_counts=table.shape_counts,
        totals=table.totals,
    )
    return features, vocabulary


def _wanted_prefixes(
    index: Index, rng: np.random.Generator
) -> tuple[Int64[ndarray, " row"], Int64[ndarray, " sampled"]]:
    """Return all prefixes of triggers and of a random sample, ascending; and the sample."""
    names = list(trigger_columns(index).values())
    found = []
    for layer in range(index.n_layers):
        columns = read_columns(index.folder / layer_file("triggers", layer), names)
        found.append(np.unique(np.concatenate([columns[name].reshape(-1) for name in names])))
    lengths = np.concatenate(list(index.sentences.lengths()))
    starts = np.cumsum(lengths + 1) - lengths - 1
    n = int(lengths.sum())
    tokens = np.sort(rng.choice(n, min(SAMPLE, n), replace=False))
    owner = np.searchsorted(np.cumsum(lengths), tokens, side="right")
    least = 0 if index.manifest.compat == "ff-layers" else 1
    sample = starts[owner] + tokens - (np.cumsum(lengths) - lengths)[owner] + least
    wanted = np.unique(np.concatenate([*found, sample]))
    return wanted[wanted != NO_PREFIX], sample


def _keep(chunk: Chunk, wanted: Int64[ndarray, " row"]) -> dict[str, ndarray]:
    """Return what the wanted prefixes of a chunk show, still as codes."""
    rows = np.flatnonzero(np.isin(chunk.numbers, wanted, assume_unique=True))
    grams = chunk.grams
    inside = np.isin(grams.sentence, chunk.sentence[rows])
    place_of = np.concatenate([[0], np.cumsum(inside)])
    # Grams lie in order of (sentence, length): those of a prefix are the first of its sentence.
    most = int(chunk.n_tokens.max(initial=0)) + 2
    keys = grams.sentence * most + grams.length
    first = np.searchsorted(keys, chunk.sentence[rows] * most)
    past = np.searchsorted(keys, chunk.sentence[rows] * most + chunk.length[rows], side="right")
    sentences = grams.sentence[inside] + chunk.first
    return {
        "numbers": chunk.numbers[rows],
        "sentence": chunk.sentence[rows] + chunk.first,
        "length": chunk.length[rows],
        "context": chunk.context[rows],
        "shapes": chunk.shapes[rows],
        "codes": chunk.codes[rows],
        "begins": chunk.begins[rows].astype(np.int32),
        "ends": chunk.ends[rows],
        "last_words": chunk.last_words[rows],
        "gram_slices": np.stack([place_of[first], place_of[past]], axis=1),
        "grams": grams.code[inside],
        "gram_sizes": grams.size[inside],
        "gram_examples": np.stack([sentences, grams.start[inside], grams.end[inside]], axis=1),
        "gram_words": grams.words[inside],
    }


def _join(parts: list[dict[str, ndarray]]) -> dict[str, ndarray]:
    """Return the rows of all chunks."""
    n_grams = np.cumsum([0, *(len(part["grams"]) for part in parts)]).tolist()
    for part, before in zip(parts, n_grams, strict=False):
        part["gram_slices"] += before
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class _Table:
    """All codes that at least three rows, or sentences of rows, share: the entries."""

    def __init__(self, kept: dict[str, ndarray]) -> None:
        codes, kinds = [], []
        for column in range(GRAM):
            distinct, n = np.unique(kept["codes"][:, column], return_counts=True)
            codes.append(distinct[(n >= LEAST) & (distinct != NONE)])
            kinds.append(np.full(len(codes[-1]), column))
        # What stands first in a sentence is capitalised: an example from within it reads better.
        order = np.lexsort((kept["gram_examples"][:, 1] <= 0, kept["grams"]))
        new = np.ones(len(order), bool)
        new[1:] = kept["grams"][order][1:] != kept["grams"][order][:-1]
        sizes = np.diff(np.append(new.nonzero()[0], len(order)))
        firsts = order[new][sizes >= LEAST]
        codes.append(kept["grams"][firsts])
        kinds.append(kept["gram_sizes"][firsts] + GRAM - 1)
        n_endings = sum(map(len, codes[:-1]))
        nowhere, no_words = np.full((n_endings, 3), -1), np.zeros((n_endings, N_GRAM), np.uint64)
        joined = np.concatenate(codes)
        ascending = np.argsort(joined)
        self.codes = joined[ascending]
        self.kinds = np.concatenate(kinds)[ascending].astype(np.int8)
        self.examples = np.concatenate([nowhere, kept["gram_examples"][firsts]])[ascending]
        self.words = np.concatenate([no_words, kept["gram_words"][firsts]])[ascending]
        self.counts = np.zeros((len(joined), len(BINS)), np.int64)
        self.shape_counts = np.zeros((len(SHAPES), len(BINS)), np.int64)
        self.totals = np.zeros(len(BINS), np.int64)
        self._neighbours: Any = None

    def count(self, chunk: Chunk) -> None:
        """Count the prefixes of a chunk."""
        from scipy.sparse import csr_matrix

        bins = bins_of(chunk.length)
        self.totals += np.bincount(bins, minlength=len(BINS))
        for bit in range(len(SHAPES)):
            shown = (chunk.shapes >> np.uint32(bit) & np.uint32(1)).astype(bool)
            self.shape_counts[bit] += np.bincount(bins[shown], minlength=len(BINS))
        for column in range(GRAM):
            entries = _places(self.codes, chunk.codes[:, column])
            known = entries >= 0
            np.add.at(self.counts, (entries[known], bins[known]), 1)
        entries = _places(self.codes, chunk.grams.code)
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
        unit = _places(self.codes, chunk.neighbours[:, 0])
        columns = (chunk.neighbours[:, 1:] % np.uint64(HASHED)).astype(np.int64)
        columns[:, 1] += HASHED
        place, side = ((unit >= 0)[:, None] & (chunk.neighbours[:, 1:] != NONE)).nonzero()
        counted = csr_matrix(
            (np.ones(len(place), np.float32), (unit[place], columns[place, side])),
            (len(self.codes), 2 * HASHED),
        )
        self._neighbours = counted if self._neighbours is None else self._neighbours + counted

    def neighbour_vectors(self) -> Float32[ndarray, "entry axis"]:
        """Return what stands around each last word: counts of neighbours, reduced by an SVD."""
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfTransformer
        from sklearn.preprocessing import normalize
        from threadpoolctl import threadpool_limits

        rows = np.flatnonzero(self.kinds == LAST_WORD)
        n_axes = min(NEIGHBOUR_AXES, len(rows) - 1)
        if n_axes < 1:
            return np.zeros((len(self.codes), 1), np.float32)
        found = np.zeros((len(self.codes), n_axes), np.float32)
        with threadpool_limits(1):  # the same sums in the same order, on any machine
            weighted = TfidfTransformer(sublinear_tf=True).fit_transform(self._neighbours[rows])
            reduced = TruncatedSVD(n_axes, random_state=0).fit_transform(weighted)
        found[rows] = normalize(reduced)
        return found

    def stems(self, types: UnitTypes) -> UInt64[ndarray, " entry"]:
        """Return the first four letters of each last word."""
        entries = _places(self.codes, _code(np.array(types.hashes, np.uint64), LAST_WORD))
        found = np.zeros(len(self.codes), np.uint64)
        found[entries[entries >= 0]] = np.array(types.stems, np.uint64)[entries >= 0]
        return found

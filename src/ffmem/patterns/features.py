"""Features of prefixes: what they end with, contain and look like, and how common each is.

A text is a sequence of *units*: words, and other signs one by one (scripts without spaces, such as
Chinese, give one unit per character). A *feature* is something that a prefix can show, without
case:

    its last token, its last one to four units, the last two to four letters of its last word,
    a run of one to three units anywhere in it (a *gram*: it begins and ends with a word),
    or a *shape*: what it looks like whatever its words

A prefix that ends inside a word ends with the part that it shows; a gram has whole units only.

Two passes over the corpus serve all memories: the first keeps the features, as 64-bit codes, of
every prefix that triggers a memory, and of a random sample; the second counts every feature that
recurs in them over all prefixes of the corpus, by length. Memory grows with the trigger lists, not
with the corpus.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int8, Int32, Int64, Shaped, UInt64
from numpy import ndarray

from ffmem.indexing.sentences import NO_PREFIX, StoredSentence
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, read_columns
from ffmem.patterns.store import MIN_TRIGGERS
from ffmem.progress import Progress

BLOCK_SENTENCES = 4096
"""Sentences in memory at a time."""

SAMPLE = 3000
"""Random prefixes."""

N_WORDS, SUFFIXES, N_GRAM = 4, (2, 3, 4), 3

TOKEN, LAST_WORD, SUFFIX = 0, 1, N_WORDS + 1
GRAM = SUFFIX + len(SUFFIXES)
SHAPE = GRAM + N_GRAM
"""Kinds of features: TOKEN; LAST_WORD + n − 1 for the last n units; SUFFIX + place in SUFFIXES;
GRAM + n − 1 for a gram of n units; SHAPE + place in SHAPES. Those below GRAM are *endings*: a
prefix has at most one of each."""

CONTEXT_UNITS = 8
"""Prefixes with the same last 8 units (all units of shorter ones) have the same context."""

PASSAGE = 200
"""Sentences of one passage, at most: about as many as an article has. At most a twentieth of the
corpus."""

BINS = np.array([0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129])
"""Lower edges of bins of prefix lengths; the last bin is open."""

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
    Shape("capitalized", "casing", "a capitalized word at the end, not at the beginning", True),
    Shape("camel", "casing", "a capital inside the last word (McDonald)", True),
    Shape("hyphenated", "shape", "the later part of a hyphenated word at the end", True),
    Shape("inside-word", "shape", "ends inside a word", True),
    Shape("comma", "punctuation", "ends with a comma"),
    Shape("stop", "punctuation", "ends with a period, question mark or exclamation mark"),
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
    Shape("title", "casing", "mostly capitalized words, as in titles and lists of names"),
)

_PROPERTIES = (
    *(shape.name for shape in SHAPES),
    *("word", "upper-first", "double", "opened", "closed", "hyphen"),
)
"""Properties of units: shapes, and what the shapes of whole prefixes are derived from."""
_COLUMN = {name: column for column, name in enumerate(_PROPERTIES)}

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

N_STEMS = 4


class UnitTypes(dict[str, int]):
    """Numbers distinct units in order of appearance, with what follows from their characters."""

    def __init__(self) -> None:
        super().__init__()
        self.hashes: list[int] = []
        self.properties: list[bytes] = []
        """A byte for each of _PROPERTIES, 1 if the unit has it."""
        self.suffixes: list[tuple[int, ...]] = []
        self.stems: list[tuple[int, ...]] = []

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        folded = text.casefold()
        self.hashes.append(hash_text(folded))
        properties = _unit_properties(text)
        self.properties.append(bytes(name in properties for name in _PROPERTIES))
        long = [n for n in SUFFIXES if len(folded) >= n + 2]
        self.suffixes.append(tuple(hash_text(folded[-n:]) if n in long else 0 for n in SUFFIXES))
        hashes = [hash_text(stem) for stem in stems(folded)] if "word" in properties else []
        self.stems.append((*hashes, *[0] * (N_STEMS - len(hashes))))
        return number


def stems(word: str) -> list[str]:
    """Return a word and what it may be an English inflection of, at most N_STEMS.

    base: base · bases: bases, base, bas · studied: studied, study · running: running, runn, runne,
    run. Two words with a stem in common are forms of one word.
    """
    found = [word]
    if not word.isalpha():
        return found
    if word.endswith(("ies", "ied")) and len(word) > 5:
        found.append(word[:-3] + "y")
    elif word.endswith(("ing", "ed")):
        rest = word.removesuffix("ing").removesuffix("ed")
        doubled = [rest[:-1]] if rest[-1:] == rest[-2:-1] else []
        found += [rest, rest + "e", *doubled] if len(rest) > 2 else []
    elif word.endswith("s") and len(word) > 3 and not word.endswith(("ss", "us", "is")):
        found += [word[:-1], word[:-2]] if word.endswith("es") else [word[:-1]]
    return found


def hash_text(text: str) -> int:
    """Return a 64-bit hash of a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def find_units(text: str) -> list[tuple[int, int]]:
    """Return where the units of a text begin and end."""
    import regex

    alone = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
    word = r"[\p{L}\p{N}\p{Co}\p{Mn}\p{Mc}]"
    # The library caches the compiled expression.
    unit = rf"[{word}&&[{alone}]]|[{word}--[{alone}]]+|[^\p{{Z}}\p{{C}}]"
    return [match.span() for match in regex.finditer(unit, text, regex.V1)]


def _unit_properties(text: str) -> set[str]:
    """Return what a unit looks like, by its characters alone."""
    first = unicodedata.category(text[0])
    if not (first[0] in "LN" or first in ("Co", "Mn", "Mc")):
        names = {_CATEGORIES[first]} if first in _CATEGORIES else set()
        names |= {name for name, signs in _SIGNS.items() if text in signs}
        if not names & {shape.name for shape in SHAPES}:
            names.add("symbol")
        return names
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
        "capitalized": starts_upper and lower > 0 and upper == 1,
        "camel": upper > starts_upper and lower > 0 and digits == 0,
    }
    return {name for name, is_shown in shown.items() if is_shown}


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


# Features of consecutive sentences


class Grams(NamedTuple):
    """The grams of every sentence where they are first complete, by sentence and length."""

    sentence: Int64[ndarray, " gram"]
    length: Int64[ndarray, " gram"]
    """Least length of a prefix that contains the gram."""
    code: UInt64[ndarray, " gram"]
    size: Int64[ndarray, " gram"]
    example: Int64[ndarray, "gram three"]
    """(sentence of the corpus, first character, last + 1)."""
    words: UInt64[ndarray, "gram part"]
    """Codes of its units as grams of one."""


class SentenceBlock:
    """Consecutive sentences: their units and their prefixes.

    Sentences count from the block's first; places count characters of all its texts together.
    """

    def __init__(self, index: Index, first: int, n: int, types: UnitTypes) -> None:
        rows = list(index.sentences.rows(first, n))
        texts, token_ends = zip(*(sentence_text(index, row) for row in rows), strict=True)
        self.first, self.n_sentences, self.types = first, n, types
        self.text_starts = np.cumsum([0, *(len(text) + 1 for text in texts)])[:-1]

        spans = [find_units(text) for text in texts]
        self.unit_sentence = np.repeat(np.arange(n), [len(one) for one in spans])
        units = np.array([span for one in spans for span in one], np.int64).reshape(-1, 2)
        units += self.text_starts[self.unit_sentence][:, None]
        self.unit_start, self.unit_end = units.T
        numbers = [types[text[s:e]] for text, one in zip(texts, spans, strict=True) for s, e in one]
        self.unit_type = np.array(numbers, np.int64)

        n_tokens = np.array([len(row.ids) for row in rows], np.int64)
        sentence = np.repeat(np.arange(n), n_tokens + 1)
        length = np.concatenate([np.arange(k + 1) for k in n_tokens.tolist()])
        # The authors' prefixes are 0 … n − 1, all others 1 … n.
        is_prefix = (
            length < n_tokens[sentence] if index.manifest.compat == "ff-layers" else length >= 1
        )
        self.sentence, self.length = sentence[is_prefix], length[is_prefix]
        self.is_whole = self.length == n_tokens[self.sentence]
        self.numbers = np.array([row.offset for row in rows])[self.sentence] + self.length
        self.token = np.concatenate([[-1, *row.ids] for row in rows])[is_prefix]  # −1: none
        ends = np.concatenate([[0, *ends] for ends in token_ends])[is_prefix]
        self.end = self.text_starts[self.sentence] + ends

        # The last unit, whole even if the prefix ends inside it, and its type as far as it is shown
        # (−1: there is none).
        self.last_unit = np.searchsorted(self.unit_start, self.end) - 1
        first_unit = np.searchsorted(self.unit_sentence, np.arange(n))
        self.n_units = self.last_unit + 1 - first_unit[self.sentence]
        has = self.n_units > 0
        self.is_cut = np.zeros(len(has), bool)
        self.is_cut[has] = self.unit_end[self.last_unit[has]] > self.end[has]
        self.last_type = np.full(len(has), -1)
        self.last_type[has] = self.unit_type[self.last_unit[has]]
        for at in self.is_cut.nonzero()[0].tolist():
            origin = self.text_starts[self.sentence[at]]
            shown = slice(self.unit_start[self.last_unit[at]] - origin, self.end[at] - origin)
            self.last_type[at] = types[texts[self.sentence[at]][shown]]
        joined = np.frombuffer(b"".join(types.properties), bool)
        self.properties = joined.reshape(-1, len(_PROPERTIES))
        """By type of unit."""

    @property
    def unit_hashes(self) -> UInt64[ndarray, " unit"]:
        """The hash of every unit."""
        return np.array(self.types.hashes, np.uint64)[self.unit_type]

    def units_with(self, name: str) -> Bool[ndarray, " unit"]:
        """Return which units have a property."""
        found: ndarray = self.properties[self.unit_type, _COLUMN[name]]
        return found

    def endings(self) -> tuple[ndarray, ndarray, ndarray]:
        """Return the codes of what each prefix ends with, its context and its last words.

        The last words are its last units as grams of one, the last first.
        """
        n = len(self.token)
        codes = np.zeros((n, GRAM), np.uint64)
        last_words = np.zeros((n, N_WORDS), np.uint64)
        codes[:, TOKEN] = np.where(
            self.token >= 0, _code(self.token.astype(np.uint64), TOKEN), NONE
        )
        if not len(self.unit_type):
            return codes, np.zeros(n, np.uint64), last_words
        whole = self.unit_hashes
        hashes = np.array(self.types.hashes, np.uint64)
        last = np.where(self.last_type >= 0, hashes[self.last_type], NONE)
        run, context = last, last
        for back in range(CONTEXT_UNITS):
            has = self.n_units > back
            unit = np.maximum(self.last_unit - back, 0)
            if back:
                run = np.where(has, _mix(run * np.uint64(3) + whole[unit]), run)
                context = np.where(has, run, _mix(context))
            if back < N_WORDS:
                codes[:, LAST_WORD + back] = np.where(has, _code(run, LAST_WORD + back), NONE)
                word = _code(whole[unit] if back else last, GRAM)
                last_words[:, back] = np.where(has, word, NONE)
        is_word = self.properties[self.last_type, _COLUMN["word"]] & (self.last_type >= 0)
        is_word &= ~self.is_cut
        suffixes = np.array(self.types.suffixes, np.uint64)[self.last_type]
        for place in range(len(SUFFIXES)):
            has = is_word & (suffixes[:, place] != NONE)
            code = _code(suffixes[:, place], SUFFIX + place)
            codes[:, SUFFIX + place] = np.where(has, code, NONE)
        return codes, context, last_words

    def shapes(self) -> Bool[ndarray, "prefix shape"]:
        """Return which of SHAPES each prefix has."""
        found = np.zeros((len(self.token), len(_PROPERTIES)), bool)

        def mark(name: str, shown: Bool[ndarray, " prefix"]) -> None:
            found[shown, _COLUMN[name]] = True

        has = self.n_units > 0
        if len(self.unit_type):
            found[has] = self.properties[self.last_type[has]]
            unit, start = np.maximum(self.last_unit, 0), self.last_unit + 1 - self.n_units
            found[self.n_units == 1, _COLUMN["capitalized"]] = False
            mark("inside-word", self.is_cut)
            hyphen = self.units_with("hyphen")
            before, earlier = np.maximum(unit - 1, 0), np.maximum(unit - 2, 0)
            joined = (self.unit_end[before] == self.unit_start[unit]) & hyphen[before]
            joined &= (self.unit_end[earlier] == self.unit_start[before]) & ~hyphen[earlier]
            mark("hyphenated", has & found[:, _COLUMN["word"]] & joined & (self.n_units > 2))

            def count(name: str, past: ndarray) -> Int64[ndarray, " prefix"]:
                """Count units of a property from the sentence's first to the one before `past`."""
                sums = np.concatenate([[0], np.cumsum(self.units_with(name))])
                n: ndarray = sums[past] - sums[start]
                return n

            last, past = self.last_unit, self.last_unit + 1
            mark("in-brackets", has & (count("opening", last) > count("closing", past)))
            quotes = count("double", last) % 2 + count("opened", last) - count("closed", past)
            mark("in-quotes", has & (quotes > 0) & ~found[:, _COLUMN["double"]])
            n_words, n_upper = count("word", past), count("upper-first", past)
            mark("title", has & (n_words >= _TITLE_WORDS) & (n_upper >= _TITLE_SHARE * n_words))
        mark("first", self.length == 1)
        mark("first-three", (self.length >= 1) & (self.length <= 3))
        mark("whole", self.is_whole)
        return found[:, : len(SHAPES)]

    def grams(self) -> Grams:
        """Return the grams of all sentences, each where its sentence first has it."""
        # The first prefix whose end reaches a unit's end is where the unit is complete.
        reached = np.searchsorted(self.end, self.unit_end)
        inside = reached < len(self.end)
        inside[inside] = self.sentence[reached[inside]] == self.unit_sentence[inside]
        whole, is_word = self.unit_hashes, self.units_with("word")
        parts, run = [], whole
        for size in range(1, N_GRAM + 1):
            begin, end = np.arange(len(whole) - size + 1), np.arange(size - 1, len(whole))
            run = run if size == 1 else _mix(run[:-1] * np.uint64(3) + whole[size - 1 :])
            keep = is_word[begin] & is_word[end] & inside[end]
            keep &= self.unit_sentence[begin] == self.unit_sentence[end]
            begin, end, code = begin[keep], end[keep], _code(run[keep], GRAM + size - 1)
            parts.append((self.unit_sentence[end], self.length[reached[end]], code, begin, end))
        owner, length, code, begin, end = map(np.concatenate, zip(*parts, strict=True))
        order = np.lexsort((length, code, owner))
        new = np.ones(len(order), bool)
        new[1:] = (np.diff(owner[order]) != 0) | (code[order][1:] != code[order][:-1])
        kept = order[new]
        kept = kept[np.lexsort((code[kept], length[kept], owner[kept]))]
        owner, begin, end = owner[kept], begin[kept], end[kept]
        n_units, origin = end - begin + 1, self.text_starts[owner]
        part = np.minimum(begin[:, None] + np.arange(N_GRAM), max(len(whole) - 1, 0))
        return Grams(
            sentence=owner,
            length=length[kept],
            code=code[kept],
            size=n_units,
            example=np.column_stack(
                [owner + self.first, self.unit_start[begin] - origin, self.unit_end[end] - origin]
            ),
            words=np.where(np.arange(N_GRAM) < n_units[:, None], _code(whole, GRAM)[part], NONE),
        )


def read_blocks(index: Index, types: UnitTypes) -> Iterator[SentenceBlock]:
    """Yield the whole corpus, a block at a time."""
    n = index.sentences.n_sentences
    for first in range(0, n, BLOCK_SENTENCES):
        yield SentenceBlock(index, first, min(BLOCK_SENTENCES, n - first), types)


def _code(numbers: ndarray, kind: int) -> ndarray:
    """Return codes of features, other ones for another kind; never NONE."""
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
"""A word in a larger share of the sentences is not a content word."""

FITTED_SENTENCES = 40_000
"""Sentences from which content words and topics are learned, in runs of RUN_SENTENCES."""
RUN_SENTENCES = 50


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
        n_runs = -(-n // RUN_SENTENCES)
        rng = np.random.default_rng([seed, n])
        runs = np.sort(
            rng.choice(n_runs, min(FITTED_SENTENCES // RUN_SENTENCES, n_runs), replace=False)
        )
        texts = (
            sentence_text(index, row)[0]
            for first in (runs * RUN_SENTENCES).tolist()
            for row in index.sentences.rows(first, min(RUN_SENTENCES, n - first))
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
        codes = _code(np.array([hash_text(word) for word in words], np.uint64), GRAM)
        order = np.argsort(codes)
        tfidf = tfidf[:, order]
        share = tfidf.getnnz(axis=0) / tfidf.shape[0]
        words = [words[place] for place in order]
        return cls(words, codes[order], share, vectorizer.idf_[order], tfidf)


def lookup(known: Shaped[ndarray, " known"], codes: ndarray) -> Int32[ndarray, "..."]:
    """Return where codes are among known ones, which ascend; −1 for those that are not."""
    if not len(known):
        return np.full(codes.shape, -1, np.int32)
    place = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.where(known[place] == codes, place, -1).astype(np.int32)


# The corpus

HASHED = 1024
"""Columns for the units before a word, and for those after it."""
NEIGHBOR_AXES = 50


@dataclass(frozen=True)
class CorpusFeatures:
    """Prefixes with their features, and how common each feature is in the corpus.

    A *row* is one such prefix.
    """

    numbers: Int64[ndarray, " row"]
    """Ascending: the integers that name the prefixes."""
    sentence: Int64[ndarray, " row"]
    length: Int64[ndarray, " row"]
    context: UInt64[ndarray, " row"]
    passage: Int64[ndarray, " row"]
    """Which part of the corpus a prefix is from: about an article."""
    endings: Int32[ndarray, "row ending"]
    """What a prefix ends with, by kind; −1: nothing that recurs."""
    shapes: Bool[ndarray, "row shape"]
    last_words: Int32[ndarray, "row back"]
    """Content words among the last units, the last first; −1: none."""
    gram_slices: Int64[ndarray, "row two"]
    """Which of `grams` a prefix contains: from, to."""
    grams: Int32[ndarray, " gram"]
    word_slices: Int64[ndarray, "row two"]
    """Which of `words` a prefix contains: from, to."""
    words: Int32[ndarray, " word"]
    """Content words of the sentences in order of first occurrence."""
    sample: Int64[ndarray, " sampled"]
    """Rows of the random prefixes."""

    kinds: Int8[ndarray, " feature"]
    """The shapes come last, in order."""
    counts: Int64[ndarray, "feature bin"]
    """Prefixes of the corpus that show a feature, by length."""
    totals: Int64[ndarray, " bin"]
    """Prefixes of the corpus, by length."""
    examples: Int64[ndarray, "feature three"]
    """(sentence, first character, last + 1) of one occurrence of a gram; −1: no gram."""
    content: Int32[ndarray, "feature part"]
    """Content words of a gram; −1: none, or no gram."""
    neighbors: Float32[ndarray, "feature axis"]
    """Unit vectors of last words, from the words before and after them in the corpus."""
    stems: UInt64[ndarray, "feature stem"]
    """Hashes of the stems of last words; 0: none, as of signs."""

    @property
    def bins(self) -> Int64[ndarray, " row"]:
        """The bin of every row's length."""
        return bins_of(self.length)

    @property
    def first_shape(self) -> int:
        """The feature that is the first of SHAPES."""
        return len(self.kinds) - len(SHAPES)

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
    types, n = UnitTypes(), index.sentences.n_sentences
    parts: list[dict[str, ndarray]] = []
    with progress.bar("Corpus", 2 * n, "sentences") as step:
        for block in read_blocks(index, types):
            parts.append(_wanted_rows(block, wanted))
            step(block.n_sentences)
        before = np.cumsum([0, *(len(part["gram"]) for part in parts)]).tolist()
        for part, n_before in zip(parts, before, strict=False):
            part["gram_slices"] += n_before
        rows = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        del parts
        counter = _FeatureCounter(rows)
        for block in read_blocks(index, types):
            counter.count(block)
            step(block.n_sentences)
    words = np.where(rows["gram_size"] == 1, lookup(vocabulary.codes, rows["gram"]), -1)
    n_words = np.concatenate([[0], np.cumsum(words >= 0)])
    features = CorpusFeatures(
        **{name: rows[name] for name in ("numbers", "sentence", "length", "context", "shapes")},
        passage=rows["sentence"] // min(max(n // 20, 1), PASSAGE),
        endings=lookup(counter.codes, rows["endings"]),
        last_words=lookup(vocabulary.codes, rows["last_words"]),
        gram_slices=rows["gram_slices"],
        grams=lookup(counter.codes, rows["gram"]),
        word_slices=n_words[rows["gram_slices"]],
        words=words[words >= 0].astype(np.int32),
        sample=np.searchsorted(rows["numbers"], sample),
        kinds=counter.kinds,
        counts=counter.counts,
        totals=counter.totals,
        examples=counter.examples,
        content=lookup(vocabulary.codes, counter.words),
        neighbors=counter.neighbor_vectors(),
        stems=counter.stems(types),
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
    kept = np.arange(int(lengths.sum()))
    if index.sentences.has_content:
        contents = [part for part in index.sentences.contents() if part is not None]
        kept = kept[np.concatenate(contents)]
    tokens = kept[np.sort(rng.choice(len(kept), min(SAMPLE, len(kept)), replace=False))]
    owner = np.searchsorted(np.cumsum(lengths), tokens, side="right")
    least = 0 if index.manifest.compat == "ff-layers" else 1
    sample = starts[owner] + tokens - (np.cumsum(lengths) - lengths)[owner] + least
    wanted = np.unique(np.concatenate([*found, sample]))
    return wanted[wanted != NO_PREFIX], sample


def _wanted_rows(block: SentenceBlock, wanted: Int64[ndarray, " row"]) -> dict[str, ndarray]:
    """Return what the wanted prefixes of a block show, as codes, and the grams of its sentences."""
    rows = np.flatnonzero(np.isin(block.numbers, wanted, assume_unique=True))
    endings, context, last_words = block.endings()
    grams = block.grams()
    inside = np.isin(grams.sentence, block.sentence[rows])
    place_of = np.concatenate([[0], np.cumsum(inside)])
    # Grams are sorted by (sentence, length): those of a prefix are the first of its sentence.
    most = int(block.length.max(initial=0)) + 2
    keys = grams.sentence * most + grams.length
    first = np.searchsorted(keys, block.sentence[rows] * most)
    past = np.searchsorted(keys, block.sentence[rows] * most + block.length[rows], side="right")
    return {
        "numbers": block.numbers[rows],
        "sentence": block.sentence[rows] + block.first,
        "length": block.length[rows],
        "context": context[rows],
        "shapes": block.shapes()[rows],
        "endings": endings[rows],
        "last_words": last_words[rows],
        "gram_slices": np.stack([place_of[first], place_of[past]], axis=1),
        "gram": grams.code[inside],
        "gram_size": grams.size[inside],
        "gram_example": grams.example[inside],
        "gram_words": grams.words[inside],
    }


class _FeatureCounter:
    """All features that at least three rows, or sentences of rows, share, and the shapes."""

    def __init__(self, rows: dict[str, ndarray]) -> None:
        # The first word of a sentence is capitalized: prefer examples from within one.
        order = np.argsort(rows["gram_example"][:, 1] <= 0, kind="stable")
        endings = rows["endings"].T
        codes = np.concatenate([endings.reshape(-1), rows["gram"][order]])
        kinds = np.concatenate(
            [np.repeat(np.arange(GRAM), endings.shape[1]), rows["gram_size"][order] + GRAM - 1]
        )
        distinct, first, n = np.unique(codes, return_index=True, return_counts=True)
        recurs = (n >= MIN_TRIGGERS) & (distinct != NONE)
        self.codes = distinct[recurs]
        """Ascending; the shapes, which come after, have none."""
        shapes = np.arange(SHAPE, SHAPE + len(SHAPES))
        self.kinds = np.concatenate([kinds[first[recurs]], shapes]).astype(np.int8)
        n_features, is_gram = len(self.kinds), (self.kinds >= GRAM) & (self.kinds < SHAPE)
        which = order[first[recurs][is_gram[: len(self.codes)]] - endings.size]
        self.examples = np.full((n_features, 3), -1)
        self.examples[is_gram] = rows["gram_example"][which]
        self.words = np.zeros((n_features, N_GRAM), np.uint64)
        self.words[is_gram] = rows["gram_words"][which]
        self.counts = np.zeros((n_features, len(BINS)), np.int64)
        self.totals = np.zeros(len(BINS), np.int64)
        self._neighbors: Any = 0

    def count(self, block: SentenceBlock) -> None:
        """Count the prefixes of a block."""
        bins = bins_of(block.length)
        self.totals += np.bincount(bins, minlength=len(BINS))
        for feature, shown in enumerate(block.shapes().T, start=len(self.codes)):
            self.counts[feature] += np.bincount(bins[shown], minlength=len(BINS))
        for codes in block.endings()[0].T:
            found = lookup(self.codes, codes)
            known = found >= 0
            np.add.at(self.counts, (found[known], bins[known]), 1)
        grams = block.grams()
        found = lookup(self.codes, grams.code)
        known = found >= 0
        # A gram is in every prefix from the first that contains it to the sentence's longest.
        longest = np.zeros(block.n_sentences, np.int64)
        np.maximum.at(longest, block.sentence, block.length)
        longest, least = longest[grams.sentence[known]], grams.length[known]
        for bin, low in enumerate(BINS):
            high = BINS[bin + 1] if bin + 1 < len(BINS) else np.iinfo(np.int64).max
            n = np.minimum(longest + 1, high) - np.maximum(least, low)
            np.add.at(self.counts[:, bin], found[known], np.maximum(n, 0))
        self._count_neighbors(block)

    def _count_neighbors(self, block: SentenceBlock) -> None:
        """Count the units, hashed, before and after each last word."""
        from scipy.sparse import csr_matrix

        hashes = block.unit_hashes
        entry = lookup(self.codes, _code(hashes, LAST_WORD))
        column = (hashes % np.uint64(HASHED)).astype(np.int64)
        left = np.flatnonzero(block.unit_sentence[1:] == block.unit_sentence[:-1])
        rows = np.concatenate([entry[left + 1], entry[left]])
        columns = np.concatenate([column[left], column[left + 1] + HASHED])
        known = rows >= 0
        self._neighbors = self._neighbors + csr_matrix(
            (np.ones(known.sum(), np.float32), (rows[known], columns[known])),
            (len(self.kinds), 2 * HASHED),
        )

    def neighbor_vectors(self) -> Float32[ndarray, "feature axis"]:
        """Return a vector of each last word: counts of its neighbors, reduced by an SVD."""
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfTransformer
        from sklearn.preprocessing import normalize
        from threadpoolctl import threadpool_limits

        rows = np.flatnonzero(self.kinds == LAST_WORD)
        n_axes = min(NEIGHBOR_AXES, len(rows) - 1)
        if n_axes < 1:
            return np.zeros((len(self.kinds), 1), np.float32)
        found = np.zeros((len(self.kinds), n_axes), np.float32)
        with threadpool_limits(1):  # the same sums in the same order, on any machine
            weighted = TfidfTransformer(sublinear_tf=True).fit_transform(self._neighbors[rows])
            reduced = TruncatedSVD(n_axes, random_state=0).fit_transform(weighted)
        found[rows] = normalize(reduced)
        return found

    def stems(self, types: UnitTypes) -> UInt64[ndarray, "feature stem"]:
        """Return the stems of each last word."""
        entries = lookup(self.codes, _code(np.array(types.hashes, np.uint64), LAST_WORD))
        found = np.zeros((len(self.kinds), N_STEMS), np.uint64)
        stems = np.array(types.stems, np.uint64).reshape(-1, N_STEMS)
        found[entries[entries >= 0]] = stems[entries >= 0]
        return found

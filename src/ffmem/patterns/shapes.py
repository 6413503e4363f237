"""What a prefix looks like at its end, whatever its words: shape, sign, position.

Every shape is one bit. A prefix may end inside a word (`Wisn` of `Wisniewski`): the shape is of
what it shows, and `inside-word` says so.
"""

import unicodedata
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, UInt32
from numpy import ndarray

from ffmem.patterns.units import Units


class Shape(NamedTuple):
    """One thing that a prefix can look like."""

    name: str
    rule: str
    description: str
    about_word: bool
    """Whether it is about the last word, which then says nothing of the topic."""


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
    Shape("comma", "punctuation", "ends with a comma", False),
    Shape("stop", "punctuation", "ends with a full stop, question or exclamation mark", False),
    Shape("opening", "punctuation", "ends with an opening bracket", False),
    Shape("closing", "punctuation", "ends with a closing bracket", False),
    Shape("quote", "punctuation", "ends with a quotation mark or apostrophe", False),
    Shape("dash", "punctuation", "ends with a dash or hyphen", False),
    Shape("colon", "punctuation", "ends with a colon or semicolon", False),
    Shape("symbol", "punctuation", "ends with a symbol (%, /, $)", False),
    Shape("first", "position", "the first token of a sentence", False),
    Shape("first-three", "position", "among the first three tokens of a sentence", False),
    Shape("whole", "position", "a whole sentence", False),
    Shape("in-brackets", "punctuation", "inside brackets", False),
    Shape("in-quotes", "punctuation", "inside quotation marks", False),
    Shape("title", "casing", "mostly capitalised words, as in titles and lists of names", False),
)
"""In the order of their bits."""

_BIT = {shape.name: 1 << bit for bit, shape in enumerate(SHAPES)}
_HYPHENS = (0x2D, 0x2010, 0x2011)
_TITLE_WORDS, _TITLE_SHARE = 4, 0.75


class Ends(NamedTuple):
    """Where prefixes end: one row per prefix."""

    text: Int64[ndarray, " prefix"]
    """Which of the texts it begins."""
    place: Int64[ndarray, " prefix"]
    """Its characters end before this one."""
    unit: Int64[ndarray, " prefix"]
    """Its last unit, perhaps cut; meaningless where it has none."""
    n_units: Int64[ndarray, " prefix"]
    length: Int64[ndarray, " prefix"]
    """p, in tokens."""
    is_whole: Bool[ndarray, " prefix"]
    """Whether it is all of its sentence."""


Kinds = dict[str, Int64[ndarray, " place"]]
"""How many characters of a kind stand before every place."""


def shapes(units: Units, ends: Ends) -> UInt32[ndarray, " prefix"]:
    """Return the shapes of prefixes, a bit each."""
    found = np.zeros(len(ends.text), np.uint32)

    def mark(name: str, shown: Bool[ndarray, " prefix"]) -> None:
        found[shown] |= np.uint32(_BIT[name])

    kinds = _kinds(units)
    looks = (_last(units, ends, kinds), _whole(units, ends, kinds))
    for name, shown in (pair for look in looks for pair in look.items()):
        mark(name, shown & (ends.n_units > 0))
    mark("first", ends.length == 1)
    mark("first-three", (ends.length >= 1) & (ends.length <= 3))
    mark("whole", ends.is_whole)
    return found


def _last(units: Units, ends: Ends, kinds: Kinds) -> dict[str, Bool[ndarray, " prefix"]]:
    """Return what the last unit looks like."""
    unit = np.maximum(ends.unit, 0)
    start, end = units.starts[unit], np.minimum(units.ends[unit], ends.place)
    size = end - start

    def count(name: str) -> Int64[ndarray, " prefix"]:
        n: ndarray = kinds[name][end] - kinds[name][start]
        return n

    head, second = units.characters[start], units.characters[np.minimum(start + 1, end - 1)]
    upper, lower, digits = count("upper"), count("lower"), count("digit")
    first_upper = kinds["upper"][start + 1] > kinds["upper"][start]
    number = digits == size
    before, earlier = (units.characters[np.maximum(start - back, 0)] for back in (1, 2))
    joined = np.isin(before, _HYPHENS) & ~np.isin(earlier, (*_HYPHENS, 0x20, 0x0A))
    is_word = units.is_word[unit]
    found = {
        "year": number
        & (size == 4)
        & ((head == ord("1")) | ((head == ord("2")) & (second == ord("0")))),
        "number": number,
        "mixed": (digits > 0) & (upper + lower > 0),
        "roman": (count("roman") == size) & (size >= 2),
        "capitals": (upper == size) & (size >= 2),
        "capitalised": first_upper & (lower > 0) & (upper == 1) & (ends.n_units > 1),
        "camel": (upper > first_upper) & (lower > 0) & (digits == 0),
        "hyphenated": joined & is_word,
        "inside-word": units.ends[unit] > ends.place,
    }
    return found | {
        name: ~is_word & (count(name) > 0)
        for name in ("comma", "stop", "opening", "closing", "quote", "dash", "colon", "symbol")
    }


def _whole(units: Units, ends: Ends, kinds: Kinds) -> dict[str, Bool[ndarray, " prefix"]]:
    """Return what the prefix looks like as a whole."""
    unit = np.maximum(ends.unit, 0)
    first, start = units.first[ends.text], units.starts[unit]

    def between(name: str, end: Int64[ndarray, " prefix"]) -> Int64[ndarray, " prefix"]:
        n: ndarray = kinds[name][end] - kinds[name][first]
        return n

    depth = between("opening", start) - between("closing", ends.place)
    quotes = between("double", start) % 2 + between("opened", start) - between("closed", ends.place)
    ends_quote = units.characters[start] == ord('"')
    upper = kinds["upper"]
    capital = units.is_word & (upper[units.starts + 1] > upper[units.starts])
    words = np.concatenate([[0], np.cumsum(units.is_word)])
    capitals = np.concatenate([[0], np.cumsum(capital)])
    begin = ends.unit + 1 - ends.n_units
    n_words = words[ends.unit + 1] - words[begin]
    n_capitals = capitals[ends.unit + 1] - capitals[begin]
    return {
        "in-brackets": depth > 0,
        "in-quotes": (quotes > 0) & ~ends_quote,
        "title": (n_words >= _TITLE_WORDS) & (n_capitals >= _TITLE_SHARE * n_words),
    }


def _kinds(units: Units) -> Kinds:
    """Return the running counts of every kind of character."""
    distinct, inverse = np.unique(units.characters, return_inverse=True)
    of = [_character(code) for code in distinct.tolist()]
    names = ("upper", "lower", "digit", "roman", "comma", "stop", "opening", "closing", "quote")
    return {
        name: np.concatenate(
            [[0], np.cumsum(np.array([name in kinds for kinds in of])[inverse], dtype=np.int64)]
        )
        for name in (*names, "dash", "colon", "symbol", "double", "opened", "closed")
    }


@cache
def _character(code: int) -> frozenset[str]:
    """Return what a character counts as."""
    character, kind = chr(code), unicodedata.category(chr(code))
    by_category = {"Lu": "upper", "Lt": "upper", "Ll": "lower", "Nd": "digit", "Ps": "opening"}
    by_category |= {"Pe": "closing", "Pi": "quote", "Pf": "quote", "Pd": "dash"}
    found = {by_category[kind]} if kind in by_category else set()
    signs = {"comma": ",،、，", "stop": ".!?…。！？।", "colon": ":;：；", "quote": "\"'`"}
    found |= {name for name, characters in signs.items() if character in characters}
    if kind[0] in "SP" and not found:
        found.add("symbol")
    others = {"roman": "IVXLC", "double": '"', "opened": "“«„", "closed": "”»"}
    return frozenset(found | {name for name, listed in others.items() if character in listed})

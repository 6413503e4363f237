"""Texts in units: words, and signs one by one; each with a number that stands for its characters.

A unit is a run of letters, digits and marks, or one other character that is no space. Scripts that
are written without spaces (Chinese, Japanese) give one unit per character. Everything is without
case. Units are compared by 64-bit hashes of what they hold, so that millions of them are arrays:

    hash(characters a … b−1) = Σ x(i)·Bⁱ · B⁻ᵃ mod 2⁶⁴    from one running sum, for any a and b

Two different texts of one hash are not to be expected below some billion texts.
"""

import unicodedata
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Bool, Int64, UInt64
from numpy import ndarray

SPACE, SIGN, WORD, ALONE = 0, 1, 2, 3
"""What a character is: between units, a unit by itself, part of a word, a word by itself."""

_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_ALONE = (
    (0x3040, 0x30FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)


@dataclass(frozen=True)
class Units:
    """Some texts in a row, cut into units. Places count characters of all texts together."""

    characters: ndarray
    """Code points (uint32) as they stand; a line end after every text."""
    first: Int64[ndarray, " text"]
    """Place of a text's first character."""
    starts: Int64[ndarray, " unit"]
    ends: Int64[ndarray, " unit"]
    is_word: Bool[ndarray, " unit"]
    before: Int64[ndarray, " place"]
    """How many units start before a place; as many places as characters, and one."""
    sums: UInt64[ndarray, " place"]
    inverses: UInt64[ndarray, " place"]
    """B to the power of minus the place."""

    @classmethod
    def of(cls, texts: list[str]) -> "Units":
        """Return the units of some texts."""
        joined = "".join(f"{text}\n" for text in texts)
        characters = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
        first = np.cumsum([0, *(len(text) + 1 for text in texts)], dtype=np.int64)[:-1]
        distinct, inverse = np.unique(characters, return_inverse=True)
        kinds = np.array([_kind(code) for code in distinct.tolist()], np.int8)[inverse]
        folded = np.array([_folded(code) for code in distinct.tolist()], np.uint64)
        word = kinds == WORD
        begins = (kinds != SPACE) & ~(word & np.concatenate([[False], word[:-1]]))
        starts = begins.nonzero()[0]
        ends_word = word & ~np.concatenate([word[1:], [False]])
        ends = ((ends_word | (kinds == SIGN) | (kinds == ALONE)).nonzero()[0]) + 1
        terms = mixed(folded)[inverse] * _powers(_BASE, len(characters))[:-1]
        return cls(
            characters,
            first,
            starts,
            ends,
            kinds[starts] >= WORD,
            np.concatenate([[0], np.cumsum(begins, dtype=np.int64)]),
            np.concatenate([[np.uint64(0)], np.cumsum(terms, dtype=np.uint64)]),
            _powers(_INVERSE, len(characters)),
        )

    def hashes(
        self, starts: Int64[ndarray, " span"], ends: Int64[ndarray, " span"]
    ) -> UInt64[ndarray, " span"]:
        """Return the number of the characters from one place to another, without case."""
        return mixed((self.sums[ends] - self.sums[starts]) * self.inverses[starts])

    def text(self, start: int, end: int) -> str:
        """Return the characters from one place to another as they stand."""
        found: str = self.characters[start:end].tobytes().decode("utf-32-le", "surrogatepass")
        return found


def mixed(numbers: UInt64[ndarray, " *many"]) -> UInt64[ndarray, " *many"]:
    """Return numbers whose every bit depends on every bit of the given ones (splitmix64)."""
    numbers = numbers + _BASE
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: ndarray = numbers ^ (numbers >> np.uint64(31))
    return found


def _powers(base: np.uint64, n: int) -> UInt64[ndarray, " power"]:
    """Return the powers 0 … n of a number."""
    factors = np.full(n + 1, base)
    factors[0] = 1
    return factors.cumprod(dtype=np.uint64)


@cache
def _kind(code: int) -> int:
    kind = unicodedata.category(chr(code))
    if kind[0] in "LN" or kind in {"Co", "Mn", "Mc"}:
        return ALONE if any(low <= code <= high for low, high in _ALONE) else WORD
    return SPACE if kind[0] in "ZC" else SIGN


@cache
def _folded(code: int) -> int:
    """Return a character without case, where that is one character."""
    for form in (chr(code).casefold(), chr(code).lower()):
        if len(form) == 1:
            return ord(form)
    return code

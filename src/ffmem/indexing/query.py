r"""Queries: words in a row, a token, or a regular expression.

A word is what SQLite's full-text index takes for one: letters, numbers and marks in a row. A token
is found with or without its leading space, in any case, also as displayed (`␣the`).

A regular expression is matched against prefixes of a sentence. If it looks only at what it matches,
it matches every prefix from some length on, which a binary search finds:

    text[:e] matches, e ≤ f   ⇒   text[:f] matches

`\b`, `\B`, `\Z` and `$` look one character further, so they may hold on a single prefix. Without
them, the expression matches wherever it did with them, which rules out shorter prefixes. An
expression that looks ahead in any other way is tried on every prefix.

Anyone can send an expression to the explorer, so it is bounded before it is compiled: `regex`
unrolls `{n}`, at 300 bytes for each repeat of each character, and has no time limit while it does;
`(?R)` calls itself until memory is full. A time limit covers the matching.
"""

import re
import time
import unicodedata
from bisect import bisect_left
from itertools import groupby
from typing import Any, NamedTuple

from ffmem.errors import FfmemError
from ffmem.indexing.memory import from_visible

SECONDS = 20.0
"""Time limit of a regular expression over a whole index."""

MAX_CHARACTERS = 1_000
"""Length of an expression."""

MAX_UNROLLED = 10_000
"""Characters, escapes and sets of an expression with every `{n}` written out."""

MAX_NESTED = 50
"""Groups within groups."""


class Query(NamedTuple):
    """What to search for, and how much to examine."""

    text: str
    regex: bool = False
    prefix: bool = False
    """Whether the last word may be incomplete."""
    max_triggers: int | None = None
    """Triggers to examine, in corpus order and by whole sentences; None for all."""
    seconds: float | None = None
    """Time limit of a regular expression; None for SECONDS."""

    def expression(self) -> "Expression | None":
        """Return the regular expression, if the query is one."""
        return Expression(self.text, self._seconds()) if self.regex else None

    def literal(self) -> "Expression":
        """Return the text as an expression, for texts without words: FTS5 finds only words."""
        return Expression(re.escape(self.text), self._seconds())

    def phrase(self) -> str:
        """Return the query for FTS5: quoted, so that it sees no operators."""
        phrase = '"' + self.text.replace("\0", " ").replace('"', '""') + '"'
        return f"{phrase} *" if self.prefix and ends_in_word(self.text) else phrase

    def check(self) -> None:
        """Raise if nothing can be searched for this."""
        if not self.text.strip():
            raise FfmemError("The query is empty. Use a word, a phrase or a token.")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise FfmemError(
                f"The query {self.text!r} contains a lone surrogate (half a character), which no"
                " text contains. Search for whole characters."
            )

    def _seconds(self) -> float:
        return SECONDS if self.seconds is None else self.seconds


class Expression:
    """A regular expression with a time limit over all its searches."""

    def __init__(self, text: str, seconds: float) -> None:
        import regex  # unlike `re`, it has a timeout

        self.text = text
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        loose = check_expression(text)
        try:
            # Without the cache of `regex`, which keeps hundreds of expressions forever.
            self._compiled = regex.compile(text, cache_pattern=False)
            # None: it must be tried on every prefix.
            self._loose = None if loose is None else regex.compile(loose, cache_pattern=False)
        except regex.error as error:
            raise FfmemError(f"{text!r} is not a valid regular expression: {error}.") from None
        self._has_ends = loose != text

    def search(self, text: str, end: int | None = None) -> Any:
        """Return the first match within the first `end` characters, or None."""
        return self._search(self._compiled, text, end)

    def may_match(self, text: str) -> bool:
        """Return False if no prefix of a text matches."""
        return self._loose is None or self._search(self._loose, text, None) is not None

    def matching_ends(self, text: str, ends: list[int]) -> list[int]:
        """Return those of the ascending `ends` for which text[:end] matches."""
        if self._loose is None:
            return [end for end in ends if self.search(text, end)]
        first = bisect_left(
            ends, True, key=lambda end: self._search(self._loose, text, end) is not None
        )
        if not self._has_ends:
            return ends[first:]
        matching: list[int] = []
        for place, end in enumerate(ends[first:], first):
            match = self.search(text, end)
            if match is None:
                continue
            if match.end() < end - 1:  # `$` may stand before a last line end
                return matching + ends[place:]
            matching.append(end)
        return matching

    def _search(self, compiled: Any, text: str, end: int | None) -> Any:
        left = self._until - time.monotonic()
        try:
            if left > 0:
                return compiled.search(text, endpos=end, timeout=left)
        except TimeoutError:
            pass
        raise FfmemError(
            f"The regular expression {self.text!r} takes too long: stopped after"
            f" {self._seconds:g} seconds. Make it simpler, or search for words."
        )


_SYNTAX = re.compile(
    r"""(?P<end>\\[bBZ]|\$)
    |(?P<one>\\[dDwWsSAtnrfv]|\\\W|\\[pPN]\{[\w :=&./^-]*\}           # escape
        |\[\^?\]?(?:\\.|\[:\^?[a-zA-Z]+:\]|[^\]\[\\])*\]              # set
        |[^\\\[(){*+?$|])                                             # literal, `.` or `^`
    |(?P<flags>\(\?[aims]+\))
    |(?P<open>\((?:\?:|(?!\?)))
    |(?P<special>\(\?(?:[=!>]|<[=!]|P?<\w+>|[aims]+:))                # other group, lookaround
    |(?P<close>\))
    |(?P<count>\{(?P<least>[0-9]*)(?:,(?P<most>[0-9]*))?\}\??)
    |(?P<repeat>[*+?]\??)
    |(?P<either>\|)
    |(?P<reference>\\.|\(\?P=\w+\))
    |(?P<unknown>\(\?.?.?|\[(?=.*\])|\{[0-9]*[deis<][^}]*\}?)          # other group or set, fuzzy
    |.""",
    re.VERBOSE | re.DOTALL,
)


def check_expression(text: str) -> str | None:
    r"""Return an expression without its `\b`, `\B`, `\Z` and `$`; None if it looks ahead otherwise.

    The result matches wherever the expression does. Raises if compiling the expression could take
    much time or memory, and on syntax that this function might parse differently from `regex`,
    such as comments and sets within sets: a count could hide there.
    """
    if len(text) > MAX_CHARACTERS:
        raise FfmemError(
            f"The regular expression has {len(text):,} characters; at most {MAX_CHARACTERS:,} are"
            " allowed. Make it shorter, or search for words."
        )
    sizes = [0]  # of the expression, and of each group that is open here
    last_size = 0  # of what a count would repeat
    looks_ahead = False
    loose: list[str] = []
    last = ""
    for part in _SYNTAX.finditer(text):
        kind = part.lastgroup or "stray"
        if kind == "unknown":
            raise FfmemError(
                f"The regular expression {text!r} contains {part[0]!r}, which searches do not"
                " support. Use plain groups, sets, repeats, lookarounds and the flags a, i, m and"
                " s, and put a backslash before a literal bracket."
            )
        if kind in ("open", "special"):
            sizes.append(0)
        elif kind == "close" and len(sizes) > 1:
            last_size = 1 + sizes.pop()
            sizes[-1] += last_size
        elif kind == "count":
            sizes[-1] += last_size * max(int(part["least"] or 0), int(part["most"] or 0))
        elif kind != "flags":
            last_size = 1
            sizes[-1] += 1
        if sizes[-1] > MAX_UNROLLED or len(sizes) > MAX_NESTED:
            raise FfmemError(
                f"The regular expression {text!r} is too large: at most {MAX_NESTED} nested"
                f" groups and {MAX_UNROLLED:,} characters once repeats are expanded. Use smaller"
                " counts, or * and +."
            )
        if kind == "count" and not part["least"]:
            kind = "stray"
        if kind in ("count", "repeat"):  # of nothing, of an end, or possessive
            looks_ahead |= last not in ("one", "close")
        looks_ahead |= kind in ("special", "reference", "stray")
        looks_ahead |= kind == "flags" and (part.start() > 0 or part[0] != "(?i)")
        if kind != "end":
            loose.append(part[0])
        last = kind
    return None if looks_ahead else "".join(loose)


def has_word(text: str) -> bool:
    """Return whether a text contains a word."""
    return any(map(_in_word, text))


def ends_in_word(text: str) -> bool:
    """Return whether a text ends in a word, which the user may still be typing."""
    return _in_word(text[-1])


def count_words(text: str) -> int:
    """Return how many words a text has."""
    return sum(inside for inside, _ in groupby(text, _in_word))


def end_of_word(text: str, n: int) -> int:
    """Return where the n-th word of a text ends, or the end of the text if it has fewer."""
    place = 0
    for inside, characters in groupby(text, _in_word):
        place += sum(1 for _ in characters)
        n -= inside
        if n == 0:
            return place
    return len(text)


def token_forms(query: str) -> set[str]:
    """Return the tokens that match a query, casefolded."""
    query = from_visible(query)
    return {form.casefold() for form in (query, query.strip(), f" {query.strip()}")}


def token_beginnings(query: str) -> set[str]:
    """Return what tokens may begin with if the user is still typing the query, casefolded."""
    query = from_visible(query)
    return {form.casefold() for form in (query, query.lstrip(), f" {query.lstrip()}")}


def end_of_range(prefix: str) -> str:
    """Return the smallest text that sorts after every text with the given prefix."""
    stem = prefix.rstrip("\U0010ffff")
    if not stem:
        return prefix * 2
    following = ord(stem[-1]) + 1
    if following == 0xD800:  # surrogates, U+D800 to U+DFFF, are in no text
        following = 0xE000
    return stem[:-1] + chr(following)


def _in_word(character: str) -> bool:
    kind = unicodedata.category(character)
    return kind[0] in "LN" or kind in {"Co", "Mn", "Mc"}

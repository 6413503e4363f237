r"""What a search looks for: words in a row, a token, or a regular expression.

A word is what SQLite's full-text index takes for one: letters, numbers and marks in a row. A token
is found with or without its leading space, in any case, also as the screen shows it (`␣the`).

A regular expression is matched against prefixes of a sentence. One that looks only at what it
matches holds for every prefix from some length on, which a binary search finds:

    text[:e] matches, e ≤ f   ⇒   text[:f] matches

`\b`, `\B` and `$` look one character further, so that they may hold for a single prefix. Without
them the expression matches wherever it did with them, so no shorter prefix needs a look. An
expression that looks ahead in any other way is tried on every prefix.

Anyone can send an expression to the explorer, so `check_cost` bounds it before it is compiled:
`regex` unrolls `{n}`, at 300 bytes for each repeat of each character, and no time limit applies
while it does; `(?R)` calls itself until memory is full. A time limit covers the matching.
"""

import re
import time
import unicodedata
from bisect import bisect_left
from itertools import groupby
from typing import Any, NamedTuple

from ffmem.errors import FfmemError
from ffmem.indexing.memory import from_visible
from ffmem.indexing.store import Index

SECONDS = 20.0
"""Time limit of a regular expression over a whole index."""

MAX_CHARACTERS = 1_000
"""Characters of an expression."""

MAX_UNROLLED = 10_000
"""Characters, escapes and sets of an expression once every `{n}` is written out."""

MAX_NESTED = 50
"""Groups within groups."""

EXCERPT = 40
"""Characters to show on each side of a match."""


class Query(NamedTuple):
    """What to search for, and how much to look at."""

    text: str
    regex: bool = False
    prefix: bool = False
    """Whether the last word may be the beginning of one."""
    most: int | None = None
    """Triggers to look at, in corpus order and by whole sentences; None: all."""
    seconds: float | None = None
    """Time limit of a regular expression; None: SECONDS."""

    def expression(self) -> "Expression | None":
        """Return the regular expression, if it is one."""
        return Expression(self.text, self._seconds()) if self.regex else None

    def literal(self) -> "Expression":
        """Return the text as an expression, for text without words: FTS5 sees words only."""
        return Expression(re.escape(self.text), self._seconds())

    def check(self, layer: int | None, index: Index) -> None:
        """Raise if this cannot be searched for in an index, or in one layer of it."""
        if not self.text.strip():
            raise FfmemError("The query is empty. Give a word, a phrase or a token.")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise FfmemError(
                f"The query {self.text!r} contains half a character (a lone surrogate), which no"
                " text does. Search for whole characters."
            )
        if layer is not None:
            index.layout.check_layer(layer)

    def _seconds(self) -> float:
        return SECONDS if self.seconds is None else self.seconds


class PrefixRange(NamedTuple):
    """Which prefixes match: all from a length on, and some shorter ones."""

    least: int | None
    """Length from which on all match; None if there is none."""
    single: list[int]


class Expression:
    """A regular expression with a time limit over all its searches."""

    def __init__(self, text: str, seconds: float) -> None:
        import regex  # unlike `re`, it can be stopped

        self.text = text
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        check_cost(text)
        loose = without_ends(text)
        try:
            # Not in the cache of `regex`, which keeps hundreds of expressions forever.
            self._compiled = regex.compile(text, cache_pattern=False)
            # None: it must be tried on every prefix.
            self._loose = None if loose is None else regex.compile(loose, cache_pattern=False)
        except regex.error as error:
            raise FfmemError(f"{text!r} is not a valid regular expression: {error}.") from None
        self._looks_only_at_itself = loose == text

    def search(self, text: str, end: int | None = None) -> Any:
        """Return the first match within the first `end` characters, or None."""
        return self._search(self._compiled, text, end)

    def possible(self, text: str) -> bool:
        """Whether any prefix of a text can match."""
        return self._loose is None or self._search(self._loose, text, None) is not None

    def prefix_range(self, text: str, ends: list[int]) -> PrefixRange:
        """Return which prefixes of a text match, of these lengths in ascending order."""
        if self._loose is None:
            return PrefixRange(None, [end for end in ends if self.search(text, end)])
        first = bisect_left(
            ends, True, key=lambda end: self._search(self._loose, text, end) is not None
        )
        if self._looks_only_at_itself:
            return PrefixRange(ends[first] if first < len(ends) else None, [])
        single: list[int] = []
        for end in ends[first:]:
            match = self.search(text, end)
            if match is None:
                continue
            if match.end() < end - 1:  # `$` may stand before a last line end
                return PrefixRange(end, single)
            single.append(end)
        return PrefixRange(None, single)

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
    r"""\\(?:[pPN]\{[\w :=&./^-]*\}|.)                        # escape
    |\[\^?\]?(?:\\.|\[:\^?[a-zA-Z]+:\]|[^\]\[\\])*\]          # set
    |(?P<flags>\(\?[aims]+\))
    |\(\?P=\w+\)                                              # reference to a group
    |(?P<open>\((?:\?(?:[:=!>]|<[=!]|P?<\w+>|[aims]+:)|(?!\?)))
    |(?P<close>\))
    |\{(?P<least>[0-9]*)(?:,(?P<most>[0-9]*))?\}              # repeat
    |(?P<unknown>\(\?.?.?|\[(?=.*\])|\{[0-9]*[deis<][^}]*\}?)  # other group or set, fuzzy match
    |.""",
    re.VERBOSE | re.DOTALL,
)


def check_cost(text: str) -> None:
    """Raise if an expression could take much time or memory before it matches anything.

    If this function parsed an expression differently from `regex`, a count could hide from it; so
    whatever would let them differ, such as comments and sets within sets, is rejected too.
    """
    if len(text) > MAX_CHARACTERS:
        raise FfmemError(
            f"The regular expression has {len(text):,} characters; at most {MAX_CHARACTERS:,} are"
            " allowed. Make it shorter, or search for words."
        )
    sizes = [0]  # of the expression, and of each group that is open here
    last = 0  # size of what a count would repeat
    for part in _SYNTAX.finditer(text):
        if part["unknown"]:
            raise FfmemError(
                f"The regular expression {text!r} contains {part[0]!r}, which searches do not"
                " support. Use plain groups, sets, repeats, lookarounds and the flags a, i, m and"
                " s, and put a backslash before a literal bracket."
            )
        if part["open"]:
            sizes.append(0)
        elif part["close"] and len(sizes) > 1:
            last = 1 + sizes.pop()
            sizes[-1] += last
        elif part["least"] is not None:
            count = max(int(part["least"] or 0), int(part["most"] or 0))
            sizes[-1] += last * count
        elif not part["flags"]:
            last = 1
            sizes[-1] += last
        if sizes[-1] > MAX_UNROLLED or len(sizes) > MAX_NESTED:
            raise FfmemError(
                f"The regular expression {text!r} is too large: at most {MAX_NESTED} nested"
                f" groups and {MAX_UNROLLED:,} characters once repeats are written out. Use smaller"
                " counts, or * and +."
            )


_PARTS = re.compile(
    r"""(?P<end>\\[bBZ]|\$)              # looks one character further
    |(?P<times>\{\d+(?:,\d*)?\}\??|[*+?]\??)
    |\\[dDwWsSAtnrfv]|\\[^\w]          # one character, or the beginning of the text
    |\[\^?\]?(?:\\[dDwWsStnrfvb]|\\[^\w]|[^\]\[\\])*\]
    |(?P<open>\((?:\?:)?|\|)
    |[^\\\[({*+?$|]                    # itself
    """,
    re.VERBOSE | re.DOTALL,
)
_IGNORING_CASE = "(?i)"


def without_ends(expression: str) -> str | None:
    r"""Return an expression without its `\b`, `\B`, `\Z` and `$`; None if it looks ahead otherwise.

    What the expression matches, the result matches too.
    """
    flag = _IGNORING_CASE if expression.startswith(_IGNORING_CASE) else ""
    place, kept, last = len(flag), [flag], ""
    while place < len(expression):
        part = _PARTS.match(expression, place)
        if part is None:
            return None
        # `(?=`, or a repeat of a repeat, which gives nothing back.
        if part["times"] and last in ("", "open", "end", "times"):
            return None
        if not part["end"]:
            kept.append(part[0])
        last = part.lastgroup or "one"
        place = part.end()
    return "".join(kept)


def has_word(text: str) -> bool:
    """Whether a text has a word."""
    return any(map(_in_word, text))


def ends_in_word(text: str) -> bool:
    """Whether a text ends in a word, which may continue."""
    return _in_word(text[-1])


def count_words(text: str) -> int:
    """Return how many words a text has."""
    return sum(inside for inside, _ in groupby(text, _in_word))


def end_of_word(text: str, n: int) -> int:
    """Return where the n-th word of a text ends; the end of the text if it has fewer."""
    place = 0
    for inside, characters in groupby(text, _in_word):
        place += sum(1 for _ in characters)
        n -= inside
        if n == 0:
            return place
    return len(text)


def token_forms(query: str) -> set[str]:
    """Return the tokens that a query names, casefolded."""
    query = from_visible(query)
    return {form.casefold() for form in (query, query.strip(), f" {query.strip()}")}


def token_beginnings(query: str) -> set[str]:
    """Return the prefixes of tokens that a query may be the beginning of, casefolded."""
    query = from_visible(query)
    return {form.casefold() for form in (query, query.lstrip(), f" {query.lstrip()}")}


def end_of_range(prefix: str) -> str:
    """Return the smallest text that sorts after every text with a prefix."""
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


class Excerpt(NamedTuple):
    """A match with the text around it: in a token, or in a sentence."""

    before: str
    match: str
    after: str
    rest: str
    """What follows the prefix in its sentence."""

    @property
    def bracketed(self) -> str:
        """The excerpt as text, with the match in brackets."""
        return f"{self.before}[{self.match}]{self.after}{self.rest}"

    @property
    def plain(self) -> str:
        """The excerpt as text."""
        return "".join(self)


def excerpt_of_sentence(text: str, span: tuple[int, int], end: int) -> Excerpt:
    """Return a match in a sentence, of which the first `end` characters are the prefix."""
    begin, past = span
    stop = min(past + EXCERPT, len(text))
    within = max(past, min(end, stop))
    left = "…" if begin > EXCERPT else ""
    right = "…" if stop < len(text) else ""
    after, rest = text[past:within], text[within:stop]
    if rest:
        rest += right
    else:
        after += right
    return Excerpt(left + text[max(0, begin - EXCERPT) : begin], text[begin:past], after, rest)


def excerpt_of_token(token: str, query: str, expression: Expression | None) -> Excerpt:
    """Return a token with the part of it that matches."""
    if expression is not None:
        begin, end = expression.search(token).span()
        return Excerpt(token[:begin], token[begin:end], token[end:], "")
    end = len(token)
    if token.casefold() not in token_forms(query):
        folded = token.casefold()
        begun = max((form for form in token_beginnings(query) if folded.startswith(form)), key=len)
        end = next(n for n in range(len(token) + 1) if len(token[:n].casefold()) >= len(begun))
    return Excerpt("", token[:end], token[end:], "")

r"""A regular expression over the beginnings of a text, that gives up when it takes too long.

A prefix is a beginning of its sentence. An expression that looks only at what it matches holds on
every beginning from some length on, and halving finds that length:

    text[:e] matches, e ≤ f   ⇒   text[:f] matches

`\b`, `\B` and `$` look one character further, so that they may hold at the end of one beginning
alone; without them the expression holds wherever it did with them, and no shorter beginning needs
a look. Any other sign that looks ahead is tried on every beginning.

Anybody may send an expression to the explorer, so `check_cost` bounds it before it is compiled:
`regex` unrolls `{n}`, at 300 bytes for each repeat of each character, and no time limit acts while
it does; `(?R)` calls itself until memory is full. The time limit covers the rest.
"""

import re
import time
from bisect import bisect_left
from typing import Any, NamedTuple

from ffmem.errors import FfmemError

MOST_CHARACTERS = 1_000
"""Characters of an expression."""

MOST_UNROLLED = 10_000
"""Characters, escapes and sets of an expression once every `{n}` is written out."""

MOST_NESTED = 50
"""Groups within groups."""


class Reach(NamedTuple):
    """Which beginnings match: all from a length on, and some single shorter ones."""

    least: int | None
    """None: no length from which on all match is known."""
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
            # Not in the cache of `regex`, which keeps hundreds of expressions for good.
            self._compiled = regex.compile(text, cache_pattern=False)
            # None: it must be tried on every beginning.
            self._loose = None if loose is None else regex.compile(loose, cache_pattern=False)
        except regex.error as error:
            raise FfmemError(f"{text!r} is not a regular expression: {error}.") from None
        self._looks_only_at_itself = loose == text

    def search(self, text: str, end: int | None = None) -> Any:
        """Return the first match within the first `end` characters, None if there is none."""
        return self._search(self._compiled, text, end)

    def possible(self, text: str) -> bool:
        """Whether any beginning of a text can match."""
        return self._loose is None or self._search(self._loose, text, None) is not None

    def reach(self, text: str, ends: list[int]) -> Reach:
        """Return which beginnings of a text match, of these lengths in rising order."""
        if self._loose is None:
            return Reach(None, [end for end in ends if self.search(text, end)])
        first = bisect_left(
            ends, True, key=lambda end: self._search(self._loose, text, end) is not None
        )
        if self._looks_only_at_itself:
            return Reach(ends[first] if first < len(ends) else None, [])
        single: list[int] = []
        for end in ends[first:]:
            match = self.search(text, end)
            if match is None:
                continue
            if match.end() < end - 1:  # `$` may stand before a last line end
                return Reach(end, single)
            single.append(end)
        return Reach(None, single)

    def _search(self, compiled: Any, text: str, end: int | None) -> Any:
        left = self._until - time.monotonic()
        try:
            if left > 0:
                return compiled.search(text, endpos=end, timeout=left)
        except TimeoutError:
            pass
        raise FfmemError(
            f"The regular expression {self.text!r} takes too long: no answer after"
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
    """Refuse an expression that could take much time or memory before it matches anything.

    Where this reads an expression otherwise than `regex` does, a count could hide from it; so
    whatever would let them differ, such as comments and sets within sets, is refused too.
    """
    if len(text) > MOST_CHARACTERS:
        raise FfmemError(
            f"The regular expression has {len(text):,} characters; at most {MOST_CHARACTERS:,} are"
            " allowed. Make it shorter, or search for words."
        )
    sizes = [0]  # of the expression, and of each group that is open here
    last = 0  # size of what a count would repeat
    for part in _SYNTAX.finditer(text):
        if part["unknown"]:
            raise FfmemError(
                f"The regular expression {text!r} contains {part[0]!r}, which searches do not"
                " support. Use plain groups, sets, repeats, lookarounds and the flags a, i, m and"
                " s, and put a backslash before a bracket that stands for itself."
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
        if sizes[-1] > MOST_UNROLLED or len(sizes) > MOST_NESTED:
            raise FfmemError(
                f"The regular expression {text!r} is too large: it may have {MOST_NESTED} groups"
                f" within groups, and {MOST_UNROLLED:,} characters once its repeats are written"
                " out. Use smaller counts, or * and +."
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

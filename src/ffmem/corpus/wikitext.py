"""Undo the tokenization of WikiText.

WikiText puts spaces around every punctuation mark, and writes `@-@`, `@,@`, `@.@` for marks inside
a word or number. Subword models expect ordinary text, so this module joins the tokens again:

    ` It isn 't 1 @.@ 5 m ( 5 ft ) long . `  →  `It isn't 1.5 m (5 ft) long.`

Which marks attach to their neighbors follows from how the Moses tokenizer splits them; where that
is ambiguous (a straight quote, a lone apostrophe), the rest of the line decides.
"""

import re
import unicodedata

_ESCAPES = {"@-@": "-", "@,@": ",", "@.@": "."}
_CLOSING = frozenset(",.;:!?)]}%…”″′♯♭〉》」』") | {"..", "...", "...."}
_OPENING = frozenset("([{$£€¥₹“„‘¡¿〈《「『")
_JOINING = frozenset("/—‑⁄・")
_BEFORE_DOLLAR = re.compile(r"US|AU?|CA?|Can|HK|NZ|NT|S|R")
_CLITIC = re.compile(r"s|t|d|m|re|ve|ll", re.IGNORECASE)
_DECADE = re.compile(r"\d0s")
_SUBJECT = re.compile(r"a|an|the|this|that|these|those|I|you|he|she|it|we|they")
_FUNCTION_WORD = re.compile(
    r"of|in|on|at|to|by|for|as|is|was|are|were|and|or|but|with|from|into|not|called|named"
)
_APOSTROPHE_WORD = re.compile(r"'[^\W\d_]")
_HEADING = re.compile(r"\s*((?:= )+)(?!= )\S.*(?<!=) ((?:= )*=)\s*")


def is_heading(line: str) -> bool:
    """Return whether a line is an article's or a section's title: ` = Title = `."""
    match = _HEADING.fullmatch(line)
    return match is not None and match[1].count("=") == match[2].count("=")


def detokenize(line: str) -> str:
    """Return the line as it was before tokenization."""
    return _Line(line.split()).text()


class _Line:
    """The tokens of one line, and the quotes that are open at the current one."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.in_double = self.in_single = False
        self.odd_doubles = tokens.count('"') % 2 == 1

    def text(self) -> str:
        """Return the tokens joined, with spaces where people write them."""
        parts: list[str] = []
        attaches = True  # to the token before; there is no space in front of the first
        for place, token in enumerate(self.tokens):
            to_left, to_right = self._attaches(place, token)
            if not (attaches or to_left):
                parts.append(" ")
            parts.append(_ESCAPES.get(token, token))
            attaches = to_right
        return "".join(parts)

    def _attaches(self, place: int, token: str) -> tuple[bool, bool]:
        """Return whether a token attaches to its left and its right neighbor."""
        if token == '"':
            return self._double_quote(place)
        if token in ("'", "’"):
            return self._apostrophe(place, token)
        if token in _ESCAPES or token in _JOINING:
            return True, True
        if token in _OPENING:
            left = self._at(place - 1)
            return token == "$" and _BEFORE_DOLLAR.fullmatch(left) is not None, True
        if token == ":" and self._between_numbers(place, longest=3):
            return True, True
        if token == "]" and self._at(place - 2) == "[" and len(self._at(place - 1)) == 1:
            return True, True  # [H]e said
        if token in _CLOSING or _APOSTROPHE_WORD.match(token) or _is_mark(token):
            return True, False
        return self._sign(place, token)

    def _sign(self, place: int, token: str) -> tuple[bool, bool]:
        """Return the same for signs that attach only to numbers and initials."""
        left, right = self._at(place - 1), self._at(place + 1)
        if token == "–":
            joins = self._between_numbers(place, longest=9)
            return joins, joins
        if token == "°":
            of_temperature = right.rstrip(".") in ("C", "F")
            return not of_temperature, of_temperature
        if token == "&":
            joins = all(
                word.isalpha() and word.isupper() and len(word) < 3 for word in (left, right)
            )
            return joins, joins
        if token in ("#", "+") and left in tuple("ABCDEFG") and not right[:1].isalnum():
            return True, False  # F#, a grade of B+
        if token == "#":
            return False, bool(right)
        if token in ("−", "±", "~", "+"):
            return False, right[:1].isdigit() and not left[-1:].isdigit()
        return False, False

    def _double_quote(self, place: int) -> tuple[bool, bool]:
        """Open and close in turn, unless the neighbors allow only one."""
        left, right = self._at(place - 1), self._at(place + 1)
        if self.odd_doubles and not self.in_double and left in ("7", "10", "12"):
            self.odd_doubles = False
            return True, False  # inches: a 12" single
        if left in _OPENING or not left:
            opens = True
        elif not right or (right in _CLOSING and right not in ("…", "..", "...", "....")):
            opens = False
        else:
            opens = not self.in_double
        self.in_double = opens
        return not opens, opens

    def _apostrophe(self, place: int, token: str) -> tuple[bool, bool]:
        """Distinguish a plural possessive, a closing or opening quote, and `’ s`."""
        left, right = self._at(place - 1), self._at(place + 1)
        if token == "’" and (_CLITIC.fullmatch(right) or left in ("O", "D", "L", "d", "l")):
            return True, True
        if _DECADE.fullmatch(right):
            return False, True
        follows = _SUBJECT.fullmatch(left) or _FUNCTION_WORD.fullmatch(left)
        if token == "'" and (follows or _SUBJECT.fullmatch(right)):
            self.in_single = self._more_after(place)
            return not self.in_single, self.in_single
        if self.in_single or token == "’":
            # A plural possessive inside a quote: another apostrophe must follow to close it.
            self.in_single = self.in_single and left.endswith("s") and self._more_after(place)
            return True, False
        if left[-1:] in ("s", "S", "z", "x") and not self._quoted_from(place):
            return True, False
        if right[:1].isdigit():
            return False, True  # the spring of '68
        self.in_single = self._more_after(place)
        opens = self.in_single or left in _OPENING or not left
        return not opens, opens

    def _at(self, place: int) -> str:
        return self.tokens[place] if 0 <= place < len(self.tokens) else ""

    def _more_after(self, place: int) -> bool:
        return "'" in self.tokens[place + 1 :]

    def _quoted_from(self, place: int) -> bool:
        """Return whether an apostrophe after a word ending in s looks like an opening quote."""
        return self._at(place + 1)[:1].isupper() and any(
            token == "'" and self._at(other + 1) in _CLOSING
            for other, token in enumerate(self.tokens)
            if other > place
        )

    def _between_numbers(self, place: int, longest: int) -> bool:
        left, right = self._at(place - 1), self._at(place + 1)
        return left[-1:].isdigit() and right[:1].isdigit() and len(left) <= longest


def _is_mark(token: str) -> bool:
    """Return whether the token begins with a mark that combines with the letter before it."""
    return unicodedata.category(token[0]).startswith("M")

"""What a search found, and the text around it."""

from typing import NamedTuple

from ffmem.indexing.expression import Expression
from ffmem.indexing.words import token_beginnings, token_forms

AROUND = 40
"""Characters on each side of what was found."""


class Excerpt(NamedTuple):
    """What was found, and the text around it: a token, or a part of a sentence."""

    before: str
    match: str
    after: str
    rest: str
    """What follows the trigger's prefix in its sentence."""

    @property
    def bracketed(self) -> str:
        """The excerpt as one text, the match in brackets."""
        return f"{self.before}[{self.match}]{self.after}{self.rest}"

    @property
    def plain(self) -> str:
        """The excerpt as one text."""
        return "".join(self)


def of_sentence(text: str, span: tuple[int, int], end: int) -> Excerpt:
    """Return what stands around a match in a sentence of which `end` characters are the prefix."""
    begin, past = span
    stop = min(past + AROUND, len(text))
    within = max(past, min(end, stop))
    left = "…" if begin > AROUND else ""
    right = "…" if stop < len(text) else ""
    after, rest = text[past:within], text[within:stop]
    if rest:
        rest += right
    else:
        after += right
    return Excerpt(left + text[max(0, begin - AROUND) : begin], text[begin:past], after, rest)


def of_token(token: str, query: str, expression: Expression | None) -> Excerpt:
    """Return a token with the part of it that was searched for."""
    if expression is not None:
        begin, end = expression.search(token).span()
        return Excerpt(token[:begin], token[begin:end], token[end:], "")
    end = len(token)
    if token.casefold() not in token_forms(query):
        folded = token.casefold()
        begun = max((form for form in token_beginnings(query) if folded.startswith(form)), key=len)
        end = next(n for n in range(len(token) + 1) if len(token[:n].casefold()) >= len(begun))
    return Excerpt("", token[:end], token[end:], "")

"""Words and tokens as people type them.

A word is what SQLite's full-text index takes for one: letters, numbers and marks in a row. A token
is found with or without its leading space, in any case, also as the screen shows it (`␣the`).
"""

import unicodedata
from itertools import groupby

from ffmem.indexing.memory import unshown


def has_word(text: str) -> bool:
    """Whether there is a word in a text."""
    return any(map(_in_word, text))


def ends_in_word(text: str) -> bool:
    """Whether the last word of a text may go on."""
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
    """Return the tokens that a query names, without case."""
    query = unshown(query)
    return {form.casefold() for form in (query, query.strip(), f" {query.strip()}")}


def token_beginnings(query: str) -> set[str]:
    """Return what a token begins with that a query is the beginning of, without case."""
    query = unshown(query)
    return {form.casefold() for form in (query, query.lstrip(), f" {query.lstrip()}")}


def past(beginning: str) -> str:
    """Return the least text after all texts with a beginning, in the order of characters."""
    stem = beginning.rstrip("\U0010ffff")
    if not stem:
        return beginning * 2
    following = ord(stem[-1]) + 1
    if following == 0xD800:  # no text has the characters from there to U+DFFF
        following = 0xE000
    return stem[:-1] + chr(following)


def _in_word(character: str) -> bool:
    kind = unicodedata.category(character)
    return kind[0] in "LN" or kind in {"Co", "Mn", "Mc"}

"""What a language model answered, read with care: only what is of the asked form counts."""

from typing import Any, NamedTuple

from ffmem.patterns.endpoint import NotValid
from ffmem.patterns.pattern import KINDS
from ffmem.patterns.prompts import MOST_DESCRIPTION, MOST_PATTERNS


class Named(NamedTuple):
    """A pattern as the model named it."""

    description: str
    kind: str
    ranks: tuple[int, ...]


def read_patterns(answer: Any, n: int) -> list[Named]:
    """Return the patterns in an answer about n triggers, if it is of the asked form."""
    listed = answer.get("patterns") if isinstance(answer, dict) else None
    if not isinstance(listed, list) or len(listed) > MOST_PATTERNS:
        raise NotValid(f"there must be a list `patterns` of at most {MOST_PATTERNS}.")
    found = []
    for one in listed:
        if not isinstance(one, dict):
            raise NotValid("a pattern has description, kind and triggers.")
        description, kind = one.get("description"), one.get("kind")
        if not isinstance(description, str) or not description.strip():
            raise NotValid("a pattern had no description.")
        if len(description) > MOST_DESCRIPTION:
            raise NotValid(f"a description had more than {MOST_DESCRIPTION} characters.")
        if kind not in KINDS:
            raise NotValid(f"a pattern is {' or '.join(KINDS)}, not {kind!r}.")
        ranks = read_numbers(one, "triggers", n)
        found.append(Named(" ".join(description.split()), kind, ranks))
    return found


def read_numbers(answer: Any, name: str, n: int) -> tuple[int, ...]:
    """Return the numbers of texts in an answer, each once, in order."""
    numbers = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
        raise NotValid(f"`{name}` must be a list of numbers.")
    if any(not 1 <= number <= n for number in numbers):
        raise NotValid(f"`{name}` holds a number that no text has: there are 1 to {n}.")
    return tuple(sorted(set(numbers)))

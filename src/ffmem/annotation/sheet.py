"""What one person says about one list of triggers: patterns, and which triggers show them.

A sheet is a value: it is changed by making another. Two people, or two windows of one, may change
the same sheet at once. Both start from the same `base`; what each did is joined:

    merge(base, mine, base) == mine,    merge(base, base, theirs) == theirs
    a mark that somebody set and nobody took away is in merge(base, mine, theirs)

Only a text or a choice that both changed, and changed differently, is a conflict for people.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ffmem.errors import FfmemError
from ffmem.patterns.store import KINDS, LEAST

Value = TypeVar("Value")

MOST_PATTERNS = 30
MOST_CHARACTERS = 500
"""Of a description or a note."""


class Conflict(FfmemError):
    """Two people changed the same words differently: neither is taken without asking."""


@dataclass(frozen=True)
class SheetPattern:
    """A pattern as somebody describes it."""

    id: str
    """Made where the pattern is made, so that the same pattern sent twice is one."""
    description: str = ""
    kind: str | None = None
    """`shallow` or `semantic`; None while nobody has said."""
    marks: frozenset[int] = frozenset()
    """Triggers that show it, from 1."""

    def to_dict(self) -> dict[str, Any]:
        """Return the pattern as JSON."""
        return {
            "id": self.id,
            "description": self.description,
            "kind": self.kind,
            "marks": sorted(self.marks),
        }


@dataclass(frozen=True)
class Sheet:
    """What somebody says about one item of a study, so far."""

    patterns: tuple[SheetPattern, ...] = ()
    no_pattern: bool = False
    """"There is no pattern here", which is an answer."""
    related: bool | None = None
    """Of a case of composition: whether the output's word is related to the residual's."""
    note: str = ""
    done: bool = False
    """Handed in; it can be taken back."""

    def to_dict(self) -> dict[str, Any]:
        """Return the sheet as JSON."""
        return {
            "patterns": [pattern.to_dict() for pattern in self.patterns],
            "no_pattern": self.no_pattern,
            "related": self.related,
            "note": self.note,
            "done": self.done,
        }

    @classmethod
    def of(cls, content: Any, n: int) -> "Sheet":
        """Return the sheet with this JSON, about n triggers; anything odd is an error."""
        if not isinstance(content, dict) or content.keys() - cls().to_dict().keys():
            raise FfmemError("A sheet has patterns, no_pattern, related, note and done.")
        listed = content.get("patterns", [])
        if not isinstance(listed, list) or len(listed) > MOST_PATTERNS:
            raise FfmemError(f"A sheet has a list of at most {MOST_PATTERNS} patterns.")
        patterns = tuple(_pattern(one, n) for one in listed)
        if len({pattern.id for pattern in patterns}) < len(patterns):
            raise FfmemError("Two patterns of the sheet have the same id.")
        flags = {name: content.get(name, False) for name in ("no_pattern", "done")}
        related = content.get("related")
        answers = [*flags.values(), *([] if related is None else [related])]
        if any(type(answer) is not bool for answer in answers):
            raise FfmemError("no_pattern, done and related of a sheet are true or false.")
        return cls(patterns, related=related, note=_text(content.get("note", "")), **flags)

    def problems(self, is_composition: bool = False) -> list[str]:
        """Return why the sheet cannot be handed in yet, a sentence each."""
        if is_composition:
            return [] if self.related is not None else ["Say whether the two words are related."]
        if self.no_pattern and self.patterns:
            return ["There are patterns, and yet “no pattern” is ticked: remove one or the other."]
        if not self.patterns and not self.no_pattern:
            return ["Describe a pattern, or say that there is none."]
        found = [
            problem
            for number, pattern in enumerate(self.patterns, start=1)
            for problem in _problems(number, pattern)
        ]
        told: dict[tuple[str, str | None], int] = {}
        for number, pattern in enumerate(self.patterns, start=1):
            words = (pattern.description.strip().casefold(), pattern.kind)
            first = told.setdefault(words, number)
            if first != number and words[0]:
                found.append(f"Patterns {first} and {number} say the same: keep one of them.")
        return found


def merge(base: Sheet, mine: Sheet, theirs: Sheet) -> Sheet:
    """Return what two changes of the same sheet come to together.

    A pattern that one removed while the other changed it stays: work is not thrown away.
    """
    if mine in (base, theirs):
        return theirs
    if theirs == base:
        return mine
    known = {pattern.id: pattern for pattern in base.patterns}
    ours = {pattern.id: pattern for pattern in mine.patterns}
    others = {pattern.id: pattern for pattern in theirs.patterns}
    patterns = []
    for id in dict.fromkeys((*others, *ours)):
        before, one, other = known.get(id), ours.get(id), others.get(id)
        if one is not None and other is not None:
            patterns.append(_merged(before or SheetPattern(id), one, other))
            continue
        left = one or other
        if left is not None and left != before:
            patterns.append(left)
    joined = replace(
        theirs,
        patterns=tuple(patterns),
        related=_one(base.related, mine.related, theirs.related, "the answer"),
        note=_one(base.note, mine.note, theirs.note, "the note"),
        no_pattern=_one(base.no_pattern, mine.no_pattern, theirs.no_pattern, "“no pattern”"),
        done=_one(base.done, mine.done, theirs.done, "whether it is done"),
    )
    # Handed in by one while the other went on: what was handed in was not this.
    return (
        joined if not joined.problems(joined.related is not None) else replace(joined, done=False)
    )


def _merged(base: SheetPattern, mine: SheetPattern, theirs: SheetPattern) -> SheetPattern:
    """Return a pattern with what both did to it."""
    set_by_either = (mine.marks | theirs.marks) - base.marks
    kept_by_both = base.marks & mine.marks & theirs.marks
    return SheetPattern(
        base.id,
        _one(base.description, mine.description, theirs.description, "a description"),
        _one(base.kind, mine.kind, theirs.kind, "the kind of a pattern"),
        set_by_either | kept_by_both,
    )


def _one(base: Value, mine: Value, theirs: Value, what: str) -> Value:
    """Return the one of two values that was changed."""
    if mine in (base, theirs):
        return theirs
    if theirs == base:
        return mine
    raise Conflict(
        f"Somebody else changed {what} meanwhile, to {theirs!r}; yours is {mine!r}."
        " Look at both, and save the one that is right."
    )


def _pattern(content: Any, n: int) -> SheetPattern:
    if not isinstance(content, dict) or content.keys() - SheetPattern("").to_dict().keys():
        raise FfmemError("A pattern has id, description, kind and marks.")
    id, kind, marks = content.get("id"), content.get("kind"), content.get("marks", [])
    if not isinstance(id, str) or not 0 < len(id) <= 64 or not id.isprintable():
        raise FfmemError("The id of a pattern is a text of 1 to 64 characters.")
    if kind is not None and kind not in KINDS:
        raise FfmemError(f"A pattern is {' or '.join(KINDS)}, not {kind!r}.")
    if not isinstance(marks, list) or any(
        type(mark) is not int or not 1 <= mark <= n for mark in marks
    ):
        raise FfmemError(f"The marks of a pattern are numbers of triggers, 1 to {n}.")
    return SheetPattern(id, _text(content.get("description", "")), kind, frozenset(marks))


def _text(given: Any) -> str:
    # Half a surrogate pair is in no text that people write, and cannot be written as UTF-8.
    if (
        not isinstance(given, str)
        or len(given) > MOST_CHARACTERS
        or any(character == "\x00" or "\ud800" <= character <= "\udfff" for character in given)
    ):
        raise FfmemError(
            f"A description or note is a text of at most {MOST_CHARACTERS} characters, all of them"
            " such as people write."
        )
    return given


def _problems(number: int, pattern: SheetPattern) -> list[str]:
    """Return what a pattern lacks."""
    found = []
    if not pattern.description.strip():
        found.append(f"Pattern {number} has no description.")
    if pattern.kind is None:
        found.append(f"Pattern {number} is neither called shallow nor semantic.")
    if len(pattern.marks) < LEAST:
        found.append(
            f"Pattern {number} is marked in {len(pattern.marks)} of the texts; a pattern recurs in"
            f" at least {LEAST}."
        )
    return found

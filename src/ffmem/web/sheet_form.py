"""A sheet as a plain form, for browsers without scripts.

Every pattern has fields that carry its id: `description.ID`, `kind.ID`, `mark.ID` once per text,
`remove.ID`. The last pattern of a form is a blank one; it counts once something is said about it.
"""

from collections.abc import Iterable
from dataclasses import replace

from ffmem.annotation.sheet import Conflict, Sheet, SheetPattern, merge
from ffmem.errors import FfmemError
from ffmem.web.entry import Fields


def sheet_of(fields: Fields, n: int, before: Sheet) -> Sheet:
    """Return the sheet that a form says, about n texts; a handed-in one stays as it was."""
    if before.done:
        return before
    patterns = []
    for id in dict.fromkeys(fields.all("pattern")):
        said = {
            "id": id,
            "description": fields.one(f"description.{id}").strip(),
            "kind": fields.one(f"kind.{id}") or None,
            "marks": [_number(mark) for mark in fields.all(f"mark.{id}")],
        }
        blank = not (said["description"] or said["kind"] or said["marks"])
        known = any(pattern.id == id for pattern in before.patterns)
        if not fields.one(f"remove.{id}") and (known or not blank):
            patterns.append(said)
    related = fields.one("related")
    if related not in ("", "yes", "no"):
        raise FfmemError(f"The answer is yes or no, not {related!r}.")
    content = {
        "patterns": patterns,
        "no_pattern": bool(fields.one("no_pattern")),
        "related": None if not related else related == "yes",
        "note": fields.one("note").replace("\r\n", "\n"),
    }
    return Sheet.of(content, n)


def kept_mine(base: Sheet, mine: Sheet, theirs: Sheet) -> Sheet:
    """Return what two changes come to where mine counts wherever both changed the same words."""
    try:
        return merge(base, mine, theirs)
    except Conflict:
        return merge(base, mine, _yielding_sheet(base, mine, theirs))


def _yielding_sheet(base: Sheet, mine: Sheet, theirs: Sheet) -> Sheet:
    """Return their sheet with my words where I changed them."""
    known = {pattern.id: pattern for pattern in base.patterns}
    ours = {pattern.id: pattern for pattern in mine.patterns}
    return replace(
        theirs,
        patterns=tuple(
            _yielding(known.get(other.id, SheetPattern(other.id)), ours.get(other.id), other)
            for other in theirs.patterns
        ),
        **{
            name: getattr(mine, name)
            for name in ("no_pattern", "related", "note", "done")
            if getattr(mine, name) != getattr(base, name)
        },
    )


def clashes(base: Sheet, mine: Sheet, theirs: Sheet) -> list[tuple[str, str, str]]:
    """Return what both changed differently: what it is, mine, theirs."""
    found: list[tuple[str, str, str]] = []
    known = {pattern.id: pattern for pattern in base.patterns}
    others = {pattern.id: pattern for pattern in theirs.patterns}
    for number, ours in enumerate(mine.patterns, start=1):
        other, before = others.get(ours.id), known.get(ours.id, SheetPattern(ours.id))
        if other is not None:
            for name in ("description", "kind"):
                sides = [getattr(side, name) for side in (before, ours, other)]
                found += _clash(f"{name} of pattern {number}", sides)
    for name, what in (
        ("no_pattern", "no pattern here"),
        ("related", "related"),
        ("note", "note"),
        ("done", "handed in"),
    ):
        found += _clash(what, [getattr(side, name) for side in (base, mine, theirs)])
    return found


def _yielding(base: SheetPattern, mine: SheetPattern | None, theirs: SheetPattern) -> SheetPattern:
    """Return their pattern with my words where I changed them."""
    if mine is None:
        return theirs
    changed = {
        name: getattr(mine, name)
        for name in ("description", "kind")
        if getattr(mine, name) != getattr(base, name)
    }
    return replace(theirs, **changed)


def _clash(what: str, sides: list[object]) -> Iterable[tuple[str, str, str]]:
    base, mine, theirs = sides
    if mine not in (base, theirs) and theirs != base:
        yield what, _said(mine), _said(theirs)


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not said" if value is None else str(value) or "nothing"


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise FfmemError(f"A mark is the number of a text, not {text!r}.") from None

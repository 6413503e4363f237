"""What a form without scripts sends: saved, handed in, taken back, undone."""

from dataclasses import replace
from typing import Any

from ffmem.annotation.item import Item
from ffmem.annotation.revisions import SaveConflict
from ffmem.annotation.sheet import Sheet
from ffmem.errors import FfmemError
from ffmem.web.entry import Entered, Fields
from ffmem.web.item_view import is_composition
from ffmem.web.sheet_form import clashes, kept_mine, sheet_of


def sent(one: Entered, key: str, form: Fields, taken: Sheet | None = None) -> dict[str, Any] | None:
    """Save what a form says; return what the page must show if somebody else was faster."""
    opened = one.study.open_item(one.person, key)
    what, base, request = form.one("what"), _version(form.one("base")), form.one("request")
    if what in ("undo", "redo"):
        (one.study.undo if what == "undo" else one.study.redo)(one.person, key, base, request)
        return None
    versions = {past.version: past.sheet for past in one.study.history(one.person, key)}
    before = versions.get(base, Sheet())
    mine = _said(form, opened.item, before)
    if taken is not None and not before.done:
        mine = _with(mine, taken)
    try:
        one.study.save(one.person, key, base, mine, request)
    except SaveConflict as error:
        theirs = error.current
        return {
            "sheet": kept_mine(before, mine, theirs.sheet),
            "version": theirs.version,
            "clashes": clashes(before, mine, theirs.sheet),
            "conflict": str(error),
        }
    return None


def _said(form: Fields, item: Item, before: Sheet) -> Sheet:
    """Return the sheet that a form sends: as it stood, taken back, or handed in if it can be."""
    what = form.one("what")
    if what == "take-back":
        return replace(before, done=False)
    mine = sheet_of(form, len(item.texts), before)
    complete = not mine.problems(is_composition(item))
    return replace(mine, done=True) if what == "hand-in" and complete else mine


def _with(mine: Sheet, taken: Sheet) -> Sheet:
    """Return a sheet with further patterns, each once."""
    known = {pattern.id for pattern in mine.patterns}
    more = tuple(pattern for pattern in taken.patterns if pattern.id not in known)
    return replace(
        mine,
        patterns=mine.patterns + more,
        no_pattern=mine.no_pattern or taken.no_pattern,
        related=taken.related if taken.related is not None else mine.related,
    )


def _version(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise FfmemError(f"The form started from version {text!r}, which is none. Load it again.")
    return int(text)

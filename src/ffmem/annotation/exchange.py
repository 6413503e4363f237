"""A study as a file, and back: for other programs, and for people who worked elsewhere.

    first line     what the study was asked to be, and the digest of its items
    other lines    one per (item, annotator): the item with the truth, the sheet as it stands

    import(export(study)) changes nothing,    import twice == import once

Codes are in no file. What a file says is joined with what the study says; where both cannot be,
the study's stays and the file's is reported.
"""

import csv
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ffmem.annotation.revisions import SaveConflict, refuse_unfit
from ffmem.annotation.rows import ADJUDICATOR, Standing
from ffmem.annotation.sheet import Sheet
from ffmem.annotation.study import AnnotationStudy, Annotator
from ffmem.errors import FfmemError, StoreError
from ffmem.files import check_output_file, committing, csv_row

FORMAT = 1
NAME = "ffmem annotations"
FORMATS = (".jsonl", ".csv")

COLUMNS = [
    *("item", "kind", "cell", "sign", "texts", "annotator", "role", "version", "what", "saved_at"),
    *("done", "no_pattern", "related", "note", "patterns", "study"),
]


class Imported(NamedTuple):
    """What an import came to."""

    saved: int
    """Sheets that were not begun here."""
    merged: int
    """Sheets that were joined with what was here."""
    there: int
    """Sheets that were here already, or say nothing."""
    conflicts: list[str]
    """Sheets that could not be joined, a sentence each; the study was left as it is."""


class _Line(NamedTuple):
    """A sheet of a file, whose it is, and where it stands in the file."""

    person: Annotator
    key: str
    sheet: Sheet
    number: int


def export(study: AnnotationStudy, out: Path, history: bool = False) -> int:
    """Write every sheet as it stands, or every revision of it, and return how many lines."""
    if out.suffix not in FORMATS:
        raise FfmemError(f"An export is a {' or a '.join(FORMATS)} file; {out} was given.")
    check_output_file(out)
    lines = list(_lines(study, history))
    # Only a CSV writes its own line ends; neither may translate those within a text.
    with committing(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        if out.suffix == ".csv":
            rows = csv.DictWriter(file, COLUMNS)
            rows.writeheader()
            rows.writerows(csv_row(_row(line, study.settings["plan"])) for line in lines)
        else:
            for line in (_header(study, history), *lines):
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
    return len(lines)


def import_file(study: AnnotationStudy, path: Path) -> Imported:
    """Take in the sheets of an export; nothing is taken in unless all of it can be read."""
    counts = {"saved": 0, "merged": 0, "there": 0}
    conflicts = []
    for line in _read(study, path):
        try:
            counts[_taken_in(study, line)] += 1
        except SaveConflict as conflict:
            conflicts.append(
                f"Line {line.number} ({line.key}, {line.person.name}) was not taken in: {conflict}"
            )
    return Imported(**counts, conflicts=conflicts)


def _taken_in(study: AnnotationStudy, line: _Line) -> str:
    """Return what became of a line: saved, merged, or there already."""
    known = study.history(line.person, line.key)
    # A digest of the sheet as the name of the request: the same sheet is taken in once.
    content = json.dumps(line.sheet.to_dict(), sort_keys=True)
    request = f"import {hashlib.sha256(content.encode()).hexdigest()}"
    if line.sheet == Sheet() or any(line.sheet == one.sheet for one in known):
        return "there"
    saved = study.take_in(line.person, line.key, line.sheet, request)
    if saved.version <= len(known):
        return "there"
    return "merged" if known else "saved"


def _lines(study: AnnotationStudy, history: bool) -> Iterator[dict[str, Any]]:
    people = {person.name: person for person in study.people()}
    some_head = next(person for person in people.values() if person.role == ADJUDICATOR)
    for one in study.standing():
        if one.role == ADJUDICATOR and not one.version:
            continue  # adjudicators are assigned nothing: only what they did is there
        if not history:
            saved_at = one.saved_at.isoformat() if one.saved_at else None
            yield _line(one, one.version, "stands", saved_at, one.sheet)
            continue
        person = people.get(one.annotator, some_head)
        for entry in study.history(person, one.item.key):
            when = entry.saved_at.isoformat()
            yield _line(one, entry.version, entry.what, when, entry.sheet) | {"by": entry.by}


def _line(
    one: Standing, version: int, what: str, saved_at: str | None, sheet: Sheet
) -> dict[str, Any]:
    item = one.item
    return {
        "item": item.key,
        "kind": item.kind,
        "cell": item.cell,
        "sign": item.sign,
        "texts": [text._asdict() for text in item.texts],
        "words": list(item.words),
        "annotator": one.annotator,
        "role": one.role,
        "version": version,
        "what": what,
        "saved_at": saved_at,
        "sheet": sheet.to_dict(),
    }


def _header(study: AnnotationStudy, history: bool) -> dict[str, Any]:
    return {"file": NAME, "format": FORMAT, "history": history, "settings": study.settings}


def _row(line: dict[str, Any], plan: str) -> dict[str, Any]:
    """Return a line as a row of a table; what is not a plain value is JSON in its cell."""
    sheet = line["sheet"]
    row = {name: line[name] for name in COLUMNS if name in line}
    row |= {name: sheet[name] for name in ("done", "no_pattern", "related", "note")}
    row["texts"] = len(line["texts"])
    row["patterns"] = json.dumps(sheet["patterns"], ensure_ascii=False)
    return row | {"study": plan}


def _read(study: AnnotationStudy, path: Path) -> list[_Line]:
    """Return the last sheet of every (item, annotator) in a file, if all fits this study."""
    contents = list(_json_lines(path))
    header = _header_of(study, contents[0][1] if contents else None, path)
    people = {(person.name, person.role): person for person in study.people()}
    head = next(person for person in people.values() if person.role == ADJUDICATOR)
    assigned = {(one.item.key, one.annotator, one.role): one.item for one in study.standing()}
    found: dict[tuple[str, str, str], _Line] = {}
    for number, content in contents[1:]:
        place = f"Line {number} of {path}"
        try:
            key, name, role = (str(content[field]) for field in ("item", "annotator", "role"))
            item, given = assigned.get((key, name, role)), content["sheet"]
        except (KeyError, TypeError):
            raise StoreError(
                f"{place} is no sheet: it lacks item, annotator, role or sheet."
            ) from None
        if item is None:
            known = key in {one for one, _, _ in assigned}
            what = f"not for the {role} {name!r} to judge" if known else "no item of this study"
            raise StoreError(f"{place} is about {key!r}, which is {what}. Nothing was imported.")
        if (key, name, role) in found and not header["history"]:
            raise StoreError(f"{place} is a second sheet of {name!r} about {key!r}: leave one.")
        try:
            sheet = Sheet.of(given, len(item.texts))
            refuse_unfit(item, sheet)
        except FfmemError as error:
            raise StoreError(f"{place} is no good: {error} Nothing was imported.") from None
        person = people.get((name, role), head)
        found[key, name, role] = _Line(person, key, sheet, number)
    return list(found.values())


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".csv":
        raise StoreError(f"{path} is for spreadsheets: export as .jsonl, which can be imported.")
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, json.loads(line)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} is no export of a study that can be read: {error}.") from None


def _header_of(study: AnnotationStudy, header: Any, path: Path) -> dict[str, Any]:
    """Return the first line, if the file is of a study with the same items."""
    if not isinstance(header, dict) or header.get("file") != NAME or "history" not in header:
        raise StoreError(
            f"{path} does not begin as an export of a study does. Only .jsonl files that"
            " `ffmem annotate export` wrote can be imported."
        )
    if header.get("format") != FORMAT:
        raise StoreError(
            f"{path} is of format {header.get('format')!r}, not {FORMAT}: install a newer ffmem."
        )
    theirs, ours = header.get("settings"), study.settings
    if not isinstance(theirs, dict) or theirs.get("plan") != ours["plan"]:
        differing = _differing(theirs if isinstance(theirs, dict) else {}, ours)
        raise StoreError(f"{path} is of another study: {differing}. Nothing was imported.")
    return header


def _differing(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return which settings differ, in words."""
    found = []
    for part in ("asked", "index", "drawn"):
        there, here = theirs.get(part), ours[part]
        there = there if isinstance(there, dict) else {}
        found += [
            f"{name} {there.get(name)!r}, here {value!r}"
            for name, value in here.items()
            if there.get(name) != value
        ]
    return "; ".join(found[:4]) or "its items differ"

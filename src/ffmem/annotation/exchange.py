"""A study as a file, for other programs and for people who worked elsewhere.

    first line     the settings of the study, with the digest of its items
    other lines    one per item and annotator: the item with the truth, and the sheet

    import(export(study)) changes nothing;    importing twice changes nothing more

Codes are in no file. Import fills sheets that are still empty here. Where the study and the file
both have something, the study's sheet stays and the file's is reported.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ffmem.annotation.study import (
    ADJUDICATOR,
    AnnotationStudy,
    Judgment,
    SaveConflict,
    Sheet,
)
from ffmem.errors import FfmemError, StoreError
from ffmem.files import check_output_file, committing, csv_row

FORMAT = 2
NAME = "ffmem annotations"
SUFFIXES = (".jsonl", ".csv")

COLUMNS = [
    *("item", "kind", "cell", "sign", "texts", "annotator", "role", "version", "saved_by"),
    *("saved_at", "done", "no_pattern", "related", "note", "patterns", "study"),
]


class ImportSummary(NamedTuple):
    """What an import did."""

    imported: int
    unchanged: int
    """Sheets that were here already, or are empty."""
    conflicts: list[str]
    """Sheets that differ from those here, which stay; a sentence each."""


def export_sheets(study: AnnotationStudy, out: Path, history: bool = False) -> int:
    """Write every sheet, or every revision, and return how many."""
    if out.suffix not in SUFFIXES:
        raise FfmemError(f"An export is a {' or '.join(SUFFIXES)} file, not {out}.")
    check_output_file(out)
    lines = list(_lines(study, history))
    plan = study.settings["plan"]
    # newline="": the CSV writer ends its own lines, and texts keep theirs.
    with committing(out) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        if out.suffix == ".csv":
            table = csv.DictWriter(file, COLUMNS)
            table.writeheader()
            table.writerows(csv_row(_row(line) | {"study": plan}) for line in lines)
        else:
            header = {"file": NAME, "format": FORMAT, "history": history}
            for line in ({**header, "settings": study.settings}, *lines):
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
    return len(lines)


def import_sheets(study: AnnotationStudy, path: Path) -> ImportSummary:
    """Add the sheets of an export; nothing is added unless the whole file is valid."""
    imported, unchanged, conflicts = 0, 0, []
    for (key, owner), (number, sheet) in _read(study, path).items():
        try:
            if study.import_sheet(owner, key, sheet):
                imported += 1
            else:
                unchanged += 1
        except SaveConflict as conflict:
            conflicts.append(
                f"Line {number} ({key}, {owner}) was not imported: the study has another sheet"
                f" (version {conflict.newest.version})."
            )
    return ImportSummary(imported, unchanged, conflicts)


def _lines(study: AnnotationStudy, history: bool) -> Iterator[dict[str, Any]]:
    for one in study.judgments():
        if history:
            for past in study.history(one.annotator, one.item.key):
                yield _line(past) | {"saved_by": past.saved_by}
        elif one.version or one.role != ADJUDICATOR:  # adjudicators need not judge every item
            yield _line(one)


def _line(one: Judgment) -> dict[str, Any]:
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
        "version": one.version,
        "saved_at": one.saved_at,
        "sheet": one.sheet.to_dict(),
    }


def _row(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line as a row of a table."""
    sheet = line["sheet"]
    row = {name: line[name] for name in COLUMNS if name in line}
    row |= {name: sheet[name] for name in ("done", "no_pattern", "related", "note")}
    row["patterns"] = json.dumps(sheet["patterns"], ensure_ascii=False)
    return row | {"texts": len(line["texts"])}


def _read(study: AnnotationStudy, path: Path) -> dict[tuple[str, str], tuple[int, Sheet]]:
    """Return the last sheet of each (item, owner) in a file; raise unless all fit this study."""
    lines = list(_json_lines(path))
    header = _check_header(study, lines[0][1] if lines else None, path)
    assigned = {(one.item.key, one.annotator, one.role): one.item for one in study.judgments()}
    found: dict[tuple[str, str], tuple[int, Sheet]] = {}
    for number, line in lines[1:]:
        place = f"Line {number} of {path}"
        try:
            key, owner, role = (str(line[field]) for field in ("item", "annotator", "role"))
            given = line["sheet"]
        except (KeyError, TypeError):
            raise StoreError(
                f"{place} is not a sheet: it lacks item, annotator, role or sheet."
            ) from None
        item = assigned.get((key, owner, role))
        if item is None:
            what = f"not assigned to the {role} {owner!r}"
            what = what if key in study.items else "not an item of this study"
            raise StoreError(f"{place} is about {key!r}, which is {what}. Nothing was imported.")
        if (key, owner) in found and not header["history"]:
            raise StoreError(f"{place} is a second sheet of {owner!r} about {key!r}: remove one.")
        try:
            sheet = Sheet.parse(given, item)
            sheet.check(item)
        except FfmemError as error:
            raise StoreError(f"{place} is not valid: {error} Nothing was imported.") from None
        found[key, owner] = number, sheet
    return found


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".csv":
        raise StoreError(f"{path} is for spreadsheets. Export as .jsonl to import it again.")
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, json.loads(line)
    except OSError as error:
        raise StoreError(f"Cannot read {path} ({error.strerror}).") from None
    except RecursionError:
        raise StoreError(
            f"Line {number} of {path} is nested too deeply to be a sheet. Nothing was imported."
        ) from None
    except ValueError as error:
        raise StoreError(
            f"{path} is not an export of a study ({error}). Nothing was imported."
        ) from None


def _check_header(study: AnnotationStudy, header: Any, path: Path) -> dict[str, Any]:
    """Return the first line if the file is of a study with the same items."""
    if not isinstance(header, dict) or header.get("file") != NAME or "history" not in header:
        raise StoreError(
            f"{path} is not an export of a study. Import .jsonl files that"
            " `ffmem annotate export` wrote."
        )
    if header.get("format") != FORMAT:
        raise StoreError(
            f"{path} has format {header.get('format')!r}, not {FORMAT}. Export it again with this"
            " ffmem."
        )
    theirs, ours = header.get("settings"), study.settings
    theirs = theirs if isinstance(theirs, dict) else {}
    if theirs.get("plan") != ours["plan"]:
        raise StoreError(
            f"{path} is from another study (its items differ: `ffmem annotate init` drew them with"
            " different options or from another index). Nothing was imported."
        )
    return header

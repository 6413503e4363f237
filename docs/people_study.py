"""Writes docs/results/people: the draw of a study that people can begin, and what it takes.

    PYTHONPATH=. .venv/bin/python docs/people_study.py INDEX

Draws the items of `ffmem annotate init INDEX --per-layer 3` without creating the study, and records
what the draw is of: counts, words to read, and a hash of the items. Which memories were drawn is
not recorded, because annotators may read this repository.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ffmem
from docs.result_pages import table, write_sections
from ffmem.annotation.sampling import draw_plan
from ffmem.cli.annotate import READ_PER_MINUTE
from ffmem.files import write_text

OUT = Path(__file__).parent / "results" / "people"
PER_LAYER = 3
WRITING = 1.5
"""Minutes to describe and mark patterns in an item: an assumption, not a measurement."""
Row = dict[str, Any]


def draw(index: ffmem.Index) -> Row:
    """Return what the study would hold."""
    plan = draw_plan(index, per_layer=PER_LAYER)
    return plan.settings | {"items": len(plan.items)}


def sections(found: Row) -> dict[str, str]:
    """Return the table and the sentence of the page."""
    counts, options = found["counts"], found["options"]
    people, words = options["annotators"], max(counts["words"].values())
    minutes = words / READ_PER_MINUTE + WRITING * found["items"]
    rows = [
        ["what", "number"],
        ["memories", f"{counts['memories']} ({options['per_layer']} per layer)"],
        ["controls: random prefixes, mixed in blind", str(counts["controls"])],
        ["items for each annotator", str(found["items"])],
        ["annotators, each judges every item", str(len(people))],
        ["adjudicators", str(len(options["adjudicators"]))],
        ["words to read, each annotator", f"{words:,}"],
        ["minutes per item, estimated", f"{minutes / found['items']:.1f}"],
        ["hours per annotator, estimated", f"{minutes / 60:.1f}"],
        ["hash of the items", f"`{found['plan'][:16]}…`"],
    ]
    return {"draw": table(rows)}


def main() -> None:
    """Record the draw, and write the table of the page."""
    found = draw(ffmem.open(sys.argv[1]))
    write_text(OUT / "results.json", json.dumps(found, indent=1) + "\n")
    write_sections(OUT / "README.md", sections(found))


if __name__ == "__main__":
    main()

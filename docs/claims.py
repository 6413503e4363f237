"""Writes docs/results/comparison and the marked parts of docs/results, all from committed JSON.

    PYTHONPATH=. .venv/bin/python docs/claims.py

Every folder of docs/results that holds results of `ffmem report` is a model of the comparison.
"""

from pathlib import Path

import ffmem
from ffmem.experiments.base import NAMES
from ffmem.experiments.comparison import ReportComparison, read_report
from ffmem.experiments.render import MARKS, escape_markdown

RESULTS = Path(__file__).parent / "results"
COMPARISON = RESULTS / "comparison"
BEGIN, END = "<!-- docs/claims.py writes from here -->\n", "<!-- to here -->"


def report_folders() -> list[Path]:
    """Return the folders with results of a model, by name."""
    return sorted(
        folder
        for folder in RESULTS.iterdir()
        if any((folder / f"{name}.json").is_file() for name in NAMES)
    )


def verdict_table() -> str:
    """Return all claims with the verdict of every model, in Markdown."""
    comparison = ReportComparison([read_report(folder) for folder in report_folders()])
    head = ["claim", *comparison.labels]
    rows = [
        [claim.claim, *(f"{MARKS.get(one.verdict, '·')} {one.verdict}" for one in claim.answers)]
        for claim in comparison.claims
    ]
    lines = [head, ["---"] * len(head), *([*map(escape_markdown, row)] for row in rows)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def tally(name: str) -> str:
    """Return how many claims got each verdict in a model's report."""
    comparison = ReportComparison([read_report(RESULTS / name)])
    ((_, counts),) = comparison.tally
    given = zip(comparison.verdicts, counts, strict=True)
    return " · ".join(f"{verdict}: **{n}**" for verdict, n in given if n) + "\n"


PARTS = {
    "README.md": verdict_table,
    "mini-wiki/README.md": lambda: tally("mini-wiki"),
}
"""The marked part of each page of docs/results."""


def main() -> None:
    """Write the comparison and the marked parts."""
    ffmem.compare_reports(report_folders(), COMPARISON)
    (COMPARISON / "comparison.html").unlink()  # the same as comparison.md
    for name, part in PARTS.items():
        path = RESULTS / name
        before, rest = path.read_text(encoding="utf-8").split(BEGIN)
        path.write_text(before + BEGIN + part() + END + rest.split(END, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    main()

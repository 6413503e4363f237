"""The curve of a run: `curve.jsonl`, one row for every few steps and one for every evaluation.

A row is written as soon as it is known. A run that was killed may have written more rows than its
last checkpoint knows of, and half a row: going on takes them back, and writes them again.
"""

import json
from pathlib import Path
from typing import Any

from ffmem.errors import StoreError
from ffmem.files import storage_errors, sync, write_text

NAME = "curve.jsonl"

Row = dict[str, Any]


class Curve:
    """The rows of a run, in memory and in its folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.rows: list[Row] = []

    def begin(self) -> None:
        """Start with no row."""
        write_text(self.path, "")

    def take_up(self, n_rows: int) -> None:
        """Read the rows that the last checkpoint knows of, and forget later ones."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()[:n_rows]
            self.rows = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.path} cannot be read ({error}). {_ANEW}") from None
        if len(self.rows) < n_rows:
            raise StoreError(f"{self.path} has {len(self.rows)} rows, not {n_rows}. {_ANEW}")
        write_text(self.path, "".join(f"{line}\n" for line in lines))

    def add(self, row: Row) -> None:
        """Append a row."""
        self.rows.append(row)
        with storage_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def keep(self) -> None:
        """Force the rows to the disk: a checkpoint is about to rely on them."""
        with storage_errors(self.path):
            sync(self.path)


_ANEW = "It was changed or damaged: delete the folder and train again."

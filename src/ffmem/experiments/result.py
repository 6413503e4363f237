"""What an experiment found: rows of numbers, with everything needed to judge and redraw them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ffmem.errors import StoreError
from ffmem.experiments.quoted import QUOTED
from ffmem.files import write_text

Row = dict[str, Any]

FIELDS = ("experiment", "paper", "settings", "rows", "quoted")


@dataclass(frozen=True)
class Result:
    """One experiment on one model: `OUT/NAME.json`."""

    experiment: str
    paper: str
    """Figure, table or section of the paper."""
    settings: Row
    rows: list[Row]
    also: Row = field(default_factory=dict)
    """What belongs to no row, such as `auc`; it stands beside `rows` in the file."""
    fingerprint: str | None = None
    """SHA-256 of everything that decides the numbers; None if they are always measured again."""

    @property
    def quoted(self) -> list[dict[str, str]]:
        """The paper's own numbers, and only those."""
        return QUOTED.get(self.experiment, [])

    def to_dict(self) -> Row:
        """Return the content of the file."""
        main = (self.experiment, self.paper, self.settings, self.rows, self.quoted)
        content = dict(zip(FIELDS, main, strict=True))
        if self.fingerprint is not None:
            content["fingerprint"] = self.fingerprint
        return content | self.also

    def write(self, folder: Path) -> Path:
        """Commit the result to its file; the same result gives the same bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.experiment}.json"
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1, allow_nan=False)
        write_text(path, text + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Return the result in a file."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            main = [content.pop(name) for name in FIELDS]
            fingerprint = content.pop("fingerprint", None)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise StoreError(
                f"{path} is not an experiment's result ({type(error).__name__}: {error})."
                " Run `ffmem experiment` again."
            ) from None
        return cls(main[0], main[1], main[2], main[3], content, fingerprint)

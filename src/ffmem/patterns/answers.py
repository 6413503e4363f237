"""Answers of a language model, kept one by one as they come, so that a stop loses none.

    DIR/patterns/.explained.jsonl    first what decides the answers, then {"key", "answer"} each

A file of another model, prompt or index is begun anew. The last line may be cut by a kill.
"""

import json
import os
from pathlib import Path
from typing import Any

from ffmem.files import storage_errors, write_text


class Answers:
    """The answers to all questions of one run, by the question's key."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path = path
        self._run = run
        self._known: dict[str, Any] = {}
        self.left: str | None = None
        """Why answers that were there are not used; None if they are, or if there were none."""
        self._read()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def keep(self, key: str, answer: Any) -> None:
        """Keep one answer, down to the disk."""
        self._known[key] = answer
        line = json.dumps({"key": key, "answer": answer}) + "\n"
        with storage_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> None:
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        except FileNotFoundError:
            return self._begin()
        found = _parsed(lines[0]) if lines else None
        if found != self._run:
            self.left = _difference(found, self._run)
            return self._begin()
        for line in lines[1:]:
            entry = _parsed(line)
            if isinstance(entry, dict) and entry.keys() == {"key", "answer"}:
                self._known[entry["key"]] = entry["answer"]
        # Written anew, so that the next line does not go on where a kill cut the last one.
        return self._begin()

    def _begin(self) -> None:
        lines = [self._run, *({"key": key, "answer": a} for key, a in self._known.items())]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _difference(found: Any, wanted: dict[str, Any]) -> str:
    """Return in words what decides answers otherwise than before."""
    if not isinstance(found, dict):
        return "they cannot be read"
    names = [name for name in wanted if found.get(name) != wanted[name]]
    return f"they are of another {', '.join(names)}" if names else "they are of an older kind"

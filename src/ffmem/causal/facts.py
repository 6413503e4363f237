"""A file of prompts, each with the token that should follow: the facts that a model may know.

    .jsonl   {"prompt": "…", "target": "…"}        .tsv   prompt⇥target        .txt   prompt

A target that is missing is the model's own next token. Empty lines are counted, a broken line is
an error that names it: nothing is skipped in silence.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ffmem.errors import CorpusError


class Fact(NamedTuple):
    """One line of the file."""

    line: int
    """Counted from 1."""
    prompt: str
    target: str | None
    """None: the model's own next token."""


class Facts(NamedTuple):
    """The facts of a file, in its order."""

    path: Path
    facts: list[Fact]
    empty: int
    """How many lines were empty."""


def read_facts(path: str | Path) -> Facts:
    """Return the facts of a .jsonl, .tsv or .txt file."""
    path = Path(path)
    if path.suffix not in READERS:
        raise CorpusError(
            f"{path} was given as a file of prompts. Give one whose name ends in"
            f" {', '.join(READERS)}."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"Cannot read the prompts of {path}: {error}.") from None
    read = READERS[path.suffix]
    facts, empty = [], 0
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        if not line.strip():
            empty += 1
            continue
        try:
            prompt, target = read(line.removesuffix("\r"))
            if not prompt.strip():
                raise ValueError("its prompt is empty")
        except ValueError as error:
            raise CorpusError(f"Line {number} of {path} cannot be read: {error}.") from None
        facts.append(Fact(number, prompt, target))
    if not facts:
        raise CorpusError(f"{path} has no prompts: it is empty. Give one prompt per line.")
    return Facts(path, facts, empty)


def _from_json(line: str) -> tuple[str, str | None]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise ValueError('it is not {"prompt": text, "target": token}')
    target = row.get("target")
    if not (target is None or (isinstance(target, str) and target)):
        raise ValueError(f"its target is {target!r}, not a token")
    return row["prompt"], target


def _from_columns(line: str) -> tuple[str, str | None]:
    columns = line.split("\t")
    if len(columns) != 2 or not columns[1]:
        raise ValueError(f"it is not a prompt, one tab and a target ({len(columns)} columns)")
    return columns[0], columns[1]


def _from_text(line: str) -> tuple[str, str | None]:
    return line, None


READERS: dict[str, Callable[[str], tuple[str, str | None]]] = {
    ".jsonl": _from_json,
    ".tsv": _from_columns,
    ".txt": _from_text,
}

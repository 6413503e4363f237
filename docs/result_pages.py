"""Puts what a result says into its page: tables and sentences that a script writes from JSON.

    <!-- summary: from results.json -->
    …
    <!-- end of summary -->

A test writes every section again and compares, so a page cannot say what was not measured.
"""

import re
from pathlib import Path

from ffmem.errors import FfmemError
from ffmem.files import write_text
from ffmem.indexing.memory import visible_token

SECTION = re.compile(
    r"<!-- (?P<name>[a-z-]+): from results\.json -->\n(?P<text>.*?)<!-- end of (?P=name) -->",
    re.DOTALL,
)


def read_sections(page: str) -> dict[str, str]:
    """Return the sections of a page by their names."""
    return {found["name"]: found["text"] for found in SECTION.finditer(page)}


def write_sections(path: Path, sections: dict[str, str]) -> None:
    """Replace the sections of a page, which must have just these."""
    page = path.read_text(encoding="utf-8")
    there = read_sections(page)
    if set(there) != set(sections):
        raise FfmemError(
            f"{path} has the sections {', '.join(there) or 'none'}; the script writes"
            f" {', '.join(sections)}. Add or remove their marks."
        )
    parts = {name: f"{_begin(name)}{text}{_end(name)}" for name, text in sections.items()}
    write_text(path, SECTION.sub(lambda found: parts[found["name"]], page))


def _begin(name: str) -> str:
    return f"<!-- {name}: from results.json -->\n"


def _end(name: str) -> str:
    return f"<!-- end of {name} -->"


def table(rows: list[list[str]]) -> str:
    """Return a Markdown table; the first row is its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def percent(share: float, digits: int = 0) -> str:
    """Return a share as it stands in text; what rounds to 0 has no sign."""
    number = round(100 * share, digits) + 0.0
    return f"{number:.{digits}f} %".replace("-", "−")


def code(token: str) -> str:
    """Return a token as code in a table; ␣ is a space."""
    shown = visible_token(token).replace("|", r"\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"

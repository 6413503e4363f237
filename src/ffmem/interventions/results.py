"""What results of interventions share: tokens with probabilities, and tables between lines.

A result shows itself as text in a terminal and as HTML in a notebook, from the same three parts.
"""

import html
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from ffmem.indexing.memory import NO_VALUES, visible_token
from ffmem.text import format_number

INPUT_VALUES = (
    f"{NO_VALUES} Tokens beside a memory are what those vectors promote here; ff is their sum, what"
    " the static keys read."
)
"""Said of lambda layers, whose results also have `"values": "input"`."""


class TokenProbability(NamedTuple):
    """A token and its probability."""

    token: str
    id: int
    probability: float


class TableResult(ABC):
    """A result with lines above and below a table, whose first row names the columns."""

    @abstractmethod
    def above(self) -> list[str]:
        """Return the lines above the table."""

    @abstractmethod
    def table(self) -> list[Sequence[str]]:
        """Return the rows of the table."""

    @abstractmethod
    def below(self) -> list[str]:
        """Return the lines below the table."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.above()[0]}>"

    def __str__(self) -> str:
        return "\n".join([*self.above(), "", *align_columns(self.table()), "", *self.below()])

    def _repr_html_(self) -> str:
        def paragraph(lines: list[str]) -> str:
            return f"<p>{'<br>'.join(map(html.escape, lines))}</p>"

        def row(cells: Sequence[str], tag: str) -> str:
            parts = (f"<{tag} align='left'>{html.escape(cell)}</{tag}>" for cell in cells)
            return f"<tr>{''.join(parts)}</tr>"

        head, *body = self.table()
        rows = row(head, "th") + "".join(row(cells, "td") for cells in body)
        return f"{paragraph(self.above())}<table>{rows}</table>{paragraph(self.below())}"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of plain text, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def mark_position(tokens: Sequence[str], position: int) -> str:
    """Return the tokens of a prompt, with brackets around the one where it was read."""
    shown = [visible_token(token) for token in tokens]
    shown[position] = f"[{shown[position]}]"
    return " ".join(shown)


def format_tokens(tokens: Sequence[TokenProbability], n: int = 5) -> str:
    """Return the most probable tokens with their probabilities."""
    return "  ".join(f"{visible_token(t.token)} {t.probability:.3f}" for t in tokens[:n])


def format_change(change: float | None) -> str:
    """Return a signed number as tables show it."""
    return format_number(change, signed=True)

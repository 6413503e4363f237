"""Results that people read as a table between lines, in a terminal or a notebook."""

import html
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from ffmem.indexing.memory import visible_token


class TokenChance(NamedTuple):
    """A token and its probability."""

    token: str
    id: int
    probability: float


class Tabled(ABC):
    """A result with lines above and below a table, whose first row names the columns."""

    @abstractmethod
    def above(self) -> list[str]:
        """Return the lines above."""

    @abstractmethod
    def table(self) -> list[Sequence[str]]:
        """Return the rows."""

    @abstractmethod
    def below(self) -> list[str]:
        """Return the lines below."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.above()[0]}>"

    def __str__(self) -> str:
        return "\n".join([*self.above(), "", *columns(self.table()), "", *self.below()])

    def _repr_html_(self) -> str:
        """Return what a notebook shows; everything from model or prompt is escaped."""
        head, *body = self.table()
        rows = _row(head, "th") + "".join(_row(cells, "td") for cells in body)
        return f"{_paragraph(self.above())}<table>{rows}</table>{_paragraph(self.below())}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of plain text, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def number(value: float | None, form: str = "+.4f") -> str:
    """Return a number as tables show it; a dash where there is none."""
    return "–" if value is None else format(value, form)


def placed(tokens: Sequence[str], position: int) -> str:
    """Return the tokens of a prompt with the one at which it was read in brackets."""
    shown = [visible_token(token) for token in tokens]
    shown[position] = f"[{shown[position]}]"
    return " ".join(shown)


def listed(chances: Sequence[TokenChance], n: int = 5) -> str:
    """Return the likeliest tokens with their probabilities."""
    return "  ".join(f"{visible_token(c.token)} {c.probability:.3f}" for c in chances[:n])


def _paragraph(lines: list[str]) -> str:
    return f"<p>{'<br>'.join(map(html.escape, lines))}</p>"


def _row(cells: Sequence[str], tag: str) -> str:
    parts = (f"<{tag} align='left'>{html.escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{''.join(parts)}</tr>"

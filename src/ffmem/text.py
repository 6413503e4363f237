"""Numbers, shares and texts as people read them: the one place that formats them."""

import html
import re
from collections.abc import Iterable, Sequence

MISSING = "–"


def pluralize(n: int | float, plural: str) -> str:
    """Return a number with its noun, in the singular for 1: `pluralize(1, "memories")`."""
    shown = f"{n:,}" if isinstance(n, int) else f"{n:,g}"
    return f"{shown} {_singular(plural) if n == 1 else plural}"


def format_number(value: int | float | None, digits: int = 3, signed: bool = False) -> str:
    """Return 14,280, 0.00123 or −7: significant digits, thousands apart, a true minus sign."""
    if value is None:
        return MISSING
    if value == 0:  # also −0
        return "0"
    sign = "+" if signed else ""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:{sign},.0f}".replace("-", "−")
    return f"{value:{sign}.{digits}g}".replace("-", "−")


def format_rate(per_second: float, plural: str) -> str:
    """Return 12,345 tokens/s, 2.5 layers/s or, of what takes longer than a second, 4.2 s/layer."""
    if per_second < 1:
        return f"{format_number(1 / per_second)} s/{_singular(plural)}"
    return f"{format_number(per_second)} {plural}/s"


def format_share(share: int | float | None, signed: bool = False) -> str:
    """Return 81.7 %, 0.03 % or 100 %: a share from 0 to 1 in percent, small ones more exactly."""
    if share is None:
        return MISSING
    percent = 100 * share
    size = abs(percent)
    digits = 1 if size >= 1 or size == 0 else 2 if size >= 0.1 else 3 if size >= 0.01 else 4
    text = f"{percent:{'+' if signed else ''}.{digits}f}"
    if size in (0, 100):
        text = text.removesuffix(".0")
    return text.replace("-", "−") + " %"


def format_interval(low: int | float | None, high: int | float | None) -> str:
    """Return `95 % interval 62.7 to 90.5 %` of a share."""
    if low is None or high is None:
        return "no interval"
    return f"95 % interval {format_share(low).removesuffix(' %')} to {format_share(high)}"


def shorten_prefix(text: str, words: int = 10, characters: int = 120) -> str:
    """Return the end of a prefix: at most its last ten words, after an ellipsis if cut."""
    starts = [word.start() for word in re.finditer(r"\S+", text)]
    begin = starts[-words] if len(starts) > words else 0
    begin = max(begin, len(text) - characters)
    return f"…{text[begin:]}" if begin else text


def html_table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return rows as an HTML table for notebooks, with all text escaped and on the left."""
    cell = "<{0} style='text-align:left'>{1}</{0}>".format
    head = "".join(cell("th", html.escape(name)) for name in header)
    body = ("".join(cell("td", html.escape(str(value))) for value in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in (head, *body) if row)}</table>"


def _singular(plural: str) -> str:
    if plural.endswith("ies"):
        return plural.removesuffix("ies") + "y"
    return plural.removesuffix("es" if plural.endswith(("sses", "xes")) else "s")

"""A circuit as SVG: layers from bottom to top, positions from left to right.

The same drawing is a file and a part of the explorer's page, whose stylesheet overrides the colors
of the classes `node`, `edge`, `plus` and `minus`.
"""

from collections.abc import Callable, Collection, Mapping
from html import escape
from typing import NamedTuple

from ffmem.indexing.memory import visible_token
from ffmem.interventions.circuit_results import TARGET, CircuitResult
from ffmem.text import format_number

WIDTH, HEIGHT, GAP, LEFT = 72, 32, 8, 44
"""Size of a box, space between boxes, and width of the column of layer names, in pixels."""

NARROW = 44
"""Width of a token's box without a node above it: long prompts have many of these."""

PER_LINE = 4
"""Boxes of one layer and position in a row."""

STYLE = """\
svg.circuit{font:10px system-ui,sans-serif;background:#fff}
.circuit text{fill:#1c2430}.circuit .fade{fill:#667}
.circuit .mono{font-family:ui-monospace,monospace;font-size:9px}
.circuit rect{fill:#f3f5f8;stroke:#8a94a3}.circuit .plus rect{fill:#dbe8fb;stroke:#2c5aa0}
.circuit .minus rect{fill:#fbe0dc;stroke:#b0432f}.circuit .end rect{fill:#fff}
.circuit .edge{fill:none;stroke:#2c5aa0;opacity:.45}.circuit .edge.minus{stroke:#b0432f}
.circuit .pinned rect{stroke-width:3}.circuit .grouped rect{stroke-dasharray:4 2;stroke-width:2}
.circuit .off rect{fill:none;stroke-dasharray:1 3}.circuit .dim{opacity:.1}
"""
"""Colors of the file; the page has its own."""


class _Box(NamedTuple):
    x: float
    y: float
    width: float = WIDTH

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def draw_circuit(
    result: CircuitResult,
    *,
    link: Callable[[str], str] | None = None,
    classes: Mapping[str, str] | None = None,
    focus: Collection[str] = (),
    style: bool = True,
) -> str:
    """Return the drawing; `link` gives the URL of a node, `classes` further classes of nodes.

    With `focus`, edges that touch none of these nodes are dimmed.
    """
    boxes, rows, width, height = _place_boxes(result)
    parts = [
        f'<svg class="circuit" xmlns="http://www.w3.org/2000/svg" width="{width}"'
        f' height="{height}" viewBox="0 0 {width} {height}" role="img"'
        ' aria-label="Circuit: memories by layer and position">'
    ]
    parts += [f"<style>{STYLE}</style>"] if style else []
    for layer, y in rows.items():
        parts.append(f'<text class="fade mono" x="4" y="{y + 20}">L{layer}</text>')
    most = max((abs(edge.relevance) for edge in result.edges), default=1.0) or 1.0
    for edge in reversed(result.edges):  # the strongest on top
        start, end = boxes[edge.source], boxes[edge.target]
        x0, y0 = start.middle, start.y
        x1, y1 = end.middle, end.y + HEIGHT
        bend = max(14.0, abs(y0 - y1) / 2)
        sign = "plus" if edge.relevance >= 0 else "minus"
        dim = "" if not focus or {edge.source, edge.target} & set(focus) else " dim"
        title = (
            f"{edge.source} → {edge.target}: {format_number(edge.exact, signed=True)} exact,"
            f" {format_number(edge.estimate, signed=True)} estimated"
        )
        parts.append(
            f'<path class="edge {sign}{dim}" data-source="{edge.source}"'
            f' data-target="{edge.target}"'
            f' stroke-width="{0.6 + 5 * abs(edge.relevance) / most:.2f}"'
            f' d="M{x0:g} {y0:g}C{x0:g} {y0 - bend:g} {x1:g} {y1 + bend:g} {x1:g} {y1:g}">'
            f"<title>{escape(title)}</title></path>"
        )
    for node in result.nodes:
        sign = "plus" if node.exact >= 0 else "minus"
        extra = (classes or {}).get(node.id, "")
        token = visible_token(node.value_top[0]) if node.value_top else ""
        title = (
            f"{node.id} after {visible_token(result.tokens[node.position])}: m"
            f" {format_number(node.coefficient, signed=True)}, exact"
            f" {format_number(node.exact, signed=True)}, estimated"
            f" {format_number(node.estimate, signed=True)}; promotes"
            f" {' '.join(map(visible_token, node.value_top))}"
        )
        box = _draw_box(
            boxes[node.id], node.id, f"node {sign} {extra}".strip(), node.cell, token, title
        )
        parts.append(box if link is None else f'<a href="{escape(link(node.id))}">{box}</a>')
    for one in result.ends:
        shown = visible_token(one.token)
        name = (one.id, "end", str(one.position), shown, f"{one.position}: {shown}")
        parts.append(_draw_box(boxes[one.id], *name))
    shown = visible_token(result.target.token)
    title = f"target {shown}: logit {format_number(result.logit)}"
    parts.append(_draw_box(boxes[TARGET], TARGET, "end", "target", shown, title))
    return "\n".join([*parts, "</svg>"])


def _place_boxes(
    result: CircuitResult,
) -> tuple[dict[str, _Box], dict[int, float], float, float]:
    """Return the box of every node and end, where each layer begins, and the size of all."""
    slots: dict[tuple[int, int], list[str]] = {}
    for node in result.nodes:
        slots.setdefault((node.layer, node.position), []).append(node.id)
    columns: dict[int, float] = {}
    narrow: set[int] = set()
    x = float(LEFT)
    for position in range(result.position + 1):
        most = max((len(ids) for (_, at), ids in slots.items() if at == position), default=0)
        columns[position] = x
        if most or position == result.position:  # the target is above the last token
            x += min(max(most, 1), PER_LINE) * (WIDTH + GAP) + 2 * GAP
        else:
            narrow.add(position)
            x += NARROW + GAP
    rows: dict[int, float] = {}
    y = float(HEIGHT + 4 * GAP)
    for layer in sorted({layer for layer, _ in slots}, reverse=True):
        lines = max(-(-len(ids) // PER_LINE) for (at, _), ids in slots.items() if at == layer)
        rows[layer] = y
        y += lines * (HEIGHT + GAP) + 2 * GAP
    boxes = {TARGET: _Box(columns[result.position], float(GAP))}
    for end in result.ends:
        width = NARROW if end.position in narrow else WIDTH
        boxes[end.id] = _Box(columns[end.position], y + GAP, width)
    for (layer, position), ids in slots.items():
        for number, id in enumerate(sorted(ids)):
            line, place = divmod(number, PER_LINE)
            boxes[id] = _Box(
                columns[position] + place * (WIDTH + GAP), rows[layer] + line * (HEIGHT + GAP)
            )
    return boxes, rows, x, y + HEIGHT + 2 * GAP


def _draw_box(box: _Box, id: str, classes: str, first: str, second: str, title: str) -> str:
    longest = int(box.width - 6) // 6
    second = second if len(second) <= longest else f"{second[: longest - 1]}…"
    return (
        f'<g class="{classes}" data-id="{id}"><title>{escape(title)}</title>'
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{HEIGHT}" rx="4"/>'
        f'<text class="mono" x="{box.x + 5:g}" y="{box.y + 13:g}">{escape(first)}</text>'
        f'<text x="{box.x + 5:g}" y="{box.y + 26:g}">{escape(second)}</text></g>'
    )

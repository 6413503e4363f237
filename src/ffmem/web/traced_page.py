"""What the page of a trace shows: its grid, its predictions and its memories, ready to be drawn.

Every number is one of `ffmem.trace` or `ffmem.effect`; nothing is computed here but widths of bars.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from ffmem.causal.affected import Effect
from ffmem.causal.edits import Edit
from ffmem.causal.tabled import TokenChance
from ffmem.cells import Cell
from ffmem.indexing.memory import visible_token
from ffmem.web.limits import MOST_EDITS
from ffmem.web.state import State

if TYPE_CHECKING:  # these load torch, which the first page can do without
    from ffmem.causal.generation import Continuation
    from ffmem.causal.grid import Place
    from ffmem.causal.traced import MemoryAtWork, Trace, Traced, TracedLayer

COLUMNS = 40
"""Positions of a prompt that the grid shows at once."""

GENERATED = 12
"""Tokens of a continuation, unless more or fewer are asked for."""

View = Literal["before", "after", "ff"]
Run = Literal["plain", "edited", "changes"]

VIEWS: dict[View, tuple[str, str]] = {
    "before": ("before", "top(r): what the layer is given, before its feed-forward part"),
    "ff": ("feed-forward", "top(y): what the feed-forward part adds"),
    "after": ("after", "top(o): the layer's output, o = r + y"),
}
RUNS: dict[Run, tuple[str, str]] = {
    "plain": ("unedited", "The model as it is"),
    "edited": ("edited", "Under your edits; changed cells are marked"),
    "changes": ("changes only", "Only cells whose top token the edits change"),
}


@dataclass(frozen=True)
class Look:
    """How a trace is looked at, beside the state that all pages share."""

    view: View = "after"
    run: Run = "edited"
    """Which run the grid and the memories are of; without edits there is one."""
    layer: int | None = None
    first: int | None = None
    """The grid's first position; None: so that the picked one is seen."""
    generate: int = GENERATED
    effects: bool = False
    target: str | None = None
    """Whose log p the effects are of; None: the model's own next token."""

    def extra(self, **other: object) -> dict[str, object]:
        """Return the parameters that an address needs beside the state; `other` overrides."""
        plain = Look()
        found: dict[str, object] = {
            name: int(value) if isinstance(value, bool) else value
            for name, value in vars(self).items()
            if value != getattr(plain, name)
        }
        return found | other


class Switch(NamedTuple):
    """One of several ways to look, as a link."""

    name: str
    title: str
    href: str
    chosen: bool


class Column(NamedTuple):
    """A position of the prompt."""

    position: int
    token: str
    href: str
    picked: bool


class GridCell(NamedTuple):
    """One layer at one position."""

    token: str
    probability: float
    shade: str
    case: str
    title: str
    href: str
    picked: bool
    changed: bool


class GridRow(NamedTuple):
    """One layer of the grid."""

    layer: int
    href: str
    picked: bool
    cells: list[GridCell]


class Prediction(NamedTuple):
    """A token among the likeliest of either run; None where it is not among the run's."""

    token: str
    before: float | None
    after: float | None
    least: tuple[float, float]
    """The smallest probability in either run's list, which others do not exceed."""
    before_width: float
    after_width: float
    href: str
    """Which memories this token hangs on."""

    @property
    def change(self) -> float | None:
        """Edited minus unedited."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before


class MemoryRow(NamedTuple):
    """One memory of a layer, with what can be done to it."""

    memory: "MemoryAtWork"
    href: str
    width: float
    """Its share of the layer's contributions, the largest being 100."""
    edit: Edit | None
    toggle: str | None
    """Off, or as it was; None where there are too many edits already."""
    effect: float | None
    """The exact change of log p when it is off; None: not measured."""
    bar: tuple[float, float]
    """Where the effect's bar begins and how wide it is, in percent; 50 is no change."""


class LayerCard(NamedTuple):
    """One layer at the picked position."""

    layer: "TracedLayer"
    picked: bool
    memories: list[MemoryRow]
    edits: list[tuple[Edit, str]]
    """Edits of this layer, each with the address without it."""
    back: str
    """Where a form about one of its memories leads back to."""


class Measured(NamedTuple):
    """What was measured exactly, and of how many."""

    effect: Effect
    listed: int


@dataclass(frozen=True)
class TracedPage:
    """A trace as the page draws it."""

    trace: "Trace"
    state: State
    look: Look
    measured: Measured | None = None
    problem: str | None = None
    """Why effects were asked for and could not be measured."""

    @property
    def shown(self) -> "Traced":
        """The run that the memories are of."""
        edited = self.trace.edited
        return self.trace.plain if edited is None or self.look.run == "plain" else edited

    @property
    def picked(self) -> int:
        """The layer that is open: the chosen one, or the one that settles the prediction."""
        return self.shown.saturation if self.look.layer is None else self.look.layer

    @property
    def token(self) -> str:
        """The token at the picked position."""
        return self.trace.tokens[self.trace.position]

    def link(self, **other: object) -> str:
        """Return the address of this page, looked at otherwise."""
        return self.state.link("/trace", **self.look.extra(**other))

    # The grid.

    @property
    def first(self) -> int:
        """The first position that the grid shows."""
        n = len(self.trace.tokens)
        wanted = self.trace.position - COLUMNS * 3 // 4
        if self.look.first is not None:
            wanted = self.look.first
        return max(0, min(wanted, n - COLUMNS))

    @property
    def positions(self) -> range:
        """The positions that the grid shows."""
        return range(self.first, min(self.first + COLUMNS, len(self.trace.tokens)))

    @property
    def earlier(self) -> str | None:
        """The address of positions before those that the grid shows."""
        return self.link(first=max(0, self.first - COLUMNS)) if self.first else None

    @property
    def later(self) -> str | None:
        """The address of positions behind those that the grid shows."""
        end = self.positions.stop
        return self.link(first=end) if end < len(self.trace.tokens) else None

    def columns(self) -> list[Column]:
        """Return the prompt's tokens, as heads of the grid."""
        return [
            Column(p, self.trace.tokens[p], self.link(position=p), p == self.trace.position)
            for p in self.positions
        ]

    def rows(self) -> list[GridRow]:
        """Return the grid, the last layer first."""
        plain, edited = self.trace.grid, self.trace.edited_grid
        assert plain is not None, "the page asks for it"
        base = self.link(position=None, layer=None, first=None)
        other = plain if edited is None or self.look.run == "plain" else edited
        found = []
        for layer in reversed(range(len(plain))):
            cells = [
                self._cell(layer, p, plain[layer][p], other[layer][p], base) for p in self.positions
            ]
            href = f"{self.link(layer=layer)}#L{layer}"
            found.append(GridRow(layer, href, layer == self.picked, cells))
        return found

    def _cell(
        self, layer: int, position: int, plain: "Place", shown: "Place", base: str
    ) -> GridCell:
        here, before = self._viewed(shown), self._viewed(plain)
        changed = here is not None and before is not None and here.id != before.id
        said = (
            f"L{layer} at {position} {visible_token(self.trace.tokens[position])}:"
            f" before {_said(shown.residual)}, feed-forward {_said(shown.ff)},"
            f" after {_said(shown.output)} ({shown.case})"
        )
        return GridCell(
            "" if here is None else here.token,
            0.0 if here is None else here.probability,
            "p0" if here is None else f"p{round(10 * here.probability)}",
            shown.case,
            f"{said}; unedited {_said(before)}" if changed else said,
            f"{base}&position={position}&layer={layer}#L{layer}",
            layer == self.picked and position == self.trace.position,
            changed,
        )

    def _viewed(self, place: "Place") -> TokenChance | None:
        """Return what a cell shows; None of y where a layer has no memories."""
        return {"before": place.residual, "ff": place.ff, "after": place.output}[self.look.view]

    def views(self) -> list[Switch]:
        """Return which vector the grid may show."""
        return [
            Switch(name, title, self.link(view=view), view == self.look.view)
            for view, (name, title) in VIEWS.items()
        ]

    def runs(self) -> list[Switch]:
        """Return which run the grid may show; without edits there is no choice."""
        if self.trace.edited is None:
            return []
        return [
            Switch(name, title, self.link(run=run), run == self.look.run)
            for run, (name, title) in RUNS.items()
        ]

    def n_changed(self) -> int:
        """Return how many of all cells have another top token under the edits."""
        if self.trace.grid is None or self.trace.edited_grid is None:
            return 0
        pairs = zip(_flat(self.trace.grid), _flat(self.trace.edited_grid), strict=True)
        return sum(
            before.id != after.id
            for one, two in pairs
            if (before := self._viewed(one)) and (after := self._viewed(two))
        )

    # The prediction.

    def predictions(self) -> list[Prediction]:
        """Return the likeliest tokens of both runs, by the edited run if there is one."""
        before = {chance.id: chance for chance in self.trace.output_top}
        edited = self.trace.edited
        after = {} if edited is None else {chance.id: chance for chance in edited.output_top}
        most = max(chance.probability for chance in [*before.values(), *after.values()])
        least = self.trace.output_top[-1], (edited or self.trace.plain).output_top[-1]
        found = []
        for id in [*after, *(id for id in before if id not in after)]:
            old, new = before.get(id), after.get(id)
            token = (old or after[id]).token
            found.append(
                Prediction(
                    token,
                    old and old.probability,
                    new and new.probability,
                    (least[0].probability, least[1].probability),
                    100 * old.probability / most if old else 0.0,
                    100 * new.probability / most if new else 0.0,
                    f"{self.link(effects=1, target=token)}#effects",
                )
            )
        return found

    @property
    def best(self) -> tuple[TokenChance, TokenChance | None]:
        """The top prediction, unedited and edited."""
        edited = self.trace.edited
        return self.trace.output_top[0], None if edited is None else edited.output_top[0]

    def continuations(self) -> "list[tuple[str, Continuation]]":
        """Return what the model writes, unedited and edited."""
        found = (("unedited", self.trace.generated), ("edited", self.trace.edited_generated))
        return [(name, text) for name, text in found if text is not None]

    # The memories.

    @property
    def most_memories(self) -> int:
        """How many memories of a layer are listed; fewer where it has no more."""
        return max(len(layer.memories) for layer in self.shown.layers)

    def layers(self) -> list[LayerCard]:
        """Return the layers at the picked position, the last first."""
        return [self._layer(layer) for layer in reversed(self.shown.layers)]

    def _layer(self, layer: "TracedLayer") -> LayerCard:
        largest = max((memory.share for memory in layer.memories), default=0.0)
        changes = self._changes()
        most = max(map(abs, changes.values()), default=0.0)
        edits = [edit for edit in self.trace.edits if edit.cell.layer == layer.layer]
        state = State()  # the form carries the visitor's own
        return LayerCard(
            layer,
            layer.layer == self.picked,
            [self._row(memory, largest, changes, most) for memory in layer.memories],
            [(edit, self._without(edit.cell)) for edit in edits],
            f"{state.link('/trace', **self.look.extra(layer=layer.layer))}#L{layer.layer}",
        )

    def _changes(self) -> dict[Cell, float]:
        if self.measured is None:
            return {}
        return {memory.cell: memory.change for memory in self.measured.effect.memories}

    def _row(
        self, memory: "MemoryAtWork", largest: float, changes: dict[Cell, float], most: float
    ) -> MemoryRow:
        edit = next((edit for edit in self.trace.edits if edit.cell == memory.cell), None)
        if edit is not None:
            toggle: str | None = self._without(memory.cell)
        elif len(self.trace.edits) >= MOST_EDITS:
            toggle = None
        else:
            look = self.look.extra(layer=memory.cell.layer)  # back to where it was clicked
            place = self.state.with_edit(memory.cell, "off").link("/trace", **look)
            toggle = f"{place}#L{memory.cell.layer}"
        change = changes.get(memory.cell)
        half = 50 * abs(change) / most if change and most else 0.0
        return MemoryRow(
            memory,
            self.state.link(f"/m/{memory.cell}"),
            100 * memory.share / largest if largest else 0.0,
            edit,
            toggle,
            change,
            (50 - half if change is not None and change < 0 else 50.0, half),
        )

    def _without(self, cell: Cell) -> str:
        return self.state.without(cell).link("/trace", **self.look.extra())


def listed(trace: "Trace", look: Look) -> list[Cell]:
    """Return the memories on the page: the open layer's, then by their share of their layer."""
    page = TracedPage(trace, State(), look)
    by_share = sorted(
        (memory for layer in page.shown.layers for memory in layer.memories),
        key=lambda memory: (memory.cell.layer != page.picked, -memory.share, memory.cell),
    )
    edited = [edit.cell for edit in trace.edits]  # no longer at work, and asked about most
    return list(dict.fromkeys([*edited, *(memory.cell for memory in by_share)]))


def _said(chance: TokenChance | None) -> str:
    if chance is None:
        return "–"
    share = 100 * chance.probability
    return f"{visible_token(chance.token)} {share:.{0 if share >= 9.95 else 1}f} %"


def _flat(grid: "Sequence[Iterable[Place]]") -> "Iterable[Place]":
    return (place for row in grid for place in row)

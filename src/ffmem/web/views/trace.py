"""The trace page, and `/api/trace` and `/api/effect`: the JSON of `ffmem trace` and `ffmem effect`.

Everything that the page shows is in its address: the state of all pages, and `ViewOptions`. Every
number is one of `TraceResult` or `EffectResult`.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.indexing.memory import from_visible, visible_token
from ffmem.interventions.edits import Edit, Edits, parse_cells, resolve_position
from ffmem.text import format_share
from ffmem.web.auth import is_cross_site
from ffmem.web.library import Shelf
from ffmem.web.limits import (
    MOST_EDITS,
    MOST_GENERATED,
    MOST_RESULTS,
    MOST_TOKENS,
    NotHere,
    TooMuch,
    refuse_long,
)
from ffmem.web.site import Site
from ffmem.web.state import Asked, State

if TYPE_CHECKING:  # these load torch, which the first page does without
    from ffmem.interventions.effect import EffectResult
    from ffmem.interventions.prompts import LoadedModel
    from ffmem.interventions.results import TokenProbability
    from ffmem.interventions.trace import (
        Continuation,
        GridPoint,
        MemoryContribution,
        TracedLayer,
        TraceResult,
        TraceRun,
    )

EXAMPLES = (
    "In the last election the party won 48",
    "The capital of France is",
    "She was born in New York and grew up in",
)

COLUMNS = 40
"""Positions of a prompt that the grid shows at once."""

CANDIDATES = 50
"""Memories that `/api/effect` measures if none is named."""

MOST_ABLATED = 1_024
"""Tokens that ablations may run in one request: memories × tokens of the prompt."""

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
class ViewOptions:
    """How to look at a trace, beside the state that all pages share."""

    view: View = "after"
    run: Run = "edited"
    """The run that the grid and the memories show; without edits there is one."""
    layer: int | None = None
    first: int | None = None
    """The grid's first position. None: so that the selected one is visible."""
    generate: int = 12
    effects: bool = False
    target: str | None = None
    """The token whose log p the effects change. None: the model's own next token."""

    def extra(self, **other: object) -> dict[str, object]:
        """Return the parameters that an address needs beside the state; `other` overrides."""
        default = ViewOptions()
        found: dict[str, object] = {
            name: int(value) if isinstance(value, bool) else value
            for name, value in vars(self).items()
            if value != getattr(default, name)
        }
        return found | other


def read_options(
    view: View = "after",
    run: Run = "edited",
    layer: int | None = None,
    first: int | None = None,
    generate: int = 12,
    effects: bool = False,
    target: str | None = None,
) -> ViewOptions:
    """Return the options in an address."""
    check_generate(generate)
    target = refuse_long(target or "") or None
    return ViewOptions(view, run, layer, first, generate, effects, target)


def router(site: Site) -> APIRouter:
    """Return the routes of traces and effects."""
    routes = APIRouter(tags=["trace"])
    cache = PartCache()

    @routes.get("/trace", include_in_schema=False)
    async def page(
        request: Request,
        state: Asked,
        options: Annotated[ViewOptions, Depends(read_options)],
        typed: bool = False,
    ) -> Response:
        shelf = site.shelf(state)
        resolve_edits(state, shelf)
        n_layers = shelf.index.n_layers
        if options.layer is not None and not 0 <= options.layer < n_layers:
            raise NotHere(f"No layer {options.layer}: the model has layers 0 to {n_layers - 1}.")
        if typed:  # browsers send line ends of a text field as two characters
            text = state.text.replace("\r\n", "\n") or None
            kept = ViewOptions(view=options.view, run=options.run, generate=options.generate)
            return RedirectResponse(
                state.link("/trace", **kept.extra(text=text, position=None)), 303
            )
        context: dict[str, Any] = {
            "options": options,
            "extra": options.extra(),
            "examples": EXAMPLES,
            "views": VIEWS,
            "runs": RUNS,
            "held": bool(state.text) and is_cross_site(request),
        }
        if not state.text or context["held"]:
            return site.page(request, state, "trace.html", **context)

        def job(loaded: "LoadedModel") -> TracePage:
            return make_page(loaded, cache, shelf.name, state, options)

        async def coming() -> dict[str, Any]:
            return {"trace_page": await site.worker.run(shelf, job, request)}

        return await site.page_when_ready(
            request, state, "trace.html", coming(), waiting="Tracing the prompt …", **context
        )

    @routes.get("/api/trace", summary="A prompt, layer by layer, as `ffmem trace --json` prints it")
    async def trace(
        request: Request,
        state: Asked,
        top: Annotated[int, Query(description="Tokens and memories per layer.")] = 10,
        generate: Annotated[int, Query(description="Tokens of a continuation.")] = 0,
        grid: Annotated[bool, Query(description="Also every layer at every position.")] = True,
    ) -> JSONResponse:
        shelf = site.shelf(state)
        check_generate(generate)
        check_top(top)
        edits = resolve_edits(state, shelf)

        def job(loaded: "LoadedModel") -> dict[str, Any]:
            return run_trace(
                loaded, cache, shelf.name, state, edits, top=top, generate=generate, grid=grid
            ).to_dict()

        return JSONResponse(await site.worker.run(shelf, job, request))

    @routes.get("/api/effect", summary="Exact effects, as `ffmem effect --json` prints them")
    async def effect(
        request: Request,
        state: Asked,
        target: Annotated[str | None, Query(description="A token; the model's own next.")] = None,
        cells: Annotated[str | None, Query(description="Memories by name: L1N2,L3N4.")] = None,
        candidates: Annotated[
            int | None, Query(description="Memories with large estimates to measure too.")
        ] = None,
        top: Annotated[int, Query(description="Memories to return.")] = 20,
    ) -> JSONResponse:
        """Return what switching memories off, one at a time, does to a token; ignores edits."""
        shelf = site.shelf(state)
        check_top(top)
        names = [name for name in (cells or "").split(",") if name.strip()]
        named = list(
            dict.fromkeys(shelf.index.layout.resolve(cell) for cell in parse_cells("cells", names))
        )
        n = (0 if named else CANDIDATES) if candidates is None else candidates
        if n < 0:
            raise FfmemError(f"candidates must be 0 or more; got {n}.")
        measured = refuse_long(target or "") or None

        def job(loaded: "LoadedModel") -> dict[str, Any]:
            return run_effect(
                loaded, cache, shelf.name, state, measured, named, candidates=n, top=top
            ).to_dict()

        return JSONResponse(await site.worker.run(shelf, job, request))

    return routes


def resolve_edits(state: State, shelf: Shelf) -> Edits:
    """Return the active edits; raise if the model lacks one of their memories."""
    return state.edits().resolve(shelf.index.layout)


def check_generate(generate: int) -> None:
    """Raise if a continuation is too long."""
    if not 0 <= generate <= MOST_GENERATED:
        raise TooMuch(
            f"The page generates 0 to {MOST_GENERATED} tokens; {generate:,} were requested."
            " `ffmem trace --generate` has no limit."
        )


def check_top(top: int) -> None:
    """Raise unless a list can have so many entries."""
    if not 1 <= top <= MOST_RESULTS:
        raise TooMuch(f"top is {top:,}. Use 1 to {MOST_RESULTS}.")


# What runs in the worker's thread


class PartCache:
    """Parts of recent traces and effects; the least recently used make room.

    Switching a memory off then costs the edited run alone, and another position no grid.
    """

    def __init__(self, room: int = 100_000) -> None:
        self.room = room
        """Points of grids, or as much of something else, to keep: about 50 MB."""
        self.parts: OrderedDict[tuple[Hashable, ...], tuple[int, Any]] = OrderedDict()
        self.held = 0

    def remember(self, key: tuple[Hashable, ...], size: int, compute: Callable[[], Any]) -> Any:
        """Return what is kept under a key; compute it first if it is not."""
        if key in self.parts:
            self.parts.move_to_end(key)
            return self.parts[key][1]
        found = compute()
        self.parts[key] = (size, found)
        self.held += size
        while self.held > self.room:
            _, (freed, _) = self.parts.popitem(last=False)
            self.held -= freed
        return found

    def of_model(self, loaded: "LoadedModel", name: str) -> Callable[..., Any]:
        """Return `remember` for one index, its weights, dtype and start token."""
        assert loaded.index is not None, "a shelf has one"
        manifest = loaded.index.manifest
        model = (name, manifest.model.hash, manifest.dtype, loaded.start)
        return lambda key, size, compute: self.remember((*model, *key), size, compute)


def run_trace(
    loaded: "LoadedModel",
    cache: PartCache,
    name: str,
    state: State,
    edits: Edits,
    *,
    top: int = 10,
    generate: int = 0,
    grid: bool = True,
) -> "TraceResult":
    """Return what `ffmem.trace` returns, on the index of this name."""
    from ffmem.interventions.trace import trace

    check_tokens(loaded, state.text)
    return trace(
        loaded,
        state.text,
        edits,
        position=-1 if state.position is None else state.position,
        top=top,
        generate=generate,
        grid=grid,
        remember=cache.of_model(loaded, name),
    )


def run_effect(
    loaded: "LoadedModel",
    cache: PartCache,
    name: str,
    state: State,
    target: str | None,
    cells: list[Cell],
    *,
    candidates: int = 0,
    top: int,
) -> "EffectResult":
    """Return what `ffmem.effect` returns, without edits, on the index of this name."""
    from ffmem.interventions.effect import effect

    n_tokens = check_tokens(loaded, state.text)
    position = resolve_position(-1 if state.position is None else state.position, n_tokens)
    wanted, most = len(cells) + candidates, MOST_ABLATED // (position + 1)
    if wanted > most:
        raise TooMuch(
            f"The page measures {most} memories on {position + 1} tokens; {wanted} were requested."
            " Use fewer, or `ffmem effect`, which has no limit."
        )

    def compute() -> "EffectResult":
        return effect(
            loaded,
            state.text,
            target=target and from_visible(target),
            position=position,
            cells=cells,
            candidates=candidates,
            top=top,
        )

    key = ("effect", state.text, position, target, tuple(cells), candidates, top)
    found: EffectResult = cache.of_model(loaded, name)(key, 4 * min(top, wanted), compute)
    return found


def check_tokens(loaded: "LoadedModel", text: str) -> int:
    """Return how many tokens a prompt has; raise if they are too many."""
    from ffmem.interventions.prompts import read_prompt

    n_tokens = len(read_prompt(loaded, text).ids)
    if n_tokens > MOST_TOKENS:
        raise TooMuch(
            f"The prompt has {n_tokens:,} tokens, including any start token; the page takes"
            f" {MOST_TOKENS}. Shorten it, or use `ffmem trace`, which has no limit."
        )
    return n_tokens


def make_page(
    loaded: "LoadedModel", cache: PartCache, name: str, state: State, options: ViewOptions
) -> "TracePage":
    """Return the page of a prompt."""
    trace = run_trace(loaded, cache, name, state, state.edits(), generate=options.generate)
    page = TracePage(trace, state, options)
    if not options.effects:
        return page
    cells = page.listed_cells()
    measured = cells[: max(1, MOST_ABLATED // (trace.position + 1))]
    try:
        effect = run_effect(loaded, cache, name, state, options.target, measured, top=len(measured))
    except FfmemError as error:  # such as a target that is not a token: the trace is fine
        return TracePage(trace, state, options, problem=str(error))
    return TracePage(trace, state, options, effect)


# What the template shows


class GridCell(NamedTuple):
    """One layer at one position, as the grid shows it."""

    token: str
    shade: str
    case: str
    title: str
    href: str
    selected: bool
    changed: bool


class MemoryRow(NamedTuple):
    """What can be done to a memory, and what ablating it does."""

    edit: Edit | None
    toggle: str | None
    """The address with the memory off, or as it was. None: there are too many edits."""
    change: float | None
    """The exact change of log p when it is off. None: not measured."""
    bar: tuple[float, float]
    """Where the bar of the change begins and how wide it is, in percent; 50 is no change."""


@dataclass(frozen=True)
class TracePage:
    """A trace with its links."""

    trace: "TraceResult"
    state: State
    options: ViewOptions
    effect: "EffectResult | None" = None
    problem: str | None = None
    """Why requested effects could not be measured."""

    @property
    def shown(self) -> "TraceRun":
        """The run whose memories are shown."""
        edited = self.trace.edited
        return self.trace.plain if edited is None or self.options.run == "plain" else edited

    @property
    def selected(self) -> int:
        """The open layer: the chosen one, or the one from which the prediction stays."""
        return self.shown.saturation if self.options.layer is None else self.options.layer

    def link(self, **other: object) -> str:
        """Return the address of this page with other options."""
        return self.state.link("/trace", **self.options.extra(**other))

    @property
    def positions(self) -> range:
        """The positions that the grid shows."""
        n = len(self.trace.tokens)
        first = self.options.first
        if first is None:
            first = self.trace.position - COLUMNS * 3 // 4
        first = max(0, min(first, n - COLUMNS))
        return range(first, min(first + COLUMNS, n))

    @property
    def earlier(self) -> str | None:
        """The address of the positions before."""
        first = self.positions.start
        return self.link(first=max(0, first - COLUMNS)) if first else None

    @property
    def later(self) -> str | None:
        """The address of the positions after."""
        end = self.positions.stop
        return self.link(first=end) if end < len(self.trace.tokens) else None

    def grid_rows(self) -> list[tuple[int, list[GridCell]]]:
        """Return each layer with its cells, the last layer first."""
        plain, edited = self.trace.grid, self.trace.edited_grid
        assert plain is not None, "the page asks for it"
        shown = plain if edited is None or self.options.run == "plain" else edited
        base = self.link(position=None, layer=None, first=None)
        return [
            (
                layer,
                [
                    self._grid_cell(layer, p, plain[layer][p], shown[layer][p], base)
                    for p in self.positions
                ],
            )
            for layer in reversed(range(len(plain)))
        ]

    def _grid_cell(
        self, layer: int, position: int, plain: "GridPoint", shown: "GridPoint", base: str
    ) -> GridCell:
        here, before = self._viewed(shown), self._viewed(plain)
        changed = here is not None and before is not None and here.id != before.id
        title = (
            f"L{layer} at {position} {visible_token(self.trace.tokens[position])}:"
            f" before {_format_token(shown.residual)}, feed-forward {_format_token(shown.ff)},"
            f" after {_format_token(shown.output)} ({shown.case})"
        )
        return GridCell(
            "" if here is None else here.token,
            "p0" if here is None else f"p{round(10 * here.probability)}",
            shown.case,
            f"{title}; unedited {_format_token(before)}" if changed else title,
            f"{base}&position={position}&layer={layer}#L{layer}",
            layer == self.selected and position == self.trace.position,
            changed,
        )

    def _viewed(self, point: "GridPoint") -> "TokenProbability | None":
        """Return what a cell shows; None for y if the layer has no memories."""
        return {"before": point.residual, "ff": point.ff, "after": point.output}[self.options.view]

    def n_changed(self) -> int:
        """Return how many cells have another top token under the edits."""
        found = 0
        for plain, edited in zip(self.trace.grid or [], self.trace.edited_grid or [], strict=False):
            for one, other in zip(plain, edited, strict=True):
                before, after = self._viewed(one), self._viewed(other)
                found += before is not None and after is not None and before.id != after.id
        return found

    def continuations(self) -> "list[tuple[str, Continuation]]":
        """Return what the model writes, unedited and edited."""
        found = (("unedited", self.trace.generated), ("edited", self.trace.edited_generated))
        return [(name, written) for name, written in found if written is not None]

    def layer_edits(self, layer: int) -> list[tuple[Edit, str]]:
        """Return the edits of a layer, each with the address without it."""
        edits = [edit for edit in self.trace.edits if edit.cell.layer == layer]
        return [(edit, self._without(edit.cell)) for edit in edits]

    def back(self, layer: int) -> str:
        """Return where a form about a memory leads back to; it carries the state itself."""
        return f"{State().link('/trace', **self.options.extra(layer=layer))}#L{layer}"

    def memory_rows(self, layer: "TracedLayer") -> "list[tuple[MemoryContribution, MemoryRow]]":
        """Return the memories of a layer that contribute most."""
        changes = {row.cell: row.change for row in self.effect.memories} if self.effect else {}
        largest = max(map(abs, changes.values()), default=0.0)
        return [
            (memory, self._memory_row(memory.cell, changes.get(memory.cell), largest))
            for memory in layer.memories
        ]

    def _memory_row(self, cell: Cell, change: float | None, largest: float) -> MemoryRow:
        edit = next((edit for edit in self.trace.edits if edit.cell == cell), None)
        toggle: str | None = None
        if edit is not None:
            toggle = self._without(cell)
        elif len(self.trace.edits) < MOST_EDITS:
            off = self.state.with_edit(cell, "off")
            toggle = f"{off.link('/trace', **self.options.extra(layer=cell.layer))}#L{cell.layer}"
        half = 50 * abs(change) / largest if change and largest else 0.0
        begin = 50 - half if change is not None and change < 0 else 50.0
        return MemoryRow(edit, toggle, change, (begin, half))

    def _without(self, cell: Cell) -> str:
        return self.state.without(cell).link("/trace", **self.options.extra())

    def listed_cells(self) -> list[Cell]:
        """Return the memories on the page: edited ones, the open layer's, then by their share."""
        by_share = sorted(
            (memory for layer in self.shown.layers for memory in layer.memories),
            key=lambda memory: (memory.cell.layer != self.selected, -memory.share, memory.cell),
        )
        edited = [edit.cell for edit in self.trace.edits]
        return list(dict.fromkeys([*edited, *(memory.cell for memory in by_share)]))


def _format_token(token: "TokenProbability | None") -> str:
    return (
        "–" if token is None else f"{visible_token(token.token)} {format_share(token.probability)}"
    )

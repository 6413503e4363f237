"""The trace page, and `/api/trace` and `/api/effect`: the JSON of `ffmem trace` and `ffmem effect`.

Everything that the page shows is in its URL: the state of all pages, and `ViewOptions`. Every
number comes from `TraceResult` or `EffectResult`.
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
from ffmem.interventions.results import (
    EffectResult,
    GridPoint,
    MemoryContribution,
    TokenProbability,
    TracedLayer,
    TraceResult,
    TraceRun,
)
from ffmem.text import format_share
from ffmem.web.auth import is_cross_site
from ffmem.web.catalog import ServedIndex
from ffmem.web.errors import LimitExceeded
from ffmem.web.layer_table import check_layer
from ffmem.web.site import Site
from ffmem.web.state import MAX_EDITS, State, StateParam, check_length

if TYPE_CHECKING:  # loads torch, which the first page does without
    from ffmem.interventions.forward import LoadedModel

MAX_TOKENS = 256
"""Tokens of a prompt: every layer is read at every one of them."""

MAX_GENERATED = 64
"""Tokens of a continuation."""

MAX_RESULTS = 200
"""Entries of a list."""

MAX_ABLATED = 1_024
"""Tokens that ablations may run in one request: memories × tokens of the prompt."""

N_COLUMNS = 40
"""Positions of a prompt that the grid shows at once."""

N_CANDIDATES = 50
"""Memories that `/api/effect` measures if none is named."""

View = Literal["before", "after", "ff"]
Run = Literal["plain", "edited", "changes"]


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
    """The token whose log p the effects change. None or empty: the model's own next token."""

    def __post_init__(self) -> None:
        check_generate(self.generate)
        check_length(self.target or "")

    def extra(self, **other: object) -> dict[str, object]:
        """Return its URL parameters, without defaults; `other` overrides."""
        default = ViewOptions()
        changed = {
            name: int(value) if isinstance(value, bool) else value
            for name, value in vars(self).items()
            if value not in (getattr(default, name), "")
        }
        return {**changed, **other}


def router(site: Site) -> APIRouter:
    """Return the routes of traces and effects."""
    routes = APIRouter(tags=["trace"])
    cache = PartCache()

    @routes.get("/trace", include_in_schema=False)
    async def page(
        request: Request,
        state: StateParam,
        options: Annotated[ViewOptions, Depends(ViewOptions)],
        typed: bool = False,
    ) -> Response:
        served = site.served(state)
        resolve_edits(state, served)
        if options.layer is not None:
            check_layer(served.index, options.layer)
        if typed:  # browsers send line ends of a text field as two characters
            text = state.text.replace("\r\n", "\n") or None
            kept = ViewOptions(view=options.view, run=options.run, generate=options.generate)
            return RedirectResponse(
                state.link("/trace", **kept.extra(text=text, position=None)), 303
            )
        context: dict[str, Any] = {
            "options": options,
            "extra": options.extra(),
            "needs_consent": bool(state.text) and is_cross_site(request),
            "served": served,
            "has_chat": site.worker.has_chat(served) is not False,
        }
        if not state.text or context["needs_consent"]:
            return site.page(request, state, "trace.html", **context)

        def job(loaded: "LoadedModel") -> TracePage:
            return make_page(loaded, cache, served.name, state, options)

        async def content() -> dict[str, Any]:
            return {"trace_page": await site.worker.run(served, job, request)}

        return await site.stream_page(
            request, state, "trace.html", content(), waiting="Tracing the prompt", **context
        )

    @routes.get(
        "/api/trace",
        summary="A prompt, layer by layer, as `ffmem trace --json` prints it",
        response_model=TraceResult,
    )
    async def trace(
        request: Request,
        state: StateParam,
        top: Annotated[int, Query(description="Tokens and memories per layer.")] = 10,
        generate: Annotated[int, Query(description="Tokens of a continuation.")] = 0,
        grid: Annotated[bool, Query(description="Also every layer at every position.")] = True,
    ) -> JSONResponse:
        served = site.served(state)
        check_generate(generate)
        check_top(top)
        edits = resolve_edits(state, served)

        def job(loaded: "LoadedModel") -> dict[str, Any]:
            return run_trace(
                loaded, cache, served.name, state, edits, top=top, generate=generate, grid=grid
            ).to_dict()

        return JSONResponse(await site.worker.run(served, job, request))

    @routes.get(
        "/api/effect",
        summary="Exact effects, as `ffmem effect --json` prints them",
        response_model=EffectResult,
    )
    async def effect(
        request: Request,
        state: StateParam,
        target: Annotated[
            str | None, Query(description="A token. Default: the model's next token.")
        ] = None,
        cells: Annotated[str | None, Query(description="Memories by name: L1N2,L3N4.")] = None,
        candidates: Annotated[
            int | None, Query(description="Number of memories with large estimates to measure too.")
        ] = None,
        top: Annotated[int, Query(description="Memories to return.")] = 20,
    ) -> JSONResponse:
        """Return what switching memories off, one at a time, does to a token; ignores edits."""
        served = site.served(state)
        check_top(top)
        names = [name for name in (cells or "").split(",") if name.strip()]
        named = list(
            dict.fromkeys(served.index.layout.resolve(cell) for cell in parse_cells("cells", names))
        )
        n = (0 if named else N_CANDIDATES) if candidates is None else candidates
        if n < 0:
            raise FfmemError(f"candidates must be 0 or more; got {n}.")
        check_length(target or "")

        def job(loaded: "LoadedModel") -> dict[str, Any]:
            return run_effect(
                loaded, cache, served.name, state, target or None, named, candidates=n, top=top
            ).to_dict()

        return JSONResponse(await site.worker.run(served, job, request))

    return routes


def resolve_edits(state: State, served: ServedIndex) -> Edits:
    """Return the active edits; raise if the model lacks one of their memories."""
    return state.edits().resolve(served.index.layout)


def check_generate(generate: int) -> None:
    """Raise if a continuation is too long."""
    if not 0 <= generate <= MAX_GENERATED:
        raise LimitExceeded(
            f"The page generates 0 to {MAX_GENERATED} tokens; {generate:,} were requested."
            " `ffmem trace --generate` has no limit."
        )


def check_top(top: int) -> None:
    """Raise unless a list can have this many entries."""
    if not 1 <= top <= MAX_RESULTS:
        raise LimitExceeded(f"top is {top:,}. Use 1 to {MAX_RESULTS}.")


# Run in the worker's thread


class PartCache:
    """An LRU cache of parts of traces and effects.

    Switching a memory off then costs the edited run alone, and another position no grid.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self.capacity = capacity
        """Total size in points of a grid; about 50 MB."""
        self.parts: OrderedDict[tuple[Hashable, ...], tuple[int, Any]] = OrderedDict()
        self.size = 0

    def remember(self, key: tuple[Hashable, ...], size: int, compute: Callable[[], Any]) -> Any:
        """Return the part with a key; compute it first if it is missing."""
        if key in self.parts:
            self.parts.move_to_end(key)
            return self.parts[key][1]
        found = compute()
        self.parts[key] = (size, found)
        self.size += size
        while self.size > self.capacity:
            _, (freed, _) = self.parts.popitem(last=False)
            self.size -= freed
        return found

    def of_model(self, loaded: "LoadedModel", name: str) -> Callable[..., Any]:
        """Return `remember` with keys bound to the current state of an index and its model."""
        index = loaded.index
        assert index is not None
        # Percentiles come from the index, and an unfinished one grows.
        state = (index.n_prefixes, index.live is None)
        model = (name, index.manifest.model.hash, index.manifest.dtype, loaded.start, *state)
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
) -> TraceResult:
    """Return what `ffmem.trace` returns, on the index of this name."""
    from ffmem.interventions.trace import trace

    check_tokens(loaded, state)
    return trace(
        loaded,
        state.text,
        edits,
        chat=state.chat,
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
) -> EffectResult:
    """Return what `ffmem.effect` returns, without edits, on the index of this name."""
    from ffmem.interventions.effect import effect

    n_tokens = check_tokens(loaded, state)
    position = resolve_position(-1 if state.position is None else state.position, n_tokens)
    n_memories, most = len(cells) + candidates, MAX_ABLATED // (position + 1)
    if n_memories > most:
        raise LimitExceeded(
            f"The page measures {most} memories on {position + 1} tokens; {n_memories} were"
            " requested. Use fewer, or `ffmem effect`, which has no limit."
        )

    def compute() -> EffectResult:
        return effect(
            loaded,
            state.text,
            chat=state.chat,
            target=target and from_visible(target),
            position=position,
            cells=cells,
            candidates=candidates,
            top=top,
        )

    key = ("effect", state.text, state.chat, position, target, tuple(cells), candidates, top)
    found: EffectResult = cache.of_model(loaded, name)(key, 4 * min(top, n_memories), compute)
    return found


def check_tokens(loaded: "LoadedModel", state: State) -> int:
    """Return how many tokens a prompt has; raise if they are too many."""
    from ffmem.interventions.forward import read_prompt

    n_tokens = len(read_prompt(loaded, state.text, state.chat).ids)
    if n_tokens > MAX_TOKENS:
        raise LimitExceeded(
            f"The prompt has {n_tokens:,} tokens, including any start token; the page takes"
            f" {MAX_TOKENS}. Shorten it, or use `ffmem trace`, which has no limit."
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
    measured = cells[: max(1, MAX_ABLATED // (trace.position + 1))]
    try:
        target, top = options.target or None, len(measured)
        effect = run_effect(loaded, cache, name, state, target, measured, top=top)
    except FfmemError as error:  # such as a target that is not a token: the trace is fine
        return TracePage(trace, state, options, problem=str(error))
    return TracePage(trace, state, options, effect)


# Shown by the template


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
    """The URL with the memory off, or as it was. None: there are too many edits."""
    change: float | None
    """The exact change of log p when it is off. None: not measured."""
    bar: tuple[float, float]
    """Where the bar of the change begins and how wide it is, in percent; 50 is no change."""


@dataclass(frozen=True)
class TracePage:
    """A trace with its links."""

    trace: TraceResult
    state: State
    options: ViewOptions
    effect: EffectResult | None = None
    problem: str | None = None
    """Why requested effects could not be measured."""

    @property
    def shown(self) -> TraceRun:
        """The run whose memories are shown."""
        edited = self.trace.edited
        return self.trace.plain if edited is None or self.options.run == "plain" else edited

    @property
    def selected(self) -> int:
        """The open layer: the chosen one, or the one from which the prediction stays."""
        return self.shown.saturation if self.options.layer is None else self.options.layer

    def link(self, **other: object) -> str:
        """Return the URL of this page with other options."""
        return self.state.link("/trace", **self.options.extra(**other))

    @property
    def positions(self) -> range:
        """The positions that the grid shows."""
        n = len(self.trace.tokens)
        first = self.options.first
        if first is None:
            first = self.trace.position - N_COLUMNS * 3 // 4
        first = max(0, min(first, n - N_COLUMNS))
        return range(first, min(first + N_COLUMNS, n))

    @property
    def earlier(self) -> str | None:
        """The URL of the positions before."""
        first = self.positions.start
        return self.link(first=max(0, first - N_COLUMNS)) if first else None

    @property
    def later(self) -> str | None:
        """The URL of the positions after."""
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
        self, layer: int, position: int, plain: GridPoint, shown: GridPoint, base: str
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

    def _viewed(self, point: GridPoint) -> TokenProbability | None:
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

    def continuations(self) -> list[tuple[str, str, str | None]]:
        """Return what the model writes, unedited and edited, and why it ended."""
        trace = self.trace
        found = (
            ("unedited", trace.generated, trace.generated_ended),
            ("edited", trace.edited_generated, trace.edited_generated_ended),
        )
        return [(name, text, ended) for name, text, ended in found if text is not None]

    def layer_edits(self, layer: int) -> list[tuple[Edit, str]]:
        """Return the edits of a layer, each with the URL without it."""
        edits = [edit for edit in self.trace.edits if Cell.parse(edit.cell).layer == layer]
        return [(edit, self._without(edit.cell)) for edit in edits]

    def back(self, layer: int) -> str:
        """Return where a form about a memory leads back to; it carries the state itself."""
        return f"{State().link('/trace', **self.options.extra(layer=layer))}#L{layer}"

    def memory_rows(self, layer: TracedLayer) -> list[tuple[MemoryContribution, MemoryRow]]:
        """Return the memories of a layer that contribute most."""
        changes = {row.cell: row.change for row in self.effect.memories} if self.effect else {}
        largest = max(map(abs, changes.values()), default=0.0)
        return [
            (memory, self._memory_row(layer.layer, memory.cell, changes.get(memory.cell), largest))
            for memory in layer.memories
        ]

    def _memory_row(self, layer: int, cell: str, change: float | None, largest: float) -> MemoryRow:
        edit = next((edit for edit in self.trace.edits if edit.cell == cell), None)
        toggle: str | None = None
        if edit is not None:
            toggle = self._without(cell)
        elif len(self.trace.edits) < MAX_EDITS:
            off = self.state.with_edit(Cell.parse(cell), "off")
            toggle = f"{off.link('/trace', **self.options.extra(layer=layer))}#L{layer}"
        half = 50 * abs(change) / largest if change and largest else 0.0
        begin = 50 - half if change is not None and change < 0 else 50.0
        return MemoryRow(edit, toggle, change, (begin, half))

    def _without(self, cell: str) -> str:
        return self.state.without(cell).link("/trace", **self.options.extra())

    def listed_cells(self) -> list[Cell]:
        """Return the memories on the page: edited ones, the open layer's, then by their share."""
        found = [
            (layer.layer != self.selected, -memory.share, Cell.parse(memory.cell))
            for layer in self.shown.layers
            for memory in layer.memories
        ]
        edited = [Cell.parse(edit.cell) for edit in self.trace.edits]
        return list(dict.fromkeys([*edited, *(cell for _, _, cell in sorted(found))]))


def _format_token(token: TokenProbability | None) -> str:
    return (
        "–" if token is None else f"{visible_token(token.token)} {format_share(token.probability)}"
    )

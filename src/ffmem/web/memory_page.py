"""The page of one memory, and its twins for programs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool
from typing_extensions import TypedDict

from ffmem.cells import Cell
from ffmem.indexing.memory import NO_VALUES, Memory
from ffmem.web.library import Shelf
from ffmem.web.memory_view import Piece, histogram, pieces_of, side
from ffmem.web.pattern_view import of_memory, told
from ffmem.web.site import Site
from ffmem.web.snippets import snippets
from ffmem.web.state import Asked, State

if TYPE_CHECKING:
    from ffmem.interventions.prompts import LoadedModel

SECONDS = 4.0
"""How long neighbours are looked for; which layers were reached by then is said."""

COLOURED = 12
"""Triggers of each sign that are read token by token on request."""

By = Literal["value", "key"]

Colours = dict[int, dict[int, list[Piece]]]
"""By sign, then by rank."""


class SimilarMemory(TypedDict):
    """A memory that points the same way, or the opposite one."""

    cell: str
    cosine: float
    value_top: list[str]
    """What sign(cosine) · v promotes."""


class Similar(TypedDict):
    """The memories most like one, and how far they were looked for."""

    by: By
    layers_searched: list[int]
    layers: int
    memories: list[SimilarMemory]
    value_note: str | None
    """Why `value_top` is empty, where memories have no static values."""


def router(site: Site) -> APIRouter:
    """Return the routes of one memory."""
    routes = APIRouter()

    def plain(request: Request, shelf: Shelf, cell: Cell, state: State) -> Response:
        """Return the page of what the index knows."""
        context = _context(shelf, cell)
        context |= {"similar": None, "tokens": False, "neighbours": None, **_sides(context, {})}
        return site.page(request, state, "memory.html", **context)

    @routes.get("/m/{cell:path}", include_in_schema=False)
    async def memory(
        request: Request,
        cell: str,
        state: Asked,
        similar: By | None = None,
        tokens: bool = False,
    ) -> Response:
        shelf = site.shelf(state)
        named = shelf.index.layout.resolve(cell)
        if cell != str(named):
            return RedirectResponse(state.link(f"/m/{named}"), 307)
        if similar is None and not tokens:
            return await run_in_threadpool(plain, request, shelf, named, state)
        context = await run_in_threadpool(_context, shelf, named)
        context |= {"similar": similar, "tokens": tokens}

        async def coming() -> dict[str, Any]:
            colours = await site.worker.run(shelf, _colouring(context["memory"])) if tokens else {}
            found = await _similar(site, shelf, named, similar, 10) if similar else None
            return {**await run_in_threadpool(_sides, context, colours), "neighbours": found}

        waiting = "Asking the model …" if site.worker.is_loaded(shelf) else "Loading the model …"
        return await site.page_when_ready(
            request, state, "memory.html", coming(), waiting=waiting, **context
        )

    @routes.get("/api/m/{cell}/similar", summary="Memories whose value or key points the same way")
    async def similar_memories(
        cell: str,
        state: Asked,
        by: By = "value",
        n: Annotated[int, Query(ge=1, le=100)] = 10,
    ) -> Similar:
        shelf = site.shelf(state)
        named = shelf.index.layout.resolve(cell)
        return await _similar(site, shelf, named, by, n)

    @routes.get("/api/m/{cell}", summary="One memory, as `ffmem show --json` gives it")
    def memory_json(cell: str, state: Asked) -> dict[str, Any]:
        index = site.shelf(state).index
        memory = index[cell]
        return {**memory.to_dict(), "patterns": told(index, memory)}

    return routes


def _context(shelf: Shelf, cell: Cell) -> dict[str, Any]:
    """Return what the page shows without the model."""
    index = shelf.index
    memory = index[cell]
    sample = index.sample(cell)
    number = index.layout.number(cell)
    around = [
        index.layout.at(place) if 0 <= place < len(index) else None
        for place in (number - 1, number + 1)
    ]
    return {
        "memory": memory,
        "patterns": of_memory(index, memory),
        "cell": cell,
        "previous": around[0],
        "following": around[1],
        "sample": sample,
        "bars": histogram(sample),
        "ends": (float(sample.min()), float(sample.max())) if len(sample) else None,
        "snippets": snippets(shelf.name, index.manifest.model, cell),
    }


def _sides(context: dict[str, Any], colours: Colours) -> dict[str, Any]:
    """Return the triggers of both signs; an ungated model has one."""
    memory: Memory = context["memory"]
    signs = (1, -1) if memory.gated else (1,)
    return {"sides": [side(memory, sign, context["sample"], colours.get(sign)) for sign in signs]}


def _colouring(memory: Memory) -> "Callable[[LoadedModel], Colours]":
    """Return a job that reads the first triggers of a memory token by token."""

    def job(at: "LoadedModel") -> Colours:
        from ffmem.interventions.prompts import coefficients_along

        assert at.index is not None, "a shelf has one"
        found: Colours = {}
        for sign, triggers in ((1, memory.triggers), (-1, memory.negative_triggers)):
            first = triggers[:COLOURED]
            rows = [at.index.sentences.row(trigger.sentence) for trigger in first]
            texts = [row.ids[: trigger.length] for row, trigger in zip(rows, first, strict=True)]
            found[sign] = {
                trigger.rank: pieces_of(row, trigger.length, numbers, at.index.token)
                for row, trigger, numbers in zip(
                    rows,
                    first,
                    coefficients_along(at.memories, memory.cell, texts, at.start),
                    strict=True,
                )
            }
        return found

    return job


def _promoted(shelf: Shelf, cell: Cell, cosine: float) -> list[str]:
    """Return the tokens that a memory promotes where it points our way: those of sign(cos) · v."""
    value = shelf.index[cell].value
    return [token.token for token in (value.top if cosine >= 0 else value.bottom)[:6]]


async def _similar(site: Site, shelf: Shelf, cell: Cell, by: By, n: int) -> Similar:
    """Return the neighbours of a memory, with the tokens that their values promote."""

    def job(at: "LoadedModel") -> Similar:
        from ffmem.models.memories import neighbourhood

        around = neighbourhood(at.memories, cell, by, n, SECONDS)
        return {
            "by": by,
            "layers_searched": around.layers,
            "layers": shelf.index.n_layers,
            "memories": [
                {
                    "cell": str(one.cell),
                    "cosine": one.cosine,
                    "value_top": _promoted(shelf, one.cell, one.cosine),
                }
                for one in around.found
            ],
            "value_note": None if shelf.index.manifest.model.has_values else NO_VALUES,
        }

    return await site.worker.run(shelf, job)

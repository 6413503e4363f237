"""The page that follows a prompt through the model, and its twins for programs.

Everything that is looked at stands in the address: the state of all pages, and how to look
(`Look`). A form's address is made plain before anything is computed.
"""

from typing import TYPE_CHECKING, Annotated, Any, cast

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response

from ffmem.causal.edits import Edits, cells_of
from ffmem.errors import FfmemError
from ffmem.indexing.memory import from_visible
from ffmem.web.library import Shelf
from ffmem.web.limits import MOST_GENERATED, MOST_RESULTS, NotHere, TooMuch, refuse_long
from ffmem.web.runs import ABLATED, Question, Runs
from ffmem.web.site import Site
from ffmem.web.state import Asked, State
from ffmem.web.trace_answers import EffectAnswer, TraceAnswer
from ffmem.web.traced_page import GENERATED, Look, Measured, Run, TracedPage, View, listed

if TYPE_CHECKING:
    from ffmem.causal.opened import Opened

EXAMPLES = (
    "In the last election the party won 48",
    "The capital of France is",
    "She was born in New York and grew up in",
)

CANDIDATES = 50
"""Memories that `/api/effect` measures where none is named."""


def looked(
    view: View = "after",
    run: Run = "edited",
    layer: int | None = None,
    first: int | None = None,
    generate: int = GENERATED,
    effects: bool = False,
    target: str | None = None,
) -> Look:
    """Return how an address looks at a trace."""
    refuse_much_text(generate)
    return Look(view, run, layer, first, generate, effects, refuse_long(target or "") or None)


Looked = Annotated[Look, Depends(looked)]


def router(site: Site) -> APIRouter:
    """Return the routes of traces and effects."""
    routes = APIRouter(tags=["trace"])
    runs = Runs()

    @routes.get("/trace", include_in_schema=False)
    async def page(request: Request, state: Asked, look: Looked, typed: bool = False) -> Response:
        shelf = site.shelf(state)
        edits_of(state, shelf)
        refuse_other_layer(look, shelf)
        if typed:  # browsers send the line ends of a text field as two characters
            return RedirectResponse(_plain(state, look), 303)
        shared: dict[str, Any] = {"look": look, "extra": look.extra(), "examples": EXAMPLES}
        if not state.text:
            return site.page(request, state, "trace.html", **shared)

        async def coming() -> dict[str, Any]:
            return {
                "traced": await site.worker.run(shelf, lambda at: job(runs, at, shelf, state, look))
            }

        waiting = "Running the prompt …" if site.worker.is_loaded(shelf) else "Loading the model …"
        return await site.page_when_ready(
            request, state, "trace.html", coming(), waiting=waiting, **shared
        )

    @routes.get("/api/trace", summary="A prompt, layer by layer, as `ffmem trace --json` gives it")
    async def trace(
        state: Asked,
        top: Annotated[int, Query(description="Tokens and memories of each layer.")] = 10,
        generate: Annotated[int, Query(description="Tokens of a continuation.")] = 0,
        grid: Annotated[bool, Query(description="Also every layer at every position.")] = True,
    ) -> TraceAnswer:
        shelf = site.shelf(state)
        refuse_much_text(generate)
        asked = Question(
            state.text, state.position, edits_of(state, shelf), refuse_odd_top(top), generate, grid
        )
        found = await site.worker.run(shelf, lambda at: runs.trace(at, shelf.name, asked).to_dict())
        return cast(TraceAnswer, found)

    @routes.get("/api/effect", summary="Exact effects, as `ffmem effect --json` gives them")
    async def effect(
        state: Asked,
        target: Annotated[str | None, Query(description="A token; the model's own next.")] = None,
        cells: Annotated[str | None, Query(description="Memories by name: L1N2,L3N4.")] = None,
        candidates: Annotated[
            int | None, Query(description="Memories of large estimates that are measured too.")
        ] = None,
        top: Annotated[int, Query(description="How many of the largest are told.")] = 20,
    ) -> EffectAnswer:
        """Return what switching memories off, one at a time, does to a token; edits do not act."""
        shelf = site.shelf(state)
        named = [name for name in (cells or "").split(",") if name.strip()]
        asked = Question(state.text, state.position, top=refuse_odd_top(top))
        wanted = [
            shelf.index.layout.resolve(cell) for cell in dict.fromkeys(cells_of("cells", named))
        ]
        n = (0 if wanted else CANDIDATES) if candidates is None else candidates
        if n < 0:
            raise FfmemError(f"{n} candidates were asked for. Give 0 or more.")
        watched = refuse_long(target or "") or None
        found = await site.worker.run(
            shelf,
            lambda at: runs.effect(
                at, shelf.name, asked, watched and from_visible(watched), wanted, n
            ).to_dict(),
        )
        return cast(EffectAnswer, found)

    return routes


def job(runs: Runs, at: "Opened", shelf: Shelf, state: State, look: Look) -> TracedPage:
    """Return the page of a prompt, in the worker's thread."""
    asked = Question(state.text, state.position, state.edits(), generate=look.generate)
    trace = runs.trace(at, shelf.name, asked)
    if not look.effects:
        return TracedPage(trace, state, look)
    cells = listed(trace, look)
    most = max(1, ABLATED // (trace.position + 1))
    measured = cells[:most]
    target = look.target and from_visible(look.target)
    wanted = Question(state.text, trace.position, top=len(measured))
    try:
        effect = runs.effect(at, shelf.name, wanted, target, measured, 0)
    except FfmemError as error:  # a target that is no token: the trace itself is as good as ever
        return TracedPage(trace, state, look, problem=str(error))
    return TracedPage(trace, state, look, Measured(effect, len(cells)))


def edits_of(state: State, shelf: Shelf) -> Edits:
    """Return a visitor's edits, if the model has all their memories."""
    return state.edits().resolve(shelf.index.layout)


def refuse_other_layer(look: Look, shelf: Shelf) -> None:
    """Raise if a layer is looked at that the model does not have."""
    n = shelf.index.n_layers
    if look.layer is not None and not 0 <= look.layer < n:
        raise NotHere(f"There is no layer {look.layer}: the model has layers 0 to {n - 1}.")


def refuse_much_text(generate: int) -> None:
    """Raise if a continuation would be too long, or is shorter than nothing."""
    if not 0 <= generate <= MOST_GENERATED:
        raise TooMuch(
            f"A continuation of {generate:,} tokens was asked for; the page writes 0 to"
            f" {MOST_GENERATED}. `ffmem trace --generate` has no limit."
        )


def refuse_odd_top(top: int) -> int:
    """Return how many entries of a list are wanted, if that can be."""
    if not 1 <= top <= MOST_RESULTS:
        raise TooMuch(f"The top {top:,} were asked for. Give 1 to {MOST_RESULTS}.")
    return top


def _plain(state: State, look: Look) -> str:
    """Return the address of a prompt that was typed: its lines as they are, read at its end."""
    text = state.text.replace("\r\n", "\n")
    kept = Look(view=look.view, run=look.run, generate=look.generate)
    return state.link("/trace", **kept.extra(text=text or None, position=None))

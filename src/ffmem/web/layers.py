"""The room of a layer: all its memories as a picture, and as a table to sort, filter and page."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from ffmem.indexing.memory import Kind
from ffmem.web.figures import Drawn, Theme, drawn
from ffmem.web.layer_table import (
    AGREEMENT,
    OF_VALUES,
    SORTS,
    LayerRow,
    Wanted,
    kept,
    layer_table,
    listing,
    refuse_other_layers,
)
from ffmem.web.limits import refuse_long
from ffmem.web.pattern_view import CHOICES, at_hand, of_layer
from ffmem.web.site import Site
from ffmem.web.specs import SAID, layer_spec
from ffmem.web.state import Asked, State
from ffmem.web.vega import Spec

Columns = list[tuple[str, str, str, bool]]
"""Name to sort by, heading, what it means, and whether the largest is what people ask for."""


def _given(value: Any) -> Any:
    """Return what a field of a form holds; None for an empty one."""
    return None if value == "" else value


Share = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Percent = Annotated[
    Share | None, BeforeValidator(_given), Query(description="Of the active share, in percent.")
]


class LayerAnswer(TypedDict):
    """One page of a layer's memories."""

    index: str
    layer: int
    gated: bool
    notes: list[str]
    """What must be known of this kind of memory to read its numbers."""
    memories: int
    """Of the layer."""
    found: int
    """Of those, the ones that the filters leave."""
    sort: str
    page: int
    pages: int
    rows: list[LayerRow]


def wanted(
    sort: Annotated[
        str, Query(description=f"One of {', '.join(SORTS)}; with - in front: largest first.")
    ] = "memory",
    has: Annotated[
        str, Query(description="A text in a token at an end of the value, or in a pattern.")
    ] = "",
    least: Percent = None,
    most: Percent = None,
    agreement: Annotated[
        str, Query(description=f"Only memories of one kind: {', '.join(AGREEMENT.values())}.")
    ] = "",
    pattern: Annotated[
        str, Query(description=f"Only memories by their patterns: {', '.join(CHOICES)}.")
    ] = "",
) -> Wanted:
    """Return which memories an address asks for; shares in percent."""
    return Wanted(sort, refuse_long(has), least, most, agreement, pattern)


AsWanted = Annotated[Wanted, Depends(wanted)]
Page = Annotated[int, Query(description="Counted from 1; 50 memories each.")]


def router(site: Site) -> APIRouter:
    """Return the routes of layers."""
    routes = APIRouter(tags=["layers"])

    def spec_of(layer: int, state: State, wanted: Wanted, theme: str) -> Spec:
        index = site.shelf(state).index
        table = layer_table(index, layer)
        return layer_spec(index, table, kept(index, table, wanted), theme)

    @routes.get("/layer/{layer}", response_class=HTMLResponse, include_in_schema=False)
    def page(
        request: Request, layer: int, state: Asked, wanted: AsWanted, page: Page = 1
    ) -> Response:
        index = site.shelf(state).index
        found = listing(index, layer, wanted, page)
        table = layer_table(index, layer)
        patterns = of_layer(index, layer)
        counts = {name: int((table.agreement == code).sum()) for code, name in AGREEMENT.items()}
        return site.page(
            request,
            state,
            "layer.html",
            layer=layer,
            index=index,
            wanted=wanted,
            listing=found,
            counts=counts,
            said=SAID,
            hand=at_hand(index),
            with_pattern={name: int(patterns.kept(name).sum()) for name in CHOICES},
            problems=patterns.problems,
            columns=_columns(index.manifest.model.kind),
            n_memories=len(table.sign),
            largest=float(table.largest.max(initial=0.0)),
        )

    @routes.get("/api/layer/{layer}")
    def memories(layer: int, state: Asked, wanted: AsWanted, page: Page = 1) -> LayerAnswer:
        """Return one page of a layer's memories with their numbers."""
        shelf = site.shelf(state)
        found = listing(shelf.index, layer, wanted, page)
        return {
            "index": shelf.name,
            "layer": layer,
            "gated": shelf.index.manifest.model.gated,
            "notes": shelf.index.manifest.model.kind.notes,
            "memories": shelf.index.layout.widths[layer],
            "found": found.n,
            "sort": wanted.sort,
            "page": found.page,
            "pages": found.pages,
            "rows": found.rows,
        }

    @routes.get("/api/layer/{layer}/spec", response_class=JSONResponse)
    def spec(layer: int, state: Asked, wanted: AsWanted, theme: Theme = "light") -> Response:
        """Return the picture of a layer in Vega-Lite's language."""
        return JSONResponse(spec_of(layer, state, wanted, theme))

    @routes.get("/api/layer/{layer}/picture", response_class=Drawn, include_in_schema=False)
    def picture(layer: int, state: Asked, wanted: AsWanted, theme: Theme = "light") -> Response:
        """Return the picture of a layer as a page shows it before, and without, a script."""
        refuse_other_layers(site.shelf(state).index, layer)
        return drawn(spec_of(layer, state, wanted, theme))

    return routes


def _columns(kind: Kind) -> Columns:
    """Return the columns that the page shows; without static values, fewer."""
    gated = kind.gated
    active = "gate open" if gated else "active"
    follows = "Triggers followed by the token that the value promotes there, of those with a next"
    columns = [
        ("memory", "memory", "The number of the memory", False),
        ("top", "m > 0 promotes" if gated else "promotes", "First tokens of the value", False),
        ("bottom", "m < 0 promotes" if gated else "suppresses", "Last tokens of the value", False),
        ("active_share", active, f"Share of prefixes on which it is {active}", True),
        ("max", "max", "Largest coefficient", True),
        ("min", "min", "Smallest coefficient", False),
        ("mean", "mean", "Mean coefficient", True),
        ("probability", "p(top)", "Probability of the value's top token", True),
        ("followed", "predicts", f"{follows} token", True),
        ("agreement", "agrees", "Its strongest trigger is followed by what it promotes", True),
    ]
    return [one for one in columns if kind.has_values or one[0] not in OF_VALUES]

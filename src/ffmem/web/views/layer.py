"""The pages of layers: a table over all layers, and each layer's memories to sort and filter."""

import asyncio
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from ffmem.errors import StoreError
from ffmem.indexing.memory import Kind
from ffmem.indexing.store import Index
from ffmem.indexing.tables import layer_file, open_table
from ffmem.stats import share
from ffmem.web.figures import Drawn, Theme, drawn
from ffmem.web.layer_spread import spreads
from ffmem.web.layer_table import (
    AGREEMENT,
    OF_VALUES,
    LayerRow,
    Wanted,
    kept,
    layer_table,
    listing,
    refuse_other_layers,
)
from ffmem.web.pattern_view import CHOICES, at_hand, of_layer, problems
from ffmem.web.pattern_view import state as pattern_state
from ffmem.web.site import Site
from ffmem.web.specs import SAID, layer_spec
from ffmem.web.state import Asked, State
from ffmem.web.vega import Spec

AsWanted = Annotated[Wanted, Depends(Wanted)]
Page = Annotated[int, Query(description="From 1; 50 memories each.")]


@dataclass(frozen=True)
class LayerAnswer:
    """One page of a layer's memories."""

    index: str
    layer: int
    gated: bool
    notes: list[str]
    """How to read this kind of memory."""
    memories: int
    """In the layer."""
    found: int
    """Of those, how many the filters keep."""
    sort: str
    page: int
    pages: int
    rows: list[LayerRow]


@dataclass(frozen=True)
class LayerSummary:
    """One layer in the table over all layers."""

    layer: int
    memories: int
    active_share: dict[str, Any]
    """Quartiles over its memories."""
    largest: dict[str, Any]
    """Quartiles of each memory's largest |m|; `max` is the largest of all."""
    agreement: float | None
    """Share of memories whose value predicts what follows their top trigger."""
    patterns: dict[str, int]
    """Memories with a shallow, a semantic and any pattern, whoever found it; empty without."""


@dataclass(frozen=True)
class LayersAnswer:
    """All layers of a model."""

    index: str
    layers: list[LayerSummary]


def router(site: Site) -> APIRouter:
    """Return the routes of layers."""
    routes = APIRouter(tags=["layers"])

    def spec_of(layer: int, state: State, wanted: Wanted, theme: str) -> Spec:
        index = site.shelf(state).index
        table = layer_table(index, layer)
        return layer_spec(index, table, kept(index, table, wanted), theme)

    @routes.get("/layers", response_class=HTMLResponse, include_in_schema=False)
    async def overview(request: Request, state: Asked) -> Response:
        index = site.shelf(state).index

        async def coming() -> dict[str, Any]:
            found = await asyncio.to_thread(summaries, index)
            most = {
                "agreement": max(one.agreement or 0 for one in found),
                "active": max(one.active_share["median"] or 0 for one in found),
                "largest": max(one.largest["max"] or 0 for one in found),
            }
            return {"layers": found, "most": most}

        return await site.page_when_ready(
            request,
            state,
            "layers.html",
            coming(),
            waiting="Reading the index",
            needs_model=False,
            index=index,
            hand=at_hand(index),
            problems=problems(index),
        )

    @routes.get("/api/layers")
    def layers(state: Asked) -> LayersAnswer:
        """Return every layer: how active and strong its memories are, and how many agree."""
        shelf = site.shelf(state)
        return LayersAnswer(shelf.name, summaries(shelf.index))

    @routes.get("/layer/{layer}", response_class=HTMLResponse, include_in_schema=False)
    def page(
        request: Request, layer: int, state: Asked, wanted: AsWanted, page: Page = 1
    ) -> Response:
        index = site.shelf(state).index
        found = listing(index, layer, wanted, page)
        table = layer_table(index, layer)
        patterns = of_layer(index, layer)
        return site.page(
            request,
            state,
            "layer.html",
            layer=layer,
            index=index,
            wanted=wanted,
            listing=found,
            counts={name: int((table.agreement == code).sum()) for code, name in AGREEMENT.items()},
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
        model = shelf.index.manifest.model
        return LayerAnswer(
            index=shelf.name,
            layer=layer,
            gated=model.gated,
            notes=model.kind.notes,
            memories=shelf.index.layout.widths[layer],
            found=found.n,
            sort=wanted.sort,
            page=found.page,
            pages=found.pages,
            rows=found.rows,
        )

    @routes.get("/api/layer/{layer}/spec", response_class=JSONResponse)
    def spec(layer: int, state: Asked, wanted: AsWanted, theme: Theme = "light") -> Response:
        """Return the picture of a layer as a Vega-Lite specification."""
        return JSONResponse(spec_of(layer, state, wanted, theme))

    @routes.get("/api/layer/{layer}/picture", response_class=Drawn, include_in_schema=False)
    def picture(layer: int, state: Asked, wanted: AsWanted, theme: Theme = "light") -> Response:
        """Return the picture of a layer as SVG, for pages without scripts."""
        refuse_other_layers(site.shelf(state).index, layer)
        return drawn(spec_of(layer, state, wanted, theme))

    return routes


def summaries(index: Index) -> list[LayerSummary]:
    """Return a summary of every layer that has memories."""
    return _summaries(index, pattern_state(index))


@lru_cache(maxsize=8)
def _summaries(index: Index, state: Any) -> list[LayerSummary]:
    found = []
    for spread in spreads(index):
        layer = spread["layer"]
        table = layer_table(index, layer)
        agrees, known = int((table.agreement == 1).sum()), int((table.agreement >= 0).sum())
        found.append(
            LayerSummary(
                layer=layer,
                memories=len(table.sign),
                active_share=spread["active_share"],
                largest=spread["largest"],
                agreement=share(agrees, known) if index.manifest.model.has_values else None,
                patterns=_with_patterns(index, layer),
            )
        )
    return found


def _with_patterns(index: Index, layer: int) -> dict[str, int]:
    """Return how many memories of a layer have patterns, by kind."""
    memories: dict[str, set[int]] = {"shallow": set(), "semantic": set(), "any": set()}
    sources = at_hand(index).patterns
    try:
        for source in sources:
            rows = open_table(source.folder / layer_file("found", layer)).read(["memory", "kind"])
            memories["any"] |= set(rows["memory"].to_pylist())
            for row in rows.to_pylist():
                memories[row["kind"]].add(row["memory"])
    except StoreError:  # the page says that they cannot be read
        return {}
    return {name: len(several) for name, several in memories.items()} if sources else {}


def _columns(kind: Kind) -> list[tuple[str, str, str, bool]]:
    """Return what each column sorts by, its heading, its meaning, and whether down comes first."""
    gated = kind.gated
    active = "gate open" if gated else "active"
    columns = [
        ("memory", "memory", "Number of the memory", False),
        ("top", "m > 0 promotes" if gated else "promotes", "Top tokens of the value", False),
        ("bottom", "m < 0 promotes" if gated else "suppresses", "Last tokens of the value", False),
        ("active_share", active, f"Share of prefixes on which it is {active}", True),
        ("max", "max", "Largest coefficient", True),
        ("min", "min", "Smallest coefficient", False),
        ("mean", "mean", "Mean coefficient", True),
        ("probability", "p(top)", "Probability of the value's top token", True),
        (
            "followed",
            "predicts",
            "Triggers followed by the token that the value promotes there, of those with a next"
            " token",
            True,
        ),
        ("agreement", "agrees", "Its top trigger is followed by what its value promotes", True),
    ]
    return [one for one in columns if kind.has_values or one[0] not in OF_VALUES]

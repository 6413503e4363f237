"""The pages of layers: a table over all layers, and each layer's memories to sort and filter.

A layer with experts also lists its banks, and each of them has a page of its own: what it takes,
and its memories in the same table.
"""

import asyncio
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, Response

from ffmem.cells import BankRange
from ffmem.indexing.store import Index
from ffmem.stats import share
from ffmem.web.catalog import ServedIndex
from ffmem.web.charts import AGREEMENT_LABELS, Spec, layer_spec
from ffmem.web.experts import BankRow, ExpertToken, bank_rows, sampled_tokens, trigger_tokens
from ffmem.web.layer_table import (
    AGREEMENT,
    OF_VALUES,
    LayerQuery,
    LayerQueryParam,
    LayerRow,
    LayerSpread,
    filter_memories,
    find_bank,
    layer_page,
    layer_spreads,
    layer_table,
)
from ffmem.web.patterns import (
    CHOICES,
    Version,
    count_memories,
    layer_patterns,
    pattern_problems,
    patterns_version,
    stored_patterns,
)
from ffmem.web.site import Site
from ffmem.web.state import State, StateParam
from ffmem.web.views.figures import SvgResponse, Theme

PageParam = Annotated[int, Query(description="From 1; 50 memories each.")]


@dataclass(frozen=True)
class LayerResponse:
    """One page of a layer's memories."""

    index: str
    layer: int
    gated: bool
    notes: list[str]
    """How to read this kind of memory."""
    banks: list[BankRow]
    """Its experts, if it has some."""
    memories: int
    """Memories in the layer."""
    found: int
    """Memories that pass the filters."""
    sort: str
    page: int
    pages: int
    rows: list[LayerRow]


@dataclass(frozen=True)
class ExpertResponse:
    """One expert: what it takes, and one page of its memories."""

    index: str
    layer: int
    expert: BankRow
    prefixes: int
    """Prefixes of the corpus."""
    sample_tokens: list[ExpertToken]
    """What it takes more often than other tokens, by the sampled prefixes; none if shared."""
    trigger_tokens: list[ExpertToken]
    """The same by its memories' triggers: the strongest prefixes, so the least it can be."""
    found: int
    sort: str
    page: int
    pages: int
    rows: list[LayerRow]


@dataclass(frozen=True)
class LayerSummary(LayerSpread):
    """One layer in the table over all layers."""

    memories: int
    experts: int
    """Routed experts."""
    agreement: float | None
    """Share of memories whose value predicts what follows their top trigger."""
    patterns: dict[str, int]
    """Memories with a shallow, a semantic and any pattern, from any source; empty without."""


@dataclass(frozen=True)
class LayersResponse:
    """All layers of a model."""

    index: str
    layers: list[LayerSummary]


def router(site: Site) -> APIRouter:
    """Return the routes of layers."""
    routes = APIRouter(tags=["layers"])

    def make_spec(layer: int, state: State, query: LayerQuery, theme: str) -> Spec:
        index = site.served(state).index
        table = layer_table(index, layer)
        bank = find_bank(index, layer, query.bank) if query.bank else None
        return layer_spec(index, table, filter_memories(index, table, query), theme, bank)

    def render(
        request: Request, state: State, layer: int, bank_name: str, query: LayerQuery, page: int
    ) -> Response:
        """Return the page of a layer, or of one of its experts."""
        served = site.served(state)
        index = served.index
        bank = find_bank(index, layer, bank_name) if bank_name else None
        if bank is not None:
            query = replace(query, bank=bank.name)
        found = layer_page(index, layer, query, page)
        table, patterns = layer_table(index, layer), layer_patterns(index, layer)
        inside = slice(None) if bank is None else bank.memories
        rows = bank_rows(index, layer)
        return site.page(
            request,
            state,
            "layer.html",
            served=served,
            layer=layer,
            index=index,
            bank=bank,
            banks=rows,
            expert=None if bank is None else next(row for row in rows if row.bank == bank.name),
            tokens=() if bank is None else _tokens(index, layer, bank),
            query=query,
            is_filtered=replace(query, bank="").has_filter if bank else query.has_filter,
            found=found,
            counts={
                name: int((table.agreement[inside] == code).sum())
                for code, name in AGREEMENT.items()
            },
            labels=AGREEMENT_LABELS,
            of_values=OF_VALUES,
            sources=stored_patterns(index).sources,
            with_pattern={name: int(patterns.has(name)[inside].sum()) for name in CHOICES},
            problems=patterns.problems,
            n_memories=len(table.sign[inside]),
            has_values=table.has_values,
            largest=float(table.largest.max(initial=0.0)),
        )

    @routes.get("/layers", response_class=HTMLResponse, include_in_schema=False)
    async def overview(request: Request, state: StateParam) -> Response:
        served = site.served(state)

        async def content() -> dict[str, Any]:
            layers = await asyncio.to_thread(summarize_layers, served.index)
            most = {
                "agreement": max(one.agreement or 0 for one in layers),
                "active": max(one.active_share["median"] or 0 for one in layers),
                "largest": max(one.largest["max"] or 0 for one in layers),
            }
            return {"layers": layers, "most": most}

        return await site.stream_page(
            request,
            state,
            "layers.html",
            content(),
            waiting="Reading the index",
            needs_model=False,
            served=served,
            index=served.index,
            sources=stored_patterns(served.index).sources,
            problems=pattern_problems(served.index),
        )

    @routes.get("/api/layers")
    def layers(state: StateParam) -> LayersResponse:
        """Return every layer: how active and strong its memories are, and how many agree."""
        served = site.served(state)
        return LayersResponse(served.name, summarize_layers(served.index))

    @routes.get("/layer/{layer}", response_class=HTMLResponse, include_in_schema=False)
    def page(
        request: Request,
        layer: int,
        state: StateParam,
        query: LayerQueryParam,
        page: PageParam = 1,
    ) -> Response:
        return render(request, state, layer, "", query, page)

    @routes.get("/layer/{layer}/{expert}", response_class=HTMLResponse, include_in_schema=False)
    def expert_page(
        request: Request,
        layer: int,
        expert: str,
        state: StateParam,
        query: LayerQueryParam,
        page: PageParam = 1,
    ) -> Response:
        return render(request, state, layer, expert, query, page)

    @routes.get("/api/layer/{layer}")
    def memories(
        layer: int, state: StateParam, query: LayerQueryParam, page: PageParam = 1
    ) -> LayerResponse:
        """Return one page of a layer's memories with their numbers."""
        served = site.served(state)
        found = layer_page(served.index, layer, query, page)
        model = served.index.manifest.model
        return LayerResponse(
            index=served.name,
            layer=layer,
            gated=model.gated,
            notes=model.kind.notes,
            banks=bank_rows(served.index, layer),
            memories=served.index.layout.widths[layer],
            found=found.n,
            sort=query.sort,
            page=found.page,
            pages=found.pages,
            rows=found.rows,
        )

    @routes.get("/api/layer/{layer}/spec")
    def spec(
        layer: int, state: StateParam, query: LayerQueryParam, theme: Theme = "light"
    ) -> dict[str, Any]:
        """Return the chart of a layer as a Vega-Lite spec."""
        return make_spec(layer, state, query, theme)

    @routes.get("/api/layer/{layer}/picture", response_class=SvgResponse, include_in_schema=False)
    def picture(
        layer: int, state: StateParam, query: LayerQueryParam, theme: Theme = "light"
    ) -> Response:
        """Return the chart of a layer as SVG, for pages without scripts."""
        return SvgResponse.of(make_spec(layer, state, query, theme))

    @routes.get("/api/layer/{layer}/{expert}")  # behind spec and picture
    def expert_json(
        layer: int, expert: str, state: StateParam, query: LayerQueryParam, page: PageParam = 1
    ) -> ExpertResponse:
        """Return one expert, such as E12: what it takes, and one page of its memories."""
        return describe_expert(site.served(state), layer, expert, query, page)

    return routes


def describe_expert(
    served: ServedIndex, layer: int, name: str, query: LayerQuery, page: int
) -> ExpertResponse:
    """Return what the page of an expert shows, as data."""
    index = served.index
    bank = find_bank(index, layer, name)
    found = layer_page(index, layer, replace(query, bank=bank.name), page)
    sampled, of_triggers = _tokens(index, layer, bank)
    return ExpertResponse(
        index=served.name,
        layer=layer,
        expert=next(row for row in bank_rows(index, layer) if row.bank == bank.name),
        prefixes=index.n_prefixes,
        sample_tokens=sampled,
        trigger_tokens=of_triggers,
        found=found.n,
        sort=query.sort,
        page=found.page,
        pages=found.pages,
        rows=found.rows,
    )


def _tokens(index: Index, layer: int, bank: BankRange) -> list[list[ExpertToken]]:
    """Return what an expert takes: by the sample, and by its memories' triggers.

    A shared expert takes every token.
    """
    if bank.kind == "shared":
        return [[], []]
    return [sampled_tokens(index, layer, bank), trigger_tokens(index, layer, bank)]


def summarize_layers(index: Index) -> list[LayerSummary]:
    """Return a summary of every layer that has memories."""
    return _summarize_layers(index, patterns_version(index))


@lru_cache(maxsize=8)
def _summarize_layers(index: Index, version: Version) -> list[LayerSummary]:
    summaries = []
    for spread in layer_spreads(index):
        table = layer_table(index, spread.layer)
        agrees, known = int((table.agreement == 1).sum()), int((table.agreement >= 0).sum())
        summaries.append(
            LayerSummary(
                **vars(spread),
                memories=len(table.sign),
                experts=index.layout.n_experts[spread.layer],
                agreement=share(agrees, known) if index.manifest.model.has_values else None,
                patterns=count_memories(index, spread.layer),
            )
        )
    return summaries

"""The front page: what a memory is, which model this is, what was found, and where to begin."""

import asyncio
import math
import random
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from typing_extensions import TypedDict

from ffmem.cells import Cell
from ffmem.indexing.manifest import SourceRecord
from ffmem.indexing.store import Index
from ffmem.text import format_number, format_share
from ffmem.web.figures import Drawn, Theme, drawn, sections
from ffmem.web.layer_spread import LayerSpread, spreads
from ffmem.web.layer_table import refuse_other_layers
from ffmem.web.library import Shelf, short
from ffmem.web.limits import NotHere
from ffmem.web.pattern_view import PatternCount, counts, problems
from ffmem.web.site import Site
from ffmem.web.specs import home_spec
from ffmem.web.state import Asked

FEATURED = (
    "token-removal",
    "agreement",
    "next-token-rank",
    "residual-prediction",
    "residual-probability",
    "prediction-cases",
)
"""Figures of the front page, if they were measured; the others are a click away."""

OneLayer = Annotated[int | None, Query(description="Only memories of this layer.")]


class SourceAnswer(TypedDict):
    """One source of the corpus."""

    source: str
    unit: str
    sentences: int
    tokens: int
    perplexity: float | None
    """Per token, of the model on a sample."""


class ModelAnswer(TypedDict):
    """Which model the memories belong to."""

    source: str
    revision: str | None
    hash: str
    family: str
    layers: int
    memories: int | list[int]
    """Of each layer: one number where all have as many."""
    hidden: int
    vocabulary: int
    activation: str
    gated: bool
    memory: str | None
    """The kind of memory, in a model of ours."""
    has_values: bool
    notes: list[str]
    """What must be known of this kind of memory to read its numbers."""


class MadeAnswer(TypedDict):
    """How the index was made."""

    t: int
    prefixes: str
    compat: str | None
    coefficient: str
    projection: str
    dtype: str
    start: str | None
    start_chosen_by: str
    versions: dict[str, str]
    corpus_hash: str
    tokenizer_hash: str


class ClaimAnswer(TypedDict):
    """One claim of the paper beside this model's numbers."""

    claim: str
    experiment: str
    paper: str
    model: str
    n: str
    verdict: str
    rule: str


class HomeAnswer(TypedDict):
    """What the front page tells."""

    index: str
    indexes: list[str]
    model: ModelAnswer
    corpus: list[SourceAnswer]
    made: MadeAnswer
    layers: list[LayerSpread]
    patterns: list[PatternCount]
    figures: list[str]
    claims: list[ClaimAnswer]
    verdicts: dict[str, int]


class RandomAnswer(TypedDict):
    """A memory that nobody chose."""

    cell: str
    url: str


class Step(NamedTuple):
    """One layer in the strip of all layers."""

    layer: int
    height: float
    """In percent of the strip."""
    says: str


class Example(NamedTuple):
    """A memory worth a look: what its triggers share, and the end of its strongest such one."""

    cell: str
    layer: int
    which: str
    token: str
    n: int
    of: int
    before: str
    last: str
    next: str


def router(site: Site) -> APIRouter:
    """Return the routes of the front page."""
    routes = APIRouter(tags=["home"])

    @routes.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page(request: Request, state: Asked) -> Response:
        shelf = site.shelf(state)
        return await site.page_when_ready(
            request,
            state,
            "home.html",
            asyncio.to_thread(_context, shelf),
            waiting="Reading the index …",
            manifest=shelf.index.manifest,
        )

    @routes.get("/api/home")
    def home(state: Asked) -> HomeAnswer:
        """Return what an index is of, how it was made, and what was measured on it."""
        return answer(site.shelf(state), list(site.library.shelves))

    @routes.get("/api/home/spec", response_class=JSONResponse)
    def spec(state: Asked, theme: Theme = "light") -> Response:
        """Return the picture of all layers in Vega-Lite's language."""
        return JSONResponse(home_spec(site.shelf(state).index, theme))

    @routes.get("/api/home/picture", response_class=Drawn, include_in_schema=False)
    def picture(state: Asked, theme: Theme = "light") -> Response:
        """Return the picture of all layers as the page shows it before, and without, a script."""
        return drawn(home_spec(site.shelf(state).index, theme))

    @routes.get("/random", include_in_schema=False)
    def lead(state: Asked, layer: OneLayer = None) -> Response:
        cell = drawn_cell(site.shelf(state).index, layer)
        never = {"Cache-Control": "no-store"}
        return RedirectResponse(state.link(f"/m/{cell}"), 303, headers=never)

    @routes.get("/api/random")
    def random_memory(state: Asked, layer: OneLayer = None) -> RandomAnswer:
        """Return a memory drawn at random, of the whole model or of one layer."""
        cell = drawn_cell(site.shelf(state).index, layer)
        return {"cell": str(cell), "url": state.link(f"/m/{cell}")}

    return routes


def drawn_cell(index: Index, layer: int | None) -> Cell:
    """Return any memory, each as likely as the others."""
    if layer is None:
        return index.layout.at(random.randrange(len(index)))
    refuse_other_layers(index, layer)
    if not index.layout.widths[layer]:
        raise NotHere(f"Layer {layer} has no memories.")
    return index.layout.cell(layer, random.randrange(index.layout.widths[layer]))


def answer(shelf: Shelf, indexes: list[str]) -> HomeAnswer:
    """Return what the front page tells, for programs."""
    manifest = shelf.index.manifest
    model = manifest.model
    judged = _claims(shelf)
    return {
        "index": shelf.name,
        "indexes": indexes,
        "model": {
            "source": shelf.model,
            "revision": model.revision,
            "hash": model.hash,
            "family": model.family,
            "layers": model.layers,
            "memories": model.layout.per_layer,
            "hidden": model.hidden,
            "vocabulary": model.vocabulary,
            "activation": model.activation,
            "gated": model.gated,
            "memory": model.memory,
            "has_values": model.has_values,
            "notes": model.kind.notes,
        },
        "corpus": [_source(source) for source in manifest.corpus.sources],
        "made": {
            "t": manifest.t,
            "prefixes": manifest.prefixes,
            "compat": manifest.compat,
            "coefficient": manifest.coefficient,
            "projection": manifest.projection,
            "dtype": manifest.dtype,
            "start": manifest.start.token,
            "start_chosen_by": manifest.start.chosen_by,
            "versions": manifest.versions,
            "corpus_hash": manifest.corpus.hash,
            "tokenizer_hash": manifest.tokenizer,
        },
        "layers": spreads(shelf.index),
        "patterns": counts(shelf.index),
        "figures": list(shelf.results),
        "claims": judged,
        "verdicts": _verdicts(judged),
    }


def _source(source: SourceRecord) -> SourceAnswer:
    read = source.perplexity
    return {
        "source": short(source.source),
        "unit": source.unit,
        "sentences": source.sentences,
        "tokens": source.tokens,
        "perplexity": read.per_token if read and math.isfinite(read.per_token) else None,
    }


def _context(shelf: Shelf) -> dict[str, Any]:
    """Return what the page shows beside the manifest."""
    judged = _claims(shelf)
    there = [name for name in FEATURED if name in shelf.results]
    return {
        "corpus": [_source(source) for source in shelf.index.manifest.corpus.sources],
        "claims": judged,
        "verdicts": _verdicts(judged),
        "figures": sections(shelf, *there) if there else [],
        "examples": examples(shelf.index),
        "steps": steps(shelf),
        "patterns": counts(shelf.index),
        "problems": problems(shelf.index),
        "by": "agreement" if "agreement" in shelf.results else "strength",
    }


def _claims(shelf: Shelf) -> list[ClaimAnswer]:
    from ffmem.experiments.base import check_claims

    return [
        {
            "claim": one.claim,
            "experiment": one.experiment,
            "paper": one.paper,
            "model": one.model,
            "n": one.n,
            "verdict": one.verdict,
            "rule": one.rule,
        }
        for one in check_claims(list(shelf.results.values()))
    ]


def _verdicts(judged: list[ClaimAnswer]) -> dict[str, int]:
    from ffmem.experiments.base import VERDICTS

    given = [one["verdict"] for one in judged]
    return {verdict: given.count(verdict) for verdict in VERDICTS} if given else {}


def steps(shelf: Shelf) -> list[Step]:
    """Return a step for each layer: as high as its agreement, or as its memories are strong."""
    if "agreement" in shelf.results:
        rates = {row["layer"]: row["rate"] for row in shelf.results["agreement"].rows}
        told = {layer: f"{format_share(rate)} agree" for layer, rate in rates.items()}
    else:
        found = spreads(shelf.index)
        rates = {one["layer"]: one["largest"]["median"] for one in found}
        told = {
            layer: f"median of the largest |m| {format_number(rate)}"
            for layer, rate in rates.items()
        }
    most = max((rate for rate in rates.values() if rate), default=None)
    return [
        Step(
            layer,
            100 * (rates.get(layer) or 0) / most if most else 0,
            told.get(layer, "") if width else "no memories",
        )
        for layer, width in enumerate(shelf.index.layout.widths)
    ]


@lru_cache(maxsize=8)
def examples(index: Index) -> list[Example]:
    """Return memories worth a look: those of the report's Table 1, from first layer to last."""
    from ffmem.experiments.examples import shared_tokens

    found = []
    for row in shared_tokens(index):
        text = row.excerpts[0]
        found.append(
            Example(
                row.cell,
                row.layer,
                row.which,
                row.token,
                row.n,
                row.of,
                text.before,
                text.last,
                text.next,
            )
        )
    return found

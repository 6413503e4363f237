"""The front page: what a memory is, which model this is, what was measured, and where to begin."""

import asyncio
import math
import random
from collections import Counter
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from ffmem.cells import Cell
from ffmem.errors import StoreError
from ffmem.experiments.base import VERDICTS, check_claims
from ffmem.experiments.examples import Excerpt, spread_layers, trigger_excerpt
from ffmem.indexing.memory import visible_token
from ffmem.indexing.store import Index
from ffmem.indexing.triggers import NONE, trigger_table
from ffmem.text import format_number, format_share
from ffmem.web.catalog import IndexProgress, ServedIndex, short_source
from ffmem.web.charts import home_spec
from ffmem.web.errors import NotFound, NotReady
from ffmem.web.layer_table import LayerSpread, check_layer, layer_spreads
from ffmem.web.patterns import (
    PatternCount,
    Version,
    count_patterns,
    pattern_problems,
    patterns_version,
    stored_patterns,
)
from ffmem.web.site import Site
from ffmem.web.state import StateParam
from ffmem.web.views.figures import SvgResponse, Theme, report_sections

FEATURED = (
    "token-removal",
    "agreement",
    "next-token-rank",
    "residual-prediction",
    "residual-probability",
    "prediction-cases",
)
"""Figures of the front page, if they were measured; the others are a click away."""

N_TRIGGERS = 25
"""Strongest triggers that an example is chosen by."""

MIN_SHARE = 0.4
"""Share of those triggers that must show an example's pattern."""

MIN_WORDS = 3
"""Different last words among the triggers that show it."""

N_CANDIDATES = 50
"""Patterns of a layer to look at, by falling lift."""

LayerParam = Annotated[int | None, Query(description="Only memories of this layer.")]


@dataclass(frozen=True)
class HomeResponse:
    """What the front page shows."""

    index: str
    indexes: list[str]
    model: dict[str, Any]
    """Source, hash, family, sizes, activation, kind of memory, and how to read it (`notes`)."""
    corpus: list[dict[str, Any]]
    """Per source: sentences, tokens, and the model's perplexity per token on a sample."""
    made: dict[str, Any]
    """Settings of the index, versions, hashes."""
    layers: list[LayerSpread]
    patterns: list[PatternCount]
    figures: list[str]
    claims: list[dict[str, str]]
    """Each claim of the paper next to this model's numbers, with the verdict and its rule."""
    verdicts: dict[str, int]
    progress: IndexProgress | None
    """How far the index is, if it was unfinished when the server started."""


@dataclass(frozen=True)
class RandomResponse:
    """A random memory."""

    cell: str
    url: str


class LayerBar(NamedTuple):
    """One layer in the strip of all layers."""

    layer: int
    height: float
    """Percent of the strip."""
    label: str


class FeaturedMemory(NamedTuple):
    """An example memory: what its triggers share, and the strongest that shows it."""

    cell: str
    description: str
    kind: str | None
    """Kind of the pattern; None without one."""
    token: str | None
    """A query that finds it."""
    excerpt: Excerpt


def router(site: Site) -> APIRouter:
    """Return the routes of the front page."""
    routes = APIRouter(tags=["home"])

    @routes.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page(request: Request, state: StateParam) -> Response:
        served = site.served(state)
        return await site.stream_page(
            request,
            state,
            "home.html",
            asyncio.to_thread(_context, served),
            waiting="Reading the index",
            needs_model=False,
            served=served,
            manifest=served.index.manifest,
        )

    @routes.get("/api/home")
    def home(state: StateParam) -> HomeResponse:
        """Describe an index: model, corpus, build settings, measurements."""
        return describe_index(site.served(state), list(site.catalog.folders))

    @routes.get("/api/progress")
    def progress(state: StateParam) -> IndexProgress | None:
        """Return build progress, or null if the index was finished at startup."""
        try:
            return site.served(state).progress
        except NotReady as error:
            return IndexProgress("preparing", 0, 0, 0, 0, False, False, 0, False, "0", str(error))

    @routes.get("/api/home/spec")
    def spec(state: StateParam, theme: Theme = "light") -> dict[str, Any]:
        """Return the chart of all layers as a Vega-Lite spec."""
        return home_spec(site.served(state).index, theme)

    @routes.get("/api/home/picture", response_class=SvgResponse, include_in_schema=False)
    def picture(state: StateParam, theme: Theme = "light") -> Response:
        """Return the chart of all layers as SVG, for pages without scripts."""
        return SvgResponse.of(home_spec(site.served(state).index, theme))

    @routes.get("/random", include_in_schema=False)
    def redirect(state: StateParam, layer: LayerParam = None) -> Response:
        cell = random_cell(site.served(state).index, layer)
        headers = {"Cache-Control": "no-store"}
        return RedirectResponse(state.link(f"/m/{cell}"), 303, headers=headers)

    @routes.get("/api/random")
    def random_memory(state: StateParam, layer: LayerParam = None) -> RandomResponse:
        """Return a random memory of the whole model or of one layer."""
        cell = random_cell(site.served(state).index, layer)
        return RandomResponse(str(cell), state.link(f"/m/{cell}"))

    return routes


def random_cell(index: Index, layer: int | None) -> Cell:
    """Return any memory, each as likely as the others."""
    if layer is None:
        return index.layout.at(random.randrange(len(index)))
    check_layer(index, layer)
    if not index.layout.widths[layer]:
        raise NotFound(f"Layer {layer} has no memories.")
    return index.layout.cell(layer, random.randrange(index.layout.widths[layer]))


def describe_index(served: ServedIndex, indexes: list[str]) -> HomeResponse:
    """Return what the front page shows, as data."""
    manifest = served.index.manifest
    model = manifest.model
    claims = [asdict(one) for one in check_claims(list(served.results.values()))]
    verdicts = Counter(one["verdict"] for one in claims)
    settings = ("t", "prefixes", "compat", "coefficient", "projection", "dtype", "versions")
    return HomeResponse(
        index=served.name,
        indexes=indexes,
        model={
            **{name: value for name, value in asdict(model).items() if name != "banks"},
            "source": served.model,
            "memories": model.layout.per_layer,
            "notes": model.kind.notes,
        },
        corpus=_corpus(served.index),
        made={
            **{name: getattr(manifest, name) for name in settings},
            "start": manifest.start.token,
            "start_chosen_by": manifest.start.chosen_by,
            "corpus_hash": manifest.corpus.hash,
            "tokenizer_hash": manifest.tokenizer,
        },
        layers=layer_spreads(served.index),
        patterns=count_patterns(served.index),
        figures=list(served.results),
        claims=claims,
        verdicts={verdict: verdicts[verdict] for verdict in VERDICTS} if claims else {},
        progress=served.progress,
    )


def _context(served: ServedIndex) -> dict[str, Any]:
    """Return what the page shows beside the manifest."""
    featured = [name for name in FEATURED if name in served.results]
    return {
        "home": describe_index(served, []),
        "figures": report_sections(served, *featured) if featured else [],
        "examples": find_examples(served.index),
        "bars": layer_bars(served),
        "problems": pattern_problems(served.index),
    }


def _corpus(index: Index) -> list[dict[str, Any]]:
    """Return each source of the corpus, with the model's perplexity per token on a sample."""
    sources = []
    for source in index.manifest.corpus.sources:
        perplexity = source.perplexity.per_token if source.perplexity else math.nan
        sources.append(
            {
                "source": short_source(source.source),
                "unit": source.unit,
                "sentences": source.sentences,
                "tokens": source.tokens,
                "perplexity": perplexity if math.isfinite(perplexity) else None,
            }
        )
    return sources


def layer_bars(served: ServedIndex) -> list[LayerBar]:
    """Return a bar per layer, as high as its agreement, or as its memories are strong."""
    if "agreement" in served.results:
        heights = {row["layer"]: row["rate"] for row in served.results["agreement"].rows}
        labels = {layer: f"{format_share(rate)} agree" for layer, rate in heights.items()}
    else:
        heights = {one.layer: one.largest["median"] for one in layer_spreads(served.index)}
        labels = {
            layer: f"median of the largest |m| {format_number(median)}"
            for layer, median in heights.items()
        }
    most = max((height for height in heights.values() if height), default=None)
    return [
        LayerBar(
            layer,
            100 * (heights.get(layer) or 0) / most if most else 0,
            labels.get(layer, "") if width else "no memories",
        )
        for layer, width in enumerate(served.index.layout.widths)
    ]


def find_examples(index: Index) -> list[FeaturedMemory]:
    """Return an example memory from each of five layers, first to last."""
    return _find_examples(index, patterns_version(index))


@lru_cache(maxsize=8)
def _find_examples(index: Index, version: Version) -> list[FeaturedMemory]:
    examples: list[FeaturedMemory] = []
    for layer in spread_layers(index.layout.memory_layers):
        taken = {text for one in examples for text in (one.description, one.token)}
        best = _example_by_pattern(index, layer, taken) or _example_by_token(index, layer, taken)
        examples += [best] if best else []
    return examples


def _example_by_pattern(index: Index, layer: int, taken: set[str | None]) -> FeaturedMemory | None:
    """Return the memory with the pattern of largest lift that several words share.

    lift = share of held-out triggers that show the pattern / share of random prefixes that do.
    A single word has a large lift just because it is rare; years, units or names say more.
    """
    try:
        patterns = [
            pattern
            for source in stored_patterns(index).sources
            for of_memory in source.layer(layer).values()
            for pattern in of_memory
            if pattern.lift and pattern.description not in taken
        ]
    except StoreError:  # the page says that they cannot be read
        return None
    frequent = [one for one in patterns if one.n_shown >= MIN_SHARE * N_TRIGGERS] or patterns
    frequent.sort(key=lambda one: (-(one.lift or 0.0), one.cell.memory))
    best: FeaturedMemory | None = None
    for one in frequent[:N_CANDIDATES]:
        memory = index.memory(one.cell)
        shown = [t for t in memory.triggers_of(one.sign) if t.rank in one.ranks]
        words = {(trigger.last_token or "").strip().casefold() for trigger in shown}
        token = shown[0].last_token if one.kind == "shallow" else None
        excerpt = trigger_excerpt(shown[0])
        example = FeaturedMemory(str(one.cell), one.description, one.kind, token, excerpt)
        if len(words) >= MIN_WORDS:
            return example
        best = best or example
    return best


def _example_by_token(index: Index, layer: int, taken: set[str | None]) -> FeaturedMemory | None:
    """Return the memory whose strongest triggers end most unusually often with one token.

    score = n/25 · log(n/25 ÷ the token's share among the last tokens of all triggers of the layer)
    """
    best: tuple[float, int, int, int, int, int] | None = None
    for sign in (1, -1) if index.manifest.model.gated else (1,):
        last = trigger_table(index, layer, sign).last[:, :N_TRIGGERS]
        totals = Counter(last[last != NONE].tolist())
        for memory, ids in enumerate(last.tolist()):
            known = [id for id in ids if id != NONE]
            if not known:
                continue
            id, n = Counter(known).most_common(1)[0]
            score = n / len(ids) * math.log(n / len(known) / (totals[id] / totals.total()))
            candidate = (score, -memory, sign, id, n, len(known))
            is_word = sum(character.isalnum() for character in index.token(id)) > 1
            if is_word and index.token(id) not in taken and (best is None or candidate > best):
                best = candidate
    if best is None:
        return None
    _, memory, sign, id, n, of = best
    cell, token = index.layout.cell(layer, -memory), index.token(id)
    triggers = index.memory(cell).triggers_of(sign)
    shown = next(one for one in triggers if one.last_token == token)
    description = f"{n} of {of} triggers end with {visible_token(token)}"
    return FeaturedMemory(str(cell), description, None, token, trigger_excerpt(shown))

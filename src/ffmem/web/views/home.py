"""The front page: what a memory is, which model this is, what was found, and where to begin."""

import asyncio
import math
import random
from collections import Counter
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from ffmem.cells import Cell
from ffmem.errors import StoreError
from ffmem.experiments.triggers import NONE, trigger_table
from ffmem.indexing.manifest import SourceRecord
from ffmem.indexing.memory import Trigger, visible, visible_token
from ffmem.indexing.store import Index
from ffmem.text import format_number, format_share, shorten_prefix
from ffmem.web.figures import Drawn, Theme, drawn, sections
from ffmem.web.layer_spread import LayerSpread, spreads
from ffmem.web.layer_table import refuse_other_layers
from ffmem.web.library import Shelf, short
from ffmem.web.limits import NotHere
from ffmem.web.pattern_view import PatternCount, at_hand, counts, problems
from ffmem.web.pattern_view import state as pattern_state
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

EXAMPLE_LAYERS, STRONGEST = 5, 25
"""Layers that show an example, and the triggers that an example counts."""

OFTEN = 0.4
"""Share of a memory's strongest triggers that must show an example's pattern."""

WORDS = 3
"""Different last words among the triggers that show it."""

CANDIDATES = 50
"""Patterns of a layer to look at, by falling lift."""

OneLayer = Annotated[int | None, Query(description="Only memories of this layer.")]


@dataclass(frozen=True)
class HomeAnswer:
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
    """Each claim of the paper beside this model's numbers, with the verdict and its rule."""
    verdicts: dict[str, int]


@dataclass(frozen=True)
class RandomAnswer:
    """A memory drawn at random."""

    cell: str
    url: str


class Step(NamedTuple):
    """One layer in the strip of all layers."""

    layer: int
    height: float
    """In percent of the strip."""
    says: str


class Example(NamedTuple):
    """A memory worth a look: what its triggers share, and the strongest that shows it."""

    cell: str
    says: str
    kind: str | None
    """Of the pattern; None where none was detected."""
    token: str | None
    """What a search finds it by."""
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
            waiting="Reading the index",
            needs_model=False,
            manifest=shelf.index.manifest,
        )

    @routes.get("/api/home")
    def home(state: Asked) -> HomeAnswer:
        """Return what an index is of, how it was made, and what was measured on it."""
        return answer(site.shelf(state), list(site.library.shelves))

    @routes.get("/api/home/spec", response_class=JSONResponse)
    def spec(state: Asked, theme: Theme = "light") -> Response:
        """Return the picture of all layers as a Vega-Lite specification."""
        return JSONResponse(home_spec(site.shelf(state).index, theme))

    @routes.get("/api/home/picture", response_class=Drawn, include_in_schema=False)
    def picture(state: Asked, theme: Theme = "light") -> Response:
        """Return the picture of all layers as SVG, for pages without scripts."""
        return drawn(home_spec(site.shelf(state).index, theme))

    @routes.get("/random", include_in_schema=False)
    def lead(state: Asked, layer: OneLayer = None) -> Response:
        cell = random_cell(site.shelf(state).index, layer)
        never = {"Cache-Control": "no-store"}
        return RedirectResponse(state.link(f"/m/{cell}"), 303, headers=never)

    @routes.get("/api/random")
    def random_memory(state: Asked, layer: OneLayer = None) -> RandomAnswer:
        """Return a memory drawn at random, of the whole model or of one layer."""
        cell = random_cell(site.shelf(state).index, layer)
        return RandomAnswer(str(cell), state.link(f"/m/{cell}"))

    return routes


def random_cell(index: Index, layer: int | None) -> Cell:
    """Return any memory, each as likely as the others."""
    if layer is None:
        return index.layout.at(random.randrange(len(index)))
    refuse_other_layers(index, layer)
    if not index.layout.widths[layer]:
        raise NotHere(f"Layer {layer} has no memories.")
    return index.layout.cell(layer, random.randrange(index.layout.widths[layer]))


def answer(shelf: Shelf, indexes: list[str]) -> HomeAnswer:
    """Return what the front page shows, as data."""
    manifest = shelf.index.manifest
    model = manifest.model
    claims = _claims(shelf)
    settings = ("t", "prefixes", "compat", "coefficient", "projection", "dtype", "versions")
    return HomeAnswer(
        index=shelf.name,
        indexes=indexes,
        model={
            **{name: value for name, value in asdict(model).items() if name != "banks"},
            "source": shelf.model,
            "memories": model.layout.per_layer,
            "notes": model.kind.notes,
        },
        corpus=[_source(source) for source in manifest.corpus.sources],
        made={
            **{name: getattr(manifest, name) for name in settings},
            "start": manifest.start.token,
            "start_chosen_by": manifest.start.chosen_by,
            "corpus_hash": manifest.corpus.hash,
            "tokenizer_hash": manifest.tokenizer,
        },
        layers=spreads(shelf.index),
        patterns=counts(shelf.index),
        figures=list(shelf.results),
        claims=claims,
        verdicts=_verdicts(claims),
    )


def _source(source: SourceRecord) -> dict[str, Any]:
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
    claims = _claims(shelf)
    there = [name for name in FEATURED if name in shelf.results]
    return {
        "corpus": [_source(source) for source in shelf.index.manifest.corpus.sources],
        "claims": claims,
        "verdicts": _verdicts(claims),
        "figures": sections(shelf, *there) if there else [],
        "examples": examples(shelf.index),
        "steps": steps(shelf),
        "patterns": counts(shelf.index),
        "problems": problems(shelf.index),
        "by": "agreement" if "agreement" in shelf.results else "strength",
    }


def _claims(shelf: Shelf) -> list[dict[str, str]]:
    from ffmem.experiments.base import check_claims

    return [asdict(one) for one in check_claims(list(shelf.results.values()))]


def _verdicts(claims: list[dict[str, str]]) -> dict[str, int]:
    from ffmem.experiments.base import VERDICTS

    given = [one["verdict"] for one in claims]
    return {verdict: given.count(verdict) for verdict in VERDICTS} if given else {}


def steps(shelf: Shelf) -> list[Step]:
    """Return a step per layer, as high as its agreement, or as its memories are strong."""
    if "agreement" in shelf.results:
        rates = {row["layer"]: row["rate"] for row in shelf.results["agreement"].rows}
        says = {layer: f"{format_share(rate)} agree" for layer, rate in rates.items()}
    else:
        rates = {one["layer"]: one["largest"]["median"] for one in spreads(shelf.index)}
        says = {
            layer: f"median of the largest |m| {format_number(rate)}"
            for layer, rate in rates.items()
        }
    most = max((rate for rate in rates.values() if rate), default=None)
    return [
        Step(
            layer,
            100 * (rates.get(layer) or 0) / most if most else 0,
            says.get(layer, "") if width else "no memories",
        )
        for layer, width in enumerate(shelf.index.layout.widths)
    ]


def examples(index: Index) -> list[Example]:
    """Return a memory worth a look from each of five layers, first to last."""
    return _examples(index, pattern_state(index))


@lru_cache(maxsize=8)
def _examples(index: Index, state: Any) -> list[Example]:
    layers = index.layout.memory_layers
    places = {
        round(step * (len(layers) - 1) / (EXAMPLE_LAYERS - 1)) for step in range(EXAMPLE_LAYERS)
    }
    found: list[Example] = []
    for place in sorted(places):
        taken = {text for one in found for text in (one.says, one.token)}
        best = _by_pattern(index, layers[place], taken) or _by_last_token(
            index, layers[place], taken
        )
        found += [best] if best else []
    return found


def _by_pattern(index: Index, layer: int, taken: set[str | None]) -> Example | None:
    """Return the memory with the pattern of largest lift that several words share.

    lift = share of held-out triggers that show the pattern / share of random prefixes that do.
    A single word has a large lift just because it is rare; years, units or names say more.
    """
    try:
        several = [
            pattern
            for source in at_hand(index).patterns
            for patterns in source.layer(layer).values()
            for pattern in patterns
            if pattern.lift and pattern.description not in taken
        ]
    except StoreError:  # the page says that they cannot be read
        return None
    often = [one for one in several if one.n_shown >= OFTEN * STRONGEST] or several
    often.sort(key=lambda one: (-(one.lift or 0.0), one.cell.memory))
    best: Example | None = None
    for one in often[:CANDIDATES]:
        memory = index.memory(one.cell)
        triggers = memory.triggers if one.sign > 0 else memory.negative_triggers
        shown = [trigger for trigger in triggers if trigger.rank in one.ranks]
        words = {(trigger.last_token or "").strip().casefold() for trigger in shown}
        token = shown[0].last_token if one.kind == "shallow" else None
        found = _example(one.cell, one.description, one.kind, token, shown[0])
        if len(words) >= WORDS:
            return found
        best = best or found
    return best


def _by_last_token(index: Index, layer: int, taken: set[str | None]) -> Example | None:
    """Return the memory whose strongest triggers end most unusually often with one token.

    score = n/25 · log(n/25 ÷ the token's share among the last tokens of all triggers of the layer)
    """
    best: tuple[float, int, int, int, int, int] | None = None
    for sign in (1, -1) if index.manifest.model.gated else (1,):
        last = trigger_table(index, layer, sign).last[:, :STRONGEST]
        every = Counter(last[last != NONE].tolist())
        total = sum(every.values())
        for memory, ids in enumerate(last.tolist()):
            known = [id for id in ids if id != NONE]
            if not known:
                continue
            id, n = Counter(known).most_common(1)[0]
            score = n / len(ids) * math.log(n / len(known) / (every[id] / total))
            candidate = (score, -memory, sign, id, n, len(known))
            is_word = sum(character.isalnum() for character in index.token(id)) > 1
            if is_word and index.token(id) not in taken and (best is None or candidate > best):
                best = candidate
    if best is None:
        return None
    _, memory, sign, id, n, of = best
    cell, token = index.layout.cell(layer, -memory), index.token(id)
    both = index.memory(cell)
    triggers = both.triggers if sign > 0 else both.negative_triggers
    shown = next(one for one in triggers if one.last_token == token)
    return _example(
        cell, f"{n} of {of} triggers end with {visible_token(token)}", None, token, shown
    )


def _example(
    cell: Cell, says: str, kind: str | None, token: str | None, trigger: Trigger
) -> Example:
    last = trigger.last_token or ""
    end = shorten_prefix(trigger.prefix)
    before = end.removesuffix(last)
    return Example(
        str(cell),
        says,
        kind,
        token,
        visible(before),
        visible(end[len(before) :]),
        visible_token(trigger.next_token),
    )

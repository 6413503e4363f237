"""The page of one memory: patterns, triggers, value, statistics, similar memories, code to copy.

The index stores a coefficient where a trigger ends; the coefficients at its other tokens come from
the model, when one is loaded. Triggers that end in the same five words, digits aside, are folded.
Beyond the top, prefixes can be browsed by interval of the coefficient: triggers and the index's
sampled prefixes that lie in it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from numpy import ndarray
from starlette.concurrency import run_in_threadpool

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.indexing.memory import NO_VALUES, Memory, Trigger, visible
from ffmem.indexing.sentences import StoredSentence
from ffmem.indexing.store import Index
from ffmem.indexing.tables import read_columns
from ffmem.text import format_number
from ffmem.web.auth import is_cross_site
from ffmem.web.layer_table import Wanted, chosen, layer_table
from ffmem.web.library import Shelf
from ffmem.web.limits import NotHere, TooMuch
from ffmem.web.pattern_view import of_memory, told
from ffmem.web.site import Site
from ffmem.web.snippets import snippets
from ffmem.web.state import Asked
from ffmem.web.views.layer import AsWanted

if TYPE_CHECKING:
    from ffmem.interventions.prompts import LoadedModel

SECONDS = 4.0
"""Time limit of a search for similar memories; the page says which layers were reached."""

TINTED = 12
"""Prefixes that one request reads token by token."""

WORDS = 5
"""Words at the end of a prefix that tell whether two are alike."""

BEFORE, AFTER = 220, 70
"""Characters shown before and after the end of a prefix."""

BINS = 40
"""Bars of the histogram of a memory's coefficients."""

STEPS = 4
"""Intervals of the coefficient on each side of 0."""

EXAMPLES = 12
"""Prefixes shown of one interval."""

By = Literal["value", "key"]


@dataclass(frozen=True)
class SimilarMemory:
    """A memory that points the same way, or the opposite one."""

    cell: str
    cosine: float
    value_top: list[str]
    """What sign(cosine) · v promotes."""


@dataclass(frozen=True)
class Similar:
    """The memories most like one, and which layers were searched for them."""

    by: By
    layers_searched: list[int]
    layers: int
    memories: list[SimilarMemory]
    value_note: str | None
    """Why `value_top` is empty, where memories have no static values."""


@dataclass(frozen=True)
class PrefixCoefficients:
    """A memory's coefficient at every token of a prefix."""

    sentence: int
    length: int
    tokens: list[str]
    """What each token adds to the text."""
    coefficients: list[float]


@dataclass(frozen=True)
class Example:
    """A prefix with a memory's coefficient on it."""

    coefficient: float
    sentence: int
    length: int
    prefix: str
    rest: str
    last_token: str | None
    next_token: str | None


@dataclass(frozen=True)
class Interval:
    """A range of a memory's coefficient: low < m ≤ high above 0, low ≤ m < high below."""

    low: float
    high: float
    sampled: int
    """Sampled prefixes in it."""
    examples: list[Example]


@dataclass(frozen=True)
class Intervals:
    """The range of a memory's coefficient in steps, from the largest down."""

    cell: str
    sample: int
    """Sampled prefixes in all."""
    intervals: list[Interval]


class Piece(NamedTuple):
    """A token of a prefix, tinted by the coefficient there."""

    space: str
    """Before the word: not tinted, so that words stand apart."""
    text: str
    shade: str
    title: str


class Shown(NamedTuple):
    """A trigger on the page."""

    trigger: Trigger
    before: str
    last: str
    rest: str
    width: str
    """|m| against the list's largest, in percent."""
    percentile: str
    """Percent of sampled prefixes on which the memory is not stronger in this direction."""
    pieces: list[Piece] | None = None
    """The prefix token by token, if the model was asked."""


class Fold(NamedTuple):
    """A trigger, and those further down the list that are like it."""

    shown: Shown
    alike: list[Shown]


class Side(NamedTuple):
    """The triggers of one sign."""

    sign: int
    folds: list[Fold]
    n: int
    followed: int
    """How many are followed by the token that sign(m) · v promotes most."""
    with_next: int
    """Of how many; 0 if there is no static value to compare with."""


Pieces = dict[tuple[int, int], list[Piece]]
"""Prefixes token by token, by sentence and length."""


def router(site: Site) -> APIRouter:
    """Return the routes of one memory."""
    routes = APIRouter(tags=["memories"])

    @routes.get("/m/{cell:path}", include_in_schema=False)
    async def page(
        request: Request,
        cell: str,
        state: Asked,
        wanted: AsWanted,
        similar: By | None = None,
        tokens: bool = False,
        interval: int | None = None,
    ) -> Response:
        shelf = site.shelf(state)
        named = shelf.index.layout.resolve(cell)
        if cell != str(named):
            return RedirectResponse(state.link(f"/m/{named}", **wanted.parameters()), 307)
        if is_cross_site(request):  # the page has buttons for what needs the model
            similar, tokens = None, False
        shared = {
            "similar": similar,
            "tokens": tokens,
            "model": site.worker.readiness(shelf),
        }
        if similar is None and not tokens:

            def plain() -> Response:
                context = _context(shelf, named, wanted, interval) | shared
                context |= {"neighbours": None, **_lists(context, {})}
                return site.page(request, state, "memory.html", **context)

            return await run_in_threadpool(plain)
        context = await run_in_threadpool(_context, shelf, named, wanted, interval) | shared

        async def coming() -> dict[str, Any]:
            pieces: Pieces = {}
            if tokens:
                shown = [(one.sentence, one.length) for one in _first(context)]
                read = await site.worker.run(shelf, _coefficients(named, shown), request)
                pieces = {(one.sentence, one.length): _tinted(one, context) for one in read}
            found = await _similar(site, shelf, named, similar, 10, request) if similar else None
            return {**_lists(context, pieces), "neighbours": found}

        return await site.page_when_ready(
            request, state, "memory.html", coming(), waiting="Running the model", **context
        )

    @routes.get("/api/m/{cell}/similar", summary="Memories whose value or key points the same way")
    async def similar_memories(
        request: Request,
        cell: str,
        state: Asked,
        by: By = "value",
        n: Annotated[int, Query(ge=1, le=100)] = 10,
    ) -> Similar:
        shelf = site.shelf(state)
        named = shelf.index.layout.resolve(cell)
        return await _similar(site, shelf, named, by, n, request)

    @routes.get("/api/m/{cell}/coefficients", summary="The coefficient at every token of prefixes")
    async def coefficients(
        request: Request,
        cell: str,
        state: Asked,
        at: Annotated[str, Query(description="Prefixes as sentence:length, like 812:14,40:7.")],
    ) -> list[PrefixCoefficients]:
        shelf = site.shelf(state)
        named = shelf.index.layout.resolve(cell)
        prefixes = parse_prefixes(shelf.index, at)
        return await site.worker.run(shelf, _coefficients(named, prefixes), request)

    @routes.get("/api/m/{cell}/intervals", summary="Prefixes by interval of the coefficient")
    def by_interval(cell: str, state: Asked) -> Intervals:
        index = site.shelf(state).index
        return intervals(index, index[cell])

    @routes.get("/api/m/{cell}", summary="One memory, as `ffmem show --json` gives it")
    def memory_json(cell: str, state: Asked) -> dict[str, Any]:
        index = site.shelf(state).index
        memory = index[cell]
        return {**memory.to_dict(), "patterns": told(index, memory)}

    return routes


def _context(shelf: Shelf, cell: Cell, wanted: Wanted, interval: int | None) -> dict[str, Any]:
    """Return what the page shows without the model."""
    index = shelf.index
    memory = index[cell]
    sample = index.sample(cell)
    previous, following = _neighbors(index, cell, wanted)
    ranges = intervals(index, memory, interval)
    if interval is not None and not 0 <= interval < len(ranges.intervals):
        raise NotHere(
            f"There is no interval {interval} of {cell}: there are 0 to"
            f" {len(ranges.intervals) - 1}."
        )
    return {
        "memory": memory,
        "patterns": of_memory(index, memory),
        "cell": cell,
        "wanted": wanted,
        "previous": previous,
        "following": following,
        "sample": sample,
        "bars": histogram(sample),
        "ends": (float(sample.min()), float(sample.max())) if len(sample) else None,
        "largest": max(abs(memory.stats.max), abs(memory.stats.min)) or 1.0,
        "ranges": ranges.intervals,
        "interval": interval,
        "snippets": snippets(shelf.name, index.manifest.model, cell),
    }


def _neighbors(index: Index, cell: Cell, wanted: Wanted) -> tuple[Cell | None, Cell | None]:
    """Return the memories before and after one: in its layer's order, if one was chosen."""
    if wanted != Wanted():
        order = chosen(index, layer_table(index, cell.layer), wanted)
        (here,) = np.nonzero(order == cell.memory)
        if len(here):
            around = [order[at : at + 1].tolist() for at in (here[0] - 1, here[0] + 1) if at >= 0]
            cells = [index.layout.cell(cell.layer, one[0]) if one else None for one in around]
            return (cells[0], cells[1]) if len(cells) > 1 else (None, cells[0])
    number = index.layout.number(cell)
    before = index.layout.at(number - 1) if number else None
    return before, index.layout.at(number + 1) if number + 1 < len(index) else None


def _lists(context: dict[str, Any], pieces: Pieces) -> dict[str, Any]:
    """Return the triggers of both signs (an ungated model has one), or those of an interval."""
    memory: Memory = context["memory"]
    if context["interval"] is None:
        signs = (1, -1) if memory.gated else (1,)
        sides = [side(memory, sign, context["sample"], pieces) for sign in signs]
        return {"sides": sides, "examples": []}
    examples = []
    for one in _first(context):
        sign = -1 if one.coefficient < 0 else 1
        weaker = float((sign * context["sample"] <= sign * np.float32(one.coefficient)).mean())
        examples.append(_shown(one, context["largest"], weaker, pieces))
    return {"sides": [], "examples": examples}


def _first(context: dict[str, Any]) -> list[Trigger]:
    """Return the prefixes that the page shows first."""
    memory: Memory = context["memory"]
    if context["interval"] is None:
        return [*memory.triggers[:TINTED], *memory.negative_triggers[:TINTED]]
    examples = context["ranges"][context["interval"]].examples
    return [
        Trigger(rank=rank, gate=None, **vars(one)) for rank, one in enumerate(examples, start=1)
    ]


def side(memory: Memory, sign: int, sample: ndarray, pieces: Pieces | None = None) -> Side:
    """Return a memory's triggers of one sign."""
    triggers = memory.triggers if sign > 0 else memory.negative_triggers
    end = memory.value.top if sign > 0 else memory.value.bottom
    largest = max((abs(trigger.coefficient) for trigger in triggers), default=1.0) or 1.0
    strengths = np.asarray([sign * trigger.coefficient for trigger in triggers], np.float32)
    weaker = np.searchsorted(np.sort(sign * sample), strengths, side="right").tolist()
    shown = [
        _shown(trigger, largest, below / len(sample) if len(sample) else None, pieces or {})
        for trigger, below in zip(triggers, weaker, strict=True)
    ]
    following = [trigger.next_token for trigger in triggers if trigger.next_token is not None]
    best = end[0].token if end else None
    return Side(
        sign,
        folded(shown),
        len(triggers),
        sum(token == best for token in following),
        len(following) if best is not None else 0,
    )


def folded(shown: Sequence[Shown]) -> list[Fold]:
    """Return triggers in their order, each with all later ones that are like it."""
    folds: dict[object, Fold] = {}
    for one in shown:
        key = ending(one.trigger.prefix)
        if key in folds:
            folds[key].alike.append(one)
        else:
            folds[key] = Fold(one, [])
    return list(folds.values())


def ending(prefix: str) -> tuple[str, ...]:
    """Return what two prefixes must share to be alike: their last words, digits aside."""
    words = prefix.rsplit(maxsplit=WORDS)[-WORDS:]
    return tuple(re.sub(r"\d+", "0", word.casefold()) for word in words)


def _shown(trigger: Trigger, largest: float, weaker: float | None, pieces: Pieces) -> Shown:
    prefix, last = trigger.prefix, trigger.last_token or ""
    # A token that is part of a character is shown as bytes, and the prefix ends in them too.
    before = prefix[: len(prefix) - len(last)] if last and prefix.endswith(last) else prefix
    rest = trigger.rest
    if trigger.next_token and rest.lstrip().startswith(trigger.next_token.lstrip()):
        rest = rest.lstrip()[len(trigger.next_token.lstrip()) :]  # it has a mark of its own
    before += prefix[len(before) :][: len(last) - len(last.lstrip())] if last.strip() else ""
    return Shown(
        trigger,
        visible(before) if len(before) <= BEFORE else "…" + visible(before[1 - BEFORE :]),
        visible(prefix[len(before) :]),
        visible(rest[:AFTER]) + ("…" if len(rest) > AFTER else ""),
        f"{100 * abs(trigger.coefficient) / largest:.1f}",
        "" if weaker is None else f"{100 * weaker:.4g}",
        pieces.get((trigger.sentence, trigger.length)),
    )


def _tinted(read: PrefixCoefficients, context: dict[str, Any]) -> list[Piece]:
    """Return a prefix token by token, tinted by |m| against the memory's largest."""
    found = []
    for text, number in zip(read.tokens, read.coefficients, strict=True):
        tenth = round(10 * min(1.0, abs(number) / context["largest"]))
        shade = f"{'p' if number >= 0 else 'm'}{tenth}" if tenth else ""
        word = text.lstrip() or text
        space = visible(text[: len(text) - len(word)])
        found.append(Piece(space, visible(word), shade, format_number(number, signed=True)))
    first, length = 0, len("".join(read.tokens))
    while first < len(found) - 1 and length > BEFORE:
        length -= len(read.tokens[first])
        first += 1
    return [Piece("…", "", "", ""), *found[first:]] if first else found


def token_texts(sentence: StoredSentence, length: int, shown: Callable[[int], str]) -> list[str]:
    """Return what each of the first tokens adds to the text: nothing inside a character."""
    text, starts, ends = sentence.text, sentence.starts, sentence.ends
    if text is None or not starts or ends is None:
        return [shown(id) for id in sentence.ids[:length]]
    found, reached = [], starts[0]
    for end in ends[:length]:
        found.append(text[reached:end])
        reached = max(reached, end)
    return found


def parse_prefixes(index: Index, text: str) -> list[tuple[int, int]]:
    """Return prefixes written as sentence:length, if the corpus has them."""
    parts = [part for part in text.split(",") if part.strip()]
    if len(parts) > TINTED:
        raise TooMuch(f"{len(parts)} prefixes were asked for; one request takes {TINTED}.")
    found = []
    for part in parts:
        match = re.fullmatch(r"\s*(\d{1,18}):(\d{1,9})\s*", part, re.ASCII)
        if match is None:
            raise FfmemError(f"{part[:40]!r} is not a prefix. Write sentence:length, like 812:14.")
        sentence, length = int(match[1]), int(match[2])
        n = len(index.sentences.row(sentence).ids)
        if not 1 <= length <= n:
            raise FfmemError(f"Sentence {sentence} has no prefix of {length} tokens; it has {n}.")
        found.append((sentence, length))
    return found


def _coefficients(
    cell: Cell, prefixes: Sequence[tuple[int, int]]
) -> "Callable[[LoadedModel], list[PrefixCoefficients]]":
    """Return a job that reads a memory's coefficient at every token of some prefixes."""

    def job(at: "LoadedModel") -> list[PrefixCoefficients]:
        from ffmem.interventions.prompts import coefficients_along

        assert at.index is not None, "a shelf has one"
        rows = [at.index.sentences.row(sentence) for sentence, _ in prefixes]
        texts = [row.ids[:length] for row, (_, length) in zip(rows, prefixes, strict=True)]
        read = coefficients_along(at.memories, cell, texts, at.start)
        return [
            PrefixCoefficients(
                row.sentence, length, token_texts(row, length, at.index.token), numbers
            )
            for row, (_, length), numbers in zip(rows, prefixes, read, strict=True)
        ]

    return job


async def _similar(
    site: Site, shelf: Shelf, cell: Cell, by: By, n: int, request: Request
) -> Similar:
    """Return the neighbors of a memory, with the tokens that their values promote."""

    def promoted(other: Cell, cosine: float) -> list[str]:
        value = shelf.index[other].value
        return [token.token for token in (value.top if cosine >= 0 else value.bottom)[:6]]

    def job(at: "LoadedModel") -> Similar:
        from ffmem.models.memories import neighbourhood

        around = neighbourhood(at.memories, cell, by, n, SECONDS)
        return Similar(
            by,
            around.layers,
            shelf.index.n_layers,
            [
                SimilarMemory(str(one.cell), one.cosine, promoted(one.cell, one.cosine))
                for one in around.found
            ],
            None if shelf.index.manifest.model.has_values else NO_VALUES,
        )

    return await site.worker.run(shelf, job, request)


def intervals(index: Index, memory: Memory, only: int | None = -1) -> Intervals:
    """Return the range of a memory's coefficient in equal steps, with examples from each.

    `only` gives the examples of one interval, None of none, −1 of all.
    """
    sample = np.asarray(index.sample(memory.cell), np.float64)
    high, low = max(memory.stats.max, 0.0), min(memory.stats.min, 0.0)
    edges = [high * step / STEPS for step in range(STEPS, 0, -1)] if high else []
    edges += [0.0]
    edges += [low * step / STEPS for step in range(1, STEPS + 1)] if low else []
    bounds = [(bottom, top) for top, bottom in pairwise(edges)]
    bounds += [(0.0, 0.0)] if (sample == 0).any() else []
    found = []
    for number, (bottom, top) in enumerate(bounds):
        (here,) = np.nonzero(_is_inside(sample, bottom, top))
        wanted = only in (number, -1)
        examples = _examples(index, memory, bottom, top, sample, here) if wanted else []
        found.append(Interval(bottom, top, len(here), examples))
    return Intervals(str(memory.cell), len(sample), found)


def _is_inside(m: Any, low: float, high: float) -> Any:
    """Return whether coefficients lie in an interval; 0 is an interval of its own."""
    if low == high:
        return m == low
    return (low < m) & (m <= high) if high > 0 else (low <= m) & (m < high)


def _examples(
    index: Index, memory: Memory, low: float, high: float, sample: ndarray, here: ndarray
) -> list[Example]:
    """Return prefixes of an interval, strongest first: sampled ones, filled up with triggers."""
    prefixes = _sampled_prefixes(index)[here].tolist()
    owners = index.sentences.at(prefixes)
    sampled = []
    for prefix, coefficient in zip(prefixes, sample[here].tolist(), strict=True):
        row = owners[prefix]
        length = prefix - row.offset
        text = index.prefix_text(row, length)
        sampled.append(Example(coefficient, row.sentence, length, *text))
    known = {(one.sentence, one.length) for one in sampled}
    triggers = [
        Example(**{name: getattr(one, name) for name in Example.__dataclass_fields__})
        for one in (*memory.triggers, *memory.negative_triggers)
        if _is_inside(one.coefficient, low, high) and (one.sentence, one.length) not in known
    ]
    found = _spread(sampled, EXAMPLES)
    found += _spread(triggers, EXAMPLES - len(found))
    return sorted(found, key=lambda one: -abs(one.coefficient))


def _spread(examples: list[Example], n: int) -> list[Example]:
    """Return at most n examples, evenly spread by their coefficients' order."""
    ordered = sorted(examples, key=lambda one: -abs(one.coefficient))
    places = np.linspace(0, len(ordered) - 1, min(n, len(ordered))).round().astype(int)
    return [ordered[place] for place in places.tolist()]


@lru_cache(maxsize=8)
def _sampled_prefixes(index: Index) -> ndarray:
    return read_columns(index.folder / "samples/prefixes.parquet", ["prefix"])["prefix"]


def histogram(sample: ndarray) -> list[tuple[float, ...]]:
    """Return bars (x, y, width, height) of a memory's sampled coefficients, in a box of 100 × 30.

    Heights show the square root of the count: a memory is silent on most prefixes, and the few on
    which it is not should be seen.
    """
    if not len(sample):
        return []
    counts, _ = np.histogram(sample, bins=BINS)
    heights = 30 * np.sqrt(counts / counts.max())
    width = 100 / BINS
    return [
        (round(place * width, 2), round(30 - height, 2), round(width * 0.86, 2), round(height, 2))
        for place, height in enumerate(heights.tolist())
        if height > 0
    ]

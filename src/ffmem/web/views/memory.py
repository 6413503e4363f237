"""The page of one memory: patterns, triggers, value, statistics, similar memories, code to copy.

The index stores a coefficient where a trigger ends; the coefficients at its other tokens come from
the model, when one is loaded. Triggers that end in the same five words, digits aside, are grouped.
Beyond the top, prefixes can be browsed by interval of the coefficient: triggers and the index's
sampled prefixes that lie in it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from numpy import ndarray
from starlette.concurrency import run_in_threadpool

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.indexing.manifest import ModelRecord
from ffmem.indexing.memory import NO_VALUES, Memory, SignCase, Trigger, visible
from ffmem.indexing.sentences import StoredSentence
from ffmem.indexing.store import Index
from ffmem.interventions.results import SourcesResult
from ffmem.models.families import FAMILIES
from ffmem.text import format_number
from ffmem.web.auth import is_cross_site
from ffmem.web.catalog import ServedIndex, short_source
from ffmem.web.errors import LimitExceeded, NotFound
from ffmem.web.layer_table import (
    LayerQuery,
    LayerQueryParam,
    find_bank,
    layer_table,
    sort_memories,
)
from ffmem.web.patterns import MemoryPatterns, memory_patterns, patterns_json
from ffmem.web.site import Site
from ffmem.web.state import State, StateParam
from ffmem.web.views.trace import MAX_ABLATED, N_CANDIDATES, check_tokens

if TYPE_CHECKING:
    from ffmem.interventions.forward import LoadedModel

MAX_SECONDS = 4.0
"""Time limit of a search for similar memories; the page says which layers were reached."""

MAX_PREFIXES = 12
"""Prefixes that one request reads token by token."""

N_WORDS = 5
"""Words at the end of a prefix that decide whether two are alike."""

BEFORE, AFTER = 220, 70
"""Characters shown before and after the end of a prefix."""

N_BINS = 40
"""Bars of the histogram of a memory's coefficients."""

N_STEPS = 4
"""Intervals of the coefficient on each side of 0."""

N_EXAMPLES = 12
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
class SimilarMemories:
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

    def contains(self, m: Any) -> Any:
        """Return which coefficients are in it; 0 is an interval of its own."""
        if self.low == self.high:
            return m == self.low
        if self.high > 0:
            return (self.low < m) & (m <= self.high)
        return (self.low <= m) & (m < self.high)


@dataclass(frozen=True)
class Intervals:
    """The range of a memory's coefficient in steps, from the largest down."""

    cell: str
    sample: int
    """Sampled prefixes in all."""
    intervals: list[Interval]


class TintedToken(NamedTuple):
    """A token of a prefix, tinted by the coefficient there."""

    space: str
    """White space before the word, not tinted."""
    text: str
    shade: str
    title: str


class TriggerView(NamedTuple):
    """A trigger on the page."""

    trigger: Trigger
    before: str
    last: str
    rest: str
    width: str
    """|m| against the list's largest, in percent."""
    percentile: str
    """Percent of sampled prefixes on which the memory is not stronger in this direction."""
    tokens: list[TintedToken] | None = None
    """The prefix token by token, if the model has read it."""


class TriggerGroup(NamedTuple):
    """A trigger, and those further down the list that are like it."""

    first: TriggerView
    alike: list[TriggerView]


class TriggerList(NamedTuple):
    """The triggers of one sign."""

    sign: int
    groups: list[TriggerGroup]
    n: int
    followed: int
    """Triggers followed by the token that sign(m) · v promotes most."""
    with_next: int
    """Triggers with a next token; 0 without a static value to compare with."""


Tinted = dict[tuple[int, int], list[TintedToken]]
"""Prefixes token by token, by sentence and length."""


@dataclass(frozen=True)
class MemoryPage:
    """What the page of a memory shows without the model."""

    memory: Memory
    patterns: MemoryPatterns
    query: LayerQuery
    """The order of the layer's page that leads here."""
    previous: Cell | None
    following: Cell | None
    sample: ndarray
    ranges: list[Interval]
    interval: int | None
    """The selected one of the ranges; None: the top triggers."""
    case: SignCase | None
    """The sign case whose triggers alone are listed."""
    bars: list[tuple[float, ...]]
    """Bars of the histogram."""
    snippets: dict[str, str]

    @property
    def largest(self) -> float:
        """The largest |m|, which tints are relative to."""
        return max(abs(self.memory.stats.max), abs(self.memory.stats.min)) or 1.0

    def first_triggers(self) -> list[Trigger]:
        """Return the prefixes that the page shows first."""
        if self.interval is None and self.case is not None:
            return self.case.triggers[:MAX_PREFIXES]
        if self.interval is None:
            positive, negative = self.memory.triggers, self.memory.negative_triggers
            return [*positive[:MAX_PREFIXES], *negative[:MAX_PREFIXES]]
        return [
            Trigger(rank=rank, gate=None, **vars(one))
            for rank, one in enumerate(self.ranges[self.interval].examples, start=1)
        ]

    def lists(self, tinted: Tinted) -> dict[str, Any]:
        """Return the triggers of both signs (ungated: of one), or those of an interval."""
        if self.interval is None:
            if self.case is not None:
                gate, signs = self.case.gate, [self.case.sign]
            else:
                gate, signs = None, [1, -1] if self.memory.gated else [1]
            lists = [trigger_list(self.memory, sign, self.sample, tinted, gate) for sign in signs]
            return {"lists": lists, "examples": []}
        examples = []
        for one in self.first_triggers():
            sign = -1 if one.coefficient < 0 else 1
            weaker = float((sign * self.sample <= sign * np.float32(one.coefficient)).mean())
            examples.append(_view(one, self.largest, weaker, tinted))
        return {"lists": [], "examples": examples}

    def tint(self, read: PrefixCoefficients) -> list[TintedToken]:
        """Return a prefix token by token, tinted by |m| against the memory's largest."""
        tokens = []
        for text, m in zip(read.tokens, read.coefficients, strict=True):
            tenth = round(10 * min(1.0, abs(m) / self.largest))
            shade = f"{'p' if m >= 0 else 'm'}{tenth}" if tenth else ""
            word = text.lstrip() or text
            space = visible(text[: len(text) - len(word)])
            tokens.append(TintedToken(space, visible(word), shade, format_number(m, signed=True)))
        first, length = 0, len("".join(read.tokens))
        while first < len(tokens) - 1 and length > BEFORE:
            length -= len(read.tokens[first])
            first += 1
        return [TintedToken("…", "", "", ""), *tokens[first:]] if first else tokens


def router(site: Site) -> APIRouter:
    """Return the routes of one memory."""
    routes = APIRouter(tags=["memories"])

    @routes.get("/m/{cell:path}", include_in_schema=False)
    async def page(
        request: Request,
        cell: str,
        state: StateParam,
        query: LayerQueryParam,
        similar: By | None = None,
        tokens: bool = False,
        interval: int | None = None,
        sources: bool = False,
        case: int | None = None,
    ) -> Response:
        served = site.served(state)
        named = served.index.layout.resolve(cell)
        if cell != str(named):
            return RedirectResponse(state.link(f"/m/{named}", **query.parameters()), 307)
        if is_cross_site(request):  # the page has buttons for what needs the model
            similar, tokens, sources = None, False, False
        context: dict[str, Any] = {
            "served": served,
            "cell": named,
            "bank": find_bank(served.index, named.layer, named.bank) if named.bank else None,
            "similar": similar,
            "tokens": tokens,
            "sources": sources,
            "model": "loaded" if similar or tokens or sources else site.worker.model_state(served),
        }
        if similar is None and not tokens and not sources:

            def plain() -> Response:
                page = read_page(served, named, query, interval, case)
                return site.page(
                    request,
                    state,
                    "memory.html",
                    **context,
                    page=page,
                    neighbors=None,
                    feeding=None,
                    **page.lists({}),
                )

            return await run_in_threadpool(plain)
        page = await run_in_threadpool(read_page, served, named, query, interval, case)

        async def content() -> dict[str, Any]:
            tinted: Tinted = {}
            if tokens:
                prefixes = [(one.sentence, one.length) for one in page.first_triggers()]
                job = _read_coefficients(named, prefixes)
                for one in await site.worker.run(served, job, request):
                    tinted[one.sentence, one.length] = page.tint(one)
            found = (
                await _find_similar(site, served, named, similar, 10, request) if similar else None
            )
            feeding = await _find_sources(site, served, named, state, request) if sources else None
            return {**page.lists(tinted), "neighbors": found, "feeding": feeding}

        return await site.stream_page(
            request,
            state,
            "memory.html",
            content(),
            waiting="Running the model",
            **context,
            page=page,
        )

    @routes.get("/api/m/{cell}/similar", summary="Memories whose value or key points the same way")
    async def similar_memories(
        request: Request,
        cell: str,
        state: StateParam,
        by: By = "value",
        n: Annotated[int, Query(ge=1, le=100)] = 10,
    ) -> SimilarMemories:
        served = site.served(state)
        named = served.index.layout.resolve(cell)
        return await _find_similar(site, served, named, by, n, request)

    @routes.get(
        "/api/m/{cell}/sources",
        summary="Lower memories that feed it: by weights and, with a prompt, measured",
        response_model=SourcesResult,
    )
    async def sources_json(request: Request, cell: str, state: StateParam) -> JSONResponse:
        served = site.served(state)
        named = served.index.layout.resolve(cell)
        found = await _find_sources(site, served, named, state, request)
        return JSONResponse(found.to_dict())

    @routes.get("/api/m/{cell}/coefficients", summary="The coefficient at every token of prefixes")
    async def coefficients(
        request: Request,
        cell: str,
        state: StateParam,
        at: Annotated[str, Query(description="Prefixes as sentence:length, like 812:14,40:7.")],
    ) -> list[PrefixCoefficients]:
        served = site.served(state)
        named = served.index.layout.resolve(cell)
        prefixes = parse_prefixes(served.index, at)
        return await site.worker.run(served, _read_coefficients(named, prefixes), request)

    @routes.get("/api/m/{cell}/intervals", summary="Prefixes by interval of the coefficient")
    def by_interval(cell: str, state: StateParam) -> Intervals:
        index = site.served(state).index
        memory = index[cell]
        sample = index.sample(memory.cell)
        return Intervals(str(memory.cell), len(sample), intervals(index, memory))

    @routes.get("/api/m/{cell}", summary="One memory, as `ffmem show --json` prints it")
    def memory_json(cell: str, state: StateParam) -> JSONResponse:
        index = site.served(state).index
        memory = index[cell]
        return JSONResponse({**memory.to_dict(), "patterns": patterns_json(index, memory)})

    return routes


def read_page(
    served: ServedIndex, cell: Cell, query: LayerQuery, interval: int | None, case: int | None
) -> MemoryPage:
    """Read what the page shows without the model."""
    index = served.index
    memory = index[cell]
    ranges = intervals(index, memory, interval)
    if interval is not None and not 0 <= interval < len(ranges):
        raise NotFound(
            f"There is no interval {interval} of {cell}: there are {len(ranges)}, from 0."
        )
    cases = memory.sign_cases
    if case is not None and not 0 <= case < len(cases):
        raise NotFound(
            f"There is no sign case {case} of {cell}: there are {len(cases)}, from 0."
            if cases
            else f"{cell} has no sign cases: the model is not gated."
        )
    previous, following = _neighbors(index, cell, query)
    return MemoryPage(
        memory=memory,
        patterns=memory_patterns(index, memory),
        query=query,
        previous=previous,
        following=following,
        sample=(sample := index.sample(cell)),
        ranges=ranges,
        interval=interval,
        case=None if case is None else cases[case],
        bars=histogram(sample),
        snippets=snippets(served.name, index.manifest.model, cell),
    )


def _neighbors(index: Index, cell: Cell, query: LayerQuery) -> tuple[Cell | None, Cell | None]:
    """Return the memories before and after one: in its layer's order, if one was chosen."""
    if query != LayerQuery():
        order = sort_memories(index, layer_table(index, cell.layer), query).tolist()
        if cell.memory in order:
            place = order.index(cell.memory)
            around = [order[at] if 0 <= at < len(order) else None for at in (place - 1, place + 1)]
            before, after = (
                None if one is None else index.layout.cell(cell.layer, one) for one in around
            )
            return before, after
    number = index.layout.number(cell)
    before = index.layout.at(number - 1) if number else None
    return before, index.layout.at(number + 1) if number + 1 < len(index) else None


def trigger_list(
    memory: Memory,
    sign: int,
    sample: ndarray,
    tinted: Tinted | None = None,
    gate: int | None = None,
) -> TriggerList:
    """Return a memory's triggers of one sign, or those of them with one sign of the gate."""
    triggers = memory.triggers_of(sign)
    if gate is not None:
        triggers = [trigger for trigger in triggers if trigger.gate == gate]
    end = memory.value.top if sign > 0 else memory.value.bottom
    largest = max((abs(trigger.coefficient) for trigger in triggers), default=1.0) or 1.0
    strengths = np.asarray([sign * trigger.coefficient for trigger in triggers], np.float32)
    weaker = np.searchsorted(np.sort(sign * sample), strengths, side="right").tolist()
    views = [
        _view(trigger, largest, below / len(sample) if len(sample) else None, tinted or {})
        for trigger, below in zip(triggers, weaker, strict=True)
    ]
    following = [trigger.next_token for trigger in triggers if trigger.next_token is not None]
    best = end[0].token if end else None
    return TriggerList(
        sign,
        group_triggers(views),
        len(triggers),
        sum(token == best for token in following),
        len(following) if best is not None else 0,
    )


def group_triggers(views: Sequence[TriggerView]) -> list[TriggerGroup]:
    """Return triggers in their order, each with all later ones that end like it."""
    groups: dict[tuple[str, ...], TriggerGroup] = {}
    for view in views:
        key = ending(view.trigger.prefix)
        if key in groups:
            groups[key].alike.append(view)
        else:
            groups[key] = TriggerGroup(view, [])
    return list(groups.values())


def ending(prefix: str) -> tuple[str, ...]:
    """Return what two prefixes must share to be alike: their last words, digits aside."""
    words = prefix.rsplit(maxsplit=N_WORDS)[-N_WORDS:]
    return tuple(re.sub(r"\d+", "0", word.casefold()) for word in words)


def _view(trigger: Trigger, largest: float, weaker: float | None, tinted: Tinted) -> TriggerView:
    prefix, last = trigger.prefix, trigger.last_token or ""
    # A token that is part of a character is shown as bytes, and the prefix ends in them too.
    before = prefix[: len(prefix) - len(last)] if last and prefix.endswith(last) else prefix
    rest = trigger.rest
    if trigger.next_token and rest.lstrip().startswith(trigger.next_token.lstrip()):
        rest = rest.lstrip()[len(trigger.next_token.lstrip()) :]  # it has a mark of its own
    before += prefix[len(before) :][: len(last) - len(last.lstrip())] if last.strip() else ""
    return TriggerView(
        trigger,
        visible(before) if len(before) <= BEFORE else "…" + visible(before[1 - BEFORE :]),
        visible(prefix[len(before) :]),
        visible(rest[:AFTER]) + ("…" if len(rest) > AFTER else ""),
        f"{100 * abs(trigger.coefficient) / largest:.1f}",
        "" if weaker is None else f"{100 * weaker:.4g}",
        tinted.get((trigger.sentence, trigger.length)),
    )


def token_texts(sentence: StoredSentence, length: int, decode: Callable[[int], str]) -> list[str]:
    """Return what each of the first tokens adds to the text: nothing inside a character."""
    text, starts, ends = sentence.text, sentence.starts, sentence.ends
    if text is None or not starts or ends is None:
        return [decode(id) for id in sentence.ids[:length]]
    texts, reached = [], starts[0]
    for end in ends[:length]:
        texts.append(text[reached:end])
        reached = max(reached, end)
    return texts


def parse_prefixes(index: Index, text: str) -> list[tuple[int, int]]:
    """Return prefixes written as sentence:length, if the corpus has them."""
    parts = [part for part in text.split(",") if part.strip()]
    if len(parts) > MAX_PREFIXES:
        raise LimitExceeded(f"Got {len(parts)} prefixes; one request takes {MAX_PREFIXES}.")
    prefixes = []
    for part in parts:
        match = re.fullmatch(r"\s*(\d{1,18}):(\d{1,9})\s*", part, re.ASCII)
        if match is None:
            raise FfmemError(f"{part[:40]!r} is not a prefix. Write sentence:length, like 812:14.")
        sentence, length = int(match[1]), int(match[2])
        n = len(index.sentences.row(sentence).ids)
        if not 1 <= length <= n:
            raise FfmemError(f"Sentence {sentence} has no prefix of {length} tokens; it has {n}.")
        prefixes.append((sentence, length))
    return prefixes


def _read_coefficients(
    cell: Cell, prefixes: Sequence[tuple[int, int]]
) -> "Callable[[LoadedModel], list[PrefixCoefficients]]":
    """Return a job that reads a memory's coefficient at every token of some prefixes."""

    def job(loaded: "LoadedModel") -> list[PrefixCoefficients]:
        from ffmem.interventions.coefficients import coefficients_along

        index = loaded.index
        assert index is not None
        rows = [index.sentences.row(sentence) for sentence, _ in prefixes]
        texts = [row.ids[:length] for row, (_, length) in zip(rows, prefixes, strict=True)]
        read = coefficients_along(loaded.memories, cell, texts, loaded.start)
        return [
            PrefixCoefficients(row.sentence, length, token_texts(row, length, index.token), numbers)
            for row, (_, length), numbers in zip(rows, prefixes, read, strict=True)
        ]

    return job


async def _find_similar(
    site: Site, served: ServedIndex, cell: Cell, by: By, n: int, request: Request
) -> SimilarMemories:
    """Return the neighbors of a memory, with the tokens that their values promote."""

    def promoted(other: Cell, cosine: float) -> list[str]:
        value = served.index[other].value
        return [token.token for token in (value.top if cosine >= 0 else value.bottom)[:6]]

    def job(loaded: "LoadedModel") -> SimilarMemories:
        from ffmem.models.memories import neighbourhood

        around = neighbourhood(loaded.memories, cell, by, n, MAX_SECONDS)
        return SimilarMemories(
            by,
            around.layers,
            served.index.n_layers,
            [
                SimilarMemory(str(one.cell), one.cosine, promoted(one.cell, one.cosine))
                for one in around.found
            ],
            None if served.index.manifest.model.has_values else NO_VALUES,
        )

    return await site.worker.run(served, job, request)


async def _find_sources(
    site: Site, served: ServedIndex, cell: Cell, state: State, request: Request
) -> SourcesResult:
    """Return the lower memories that feed one; on the visitor's prompt too, if there is one."""

    def job(loaded: "LoadedModel") -> SourcesResult:
        from ffmem.interventions.sources import sources

        candidates = N_CANDIDATES
        if state.text:
            candidates = min(N_CANDIDATES, MAX_ABLATED // check_tokens(loaded, state))
        return sources(
            loaded,
            cell,
            prompt=state.text or None,
            position=state.position if state.text else None,
            candidates=max(1, candidates),
            seconds=MAX_SECONDS,
        )

    return await site.worker.run(served, job, request)


def intervals(index: Index, memory: Memory, only: int | None = -1) -> list[Interval]:
    """Return the range of a memory's coefficient in equal steps, with examples from each.

    `only` gives the examples of one interval, None of none, −1 of all. An unfinished index has no
    intervals: its sample is not drawn yet.
    """
    if index.live is not None:
        return []
    sample = np.asarray(index.sample(memory.cell), np.float64)
    high, low = max(memory.stats.max, 0.0), min(memory.stats.min, 0.0)
    edges = [high * step / N_STEPS for step in range(N_STEPS, 0, -1)] if high else []
    edges += [0.0]
    edges += [low * step / N_STEPS for step in range(1, N_STEPS + 1)] if low else []
    bounds = [(bottom, top) for top, bottom in pairwise(edges)]
    bounds += [(0.0, 0.0)] if (sample == 0).any() else []
    found = []
    for number, (bottom, top) in enumerate(bounds):
        (inside,) = np.nonzero(Interval(bottom, top, 0, []).contains(sample))
        interval = Interval(bottom, top, len(inside), [])
        if only in (number, -1):
            interval.examples.extend(_examples(index, memory, interval, sample, inside))
        found.append(interval)
    return found


def _examples(
    index: Index, memory: Memory, interval: Interval, sample: ndarray, inside: ndarray
) -> list[Example]:
    """Return prefixes of an interval, strongest first: sampled ones, filled up with triggers."""
    prefixes = index.sampled_prefixes[inside].tolist()
    owners = index.sentences.at(prefixes)
    sampled = []
    for prefix, coefficient in zip(prefixes, sample[inside].tolist(), strict=True):
        row = owners[prefix]
        length = prefix - row.offset
        text = index.prefix_text(row, length)
        sampled.append(Example(coefficient, row.sentence, length, *text))
    known = {(one.sentence, one.length) for one in sampled}
    triggers = [
        Example(**{name: getattr(one, name) for name in Example.__dataclass_fields__})
        for one in (*memory.triggers, *memory.negative_triggers)
        if interval.contains(one.coefficient) and (one.sentence, one.length) not in known
    ]
    found = _evenly(sampled, N_EXAMPLES)
    found += _evenly(triggers, N_EXAMPLES - len(found))
    return sorted(found, key=lambda one: -abs(one.coefficient))


def _evenly(examples: list[Example], n: int) -> list[Example]:
    """Return at most n examples, evenly spread by their coefficients' order."""
    ordered = sorted(examples, key=lambda one: -abs(one.coefficient))
    places = np.linspace(0, len(ordered) - 1, min(n, len(ordered))).round().astype(int)
    return [ordered[place] for place in places.tolist()]


def histogram(sample: ndarray) -> list[tuple[float, ...]]:
    """Return bars (x, y, width, height) of a memory's sampled coefficients, in a box of 100 × 30.

    Heights show the square root of the count: a memory is silent on most prefixes, and the few on
    which it is not should be seen.
    """
    if not len(sample):
        return []
    counts, _ = np.histogram(sample, bins=N_BINS)
    heights = 30 * np.sqrt(counts / counts.max())
    width = 100 / N_BINS
    return [
        (round(bin * width, 2), round(30 - height, 2), round(width * 0.86, 2), round(height, 2))
        for bin, height in enumerate(heights.tolist())
        if height > 0
    ]


def snippets(folder: str, model: ModelRecord, cell: Cell) -> dict[str, str]:
    """Return code that gets at a memory: in ffmem, Hugging Face and TransformerLens."""
    found = {
        "ffmem": f"""\
import ffmem

index = ffmem.open({folder!r})
memory = index["{cell}"]
print(memory)
found = ffmem.trace(index, "Your prompt", off=["{cell}"])
print(found.output_top[0], found.edited.output_top[0])
"""
    }
    row = FAMILIES.get(model.family)
    if row is None or row.repeats or cell.bank:  # experts are no module with one input
        return found
    is_ours = model.family == "ffmem_adaptive"  # which TransformerLens does not know
    ours = "import ffmem.networks.model  # tells transformers of this type\n" * is_ours
    source = short_source(model.source)
    found["Hugging Face"] = f"""\
{ours}from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("MODEL")  # {source}: its folder or Hub id
values = model.get_submodule("{row.blocks}.{cell.layer}.{row.values}")

def switch_off(module, args):
    coefficients = args[0].clone()
    coefficients[..., {cell.memory}] = 0.0
    return (coefficients, *args[1:])

handle = values.register_forward_pre_hook(switch_off)  # handle.remove() undoes it
"""
    if not is_ours:
        found["TransformerLens"] = f"""\
from transformer_lens.model_bridge import TransformerBridge

model = TransformerBridge.boot_transformers("MODEL")  # {source}: its folder or Hub id

def switch_off(coefficients, hook):
    coefficients[..., {cell.memory}] = 0.0
    return coefficients

hook = ("blocks.{cell.layer}.mlp.hook_post", switch_off)
logits = model.run_with_hooks("Your prompt", fwd_hooks=[hook])
"""
    return found

"""The circuit page, and `/api/circuit`: the JSON of `ffmem circuit`.

    /circuit?text=…&target=␣Paris&nodes=32&pin=L5N12@3&groups=capital:L5N12@3,L7N8@4&without=capital

Everything that the page shows is in its URL: pinned nodes, groups of nodes, and which groups are
off. A circuit itself is computed once and cached; groups are measured for each page.
"""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from markupsafe import Markup

from ffmem.errors import FfmemError
from ffmem.indexing.memory import from_visible
from ffmem.interventions.circuit_results import (
    CircuitEdge,
    CircuitNode,
    CircuitResult,
    NodeGroup,
    parse_node,
)
from ffmem.interventions.circuit_svg import draw_circuit
from ffmem.web.auth import is_cross_site
from ffmem.web.errors import LimitExceeded
from ffmem.web.site import Site
from ffmem.web.state import State, StateParam, check_length
from ffmem.web.views.trace import PartCache

if TYPE_CHECKING:  # loads torch, which the first page does without
    from ffmem.interventions.forward import LoadedModel

MAX_NODES = 64
"""Nodes of a circuit on the page."""

MAX_TOKENS = 64
"""Tokens of a prompt: each is a copy of the prompt in the passes."""

MAX_GROUPS = 16

NAME = re.compile(r"[\w .+'-]{1,40}")
"""The name of a group; the URL separates groups by other characters."""

Groups = dict[str, list[str]]


@dataclass(frozen=True)
class CircuitOptions:
    """What a visitor asked for, beside the state that all pages share."""

    target: str | None = None
    """The token to explain, as shown. None or empty: the model's own next token."""
    nodes: int = 32
    pins: tuple[str, ...] = ()
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    without: tuple[str, ...] = ()
    """Groups that are off."""

    def extra(self, **other: object) -> dict[str, object]:
        """Return its URL parameters, without defaults; `other` overrides."""
        groups = ";".join(f"{name}:{','.join(of)}" for name, of in self.groups)
        found: dict[str, object] = {
            "target": self.target or None,
            "nodes": None if self.nodes == CircuitOptions.nodes else self.nodes,
            "pin": ",".join(self.pins) or None,
            "groups": groups or None,
            "without": ";".join(self.without) or None,
        }
        return {name: value for name, value in {**found, **other}.items() if value is not None}


def read_options(
    target: Annotated[
        str | None, Query(description="A token. Default: the model's next token.")
    ] = None,
    nodes: Annotated[int, Query(description="Maximum number of nodes.")] = 32,
    pin: Annotated[str, Query(description="Pinned nodes: L5N12@3,L7N8@4.")] = "",
    groups: Annotated[
        str, Query(description="Nodes by name: capital:L5N12@3,L7N8@4;verb:L2N1@1.")
    ] = "",
    without: Annotated[str, Query(description="Groups to switch off: capital;verb.")] = "",
) -> CircuitOptions:
    """Return the options in a URL."""
    if not 1 <= nodes <= MAX_NODES:
        raise LimitExceeded(
            f"The page shows 1 to {MAX_NODES} nodes; {nodes:,} were requested. `ffmem circuit` has"
            " no such limit."
        )
    check_length(target or "")
    found: Groups = {}
    for part in filter(None, groups.split(";")):
        name, colon, names = part.partition(":")
        if not colon:
            raise FfmemError(f"{part[:60]!r} is not a group. Write a name and nodes: a:L5N12@3.")
        found.setdefault(check_name(name), []).extend(_split_nodes(names))
    if len(found) > MAX_GROUPS:
        raise LimitExceeded(f"There are {len(found)} groups; the page takes {MAX_GROUPS}.")
    return CircuitOptions(
        target or None,
        nodes,
        tuple(_split_nodes(pin)),
        tuple((name, tuple(of)) for name, of in found.items()),
        tuple(dict.fromkeys(filter(None, without.split(";")))),
    )


OptionsParam = Annotated[CircuitOptions, Depends(read_options)]


def _split_nodes(names: str) -> list[str]:
    """Return the nodes of a list, by their full names, each once."""
    found = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        cell, position = parse_node(name)
        found.append(f"{cell}@{position}")
    if len(found) > MAX_NODES:
        raise LimitExceeded(f"A list has {len(found)} nodes; the page takes {MAX_NODES}.")
    return list(dict.fromkeys(found))


def check_name(name: str) -> str:
    """Return the name of a group; raise if the URL could not carry it."""
    name = name.strip()
    if not NAME.fullmatch(name):
        raise FfmemError(
            f"{name[:50]!r} cannot name a group. Use 1 to 40 letters, digits, spaces or . + ' - _."
        )
    return name


def router(site: Site) -> APIRouter:
    """Return the routes of circuits."""
    routes = APIRouter(tags=["circuit"])
    cache = PartCache()

    @routes.get("/circuit", include_in_schema=False)
    async def page(
        request: Request,
        state: StateParam,
        options: OptionsParam,
        typed: bool = False,
        name: str = "",
    ) -> Response:
        served = site.served(state)
        if name:  # the pinned nodes become a group
            grouped = _group_pins(options, check_name(name))
            return RedirectResponse(state.link("/circuit", **grouped.extra()), 303)
        if typed:  # a new prompt has other nodes; browsers send line ends as two characters
            text = state.text.replace("\r\n", "\n") or None
            kept = CircuitOptions(target=options.target, nodes=options.nodes)
            return RedirectResponse(
                state.link("/circuit", **kept.extra(), text=text, position=None), 303
            )
        context: dict[str, Any] = {
            "options": options,
            "needs_consent": bool(state.text) and is_cross_site(request),
            "served": served,
            "limits": (MAX_NODES, MAX_TOKENS),
        }
        if not state.text or context["needs_consent"]:
            return site.page(request, state, "circuit.html", **context)

        def job(loaded: "LoadedModel") -> CircuitPage:
            return CircuitPage(
                run_circuit(loaded, cache, served.name, state, options), state, options
            )

        async def content() -> dict[str, Any]:
            return {"circuit": await site.worker.run(served, job, request)}

        return await site.stream_page(
            request, state, "circuit.html", content(), waiting="Finding the circuit", **context
        )

    @routes.get(
        "/api/circuit",
        summary="Which memories feed a prediction, as `ffmem circuit --json` prints it",
        response_model=CircuitResult,
    )
    async def circuit(request: Request, state: StateParam, options: OptionsParam) -> JSONResponse:
        """Return the circuit of a prompt, with groups measured; ignores edits."""
        served = site.served(state)

        def job(loaded: "LoadedModel") -> dict[str, Any]:
            return run_circuit(loaded, cache, served.name, state, options).to_dict()

        return JSONResponse(await site.worker.run(served, job, request))

    @routes.get(
        "/api/circuit/viewer",
        summary="The same graph, as circuit-tracer's viewer reads it",
        response_model=dict[str, Any],
    )
    async def viewer(request: Request, state: StateParam, options: OptionsParam) -> JSONResponse:
        served = site.served(state)

        def job(loaded: "LoadedModel") -> dict[str, Any]:
            found = run_circuit(loaded, cache, served.name, state, options)
            return found.to_viewer(options.pins)

        return JSONResponse(await site.worker.run(served, job, request))

    return routes


def _group_pins(options: CircuitOptions, name: str) -> CircuitOptions:
    """Return the options with the pinned nodes under a name, and none pinned."""
    if not options.pins:
        raise FfmemError("No nodes are pinned. Pin some, then give them a name.")
    before: Groups = {one: list(of) for one, of in options.groups}
    before[name] = list(dict.fromkeys([*before.get(name, []), *options.pins]))
    return replace(options, pins=(), groups=tuple((one, tuple(of)) for one, of in before.items()))


def run_circuit(
    loaded: "LoadedModel", cache: PartCache, name: str, state: State, options: CircuitOptions
) -> CircuitResult:
    """Return what `ffmem.circuit` returns, on the index of this name."""
    from ffmem.interventions.circuit import circuit, measure_groups
    from ffmem.interventions.forward import read_prompt

    n_tokens = len(read_prompt(loaded, state.text).ids)
    if n_tokens > MAX_TOKENS:
        raise LimitExceeded(
            f"The prompt has {n_tokens:,} tokens, including any start token; the page takes"
            f" {MAX_TOKENS}. Shorten it, or use `ffmem circuit`, which has no limit."
        )
    position = -1 if state.position is None else state.position

    def compute() -> CircuitResult:
        target = from_visible(options.target) if options.target else None
        return circuit(loaded, state.text, target=target, position=position, nodes=options.nodes)

    key = ("circuit", state.text, position, options.target, options.nodes)
    found: CircuitResult = cache.of_model(loaded, name)(key, 20 * options.nodes, compute)
    return measure_groups(
        loaded, found, {one: list(of) for one, of in options.groups}, options.without
    )


# Shown by the template


@dataclass(frozen=True)
class CircuitPage:
    """A circuit with its links."""

    result: CircuitResult
    state: State
    options: CircuitOptions

    def link(self, **other: object) -> str:
        """Return the URL of this page with other options."""
        return self.state.link("/circuit", **replace(self.options, **other).extra())  # type: ignore[arg-type]

    def svg(self) -> Markup:
        """Return the drawing; all text in it is escaped."""
        classes: dict[str, list[str]] = {}
        for group in self.result.groups:
            for id in group.nodes:
                classes.setdefault(id, []).append("grouped off" if group.off else "grouped")
        for id in self.options.pins:
            classes.setdefault(id, []).append("pinned")

        def memory_page(id: str) -> str:
            return self.state.link(f"/m/{id.partition('@')[0]}")

        joined = {id: " ".join(dict.fromkeys(found)) for id, found in classes.items()}
        return Markup(
            draw_circuit(
                self.result,
                link=memory_page,
                classes=joined,
                focus=self.options.pins,
                style=False,
            )
        )

    def toggle_pin(self, node: CircuitNode | str) -> str:
        """Return the URL with a node pinned, or no longer."""
        id = node if isinstance(node, str) else node.id
        pins = tuple(one for one in self.options.pins if one != id)
        return self.link(pins=pins if id in self.options.pins else (*pins, id))

    def toggle_group(self, group: NodeGroup) -> str:
        """Return the URL with a group off, or on again."""
        others = tuple(one for one in self.options.without if one != group.name)
        return self.link(without=others if group.off else (*others, group.name))

    def without_group(self, group: NodeGroup) -> str:
        """Return the URL without a group; its nodes are pinned again."""
        return self.link(
            groups=tuple(one for one in self.options.groups if one[0] != group.name),
            without=tuple(one for one in self.options.without if one != group.name),
            pins=tuple(dict.fromkeys([*self.options.pins, *group.nodes])),
        )

    def pinned(self) -> list[tuple[str, CircuitNode | None, list[CircuitEdge], list[CircuitEdge]]]:
        """Return each pinned node with the edges into it and out of it."""
        nodes = {node.id: node for node in self.result.nodes}
        return [
            (
                id,
                nodes.get(id),
                [edge for edge in self.result.edges if edge.target == id],
                [edge for edge in self.result.edges if edge.source == id],
            )
            for id in self.options.pins
        ]

    def form_fields(self) -> list[tuple[str, object]]:
        """Return the options as hidden fields of a form."""
        return list(self.options.extra().items())

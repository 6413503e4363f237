"""`ffmem mcp DIR…`: indexes as tools of the Model Context Protocol, over stdin and stdout.

An agent searches for memories, looks at them, runs prompts with memories switched off, and reads
the report. Every tool calls the function that the command of the same name calls, and answers with
the same JSON, in bounds: a schema limits what can be asked for, and `MAX_CHARACTERS` what is
answered. An argument that a tool does not have is refused, so that no answer ignores a part of the
question. An `FfmemError` reaches the agent as the text of a failed tool; it says what to do.

A model is loaded when a tool first needs it, and runs one prompt at a time. stdout carries the
protocol alone: while it serves, the package `mcp` sends whatever else is printed to stderr.
"""

import functools
import json
import math
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ResourceError, ToolError
from mcp.server.mcpserver.resources import FunctionResource
from mcp.server.mcpserver.tools import Tool
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field

import ffmem
from ffmem.cells import Cell
from ffmem.errors import FfmemError, name_parameters
from ffmem.indexing.search import GroupedHits
from ffmem.indexing.store import Index
from ffmem.interventions.results import EffectResult, TraceResult
from ffmem.models.arguments import require_models
from ffmem.patterns.store import open_patterns, require_patterns
from ffmem.web.catalog import Catalog, ServedIndex

if TYPE_CHECKING:
    from ffmem.models.memories import Memories

MAX_ROWS = 100
"""Memories, triggers or patterns in one answer."""

MAX_CHARACTERS = 100_000
"""Characters in one answer: about 30,000 tokens of the agent's context."""

MAX_TEXT = 20_000
"""Characters of a prompt."""

INSTRUCTIONS = """\
ffmem reads the feed-forward layers of a language model as key-value memories: FF(x) = m·V + b.
A memory is written L5N1234 (memory 1234 of layer 5; L5E12N345 is in expert 12). Its triggers are
the prefixes of a corpus on which its coefficient m is largest; its value promotes tokens. In gated
models m can have either sign, and each sign has its own triggers.
Start with list_indexes. Find memories with search, read one with show, then test what it does:
trace a prompt with the memory off, or measure exact effects on the next token with effect. What the
triggers of a memory share is a hypothesis until an ablation confirms it. Layers and memories count
from 0, ranks from 1.
"""

Query = Annotated[str, Field(min_length=1, max_length=500)]
IndexName = Annotated[
    str | None,
    Field(description="Name of the index, from list_indexes. Optional if there is only one."),
]
CellName = Annotated[str, Field(description="A memory, like L5N1234.", max_length=40)]
Cells = Annotated[list[CellName], Field(description="Memories, like L5N1234.", max_length=20)]
Numbers = Annotated[
    dict[str, float],
    Field(description="Memories with numbers, like {'L5N1234': 2.0}.", max_length=20),
]
Layer = Annotated[int | None, Field(description="Only this layer, from 0.", ge=0)]
Limit = Annotated[int, Field(description="Rows to return.", ge=1, le=MAX_ROWS)]
Offset = Annotated[int, Field(description="Rows to skip, for paging.", ge=0)]
Prompt = Annotated[str, Field(description="The text.", min_length=1, max_length=MAX_TEXT)]
Position = Annotated[
    int, Field(description="Token at which to read; −1 is the last. A start token, if any, is 0.")
]


class IndexTools:
    """The tools, over some indexes. The schema of a method's parameters is the tool's schema."""

    def __init__(
        self,
        catalog: Catalog,
        model: str | None = None,
        adapter: str | None = None,
        device: str = "auto",
    ) -> None:
        self._catalog, self._device = catalog, device
        self._model, self._adapter = model, adapter
        self._models: dict[str, Memories] = {}
        """Models that were loaded, by the name of their index."""
        self._running = threading.Lock()
        """Held while a model is loaded or runs."""

    def list_indexes(self) -> dict[str, Any]:
        """List the indexes: their models, corpora, layers, and what they support."""
        return {"indexes": [self._describe(self._catalog.get(name)) for name in self.names]}

    def search(
        self,
        query: Query,
        place: Annotated[
            Literal["all", "values", "triggers", "patterns"],
            Field(description="values: tokens; triggers: a phrase; patterns: descriptions."),
        ] = "all",
        regex: Annotated[bool, Field(description="query is a regular expression.")] = False,
        layer: Layer = None,
        bank: Annotated[
            str | None,
            Field(description="Only memories of this bank: dense, S or E12.", max_length=40),
        ] = None,
        sign: Annotated[
            Literal[1, -1] | None,
            Field(description="1: tops of values, triggers with m > 0; -1: bottoms, m < 0."),
        ] = None,
        rank: Annotated[
            int | None, Field(description="Only matches at this rank or better, from 1.", ge=1)
        ] = None,
        kind: Annotated[
            Literal["shallow", "semantic"] | None,
            Field(description="Only patterns of this kind, and memories that have one."),
        ] = None,
        min_active: Annotated[
            float | None,
            Field(
                description="Only memories active on at least this share of prefixes.", ge=0, le=1
            ),
        ] = None,
        max_active: Annotated[
            float | None,
            Field(
                description="Only memories active on at most this share of prefixes.", ge=0, le=1
            ),
        ] = None,
        limit: Limit = 20,
        index: IndexName = None,
    ) -> dict[str, Any]:
        """Find memories by the tokens that they promote, by their triggers, or by their patterns.

        Memories with most matches come first; each has its best match. total counts all memories of
        a place that match; hits are the first of them. notes say what could not be searched.
        """
        opened = self._open(index)
        found = ffmem.search(
            opened,
            query,
            place,
            regex=regex,
            layer=layer,
            bank=bank,
            sign=sign,
            rank=rank,
            kind=kind,
            min_active=min_active,
            max_active=max_active,
            limit=limit,
        )
        groups = found if isinstance(found, GroupedHits) else GroupedHits([found], query, [])
        answer: dict[str, Any] = {
            one: {"total": hits.total, "hits": [hit.to_dict() for hit in hits]}
            for one, hits in groups.items()
        }
        return answer | ({"notes": groups.notes} if groups.notes else {})

    def show(
        self,
        cell: CellName,
        triggers: Annotated[int, Field(description="Triggers of each sign.", ge=0, le=100)] = 10,
        tokens: Annotated[int, Field(description="Tokens of each side.", ge=0, le=50)] = 10,
        index: IndexName = None,
    ) -> dict[str, Any]:
        """Show one memory: its triggers, what its value promotes, statistics, patterns."""
        opened = self._open(index, unfinished=True)
        memory = opened[cell]
        found = memory.to_dict()
        lists = {"triggers": memory.triggers, "negative_triggers": memory.negative_triggers}
        for name, every in lists.items():
            found[name] = found[name][:triggers]
            found[f"n_{name}"] = len(every)
        if found["value"] is not None:
            for side in ("top", "bottom"):
                found["value"][side] = found["value"][side][:tokens]
        if opened.live is not None:
            found["unfinished"] = opened.live.progress
        return found | {"patterns": _patterns_of(opened, memory.cell)}

    def layer_statistics(
        self,
        layer: Annotated[
            int | None,
            Field(description="List memories of this layer. Default: compare all layers.", ge=0),
        ] = None,
        sort: Annotated[
            Literal["active_share", "max", "min", "mean"],
            Field(description="Statistic of the coefficient to sort a layer's memories by."),
        ] = "active_share",
        descending: Annotated[bool, Field(description="Largest first.")] = True,
        limit: Limit = 20,
        offset: Offset = 0,
        index: IndexName = None,
    ) -> dict[str, Any]:
        """Compare the layers, or list the memories of one layer by a statistic.

        active_share is the share of prefixes on which a memory is active (m > 0; in gated models,
        the gate is open); a memory that never is, is dead.
        """
        opened = self._open(index)
        if layer is None:
            layers = range(opened.n_layers)[offset : offset + limit]
            rows = [_summarize(opened, number) for number in layers]
            return {"layers": rows, "total": opened.n_layers}
        table = opened.table("stats", layer=layer)
        order = np.argsort(table[sort].to_numpy(), kind="stable")
        order = order[::-1] if descending else order
        rows = table.take(order[offset : offset + limit]).to_pylist()
        return {"memories": rows, "total": len(table)}

    def patterns(
        self,
        cell: Annotated[str | None, Field(description="A memory, like L5N1234.")] = None,
        layer: Layer = None,
        kind: Annotated[
            Literal["shallow", "semantic"] | None, Field(description="Only patterns of this kind.")
        ] = None,
        limit: Limit = 20,
        offset: Offset = 0,
        index: IndexName = None,
    ) -> dict[str, Any]:
        """Return patterns: what the triggers of a memory, or of all memories of a layer, share.

        Shallow: a recurring word or phrase. Semantic: a recurring topic. Patterns of a layer come
        with the largest lift over chance first. Pass either cell or layer.
        """
        if (cell is None) == (layer is None):
            raise FfmemError("Pass either a cell or a layer.")
        opened = self._open(index)
        sources = require_patterns(opened)
        if layer is None:
            found = [one for source in sources for one in source.of(str(cell))]
        else:
            by_memory = [source.layer(layer) for source in sources]
            found = [one for source in by_memory for several in source.values() for one in several]
            found.sort(key=lambda one: -(one.lift or 0.0))
        found = [one for one in found if kind in (None, one.kind)]
        rows = [{"cell": str(one.cell), **one.to_dict()} for one in found[offset : offset + limit]]
        return {"patterns": rows, "total": len(found)}

    def trace(
        self,
        prompt: Prompt,
        off: Cells = [],  # noqa: B006
        set: Numbers = {},  # noqa: B006
        scale: Numbers = {},  # noqa: B006
        mean: Cells = [],  # noqa: B006
        position: Position = -1,
        top: Annotated[int, Field(description="Tokens and memories per layer.", ge=1, le=20)] = 3,
        layers: Annotated[
            list[int] | None, Field(description="Only these layers. Default: all.")
        ] = None,
        generate: Annotated[int, Field(description="Tokens to continue by.", ge=0, le=64)] = 0,
        index: IndexName = None,
    ) -> dict[str, Any]:
        """Run a prompt: what each layer predicts, which memories contribute most, and what changes.

        With off, set, scale or mean, the prompt runs again with these memories' coefficients at 0,
        at a number, multiplied, or at their mean; output_changes compares both predictions.
        """
        opened = self._open(index)
        for layer in layers or ():
            opened.layout.check_layer(layer)
        result = self._run(
            index,
            lambda model: ffmem.trace(
                opened,
                prompt,
                model=model,
                off=off,
                set=set,
                scale=scale,
                mean=mean,
                position=position,
                top=top,
                generate=generate,
            ),
        )
        assert isinstance(result, TraceResult)
        found = result.to_dict()
        for name in ("layers", "edited_layers"):
            if layers is not None and found[name] is not None:
                found[name] = [one for one in found[name] if one["layer"] in layers]
        return {name: value for name, value in found.items() if value is not None}

    def effect(
        self,
        prompt: Prompt,
        target: Annotated[
            str | None, Field(description="Token to measure. Default: the model's own next token.")
        ] = None,
        cells: Cells = [],  # noqa: B006
        position: Position = -1,
        top: Limit = 20,
        candidates: Annotated[
            int, Field(description="Memories to ablate, chosen by estimates.", ge=1, le=1000)
        ] = 200,
        index: IndexName = None,
    ) -> dict[str, Any]:
        """Measure how much each memory matters for the next token, by exact ablations.

        change is that of log p(target) when the memory is off, one at a time; negative: the memory
        supported the target. cells are measured too, whatever the estimates say.
        """
        opened = self._open(index)
        resolved = [str(opened.layout.resolve(cell)) for cell in cells]
        result = self._run(
            index,
            lambda model: ffmem.effect(
                opened,
                prompt,
                model=model,
                target=target,
                cells=resolved,
                position=position,
                top=top,
                candidates=candidates,
            ),
        )
        assert isinstance(result, EffectResult)
        return result.to_dict()

    def coefficients(self, prompt: Prompt, cells: Cells, index: IndexName = None) -> dict[str, Any]:
        """Return the coefficient of some memories at every token of a text."""
        opened = self._open(index)
        resolved = [opened.layout.resolve(cell) for cell in cells]
        found: dict[str, Any] = self._run(
            index, lambda model: _coefficients(model, opened, prompt, resolved)
        )
        return found

    # What the tools share

    @property
    def names(self) -> list[str]:
        """The names of the indexes."""
        return list(self._catalog.folders)

    def served(self, name: str | None) -> ServedIndex:
        """Return an index by its name, which is needed if there are several."""
        if name is None and len(self.names) > 1:
            raise FfmemError(f"There are several indexes. Set index to one of: {self._listed()}.")
        if name is not None and name not in self.names:
            raise FfmemError(f"There is no index {name!r}. Set index to one of: {self._listed()}.")
        return self._catalog.get(name)

    def report_folders(self, name: str) -> Sequence[Path]:
        """Return where the report of an index may be."""
        return self._catalog.folder(name).reports

    def _listed(self) -> str:
        return ", ".join(self.names)

    def _open(self, name: str | None, unfinished: bool = False) -> Index:
        """Return an index; raise if it must be finished and is not."""
        found = self.served(name).index
        return found if unfinished or found.live is None else Index(found.folder)

    def _run(self, name: str | None, run: "Callable[[Memories], Any]") -> Any:
        """Return what a function does with the model of an index, loaded when first needed."""
        served = self.served(name)
        require_models()
        with self._running:
            if served.name not in self._models:
                from ffmem.interventions.forward import open_model

                loaded = open_model(
                    served.index, model=self._model, adapter=self._adapter, device=self._device
                )
                self._models[served.name] = loaded.memories
            return run(self._models[served.name])

    def _describe(self, served: ServedIndex) -> dict[str, Any]:
        index = served.index
        manifest = index.manifest
        return {
            "name": served.name,
            "model": served.model,
            "memories": index.layout.shown,
            "layers": index.n_layers,
            "gated": manifest.model.gated,
            "coefficient": manifest.coefficient,
            "corpus": [source.source for source in manifest.corpus.sources],
            "sentences": manifest.corpus.sentences,
            "tokens": manifest.corpus.tokens,
            "triggers_per_list": manifest.t,
            "start_token": manifest.start.token,
            "patterns": [] if index.live else [one.source for one in open_patterns(index)],
            "figures": sorted(served.results),
            "unfinished": None if index.live is None else index.live.progress,
        }


TOOLS = (
    *("list_indexes", "search", "show", "layer_statistics", "patterns"),
    *("trace", "effect", "coefficients"),
)
"""Methods of `IndexTools` that agents can call."""


ABOUT = {
    "manifest.json": "Model, corpus and settings of the index, and the hash of every file.",
    "report.md": "The report: every figure and table of the paper on this model.",
}
"""What a file is, for agents."""


def _patterns_of(index: Index, cell: Cell) -> list[dict[str, Any]]:
    if index.live is not None:
        return []
    return [one.to_dict() for source in open_patterns(index) for one in source.of(cell)]


def _summarize(index: Index, layer: int) -> dict[str, Any]:
    """Return the statistics of a layer's memories."""
    stats = index.columns("stats", layer)
    share = stats["active"] / max(index.n_prefixes, 1)
    if not len(share):
        return {"layer": layer, "memories": 0}
    q1, median, q3 = np.quantile(share, [0.25, 0.5, 0.75])
    return {
        "layer": layer,
        "memories": len(share),
        "dead": int((stats["active"] == 0).sum()),
        "active_share": {"q1": float(q1), "median": float(median), "q3": float(q3)},
        "max": float(stats["max"].max()),
        "min": float(stats["min"].min()),
        "mean": float(stats["mean"].mean()),
    }


def _coefficients(
    model: "Memories", index: Index, prompt: str, cells: Sequence[Cell]
) -> dict[str, Any]:
    """Return the tokens of a prompt, and the coefficient of each memory at each of them."""
    from ffmem.interventions.forward import LoadedModel

    layers = sorted({cell.layer for cell in cells})
    found = ffmem.coefficients(LoadedModel(model, index), prompt, layers=layers)
    assert not isinstance(found, list)
    first = 0 if index.manifest.start.id is None else 1
    along = {str(cell): found[cell][first:].tolist() for cell in cells}
    return {"tokens": found.tokens[first:], "coefficients": along}


# The protocol


class StrictTool(Tool):
    """A tool that refuses arguments it does not have; the package would drop them."""

    def model_post_init(self, context: Any, /) -> None:
        """Say so in the schema."""
        self.parameters["additionalProperties"] = False

    async def run(
        self, arguments: dict[str, Any], context: Context[Any, Any], convert_result: bool = False
    ) -> Any:
        """Run the tool; raise if an argument is unknown."""
        known = self.parameters["properties"]
        unknown = " or ".join(repr(name) for name in arguments if name not in known)
        if unknown:
            listed = ", ".join(known) or "none"
            raise ToolError(f"{self.name} has no argument {unknown}. Its arguments: {listed}.")
        return await super().run(arguments, context, convert_result)


def make_server(tools: IndexTools) -> MCPServer[Any]:
    """Return the server of some indexes: tools, manifests, reports and figures."""
    hints = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    server: MCPServer[Any] = MCPServer(
        "ffmem",
        instructions=INSTRUCTIONS,
        version=version("ffmem"),
        log_level="WARNING",
        tools=[
            StrictTool.from_function(_bounded(getattr(tools, name)), name=name, annotations=hints)
            for name in TOOLS
        ],
    )
    for name in tools.names:
        served = tools.served(name)
        files = {"manifest": "manifest.json", "report": "report.md"}
        files |= {f"figures/{figure}": f"{figure}.json" for figure in sorted(served.results)}
        for resource, file in files.items():
            for folder in (served.index.folder, *tools.report_folders(name)):
                if (folder / file).is_file():
                    _add_resource(server, f"{name}/{resource}", folder / file)
                    break
    return server


def _bounded(tool: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Return a tool whose errors help, and whose answer is JSON of bounded size."""

    @functools.wraps(tool)
    def call(*args: Any, **kwargs: Any) -> CallToolResult:
        try:
            found = _rounded(tool(*args, **kwargs))
        except FfmemError as error:
            raise ToolError(" ".join(name_parameters(str(error)).split())) from None
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        if len(text) > MAX_CHARACTERS:
            raise ToolError(
                f"The answer has {len(text):,} characters; at most {MAX_CHARACTERS:,} are sent."
                " Request fewer rows, triggers, tokens or layers."
            )
        return CallToolResult(
            content=[TextContent(type="text", text=text)], structured_content=found
        )

    return call


def _rounded(value: Any) -> Any:
    """Return JSON with six significant digits, and null for what JSON lacks."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def _add_resource(server: MCPServer[Any], name: str, path: Path) -> None:
    """Offer a file as ffmem://NAME."""

    def read() -> str:
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise ResourceError(f"Cannot read {path.name}: {error.strerror}.") from None

    kind = "text/markdown" if path.suffix == ".md" else "application/json"
    server.add_resource(
        FunctionResource(
            uri=f"ffmem://{name}",
            name=name,
            description=ABOUT.get(path.name, "An experiment: one figure or table of the paper."),
            mime_type=kind,
            fn=read,
        )
    )


def serve(
    folders: Sequence[Path],
    *,
    reports: Sequence[Path] = (),
    model: str | None = None,
    adapter: str | None = None,
    device: str = "auto",
) -> None:
    """Serve indexes to an agent on stdin and stdout, until it hangs up."""
    catalog = Catalog.open(folders, reports)
    make_server(IndexTools(catalog, model, adapter, device)).run("stdio")

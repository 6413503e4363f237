"""What a model computed on one prompt at one position, layer by layer, as people read it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ffmem.causal.edits import Edits
from ffmem.causal.generation import Continuation
from ffmem.causal.grid import Grid, lines
from ffmem.causal.source import INPUT_VALUES, STATIC, said
from ffmem.causal.tabled import Tabled, TokenChance, listed, placed
from ffmem.cells import Cell
from ffmem.indexing.memory import visible, visible_token


class MemoryAtWork(NamedTuple):
    """One memory on one prompt."""

    cell: Cell
    coefficient: float
    contribution: float
    """|m| · ‖v‖, in output-normed blocks what is left of it behind the norm."""
    share: float
    """Of the contributions of all memories of the layer."""
    percentile: float | None
    """The share of the index's sampled prefixes whose coefficient is not larger; None without."""
    value_top: list[str]
    """The tokens that m · v promotes most; none where v is all zeros."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `trace --json` prints."""
        return {**self._asdict(), "cell": str(self.cell)}


@dataclass(frozen=True)
class TracedLayer:
    """One layer: what its vectors predict, and the memories that contribute most."""

    layer: int
    residual_top: list[TokenChance]
    ff_top: list[TokenChance]
    """Empty where the layer has no memories."""
    output_top: list[TokenChance]
    case: str
    """Where the layer's prediction comes from: residual, agreement, ffn or composition."""
    active: float | None
    """The share of memories at work: m > 0, in gated models those whose gate is open; None where
    the layer has no memories."""
    memories: list[MemoryAtWork]

    def to_dict(self) -> dict[str, Any]:
        """Return what `trace --json` prints."""
        tops = {
            name: [chance._asdict() for chance in getattr(self, name)]
            for name in ("residual_top", "ff_top", "output_top")
        }
        return {
            "layer": self.layer,
            **tops,
            "case": self.case,
            "active": self.active,
            "memories": [memory.to_dict() for memory in self.memories],
        }


@dataclass(frozen=True)
class Traced:
    """One run of a model over a prompt, read at one position."""

    layers: list[TracedLayer]
    output_top: list[TokenChance]
    """The model's own prediction."""
    values: str = STATIC
    """Where values come from: static, or input."""

    @property
    def saturation(self) -> int:
        """The layer from which on the prediction is the model's final one."""
        final = self.output_top[0].id
        kept = len(self.layers)
        while kept > 0 and self.layers[kept - 1].output_top[0].id == final:
            kept -= 1
        return min(kept, len(self.layers) - 1)


class Sampling(NamedTuple):
    """How a continuation was sampled."""

    temperature: float
    seed: int


@dataclass(frozen=True, repr=False)
class Trace(Tabled):
    """A prompt traced, and traced again under edits if there are any."""

    prompt: str
    tokens: list[str]
    position: int
    plain: Traced
    edits: Edits = field(default_factory=Edits)
    edited: Traced | None = None
    generated: Continuation | None = None
    edited_generated: Continuation | None = None
    grid: Grid | None = None
    """Every layer at every position, where it was asked for."""
    edited_grid: Grid | None = None
    sampling: Sampling | None = None
    """How continuations were sampled; None: greedily."""
    notes: list[str] = field(default_factory=list)

    @property
    def layers(self) -> list[TracedLayer]:
        """The layers of the unedited run."""
        return self.plain.layers

    @property
    def output_top(self) -> list[TokenChance]:
        """What the unedited model predicts."""
        return self.plain.output_top

    @property
    def saturation(self) -> int:
        """The layer from which on the unedited prediction no longer changes."""
        return self.plain.saturation

    @property
    def remarks(self) -> list[str]:
        """The notes, and in a lambda layer that its values come from the input."""
        return self.notes if self.plain.values == STATIC else [*self.notes, INPUT_VALUES]

    def to_dict(self) -> dict[str, Any]:
        """Return what `trace --json` prints."""
        found: dict[str, Any] = {
            "prompt": self.prompt,
            "tokens": self.tokens,
            "position": self.position,
            "layers": [layer.to_dict() for layer in self.layers],
            "saturation": self.saturation,
            "output_top": [chance._asdict() for chance in self.output_top],
        }
        if self.edited is not None:
            found |= {
                "edits": [edit.to_dict() for edit in self.edits],
                "positions": self.edits.positions and list(self.edits.positions),
                "edited_layers": [layer.to_dict() for layer in self.edited.layers],
                "edited_saturation": self.edited.saturation,
                "edited_output_top": [chance._asdict() for chance in self.edited.output_top],
            }
        for name in ("grid", "edited_grid"):
            rows: Grid | None = getattr(self, name)
            if rows is not None:
                found[name] = [[place.to_dict() for place in row] for row in rows]
        for name in ("generated", "edited_generated"):
            continuation: Continuation | None = getattr(self, name)
            if continuation is not None:
                found |= {name: continuation.text, f"{name}_ended": continuation.ended}
        if self.generated is not None:
            found["sampling"] = None if self.sampling is None else self.sampling._asdict()
        return found | said(self.plain.values) | {"notes": self.remarks}

    def above(self) -> list[str]:
        """Return the prompt with the position at which it was read."""
        return [placed(self.tokens, self.position)]

    def table(self) -> list[Sequence[str]]:
        """Return the layers of the unedited run."""
        return [COLUMNS, *map(_cells, self.layers)]

    def below(self) -> list[str]:
        """Return predictions, saturation and continuations."""
        return _notes(self)


COLUMNS = ("layer", "residual", "ff", "output", "case", "active", "memories that contribute most")


def _cells(layer: TracedLayer, n: int = 3) -> tuple[str, ...]:
    def best(chances: list[TokenChance]) -> str:
        if not chances:
            return "–"
        return f"{visible_token(chances[0].token)} {chances[0].probability:.2f}"

    memories = "  ".join(
        f"{memory.cell} {memory.coefficient:+.2f}{_percentile(memory)}"
        f" {visible_token(memory.value_top[0]) if memory.value_top else '–'}"
        for memory in layer.memories[:n]
    )
    return (
        str(layer.layer),
        best(layer.residual_top),
        best(layer.ff_top),
        best(layer.output_top),
        layer.case,
        "–" if layer.active is None else f"{layer.active:.0%}",
        memories,
    )


def _percentile(memory: MemoryAtWork) -> str:
    return "" if memory.percentile is None else f" p{100 * memory.percentile:.0f}"


def _notes(trace: Trace) -> list[str]:
    """Return what stands below the table: predictions, saturation, continuations."""
    notes = [f"predicts  {listed(trace.output_top)}"]
    notes.append(_saturated(trace.plain))
    if trace.edited is not None:
        notes += [
            "",
            f"edited    {trace.edits}{_where(trace.edits)}",
            f"predicts  {listed(trace.edited.output_top)}",
            _saturated(trace.edited),
        ]
    ended = {"end": " ∎", "context": " … (the context is full)", "length": " …"}
    for name, continuation in (
        ("continues", trace.generated),
        ("edited   ", trace.edited_generated),
    ):
        if continuation is not None:
            notes.append(f"{name}  {visible(continuation.text)}{ended[continuation.ended]}")
    for title, grid in (("", trace.grid), (", edited", trace.edited_grid)):
        if grid is not None:
            above = f"What the output of each layer predicts at each position{title}:"
            notes += ["", above, "", *lines(grid, trace.tokens)]
    notes += ["", *trace.remarks] if trace.remarks else []
    return notes


def _where(edits: Edits) -> str:
    if edits.positions is None:
        return ""
    return f" at position {', '.join(map(str, edits.positions))} only"


def _saturated(run: Traced) -> str:
    if run.saturation == len(run.layers) - 1:
        return "The prediction is that of the last layer alone."
    return f"The prediction no longer changes from layer {run.saturation} on."

"""The result of `ffmem circuit`: a graph of memories at positions, as JSON, text and viewer file.

    token@3  →  L5N12@3  →  L22N873@7  →  target

A node is a memory at a position. An edge says what flows from one node to another past no third
one. Ends are the tokens of the prompt and the target. This module loads no torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.files import write_text
from ffmem.indexing.memory import visible, visible_token
from ffmem.interventions.results import (
    TableResult,
    Target,
    TokenProbability,
    format_tokens,
    mark_position,
)
from ffmem.text import format_number, format_share, pluralize

TARGET = "target"
"""The id of the target in edges."""


def token_id(position: int) -> str:
    """Return the id of a token of the prompt in edges."""
    return f"token@{position}"


def parse_node(text: object) -> tuple[Cell, int]:
    """Return memory and position of a node, such as L5N12@3."""
    cell, at, position = text.partition("@") if isinstance(text, str) else ("", "", "")
    if not at or not position.strip().isascii() or not position.strip().isdecimal():
        raise FfmemError(f"{text!r} is not a node. Write a memory and a position, like L5N12@3.")
    return Cell.parse(cell), int(position)


@dataclass(frozen=True)
class CircuitNode:
    """A memory at a position."""

    id: str
    cell: str
    layer: int
    memory: int
    """Its number in the layer, across all banks."""
    position: int
    coefficient: float
    baseline: float
    """What the coefficient becomes when the node is ablated: its mean in the index, or 0."""
    estimate: float
    """The part of the target's logit that comes through it: (m − baseline) · ∂logit/∂m."""
    exact: float
    """The target's logit, minus the logit with this node ablated."""
    value_top: list[str]
    """The tokens that m · v promotes most."""


@dataclass(frozen=True)
class TokenEnd:
    """A token of the prompt."""

    id: str
    position: int
    token: str
    estimate: float
    """The part of the target's logit that comes from its vector, past memories or through them."""
    exact: float
    """The target's logit, minus that with the token's vector set to 0."""


@dataclass(frozen=True)
class CircuitEdge:
    """What flows from a token or node to a node or the target, without passing a third node.

    Numbers are in the unit of where the edge ends: a coefficient, or the target's logit.
    """

    source: str
    target: str
    estimate: float
    exact: float
    """Coefficient or logit, minus that with the source ablated and all other nodes held."""
    relevance: float
    """The estimate times what a unit at its end does to the target's logit; edges rank by this."""


@dataclass(frozen=True)
class FaithfulnessPoint:
    """How much of the target's logit the first nodes carry, beside random sets of that size."""

    nodes: int
    faithfulness: float | None
    completeness: float | None
    random_faithfulness: float | None
    """The mean over random sets."""
    random_completeness: float | None


@dataclass(frozen=True)
class NodeGroup:
    """Nodes under a name."""

    name: str
    nodes: list[str]
    exact: float
    """The target's logit, minus that with all of them ablated together."""
    off: bool = False


@dataclass(frozen=True)
class SwitchedOff:
    """The prediction with some groups off, all at once."""

    groups: list[str]
    logit: float
    probability: float
    rank: int
    top: list[TokenProbability]


@dataclass(frozen=True, repr=False)
class CircuitResult(TableResult):
    """The memories that lead to a prediction, and which of them feed which."""

    prompt: str
    tokens: list[str]
    token_ids: list[int]
    position: int
    model: str
    layers: int
    target: Target
    measure: str
    """logit: the target's, minus the mean over the vocabulary; log p: with an adaptive softmax,
    which has no logits."""
    logit: float
    """The target's logit, by this measure."""
    ablated_logit: float
    """The same with every memory ablated."""
    top: list[TokenProbability]
    budget: int
    ablation: str
    """mean: of the index; zero."""
    estimated_by: str
    """relp, or gradient if the rules of RelP do not cover every step of the model."""
    nodes: list[CircuitNode]
    """The largest |estimate| first."""
    ends: list[TokenEnd]
    edges: list[CircuitEdge]
    """The largest |relevance| first."""
    edges_found: int
    """Number of edges before small ones were dropped."""
    faithfulness: float | None
    """(logit of the nodes alone − ablated) / (logit − ablated): 1 if they carry all of it."""
    completeness: float | None
    """(logit − logit without the nodes) / (logit − ablated): 1 if the rest carries none of it."""
    curve: list[FaithfulnessPoint]
    random_sets: int
    correlation: float | None
    """Spearman's correlation of the nodes' estimates with the exact numbers."""
    edge_correlation: float | None
    groups: list[NodeGroup] = field(default_factory=list)
    switched_off: SwitchedOff | None = None
    notes: list[str] = field(default_factory=list)

    def parts(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Return prompt and target; the nodes; edges, faithfulness, groups and notes."""
        target = self.target
        above = [
            mark_position(self.tokens, self.position),
            f"predicts  {format_tokens(self.top)}",
            f"target    {visible_token(target.token)}, p {format_number(target.probability)},"
            f" {self._shown_logit}, rank {target.rank:,}",
        ]
        feeds = {node.id: "" for node in self.nodes}
        for edge in reversed(self.edges):
            if edge.source in feeds:
                feeds[edge.source] = _name(edge.target)
        table = [["node", "token", "m", "estimate", "exact", "feeds most", "value promotes"]]
        for node in self.nodes:
            numbers = (node.coefficient, node.estimate, node.exact)
            table.append(
                [
                    node.id,
                    visible_token(self.tokens[node.position]),
                    *(format_number(one, signed=True) for one in numbers),
                    feeds[node.id],
                    " ".join(map(visible_token, node.value_top)),
                ]
            )
        return above, table, [*self._summary(), *self._group_lines(), *self.notes]

    @property
    def _shown_logit(self) -> str:
        above = " above the mean" if self.measure == "logit" else ""
        return f"{self.measure} {format_number(self.logit)}{above}"

    def _summary(self) -> list[str]:
        to = {"mean": "its mean in the index", "zero": "0"}[self.ablation]
        last = self.curve[-1] if self.curve else None
        random = "" if last is None else format_share(last.random_faithfulness)
        return [
            f"Columns: estimate is the part of the target's logit that comes through the node, by"
            f" {self.estimated_by}; exact is what the logit loses when the coefficient is set to"
            f" {to}.",
            f"{pluralize(len(self.nodes), 'nodes')} of a budget of {self.budget},"
            f" {pluralize(len(self.edges), 'edges')} shown of {self.edges_found:,}. Rank"
            f" correlation of estimates with exact numbers: nodes"
            f" {format_number(self.correlation, 2)}, edges"
            f" {format_number(self.edge_correlation, 2)}.",
            f"Faithfulness: with every other memory ablated, the nodes keep"
            f" {format_share(self.faithfulness)} of the logit (as many random ones: {random}).",
            f"Completeness: ablating the nodes loses {format_share(self.completeness)} of it.",
        ]

    def _group_lines(self) -> list[str]:
        found = [
            f"group {visible(group.name)}: {format_number(group.exact, signed=True)} by"
            f" {', '.join(group.nodes)}"
            for group in self.groups
        ]
        if self.switched_off is not None:
            off = self.switched_off
            found.append(
                f"without {', '.join(map(visible, off.groups))}: logit"
                f" {format_number(off.logit)}, p {format_number(off.probability)}, rank"
                f" {off.rank:,}; predicts {format_tokens(off.top)}"
            )
        return found

    def to_viewer(self, pinned: Sequence[str] = ()) -> dict[str, Any]:
        """Return the graph as circuit-tracer's viewer reads it (schema version 1).

        Its frontend knows features of transcoders; a memory stands for one. `clerp` is the text
        that it shows beside a node.
        """
        ids = {node.id: f"{node.layer}_{node.memory}_{node.position}" for node in self.nodes}
        ids |= {end.id: f"E_{self.token_ids[end.position]}_{end.position}" for end in self.ends}
        last = str(self.layers + 1)
        ids[TARGET] = f"{last}_{self.target.id}_{self.position}"
        nodes = [
            {
                "node_id": ids[node.id],
                "feature": _pair(node.layer, node.memory),
                "layer": str(node.layer),
                "ctx_idx": node.position,
                "feature_type": "cross layer transcoder",
                "jsNodeId": f"{node.layer}_{node.memory}-0",
                "clerp": f"{node.cell}: {' '.join(node.value_top[:3])}",
                "influence": abs(node.estimate),
                "activation": node.coefficient,
            }
            for node in self.nodes
        ]
        nodes += [
            {
                "node_id": ids[end.id],
                "feature": end.position,
                "layer": "E",
                "ctx_idx": end.position,
                "feature_type": "embedding",
                "jsNodeId": f"E_{self.token_ids[end.position]}-{end.position}",
                "clerp": f'Emb: "{end.token}"',
                "influence": abs(end.estimate),
                "activation": None,
            }
            for end in self.ends
        ]
        probability = self.target.probability
        nodes.append(
            {
                "node_id": ids[TARGET],
                "feature": self.target.id,
                "layer": last,
                "ctx_idx": self.position,
                "feature_type": "logit",
                "jsNodeId": f"L_{self.target.id}-{self.position}",
                "clerp": f'Output "{self.target.token}" (p={probability:.3f})',
                "influence": None,
                "activation": None,
                "token_prob": probability,
                "is_target_logit": True,
            }
        )
        plain = {"token_prob": 0.0, "is_target_logit": False, "run_idx": 0, "reverse_ctx_idx": 0}
        return {
            "metadata": {
                "slug": "ffmem-circuit",
                "scan": self.model,
                "transcoder_list": [],
                "prompt_tokens": self.tokens,
                "prompt": self.prompt,
                "node_threshold": None,
                "schema_version": 1,
            },
            "qParams": {
                "pinnedIds": [ids[one] for one in pinned if one in ids],
                "supernodes": [
                    [group.name, *(ids[one] for one in group.nodes if one in ids)]
                    for group in self.groups
                ],
                "linkType": "both",
                "clickedId": "",
                "sg_pos": "",
            },
            "nodes": [plain | node for node in nodes],
            "links": [
                {"source": ids[edge.source], "target": ids[edge.target], "weight": edge.estimate}
                for edge in self.edges
            ],
        }


def _name(id: str) -> str:
    return "the target" if id == TARGET else id


def _pair(layer: int, memory: int) -> int:
    """Return the one number for (layer, memory) that the viewer uses: Cantor's pairing."""
    return (layer + memory) * (layer + memory + 1) // 2 + memory


def write_circuit(result: CircuitResult, folder: Path) -> None:
    """Write circuit.json, circuit.svg and circuit-tracer.json."""
    from ffmem.interventions.circuit_svg import draw_circuit

    for name, value in (
        ("circuit.json", result.to_dict()),
        ("circuit-tracer.json", result.to_viewer()),
    ):
        write_text(folder / name, json.dumps(value, ensure_ascii=False, indent=2) + "\n")
    write_text(folder / "circuit.svg", draw_circuit(result) + "\n")

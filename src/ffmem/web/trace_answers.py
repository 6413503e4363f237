"""What programs get of a trace and of effects: the JSON of `ffmem trace` and `ffmem effect`."""

from typing import NotRequired

from typing_extensions import TypedDict


class ChanceAnswer(TypedDict):
    """A token and its probability."""

    token: str
    id: int
    probability: float


class MemoryAnswer(TypedDict):
    """One memory at work."""

    cell: str
    coefficient: float
    contribution: float
    share: float
    percentile: float | None
    value_top: list[str]


class LayerAnswer(TypedDict):
    """One layer at the position."""

    layer: int
    residual_top: list[ChanceAnswer]
    ff_top: list[ChanceAnswer]
    output_top: list[ChanceAnswer]
    case: str
    active: float | None
    """None where the layer has no memories."""
    memories: list[MemoryAnswer]


class PlaceAnswer(TypedDict):
    """One layer at one position."""

    residual: ChanceAnswer
    ff: ChanceAnswer | None
    """None where the layer has no memories."""
    output: ChanceAnswer
    case: str


class EditAnswer(TypedDict):
    """m → factor · m + constant."""

    cell: str
    how: str
    factor: float
    constant: float


class TraceAnswer(TypedDict):
    """A prompt traced; with edits, traced again under them."""

    prompt: str
    tokens: list[str]
    position: int
    layers: list[LayerAnswer]
    saturation: int
    output_top: list[ChanceAnswer]
    edits: NotRequired[list[EditAnswer]]
    positions: NotRequired[list[int] | None]
    edited_layers: NotRequired[list[LayerAnswer]]
    edited_saturation: NotRequired[int]
    edited_output_top: NotRequired[list[ChanceAnswer]]
    grid: NotRequired[list[list[PlaceAnswer]]]
    edited_grid: NotRequired[list[list[PlaceAnswer]]]
    generated: NotRequired[str]
    generated_ended: NotRequired[str]
    edited_generated: NotRequired[str]
    edited_generated_ended: NotRequired[str]
    sampling: NotRequired[None]
    values: NotRequired[str]
    """`input` where memories have no static values: those are the vectors of this prompt."""
    notes: list[str]


class TargetAnswer(TypedDict):
    """The token whose log p is watched."""

    token: str
    id: int
    probability: float
    log_probability: float
    rank: int


class MemoryEffectAnswer(TypedDict):
    """One memory: the exact change of log p when it is off, beside the estimates."""

    cell: str
    change: float
    gradient: float
    direct: float | None
    integrated: float | None
    coefficient: float
    value_top: list[str]


class EffectAnswer(TypedDict):
    """What switching memories off, one at a time, does to a token."""

    prompt: str
    tokens: list[str]
    position: int
    target: TargetAnswer
    top: list[ChanceAnswer]
    ablation: str
    positions: list[int] | None
    candidates: int
    correlation: dict[str, float | None]
    sum: dict[str, float | None]
    memories: list[MemoryEffectAnswer]
    values: NotRequired[str]
    """`input` where memories have no static values."""
    notes: list[str]

"""What the forward pass over Section 5's sample gives to experiments: this imports no torch.

top(h) = argmax of h's logits;   r and o are read by the head, y is read folded
"""

from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float32, Float64, Int64
from numpy import ndarray

from ffmem.experiments.base import PaperValue
from ffmem.experiments.context import ExperimentContext

SECTION_5_SAMPLE = PaperValue("sample of Section 5", "4,000 validation prefixes", "Sec. 5.1")

STREAM_NOTES = {
    "persistent": "Here y is what the slots add, and r holds what the same attention read from the"
    " tokens; there is no feed-forward layer.",
    "lambda": "Here y is what the static keys of the lambda layer add, and r holds everything"
    " else, including the feed-forward layer's output.",
}
"""What r and y are where the memories are no feed-forward layer."""

CASES = ("residual", "agreement", "ffn", "composition")


class Predictions(NamedTuple):
    """What residual r, feed-forward output y and layer output o predict: Figures 8 to 11 share it.

    The model's own prediction is top(o) of the last layer.
    """

    residual_top: Int64[ndarray, "prefix layer"]
    ff_top: Int64[ndarray, "prefix layer"]
    output_top: Int64[ndarray, "prefix layer"]
    residual_final_probability: Float64[ndarray, "prefix layer"]
    """Probability of the model's prediction under r."""
    ff_residual_rank: Int64[ndarray, "prefix layer"]
    """Rank of top(r) under y."""

    @classmethod
    def empty(cls, n_prefixes: int, n_layers: int) -> "Predictions":
        """Return zeros, to be filled in by the pass."""
        types = (np.float64 if "probability" in name else np.int64 for name in cls._fields)
        return cls(*(np.zeros((n_prefixes, n_layers), kind) for kind in types))

    @property
    def final(self) -> Int64[ndarray, " prefix"]:
        """The model's prediction."""
        return self.output_top[:, -1]

    def cases(self) -> dict[str, ndarray]:
        """Return which prefixes are in which case in each layer (Figure 11); each is in one."""
        kept = self.output_top == self.residual_top
        agreed = self.output_top == self.ff_top
        found = (kept & ~agreed, kept & agreed, ~kept & agreed, ~kept & ~agreed)
        return dict(zip(CASES, found, strict=True))


class LayerActivity(NamedTuple):
    """What one layer does on some prefixes."""

    coefficients: Float32[ndarray, "row memory"]
    gate: Float32[ndarray, "row memory"] | None
    """The gate's pre-activation, in gated models."""
    contributions: Float32[ndarray, "row memory"] | None
    """|m|·‖v‖; None where values are not static."""
    ff_top: Int64[ndarray, " row"] | None
    """top(y); None where no metric of the pass reads predictions."""
    output_top: Int64[ndarray, " row"] | None
    """top(o)."""
    trace: Any
    """The rows' `LayerTrace`: tensors on the model's device."""


class SampleMetric:
    """Numbers by prefix and layer, filled in by one forward pass over Section 5's sample.

    An experiment that needs something new of the pass subclasses this in its own file.
    """

    needs_predictions: ClassVar[bool] = False
    """Whether it reads top(y) and top(o)."""

    def __init__(self, context: ExperimentContext, n_prefixes: int) -> None:
        raise NotImplementedError

    def read(self, prefixes: Int64[ndarray, " row"], layer: int, activity: LayerActivity) -> None:
        """Update the metric with one layer's activity on some prefixes of the sample."""
        raise NotImplementedError

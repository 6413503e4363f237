"""What residual r, feed-forward output y and layer output o predict: Figures 8 to 11 share it.

top(h) = argmax of h's logits;   r and o are read by the head, y is read folded
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64
from numpy import ndarray

DETAILS = frozenset(
    {
        "ff_top_probability",
        "output_top_probability",
        "residual_final_rank",
        "ff_final_rank",
        "ff_final_probability",
        "ff_residual_probability",
    }
)
"""Columns that no figure shows: a third of the time that reading logits takes."""

CASES = ("residual", "agreement", "ffn", "composition")


class Predictions(NamedTuple):
    """By example and layer. `final` is the model's own prediction, top(o) of the last layer.

    `DETAILS` are NaN or −1 where they were not asked for.
    """

    residual_top: Int64[ndarray, "example layer"]
    ff_top: Int64[ndarray, "example layer"]
    output_top: Int64[ndarray, "example layer"]
    residual_top_probability: Float64[ndarray, "example layer"]
    ff_top_probability: Float64[ndarray, "example layer"]
    output_top_probability: Float64[ndarray, "example layer"]
    residual_final_rank: Int64[ndarray, "example layer"]
    residual_final_probability: Float64[ndarray, "example layer"]
    ff_final_rank: Int64[ndarray, "example layer"]
    ff_final_probability: Float64[ndarray, "example layer"]
    ff_residual_rank: Int64[ndarray, "example layer"]
    """Of top(r) under y."""
    ff_residual_probability: Float64[ndarray, "example layer"]

    @classmethod
    def empty(cls, n_examples: int, n_layers: int) -> "Predictions":
        """Return room for some examples: NaN and −1 where nothing is read."""
        shape = (n_examples, n_layers)
        return cls(
            *(
                np.full(shape, np.nan) if "probability" in name else np.full(shape, -1, np.int64)
                for name in cls._fields
            )
        )

    @property
    def final(self) -> Int64[ndarray, " example"]:
        """The model's prediction."""
        return self.output_top[:, -1]

    def cases(self) -> dict[str, ndarray]:
        """Return which case each example is in each layer (Figure 11); every one is in one."""
        kept = self.output_top == self.residual_top
        agreed = self.output_top == self.ff_top
        found = (kept & ~agreed, kept & agreed, ~kept & agreed, ~kept & ~agreed)
        return dict(zip(CASES, found, strict=True))

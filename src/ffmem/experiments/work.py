"""What the memories of a layer do, as they are counted."""

from typing import NamedTuple

from jaxtyping import Float32
from numpy import ndarray


class Work(NamedTuple):
    """What the memories of a layer do on some examples."""

    coefficients: Float32[ndarray, "row memory"]
    gate: Float32[ndarray, "row memory"] | None
    contributions: Float32[ndarray, "row memory"] | None
    """|m|·‖v‖; None where values are not static."""

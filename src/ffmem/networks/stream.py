"""A linear map whose output is added to the residual stream: it starts small in deep models."""

from jaxtyping import Float
from torch import Tensor, nn


class IntoStream(nn.Linear):
    """`nn.Linear`, known by its place."""

    def from_heads(
        self, read: Float[Tensor, "batch head position width"]
    ) -> Float[Tensor, "batch position hidden"]:
        """Return what heads have read, side by side and then in the space of the stream."""
        output: Tensor = self(read.transpose(1, 2).flatten(2))
        return output

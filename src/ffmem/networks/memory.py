"""One interface for memories of every kind.

    m = coefficients(x),    y = read(m) = Σᵢ mᵢ · vᵢ + b

`keys` and `values` are modules: a key module is given x first, a value module is given m first, in
every forward pass. That is all that ffmem needs to read and to change a memory.
"""

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor, nn

from ffmem.networks.seen import Seen


class Memory(nn.Module, ABC):
    """A layer that adds coefficients times values to the residual stream."""

    keys: nn.Module
    values: nn.Module

    @abstractmethod
    def coefficients(
        self, x: Float[Tensor, "batch position hidden"], seen: Seen | None = None
    ) -> Float[Tensor, "batch position memory"]:
        """Return m; without `seen`, every position sees what is in front of it."""

    def read(
        self,
        coefficients: Float[Tensor, "batch position memory"],
        x: Float[Tensor, "batch position hidden"],
        seen: Seen | None = None,
    ) -> Float[Tensor, "batch position hidden"]:
        """Return y: the values, each times its coefficient; x matters only where they are of it."""
        output: Tensor = self.values(coefficients)
        return output

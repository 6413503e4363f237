"""A linear map whose matrix is computed from one stored row per memory.

    matrix = linear in each row of `weight`,    row i belongs to memory i alone

Keys and values of some kinds of memory lie in a head's own space, or are stored scaled. What the
rest of ffmem reads is their matrix in the residual stream's space; what is trained and edited are
the rows: a memory's row times a is its key or value times a.
"""

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor, nn


class Slots(nn.Module, ABC):
    """One row per memory, and the matrix that they stand for."""

    weight: nn.Parameter
    """"memory width": what is stored."""

    deviation: float
    """With which the rows are drawn at the start."""

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """How many numbers the map gives and takes."""

    @abstractmethod
    def matrix(self) -> Float[Tensor, "out in"]:
        """Return the matrix of the map, one output per row, as `nn.Linear` keeps it."""

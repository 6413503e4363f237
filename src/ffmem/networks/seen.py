"""What each position of a running batch may see: the tokens before it, never padding.

    visible[q, k] = k is not behind q, and k is no padding, or k is q itself

A position of padding sees itself, so that no softmax is empty; nobody sees it.
"""

from functools import cached_property

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from transformers import Cache


class Seen:
    """The places of a batch, which of them see each other, and what earlier passes left.

    One for a whole pass: what all layers ask for is worked out once.
    """

    def __init__(
        self,
        length: int,
        mask: Shaped[Tensor, "batch seen"] | None = None,
        cache: Cache | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.cache = cache
        self.past = 0 if cache is None else int(cache.get_seq_length())
        self.plain = mask is None and self.past == 0
        """Whether every position sees exactly itself and what is in front of it."""
        self.length = length
        self.mask = mask
        self.device = device if mask is None else mask.device

    @cached_property
    def places(self) -> Int[Tensor, "batch position"] | Int[Tensor, "1 position"]:
        """Where each token stands in its text, padding not counted."""
        return self._all_places[:, -self.length :]

    @cached_property
    def _all_places(self) -> Int[Tensor, "batch seen"] | Int[Tensor, "1 seen"]:
        if self.mask is None:
            return torch.arange(self.past + self.length, device=self.device)[None]
        return (self.mask.long().cumsum(dim=1) - 1).clamp_min(0)

    @cached_property
    def apart(self) -> Int[Tensor, "batch position seen"] | Int[Tensor, "1 position seen"]:
        """How many tokens in front of each position the others lie; −1 where it sees none."""
        apart = self.places[:, :, None] - self._all_places[:, None]
        return torch.where(self.visible, apart, -1)

    @cached_property
    def distance(self) -> Int[Tensor, "position seen"]:
        """How far in front of each position the others lie; negative behind it."""
        seen = torch.arange(self.past + self.length, device=self.device)
        return seen[self.past :, None] - seen[None]

    @cached_property
    def visible(self) -> Bool[Tensor, "position seen"] | Bool[Tensor, "batch position seen"]:
        """Which positions each one sees."""
        visible = self.distance >= 0
        if self.mask is None:
            return visible
        return (visible & self.mask.bool()[:, None]) | (self.distance == 0)

    def extended(self, layer: int, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors "batch head position width" with those of earlier passes in front."""
        if self.cache is None:
            return one, other
        first, second = self.cache.update(one, other, layer)
        return first, second

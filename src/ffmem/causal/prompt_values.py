"""What the coefficients at the end of a prompt multiply, layer by layer.

    y = Σᵢ mᵢ · vᵢ + b        in a lambda layer vᵢ is made of the prompt, another at every place

Static values are in the weights. Where they come from the input, the x of every token up to the
place is kept while the prompt runs, and they are computed from it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from ffmem.causal.source import INPUT, STATIC
from ffmem.models.memories import Memories
from ffmem.models.modules import first_tensor


class PromptValues:
    """The values that act at the last place of one prompt."""

    def __init__(self, memories: Memories) -> None:
        self.memories = memories
        self._inputs: dict[int, Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep what is needed of a pass over the prompt, up to the place and no further."""

        def keep(layer: int) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._inputs[layer] = first_tensor(args, kwargs)[0].detach()

            return hook

        with ExitStack() as hooks:
            if not self.memories.has_values:
                for bank in self.memories.banks:
                    if bank is not None:
                        hook = keep(bank.layer)
                        handle = bank.keys.register_forward_pre_hook(hook, with_kwargs=True)
                        hooks.callback(handle.remove)
            yield

    def of(self, layer: int) -> Float[Tensor, "memory hidden"]:
        """Return the values of a layer as they reach the residual stream."""
        if self.memories.has_values:
            return self.memories.output_directions(layer)
        x = self._inputs[layer]
        return self.memories.values_at(layer, x, len(x) - 1)


def source_of(memories: Memories) -> str:
    """Return where a model's values come from: static, or input."""
    return STATIC if memories.has_values else INPUT

"""A model at work with some coefficients changed, and exactly as it was afterwards.

    with editing(memories, Edits.of(off=["L5N1234"])):  …  every forward pass runs edited

One hook on the input of the value map changes what multiplies the value: m → a · m + c. Weights
are never touched, so nothing has to be put back, and leaving the context removes every hook.
Where coefficients are weights of a softmax, the others stay what they are: it is not taken anew.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ffmem.causal.edits import Edit, Edits
from ffmem.models.memories import Memories
from ffmem.models.modules import first_tensor


@contextmanager
def editing(memories: Memories, edits: Edits) -> Iterator[None]:
    """Run every forward pass of the model with edited coefficients.

    Positions count from the first token of the text: with a cache of earlier tokens, behind it.
    """
    edits = edits.resolve(memories.layout)
    places = _Places()
    with ExitStack() as hooks:
        if edits.positions is not None:
            # OPT's language model calls its decoder past its own trunk: both doors are watched.
            for module, hook in (
                (memories.model, places.begin),
                (memories.model.base_model, places.begin),
                (memories.blocks[0], places.rows),
            ):
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                hooks.callback(handle.remove)
        for layer, changes in edits.by_layer().items():
            change = _change(changes, edits.positions, places)
            values = memories.bank(layer).values
            hooks.callback(values.register_forward_pre_hook(change).remove)
        yield


class _Places:
    """Where the tokens of the running pass stand."""

    def __init__(self) -> None:
        self.past = 0
        self.shape: torch.Size = torch.Size()

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note how many tokens were read before."""
        # Our own model hands its cache on without naming it.
        given = (kwargs.get("past_key_values"), *(one for one in args if isinstance(one, Cache)))
        cache = next((one for one in given if one is not None), None)
        self.past = 0 if cache is None else int(cache.get_seq_length())

    def rows(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the batch and the positions of this pass."""
        self.shape = first_tensor(args, kwargs).shape[:2]


def _change(
    edits: list[Edit], positions: tuple[int, ...] | None, places: _Places
) -> Callable[..., tuple[Any, ...]]:
    """Return the hook that changes the coefficients of one layer."""
    memory = torch.tensor([edit.cell.memory for edit in edits])
    factor = torch.tensor([edit.factor for edit in edits], dtype=torch.float64)
    constant = torch.tensor([edit.constant for edit in edits], dtype=torch.float64)

    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        coefficients: Tensor = args[0].clone()
        cells = memory.to(coefficients.device)
        if positions is None:
            flat = coefficients.view(-1, coefficients.shape[-1])
            rows = torch.arange(len(flat), device=flat.device)
        else:
            flat, rows = _at(coefficients, positions, places)
        found = flat[rows[:, None], cells]
        # In float32 at least, so that a half-precision model rounds once.
        exact = torch.promote_types(found.dtype, torch.float32)
        changed = found.to(exact) * factor.to(found.device, exact) + constant.to(
            found.device, exact
        )
        flat[rows[:, None], cells] = changed.to(found.dtype)
        return (coefficients, *args[1:])

    return hook


def _at(coefficients: Tensor, positions: tuple[int, ...], places: _Places) -> tuple[Tensor, Tensor]:
    """Return the coefficients row by row, and which rows stand at the positions."""
    batch, length = places.shape
    here = [p - places.past for p in positions if 0 <= p - places.past < length]
    row = torch.arange(batch)[:, None] * length + torch.tensor(here, dtype=torch.long)
    return coefficients.view(batch * length, -1), row.flatten().to(coefficients.device)

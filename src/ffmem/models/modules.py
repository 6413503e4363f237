"""Parts of a PyTorch model: modules by their path, linear maps as plain weights."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ffmem.errors import ModelError
from ffmem.models.split import device_of
from ffmem.networks.memories import FactoredLinear, InputValues


def module(parent: nn.Module, path: str) -> nn.Module:
    """Return the submodule at a path that must exist."""
    found = optional(parent, path)
    if found is None:
        raise ModelError(
            f"A {type(parent).__name__} was expected to have a module {path!r}, and has none."
            " This model is built differently from others of its family."
        )
    return found


def optional(model: nn.Module, path: str | None) -> nn.Module | None:
    """Return the submodule at a path, or None if the model or the row has none there."""
    found: Any = None if path is None else model
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None


def weight(linear: nn.Module) -> Float[Tensor, "out in"]:
    """Return the weights of a linear map, one output per row, on the device where it computes."""
    if isinstance(linear, FactoredLinear):
        return linear.matrix()
    return _upright(linear, linear.get_parameter("weight"))


def shape(linear: nn.Module) -> tuple[int, int]:
    """Return how many numbers a linear map gives and takes, without its weights being fetched."""
    if isinstance(linear, FactoredLinear | InputValues):
        return linear.out_features, linear.in_features
    rows, columns = _upright(linear, linear.get_parameter("weight")).shape
    return rows, columns


def _upright(linear: nn.Module, found: Tensor) -> Float[Tensor, "out in"]:
    if isinstance(linear, Conv1D):
        return found.T  # GPT-2 keeps them the other way around
    if not isinstance(linear, nn.Linear) or found.shape != (
        linear.out_features,
        linear.in_features,
    ):
        raise ModelError(
            f"Expected the plain weights of a linear map, found a {type(linear).__name__} of shape"
            f" {tuple(found.shape)}. Load the model without quantisation."
        )
    return found


def bias(linear: nn.Module) -> Float[Tensor, " out"]:
    """Return the bias of a linear map, zeros if it has none."""
    if getattr(linear, "bias", None) is not None:
        return linear.get_parameter("bias")
    dtype = next(linear.parameters()).dtype
    return torch.zeros(shape(linear)[0], dtype=dtype, device=device_of(linear))


def first(values: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the tensor that a module was given or gave first, alone, in a tuple or by name."""
    if isinstance(values, Tensor):
        return values
    found: Tensor = values[0] if len(values) else next(iter(kwargs.values()))
    return found

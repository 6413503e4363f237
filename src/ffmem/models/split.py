"""A model whose layers lie on several accelerators: what lies where.

    tokens → [embeddings, layers 0 … k] on one device → [layers k + 1 …] on the next → … → logits

accelerate puts whole layers on accelerators one after the other (`device_map`), and its hooks
bring inputs to a module's device. Weights stay where they are: a model that does not fit is
refused, and so is one whose weights are offloaded to main memory or disk.
"""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ffmem.errors import ModelError

RESERVE = 0.1
"""The share of each accelerator that no weights get: a pass computes there, and keeps lists."""


def is_split(model: nn.Module) -> bool:
    """Return whether accelerate moves inputs of a model between devices."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def device_of(module: nn.Module) -> torch.device:
    """Return where a module computes; the CPU if it has no weights at all."""
    for hook in _hooks(module):
        if hook.execution_device is not None:
            return torch.device(hook.execution_device)
    weight = next(module.parameters(), None)
    return torch.device("cpu") if weight is None else weight.device


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight, tied ones once, in the order of names."""
    yield from sorted(model.named_parameters(), key=lambda named: named[0])


def is_tied(one: nn.Module, other: nn.Module) -> bool:
    """Return whether the `weight` of two modules is the same."""
    return one.get_parameter("weight").data_ptr() == other.get_parameter("weight").data_ptr()


def missing(model: nn.Module) -> str | None:
    """Return the name of a weight that is not in memory, or on an accelerator."""
    return next((name for name, weight in model.named_parameters() if weight.is_meta), None)


def aligned(block: nn.Module) -> Iterator[RemovableHandle]:
    """Let hooks that are put on a block from now on see its input on the block's own device.

    accelerate moves it later, after all hooks: r = input + attention would meet on two devices.
    """
    if not any(True for _ in _hooks(block)):
        return
    place = device_of(block)

    def move(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (args[0].to(place), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, kwargs | {name: kwargs[name].to(place)}

    yield block.register_forward_pre_hook(move, with_kwargs=True)


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module without accelerate's hooks."""
    hooks: dict[int, Any] = {
        id(part.__dict__["_hf_hook"]): None
        for part in module.modules()
        if "_hf_hook" in part.__dict__
    }
    twin = copy.deepcopy(module, hooks)
    for part in twin.modules():
        if "_hf_hook" in part.__dict__:
            for added in ("_hf_hook", "_old_forward", "forward"):
                part.__dict__.pop(added, None)
    return twin


def places(model: nn.Module, blocks: str) -> dict[str, str]:
    """Return what lies on each device, in words; `blocks` is the path to the list of layers."""
    found: dict[str, dict[str, None]] = {}
    for name, weight in model.named_parameters():
        path = name.rpartition(".")[0]
        layer = path.removeprefix(f"{blocks}.").partition(".")[0]
        part = layer if path.startswith(f"{blocks}.") else path
        found.setdefault(str(weight.device), {})[part] = None
    return {place: _listed(list(parts)) for place, parts in found.items()}


def device_map(model: nn.Module, max_memory: dict[Any, int] | None = None) -> dict[str, Any]:
    """Return on which accelerator to put each part of an empty model, whole layers together.

    `max_memory` gives the bytes of each accelerator; by default what is free, but for `RESERVE`.
    """
    from accelerate import infer_auto_device_map  # type: ignore[import-untyped]
    from accelerate.utils import get_balanced_memory  # type: ignore[import-untyped]

    rules: dict[str, Any] = {
        "no_split_module_classes": sorted(getattr(model, "_no_split_modules", None) or ())
    }
    sizes = _free_memory() if max_memory is None else max_memory
    with warnings.catch_warnings(action="ignore"):  # that it does not fit is an error here
        shares = get_balanced_memory(model, dict(sizes), **rules)
        found: dict[str, Any] = dict(infer_auto_device_map(model, shares, **rules))
    if {"cpu", "disk"} & {str(place) for place in found.values()}:
        needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        listed = ", ".join(f"{place}: {size / 1e9:.1f} GB" for place, size in sizes.items())
        raise ModelError(
            f"The weights of this model take {needed / 1e9:.1f} GB, and do not fit on the"
            f" accelerators here ({listed}; whole layers only). Use --dtype bfloat16, more"
            " accelerators, or --device cpu."
        )
    return found


def require_accelerator() -> None:
    """Raise if there is nothing to split a model over."""
    if not torch.accelerator.is_available():
        raise ModelError(
            "--device split needs an accelerator, and there is none here. Use --device cpu."
        )


def _free_memory() -> dict[Any, int]:
    """Return the bytes of each accelerator that weights may take."""
    from accelerate.utils import get_max_memory

    return {
        place: int(size * (1 - RESERVE))
        for place, size in get_max_memory().items()
        if place not in ("cpu", "disk")
    }


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Yield accelerate's hooks of a module that move things."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):  # several in a row are one that has them
        if hasattr(one, "execution_device"):
            yield one


def _listed(parts: list[str]) -> str:
    """Return parts of a model in words, runs of layers as one."""
    layers = sorted(int(part) for part in parts if part.isdecimal())
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    named = [f"layer {a}" if a == b else f"layers {a} to {b}" for a, b in runs]
    return ", ".join([*named, *(part for part in parts if not part.isdecimal())])

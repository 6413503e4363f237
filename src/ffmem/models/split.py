"""A model whose layers lie on several devices: what lies where, and its weights wherever they lie.

    tokens → [embeddings, layers 0 … k] on one device → [layers k + 1 …] on the next → … → logits

accelerate puts whole layers on accelerators one after the other, and what does not fit into main
memory. Its hooks bring inputs to a module's device, and weights from main memory or disk for as
long as the module computes; in between, those weights are empty (`meta`). Law: what is read here
are the true weights, on the device where their module computes, whether or not they lie there.
"""

import copy
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ffmem.errors import ModelError

ROOM = 0.1
"""The share of each accelerator that no weights get: a pass computes there, and keeps lists."""

OFFLOADED = "offloaded"


class Away(NamedTuple):
    """Weights of a module that lie elsewhere between its calls."""

    weights: Any
    """From a weight's name to the weight: accelerate's own map, which may read a disk."""
    device: torch.device
    """Where they go when the module computes."""


def is_split(model: nn.Module) -> bool:
    """Return whether accelerate moves inputs or weights of a model about."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def held(module: nn.Module, name: str) -> Tensor:
    """Return a weight of a module itself, on the device where it computes."""
    weight = module.get_parameter(name)
    away = _away(module)
    if not weight.is_meta or away is None:
        return weight
    return _fetched(away, name, weight).to(away.device)


def device_of(module: nn.Module) -> torch.device:
    """Return where a module computes; the CPU if it has no weights at all."""
    for hook in _hooks(module):
        if hook.execution_device is not None:
            return torch.device(hook.execution_device)
    for part in module.modules():
        away = _away(part)
        if away is not None:
            return away.device
        for weight in part.parameters(recurse=False):
            return weight.device
    return torch.device("cpu")


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight, tied ones once, in the order of names; those that lie away one by one."""
    twins = _twins(model)
    for full, weight in sorted(model.named_parameters(), key=lambda named: named[0]):
        if full in twins:
            continue
        path, _, name = full.rpartition(".")
        away = _away(model.get_submodule(path)) if weight.is_meta else None
        yield full, weight if away is None else _fetched(away, name, weight)


def is_tied(model: nn.Module, one: nn.Module, other: nn.Module) -> bool:
    """Return whether the `weight` of two modules of a model is the same."""
    first, second = (part.get_parameter("weight") for part in (one, other))
    if not (first.is_meta or second.is_meta):
        return first.data_ptr() == second.data_ptr()
    paths = {id(part): path for path, part in model.named_modules()}
    names = {f"{paths[id(part)]}.weight" for part in (one, other)}
    return first is second or bool(names & _twins(model))


def missing(model: nn.Module) -> str | None:
    """Return the name of a weight that is nowhere: neither in memory nor known to accelerate."""
    for path, module in model.named_modules():
        away = _away(module)
        for name, weight in module.named_parameters(recurse=False):
            if weight.is_meta and (away is None or name not in away.weights):
                return f"{path}.{name}"
    return None


def aligned(block: nn.Module) -> Iterator[RemovableHandle]:
    """Let hooks that are put on a block from now on see its input on the block's own device.

    accelerate moves it later, behind all hooks: r = input + attention would meet on two devices.
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
    """Return a copy of a module with its true weights and without accelerate's hooks."""
    # The hooks know every weight that lies away: they must not be copied with one module.
    known: dict[int, Any] = {
        id(part.__dict__["_hf_hook"]): None
        for part in module.modules()
        if "_hf_hook" in part.__dict__
    }
    twin = copy.deepcopy(module, known)
    for part, original in zip(twin.modules(), module.modules(), strict=True):
        if "_hf_hook" not in original.__dict__:
            continue
        for added in ("_hf_hook", "_old_forward", "forward"):
            part.__dict__.pop(added, None)
        for name, weight in list(part.named_parameters(recurse=False)):
            if weight.is_meta:
                true = nn.Parameter(held(original, name).clone(), weight.requires_grad)
                part.register_parameter(name, true)
    return twin


def places(model: nn.Module, blocks: str) -> dict[str, str]:
    """Return what lies on each device, in words; `blocks` is the path to the list of layers."""
    found: dict[str, dict[str, None]] = {}
    for path, module in model.named_modules():
        for _, weight in module.named_parameters(recurse=False):
            place = _place(model, path, module, weight)
            layer = path.removeprefix(f"{blocks}.").partition(".")[0]
            part = layer if path.startswith(f"{blocks}.") else path
            found.setdefault(place, {})[part] = None
    return {place: _told(list(parts)) for place, parts in found.items()}


def device_map(model: nn.Module, max_memory: dict[Any, int] | None = None) -> dict[str, Any]:
    """Return where to put each part of a model that is still empty, whole layers together.

    `max_memory` gives the bytes of each device; else those that are free, but for `ROOM`.
    """
    from accelerate import infer_auto_device_map  # type: ignore[import-untyped]
    from accelerate.utils import get_balanced_memory  # type: ignore[import-untyped]

    rules: dict[str, Any] = {
        "no_split_module_classes": sorted(getattr(model, "_no_split_modules", None) or ())
    }
    bytes_of = _free_memory() if max_memory is None else max_memory
    with warnings.catch_warnings(action="ignore"):  # of what lies in main memory: `places` tells
        shares = get_balanced_memory(model, dict(bytes_of), **rules)
        found: dict[str, Any] = dict(infer_auto_device_map(model, shares, **rules))
    if "disk" in found.values():
        needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        sizes = ", ".join(f"{place}: {size / 1e9:.1f} GB" for place, size in bytes_of.items())
        raise ModelError(
            f"The weights of this model take {needed / 1e9:.1f} GB, and do not fit into what is"
            f" free here ({sizes}; whole layers only, and the largest must fit twice where weights"
            " lie in main memory). Use --dtype bfloat16, more accelerators or more memory."
        )
    return found


def refuse_no_accelerator() -> None:
    """Raise if there is nothing to split a model over."""
    if not torch.accelerator.is_available():
        raise ModelError(
            "--device split was asked for, and there is no accelerator here to split a model over."
            " Use --device cpu, or a machine with accelerators."
        )


def _free_memory() -> dict[Any, int]:
    """Return the bytes of each device that weights may take."""
    from accelerate.utils import get_max_memory

    return {
        place: size if place == "cpu" else int(size * (1 - ROOM))
        for place, size in get_max_memory().items()
    }


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Yield accelerate's hooks of a module that move things."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):  # several in a row are one that has them
        if hasattr(one, "execution_device"):
            yield one


def _away(module: nn.Module) -> Away | None:
    """Return where weights of a module lie between its calls, if they do not lie in it."""
    for hook in _hooks(module):
        if hook.offload and hook.weights_map is not None:
            return Away(hook.weights_map, torch.device(hook.execution_device))
    return None


def _fetched(away: Away, name: str, weight: Tensor) -> Tensor:
    """Return a weight that lies away, in the dtype in which its module computes."""
    found: Tensor = away.weights[name]
    return found.detach().to(weight.dtype)


def _twins(model: nn.Module) -> set[str]:
    """Return the names of weights that are the same as one that comes before them.

    A model whose weights lie away forgets at its first pass which of them are one.
    """
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    if not tied or not is_split(model):
        return set()
    order = {name: n for n, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    last: set[str] = set()
    groups: dict[str, set[str]] = {}
    for target, source in tied.items():
        groups.setdefault(source, {source}).add(target)
    for group in groups.values():
        last |= set(sorted(group & order.keys(), key=order.__getitem__)[1:])
    return last


def _place(model: nn.Module, path: str, module: nn.Module, weight: Tensor) -> str:
    """Return the name of the device where a weight lies, and where it goes to be used."""
    away = _away(module)
    if not weight.is_meta or away is None:
        return str(weight.device)
    planned: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    owners = [name for name in planned if name in ("", path) or path.startswith(f"{name}.")]
    where = str(planned[max(owners, key=len)]) if owners else OFFLOADED
    return f"{where}, moved to {away.device} when used"


def _told(parts: list[str]) -> str:
    """Return parts of a model in words, runs of layers as one."""
    layers = sorted(int(part) for part in parts if part.isdecimal())
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    said = [f"layer {a}" if a == b else f"layers {a} to {b}" for a, b in runs]
    return ", ".join([*said, *(part for part in parts if not part.isdecimal())])

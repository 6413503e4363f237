"""PyTorch modules: find them, read their weights, and split them over devices.

    tokens → [embeddings, layers 0 … k] on one device → [layers k + 1 …] on the next → … → logits

A model that is too large for one accelerator is split: accelerate puts whole layers on one device
after the other (`device_map`), and its hooks move the input of each module to the module's device.
Weights never move. A model that does not fit, or has weights offloaded to main memory or disk, is
rejected.
"""

import copy
import warnings
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from ffmem.errors import ModelError
from ffmem.networks.memories import FactoredLinear, InputValues

RESERVE = 0.1
"""Share of each accelerator's free memory that is kept for activations."""


def get_module(parent: nn.Module, path: str) -> nn.Module:
    """Return the submodule at a path; raise if there is none."""
    found = find_module(parent, path)
    if found is None:
        raise ModelError(
            f"{type(parent).__name__} has no module {path!r}, unlike other models of its family,"
            " so ffmem cannot read it."
        )
    return found


def find_module(parent: nn.Module, path: str | None) -> nn.Module | None:
    """Return the submodule at a path, or None if there is no path or no such module."""
    found: Any = None if path is None else parent
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None


def first_tensor(values: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the first tensor among a module's arguments or outputs, as a hook gets them."""
    if isinstance(values, Tensor):
        return values
    found: Tensor = values[0] if len(values) else next(iter(kwargs.values()))
    return found


def linear_weight(linear: nn.Module) -> Float[Tensor, "out in"]:
    """Return the weight matrix of a linear map, one row per output."""
    if isinstance(linear, FactoredLinear):
        return linear.matrix()
    weight = linear.get_parameter("weight")
    if isinstance(linear, Conv1D):
        return weight.T  # GPT-2 stores it transposed
    if isinstance(linear, nn.Linear) and weight.shape == (linear.out_features, linear.in_features):
        return weight
    raise ModelError(
        f"Expected a linear map with plain weights, found {type(linear).__name__} with weights of"
        f" shape {tuple(weight.shape)}. Load the model without quantization."
    )


def linear_shape(linear: nn.Module) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a linear map."""
    if isinstance(linear, FactoredLinear | InputValues):
        return linear.out_features, linear.in_features
    n_outputs, n_inputs = linear_weight(linear).shape
    return n_outputs, n_inputs


def linear_bias(linear: nn.Module) -> Float[Tensor, " out"]:
    """Return the bias of a linear map; zeros if it has none."""
    if getattr(linear, "bias", None) is not None:
        return linear.get_parameter("bias")
    dtype = next(linear.parameters()).dtype
    return torch.zeros(linear_shape(linear)[0], dtype=dtype, device=device_of(linear))


def clamped_glu(config: Any, gate: Tensor, up: Tensor) -> Tensor:
    """Return m of a gate that is clamped, as in GPT-OSS and its kin; `config` has the numbers."""
    limit, alpha = config.swiglu_limit, getattr(config, "swiglu_alpha", None)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if alpha is None:
        return functional.silu(gate) * up
    return (up + 1.0) * gate * torch.sigmoid(alpha * gate)


def keep_largest(module: Any, scores: Float[Tensor, "*place memory"]) -> Tensor:
    """Return how far scores exceed the cutoff of their token, 0 below it, as Gemma 3n computes it.

    The cutoff leaves a share of the scores that the module knows; all of them in some layers.
    """
    if not module.activation_sparsity:
        return scores
    found: Tensor = module._gaussian_topk(scores)
    return found


def sorted_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return every weight with its name, in the order of names; tied weights once."""
    return sorted(model.named_parameters(), key=lambda named: named[0])


def is_tied(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules share their `weight`."""
    return one.get_parameter("weight").data_ptr() == other.get_parameter("weight").data_ptr()


# Models split over devices


def is_split(model: nn.Module) -> bool:
    """Return whether accelerate moves inputs between devices."""
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def device_of(module: nn.Module) -> torch.device:
    """Return the device where a module computes; the CPU if it has no weights."""
    for hook in _device_hooks(module):
        if hook.execution_device is not None:
            return torch.device(hook.execution_device)
    weight = next(module.parameters(), None)
    return torch.device("cpu") if weight is None else weight.device


def _device_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks with which accelerate moves a module's inputs."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))  # a SequentialHook holds several
    return [one for one in hooks if hasattr(one, "execution_device")]


def align_input(block: nn.Module) -> RemovableHandle | None:
    """Move a block's input to its device before any hook that is registered later sees it.

    accelerate moves it only after all hooks: input + attention would then mix two devices.
    """
    if not _device_hooks(block):
        return None
    device = device_of(block)

    def move(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (args[0].to(device), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, kwargs | {name: kwargs[name].to(device)}

    return block.register_forward_pre_hook(move, with_kwargs=True)


def copy_without_hooks(module: nn.Module) -> nn.Module:
    """Return a copy of a module without accelerate's hooks."""
    hooks: dict[int, Any] = {
        id(part.__dict__["_hf_hook"]): None
        for part in module.modules()
        if "_hf_hook" in part.__dict__
    }
    copied = copy.deepcopy(module, hooks)
    for part in copied.modules():
        if "_hf_hook" in part.__dict__:
            for added in ("_hf_hook", "_old_forward", "forward"):
                part.__dict__.pop(added, None)
    return copied


def make_device_map(model: nn.Module, max_memory: dict[Any, int] | None = None) -> dict[str, Any]:
    """Return the accelerator for each part of a model without weights; layers stay whole.

    `max_memory` gives the bytes to use on each accelerator. Default: the free memory, minus
    `RESERVE`.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory, get_max_memory

    if max_memory is None:
        max_memory = {
            device: int(size * (1 - RESERVE))
            for device, size in get_max_memory().items()
            if device not in ("cpu", "disk")
        }
    rules: dict[str, Any] = {
        "no_split_module_classes": sorted(getattr(model, "_no_split_modules", None) or ())
    }
    with warnings.catch_warnings(action="ignore"):  # if it does not fit, we raise
        shares = get_balanced_memory(model, dict(max_memory), **rules)
        found: dict[str, Any] = dict(infer_auto_device_map(model, shares, **rules))
    if {"cpu", "disk"} & {str(device) for device in found.values()}:
        needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        sizes = ", ".join(f"{device}: {size / 1e9:.1f} GB" for device, size in max_memory.items())
        raise ModelError(
            f"This model needs {needed / 1e9:.1f} GB for its weights and does not fit on your"
            f" accelerators ({sizes}; layers stay whole). Use --dtype bfloat16, more accelerators,"
            " or --device cpu."
        )
    return found


def describe_devices(model: nn.Module, blocks: str) -> dict[str, str]:
    """Return what is on each device, in words; `blocks` is the path of the list of layers."""
    found: dict[str, dict[str, None]] = {}
    for name, weight in model.named_parameters():
        path = name.rpartition(".")[0]
        layer = path.removeprefix(f"{blocks}.").partition(".")[0]
        part = layer if path.startswith(f"{blocks}.") else path
        found.setdefault(str(weight.device), {})[part] = None
    if len(found) == 1:
        return dict.fromkeys(found, "all weights")
    return {device: _format_parts(list(parts)) for device, parts in found.items()}


def _format_parts(parts: list[str]) -> str:
    """Return parts of a model in words, with consecutive layers as a range."""
    layers = sorted(int(part) for part in parts if part.isdecimal())
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    named = [f"layer {a}" if a == b else f"layers {a} to {b}" for a, b in ranges]
    return ", ".join([*named, *(part for part in parts if not part.isdecimal())])

"""Quantized checkpoints, dequantized on load: ffmem reads plain weights.

    W = scale · q        one scale for each block of quantized numbers q

transformers does it for some methods on any device; the others are refused by name.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ffmem.errors import ModelError

DEQUANTIZED = ("fp8", "mxfp8", "mxfp4", "compressed-tensors")
"""Methods with a setting `dequantize`."""

TORCHAO = "torchao"

_PACKAGES = {"compressed-tensors": "compressed_tensors", TORCHAO: "torchao"}
"""What transformers needs to read a method's checkpoints."""

_ADVICE = (
    "Use the unquantized checkpoint, in float32, bfloat16 or float16, or a GGUF file of the model."
)


def quantization_method(config: PretrainedConfig) -> str | None:
    """Return how a checkpoint is quantized; None if it is not."""
    settings = _settings(config)
    if settings is None:
        return None
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    method = settings.get("quant_method")
    return str(getattr(method, "value", method))


def prepare_dequantization(name: str, config: PretrainedConfig) -> None:
    """Set up the config of a quantized checkpoint so that loading gives plain weights.

    Raise if transformers cannot dequantize it.
    """
    method, settings = quantization_method(config), _settings(config)
    if method is None or settings is None:
        return
    if method not in (*DEQUANTIZED, TORCHAO):
        raise ModelError(
            f"The checkpoint {name} is quantized by {method}, which transformers cannot dequantize"
            f" on load. {_ADVICE}"
        )
    package = _PACKAGES.get(method)
    if package is not None and find_spec(package) is None:
        raise ModelError(
            f"The checkpoint {name} is quantized by {method}; dequantizing it needs the package"
            f" `{package.replace('_', '-')}`. Install it with pip. Or: {_ADVICE}"
        )
    if method in DEQUANTIZED:
        settings["dequantize"] = True
    if getattr(config, "dtype", None) is None:  # transformers would take that of a quantized weight
        config.dtype = torch.bfloat16


def finish_dequantization(name: str, model: PreTrainedModel, method: str | None) -> None:
    """Dequantize what transformers has left quantized; raise if any weight is not plain."""
    if method is None:
        return
    if method == TORCHAO:
        _dequantize_tensors(model)
    for key, weight in model.named_parameters():
        if type(weight) is not nn.Parameter or weight.dtype not in _PLAIN:
            raise ModelError(
                f"The checkpoint {name} is quantized by {method}; {key} is still"
                f" {str(weight.dtype).removeprefix('torch.')} after loading. {_ADVICE}"
            )
    # Otherwise save_pretrained fails, or quantizes the weights again.
    for config in {id(one): one for one in (model.config, model.config.get_text_config())}.values():
        config.__dict__.pop("quantization_config", None)
        config.__dict__.pop("_is_quantized", None)
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized", "_weight_conversions"):
        model.__dict__.pop(attribute, None)


_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _settings(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the quantization settings of a config, which may be those of its text decoder."""
    for one in (config, config.get_text_config()):
        found: Any = getattr(one, "quantization_config", None)
        if found is not None:
            if not isinstance(found, dict):
                found = found.to_dict()
                one.quantization_config = found
            settings: dict[str, Any] = found
            return settings
    return None


def _dequantize_tensors(model: PreTrainedModel) -> None:
    """Replace the tensors of torchao, which hold quantized numbers, by plain ones."""
    for module in model.modules():
        for key, weight in list(module.named_parameters(recurse=False)):
            if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor:
                plain = weight.dequantize().to(model.config.dtype)
                setattr(module, key, nn.Parameter(plain, requires_grad=False))

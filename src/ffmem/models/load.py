"""Load a model as `Memories`, and describe what was loaded.

MODEL is a local Hugging Face folder, a LoRA folder, a `.gguf` file, a fairseq checkpoint
(`model.pt` next to `dict.txt`, or their folder), a named model, or a Hub id with an optional
`@revision`. An adapter is merged into its base model.
"""

import ctypes
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate import dispatch_model
from huggingface_hub.constants import ENDPOINT
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ffmem.errors import FfmemError, ModelError, one_line
from ffmem.models.adapters import Adapter, base_errors, check_base, merge_adapter, read_adapter
from ffmem.models.arguments import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MODEL_FORMS,
    NAMED_MODELS,
    AdapterRecord,
    model_path,
    resolve_adapter,
    resolve_model,
)
from ffmem.models.checkpoint import (
    NO_REMOTE_CODE,
    DeviceMapper,
    convert_gguf,
    find_auto_class,
    find_file,
    load_hugging_face,
    load_tokenizer,
    silence_transformers,
    split_adaptive_error,
)
from ffmem.models.fairseq import load_fairseq
from ffmem.models.families import RERUN, Family
from ffmem.models.memories import Memories, fingerprint
from ffmem.models.modules import describe_devices, is_tied, make_device_map
from ffmem.models.tokenizer import SubwordTokenizer, Tokenizer
from ffmem.networks.config import AdaptiveConfig
from ffmem.signatures import check_arguments

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": None,
}
"""The dtypes of --dtype; auto keeps the dtype of the checkpoint."""

SPLIT = "split"
"""The --device that splits a model over all accelerators, layer by layer."""

KEPT_BYTES = 1 << 30
"""Freed memory that the process may keep, and the size from which a tensor has its own mapping."""


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for the next ones.

    By default, glibc returns large blocks to the system, which clears every page again for the next
    layer. Does nothing without glibc, or if the environment configures its allocator.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    trim_threshold, mmap_threshold = -1, -3  # as in malloc.h
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        library.mallopt(mmap_threshold, KEPT_BYTES)
        library.mallopt(trim_threshold, KEPT_BYTES)


@check_arguments
def load(
    model: str | Path | nn.Module,
    tokenizer: PreTrainedTokenizerBase | Tokenizer | None = None,
    *,
    adapter: str | Path | None = None,
    dtype: str = "float32",
    device: str | dict[str, Any] = "auto",
) -> Memories:
    """Load a model and return its memories.

    Args:
        model: What the command line takes as MODEL, or a transformers model in memory.
        tokenizer: The tokenizer of a model in memory.
        adapter: Adapter to merge into the model: a folder that peft wrote, such as LoRA.
        dtype: "float32" or "bfloat16"; or torch.float32 or torch.bfloat16.
        device: "auto", "cpu", "cuda", "cuda:N", "mps", "split" (layers over all GPUs), or a
            device map.
    """
    keep_freed_memory()
    if isinstance(model, nn.Module):
        return _from_memory(model, tokenizer, adapter)
    if dtype not in DTYPES:
        raise ModelError(f"--dtype {dtype} is unknown. Use {', '.join(DTYPES)}.")
    device_mapper = _make_device_mapper(device, dtype)
    one_device = None
    if isinstance(device, str) and device != SPLIT:
        one_device = find_device(device)
    source, to_merge = _find_adapter(resolve_model(str(model)), adapter)
    revision = None if _is_local(source) else source.partition("@")[2] or None
    record = None
    with silence_transformers(), _loading_errors(source):
        if to_merge is None:
            network, own_tokenizer = _load_network(source, device_mapper)
        else:
            with base_errors(to_merge) if adapter is None else nullcontext():
                network, own_tokenizer = _load_network(source, None)
            check_base(to_merge, source, network.name_or_path or source)
            base_hash = fingerprint(network)
            network = merge_adapter(network, to_merge)
            record = AdapterRecord(
                source=to_merge.source, hash=to_merge.hash(), base_hash=base_hash
            )
            own_tokenizer = load_tokenizer(to_merge.folder) or own_tokenizer
        # Hash the weights before the cast, so that the hash does not depend on --dtype.
        weights = fingerprint(network)
        if to_merge is not None and device_mapper is not None:  # merged as a whole, then split
            network = dispatch_model(network, device_mapper(network.config))
        # accelerate disables `to` on split models, even for dtypes; call nn.Module's.
        cast: Any = network.to if device_mapper is None else partial(nn.Module.to, network)
        cast(device=one_device, dtype=DTYPES[dtype])
    used_tokenizer = own_tokenizer if tokenizer is None else _wrap_tokenizer(tokenizer)
    return Memories(network, used_tokenizer, source, revision, weights, record)


def _from_memory(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | Tokenizer | None,
    adapter: str | Path | None,
) -> Memories:
    """Return the memories of a loaded model."""
    if not isinstance(model, PreTrainedModel):
        merge = ", such as model.merge_and_unload() of a peft model"
        raise ModelError(f"A {type(model).__name__} is not a transformers model. Pass one{merge}.")
    if adapter is not None:
        raise ModelError(
            "An adapter is merged into a model that ffmem loads. Pass the model's folder or name;"
            " or merge the adapter with peft (merge_and_unload) before you pass the model."
        )
    if tokenizer is None:
        raise ModelError("Pass the tokenizer of the model too: load(model, tokenizer).")
    return Memories(model, _wrap_tokenizer(tokenizer))


def _is_local(source: str) -> bool:
    return Path(source).exists() or source in NAMED_MODELS


def _find_adapter(source: str, adapter: str | Path | None) -> tuple[str, Adapter | None]:
    """Return the base model of a MODEL argument, and the adapter to merge into it, if any."""
    own = _adapter_folder(source)
    if adapter is None and own is None:
        return source, None
    if adapter is not None and own is not None:
        raise ModelError(
            f"{source} is an adapter itself. Pass its base model with --adapter {source}, or merge"
            " one of the two adapters first."
        )
    named = source if adapter is None else resolve_adapter(str(adapter))
    folder = own if adapter is None else _adapter_folder(named)
    if folder is None:
        raise ModelError(
            f"{named!r} is not an adapter: no such folder, and no {ADAPTER_CONFIG} on the Hub or in"
            " its cache. Use a folder that peft's save_pretrained wrote."
        )
    found = read_adapter(named, folder)
    if any(folder.glob("model*.safetensors")):
        raise ModelError(
            f"{named} has both a whole model and an adapter. To read the model alone, remove"
            f" {ADAPTER_CONFIG}; to merge the adapter, move {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
            f" to a separate folder, and pass it with --adapter."
        )
    if adapter is not None:
        return source, found
    if found.base is None:
        raise ModelError(
            f"The adapter {named} does not name its base model. Pass the base as MODEL, with"
            f" --adapter {named}."
        )
    with base_errors(found):
        beside = folder / found.base  # relative to the adapter
        base = resolve_model(str(beside) if beside.exists() else found.base)
    if _adapter_folder(base) is not None:
        raise ModelError(
            f"The base of the adapter {named} is {base}, an adapter too. Merge that one with peft"
            " first, and pass the merged model as MODEL."
        )
    return base, found


def _adapter_folder(source: str) -> Path | None:
    """Return the local folder of an adapter, fetched from the Hub if necessary; None if none."""
    if _is_local(source):
        path = Path(source)
        return path if source not in NAMED_MODELS and (path / ADAPTER_CONFIG).is_file() else None
    name, _, revision = source.partition("@")
    where: dict[str, Any] = {"revision": revision or None, "local_files_only": not _is_online()}
    try:
        config = find_file(name, ADAPTER_CONFIG, where)
        if config is None:
            return None
        find_file(name, ADAPTER_WEIGHTS, where)
    except OSError:  # loading the model raises a better error
        return None
    return config.parent


def _load_network(
    source: str, device_mapper: DeviceMapper | None
) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a whole model."""
    if _is_local(source):
        return _load_local(source, device_mapper)
    name, _, revision = source.partition("@")
    return _load_from_hub(name, revision or None, device_mapper)


def find_device(device: str) -> torch.device:
    """Return the device for `--device`; `auto` is an accelerator if there is one."""
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator or torch.device("cpu")
    known = "Use auto, cpu, cuda, cuda:N, mps or split."
    try:
        found = torch.device(device)
    except RuntimeError:  # which lists all that torch was ever built for
        raise ModelError(f"--device {device} is not available. {known}") from None
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0].rstrip(".")
        raise ModelError(f"--device {device} is not available ({reason}). {known}") from None
    return found


def empty_model(config: PretrainedConfig, dtype: str = "auto") -> PreTrainedModel:
    """Return a model without weights, in the wider of its stored dtype and `dtype`.

    Weights are loaded as stored and cast afterwards, so there must be room for both.
    """
    stored = getattr(config, "dtype", None) or torch.float32
    wider = torch.promote_types(stored, DTYPES[dtype] or stored)
    with torch.device("meta"):
        auto_class = find_auto_class(config) or AutoModelForCausalLM
        model: PreTrainedModel = auto_class.from_config(config, dtype=wider, **NO_REMOTE_CODE)
    return model


def _make_device_mapper(device: str | dict[str, Any], dtype: str) -> DeviceMapper | None:
    """Return how to split a model over devices; None for a single device."""
    if isinstance(device, dict):
        return lambda config: device
    if device != SPLIT:
        return None
    if not torch.accelerator.is_available():
        raise ModelError("--device split needs an accelerator, and none is available.")
    return lambda config: make_device_map(empty_model(config, dtype))


def _load_local(
    source: str, device_mapper: DeviceMapper | None
) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a file, a folder or a named model."""
    path = model_path(source)
    if path.suffix == ".gguf":
        path = convert_gguf(path)
    elif path.is_file() or (path / "model.pt").exists():
        if device_mapper is not None:
            raise split_adaptive_error(f"The fairseq checkpoint {path}")
        return load_fairseq(path)
    has_config = (path / "config.json").exists()
    if not has_config and (path / "checkpoint" / "prepared.safetensors").exists():
        raise ModelError(
            f"{path} is an unfinished training run. Rerun its `ffmem train` command to finish it."
        )
    if not has_config:
        raise ModelError(
            f"{path} is not a model: it has neither config.json (Hugging Face) nor model.pt"
            " (fairseq)."
        )
    return load_hugging_face(str(path), device_mapper=device_mapper)


def _load_from_hub(
    name: str, revision: str | None, device_mapper: DeviceMapper | None
) -> tuple[PreTrainedModel, Tokenizer]:
    """Load a Hub id; offline, from the cache, without waiting for timeouts."""
    online = _is_online()
    try:
        return load_hugging_face(
            name, revision, local_files_only=not online, device_mapper=device_mapper
        )
    except OSError as error:
        asked = name if revision is None else f"{name}@{revision}"
        hub = f"not on the Hub ({one_line(error, 120)})" if online else "the Hub is unreachable"
        raise ModelError(
            f"No model {asked!r}: no such file or folder, not in the cache, and {hub}."
            f" {MODEL_FORMS}"
        ) from error


def _is_online() -> bool:
    """Return whether the Hub's host name resolves, or a proxy may resolve it."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return True
    try:
        socket.getaddrinfo(urlsplit(ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _wrap_tokenizer(tokenizer: PreTrainedTokenizerBase | Tokenizer) -> Tokenizer:
    return tokenizer if isinstance(tokenizer, Tokenizer) else SubwordTokenizer(tokenizer)


@contextmanager
def _loading_errors(source: str) -> Iterator[None]:
    """Turn whatever a library raises on an unreadable model into an error that names the model."""
    try:
        yield
    except FfmemError:
        raise
    except Exception as error:  # damaged or foreign files make libraries raise anything
        raise ModelError(
            f"Cannot load the model {source}: {one_line(error)}. If one of its files is damaged or"
            " missing, download or save it again."
        ) from error


def describe(memories: Memories) -> dict[str, Any]:
    """Return the facts of a model that decide how ffmem reads it."""
    tokenizer = memories.tokenizer
    tokens = tokenizer.token_texts(memories.vocabulary)
    some_layer = memories.layout.memory_layers[0]
    dense = memories.banks[some_layer].dense
    kind = {"memory": memories.config.memory} if _is_adaptive(memories) else {}

    def show(id: int | None) -> str | None:
        return None if id is None else tokens[id]

    return {
        "source": memories.source,
        "revision": memories.revision,
        **_describe_adapter(memories),
        "family": memories.family,
        "layers": memories.n_layers,
        "memories": memories.layout.per_layer,
        "memories_in_all": len(memories.layout),
        **_describe_experts(memories),
        "hidden": memories.hidden,
        "vocabulary": memories.vocabulary,
        "context": memories.context,
        "dtype": str(memories.dtype).removeprefix("torch."),
        "device": str(memories.device),
        "devices": describe_devices(memories.model, memories.row.blocks),
        **kind,
        "values": "static" if memories.has_values else "input",
        "activation": memories.activation,
        "gated": memories.gated,
        "biases": {
            "keys": _describe_bias(memories.key_bias(some_layer), [one.keys for one in dense]),
            "values": _describe_bias(memories.bias(some_layer), [one.values for one in dense]),
        },
        "block": _describe_block(memories),
        "head": _describe_head(memories),
        "start": {
            "tokenizer": show(tokenizer.own_start),
            "bos": show(tokenizer.bos),
            "eos": show(tokenizer.eos),
        },
        "self_check": memories.check._asdict(),
        "weights": memories.fingerprint(),
    }


def _describe_bias(bias: torch.Tensor, maps: Sequence[nn.Module]) -> bool | str:
    """Return whether there is a bias: True, False, or "zero" if there is one of zeros."""
    if bool(bias.any()):
        return True
    has_parameter = any(getattr(one, "bias", None) is not None for one in maps)
    return "zero" if has_parameter else False


def _describe_adapter(memories: Memories) -> dict[str, Any]:
    """Return the adapter that was merged into the model, if any."""
    adapter = memories.adapter
    return {} if adapter is None else {"adapter": adapter.source, "adapter_hash": adapter.hash}


def _describe_experts(memories: Memories) -> dict[str, Any]:
    """Return how many layers have experts, and the banks of the first one that has."""
    layers = [banks for banks in memories.banks if banks.routed]
    if not layers:
        return {}
    records = {record.kind: record for record in layers[0].records()}
    sizes = {
        name: f"{records[kind].count} × {records[kind].size:,} memories"
        for name, kind in (("routed", "expert"), ("shared", "shared"), ("dense", "dense"))
        if kind in records
    }
    return {"experts": {"layers": len(layers), **sizes}}


def _is_adaptive(memories: Memories) -> bool:
    return memories.family == AdaptiveConfig.model_type


def _describe_block(memories: Memories) -> str:
    """Return in words how a block combines attention and feed-forward part."""
    kind = memories.config.memory if _is_adaptive(memories) else None
    if kind == "persistent":
        return "all-attention: r = input + what is read from tokens, then y, the slots' part"
    if kind == "lambda":
        return "feed-forward, then lambda: r = stream + content, then y, the static keys' part"
    rows = [memories.rows[layer] for layer in memories.layout.memory_layers]
    return "; in other layers ".join(dict.fromkeys(map(_describe_row, rows)))


def _describe_row(row: Family) -> str:
    """Return in words how the blocks of a row combine attention and feed-forward part."""
    if row.residual == RERUN:
        what = "what the head reads of several streams" if row.streams else "the layer's output"
        return f"o is {what}, r the same without the layer's memories, y = o − r"
    if row.output_norm is not None:
        return "post-norm: o = norm(r + y)"
    block = "sequential: r = input + attention, then y is added"
    if row.attention is not None:
        block = "parallel: attention and y are both added to the block's input"
    return block if row.post_norm is None else f"{block}; y is normed before it is added"


def _describe_head(memories: Memories) -> dict[str, Any]:
    """Return how the residual stream becomes logits."""
    head, model = memories.head, memories.model
    if head.adaptive:
        return {"kind": "adaptive softmax", "final_norm": None}
    return {
        "kind": "linear" if head.linear else "a small network, then linear",
        "final_norm": memories.row.final_norm,
        "tied": is_tied(model.get_input_embeddings(), model.get_output_embeddings()),
        "scale": head.scale,
        "cap": head.cap,
        "projection": "folded",
    }

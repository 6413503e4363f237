"""What ffmem sees in a model, before anything is indexed."""

from typing import Any

from ffmem.models.memories import Memories
from ffmem.models.split import is_tied, places
from ffmem.networks.config import AdaptiveConfig


def describe(memories: Memories, t: int = 50) -> dict[str, Any]:
    """Return the facts of a model that decide how its memories are read."""
    tokenizer = memories.tokenizer
    shown = tokenizer.shown(memories.vocabulary)
    some = memories.layout.memory_layers[0]

    def named(id: int | None) -> str | None:
        return None if id is None else shown[id]

    return {
        "source": memories.source,
        "revision": memories.revision,
        "family": memories.family,
        "layers": memories.n_layers,
        "memories": memories.layout.per_layer,
        "memories_in_all": len(memories.layout),
        "hidden": memories.hidden,
        "vocabulary": memories.vocabulary,
        "context": memories.context,
        "dtype": str(memories.dtype).removeprefix("torch."),
        "device": str(memories.device),
        "devices": places(memories.model, memories.row.blocks),
        **_kind(memories),
        "activation": memories.activation,
        "gated": memories.gated,
        "biases": {
            "keys": bool(memories.key_bias(some).any()),
            "values": bool(memories.bias(some).any()),
        },
        "block": _block(memories),
        "head": _head(memories),
        "start": {
            "tokenizer": named(tokenizer.own_start),
            "bos": named(tokenizer.bos),
            "eos": named(tokenizer.eos),
        },
        "self_check": memories.check._asdict(),
        "index_bytes": index_bytes(memories, t),
        "weights": memories.fingerprint(),
    }


def index_bytes(memories: Memories, t: int = 50, ends: int = 50, sample: int = 512) -> int:
    """Return about how many bytes an index takes beside its corpus, before compression."""
    lists = 2 if memories.gated else 1
    values = 2 * ends * (4 + 4 + 4) if memories.has_values else 0
    per_memory = lists * t * (4 + 8 + 1) + values + sample * 4 + 40
    return len(memories.layout) * per_memory


def _kind(memories: Memories) -> dict[str, str]:
    """Return what coefficients multiply, and in models of ours the kind of memory."""
    values = {"values": "static" if memories.has_values else "input"}
    ours = memories.family == AdaptiveConfig.model_type
    return {"memory": memories.config.memory} | values if ours else values


def _block(memories: Memories) -> str:
    """Return how a block joins its parts."""
    row, kind = memories.row, _kind(memories).get("memory")
    if kind == "persistent":
        return "all-attention: r = input + what is read from tokens, then y, the slots' part"
    if kind == "lambda":
        return "feed-forward, then lambda: r = stream + content, then y, the static keys' part"
    if row.output_norm is not None:
        return "post-norm: o = norm(r + y)"
    kind = "sequential: r = input + attention, then y is added"
    if row.attention is not None:
        kind = "parallel: attention and y are both added to the block's input"
    return kind if row.post_norm is None else f"{kind}; y is normed before it is added"


def _head(memories: Memories) -> dict[str, Any]:
    """Return the way from the residual stream to the vocabulary."""
    head = memories.head
    if head.adaptive:
        return {"kind": "adaptive softmax", "final_norm": None}
    model = memories.model
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    return {
        "kind": "linear",
        "final_norm": memories.row.final_norm,
        "tied": is_tied(inputs, outputs),
        "scale": head.scale,
        "cap": head.cap,
        "projection": "folded",
    }

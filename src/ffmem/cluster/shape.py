"""The shape of a model: the few numbers that every cost of a run follows from.

    parameters = blocks + embeddings
    FLOP of a token = 2 · parameters in blocks + 4 · layers · heads · head size · mean context

A product with a weight is one multiplication and one addition. The second term is attention:
scores and sums over what came before. Logits are not computed, so embeddings cost nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ffmem.errors import ModelError
from ffmem.models import argument


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a config says, without any weight."""

    name: str
    layers: int
    memories: int
    """Of a layer."""
    hidden: int
    heads: int
    key_heads: int
    """Heads of keys and values; fewer where several queries share one."""
    head_size: int
    vocabulary: int
    gated: bool
    tied: bool
    """Whether input and output embedding are one."""
    has_values: bool = True
    """Whether memories have static values; those of a lambda layer have none."""
    positions: int = 0
    """Learned ones."""
    exact_parameters: int | None = None
    """Counted on the model itself, where there is one."""
    exact_embeddings: int | None = None

    @property
    def lists(self) -> int:
        """Lists of triggers per memory: one per sign that triggers."""
        return 2 if self.gated else 1

    @property
    def all_memories(self) -> int:
        """Memories of all layers."""
        return self.layers * self.memories

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embeddings of tokens and positions."""
        if self.exact_embeddings is not None:
            return self.exact_embeddings
        return (
            self.vocabulary * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        )

    @property
    def block_parameters(self) -> int:
        """Weights of all layers; norms and biases, a thousandth, are left out of named shapes."""
        if self.exact_parameters is not None:
            return self.exact_parameters - self.embedding_parameters
        attention = 2 * self.hidden * (self.heads + self.key_heads) * self.head_size
        feed_forward = (3 if self.gated else 2) * self.hidden * self.memories
        return self.layers * (attention + feed_forward)

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.block_parameters + self.embedding_parameters

    def flops(self, context: float) -> float:
        """Return the operations of one token that has so many before it, on average."""
        attention = 4 * self.layers * self.heads * self.head_size * context
        return 2 * self.block_parameters + attention


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> Shape:
    return Shape(
        name=name,
        layers=layers,
        memories=4 * hidden,
        hidden=hidden,
        heads=heads,
        key_heads=heads,
        head_size=hidden // heads,
        vocabulary=50_257,
        gated=False,
        tied=True,
        positions=1024,
    )


def _llama(
    name: str, layers: int, hidden: int, memories: int, heads: int, key_heads: int, vocabulary: int
) -> Shape:
    return Shape(
        name=name,
        layers=layers,
        memories=memories,
        hidden=hidden,
        heads=heads,
        key_heads=key_heads,
        head_size=hidden // heads,
        vocabulary=vocabulary,
        gated=True,
        tied=vocabulary == 49_152,
    )


NAMED = {
    shape.name: shape
    for shape in (
        _gpt2("gpt2", 12, 768, 12),
        _gpt2("gpt2-xl", 48, 1600, 25),
        _llama("smollm2-135m", 30, 576, 1536, 9, 3, 49_152),
        _llama("llama-8b", 32, 4096, 14_336, 32, 8, 128_256),
        _llama("llama-70b", 80, 8192, 28_672, 64, 8, 128_256),
    )
}
"""Shapes from public configs: GPT-2, SmolLM2, Llama 3."""


def shape_of(model: str) -> Shape:
    """Return the shape of a named model, or of a folder's config; no weight is loaded."""
    if model in NAMED:
        return NAMED[model]
    own = argument.NAMED.get(model)
    folder = own if isinstance(own, Path) else Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"There is no shape {model!r}, and no folder of that name with a config.json."
            f" Give a Hugging Face folder or one of {', '.join(NAMED)}; an index stands for a"
            " corpus, in the second place."
        )
    return _of_config(folder, folder.resolve().name if own is None else model)


def _of_config(folder: Path, name: str) -> Shape:
    """Return the shape of the model that a config describes, built without memory for weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ffmem.models.families import FAMILIES
    from ffmem.models.modules import module, shape
    from ffmem.networks.model import AdaptiveLM  # noqa: F401 - transformers learns of our models

    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"The config in {folder} describes no language model: {error}") from None
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelError(
            f"{folder} is a {config.model_type!r} model, whose memories cannot be found without its"
            f" weights. Give a model of a known family: {', '.join(sorted(FAMILIES))}."
        )
    row = family.of(config.get_text_config())
    blocks = list(module(model, row.blocks).children())
    hidden, memories = shape(module(blocks[0], row.values))
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    inputs, outputs = (
        {id(p) for p in table.parameters()}
        for table in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    names = inputs | outputs
    names |= {id(p) for name, p in model.named_parameters() if "wpe" in name or "embed_pos" in name}
    return Shape(
        name=name,
        layers=len(blocks),
        memories=memories,
        hidden=hidden,
        heads=heads,
        key_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_size=int(getattr(text, "head_dim", None) or hidden // heads),
        vocabulary=int(text.vocab_size),
        gated=row.up is not None,
        has_values=not row.input_values,
        tied=bool(inputs & outputs),
        exact_parameters=sum(p.numel() for p in model.parameters()),
        exact_embeddings=sum(p.numel() for p in model.parameters() if id(p) in names),
    )

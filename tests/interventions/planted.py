"""Models for tests: one whose answer depends on one memory, and models with a start token."""

import ffmem
from ffmem.interventions.forward import LoadedModel
from tests.tiny import tiny, tiny_tokenizer


def planted():
    """L1N7 is always on, and its value says w11; everything else hardly speaks."""
    memories = ffmem.load(tiny("gpt2 untied"), tiny_tokenizer())
    for layer in range(memories.n_layers):
        memories.values(layer).mul_(0.01)
    embedding = memories.head.embedding
    embedding.div_(embedding.norm(dim=1, keepdim=True))
    memories.values(1)[7] = 500 * embedding[11]
    memories.bank(1).keys.bias[7] = 3.0
    return memories


def with_start(memories, start=0, index=None):
    """Return a loaded model whose prompts start with a token, or with none."""
    return LoadedModel(memories, index, "none" if start is None else f"id:{start}")

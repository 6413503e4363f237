"""What tests of experiments share: studies of tiny models, plain triggers, planted effects."""

import itertools
import random
from pathlib import Path

import torch

import ffmem
from ffmem.experiments.base import ExperimentConfig
from ffmem.experiments.context import ExperimentContext
from tests.indexing.folders import indexed
from tests.tiny import VOCABULARY, tiny, tiny_tokenizer

FAMILIES = ["gpt2", "opt", "gpt_neox", "llama", "gemma3_text", "ffmem_adaptive"]

KINDS = [f"ffmem_adaptive {kind}" for kind in ("gelu", "swiglu", "softmax", "persistent")]
"""Memories of other kinds, all with static values."""

LAMBDA = "ffmem_adaptive lambda"
"""Memories without static values."""

SETTINGS = ("seed", "per_layer", "triggers")


def write_distinct(path: Path, seed: int = 0) -> Path:
    """Write sentences of 1 to 7 words, no word twice: no two prefixes end alike, so none tie.

    In the first layer of a parallel block, a key sees nothing but the last word.
    """
    words = [f"w{number}" for number in range(3, VOCABULARY)]
    random.Random(seed).shuffle(words)
    lengths = itertools.cycle([3, 1, 7, 2, 5, 4, 6])
    with path.open("w") as file:
        while words:
            sentence = [words.pop() for _ in range(min(next(lengths), len(words)))]
            file.write(" ".join(sentence) + "\n")
    return path


def context_of(folder: Path, model, corpus: Path | None = None, **options) -> ExperimentContext:
    """Index a corpus with a tiny model, given by name or as it is, and return the context of it."""
    settings = {name: options.pop(name) for name in SETTINGS if name in options}
    corpus = corpus or write_distinct(folder.with_suffix(".txt"))
    loaded = ffmem.load(tiny(model) if isinstance(model, str) else model, tiny_tokenizer())
    index = indexed(folder, corpus, loaded, **({"t": 5} | options))
    return ExperimentContext(index=index, model=loaded, config=ExperimentConfig(**settings))


def measured(made, out, names, **options):
    """Measure experiments on the index of the fixture `made`."""
    index, model, valid = made
    settings = {"corpus": str(valid), "model": model, "per_layer": 3, "triggers": 3} | options
    return ffmem.experiment(names, index, out, **settings)


def sentences(context):
    """Return (offset, ids) of every sentence."""
    index = context.index
    rows = index.sentences.rows(0, index.sentences.n_sentences)
    return [(row.offset, row.ids) for row in rows]


def traced(context, ids):
    """Return every layer's trace of some tokens, run alone behind the start token."""
    start = context.index.manifest.start.id
    return context.memories.trace(torch.tensor([[start, *ids]]))


class PlainTriggers:
    """The triggers of every memory, as the definition says, from sentences run one by one."""

    def __init__(self, context):
        self.t = context.index.manifest.t
        self.corpus = sentences(context)
        self.traces = [
            [layer.coefficients[0] for layer in traced(context, ids)] for _, ids in self.corpus
        ]

    def of(self, layer, memory, sign):
        """Return (coefficient, ids, p) of the best prefix of each of the t best sentences."""
        best = []
        for (_, ids), trace in zip(self.corpus, self.traces, strict=True):
            column = trace[layer][1:, memory].tolist()
            p = max(range(1, len(ids) + 1), key=lambda p: sign * column[p - 1])
            if sign * column[p - 1] > 0:
                best.append((column[p - 1], ids, p))
        return sorted(best, key=lambda trigger: -abs(trigger[0]))[: self.t]

    def head(self, layer, memory, gated):
        """Return (sign, coefficient, ids, p) of the head of a memory, or None."""
        heads = []
        for sign in (1, -1) if gated else (1,):
            with_next = [
                found for found in self.of(layer, memory, sign) if found[2] < len(found[1])
            ]
            heads += [(sign, *found) for found in with_next[:1]]
        return max(heads, key=lambda head: abs(head[1]), default=None)


def plain_logits(memories, layer, memory, sign):
    """Return the reading of one value as a list."""
    value = memories.output_directions(layer)[memory : memory + 1]
    return memories.head.folded(sign * value)[0].tolist()


def plain_top(logits):
    return max(range(len(logits)), key=lambda token: (logits[token], -token))


def plain_rank(logits, token):
    return sum(other > logits[token] for other in logits)


def llama_with_unit_embeddings():
    """A llama whose output embeddings all have length 1: each is nearest to itself."""
    model = tiny("llama")
    rows = model.get_output_embeddings().weight
    with torch.no_grad():
        rows /= rows.norm(dim=1, keepdim=True)
    return model


def plant_value(model, memory, token, sign):
    """Let a value of a llama's last layer promote one token, under the sign of its coefficient.

    Nothing stands above the last layer: no coefficient changes.
    """
    with torch.no_grad():
        wanted = model.get_output_embeddings().weight[token] / model.model.norm.weight
        model.model.layers[-1].mlp.down_proj.weight[:, memory] = sign * wanted


def without_attention(name):
    """A model whose every position sees its own token alone: neither others nor its place."""
    model = tiny(name)
    with torch.no_grad():
        if name == "llama":
            for block in model.model.layers:
                block.self_attn.o_proj.weight.zero_()
        else:
            assert name == "gpt2"
            model.transformer.wpe.weight.zero_()
            for block in model.transformer.h:
                block.attn.c_proj.weight.zero_()
    return model


def with_dead_memory(name, layer, *dead):
    """A model in which the coefficients of some memories of a layer are always 0."""
    memory = list(dead)
    model = tiny(name)
    with torch.no_grad():
        if name == "llama":
            model.model.layers[layer].mlp.up_proj.weight[memory] = 0
        else:
            assert name == "opt"
            block = model.model.decoder.layers[layer]
            block.fc1.weight[memory] = 0
            block.fc1.bias[memory] = -1
    return model

"""How fast the index pass is, beside other ways over the same batches in the same process.

Each variant runs over the same batches of one chunk, interleaved batch by batch; of every batch
the best of several rounds counts. The index pass is warmed with another chunk first, so that its
thresholds are those of a running index and not of an empty one.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

import ffmem
from ffmem.indexing.chunks import Batch, Chunk, batches, cut_chunks, prefix_range
from ffmem.indexing.results import draw_sample
from ffmem.indexing.scan import Scan, _ChunkReader
from ffmem.models.banks import Bank, Routing
from ffmem.models.memories import Memories

T, CHUNK_TOKENS, BATCH_TOKENS, START = 50, 65_536, 4096, 0


class Bench:
    """A model, a corpus in chunks, and the state of an index that has read some of them."""

    def __init__(self, memories: Memories, sentences: list[list[int]], prefixes: str) -> None:
        self.memories = memories
        self.scan = Scan(memories, T, prefixes == "all", prefix_range(True, False))
        lengths = np.array([len(ids) for ids in sentences])
        self.offsets = np.concatenate([[0], np.cumsum(lengths + 1)])
        self.sentences = sentences
        self.chunks = list(cut_chunks([lengths], CHUNK_TOKENS))
        self.sample = draw_sample("0" * 64, [lengths], False)

    def batches(self, chunk: Chunk) -> list[Batch]:
        numbers = range(chunk.first_sentence, chunk.first_sentence + chunk.n_sentences)
        rows = [(int(self.offsets[n]), self.sentences[n]) for n in numbers]
        return list(batches(rows, START, BATCH_TOKENS))

    def sampled(self, chunk: Chunk) -> ndarray:
        past = chunk.first_prefix + chunk.n_tokens + chunk.n_sentences
        return self.sample.between(chunk.first_prefix, past).prefixes

    def warm(self, n_chunks: int) -> None:
        for chunk in self.chunks[:n_chunks]:
            self.scan.read(chunk, self.batches(chunk), self.sampled(chunk))
            self.scan.commit()


def trunk(memories: Memories) -> Callable[[Batch], None]:
    """The forward pass without logits."""
    return lambda batch: memories.forward(batch.tokens)


def plain(memories: Memories) -> Callable[[Batch], None]:
    """The forward pass as everybody calls it, with logits."""

    def run(batch: Batch) -> None:
        memories.model(batch.tokens, use_cache=False)

    return run


def indexing(bench: Bench, chunk: Chunk) -> Callable[[Batch], None]:
    """The index pass, as `ffmem index` runs it."""
    reader = _ChunkReader(bench.scan, bench.sampled(chunk), {})

    def run(batch: Batch) -> None:
        reader.begin(batch)
        with (
            bench.memories.read_coefficients(reader.read),
            bench.memories.skip_padding(batch.is_token),
        ):
            bench.memories.forward(batch.tokens)

    return run


def straightforward(memories: Memories) -> Callable[[Batch], None]:
    """Hooks and `torch.topk`: the running top t of every memory over every prefix."""
    best = [
        torch.full((T, memories.layout.widths[0]), -torch.inf) for _ in range(memories.n_layers)
    ]
    places = [torch.zeros((T, memories.layout.widths[0]), dtype=torch.long) for _ in best]

    def run(batch: Batch) -> None:
        mask, prefixes = _prefixes(batch)

        def read(
            bank: Bank, coefficients: Tensor, gate: Tensor | None, routing: Routing | None
        ) -> None:
            layer = bank.layer
            seen = torch.cat([best[layer], coefficients[mask]])
            named = torch.cat([places[layer], prefixes[:, None].expand(-1, seen.shape[1])])
            best[layer], order = seen.topk(T, dim=0)
            places[layer] = named.gather(0, order)

        with memories.read_coefficients(read):
            memories.forward(batch.tokens)

    return run


def transformer_lens(folder: str, memories: Memories) -> Callable[[Batch], None]:
    """TransformerLens with cached activations, then `torch.topk`, as its tutorials do it."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(folder)
    best = [
        torch.full((T, memories.layout.widths[0]), -torch.inf) for _ in range(memories.n_layers)
    ]
    places = [torch.zeros((T, memories.layout.widths[0]), dtype=torch.long) for _ in best]

    def run(batch: Batch) -> None:
        mask, prefixes = _prefixes(batch)
        _, cache = bridge.run_with_cache(
            batch.tokens, names_filter=lambda name: name.endswith("mlp.hook_post")
        )
        for layer in range(memories.n_layers):
            seen = torch.cat([best[layer], cache[f"blocks.{layer}.mlp.hook_post"][mask]])
            named = torch.cat([places[layer], prefixes[:, None].expand(-1, seen.shape[1])])
            best[layer], order = seen.topk(T, dim=0)
            places[layer] = named.gather(0, order)

    return run


def _prefixes(batch: Batch) -> tuple[Tensor, Tensor]:
    """Which positions of a batch are prefixes, and their numbers."""
    position = torch.arange(batch.tokens.shape[1])
    lengths = torch.tensor(batch.lengths)[:, None]
    mask = (position >= 1) & (position <= lengths)
    numbers = torch.tensor(batch.offsets)[:, None] + position
    return mask, numbers[mask]


@torch.inference_mode()
def race(
    variants: dict[str, Callable[[Batch], None]], batched: list[Batch], rounds: int
) -> dict[str, float]:
    """Return the tokens per second of each variant: interleaved, best of `rounds` per batch."""
    seconds = {name: np.full(len(batched), np.inf) for name in variants}
    for _ in range(rounds):
        for number, batch in enumerate(batched):
            for name, run in variants.items():
                begin = time.perf_counter()
                run(batch)
                taken = time.perf_counter() - begin
                seconds[name][number] = min(seconds[name][number], taken)
    tokens = sum(sum(batch.lengths) for batch in batched)
    return {name: tokens / float(taken.sum()) for name, taken in seconds.items()}


@torch.inference_mode()
def peak_gemm(rounds: int = 20, best: bool = True) -> float:
    """Return the GFLOP/s of a large matrix product on this machine: the best, or the mean."""
    a, b = torch.randn(4096, 2048), torch.randn(2048, 2048)
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - begin)
    taken = min(seconds) if best else float(np.mean(seconds))
    return 2 * 4096 * 2048 * 2048 / taken / 1e9


def corpus_ids(memories: Memories, n_sentences: int) -> list[list[int]]:
    corpus = ffmem.Corpus("wikitext-2:train", limit=n_sentences)
    return [sentence.ids for sentence in corpus.sentences(memories.tokenizer)]

"""`index --dry-run`: estimate tokens, time, memory and disk from one batch."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ffmem.corpus.corpus import Corpus
from ffmem.indexing.chunks import Batch, Chunk, batches, prefix_range
from ffmem.indexing.config import IndexConfig
from ffmem.indexing.prepare import TruncatedRows
from ffmem.indexing.results import SAMPLE_SIZE, LayerResult
from ffmem.indexing.scan import Scan
from ffmem.indexing.start import FIRST_TOKENS, choose_start
from ffmem.indexing.values import ENDS, KEY_TOKENS, Ends
from ffmem.models.arguments import use_threads
from ffmem.models.memories import Memories
from ffmem.parallel import ExecutionConfig
from ffmem.progress import Progress

MEASURED_VALUES = 256
"""Values to project in order to estimate the time for all."""

NUMBER_BYTES = 4
"""Of a float32 or int32."""

TOKEN_BYTES = 3 * NUMBER_BYTES
"""Of a token in the corpus: its id, and where its text starts and ends."""


@dataclass(frozen=True)
class Estimate:
    """The cost of an index."""

    sentences: int
    tokens: int
    chunks: int
    workers: int
    tokens_per_second: float
    """Of one worker, measured on a full batch."""
    pass_seconds: float
    values_seconds: float
    """To project values and keys."""
    memory_bytes: int
    """Per worker: weights, trigger lists, one batch of coefficients."""
    partial_bytes: int
    """Per worker, on disk, while the run lasts."""
    index_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as a JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        lines = {
            "corpus": f"{self.sentences:,} sentences, {self.tokens:,} tokens",
            "speed": f"{self.tokens_per_second:,.0f} tokens/s per worker, measured on one batch",
            "values, keys": f"about {_duration(self.values_seconds)}",
            "triggers": f"about {_duration(self.pass_seconds)}",
            "workers": f"{self.workers}",
            "memory": f"about {_size(self.memory_bytes)} per worker, and 0.5 GB for PyTorch",
            "disk": f"about {_size(self.index_bytes)}, before compression",
            "scratch disk": f"about {_size(self.partial_bytes)} per worker, during the run",
        }
        return "\n".join(f"{name:14} {text}" for name, text in lines.items())


@torch.inference_mode()
def estimate(
    memories: Memories,
    corpus: Corpus,
    config: IndexConfig,
    execution: ExecutionConfig,
    progress: Progress,
) -> Estimate:
    """Read the corpus, time one batch and some values, and extrapolate."""
    progress.say(f"Reading {corpus.source}.")
    first: list[list[int]] = []
    n_sentences = n_tokens = n_characters = 0
    for sentence in TruncatedRows(corpus.sentences(memories.tokenizer), memories):
        if n_tokens < FIRST_TOKENS:
            first.append(sentence.ids)
        n_sentences += 1
        n_tokens += len(sentence.ids)
        n_characters += len(sentence.text or "")
    progress.say("Measuring start tokens and speed.")
    n_threads = config.threads or execution.threads or torch.get_num_threads()
    with use_threads(n_threads):
        start = choose_start(memories, first, config.start)[0].id
        full = max(
            batches(enumerate(first), start, config.batch_tokens), key=lambda b: b.tokens.numel()
        )
        positions = prefix_range(start is not None, config.compat is not None)
        scan = Scan(memories, config.t, config.prefixes == "all", positions)
        batch_seconds = _best_of_two(lambda: _read(scan, full))
        values_seconds = _values_seconds(memories)
    rate = sum(full.lengths) / batch_seconds
    results = len(memories.layout) * _result_bytes(config.t, memories)
    weights = sum(one.numel() * one.element_size() for one in memories.model.parameters())
    largest = max(bank.size for layer in memories.layout.layers for bank in layer)
    widest = full.tokens.numel() * largest * 4 * (3 if memories.gated else 2)
    return Estimate(
        sentences=n_sentences,
        tokens=n_tokens,
        chunks=-(-n_tokens // config.chunk_tokens),
        workers=execution.n_workers,
        tokens_per_second=rate,
        pass_seconds=n_tokens / rate / execution.n_workers,
        values_seconds=values_seconds / execution.n_workers,
        memory_bytes=weights + 2 * results + widest,  # results: of a chunk, and of all so far
        partial_bytes=results,
        index_bytes=index_bytes(memories, config.t) + n_characters + n_tokens * TOKEN_BYTES,
    )


def index_bytes(memories: Memories, t: int) -> int:
    """Estimate the size of an index without its corpus, before compression."""
    ends = min(ENDS, memories.vocabulary - len(memories.tokenizer.unlisted))
    values = 2 * ends * len(Ends._fields) * NUMBER_BYTES if memories.has_values else 0
    keys = (KEY_TOKENS * (3 if memories.gated else 2) + 3) * NUMBER_BYTES
    per_memory = _result_bytes(t, memories) + values + keys + SAMPLE_SIZE * NUMBER_BYTES
    return len(memories.layout) * per_memory


def _result_bytes(t: int, memories: Memories) -> int:
    """Return the size of one memory's triggers and statistics."""
    one = LayerResult.empty(1, t, memories.gated, memories.layout.has_experts)
    parts = (one.positive, one.negative or (), one.stats)
    return sum(column.nbytes for part in parts for column in part if column is not None)


def _read(scan: Scan, batch: Batch) -> None:
    chunk = Chunk(0, 0, len(batch.lengths), 0, sum(batch.lengths))
    scan.read(chunk, [batch], np.zeros(0, np.int64))
    scan.commit()


def _values_seconds(memories: Memories) -> float:
    """Return about how long it takes to project all values, if there are some, and all keys."""
    layer = memories.layout.widths.index(max(memories.layout.widths))
    rows = next(iter(memories.banks[layer])).key_rows()[:MEASURED_VALUES]
    seconds = _best_of_two(lambda: memories.head.folded(rows).topk(min(ENDS, memories.vocabulary)))
    return seconds * len(memories.layout) / len(rows) * (2 if memories.has_values else 1)


def _best_of_two(function: Callable[[], object]) -> float:
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"

"""How the cost of an index grows with layers, memories, t and tokens: one thread, random models.

Every figure is CPU time, the best of several rounds; sizes are interleaved within a round, so that
a busy moment of the machine falls on all of them. An exponent is the slope of the logarithms:
1 means that twice as much takes twice as long.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ffmem.cluster.shared import SharedFolder
from ffmem.indexing.found import Found
from ffmem.indexing.segments import Segments
from ffmem.indexing.statistics import Statistics
from ffmem.indexing.tree import FAN_IN, Node
from ffmem.indexing.triggers import Triggers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import ffmem
from ffmem.indexing.chunks import Lease, batches
from ffmem.indexing.sample import Sample, draw
from ffmem.indexing.scan import Scan, reach
from ffmem.models.memories import Memories

LENGTH, VOCABULARY, HIDDEN = 32, 512, 128
ROUNDS = 3


def growth() -> dict[str, Any]:
    """Return seconds, bytes and exponents, each against one thing that grows."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return _growth(Path(folder))


def _growth(folder: Path) -> dict[str, Any]:
    return {
        "threads": 1,
        "hidden": HIDDEN,
        "pass_over_layers": _raced("layers", (2, 4, 8), lambda n: _pass(_model(n, 512), 50, 256)),
        "pass_over_memories": _raced(
            "memories", (512, 1024, 2048, 4096), lambda n: _pass(_model(2, n), 50, 256)
        ),
        "pass_over_t": _raced("t", (10, 50, 200), lambda t: _pass(_model(4, 1024), t, 256)),
        "pass_over_tokens": _raced(
            "tokens", (4096, 8192, 16_384, 32_768), lambda n: _pass(_model(2, 512), 50, n // LENGTH)
        ),
        "merge_over_t": _raced("t", (10, 50, 200), lambda t: _merge(folder, 4, 2048, t)),
        "merge_over_memories": _raced(
            "memories", (1024, 4096, 16_384), lambda n: _merge(folder, 2, n, 50)
        ),
        "segment_bytes_over_t": _fitted(
            "t", {t: _segment_bytes(folder, 2, 1024, t) for t in (10, 50, 200)}
        ),
        "segment_bytes_over_memories": _fitted(
            "memories", {n: _segment_bytes(folder, 2, n, 50) for n in (1024, 4096, 16_384)}
        ),
        "merged_megabytes_per_second": _merge_speed(folder),
    }


def _raced(name: str, sizes: Sequence[int], make: Callable[[int], Callable[[], None]]) -> Any:
    """Return the best CPU seconds of each size, and the exponent of their growth."""
    runs = {size: make(size) for size in sizes}
    seconds = dict.fromkeys(sizes, float("inf"))
    for run in runs.values():
        run()  # warm: filters stand, memory is there
    for _ in range(ROUNDS):
        for size, run in runs.items():
            begin = time.process_time()
            run()
            seconds[size] = min(seconds[size], time.process_time() - begin)
    return _fitted(name, seconds)


def _fitted(name: str, measured: dict[int, float]) -> dict[str, Any]:
    slope = np.polyfit(np.log(list(measured)), np.log(list(measured.values())), 1)[0]
    rows = [{name: size, "measured": taken} for size, taken in measured.items()]
    return {"rows": rows, "exponent": round(float(slope), 2)}


def _model(layers: int, memories: int) -> Memories:
    """Return a random GPT-2 of this shape."""
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")))
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt2",
        n_layer=layers,
        n_embd=HIDDEN,
        n_head=4,
        n_inner=memories,
        vocab_size=VOCABULARY,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return ffmem.load(AutoModelForCausalLM.from_config(config), tokenizer)


def _pass(memories: Memories, t: int, n: int) -> Callable[[], None]:
    """Return the index pass over n sentences, filtered by what it found the time before."""
    random = np.random.default_rng(0)
    ids = random.integers(0, VOCABULARY, (n, LENGTH))
    rows = [(i * (LENGTH + 1), row) for i, row in enumerate(ids.tolist())]
    lease = Lease(0, 0, n, 0, n * LENGTH)
    scan = Scan(memories, t, "best", reach(has_start=True, empty_prefix=False))
    shape = (memories.n_layers, memories.layout.widths[0])
    floors = [np.zeros(shape, np.float32)]
    drawn = draw("0" * 64, [np.full(n, LENGTH)], False)

    def run() -> None:
        for part in scan.lease(lease, batches(rows, 0, 4096), floors, drawn):
            if isinstance(part, Found):
                floors[:] = [one.weakest() for one in part.lists()]

    return run


def _found(layers: int, memories: int, t: int, part: int) -> Found:
    """Return full lists of a part of a corpus, strongest first."""
    random = np.random.default_rng(part)
    shape = (layers, memories, t)
    coefficients = -np.sort(-random.random(shape, np.float32), axis=-1)
    prefixes = random.integers(part * 10**6, (part + 1) * 10**6, shape)
    triggers = Triggers(coefficients, prefixes, np.zeros(shape, np.int8))
    nothing = Sample.empty(layers, memories)
    return Found(triggers, None, Statistics.empty(layers, memories), nothing)


def _segments(folder: Path, layers: int, memories: int, t: int) -> tuple[Segments, list[Node]]:
    own = Path(tempfile.mkdtemp(dir=folder))
    segments = Segments(SharedFolder.at(own), "growth", t, gated=False)
    nodes = [Node(0, part) for part in range(FAN_IN)]
    for node in nodes:
        segments.commit(node, _found(layers, memories, t, node.number).layers())
    return segments, nodes


def _merge(folder: Path, layers: int, memories: int, t: int) -> Callable[[], None]:
    """Return the merge of full segments, files included."""
    segments, nodes = _segments(folder, layers, memories, t)
    return lambda: segments.commit(Node(1, 0), segments.merged(nodes))


def _segment_bytes(folder: Path, layers: int, memories: int, t: int) -> float:
    segments, nodes = _segments(folder, layers, memories, t)
    path = segments.shared.path / segments.name(nodes[0])
    return float(path.stat().st_size)


def _merge_speed(folder: Path) -> float:
    """Return the megabytes of segments that a second of one core merges."""
    segments, nodes = _segments(folder, 4, 4096, 50)
    read = sum((segments.shared.path / segments.name(node)).stat().st_size for node in nodes)
    best = float("inf")
    for _ in range(ROUNDS):
        begin = time.process_time()
        segments.commit(Node(1, 0), segments.merged(nodes))
        best = min(best, time.process_time() - begin)
    return round(read / best / 1e6, 1)

"""What a run will take, before it is begun: time, memory, disk and traffic.

N tokens in leases of A tokens are n = N / A leases, merged F = 4 at a time in ⌈log₄ n⌉ levels,
about n / 3 merges. M memories (all layers), t triggers in each of s lists (two if gated):

    a slot          13 bytes              coefficient 4, prefix 8, gate 1
    a full segment  M · (36 + 13·s·t + 4·k) + layers · 1,800      k prefixes of the sample in it
    an index        M · (13·s·t + 1,200 + 2,048 + 36)             triggers, values, sample, counts

Most segments are not full: a worker filters by what is merged already. If that covers a share φ
of the leases read so far, the j-th lease keeps about t / (φ·j) triggers of a list, and all leases
t · (f + ln(n / f) / φ) of it, where the first f = max(workers, 1 / φ) find nothing to filter by;
likewise every level of the tree, with n and f divided by F. What a segment never sheds are its
36 bytes of counts per memory.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from ffmem.cluster.shape import Shape
from ffmem.indexing.tree import FAN_IN

SLOT = 4 + 8 + 1
"""Bytes of a trigger: coefficient, prefix, gate."""

COUNTS = 8 + 8 + 4 + 4 + 3 * 4
"""Bytes of a memory in any segment: active, sum, max, min, and where its three lists begin."""

BATCH = 1_800
"""Bytes of a layer in a segment beside its memories: names, types, hash."""

SAMPLE, ENDS = 512, 50
"""Prefixes of the sample; tokens kept at each end of a value."""

COMPRESSED = {"triggers": 0.54, "values": 0.79, "samples": 0.94, "stats": 1.01}
"""Bytes of a finished file over those of its numbers: measured on SmolLM2-135M over WikiText-2."""

SENTENCE_BYTES = 6.84
"""Of `sentences.parquet` per token (text, ids, places): measured there, too."""

FOOTER = 946
"""Bytes of that file's table of contents per 128 sentences: what everybody reads who opens it."""

GROUP = 128
TOKEN_BYTES = 10.6
"""Of `vocabulary.parquet` per token of the vocabulary."""

COVERED = 0.25
"""φ: share of the leases read so far whose threshold a worker knows. An assumption, on the safe
side of the half that a simulation gives where leases are told of the widest segments."""

EVENTS = 5_000.0
"""Events per second that the leader can take; `benchmarks/simulation.py` measures it, per second
of one core, with the simulation's own share."""

PREPARED = 150_000.0
"""Tokens per second that the one leading process reads, splits, tokenises and writes; measured:
165,000 per second of one core, SmolLM2's tokenizer on WikiText-2."""

MERGED = 200e6
"""Bytes of segments per second that a worker merges: 227 MB per second of one core, measured by
`benchmarks/growth.py`."""

LEADER = 250e6
"""Bytes of the leading process by itself."""

PER_WORKER = 6_000
"""Bytes that the leader holds for each worker."""

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is planned."""

    shape: Shape
    tokens: int
    workers: int = 1
    t: int = 50
    lease_tokens: int = 65_536
    batch_tokens: int = 4_096
    dtype: str = "float32"
    sentence_tokens: float = 32.0
    """Tokens of a sentence, on average."""
    rate: float | None = None
    """Tokens per second of a worker."""
    flops: float | None = None
    """Operations per second that a worker reaches: what the rate is made of if it is not given."""
    bandwidth: float = 1e9
    """Bytes per second between a worker and the shared folder."""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of a worker: given, or its FLOP/s over the FLOP of a token."""
        if self.rate is not None or self.flops is None:
            return self.rate
        return self.flops / self.shape.flops(self.sentence_tokens / 2)


@dataclass(frozen=True)
class Plan:
    """What it takes; bytes and seconds."""

    leases: int
    levels: int
    merges: int
    segment: dict[str, float]
    """Bytes of one: full, without any trigger, and of all leases together on average."""
    memory: dict[str, float]
    disk: dict[str, float]
    traffic: dict[str, float]
    seconds: dict[str, float]
    """Empty if the speed of a worker is not known."""
    events_per_second: float | None
    bottleneck: str | None
    """The part that takes longest."""

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        return asdict(self)


def index_bytes(shape: Shape, t: int) -> dict[str, int]:
    """Return the bytes of the numbers of a finished index, by its parts, before compression."""
    memories = shape.all_memories
    return {
        "triggers": memories * (4 + shape.lists * t * SLOT),
        "values": shape.has_values * memories * (4 + 2 * min(ENDS, shape.vocabulary) * 12),
        "samples": memories * (4 + 4 * SAMPLE),
        "stats": memories * (4 + 8 + 8 + 8 + 4 + 4),
    }


def segment_bytes(shape: Shape, slots: float | int, sampled: float | int) -> float:
    """Return the bytes of a segment with so many triggers and sampled prefixes per memory."""
    per_memory = float(COUNTS) + slots * SLOT + 4 * sampled
    return shape.all_memories * per_memory + shape.layers * BATCH


def tree_size(leases: int) -> tuple[int, int]:
    """Return the levels above the leases, and the merges."""
    levels = merges = 0
    while leases > 1:
        nodes = -(-leases // FAN_IN)
        merges += nodes - (leases % FAN_IN == 1)  # a node of one child is that child
        leases, levels = nodes, levels + 1
    return levels, merges


def plan(asked: Asked) -> Plan:
    """Return what a run will take."""
    leases = max(1, -(-asked.tokens // asked.lease_tokens))
    levels, merges = tree_size(leases)
    segment = _segments(asked, leases)
    traffic = _traffic(asked, leases, levels)
    disk = _disk(asked, leases, levels, segment)
    seconds = _seconds(asked, traffic, leases, merges, levels, segment)
    events = None
    if (rate := asked.tokens_per_second) is not None:
        events = 4 / 3 * asked.workers * rate / asked.lease_tokens
    slowest = max(seconds, key=lambda name: seconds[name]) if seconds else None
    if seconds:
        seconds["in_all"] = _in_all(seconds)
    return Plan(
        leases=leases,
        levels=levels,
        merges=merges,
        segment=segment,
        memory=_memory(asked),
        disk=disk,
        traffic=traffic,
        seconds=seconds,
        events_per_second=events,
        bottleneck=slowest,
    )


def _kept(asked: Asked, nodes: float | int, width: float | int) -> float:
    """Return the triggers per list that all segments of a level keep, t for each full one.

    `width` leases lie under each; the first ones have nothing to be filtered by.
    """
    first = min(nodes, max(asked.workers / width, 1 / COVERED))
    return asked.t * (first + math.log(nodes / first) / COVERED)


def _segments(asked: Asked, leases: int) -> dict[str, float]:
    sentences = asked.lease_tokens / asked.sentence_tokens
    slots = asked.shape.lists * min(asked.t, sentences)
    sampled = min(SAMPLE, SAMPLE / leases)
    mean = asked.shape.lists * _kept(asked, leases, 1) / leases
    return {
        "full": segment_bytes(asked.shape, slots, sampled),
        "empty": segment_bytes(asked.shape, 0, sampled),
        "mean": segment_bytes(asked.shape, min(mean, slots), sampled),
    }


def _traffic(asked: Asked, leases: int, levels: int) -> dict[str, float]:
    """Return the bytes between workers and the shared folder."""
    written = []
    nodes, width = float(leases), 1.0
    for _ in range(levels + 1):
        slots = asked.shape.lists * _kept(asked, nodes, width) / nodes
        written.append(nodes * segment_bytes(asked.shape, slots, SAMPLE / nodes))
        nodes, width = max(1.0, nodes / FAN_IN), width * FAN_IN
    return {
        "sentences_read": asked.tokens * SENTENCE_BYTES,
        "segments_of_leases": written[0],
        "merges_read": sum(written[:-1]),
        "merges_written": sum(written[1:]),
        "model": 1.0 * asked.workers * asked.shape.parameters * DTYPES[asked.dtype],
    }


def _disk(asked: Asked, leases: int, levels: int, segment: dict[str, float]) -> dict[str, float]:
    """Return the bytes of the finished index by parts, and the peak of the shared folder."""
    parts = index_bytes(asked.shape, asked.t)
    index: dict[str, float] = {name: n * COMPRESSED[name] for name, n in parts.items()}
    index["sentences"] = asked.tokens * SENTENCE_BYTES
    index["vocabulary"] = asked.shape.vocabulary * TOKEN_BYTES
    index["index"] = sum(index.values())
    # Leases are read in order: of the last ones, those wait whose neighbours are not done.
    in_being = min(leases, asked.workers) + (FAN_IN - 1) * levels + 1
    index["shared_folder"] = in_being * segment["full"]
    return index


def _memory(asked: Asked) -> dict[str, float]:
    """Return the bytes that a worker, a merge and the leader hold."""
    shape, size = asked.shape, DTYPES[asked.dtype]
    slots = shape.all_memories * shape.lists * asked.t
    # Keys of the lists (8 bytes), as many candidates by half (16), then the triggers themselves.
    lists = 1.0 * slots * (8 + 8 + SLOT) + shape.all_memories * (4 * shape.lists + 24)
    wide = (3 if shape.gated else 2) * shape.memories + 8 * shape.hidden
    batch = 1.0 * asked.batch_tokens * wide * size
    model = 1.0 * shape.parameters * size
    layer = 1.0 * shape.memories * (shape.lists * asked.t * SLOT + COUNTS + 4 * SAMPLE)
    return {
        "model": model,
        "lists": lists,
        "batch": batch,
        "merge": (FAN_IN + 2) * layer,
        "worker": model + max(lists + batch, (FAN_IN + 2) * layer),
        "leader": LEADER + asked.workers * PER_WORKER,
    }


def _seconds(
    asked: Asked,
    traffic: dict[str, float],
    leases: int,
    merges: int,
    levels: int,
    segment: dict[str, float],
) -> dict[str, float]:
    """Return how long each part takes; those that go on at once are not added up."""
    rate = asked.tokens_per_second
    if rate is None:
        return {}
    shape = asked.shape
    busy = min(asked.workers, leases)
    moved = traffic["segments_of_leases"] + traffic["merges_read"] + traffic["merges_written"]
    one_merge = FAN_IN * segment["full"] * (1 / MERGED + 1.25 / asked.bandwidth)
    # A value goes through the output embedding as fast as a token through the blocks.
    values = 2 * shape.has_values * shape.all_memories * shape.hidden * shape.vocabulary
    return {
        "preparing": asked.tokens / PREPARED,
        "loading": shape.parameters * DTYPES[asked.dtype] / asked.bandwidth,
        "reading": asked.tokens / (busy * rate),
        "moving": (moved + traffic["sentences_read"]) / (busy * asked.bandwidth),
        "merging": traffic["merges_read"] / (busy * MERGED),
        "leading": 4 / 3 * leases / EVENTS,
        "last_merges": levels * one_merge,
        "values": values
        / (rate * shape.flops(asked.sentence_tokens / 2))
        / min(asked.workers, shape.layers),
    }


def _in_all(seconds: dict[str, float]) -> float:
    """Return the whole time: reading, moving and merging share the workers; the leader follows."""
    shared = seconds["reading"] + seconds["moving"] + seconds["merging"]
    one_by_one = ("preparing", "loading", "last_merges", "values")
    return max(shared, seconds["leading"]) + sum(seconds[name] for name in one_by_one)

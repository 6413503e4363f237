"""The settings of a run: everything that decides the bytes of an index."""

import hashlib
import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from ffmem.corpus.corpus import Corpus
from ffmem.errors import StoreError
from ffmem.indexing.manifest import ModelRecord, PerplexityRecord, StartRecord
from ffmem.indexing.options import Options
from ffmem.models.memories import Memories
from ffmem.networks.config import AdaptiveConfig
from ffmem.records import AnyRecord, Record


@dataclass(frozen=True, kw_only=True)
class Settings(Record):
    """Everything that decides the bytes of an index, before the corpus is read."""

    model: ModelRecord
    tokenizer: str
    corpus: dict[str, str | int | None]
    digest: str | None
    t: int
    prefixes: str
    compat: str | None
    start: str
    dtype: str
    batch_tokens: int
    lease_tokens: int
    threads: int
    device: str
    versions: dict[str, str]

    @classmethod
    def asked(cls, memories: Memories, corpus: Corpus, options: Options) -> "Settings":
        """Return the settings of a new run."""
        return cls(
            model=model_record(memories),
            tokenizer=memories.tokenizer.fingerprint,
            corpus=corpus.describe(),
            digest=corpus.digest(),
            t=options.t,
            prefixes=options.prefixes,
            compat=options.compat,
            start=options.start,
            dtype=str(memories.dtype).removeprefix("torch."),
            batch_tokens=options.batch_tokens,
            lease_tokens=options.lease_tokens,
            threads=options.threads or torch.get_num_threads(),
            device=memories.device.type,
            versions={name: version(name) for name in ("ffmem", "torch", "transformers")},
        )

    def differences(self, other: "Settings") -> list[str]:
        """Return how another run's settings differ, field by field."""
        found = []
        ours, others = asdict(self), asdict(other)
        for name, mine in ours.items():
            theirs = others[name]
            if isinstance(mine, dict):
                names = {key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)}
                if name == "corpus" and self.digest is not None and self.digest == other.digest:
                    names.discard("source")  # the same files, by another path
                found += [f"{name}.{k}: {theirs.get(k)} → {mine.get(k)}" for k in sorted(names)]
            elif mine != theirs:
                shown = "the corpus' files have changed, digest" if name == "digest" else name
                found.append(f"{shown}: {theirs} → {mine}")
        return found

    @property
    def fingerprint(self) -> str:
        """Return a name for runs with these settings."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """What is known once the corpus lies in the folder."""

    hash: str
    sentences: int
    tokens: int
    cut: int
    cut_tokens: int
    headings_dropped: int
    without_tokens: int
    start: StartRecord
    perplexity: PerplexityRecord | None
    control: int = 0
    """Sentences whose text writes out a control token."""


def model_record(memories: Memories) -> ModelRecord:
    """Return which model some memories belong to."""
    config = memories.config if isinstance(memories.config, AdaptiveConfig) else None
    kind = None if config is None else config.memory
    by_head = config is not None and kind in ("persistent", "lambda")
    return ModelRecord(
        source=memories.source,
        revision=memories.revision,
        hash=memories.fingerprint(),
        family=memories.family,
        layers=memories.n_layers,
        memories=memories.n_memories,
        hidden=memories.hidden,
        vocabulary=memories.vocabulary,
        activation=memories.activation,
        gated=memories.gated,
        context=memories.context,
        memory=kind,
        groups=config.num_attention_heads if config is not None and by_head else 1,
        has_values=memories.has_values,
    )


def read_record(kind: type[AnyRecord], path: Path) -> AnyRecord:
    """Return what a run committed to a file."""
    try:
        return kind.of(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise StoreError(
            f"{path} is damaged or was written by another version of ffmem ({error})."
            " Delete the folder and index again."
        ) from None

"""The configuration of an indexing run.

`IndexConfig` is what you choose: its fields are the options of `ffmem index`, the parameters of
`ffmem.index`, part of what a run records, and what a resumed run must agree with.
`IndexRunConfig` adds model, corpus and versions: everything that decides the bytes of an index.
`BuildOptions` change none of them. `CorpusFacts` is what reading the corpus adds.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ffmem.config_fields import check_options, option
from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.manifest import (
    FORMAT,
    NO_PROJECTION,
    PROJECTION,
    CorpusRecord,
    Manifest,
    ModelRecord,
    SourceRecord,
    StartRecord,
)
from ffmem.models.arguments import MAX_THREADS
from ffmem.parallel import ExecutionConfig
from ffmem.records import NotARecord, Record

if TYPE_CHECKING:
    from ffmem.corpus.corpus import Corpus
    from ffmem.models.memories import Memories
    from ffmem.storage import Storage

COMPAT = "ff-layers"

CONFIG_FILE = "partials/config.json"
CORPUS_FILE = "partials/corpus.json"


@dataclass(frozen=True, kw_only=True)
class IndexConfig(Record):
    """What you choose for a run; every choice is recorded."""

    t: int = option(
        "Triggers to keep per memory and sign.", 50, minimum=1, maximum=10_000, flag="-t"
    )
    prefixes: str = option(
        "Keep the best prefix of each sentence, or all.", "best", choices=("best", "all")
    )
    compat: str | None = option(
        "Match the authors' code: prefixes of length 0 to n-1.", None, choices=(COMPAT,)
    )
    start: str = option(
        "Start token of every sentence: auto, none, bos, eos, or a token.", "auto", metavar="TOKEN"
    )
    batch_tokens: int = option("Tokens per batch.", 4096, minimum=1, maximum=1 << 24)
    chunk_tokens: int = option(
        "Tokens per chunk, the unit of work.", 65_536, minimum=1, maximum=1 << 30
    )
    threads: int | None = option(
        "CPU threads per worker. Default: all cores, shared among the workers; 1 on a cluster.",
        None,
        minimum=1,
        maximum=MAX_THREADS,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.compat and self.prefixes != "best":
            raise FfmemError(
                f"--compat {COMPAT} keeps the best prefix of each sentence. Drop --prefixes all."
            )


@dataclass(frozen=True)
class BuildOptions(ExecutionConfig):
    """How a run is carried out; none of it changes the bytes of the index."""

    shared: str | None = option(
        "Folder or URL that all workers can access, if they do not share the index folder.",
        None,
        metavar="FOLDER|URL",
    )
    bad_sentences: str = option(
        "Stop at sentences that the model cannot read, or skip them.",
        "stop",
        choices=("stop", "skip"),
    )
    device: str = option(
        "auto, cpu, cuda, cuda:N, mps, or split (layers over all GPUs).", "auto", metavar="DEVICE"
    )

    def check(self) -> None:
        """Raise if Ray or the shared storage is missing, before anything is loaded."""
        super().check()
        if self.shared is not None:
            from ffmem.storage import open_storage

            open_storage(self.shared)


@dataclass(frozen=True, kw_only=True)
class IndexRunConfig(Record):
    """Everything that decides the bytes of an index, before the corpus is read."""

    model: ModelRecord
    tokenizer: str
    corpus: dict[str, str | int | bool | None]
    """Settings, and the SHA-256 of its files."""
    index: IndexConfig
    dtype: str
    device: str
    versions: dict[str, str]

    @classmethod
    def create(
        cls, memories: "Memories", corpus: "Corpus", config: IndexConfig
    ) -> "IndexRunConfig":
        """Return the configuration of a new run."""
        import torch

        return cls(
            model=model_record(memories),
            tokenizer=memories.tokenizer.fingerprint,
            corpus=corpus.identify(),
            index=replace(config, threads=config.threads or torch.get_num_threads()),
            dtype=str(memories.dtype).removeprefix("torch."),
            device=memories.device.type,
            versions={name: version(name) for name in ("ffmem", "torch", "transformers")},
        )

    @property
    def threads(self) -> int:
        """Threads per worker."""
        assert self.index.threads is not None, "create() has set it"
        return self.index.threads

    @property
    def fingerprint(self) -> str:
        """A name for runs with this configuration."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def settings(self) -> dict[str, Any]:
        """Return what a resumed run must agree with; the options of `IndexConfig` by their name."""
        settings = asdict(self)
        options: dict[str, Any] = settings.pop("index")
        return options | settings


@dataclass(frozen=True, kw_only=True)
class CorpusFacts(Record):
    """What is known once the corpus has been read."""

    source: SourceRecord
    """As in the manifest, but without skipped sentences."""
    start: StartRecord


def model_record(memories: "Memories") -> ModelRecord:
    """Return the record of a model for the manifest of an index."""
    from ffmem.networks.config import AdaptiveConfig

    config = memories.config if isinstance(memories.config, AdaptiveConfig) else None
    kind = config.memory if config else None
    groups = config.num_attention_heads if config and kind in ("persistent", "lambda") else 1
    return ModelRecord(
        source=memories.source,
        revision=memories.revision,
        hash=memories.fingerprint(),
        family=memories.family,
        layers=memories.n_layers,
        banks=memories.layout.layers,
        hidden=memories.hidden,
        vocabulary=memories.vocabulary,
        activation=memories.activation,
        gated=memories.gated,
        context=memories.context,
        memory=kind,
        groups=groups,
        has_values=memories.has_values,
        adapter=memories.adapter,
    )


def make_manifest(
    run: IndexRunConfig,
    facts: CorpusFacts,
    skipped: list[int],
    skipped_tokens: int,
    files: dict[str, str],
) -> Manifest:
    """Return the manifest of a run over one source."""
    source = replace(facts.source, skipped=skipped, skipped_tokens=skipped_tokens)
    return Manifest(
        format=FORMAT,
        model=run.model,
        tokenizer=run.tokenizer,
        corpus=CorpusRecord.join([source]),
        t=run.index.t,
        prefixes=run.index.prefixes,
        compat=run.index.compat,
        coefficient=run.model.kind.definition,
        projection=PROJECTION if run.model.has_values else NO_PROJECTION,
        dtype=run.dtype,
        start=facts.start,
        versions=run.versions,
        files=files,
    )


def read_run(storage: "Storage") -> IndexRunConfig | None:
    """Return the configuration of the run in a storage, None if there is none."""
    run: IndexRunConfig | None = _read(IndexRunConfig, storage, CONFIG_FILE)
    return run


def read_facts(storage: "Storage") -> CorpusFacts | None:
    """Return the facts about a run's corpus, None before it has been read."""
    facts: CorpusFacts | None = _read(CorpusFacts, storage, CORPUS_FILE)
    return facts


def require_run(storage: "Storage") -> tuple[IndexRunConfig, CorpusFacts]:
    """Return the configuration and the corpus facts of a prepared run; raise if there is none."""
    run, facts = read_run(storage), read_facts(storage)
    if run is None or facts is None:
        raise StoreError(f"There is no prepared run in {storage.shown}.")
    return run, facts


def _read(kind: Any, storage: "Storage", name: str) -> Any:
    text = storage.read_text(name)
    if text is None:
        return None
    try:
        return kind.of(json.loads(text))
    except (ValueError, NotARecord) as error:
        raise StoreError(
            f"{name} in {storage.shown} is damaged or was written by another version of ffmem"
            f" ({error}). Delete the folder and index again."
        ) from None

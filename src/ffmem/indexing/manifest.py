"""The manifest of an index. It is written last, so it exists only when the rest is complete.

It records everything that decides the bytes of the index (model, tokenizer, corpus, settings,
versions) and the hash of every file. It holds no time and no path of the machine, so the same run
gives the same bytes.
"""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ffmem.cells import BankRecord, Layout
from ffmem.errors import StoreError
from ffmem.files import sha256, write_text
from ffmem.hub import PREFIX, is_hub_address
from ffmem.indexing.memory import Kind
from ffmem.models.arguments import AdapterRecord
from ffmem.records import NotARecord, Record

FORMAT = 4
"""Version of the index folder's layout."""

PROJECTION = "folded"

NO_PROJECTION = "none"
"""For memories without static values, as in a lambda layer."""


@dataclass(frozen=True, kw_only=True)
class ModelRecord(Record):
    """Which model the memories belong to."""

    source: str
    revision: str | None
    hash: str
    family: str
    layers: int
    banks: list[list[BankRecord]]
    """The banks of each layer: none, the dense part, experts."""
    hidden: int
    vocabulary: int
    activation: str
    gated: bool
    context: int | None
    memory: str | None = None
    """Kind of memory, relu … lambda, of models that ffmem trains; None for other families."""
    groups: int = 1
    """Heads that own equal ranges of a layer's memories; 1 if memories belong to no head."""
    has_values: bool = True
    """False for a lambda layer, whose values are computed from the input."""
    adapter: AdapterRecord | None = None
    """The adapter that was merged into the model; `hash` is that of the merged weights."""

    def __post_init__(self) -> None:
        if len(self.banks) != self.layers:
            raise NotARecord(f"banks has {len(self.banks)} layers, but layers is {self.layers}")

    @property
    def shown(self) -> str:
        """Its source, with that of its adapter."""
        return self.source if self.adapter is None else f"{self.source} + {self.adapter.source}"

    @cached_property
    def kind(self) -> Kind:
        """The kind of its memories."""
        width = max(self.layout.widths)
        experts = self.layout.has_experts
        return Kind(self.memory, self.gated, width, self.groups, self.has_values, experts)

    @cached_property
    def layout(self) -> Layout:
        """The banks of each layer, and the number of every memory."""
        return Layout(self.banks)


@dataclass(frozen=True, kw_only=True)
class StartRecord(Record):
    """The token in front of every sentence, and how it was chosen."""

    requested: str
    token: str | None
    id: int | None
    chosen_by: str
    losses: dict[str, float]
    """Mean loss per token with each candidate, if they were compared."""


@dataclass(frozen=True, kw_only=True)
class PerplexityRecord(Record):
    """The model's perplexity on tokens t₁ … tₙ₋₁ of some sentences of the corpus."""

    per_token: float
    sentences: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class SourceRecord(Record):
    """One CORPUS argument, and how it was read."""

    source: str
    unit: str
    column: str
    detokenize: str | None
    limit: int | None
    hash: str
    digest: str | None
    """SHA-256 of the source's files; None if it has none."""
    sentences: int
    tokens: int
    cut: int
    """Sentences that were truncated to the model's context."""
    cut_tokens: int
    """Tokens that truncation dropped."""
    headings_dropped: int
    without_tokens: int
    """Sentences without tokens, which were dropped."""
    perplexity: PerplexityRecord | None
    chunk_tokens: int
    batch_tokens: int
    threads: int
    device: str
    skipped: list[int] = field(default_factory=list)
    """Sentences that the model could not read, by their number within the source."""
    skipped_tokens: int = 0
    """Their tokens that end a prefix."""
    content_only: bool = False
    """Whether tokens of the chat template end no prefix."""
    left_out: int = 0
    """Tokens that end no prefix."""
    conversations: int = 0
    """Sentences that are conversations, written by the model's chat template."""
    control: int = 0
    """Sentences whose text spells out a control token, such as `</s>`; it is read as one."""


@dataclass(frozen=True, kw_only=True)
class CorpusRecord(Record):
    """All sources of an index."""

    hash: str
    sentences: int
    tokens: int
    sources: list[SourceRecord]

    @property
    def prefixes(self) -> int:
        """Number of prefixes: one per token, without those left out and skipped sentences."""
        missing = sum(source.left_out + source.skipped_tokens for source in self.sources)
        return self.tokens - missing

    @classmethod
    def join(cls, sources: list[SourceRecord]) -> "CorpusRecord":
        """Return the record of several sources, in order."""
        hashes = "\n".join(source.hash for source in sources)
        return cls(
            hash=hashlib.sha256(hashes.encode()).hexdigest(),
            sentences=sum(source.sentences for source in sources),
            tokens=sum(source.tokens for source in sources),
            sources=sources,
        )


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """Everything that an index records about itself."""

    format: int
    model: ModelRecord
    tokenizer: str
    """SHA-256 of the vocabulary and all settings that affect token ids."""
    corpus: CorpusRecord
    t: int
    prefixes: str
    compat: str | None
    coefficient: str
    projection: str
    dtype: str
    start: StartRecord
    versions: dict[str, str]
    files: dict[str, str]
    """SHA-256 of every file of the index except this one."""

    def write(self, folder: Path) -> None:
        """Write the manifest, which completes the index."""
        write_text(folder / "manifest.json", self.to_json())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Return the manifest of a complete index."""
        path = folder / "manifest.json"
        advice = f"Delete {folder}, and run `ffmem index` again."
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise StoreError(_why_missing(folder)) from None
        except OSError as error:
            raise StoreError(f"Cannot read the manifest {path} ({error}). {advice}") from None
        return cls.parse(content, str(path), advice)

    @classmethod
    def parse(cls, text: bytes, path: str, advice: str) -> "Manifest":
        """Return the manifest in a file's bytes; `advice` says what to do if they are none."""
        try:
            content: Any = json.loads(text.decode("utf-8"))
        except ValueError as error:
            raise StoreError(f"Cannot read the manifest {path} ({error}). {advice}") from None
        format = content.get("format") if isinstance(content, dict) else None
        if format != FORMAT:
            raise StoreError(
                f"{path} has the format {format!r}; this version of ffmem reads format {FORMAT}."
                " Use the version that wrote it, or build the index again."
            )
        try:
            return cls.of(content)
        except NotARecord as error:
            raise StoreError(f"{path} is not a manifest of ffmem: {error}. {advice}") from None


def _why_missing(folder: Path) -> str:
    """Return why a folder has no manifest, and what to do."""
    if is_hub_address(folder):
        name = str(folder).removeprefix(PREFIX)
        return (
            f"{folder} is on the Hub, but this needs a local index. Run `ffmem pull"
            f" {name} DIR`, then use DIR. (`ffmem show` and ffmem.open read it from the Hub.)"
        )
    if not folder.is_dir():
        return f"There is no index at {folder}: no such folder. Build one with `ffmem index`."
    if (folder / "partials").is_dir():
        return (
            f"The index at {folder} is not finished."
            " If it is running, wait (`ffmem status` shows progress); if not, rerun the same"
            " `ffmem index` command to resume it."
        )
    return (
        f"{folder} is not an index: it has no manifest.json. Build one with `ffmem index` in an"
        " empty folder."
    )


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file that belongs to an index, except the manifest."""
    files = [folder / "sentences.parquet", folder / "vocabulary.parquet"]
    for kind in ("triggers", "stats", "samples", "values", "keys", "agreement"):
        files += sorted((folder / kind).glob("*.parquet"))
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}

"""What an index is, in one small file: written last, so that it exists only when the rest does.

It names everything that decides the bytes of the index: model, tokenizer, corpus, settings,
versions; and the hash of every file. It holds no time and no place, so that the same run
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
from ffmem.indexing.kind import Kind
from ffmem.records import NotARecord, Record

FORMAT = 2
"""Version of the index folder's layout."""

PROJECTION = "folded"

NO_PROJECTION = "none"
"""Of an index whose memories have no static values: a lambda layer's."""


@dataclass(frozen=True, kw_only=True)
class ModelRecord(Record):
    """Which model the memories belong to."""

    source: str
    revision: str | None
    hash: str
    family: str
    layers: int
    banks: list[list[BankRecord]]
    """Of each layer: none, the dense part, experts."""
    hidden: int
    vocabulary: int
    activation: str
    gated: bool
    context: int | None
    memory: str | None = None
    """The kind of memory in a model of ours: relu … lambda; None in other families."""
    groups: int = 1
    """Heads that a layer's memories belong to, in equal parts; 1 where no head owns any."""
    has_values: bool = True
    """Whether memories have static values; those of a lambda layer have none."""

    def __post_init__(self) -> None:
        if len(self.banks) != self.layers:
            raise NotARecord(f"banks is of {len(self.banks)} layers, and layers is {self.layers}")

    @cached_property
    def kind(self) -> Kind:
        """The kind of its memories, in words."""
        width = max(self.layout.widths)
        return Kind(self.memory, self.gated, width, self.groups, self.has_values)

    @cached_property
    def layout(self) -> Layout:
        """Where each memory stands."""
        return Layout(self.banks)


@dataclass(frozen=True, kw_only=True)
class StartRecord(Record):
    """The token in front of every sentence, and how it was chosen."""

    asked: str
    token: str | None
    id: int | None
    chosen_by: str
    losses: dict[str, float]
    """Mean loss per token with each candidate in front, where they were compared."""


@dataclass(frozen=True, kw_only=True)
class PerplexityRecord(Record):
    """How well the model predicts a sample of what was read: t₁ … tₙ₋₁ of some sentences."""

    per_token: float
    sentences: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class SourceRecord(Record):
    """One CORPUS argument: what was read, how, and by which versions on how many threads."""

    source: str
    unit: str
    column: str
    detokenize: str | None
    limit: int | None
    hash: str
    digest: str | None
    """SHA-256 of the raw files behind the source, where there are any."""
    sentences: int
    tokens: int
    cut: int
    """Sentences longer than the context, cut there."""
    cut_tokens: int
    """How many tokens they lost."""
    headings_dropped: int
    without_tokens: int
    """Sentences that gave no token, left out."""
    perplexity: PerplexityRecord | None
    chunk_tokens: int
    batch_tokens: int
    threads: int
    device: str
    skipped: list[int] = field(default_factory=list)
    """Sentences, by their number in the source, that could not be read and were left out."""
    skipped_tokens: int = 0
    control: int = 0
    """Sentences whose text writes out a control token, such as `</s>`: it was taken as one."""


@dataclass(frozen=True, kw_only=True)
class CorpusRecord(Record):
    """All sources together."""

    hash: str
    sentences: int
    tokens: int
    sources: list[SourceRecord]

    @property
    def prefixes(self) -> int:
        """How many prefixes were read: one per token, sentences that were left out aside."""
        return self.tokens - sum(source.skipped_tokens for source in self.sources)

    @classmethod
    def joined(cls, sources: list[SourceRecord]) -> "CorpusRecord":
        """Return the record of sources in their order."""
        joined = "\n".join(source.hash for source in sources)
        return cls(
            hash=hashlib.sha256(joined.encode()).hexdigest(),
            sentences=sum(source.sentences for source in sources),
            tokens=sum(source.tokens for source in sources),
            sources=sources,
        )


@dataclass(frozen=True, kw_only=True)
class Manifest(Record):
    """Everything that an index states about itself."""

    format: int
    model: ModelRecord
    tokenizer: str
    """SHA-256 over what decides token ids."""
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
    """SHA-256 of every file of the index but this one."""

    def write(self, folder: Path) -> None:
        """Commit the manifest: from here on the index is whole."""
        write_text(folder / "manifest.json", self.to_json())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Return the manifest of a whole index."""
        path = folder / "manifest.json"
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise StoreError(_missing(folder)) from None
        except (ValueError, OSError) as error:
            raise StoreError(
                f"{path} is not a readable manifest ({error}). Make the index again."
            ) from None
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise StoreError(
                f"{path} is not a manifest of this version of ffmem: format {FORMAT} was expected,"
                f" {found!r} found. Use the version that wrote it, or make the index again."
            )
        try:
            return cls.of(content)
        except NotARecord as error:
            raise StoreError(
                f"{path} is not a manifest that ffmem wrote: {error}. Make the index again."
            ) from None


def _missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"There is no index at {folder}: no such folder. Make one with `ffmem index`."
    if (folder / "partials").is_dir():
        return (
            f"The index at {folder} is not finished."
            " Rerun the same `ffmem index` command to resume it."
        )
    return f"{folder} is not an index: it has no manifest.json. Make one with `ffmem index`."


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file that belongs to an index, except the manifest."""
    files = [folder / "sentences.parquet", folder / "vocabulary.parquet"]
    for kind in ("triggers", "stats", "samples", "values"):
        files += sorted((folder / kind).glob("*.parquet"))
    return {path.relative_to(folder).as_posix(): sha256(path) for path in files}

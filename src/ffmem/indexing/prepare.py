"""Before the pass: the corpus is written to the folder and cut, and the start token is chosen.

    partials/config.json → sentences.parquet → partials/corpus.json → vocabulary, chunks

Each file is committed before the next, so a run that was stopped does not repeat a step. Only this
needs the model in the main process; workers do everything after.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy import ndarray

from ffmem.corpus.corpus import Corpus, CorpusReader
from ffmem.corpus.sentences import check_token_ids, window_size
from ffmem.errors import CorpusError, FfmemError, StoreError
from ffmem.files import write_text
from ffmem.indexing.chunks import CHUNKS, Chunk, cut, read_chunks, write_chunks
from ffmem.indexing.config import (
    COMPAT,
    FACTS,
    RUN,
    CorpusFacts,
    IndexConfig,
    RunConfig,
    read_facts,
    read_run,
)
from ffmem.indexing.partials import Partials
from ffmem.indexing.sample import Sample, draw
from ffmem.indexing.sentences import Sentences, write_sentences
from ffmem.indexing.start import choose
from ffmem.indexing.store import SHARED
from ffmem.indexing.tables import write_table
from ffmem.indexing.topk import MAX_PREFIXES
from ffmem.models.arguments import use_threads
from ffmem.models.memories import Memories
from ffmem.progress import Progress
from ffmem.storage import Storage, open_storage
from ffmem.text import pluralize

SENTENCES = "sentences.parquet"
VOCABULARY = "vocabulary.parquet"


@dataclass(frozen=True)
class Plan:
    """A prepared run: its configuration, its corpus, its chunks, and where its files are."""

    folder: Path
    storage: Storage
    """Where workers write: the index's own folder, or the run's folder in `--shared`."""
    run: RunConfig
    facts: CorpusFacts
    chunks: list[Chunk]
    sample: Sample

    @property
    def partials(self) -> Partials:
        """The run's partials."""
        return Partials(self.storage, self.run.fingerprint)

    @property
    def sampled_chunks(self) -> set[int]:
        """The chunks with sampled prefixes."""
        firsts = np.array([chunk.first_prefix for chunk in self.chunks])
        return set((np.searchsorted(firsts, self.sample.prefixes, side="right") - 1).tolist())

    def missing_chunks(self) -> list[Chunk]:
        """Return the chunks that no partial covers."""
        kept, _ = self.partials.committed()
        covered = frozenset[int]().union(*(partial.chunks for partial in kept))
        return [chunk for chunk in self.chunks if chunk.number not in covered]


def configure(
    memories: Memories, corpus: Corpus, folder: Path, config: IndexConfig, progress: Progress
) -> RunConfig:
    """Return the configuration of the run in a folder, new or resumed; refuse another one's."""
    run = RunConfig.create(memories, corpus, config)
    before = read_run(Storage(folder))
    if before is None:
        write_text(folder / RUN, run.to_json())
        return run
    if config.threads is None:
        run = replace(run, index=replace(run.index, threads=before.index.threads))
    if differences := run.differences(before):
        raise StoreError(
            f"{folder} holds an unfinished index with other settings: {'; '.join(differences)}."
            " Use the same settings to resume it, choose another folder, or delete it."
        )
    progress.say(f"Resuming the unfinished index in {folder}.")
    return before


def prepare(
    memories: Memories,
    corpus: Corpus,
    folder: Path,
    run: RunConfig,
    shared: str | None,
    progress: Progress,
) -> Plan:
    """Write the corpus to the folder, choose the start token and cut chunks, where not done yet."""
    storage = Storage(folder)
    if (facts := read_facts(storage)) is None:
        with use_threads(run.threads):
            facts = _read_corpus(memories, corpus, folder, run.index, progress)
        write_text(folder / FACTS, facts.to_json())
    if not (folder / VOCABULARY).exists():
        write_vocabulary(folder / VOCABULARY, memories)
    sentences = Sentences(folder / SENTENCES)
    if not storage.exists(CHUNKS):
        write_chunks(storage, cut(sentences.lengths(), run.index.chunk_tokens))
    if shared is not None:
        storage = open_storage(shared, f"ffmem-{run.fingerprint}")
        write_text(folder / SHARED, storage.url)
        (folder / SHARED).chmod(0o600)  # a URL may hold a password
        for name in (SENTENCES, RUN, FACTS, CHUNKS):
            if not storage.exists(name):
                storage.upload(folder / name, name)
    sample = draw(facts.hash, sentences.lengths(), run.index.compat is not None)
    return Plan(folder, storage, run, facts, read_chunks(storage), sample)


def _read_corpus(
    memories: Memories, corpus: Corpus, folder: Path, config: IndexConfig, progress: Progress
) -> CorpusFacts:
    """Write the corpus to the folder, and choose the start token by its first chunk."""
    size, context = window_size(corpus.unit), memories.context
    if size is not None and context is not None and size >= context:
        raise CorpusError(
            f"--unit {corpus.unit} is too wide: the model reads {context} tokens at most, a start"
            f" token included. Use window:{context - 1} or less."
        )
    progress.say(f"Reading {corpus.source}.")
    reading = corpus.sentences(memories.tokenizer)
    rows = _Truncated(reading, memories)
    totals = write_sentences(folder / SENTENCES, rows)
    if totals.n_places > MAX_PREFIXES:
        raise CorpusError(
            f"The corpus has {totals.n_places:,} prefixes, and one index holds {MAX_PREFIXES:,}."
            " Index it in parts, then join them with `ffmem merge`."
        )
    sentences = Sentences(folder / SENTENCES)
    first = next(cut(sentences.lengths(), config.chunk_tokens))
    some = [row.ids for row in sentences.rows(0, first.n_sentences)]
    chosen = choose(memories, some, config.start)
    if config.compat and chosen.start.id is None:
        raise FfmemError(
            f"--compat {COMPAT} counts the start token alone as a prefix, and there is no start"
            " token. Name one with --start."
        )
    facts = CorpusFacts(
        hash=totals.hash,
        sentences=totals.n_sentences,
        tokens=totals.n_tokens,
        cut=rows.n_cut,
        cut_tokens=rows.n_lost,
        headings_dropped=reading.n_headings,
        without_tokens=reading.n_without_tokens,
        start=chosen.start,
        perplexity=chosen.perplexity,
        control=reading.n_control,
    )
    for line in _summary(facts):
        progress.say(line)
    return facts


def write_vocabulary(path: Path, memories: Memories) -> None:
    """Write every token as it is shown."""
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    ids: ndarray = np.arange(len(shown), dtype=np.int32)
    write_table(path, pa.table({"id": ids, "token": pa.array(shown, pa.string())}))


def _summary(facts: CorpusFacts) -> Iterator[str]:
    """Return what to say of a corpus."""
    yield f"Corpus: {pluralize(facts.sentences, 'sentences')}, {pluralize(facts.tokens, 'tokens')}."
    if facts.headings_dropped:
        yield f"Dropped {pluralize(facts.headings_dropped, 'headings')}."
    if facts.without_tokens:
        yield f"Dropped {pluralize(facts.without_tokens, 'sentences')} without tokens."
    if facts.cut:
        yield (
            f"Truncated {pluralize(facts.cut, 'sentences')} to the model's context, by"
            f" {pluralize(facts.cut_tokens, 'tokens')} in all."
        )
    if facts.control:
        yield (
            f"{pluralize(facts.control, 'sentences')} spell out a control token; it is read as one."
        )
    token = "none" if facts.start.token is None else facts.start.token
    losses = ", ".join(f"{name} {loss:.3f}" for name, loss in facts.start.losses.items())
    yield f"Start token: {token} ({facts.start.chosen_by}; loss per token: {losses})."
    if facts.perplexity:
        tokens = pluralize(facts.perplexity.tokens, "tokens")
        of = pluralize(facts.perplexity.sentences, "sentences")
        yield f"Perplexity per token: {facts.perplexity.per_token:,.1f} (on {tokens} of {of})."


class _Truncated:
    """The sentences of a corpus, truncated to the model's context, and counted."""

    def __init__(self, reading: CorpusReader, memories: Memories) -> None:
        self.n_cut = self.n_lost = 0
        self._reading = reading
        self._memories = memories

    def __iter__(
        self,
    ) -> Iterator[tuple[str | None, list[int], list[int] | None, list[int] | None]]:
        memories = self._memories
        # One position is left for a start token, whether there will be one or not.
        most = None if memories.context is None else memories.context - 1
        for text, ids, starts, ends in check_token_ids(self._reading, memories.vocabulary):
            if most is not None and len(ids) > most:
                self.n_cut += 1
                self.n_lost += len(ids) - most
                ids = ids[:most]
                starts, ends = starts and starts[:most], ends and ends[:most]
            yield text, ids, starts, ends

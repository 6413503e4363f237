"""Before the pass: write the corpus to the folder, choose the start token, cut chunks.

    partials/config.json → sentences.parquet → partials/corpus.json → vocabulary, chunks

Each file is committed before the next, so a resumed run repeats no step. Only this part needs the
model in the main process; workers do the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy import ndarray

from ffmem.corpus.corpus import Corpus, CorpusReader
from ffmem.corpus.sentences import TokenSentence, check_token_ids, window_size
from ffmem.errors import CorpusError, FfmemError, StoreError
from ffmem.files import write_text
from ffmem.indexing.chunks import CHUNKS_FILE, Chunk, cut_chunks, read_chunks, write_chunks
from ffmem.indexing.config import (
    COMPAT,
    CONFIG_FILE,
    CORPUS_FILE,
    BuildOptions,
    CorpusFacts,
    IndexConfig,
    IndexRunConfig,
    read_facts,
    read_run,
)
from ffmem.indexing.manifest import SourceRecord, StartRecord
from ffmem.indexing.partials import Partials
from ffmem.indexing.results import Sample, draw_sample
from ffmem.indexing.sentences import Sentences, write_sentences
from ffmem.indexing.start import FIRST_TOKENS, choose_start
from ffmem.indexing.store import SHARED_FILE
from ffmem.indexing.tables import write_table
from ffmem.indexing.topk import MAX_PREFIXES
from ffmem.models.arguments import use_threads
from ffmem.models.memories import Memories
from ffmem.models.tokenizer import AS_IN_TRAINING
from ffmem.progress import Progress
from ffmem.records import check_same_settings
from ffmem.storage import Storage, open_storage
from ffmem.text import format_share, pluralize

SENTENCES = "sentences.parquet"
VOCABULARY = "vocabulary.parquet"

MIN_UNKNOWN = 0.01
"""Share of unknown tokens that calls for a warning."""


@dataclass(frozen=True)
class IndexPlan:
    """Everything that a run needs: configuration, corpus, chunks, sample, and where files go."""

    folder: Path
    storage: Storage
    """Where workers write: the index folder, or the run's folder under `--shared`."""
    run_config: IndexRunConfig
    facts: CorpusFacts
    chunks: list[Chunk]
    sample: Sample

    @property
    def partials(self) -> Partials:
        """The run's partials."""
        return Partials(self.storage, self.run_config.fingerprint)

    @property
    def sampled_chunks(self) -> set[int]:
        """The chunks with sampled prefixes."""
        firsts = np.array([chunk.first_prefix for chunk in self.chunks])
        return set((np.searchsorted(firsts, self.sample.prefixes, side="right") - 1).tolist())

    def missing_chunks(self) -> list[Chunk]:
        """Return the chunks that no partial covers."""
        covered = self.partials.covered_chunks()
        return [chunk for chunk in self.chunks if chunk.number not in covered]


def prepare(
    memories: Memories,
    corpus: Corpus,
    folder: Path,
    config: IndexConfig,
    options: BuildOptions,
    progress: Progress,
) -> IndexPlan:
    """Return the plan of a new or resumed run, after the steps that are not done yet."""
    run = _configure(memories, corpus, folder, config, options.threads, progress)
    shared = _find_shared(folder, run.fingerprint, options.shared)
    storage = Storage(folder)
    if (facts := read_facts(storage)) is None:
        with use_threads(run.threads):
            facts = _read_corpus(memories, corpus, folder, run, progress)
        write_text(folder / CORPUS_FILE, facts.to_json())
    if not (folder / VOCABULARY).exists():
        _write_vocabulary(folder / VOCABULARY, memories)
    sentences = Sentences(folder / SENTENCES)
    if not storage.exists(CHUNKS_FILE):
        write_chunks(storage, cut_chunks(sentences.lengths(), run.index.chunk_tokens))
    if shared is not None:
        storage = shared
        write_text(folder / SHARED_FILE, storage.url)
        (folder / SHARED_FILE).chmod(0o600)  # a URL may hold a password
        for name in (SENTENCES, CONFIG_FILE, CORPUS_FILE, CHUNKS_FILE):
            if not storage.exists(name):
                storage.upload(folder / name, name)
    sample = draw_sample(
        facts.source.hash,
        sentences.lengths(),
        run.index.compat is not None,
        sentences.contents(),
    )
    return IndexPlan(folder, storage, run, facts, read_chunks(storage), sample)


def _configure(
    memories: Memories,
    corpus: Corpus,
    folder: Path,
    config: IndexConfig,
    default_threads: int | None,
    progress: Progress,
) -> IndexRunConfig:
    """Return the configuration of a new or resumed run; raise if the folder holds another one."""
    before = read_run(Storage(folder))
    if config.threads is None:
        # Threads decide the last bits of a sum: a resumed run keeps its number.
        config = replace(config, threads=default_threads if before is None else before.threads)
    run = IndexRunConfig.create(memories, corpus, config)
    if before is None:
        write_text(folder / CONFIG_FILE, run.to_json())
        return run
    check_same_settings(f"{folder} holds an unfinished index", before.settings(), run.settings())
    progress.say(f"Resuming the unfinished index in {folder}.")
    return before


def _find_shared(folder: Path, run_id: str, shared: str | None) -> Storage | None:
    """Return the storage that workers share, by default the one that a resumed run has used.

    Raise if the run has results in another place: they would be lost.
    """
    recorded = folder / SHARED_FILE
    before = open_storage(recorded.read_text("utf-8")) if recorded.exists() else None
    if shared is None:
        return before
    requested = open_storage(shared, f"ffmem-{run_id}")
    used = before or Storage(folder)
    if requested.shown != used.shown and not Partials(used, run_id).is_empty():
        how = "without --shared" if before is None else "without --shared, or with the same one"
        raise StoreError(
            f"The unfinished index in {folder} has its results in {used.shown}, not in"
            f" {requested.shown}. Rerun the command {how}, or choose another folder."
        )
    return requested


def _read_corpus(
    memories: Memories, corpus: Corpus, folder: Path, run: IndexRunConfig, progress: Progress
) -> CorpusFacts:
    """Write the corpus to the folder, and choose the start token on its first sentences."""
    config = run.index
    size, context = window_size(corpus.unit), memories.context
    if size is not None and context is not None and size >= context:
        raise CorpusError(
            f"--unit {corpus.unit} is too wide: the model reads {context} tokens at most, including"
            f" a start token. Use window:{context - 1} or less."
        )
    if corpus.content_only and config.compat:
        raise FfmemError(
            f"--content-only does not work with --compat {COMPAT}, whose prefixes end before their"
            " last token. Drop one of them."
        )
    progress.say(f"Reading {corpus.source}.")
    reading = corpus.sentences(memories.tokenizer)
    rows = TruncatedRows(reading, memories)
    totals = write_sentences(folder / SENTENCES, rows, corpus.content_only)
    if totals.n_sentences == 0:
        raise CorpusError(
            f"No conversation of {corpus.source!r} has content within the model's context of"
            f" {context} tokens. Use shorter ones, or drop --content-only."
        )
    if totals.n_places > MAX_PREFIXES:
        raise CorpusError(
            f"The corpus has {totals.n_places:,} prefixes; an index holds at most"
            f" {MAX_PREFIXES:,}. Index it in parts, then join them with `ffmem merge`."
        )
    sentences = Sentences(folder / SENTENCES)
    beginning = next(cut_chunks(sentences.lengths(), FIRST_TOKENS))
    first = [row.ids for row in sentences.rows(0, beginning.n_sentences)]
    progress.say("Measuring start tokens and perplexity.")
    requested = config.start
    if requested == "auto" and reading.n_conversations and memories.tokenizer.own_start is None:
        requested = "none"  # the chat template brings its own
    start, perplexity = choose_start(memories, first, requested)
    if requested != config.start:
        start = replace(start, requested=config.start, chosen_by="the chat template's own")
    if config.compat and start.id is None:
        raise FfmemError(
            f"--compat {COMPAT} counts the start token alone as a prefix, but there is no start"
            " token. Choose one with --start."
        )
    options: dict[str, Any] = run.corpus
    source = SourceRecord(
        **options,
        hash=totals.hash,
        sentences=totals.n_sentences,
        tokens=totals.n_tokens,
        cut=rows.n_cut,
        cut_tokens=rows.n_cut_tokens,
        headings_dropped=reading.n_headings,
        without_tokens=reading.n_without_tokens + rows.n_empty,
        left_out=totals.left_out,
        conversations=reading.n_conversations,
        perplexity=perplexity,
        chunk_tokens=config.chunk_tokens,
        batch_tokens=config.batch_tokens,
        threads=run.threads,
        device=run.device,
        control=reading.n_control,
    )
    for line in _summary(source, start, rows.n_unknown):
        progress.say(line)
    return CorpusFacts(source=source, start=start)


def _write_vocabulary(path: Path, memories: Memories) -> None:
    """Write the displayed form of every token."""
    shown = memories.tokenizer.token_texts(memories.vocabulary)
    ids: ndarray = np.arange(len(shown), dtype=np.int32)
    write_table(path, pa.table({"id": ids, "token": pa.array(shown, pa.string())}))


def _summary(source: SourceRecord, start: StartRecord, n_unknown: int) -> Iterator[str]:
    """Yield what to tell the user about the corpus."""
    sentences, tokens = pluralize(source.sentences, "sentences"), pluralize(source.tokens, "tokens")
    yield f"Corpus: {sentences}, {tokens}."
    if n_unknown >= MIN_UNKNOWN * source.tokens:
        share = format_share(n_unknown / source.tokens)
        yield (
            f"Warning: the model does not know {share} of the corpus's tokens and reads them as an"
            f" unknown token. {AS_IN_TRAINING}"
        )
    if source.headings_dropped:
        yield f"Dropped {pluralize(source.headings_dropped, 'headings')} of WikiText articles."
    if source.without_tokens:
        yield f"Dropped {pluralize(source.without_tokens, 'sentences')} without tokens."
    if source.cut:
        yield (
            f"Truncated {pluralize(source.cut, 'sentences')} to the model's context, dropping"
            f" {pluralize(source.cut_tokens, 'tokens')}."
        )
    if source.conversations:
        left_out = f"; {pluralize(source.left_out, 'tokens')} of the template are not counted"
        n = pluralize(source.conversations, "sentences")
        are = "is a conversation" if source.conversations == 1 else "are conversations"
        yield f"{n} {are}{left_out if source.content_only else ''}."
    elif source.content_only:
        yield f"{source.source} has no conversations, so --content-only changes nothing."
    if source.control:
        n = pluralize(source.control, "sentences")
        spell = "spells" if source.control == 1 else "spell"
        yield f"{n} {spell} out a control token; it is read as one."
    losses = ", ".join(f"{name} {loss:.3f}" for name, loss in start.losses.items())
    token = "none" if start.token is None else start.token
    yield f"Start token: {token} ({start.chosen_by}; loss per token: {losses})."
    if source.perplexity:
        tokens = pluralize(source.perplexity.tokens, "tokens")
        of = pluralize(source.perplexity.sentences, "sentences")
        yield f"Perplexity per token: {source.perplexity.per_token:,.1f} (on {tokens} of {of})."


class TruncatedRows:
    """The sentences of a corpus, truncated to the model's context; counts what it cuts."""

    def __init__(self, reading: CorpusReader, memories: Memories) -> None:
        self.n_cut = self.n_cut_tokens = 0
        self.n_empty = 0
        """Sentences dropped because no prefix is left."""
        self.n_unknown = 0
        """Tokens that stand for words that the tokenizer does not know."""
        self._reading = reading
        self._memories = memories

    def __iter__(self) -> Iterator[TokenSentence]:
        memories = self._memories
        # Leave one position for a start token, which is not chosen yet.
        most = None if memories.context is None else memories.context - 1
        for sentence in check_token_ids(self._reading, memories.vocabulary):
            if most is not None and len(sentence.ids) > most:
                self.n_cut += 1
                self.n_cut_tokens += len(sentence.ids) - most
                sentence = sentence.cut(most)
            if sentence.n_prefixes:
                self.n_unknown += len(
                    memories.tokenizer.unknown_words(
                        sentence.text, sentence.ids, sentence.starts, sentence.ends
                    )
                )
                yield sentence
            else:
                self.n_empty += 1

"""The worker of an index: holds the model, projects values, and reads chunks.

It keeps one cumulative result in memory and commits it from time to time (`Partials`). A restarted
worker starts empty, under a new name, and skips the chunks that others have committed.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from ffmem.errors import BadSentenceError, FfmemError, ForwardError, ModelError, WorkerError
from ffmem.indexing.chunks import Batch, Chunk, batches, prefix_range, read_chunks
from ffmem.indexing.config import require_run
from ffmem.indexing.partials import Partials
from ffmem.indexing.prepare import SENTENCES
from ffmem.indexing.results import Sample
from ffmem.indexing.scan import Scan
from ffmem.indexing.sentences import Sentences, StoredSentence
from ffmem.indexing.tables import layer_file
from ffmem.indexing.values import write_keys, write_values
from ffmem.models.arguments import use_threads
from ffmem.models.keys import KeySide
from ffmem.models.memories import Memories
from ffmem.progress import TaskProgress
from ffmem.storage import Storage, open_storage

COMMIT_SECONDS = 30.0
"""About how much work a killed worker may lose."""

COMMIT_SHARE = 10.0
"""Time between two commits, at least, over the time that the last one took."""

MAX_BAD_SENTENCES = 8
"""Per chunk; if there are more, the model is at fault and not the sentences."""


class IndexWorker:
    """Reads chunks of one run with one model."""

    def __init__(
        self,
        memories: Memories,
        storage: Storage,
        sentences: Sentences,
        sample: Sample,
        skip_bad: bool,
    ) -> None:
        run, facts = require_run(storage)
        if memories.fingerprint() != run.model.hash:
            raise ModelError(
                f"The run was started with a model whose weights have the hash {run.model.hash};"
                f" {memories.source} has {memories.fingerprint()} here. Use the same model"
                " everywhere."
            )
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.memories = memories
        self.storage = storage
        self.sentences = sentences
        self.sample = sample
        self.skip_bad = skip_bad
        self.run_config, self.start_token = run, facts.start.id
        self.partials = Partials(storage, run.fingerprint)
        self.chunks = read_chunks(storage)
        prefixes = prefix_range(self.start_token is not None, run.index.compat is not None)
        self.scan = Scan(memories, run.index.t, run.index.prefixes == "all", prefixes)
        self._covered_by_others = self.partials.covered_chunks()
        self.open_files: ExitStack | None = None
        self._key_side: KeySide | None = None
        self._covered: set[int] = set()
        self._skipped: dict[int, str] = {}
        self._is_committed = True
        self._is_whole = True
        self._last_commit, self._commit_took = time.monotonic(), 0.0

    def project_values(self, layer: int) -> None:
        """Write the tokens that a layer's values promote and suppress."""
        with (
            use_threads(self.run_config.threads),
            self.storage.writing(layer_file("values", layer)) as path,
        ):
            write_values(path, self.memories, layer)

    def project_keys(self, layer: int) -> None:
        """Write the tokens that a layer's keys match, and the cosines of its weights."""
        with (
            use_threads(self.run_config.threads),
            self.storage.writing(layer_file("keys", layer)) as path,
        ):
            self._key_side = self._key_side or KeySide(self.memories)
            write_keys(path, self._key_side, layer)

    def read_chunk(self, number: int, progress: TaskProgress | None = None) -> None:
        """Add a chunk to the cumulative result, unless it is covered; commit if it is time.

        `progress` advances by the tokens of each batch.
        """
        self._require_whole()
        if number in self._covered or number in self._covered_by_others:
            return
        chunk = self.chunks[number]
        rows = list(self.sentences.rows(chunk.first_sentence, chunk.n_sentences))
        bad: dict[int, str] = {}
        with use_threads(self.run_config.threads):
            try:
                self._scan_rows(chunk, rows, progress)
            except ForwardError as error:
                if progress is not None:
                    progress.take_back()
                bad = self._find_bad_sentences(chunk, rows)
                self._check_may_skip(chunk, bad, error)
                good = [row for row in rows if row.sentence not in bad]
                self._scan_rows(chunk, good, progress)
        # If this is interrupted, the result holds parts of a chunk and must not be committed.
        self._is_whole = False
        self._is_committed = False
        self.scan.commit()
        self._covered.add(number)
        self._skipped |= bad
        self._is_whole = True
        since = time.monotonic() - self._last_commit
        if since >= max(COMMIT_SECONDS, COMMIT_SHARE * self._commit_took):
            self.flush()

    def flush(self) -> None:
        """Commit the cumulative result, if it has changed since the last commit."""
        if self._is_committed:
            return
        self._require_whole()
        start = time.monotonic()
        layers = (self.scan.result(layer) for layer in range(self.memories.n_layers))
        self.partials.commit(self.name, self._covered, self.scan.n_prefixes, self._skipped, layers)
        self._is_committed = True
        self._last_commit = time.monotonic()
        self._commit_took = self._last_commit - start

    def _require_whole(self) -> None:
        """Raise if the cumulative result holds only parts of a chunk."""
        if not self._is_whole:
            raise WorkerError(
                "This worker was interrupted while adding a chunk to its result, which is not"
                " committed. Rerun the command to resume."
            )

    def _scan_rows(
        self, chunk: Chunk, rows: list[StoredSentence], progress: TaskProgress | None
    ) -> None:
        """Read some sentences of a chunk, and write their coefficients on sampled prefixes.

        The cumulative result is the same as before: a file that cannot be written changes nothing.
        """
        past = chunk.first_prefix + chunk.n_tokens + chunk.n_sentences
        sample = self.sample.between(chunk.first_prefix, past)
        is_sampled = len(sample.prefixes) > 0
        if len(rows) < chunk.n_sentences:
            read = np.zeros(len(sample.prefixes), bool)
            for row in rows:
                last = row.offset + len(row.ids)
                read |= (sample.prefixes >= row.offset) & (sample.prefixes <= last)
            sample = sample.select(read)
        with _forward_errors(chunk):
            coefficients = self.scan.read(
                chunk,
                self._batches(rows),
                sample.prefixes,
                _contents(rows),
                None if progress is None else progress.advance,
            )
        if is_sampled:
            self.partials.commit_sample(chunk.number, sample, coefficients)

    def _batches(self, rows: list[StoredSentence]) -> Iterator[Batch]:
        pairs = ((row.offset, row.ids) for row in rows)
        return batches(pairs, self.start_token, self.run_config.index.batch_tokens)

    def _find_bad_sentences(self, chunk: Chunk, rows: list[StoredSentence]) -> dict[int, str]:
        """Return the sentences that fail on their own, and why, by halving the chunk."""
        scan = Scan(self.memories, 1, False, self.scan.prefix_range)
        bad: dict[int, str] = {}
        waiting = [rows]
        while waiting and len(bad) <= MAX_BAD_SENTENCES:
            part = waiting.pop()
            try:
                with _forward_errors(chunk):
                    scan.read(chunk, self._batches(part), np.zeros(0, np.int64), _contents(part))
            except ForwardError as error:
                if len(part) == 1:
                    bad[part[0].sentence] = str(error)
                else:
                    middle = len(part) // 2
                    waiting += [part[middle:], part[:middle]]
        return bad

    def _check_may_skip(self, chunk: Chunk, bad: dict[int, str], error: ForwardError) -> None:
        """Raise unless the bad sentences of a chunk may be skipped."""
        if not bad:
            raise FfmemError(
                f"Every sentence of {chunk.name} works alone, but together they fail: {error}"
            )
        number, reason = next(iter(bad.items()))
        if len(bad) > MAX_BAD_SENTENCES:
            raise BadSentenceError(
                f"More than {MAX_BAD_SENTENCES} sentences of {chunk.name} cannot be read. The"
                f" first is sentence {number}: {reason}"
            )
        if not self.skip_bad:
            listed = ", ".join(map(str, sorted(bad)))
            raise BadSentenceError(
                f"Cannot read sentence{'s' if len(bad) > 1 else ''} {listed} of the corpus:"
                f" {reason} Finished chunks are kept. Rerun with --bad-sentences skip to skip such"
                " sentences; the manifest will list them."
            )


@contextmanager
def _forward_errors(chunk: Chunk) -> Iterator[None]:
    """Turn what the model raises into a ForwardError, unless memory is full."""
    try:
        yield
    except (FfmemError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "allocate memory" in str(error):  # what torch raises on a CPU
            raise MemoryError(str(error)) from None
        raise ForwardError(
            f"The model fails on {chunk.name}: {type(error).__name__}:"
            f" {' '.join(str(error).split())[:300]}."
        ) from error


def make_worker(
    storage: str,
    sentences: str | None,
    device: str,
    sample: Sample,
    skip_bad: bool,
) -> IndexWorker:
    """Load the model of the run in a storage, and return a worker for it.

    `sentences` is the path of the corpus; None if it is in the storage.
    """
    from ffmem.models.load import load

    opened = open_storage(storage)
    run, _ = require_run(opened)
    torch.set_num_threads(run.threads)
    adapter = None if run.model.adapter is None else run.model.adapter.source
    memories = load(run.model.source, adapter=adapter, dtype=run.dtype, device=device)
    open_files = ExitStack()  # stay open as long as the worker lives
    file = None if sentences else open_files.enter_context(opened.reading(SENTENCES))
    corpus = Sentences(Path(sentences or SENTENCES), file)
    worker = IndexWorker(memories, opened, corpus, sample, skip_bad)
    worker.open_files = open_files
    return worker


def _contents(rows: list[StoredSentence]) -> dict[int, list[bool]]:
    """Return, by offset, at which tokens of conversations a prefix ends."""
    return {row.offset: row.is_content for row in rows if row.is_content is not None}

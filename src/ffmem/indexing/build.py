"""Building an index: corpus to the folder, leases to segments, segments to the finished files.

Each step is committed before the next begins, under `DIR/segments/`:

    settings.json → sentences.parquet → plan.json → lease-*.safetensors → contents → manifest.json

So a run that was killed at any moment goes on from its last commit, and ends in the same bytes.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy import ndarray

from ffmem.corpus.corpus import Corpus, Reading
from ffmem.corpus.sentences import refuse_foreign, window_size
from ffmem.errors import CorpusError, FfmemError, StoreError
from ffmem.files import storage_errors, write_text
from ffmem.indexing import sample
from ffmem.indexing.contents import write_contents
from ffmem.indexing.found import Found
from ffmem.indexing.hashes import hashes
from ffmem.indexing.leases import Batch, Lease, batches, cut
from ffmem.indexing.manifest import FORMAT, CorpusRecord, Manifest, SourceRecord
from ffmem.indexing.options import COMPAT, Options
from ffmem.indexing.scan import Scan, reach
from ffmem.indexing.segments import Segments
from ffmem.indexing.sentences import Sentences, write_sentences
from ffmem.indexing.settings import Plan, Settings, read_record
from ffmem.indexing.start import choose
from ffmem.indexing.tables import layer_file, write_table
from ffmem.indexing.values import PROJECTION, write_values
from ffmem.models.memories import Memories
from ffmem.progress import Progress


class Build:
    """One run: makes or goes on with the index in a folder."""

    def __init__(
        self,
        memories: Memories,
        corpus: Corpus,
        folder: Path,
        options: Options,
        progress: Progress,
    ) -> None:
        self.memories = memories
        self.corpus = corpus
        self.folder = folder
        self.working = folder / "segments"
        self.options = options
        self.progress = progress
        self._is_new = False

    def run(self) -> None:
        """Do everything that is not done yet."""
        existed = self.folder.exists()
        try:
            self._run()
        except FfmemError:
            if self._is_new and not (self.working / "plan.json").exists():
                self._clear()  # nothing was computed yet: leave the folder as it was
                if not existed:
                    self.folder.rmdir()
            raise
        except KeyboardInterrupt:
            self.progress.say("Stopped. The same command goes on from the last committed lease.")
            raise

    def _clear(self) -> None:
        """Remove what a run has written that did not get beyond reading the corpus."""
        shutil.rmtree(self.working)
        (self.folder / "sentences.parquet").unlink(missing_ok=True)

    def _run(self) -> None:
        with _alone(self.folder):
            self.settings = self._settings()
            with _threads(self.settings.threads):
                self.plan = self._plan()
                found = self._read_leases()
                self._finish(found)
            shutil.rmtree(self.working)

    def _settings(self) -> Settings:
        """Return the run's settings; refuse to go on with another's."""
        path = self.working / "settings.json"
        settings = Settings.asked(self.memories, self.corpus, self.options)
        if not path.exists():
            self._is_new = True
            write_text(path, settings.to_json())
            return settings
        before = read_record(Settings, path)
        if self.options.threads is None:
            settings = replace(settings, threads=before.threads)
        if differences := settings.differences(before):
            raise StoreError(
                f"{self.folder} holds an unfinished index with other settings:"
                f" {'; '.join(differences)}."
                " Give the same settings to go on with it, choose another folder, or delete it."
            )
        self.progress.say(f"Going on with the unfinished index in {self.folder}.")
        return before

    def _plan(self) -> Plan:
        """Bring the corpus into the folder and choose the start token, unless that is done."""
        path = self.working / "plan.json"
        if path.exists():
            return read_record(Plan, path)
        self._refuse_wide_windows()
        self.progress.say(f"Reading {self.corpus.source}.")
        reading = self.corpus.sentences(self.memories.tokenizer)
        rows = _Cut(reading, self.memories)
        totals = write_sentences(self.folder / "sentences.parquet", rows)
        sentences = Sentences(self.folder / "sentences.parquet")
        first = next(cut(sentences.lengths(), self.settings.lease_tokens))
        chosen = choose(
            self.memories,
            [row.ids for row in sentences.rows(0, first.n_sentences)],
            self.settings.start,
        )
        plan = Plan(
            hash=totals.hash,
            sentences=totals.n_sentences,
            tokens=totals.n_tokens,
            cut=rows.n_cut,
            cut_tokens=rows.n_lost,
            headings_dropped=reading.n_headings,
            without_tokens=reading.n_without_tokens,
            start=chosen.start,
            perplexity=chosen.perplexity,
        )
        if self.settings.compat and plan.start.id is None:
            raise FfmemError(
                f"--compat {COMPAT} counts the start token alone as a prefix, and there is no"
                " start token. Name one with --start."
            )
        self._tell(plan)
        write_text(path, plan.to_json())
        return plan

    def _refuse_wide_windows(self) -> None:
        size, context = window_size(self.corpus.unit), self.memories.context
        if size is not None and context is not None and size >= context:
            raise CorpusError(
                f"--unit {self.corpus.unit} was asked for, but the model reads {context} tokens at"
                f" most, a start token included. Use window:{context - 1} or less."
            )

    def _tell(self, plan: Plan) -> None:
        say = self.progress.say
        say(f"Corpus: {plan.sentences:,} sentences, {plan.tokens:,} tokens.")
        if plan.headings_dropped:
            say(f"Left out: {plan.headings_dropped:,} headings.")
        if plan.without_tokens:
            say(f"Left out: {plan.without_tokens:,} sentences that gave no token.")
        if plan.cut:
            say(
                f"Cut at the model's context: {plan.cut:,} sentences, by {plan.cut_tokens:,} tokens"
                " in all."
            )
        token = "none" if plan.start.token is None else plan.start.token
        losses = ", ".join(f"{name} {loss:.3f}" for name, loss in plan.start.losses.items())
        say(f"Start token: {token} ({plan.start.chosen_by}; loss per token: {losses}).")
        if plan.perplexity:
            of = f"{plan.perplexity.tokens:,} tokens of {plan.perplexity.sentences:,} sentences"
            say(f"Perplexity per token: {plan.perplexity.per_token:,.1f} (on {of}).")

    def _read_leases(self) -> Found:
        """Return what all leases found; read those that are not committed."""
        memories, settings = self.memories, self.settings
        sentences = Sentences(self.folder / "sentences.parquet")
        leases = list(cut(sentences.lengths(), settings.lease_tokens))
        shape = (memories.n_layers, memories.n_memories, settings.t)
        segments = Segments(self.working, settings.fingerprint, shape)
        found = Found.nothing(*shape, memories.gated)
        done = [lease for lease in leases if segments.committed(lease.number)]
        for lease in done:
            found = found.merge(segments.load(lease.number))
        empty_prefix = settings.compat is not None
        where = reach(self.plan.start.id is not None, empty_prefix)
        scan = Scan(memories, settings.t, settings.prefixes, where)
        sampled = sample.draw(self.plan.hash, sentences.lengths(), empty_prefix)
        n_done = sum(lease.n_tokens for lease in done)
        with self.progress.bar("Reading", self.plan.tokens, "tokens", n_done) as step:
            for lease in leases:
                if lease in done:
                    continue
                floors = [triggers.weakest() for triggers in found.lists()]
                for part in scan.lease(lease, self._batches(sentences, lease), floors, sampled):
                    if isinstance(part, Found):
                        segments.commit(lease.number, part)
                        found = found.merge(part)
                    else:
                        step(part)
        return found

    def _batches(self, sentences: Sentences, lease: Lease) -> Iterator[Batch]:
        rows = sentences.rows(lease.first_sentence, lease.n_sentences)
        offsets = ((row.offset, row.ids) for row in rows)
        return batches(offsets, self.plan.start.id, self.settings.batch_tokens)

    def _finish(self, found: Found) -> None:
        """Write the files of the finished index, the manifest last."""
        write_contents(self.folder, found)
        n_layers = self.memories.n_layers
        with self.progress.bar("Values", n_layers, "layers") as step:
            for layer in range(n_layers):
                path = self.folder / layer_file("values", layer)
                if not path.exists():  # committed by this run, if it is there
                    write_values(path, self.memories, layer)
                step(1)
        write_vocabulary(self.folder / "vocabulary.parquet", self.memories)
        self._manifest().write(self.folder)

    def _manifest(self) -> Manifest:
        settings, plan = self.settings, self.plan
        asked: dict[str, Any] = settings.corpus
        source = SourceRecord(
            **asked,
            hash=plan.hash,
            digest=settings.digest,
            sentences=plan.sentences,
            tokens=plan.tokens,
            cut=plan.cut,
            cut_tokens=plan.cut_tokens,
            headings_dropped=plan.headings_dropped,
            without_tokens=plan.without_tokens,
            perplexity=plan.perplexity,
            lease_tokens=settings.lease_tokens,
            batch_tokens=settings.batch_tokens,
            threads=settings.threads,
            device=settings.device,
        )
        return Manifest(
            format=FORMAT,
            model=settings.model,
            tokenizer=settings.tokenizer,
            corpus=CorpusRecord.joined([source]),
            t=settings.t,
            prefixes=settings.prefixes,
            compat=settings.compat,
            coefficient=_definition(self.memories),
            projection=PROJECTION,
            dtype=settings.dtype,
            start=plan.start,
            versions=settings.versions,
            files=hashes(self.folder),
        )


class _Cut:
    """The sentences of a corpus, cut where the model's context ends, and counted."""

    def __init__(self, reading: Reading, memories: Memories) -> None:
        self.n_cut = self.n_lost = 0
        self._reading = reading
        self._memories = memories

    def __iter__(
        self,
    ) -> Iterator[tuple[str | None, list[int], list[int] | None, list[int] | None]]:
        memories = self._memories
        # One place is kept for a start token, whether there will be one or not.
        most = None if memories.context is None else memories.context - 1
        for text, ids, starts, ends in refuse_foreign(self._reading, memories.vocabulary):
            if most is not None and len(ids) > most:
                self.n_cut += 1
                self.n_lost += len(ids) - most
                ids = ids[:most]
                starts, ends = starts and starts[:most], ends and ends[:most]
            yield text, ids, starts, ends


def write_vocabulary(path: Path, memories: Memories) -> None:
    """Write every token as it is shown."""
    shown = memories.tokenizer.shown(memories.vocabulary)
    ids: ndarray = np.arange(len(shown), dtype=np.int32)
    write_table(path, pa.table({"id": ids, "token": pa.array(shown, pa.string())}))


def _definition(memories: Memories) -> str:
    if memories.gated:
        return "m = f(g·x)·(u·x), the input of the value map; active: g·x > 0"
    return "m = f(k·x + b), the input of the value map; active: m > 0"


@contextmanager
def _threads(n: int) -> Iterator[None]:
    """Run with a number of threads, and leave the process as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Refuse to work in a folder that holds something else or that another process works in."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file. Choose a new or an empty folder for the index.")
    foreign = folder.exists() and not (folder / "segments").exists() and any(folder.iterdir())
    if foreign:
        raise StoreError(
            f"{folder} holds something that is not an index. Choose a new or an empty folder."
        )
    with storage_errors(folder):
        (folder / "segments").mkdir(parents=True, exist_ok=True)
        lock = (folder / "segments" / "lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"Another process is working on {folder}. Wait for it, or choose another folder."
            ) from None
        yield

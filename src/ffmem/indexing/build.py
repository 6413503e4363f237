"""Building an index: corpus to the folder, leases to segments, segments to the finished files.

Each step is committed before the next begins, under `DIR/segments/` or the shared folder:

    settings.json → sentences.parquet → plan.json → segment-*.arrow → contents → manifest.json

So a run that was killed at any moment goes on from its last commit, and ends in the same bytes;
and whoever reads the leases, this process or a cluster, the bytes are the same again.
"""

import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ffmem.cluster.crew import Crew, Recruit
from ffmem.cluster.here import Here
from ffmem.cluster.hiring import Hiring
from ffmem.cluster.leader import Leader
from ffmem.cluster.shared import SharedFolder
from ffmem.corpus.corpus import Corpus
from ffmem.errors import FfmemError, StoreError
from ffmem.files import committing, locked, remove_temporaries, write_text
from ffmem.indexing.contents import write_contents
from ffmem.indexing.hashes import hashes
from ffmem.indexing.manifest import FORMAT, CorpusRecord, Manifest, SourceRecord
from ffmem.indexing.options import Options
from ffmem.indexing.orders import Leases
from ffmem.indexing.prepare import SENTENCES, lay_out, planned, write_vocabulary
from ffmem.indexing.segments import Segments
from ffmem.indexing.sentences import Sentences
from ffmem.indexing.settings import Settings, read_record
from ffmem.indexing.standing import PLACE
from ffmem.indexing.tables import layer_file
from ffmem.indexing.values import NO_PROJECTION, PROJECTION
from ffmem.indexing.work import Reading, Values
from ffmem.indexing.worker import IndexWorker
from ffmem.models.memories import IN_MEMORY, Memories
from ffmem.models.threads import threads
from ffmem.progress import Progress

VOCABULARY = "vocabulary.parquet"


@dataclass(frozen=True)
class Labour:
    """Who does the work of a run, and where: nothing of it decides the bytes."""

    hiring: Hiring = field(default_factory=Hiring)
    shared: str | None = None
    """Path or URL of the shared folder; None for one inside the index's own."""
    device: str = "auto"
    skip: bool = False
    """Whether sentences that cannot be read are left out; otherwise they end the run."""


class Build:
    """One run: makes or goes on with the index in a folder."""

    def __init__(
        self,
        memories: Memories,
        corpus: Corpus,
        folder: Path,
        options: Options,
        progress: Progress,
        labour: Labour | None = None,
    ) -> None:
        self.memories: Memories | None = memories
        self.corpus = corpus
        self.folder = folder
        self.working = folder / "segments"
        self.options = options
        self.progress = progress
        self.labour = labour or Labour()
        self._is_new = False
        if not self.labour.hiring.is_here and memories.source == IN_MEMORY:
            raise FfmemError(
                "A model in memory cannot be handed to other processes. Save it, and give its"
                " folder."
            )

    def run(self) -> bool:
        """Do everything that is not done yet; return False if another process was faster."""
        existed = self.folder.exists()
        try:
            return self._run()
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
        (self.folder / SENTENCES).unlink(missing_ok=True)

    def _run(self) -> bool:
        if self._is_finished():
            return False
        with _alone(self.folder):
            if self._is_finished():  # while this one waited its turn
                shutil.rmtree(self.working)
                return False
            self._prepare()
            shared = self._shared()
            is_far = self.labour.shared is not None
            device = self.labour.device
            orders = lay_out(shared, self.folder, self.settings, self.plan, device, is_far)
            segments = Segments(shared, orders.run, orders.t, orders.gated)
            with self._crew(shared) as crew:
                leader = Leader(crew, self.progress, shared)
                tokens = self.plan.tokens
                reading = Reading(shared, segments, Leases(shared), tokens, self.labour.skip)
                leader.lead(reading)
                # A lambda layer's memories have no static values to project.
                has_values = self.settings.model.has_values
                values = Values(shared, self.settings.model.layers if has_values else 0)
                if has_values:
                    leader.lead(values)
            write_contents(self.folder, segments.layers(reading.tree.root))
            for layer, name in enumerate(values.names):
                with (
                    shared.reading(name) as file,
                    committing(self.folder / layer_file("values", layer)) as temporary,
                ):
                    temporary.write_bytes(file.read())
            remove_temporaries(self.folder, "triggers", "stats", "samples", "values")
            self._manifest(reading.skipped).write(self.folder)
            if is_far:
                shared.clear()
            shutil.rmtree(self.working)
            return True

    def _is_finished(self) -> bool:
        return (self.folder / "manifest.json").exists()

    def _prepare(self) -> None:
        """Do what needs the model here."""
        memories = self.memories
        assert memories is not None
        self.settings = self._settings(memories)
        with threads(self.settings.threads):
            self.plan = planned(memories, self.corpus, self.folder, self.settings, self.progress)
        if not (self.folder / VOCABULARY).exists():
            write_vocabulary(self.folder / VOCABULARY, memories)

    def _shared(self) -> SharedFolder:
        """Return the shared folder; a far one is divided by runs."""
        if self.labour.shared is None:
            return SharedFolder.at(self.working)
        shared = SharedFolder.at(self.labour.shared, f"ffmem-{self.settings.fingerprint}")
        write_text(self.working / PLACE, shared.place)
        (self.working / PLACE).chmod(0o600)  # a URL may hold a password
        return shared

    @contextmanager
    def _crew(self, shared: SharedFolder) -> Iterator[Crew]:
        """Give those who do the work. If others do it, the model is not needed here any more."""
        hiring = self.labour.hiring
        if hiring.is_here:
            assert self.memories is not None
            yield Here(IndexWorker(self.memories, shared))
            return
        self.memories = None
        gc.collect()
        recruit = Recruit("ffmem.indexing.worker:hired", {"shared": shared.place})
        logs = self.working / "logs"
        with hiring.crew(recruit, self.settings.threads, logs, self.progress) as crew:
            yield crew

    def _settings(self, memories: Memories) -> Settings:
        """Return the run's settings; refuse to go on with another's."""
        path = self.working / "settings.json"
        asked = self.options
        if asked.threads is None:
            asked = replace(asked, threads=self.labour.hiring.threads)
        settings = Settings.asked(memories, self.corpus, asked)
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

    def _manifest(self, skipped: dict[int, str]) -> Manifest:
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
            skipped=sorted(skipped),
            skipped_tokens=self._tokens(skipped),
            control=plan.control,
        )
        return Manifest(
            format=FORMAT,
            model=settings.model,
            tokenizer=settings.tokenizer,
            corpus=CorpusRecord.joined([source]),
            t=settings.t,
            prefixes=settings.prefixes,
            compat=settings.compat,
            coefficient=settings.model.kind.definition,
            projection=PROJECTION if settings.model.has_values else NO_PROJECTION,
            dtype=settings.dtype,
            start=plan.start,
            versions=settings.versions,
            files=hashes(self.folder),
        )

    def _tokens(self, skipped: dict[int, str]) -> int:
        """Return how many tokens some sentences have."""
        sentences = Sentences(self.folder / SENTENCES)
        return sum(len(sentences.row(number).ids) for number in skipped)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Refuse to work in a folder that holds something else or that another process works in."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file. Choose a new or an empty folder for the index.")
    foreign = folder.exists() and not (folder / "segments").exists() and any(folder.iterdir())
    # Whoever finishes an index writes its manifest before that folder goes.
    if foreign and not (folder / "manifest.json").exists():
        raise StoreError(
            f"{folder} holds something that is not an index. Choose a new or an empty folder."
        )
    busy = f"Another process is working on {folder}. Wait for it, or choose another folder."
    with locked(folder / "segments" / "lock", busy):
        yield

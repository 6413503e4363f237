"""A further corpus for a finished index.

The new corpus is indexed beside the old one, with its model and settings, and merged; then the
folders are swapped. Killed at any moment, the index is whole, as it was or as it will be.
"""

import shutil
from dataclasses import asdict
from pathlib import Path

from ffmem.corpus.corpus import Corpus
from ffmem.errors import StoreError
from ffmem.indexing.build import Build, Labour
from ffmem.indexing.finished import refuse_other_weights
from ffmem.indexing.merge import swap
from ffmem.indexing.options import Options
from ffmem.indexing.store import Index, beside
from ffmem.models.memories import Memories
from ffmem.progress import Progress


def extend(
    index: Index,
    memories: Memories,
    corpus: Corpus,
    progress: Progress,
    labour: Labour | None = None,
) -> Index:
    """Add a corpus to an index, read by the same model with the same settings."""
    manifest = index.manifest
    refuse_other_weights(index, memories.fingerprint())
    last = manifest.corpus.sources[-1]
    start = manifest.start.id
    options = Options(
        t=manifest.t,
        prefixes=manifest.prefixes,
        compat=manifest.compat,
        start="none" if start is None else f"id:{start}",
        batch_tokens=last.batch_tokens,
        lease_tokens=last.lease_tokens,
        threads=last.threads,
    )
    folder = beside(index.folder, "extending")
    if (folder / "manifest.json").exists():
        _refuse_another(Index(folder), corpus)
    else:
        build = Build(memories, corpus, folder, options, progress, labour)
        del memories  # when others do the work, nobody keeps it here
        build.run()
    extended = _swap_once(index, folder)
    shutil.rmtree(folder)
    return extended


def _refuse_another(read: Index, corpus: Corpus) -> None:
    """Refuse to go on with what an earlier call read, if that was another corpus."""
    (source,) = read.manifest.corpus.sources
    fields = asdict(source)
    asked = {**corpus.describe(), "digest": corpus.digest()}
    if any(fields[name] != value for name, value in asked.items()):
        raise StoreError(
            f"{read.folder} holds {source.source}, which an interrupted `ffmem extend` has read but"
            f" not added yet. Extend with {source.source} first, or delete that folder."
        )


def _swap_once(index: Index, folder: Path) -> Index:
    """Merge what was read, unless an earlier call got that far before it was killed."""
    known = {source.hash for source in index.manifest.corpus.sources}
    new = Index(folder).manifest.corpus.sources[0]
    if new.hash in known:
        shutil.rmtree(folder)
        raise StoreError(f"{new.source} is in {index.folder} already: nothing was added.")
    return swap(index.folder, folder)

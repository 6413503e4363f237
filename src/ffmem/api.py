"""The public functions: what the command line does, for Python.

Each takes the arguments of its command; heavy libraries are imported when one is called.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffmem.errors import FfmemError, StoreError
from ffmem.indexing.store import Index
from ffmem.progress import Progress, Step

if TYPE_CHECKING:
    from ffmem.corpus.corpus import Corpus
    from ffmem.indexing.build import Labour
    from ffmem.indexing.options import Options
    from ffmem.indexing.search import Hit
    from ffmem.models.memories import Memories
    from ffmem.patterns.searching import PatternHit
    from ffmem.training.record import Trained


def load(
    model: Any,
    tokenizer: Any = None,
    *,
    dtype: str = "float32",
    device: str | dict[str, Any] = "auto",
) -> "Memories":
    """Return the memories of a model: by MODEL argument, or `load(model, tokenizer)` in memory.

    `device="split"` lays its layers over all accelerators, a dictionary as it says.
    """
    if isinstance(model, str | Path):
        from ffmem.models.argument import canonical

        canonical(str(model))  # a wrong path is told before anything heavy is loaded
    from ffmem.models.load import load as load_model

    return load_model(model, tokenizer, dtype=dtype, device=device)


def index(
    model: "Memories | str | Path",
    corpus: "Corpus | str | Path",
    out: str | Path,
    *,
    dtype: str = "float32",
    device: str = "auto",
    workers: int | None = None,
    ray: str | None = None,
    gpus_per_worker: float = 0.0,
    shared: str | None = None,
    bad_sentences: str = "stop",
    progress: Progress | None = None,
    **options: Any,
) -> Index:
    """Index every memory of a model over a corpus; go on with an unfinished folder.

    `options` are those of the command: t, prefixes, compat, start, batch_tokens, threads. With
    `workers`, processes of this machine do the work, with `ray` ("local", "auto" or an address)
    actors there; they meet in the folder, or in `shared`, a path or URL that all of them see.
    """
    from ffmem.corpus.corpus import Corpus
    from ffmem.indexing.options import Options

    folder = Path(out)
    asked = Options(**options)
    source = Corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus
    say = progress or Progress(quiet=True)
    named = str(model) if isinstance(model, str | Path) else model.source
    if (folder / "manifest.json").exists():
        return _finished(folder, model, named, source, asked, dtype, say)
    from ffmem.indexing.build import Build
    from ffmem.models.split import places

    labour = _labour(workers, ray, gpus_per_worker, shared, device, bad_sentences)
    source.refuse_missing()
    if isinstance(model, str | Path):
        say.say(f"Loading {model}.")
        model = load(model, dtype=dtype, device=device)
        if device == "split":
            where = places(model.model, model.row.blocks)
            say.say("; ".join(f"{place}: {parts}" for place, parts in where.items()) + ".")
    build = Build(model, source, folder, asked, say, labour)
    del model  # when others do the work, nobody keeps it here
    if build.run():
        return Index(folder)
    return _finished(folder, named, named, source, asked, dtype, say)


def _finished(
    folder: Path,
    model: "Memories | str | Path",
    named: str,
    corpus: "Corpus",
    asked: "Options",
    dtype: str,
    progress: Progress,
) -> Index:
    """Return a finished index, if it is the one that is asked for."""
    from ffmem.indexing.finished import refuse_other, refuse_other_weights

    finished = Index(folder)
    if not isinstance(model, str | Path):
        dtype = str(model.dtype).removeprefix("torch.")
        refuse_other_weights(finished, model.fingerprint())
    refuse_other(finished, named, corpus, asked, dtype)
    unread = " Standard input was not read." if corpus.source == "-" else ""
    progress.say(
        f"The index in {folder} is finished: nothing to do."
        f" The model's weights were not compared; their hash is in the manifest.{unread}"
    )
    return finished


def open(folder: str | Path) -> Index:
    """Open a finished index."""
    return Index(folder)


def extend(
    folder: str | Path,
    corpus: "Corpus | str | Path",
    *,
    model: "Memories | str | Path | None" = None,
    device: str = "auto",
    workers: int | None = None,
    ray: str | None = None,
    gpus_per_worker: float = 0.0,
    shared: str | None = None,
    bad_sentences: str = "stop",
    progress: Progress | None = None,
) -> Index:
    """Add a corpus to an index; `model` only if it has moved since.

    Who does the work is said as in `index`.
    """
    from ffmem.corpus.corpus import Corpus
    from ffmem.indexing.extend import extend as extend_index

    before = Index(folder)
    labour = _labour(workers, ray, gpus_per_worker, shared, device, bad_sentences)
    source = Corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus
    memories = before.manifest.model.source if model is None else model
    if isinstance(memories, str | Path):
        memories = load(memories, dtype=before.manifest.dtype, device=device)
    return extend_index(before, memories, source, progress or Progress(quiet=True), labour)


def _labour(
    workers: int | None,
    ray: str | None,
    gpus_per_worker: float,
    shared: str | None,
    device: str,
    bad_sentences: str,
) -> "Labour":
    """Return who does the work of an index."""
    from ffmem.cluster.hiring import Hiring
    from ffmem.cluster.shared import SharedFolder
    from ffmem.indexing.build import Labour

    if bad_sentences not in ("stop", "skip"):
        raise FfmemError(f"--bad-sentences takes stop or skip; {bad_sentences!r} was given.")
    hiring = Hiring(workers, ray, float(gpus_per_worker))
    hiring.refuse_unreachable()
    if shared is not None:
        SharedFolder.at(shared)
    return Labour(hiring, shared, device, bad_sentences == "skip")


def merge(folders: Sequence[str | Path], out: str | Path) -> Index:
    """Put indexes of parts of a corpus together in a new folder."""
    from ffmem.indexing.merge import merge as merge_indexes

    return merge_indexes(folders, out)


def search(
    folder: str | Path | Index, query: str, place: str = "values", **options: Any
) -> "list[Hit] | list[PatternHit]":
    """Return the memories whose values, triggers or patterns contain a text.

    `place` is "values", "triggers" or "patterns"; `options`: regex, layer, limit.
    """
    index = folder if isinstance(folder, Index) else Index(folder)
    if place == "patterns":
        from ffmem.patterns.searching import PatternSearch

        with closing(PatternSearch(index)) as described:
            return described.find(query, **options)
    from ffmem.indexing.search import Search

    with closing(Search(index)) as opened:
        return opened.find(query, place, **options)


def export(
    folder: str | Path | Index, to: str, out: str | Path, step: Step = lambda n: None
) -> None:
    """Write an index as `jsonl`, `csv` or `neuronpedia` (a folder); `step` is told of memories."""
    from ffmem.indexing.export import export as export_index

    index = folder if isinstance(folder, Index) else Index(folder)
    export_index(index, to, Path(out), step)


def train(
    corpus: "str | Path | Corpus",
    out: str | Path,
    valid: "str | Path | Corpus | None" = None,
    *,
    device: str = "auto",
    progress: Progress | None = None,
    **settings: Any,
) -> "Trained":
    """Train a small language model, or go on with it; `settings` are those of `ffmem train`.

    train("wikitext-2:train", "model", "wikitext-2:valid", memory="persistent", layers=4, epochs=1)
    """
    from ffmem.corpus.corpus import Corpus
    from ffmem.training.settings import Settings
    from ffmem.training.train import train as run

    def opened(given: "str | Path | Corpus") -> Corpus:
        return given if isinstance(given, Corpus) else Corpus(str(given))

    other = None if valid is None else opened(valid)
    asked = Settings(**settings)
    return run(asked, opened(corpus), Path(out), other, device=device, progress=progress)


def verify(folder: str | Path, progress: Progress | None = None) -> list[str]:
    """Return what is wrong with an index: nothing, if every hash and invariant holds.

    Search files follow from the rest: one that does not fit a sound index is made again, and
    `progress` says so.
    """
    from ffmem.indexing import searchable
    from ffmem.indexing.verify import verify as verify_index
    from ffmem.patterns import searching
    from ffmem.patterns.kept import damaged

    index = Index(folder)
    wrong = [*verify_index(index), *damaged(index)]
    if wrong:
        return wrong
    for name, restore_search in (
        ("search.sqlite", searchable.restore_search),
        ("patterns/search.sqlite", searching.restore_search),
    ):
        try:
            if restore_search(index) and progress is not None:
                progress.say(f"{name} did not fit the index: made again.")
        except StoreError as error:
            wrong.append(f"{name} does not fit the index, and cannot be made again. {error}")
    return wrong

"""Functions that measure the paper, for Python: experiment and report.

Each takes the arguments of its command; heavy libraries are imported when one is called.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffmem.api import load
from ffmem.experiments.names import NO_STATIC_VALUES
from ffmem.indexing.store import Index
from ffmem.progress import Progress

if TYPE_CHECKING:
    from ffmem.corpus.corpus import Corpus
    from ffmem.experiments.result import Result
    from ffmem.experiments.study import Study
    from ffmem.models.memories import Memories


def experiment(
    names: str | Sequence[str],
    folder: str | Path | Index,
    out: str | Path,
    *,
    corpus: "Corpus | str | Path | None" = None,
    progress: Progress | None = None,
    **options: Any,
) -> "list[Result]":
    """Measure figures or tables of the paper; write JSON, SVG and PDF of each to a folder.

    `corpus` is what Section 5 takes its prefixes from. `options`: prompt, sample (a number or
    "all"), draw, seed, per_layer, triggers; model, dtype, device; unit, column, detokenize, limit;
    and who does what takes long: workers, ray, gpus_per_worker, shared, threads, as in `index`.
    What was measured before a stop is kept in the folder, and not measured again.
    """
    from ffmem.reporting.drawing import draw

    results = []
    with (
        place(Path(out)),
        closing(_measured(names, folder, Path(out), corpus, progress, options)) as measured,
    ):
        for result in measured:
            result.write(Path(out))
            draw(result, Path(out))
            results.append(result)
    return results


def report(
    folder: str | Path | Index,
    out: str | Path,
    corpus: "Corpus | str | Path",
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Path:
    """Measure every figure and table of the paper, and return the path of the report.

    `options` are those of `experiment`. What reads static values is left out, and said to be, where
    memories have none.
    """
    from ffmem.experiments.names import FROM_VALUES, NAMES
    from ffmem.reporting.report import write_report

    index = folder if isinstance(folder, Index) else Index(folder)
    names: Sequence[str] = NAMES
    if not index.manifest.model.has_values:
        names = [name for name in NAMES if name not in FROM_VALUES]
        if progress is not None:
            progress.say(f"Left out ({NO_STATIC_VALUES}): {', '.join(FROM_VALUES)}.")
    results = []
    with (
        place(Path(out)),
        closing(_measured(names, index, Path(out), corpus, progress, options)) as measured,
    ):
        for result in measured:
            result.write(Path(out))  # what was measured is kept, whatever comes
            results.append(result)
    return write_report(Path(out), results, index)


@contextmanager
def place(out: Path) -> Iterator[None]:
    """Refuse a folder that results cannot or should not be written to, before any work."""
    from ffmem.errors import StoreError
    from ffmem.files import made

    if (out / "manifest.json").exists():
        raise StoreError(f"{out} is an index. Choose a folder of its own for what is measured.")
    with made(out):
        yield


def _measured(
    names: str | Sequence[str],
    folder: str | Path | Index,
    out: Path,
    corpus: "Corpus | str | Path | None",
    progress: Progress | None,
    options: dict[str, Any],
) -> "Generator[Result]":
    """Return the results of some experiments one by one, as they are measured."""
    from ffmem.experiments import catalogue
    from ffmem.experiments.names import FROM_FOLDER

    asked = catalogue.known([names] if isinstance(names, str) else names)
    index = folder if isinstance(folder, Index) else Index(folder)
    if not index.manifest.model.has_values:
        catalogue.refuse_without_values(asked, index.manifest.model.source)
    if set(asked) <= set(FROM_FOLDER) and options.get("prompt") is None:
        say = progress or Progress(quiet=True)
        yield from catalogue.read(index, asked, options.get("seed", 0), say)
        return
    with _study(asked, index, out, corpus, progress or Progress(quiet=True), options) as study:
        yield from catalogue.measure(study, asked)


def _study(
    names: Sequence[str],
    index: Index,
    out: Path,
    corpus: "Corpus | str | Path | None",
    progress: Progress,
    options: dict[str, Any],
) -> "Study":
    """Return what some experiments work on, refusing what is missing before a model is loaded."""
    from ffmem.cluster.hiring import Hiring
    from ffmem.errors import CorpusError
    from ffmem.experiments.names import FROM_SAMPLE

    asked_of = {"workers": None, "ray": None, "gpus_per_worker": 0.0}
    hiring = Hiring(**{name: options.pop(name, usual) for name, usual in asked_of.items()})
    shared, n_threads = options.pop("shared", None), options.pop("threads", None)
    reading = {name: options.pop(name, None) for name in ("unit", "column", "detokenize", "limit")}
    asked = {name: value for name, value in reading.items() if value is not None}
    if isinstance(corpus, str | Path):
        corpus = _read_as(index, str(corpus), asked)
    elif asked:
        raise CorpusError(
            f"A Corpus says itself how it is read: {', '.join(asked)} came beside it."
        )
    needed = bool(set(names) & set(FROM_SAMPLE))
    if options.get("prompt") is not None and not needed:
        raise CorpusError(f"{', '.join(names)} reads the index alone: a prompt has no use there.")
    if corpus is not None:
        corpus.refuse_missing()
    elif options.get("prompt") is None and needed:
        raise CorpusError(
            "This experiment looks at the model at work and needs prefixes to do so."
            " Give a corpus, such as --corpus wikitext-2:valid, or one --prompt."
        )
    device = options.get("device", "auto")
    model = _model(index, options, progress)
    sample = options.get("sample", 1)
    if sample == "all":
        options["sample"] = None
    elif not isinstance(sample, int):
        raise CorpusError(f"sample = {sample!r} was asked for. Give a number, or 'all'.")
    from ffmem.experiments import catalogue
    from ffmem.experiments.study import Study
    from ffmem.experiments.workplace import WORKING, Labour

    known = ("prompt", "sample", "draw", "seed", "per_layer", "triggers")
    for name in options:
        if name not in known:
            raise TypeError(f"There is no option {name!r}. There are {', '.join(known)}.")
    parts = catalogue.parts(names)
    return Study(
        index=index,
        memories=model,
        corpus=corpus,
        parts=parts,
        labour=Labour(hiring, out / WORKING, shared, device, n_threads),
        progress=progress,
        **options,
    )


def _model(index: Index, options: dict[str, Any], progress: Progress) -> "Memories":
    """Return the model of an index: that given, or the one that the index names."""
    from ffmem.errors import ModelError

    given, dtype = options.pop("model", None), options.pop("dtype", None)
    device = options.pop("device", "auto")
    if given is not None and not isinstance(given, str | Path):
        memories: Memories = given
        has = str(memories.dtype).removeprefix("torch.")
        if dtype not in {None, has}:
            raise ModelError(
                f"dtype {dtype} was asked for beside a model in memory, which has {has}."
                " Load the model in the dtype that you want."
            )
        return memories
    progress.say(f"Loading {given or index.manifest.model.source}.")
    try:
        source = given or index.manifest.model.source
        return load(source, dtype=dtype or index.manifest.dtype, device=device)
    except ModelError as error:
        if given is not None:
            raise
        raise ModelError(
            f"{error} The index was made with that model: if it has moved, say where with --model."
        ) from None


def _read_as(index: Index, source: str, asked: dict[str, Any]) -> "Corpus":
    """Return a further corpus, read as the index's first one was unless told otherwise."""
    from ffmem.corpus.corpus import Corpus
    from ffmem.corpus.sources import is_wikitext

    first = index.manifest.corpus.sources[0]
    inherited: dict[str, Any] = {"unit": first.unit, "column": first.column}
    if not is_wikitext(first.source):  # whose name implies it
        inherited["detokenize"] = first.detokenize
    return Corpus(source, **(inherited | {k: v for k, v in asked.items() if v is not None}))

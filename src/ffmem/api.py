"""The public functions: what the command line does, for Python.

Each takes the arguments of its command; heavy libraries are imported when one is called.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffmem.errors import FfmemError
from ffmem.indexing.store import Index
from ffmem.progress import Progress, Step

if TYPE_CHECKING:
    from ffmem.corpus.corpus import Corpus
    from ffmem.experiments.result import Result
    from ffmem.experiments.study import Study
    from ffmem.indexing.build import Labour
    from ffmem.indexing.options import Options
    from ffmem.indexing.search import Hit
    from ffmem.models.memories import Memories
    from ffmem.patterns.searching import PatternHit


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
    corpus: "Corpus | str",
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
    source = Corpus(corpus) if isinstance(corpus, str) else corpus
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
    corpus: "Corpus | str",
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
    source = Corpus(corpus) if isinstance(corpus, str) else corpus
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
    refuse_bad_place(Path(out))
    with closing(_measured(names, folder, Path(out), corpus, progress, options)) as measured:
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

    `options` are those of `experiment`.
    """
    from ffmem.experiments.names import NAMES
    from ffmem.reporting.report import write_report

    index = folder if isinstance(folder, Index) else Index(folder)
    results = []
    refuse_bad_place(Path(out))
    with closing(_measured(NAMES, index, Path(out), corpus, progress, options)) as measured:
        for result in measured:
            result.write(Path(out))  # what was measured is kept, whatever comes
            results.append(result)
    return write_report(Path(out), results, index)


def refuse_bad_place(out: Path) -> None:
    """Refuse a folder that results cannot or should not be written to, before any work."""
    from ffmem.errors import StoreError
    from ffmem.files import refuse_unwritable

    if (out / "manifest.json").exists():
        raise StoreError(f"{out} is an index. Choose a folder of its own for what is measured.")
    refuse_unwritable(out)


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
    if set(asked) <= set(FROM_FOLDER) and options.get("prompt") is None:
        index = folder if isinstance(folder, Index) else Index(folder)
        say = progress or Progress(quiet=True)
        yield from catalogue.read(index, asked, options.get("seed", 0), say)
        return
    with _study(asked, folder, out, corpus, progress or Progress(quiet=True), options) as study:
        yield from catalogue.measure(study, asked)


def _study(
    names: Sequence[str],
    folder: str | Path | Index,
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
    index = folder if isinstance(folder, Index) else Index(folder)
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


def verify(folder: str | Path) -> list[str]:
    """Return what is wrong with an index: nothing, if every hash and invariant holds."""
    from ffmem.indexing.verify import verify as verify_index
    from ffmem.patterns.kept import damaged

    index = Index(folder)
    return [*verify_index(index), *damaged(index)]

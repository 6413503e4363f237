"""The public functions: what the command line does, for Python.

Each takes the arguments of its command; heavy libraries are imported when one is called.
"""

from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffmem.errors import StoreError
from ffmem.indexing.store import Index, check_weights
from ffmem.progress import Progress, Step
from ffmem.training.config import TrainConfig

if TYPE_CHECKING:
    from ffmem.corpus.corpus import Corpus
    from ffmem.indexing.config import BuildOptions, IndexConfig
    from ffmem.indexing.estimate import Estimate
    from ffmem.indexing.search import Hit
    from ffmem.models.memories import Memories
    from ffmem.patterns.searching import PatternHit
    from ffmem.training.run_dir import TrainResult


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
    t: int = 50,
    prefixes: str = "best",
    compat: str | None = None,
    start: str = "auto",
    batch_tokens: int = 4096,
    chunk_tokens: int = 65_536,
    threads: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    workers: int | None = None,
    ray: str | None = None,
    gpus_per_worker: float = 0.0,
    shared: str | None = None,
    bad_sentences: str = "stop",
    progress: Progress | None = None,
) -> Index:
    """Index every memory of a model over a corpus, or resume an unfinished index.

    `workers` processes of this machine share the work, or actors of `ray` ("local", "auto" or an
    address). They write to the folder, or to `shared`, a path or URL that all of them see.
    """
    from ffmem.corpus.corpus import Corpus
    from ffmem.indexing.config import IndexConfig

    folder = Path(out)
    config = IndexConfig(
        t=t,
        prefixes=prefixes,
        compat=compat,
        start=start,
        batch_tokens=batch_tokens,
        chunk_tokens=chunk_tokens,
        threads=threads,
    )
    source = Corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus
    progress = progress or Progress(quiet=True)
    name = str(model) if isinstance(model, str | Path) else model.source
    if (folder / "manifest.json").exists():
        return _finished(folder, model, name, source, config, dtype, progress)
    from ffmem.indexing.build import build
    from ffmem.models.split import places

    options = _build_options(workers, ray, gpus_per_worker, shared, device, bad_sentences)
    source.refuse_missing()
    if isinstance(model, str | Path):
        progress.say(f"Loading {model}.")
        model = load(model, dtype=dtype, device=device)
        if device == "split":
            where = places(model.model, model.row.blocks)
            progress.say("; ".join(f"{place}: {parts}" for place, parts in where.items()) + ".")
    if build(model, source, folder, config, options, progress):
        return Index(folder)
    return _finished(folder, name, name, source, config, dtype, progress)


def estimate(
    model: "Memories | str | Path",
    corpus: "Corpus | str | Path",
    *,
    t: int = 50,
    prefixes: str = "best",
    compat: str | None = None,
    start: str = "auto",
    batch_tokens: int = 4096,
    chunk_tokens: int = 65_536,
    threads: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    workers: int | None = None,
    ray: str | None = None,
    gpus_per_worker: float = 0.0,
) -> "Estimate":
    """Return what `index` would take: it reads the corpus, times one batch, and writes nothing."""
    from ffmem.corpus.corpus import Corpus
    from ffmem.indexing.config import IndexConfig
    from ffmem.parallel import ExecutionConfig

    config = IndexConfig(
        t=t,
        prefixes=prefixes,
        compat=compat,
        start=start,
        batch_tokens=batch_tokens,
        chunk_tokens=chunk_tokens,
        threads=threads,
    )
    execution = ExecutionConfig(workers, ray, gpus_per_worker)
    source = Corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus
    source.refuse_missing()
    from ffmem.indexing.estimate import estimate as measure

    memories = load(model, dtype=dtype, device=device) if isinstance(model, str | Path) else model
    return measure(memories, source, config, execution)


def _finished(
    folder: Path,
    model: "Memories | str | Path",
    name: str,
    corpus: "Corpus",
    config: "IndexConfig",
    dtype: str,
    progress: Progress,
) -> Index:
    """Return a finished index, if it is the one that is asked for."""
    from ffmem.indexing.merge import check_same_request

    finished = Index(folder)
    if not isinstance(model, str | Path):
        dtype = str(model.dtype).removeprefix("torch.")
        check_weights(finished, model.fingerprint())
    check_same_request(finished, name, corpus, config, dtype)
    unread = " Standard input was not read." if corpus.source == "-" else ""
    progress.say(
        f"The index in {folder} is finished: nothing to do."
        f" The model's weights were not compared; their hash is in the manifest.{unread}"
    )
    return finished


def open(folder: str | Path) -> Index:
    """Open an index; one that is still being made holds what was committed so far."""
    return Index(folder, unfinished=True)


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
    """Add a corpus to an index; `model` is needed only if it has moved since.

    `workers` and what follows are as in `index`.
    """
    from ffmem.corpus.corpus import Corpus
    from ffmem.indexing.merge import extend as extend_index
    from ffmem.models.argument import index_model

    before = Index(folder)
    options = _build_options(workers, ray, gpus_per_worker, shared, device, bad_sentences)
    source = Corpus(str(corpus)) if isinstance(corpus, str | Path) else corpus
    memories = before.manifest.model.source if model is None else model
    if isinstance(memories, str | Path):
        with index_model(str(memories), before.folder) if model is None else nullcontext():
            memories = load(memories, dtype=before.manifest.dtype, device=device)
    return extend_index(before, memories, source, options, progress or Progress(quiet=True))


def _build_options(
    workers: int | None,
    ray: str | None,
    gpus_per_worker: float,
    shared: str | None,
    device: str,
    bad_sentences: str,
) -> "BuildOptions":
    """Return how a run is carried out, refusing what cannot be before anything is loaded."""
    from ffmem.indexing.config import BuildOptions

    options = BuildOptions(workers, ray, gpus_per_worker, shared, bad_sentences, device)
    options.check()
    return options


def merge(
    folders: Sequence[str | Path], out: str | Path, *, progress: Progress | None = None
) -> Index:
    """Join indexes of parts of a corpus in a new folder."""
    from ffmem.indexing.merge import merge as merge_indexes

    return merge_indexes(folders, out, progress or Progress(quiet=True))


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
    memory: str,
    layers: int,
    width: int = TrainConfig.width,
    memories: int | None = TrainConfig.memories,
    match: str | None = TrainConfig.match,
    heads: int | None = TrainConfig.heads,
    key_width: int = TrainConfig.key_width,
    distances: int = TrainConfig.distances,
    context: int = TrainConfig.context,
    tokenizer: str = TrainConfig.tokenizer,
    vocabulary: int | None = TrainConfig.vocabulary,
    cutoffs: list[int] | None = TrainConfig.cutoffs,
    steps: int | None = TrainConfig.steps,
    epochs: int | None = TrainConfig.epochs,
    evaluate_every: int | None = TrainConfig.evaluate_every,
    batch_tokens: int = TrainConfig.batch_tokens,
    pass_tokens: int | None = TrainConfig.pass_tokens,
    learning_rate: float = TrainConfig.learning_rate,
    warmup: int | None = TrainConfig.warmup,
    weight_decay: float = TrainConfig.weight_decay,
    dropout: float = TrainConfig.dropout,
    dtype: str = TrainConfig.dtype,
    seed: int = TrainConfig.seed,
    device: str = TrainConfig.device,
    threads: int | None = TrainConfig.threads,
    checkpoint_minutes: float = TrainConfig.checkpoint_minutes,
    checkpoint_every: int | None = TrainConfig.checkpoint_every,
    keep_checkpoint: bool = TrainConfig.keep_checkpoint,
    progress: Progress | None = None,
) -> "TrainResult":
    """Train a small language model, or resume an unfinished run; see `ffmem train --help`.

    train("wikitext-2:train", "model", "wikitext-2:valid", memory="persistent", layers=4, epochs=1)
    """
    given = locals()  # a parameter for each field of TrainConfig
    config = TrainConfig(**{name: given[name] for name in TrainConfig.__dataclass_fields__})
    from ffmem.corpus.corpus import Corpus
    from ffmem.training.train import train as run

    def opened(source: "str | Path | Corpus") -> Corpus:
        return source if isinstance(source, Corpus) else Corpus(str(source))

    valid_corpus = None if valid is None else opened(valid)
    return run(config, opened(corpus), Path(out), valid_corpus, progress=progress)


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

"""Indexes: make, read, search, export, check and serve them."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from ffmem.api.model import as_corpus
from ffmem.config_fields import from_parameters
from ffmem.errors import FfmemError, StoreError
from ffmem.hub import HubFolder, is_hub_address
from ffmem.indexing.config import BuildOptions, IndexConfig
from ffmem.indexing.store import Index, as_index, check_weights, remove_old_index
from ffmem.models.arguments import check_loaded, require_models
from ffmem.parallel import ExecutionConfig
from ffmem.progress import Progress
from ffmem.signatures import check_arguments

if TYPE_CHECKING:
    from ffmem.corpus.corpus import Corpus
    from ffmem.indexing.estimate import Estimate
    from ffmem.indexing.search import GroupedHits, Hits
    from ffmem.models.memories import Memories


@check_arguments
def index(
    model: "Memories | str | Path",
    corpus: "Corpus | str | Path",
    out: str | Path,
    *,
    t: int = IndexConfig.t,
    prefixes: str = IndexConfig.prefixes,
    compat: str | None = IndexConfig.compat,
    start: str = IndexConfig.start,
    batch_tokens: int = IndexConfig.batch_tokens,
    chunk_tokens: int = IndexConfig.chunk_tokens,
    threads: int | None = IndexConfig.threads,
    adapter: str | Path | None = None,
    dtype: str = "float32",
    device: str = BuildOptions.device,
    workers: int | None = BuildOptions.workers,
    ray: str | None = BuildOptions.ray,
    gpus_per_worker: float = BuildOptions.gpus_per_worker,
    shared: str | None = BuildOptions.shared,
    bad_sentences: str = BuildOptions.bad_sentences,
    progress: Progress | None = None,
) -> Index:
    """Index every memory of a model over a corpus, and return the index.

    Resumes an unfinished index with the same settings; a finished one is opened as it is.

    Args:
        model: The model, or its name.
        corpus: The corpus, or its name.
        out: Folder of the index.
        t: Triggers to keep per memory and sign.
        prefixes: "best" keeps the best prefix of each sentence; "all" considers every prefix.
        compat: "ff-layers" matches the authors' code: prefixes of length 0 to n − 1.
        start: Start token of every sentence: "auto", "none", "bos", "eos", or a token.
        batch_tokens: Tokens per batch.
        chunk_tokens: Tokens per chunk, the unit of work.
        threads: CPU threads per worker. Default: all cores, shared among the workers.
        adapter: Adapter to merge into the model, if you pass its name.
        dtype: Number format of the model, if you pass its name.
        device: Where the model runs, if you pass its name.
        workers: Number of worker processes; with `ray`, of actors.
        ray: "local" starts Ray here, "auto" finds a running cluster; or a cluster's address.
        gpus_per_worker: GPUs that Ray assigns to each worker.
        shared: Shared folder or URL for results, if some workers cannot access `out`.
        bad_sentences: "stop" at sentences that the model cannot read, or "skip" them.
        progress: Progress reporter. Default: none.
    """
    config = from_parameters(IndexConfig, locals())
    options = from_parameters(BuildOptions, locals())
    folder, source = Path(out), as_corpus(corpus)
    progress = progress or Progress(quiet=True)
    name = str(model) if isinstance(model, str | Path) else model.source
    if (folder / "manifest.json").exists():
        return _open_finished(folder, model, name, adapter, source, config, dtype, progress)
    options.check()
    source.check()
    require_models()
    from ffmem.indexing.build import build
    from ffmem.models.load import load

    def load_model() -> "Memories":
        if not isinstance(model, str | Path):
            check_loaded(model, adapter)
            return model
        with progress.waiting(f"Loading {model}"):
            memories = load(model, adapter=adapter, dtype=dtype, device=device)
        if device == "split":
            from ffmem.models.modules import describe_devices

            layout = describe_devices(memories.model, memories.row.blocks)
            progress.say("; ".join(f"{place}: {parts}" for place, parts in layout.items()) + ".")
        return memories

    if build(load_model, source, folder, config, options, progress):
        return Index(folder)
    return _open_finished(folder, model, name, adapter, source, config, dtype, progress)


@check_arguments
def estimate(
    model: "Memories | str | Path",
    corpus: "Corpus | str | Path",
    *,
    t: int = IndexConfig.t,
    prefixes: str = IndexConfig.prefixes,
    compat: str | None = IndexConfig.compat,
    start: str = IndexConfig.start,
    batch_tokens: int = IndexConfig.batch_tokens,
    chunk_tokens: int = IndexConfig.chunk_tokens,
    threads: int | None = IndexConfig.threads,
    adapter: str | Path | None = None,
    dtype: str = "float32",
    device: str = BuildOptions.device,
    workers: int | None = BuildOptions.workers,
    ray: str | None = BuildOptions.ray,
    gpus_per_worker: float = BuildOptions.gpus_per_worker,
    progress: Progress | None = None,
) -> "Estimate":
    """Return the tokens, time, memory and disk that `index` would take.

    Reads the corpus, times one batch, and writes nothing. The parameters are those of `index`.
    """
    config = from_parameters(IndexConfig, locals())
    execution = from_parameters(ExecutionConfig, locals())
    source = as_corpus(corpus)
    source.check()
    require_models()
    from ffmem.indexing.estimate import estimate as estimate_index
    from ffmem.models.load import load

    progress = progress or Progress(quiet=True)
    if isinstance(model, str | Path):
        with progress.waiting(f"Loading {model}"):
            model = load(model, adapter=adapter, dtype=dtype, device=device)
    else:
        check_loaded(model, adapter)
    return estimate_index(model, source, config, execution, progress)


def _open_finished(
    folder: Path,
    model: "Memories | str | Path",
    name: str,
    adapter: str | Path | None,
    corpus: "Corpus",
    config: IndexConfig,
    dtype: str,
    progress: Progress,
) -> Index:
    """Return a finished index; raise if it has other settings."""
    from ffmem.indexing.build import check_finished_index, remove_leftovers

    finished = Index(folder)
    if not isinstance(model, str | Path):
        dtype = str(model.dtype).removeprefix("torch.")
        check_weights(finished, model.fingerprint())
        adapter = None if model.adapter is None else model.adapter.source
    asked = None if adapter is None else str(adapter)
    check_finished_index(finished, name, asked, corpus, config, dtype)
    remove_leftovers(folder)
    compared = ""
    if isinstance(model, str | Path):
        compared = " The model's weights were not compared; their hash is in the manifest."
    unread = " Standard input was not read." if corpus.source == "-" else ""
    progress.say(f"The index in {folder} is finished: nothing to do.{compared}{unread}")
    return finished


@check_arguments
def open(folder: str | Path | Index) -> Index:
    """Open an index and return it; an unfinished one holds what is committed so far.

    `hf:org/name`, or `hf:org/name@revision`, is an index on the Hugging Face Hub: only the parts
    that you look at are downloaded. To search or export it, `pull` it.
    """
    if isinstance(folder, Index):
        return folder
    if is_hub_address(folder):
        remote = HubFolder(str(folder))
        return Index(remote.shown, remote=remote)
    index = Index(folder, unfinished=True)
    remove_old_index(index.folder)
    return index


def _reopen(folder: str | Path | Index) -> Index:
    """Return the finished index of a folder as it is now, also if it was opened before."""
    return Index(folder.folder if isinstance(folder, Index) else folder)


@check_arguments
def extend(
    folder: str | Path | Index,
    corpus: "Corpus | str | Path",
    *,
    model: "Memories | str | Path | None" = None,
    adapter: str | Path | None = None,
    device: str = BuildOptions.device,
    workers: int | None = BuildOptions.workers,
    ray: str | None = BuildOptions.ray,
    gpus_per_worker: float = BuildOptions.gpus_per_worker,
    shared: str | None = BuildOptions.shared,
    bad_sentences: str = BuildOptions.bad_sentences,
    progress: Progress | None = None,
) -> Index:
    """Add a corpus to a finished index, with its model and settings; return the larger index.

    `model` is the model, or where it is now if it has moved, and `adapter` where its adapter is.
    The other parameters are those of `index`.
    """
    options = from_parameters(BuildOptions, locals())
    require_models()
    from ffmem.indexing.merge import extend as extend_index
    from ffmem.interventions.forward import open_model

    options.check()
    before, source = _reopen(folder), as_corpus(corpus)
    source.check()

    def load_model() -> "Memories":
        loaded = open_model(before, model=model, adapter=adapter, device=device, progress=progress)
        return loaded.memories

    return extend_index(before, load_model, source, options, progress or Progress(quiet=True))


@overload
def search(
    folder: str | Path | Index,
    query: str,
    place: Literal["all"] = ...,
    *,
    regex: bool = ...,
    layer: int | None = ...,
    bank: str | None = ...,
    sign: int | None = ...,
    rank: int | None = ...,
    kind: str | None = ...,
    min_active: float | None = ...,
    max_active: float | None = ...,
    limit: int = ...,
) -> "GroupedHits": ...
@overload
def search(
    folder: str | Path | Index,
    query: str,
    place: str,
    *,
    regex: bool = ...,
    layer: int | None = ...,
    bank: str | None = ...,
    sign: int | None = ...,
    rank: int | None = ...,
    kind: str | None = ...,
    min_active: float | None = ...,
    max_active: float | None = ...,
    limit: int = ...,
) -> "GroupedHits | Hits": ...
@check_arguments
def search(
    folder: str | Path | Index,
    query: str,
    place: str = "all",
    *,
    regex: bool = False,
    layer: int | None = None,
    bank: str | None = None,
    sign: int | None = None,
    rank: int | None = None,
    kind: str | None = None,
    min_active: float | None = None,
    max_active: float | None = None,
    limit: int = 20,
) -> "GroupedHits | Hits":
    """Return the memories that contain a text, best first.

    `found = search(index, "press")` has a list for each place, `found["triggers"]`, whose `total`
    counts all memories that match. With a `place`, the result is that list alone.

    Args:
        folder: The index.
        query: The text.
        place: "all", or one of "values" (tokens), "triggers" (phrases) and "patterns".
        regex: Whether the query is a regular expression.
        layer: Only memories of this layer.
        bank: Only memories of this bank: "dense", "S" or "E12".
        sign: 1 for tops of values and triggers with m > 0, -1 for bottoms and m < 0.
        rank: Only matches at this rank or better.
        kind: "shallow" or "semantic": only such patterns, and memories that have one.
        min_active: Only memories that are active on at least this share of prefixes.
        max_active: Only memories that are active on at most this share.
        limit: Return at most this many memories of each place.
    """
    from ffmem.indexing.filters import Filters

    opened = as_index(folder)
    filters = Filters(layer, bank, sign, rank, kind, min_active, max_active)
    filters.check(opened)
    if limit < 1:
        raise FfmemError(f"limit is {limit}. Use 1 or more.")
    from ffmem.indexing.search import GroupedHits, Search
    from ffmem.patterns.search import PatternSearch

    def find(place: str) -> "Hits":
        if place == "patterns":
            with closing(PatternSearch(opened)) as patterns:
                return patterns.find(query, regex, filters, limit)
        among = None
        if kind is not None:
            with closing(PatternSearch(opened)) as patterns:
                among = patterns.with_kind(kind)
        with closing(Search(opened)) as texts:
            return texts.find(query, place, regex, filters, limit, among)

    if place != "all":
        return find(place)
    places = ["values", "triggers"] if opened.manifest.model.has_values else ["triggers"]
    groups, notes = [find(one) for one in places], []
    try:
        groups.append(find("patterns"))
    except FfmemError as error:  # there are none, or they are of another corpus
        notes.append(str(error))
    return GroupedHits(groups, query, notes)


@check_arguments
def export(
    folder: str | Path | Index, to: str, out: str | Path, *, progress: Progress | None = None
) -> None:
    """Write every memory of an index to `out`.

    `to` is "jsonl" or "csv" for one file, or "parquet" (the tables of `Index.table`) or
    "neuronpedia" for a new folder.
    """
    from ffmem.indexing.export import export as export_index

    opened = as_index(folder)
    with (progress or Progress(quiet=True)).bar("Writing", len(opened), "memories") as step:
        export_index(opened, to, Path(out), step)


@check_arguments
def verify(folder: str | Path | Index, progress: Progress | None = None) -> list[str]:
    """Return a list of problems with an index, one sentence each; empty if it is intact.

    Search files follow from the rest: if the index is intact, one that is out of date is rebuilt.
    """
    from ffmem.indexing import search_db
    from ffmem.indexing.verify import verify as verify_index
    from ffmem.patterns import search as pattern_search
    from ffmem.patterns.store import damaged_files

    opened = _reopen(folder)
    wrong = [*verify_index(opened), *damaged_files(opened)]
    if wrong:
        return wrong
    for name, restore_search in (
        ("search.sqlite", search_db.restore_search),
        ("patterns/search.sqlite", pattern_search.restore_search),
    ):
        try:
            if restore_search(opened) and progress is not None:
                progress.say(f"{name} was out of date and has been rebuilt.")
        except StoreError as error:
            wrong.append(f"{name} is out of date and cannot be rebuilt. {error}")
    return wrong

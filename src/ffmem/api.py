"""The public functions: what the command line does, for Python.

Each takes the arguments of its command; heavy libraries are imported when one is called.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffmem.indexing.store import Index
from ffmem.progress import Progress, Step

if TYPE_CHECKING:
    from ffmem.corpus.corpus import Corpus
    from ffmem.indexing.search import Hit
    from ffmem.models.memories import Memories


def load(
    model: Any, tokenizer: Any = None, *, dtype: str = "float32", device: str = "auto"
) -> "Memories":
    """Return the memories of a model: by MODEL argument, or `load(model, tokenizer)` in memory."""
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
    progress: Progress | None = None,
    **options: Any,
) -> Index:
    """Index every memory of a model over a corpus; go on with an unfinished folder.

    `options` are those of the command: t, prefixes, compat, start, batch_tokens, threads.
    """
    from ffmem.corpus.corpus import Corpus
    from ffmem.indexing.options import Options

    folder = Path(out)
    asked = Options(**options)
    source = Corpus(corpus) if isinstance(corpus, str) else corpus
    say = progress or Progress(quiet=True)
    if (folder / "manifest.json").exists():
        from ffmem.indexing.finished import refuse_other, refuse_other_weights

        finished = Index(folder)
        if isinstance(model, str | Path):
            refuse_other(finished, str(model), source, asked, dtype)
        else:
            dtype = str(model.dtype).removeprefix("torch.")
            refuse_other(finished, model.source, source, asked, dtype)
            refuse_other_weights(finished, model.fingerprint())
        unread = " Standard input was not read." if source.source == "-" else ""
        say.say(
            f"The index in {folder} is finished: nothing to do."
            f" The model's weights were not compared; their hash is in the manifest.{unread}"
        )
        return finished
    from ffmem.indexing.build import Build

    source.refuse_missing()
    if isinstance(model, str | Path):
        say.say(f"Loading {model}.")
        model = load(model, dtype=dtype, device=device)
    Build(model, source, folder, asked, say).run()
    return Index(folder)


def open(folder: str | Path) -> Index:
    """Open a finished index."""
    return Index(folder)


def extend(
    folder: str | Path,
    corpus: "Corpus | str",
    *,
    model: "Memories | str | Path | None" = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Index:
    """Add a corpus to an index; `model` only if it has moved since."""
    from ffmem.corpus.corpus import Corpus
    from ffmem.indexing.extend import extend as extend_index

    before = Index(folder)
    source = Corpus(corpus) if isinstance(corpus, str) else corpus
    memories = before.manifest.model.source if model is None else model
    if isinstance(memories, str | Path):
        memories = load(memories, dtype=before.manifest.dtype, device=device)
    return extend_index(before, memories, source, progress or Progress(quiet=True))


def merge(folders: Sequence[str | Path], out: str | Path) -> Index:
    """Put indexes of parts of a corpus together in a new folder."""
    from ffmem.indexing.merge import merge as merge_indexes

    return merge_indexes(folders, out)


def search(folder: str | Path | Index, query: str, **options: Any) -> "list[Hit]":
    """Return the memories whose values or triggers contain a text.

    `options`: place ("values" or "triggers"), regex, layer, limit.
    """
    from ffmem.indexing.search import Search

    with closing(Search(folder if isinstance(folder, Index) else Index(folder))) as opened:
        return opened.find(query, **options)


def export(
    folder: str | Path | Index, to: str, out: str | Path, step: Step = lambda n: None
) -> None:
    """Write an index as `jsonl` or `csv`; `step` is told of every memory."""
    from ffmem.indexing.export import export as export_index

    index = folder if isinstance(folder, Index) else Index(folder)
    export_index(index, to, Path(out), step)


def verify(folder: str | Path) -> list[str]:
    """Return what is wrong with an index: nothing, if every hash and invariant holds."""
    from ffmem.indexing.verify import verify as verify_index

    return verify_index(Index(folder))

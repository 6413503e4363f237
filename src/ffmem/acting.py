"""The public functions that run prompts, change memories and compare them.

Each takes the arguments of its command; heavy libraries are imported when one is called.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffmem.indexing.store import Index
from ffmem.progress import Progress

if TYPE_CHECKING:
    from ffmem.causal.affected import Effect
    from ffmem.causal.kept import Kept
    from ffmem.causal.known import Knowledge
    from ffmem.causal.opened import Opened
    from ffmem.causal.traced import Trace
    from ffmem.comparing.comparison import Comparison
    from ffmem.corpus.corpus import Corpus
    from ffmem.models.memories import Memories
    from ffmem.models.neighbours import Neighbour


def trace(
    place: "Memories | Index | str | Path",
    prompt: str,
    *,
    off: Sequence[object] = (),
    set: Mapping[str, float] | None = None,
    scale: Mapping[str, float] | None = None,
    mean: Sequence[object] = (),
    positions: Sequence[int] | None = None,
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    **options: Any,
) -> "Trace":
    """Follow a prompt through a model, layer by layer; with edits, a second time under them.

    `place` is a model, or an index, which adds percentiles. `options`: position, top, generate (a
    number of tokens), temperature, seed, grid (every layer at every position as well).
    """
    from ffmem.causal.edits import Edits

    asked = {"off": off, "set": set, "scale": scale, "mean": mean}
    _refuse_unknown_cells(place, asked, positions)
    at = _opened(place, start, model, dtype, device, progress)
    edits = Edits.of(off=off, set=set, scale=scale, mean=mean, index=at.index, positions=positions)
    from ffmem.causal.prompt import read_prompt
    from ffmem.causal.trace import trace as trace_prompt

    read = read_prompt(at.memories, prompt, at.start)
    found = trace_prompt(at.memories, read, edits, index=at.index, **options)
    found.notes.extend(_other_settings(at))
    return found


def effect(
    place: "Memories | Index | str | Path",
    prompt: str | None = None,
    *,
    prompts: str | Path | None = None,
    against: str | Path | None = None,
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    **options: Any,
) -> "Effect | Knowledge":
    """Measure what switching memories off, one at a time, does to the next token of a prompt.

    `prompts` is a file of prompts instead, `against` one of control prompts. `options`: top,
    candidates, cells, integrated, steps; for one prompt also target, position, positions.
    """
    from ffmem.errors import FfmemError

    if (prompt is None) == (prompts is None):
        raise FfmemError("Give one prompt, or a file of prompts: one of the two.")
    if prompt is not None and against is not None:
        raise FfmemError("Control prompts are compared with a file of prompts, not with one.")
    if prompts is not None:
        from ffmem.causal.facts import read_facts

        for path in (prompts, against):  # a wrong file is told before a model is loaded
            if path is not None:
                read_facts(path)
    at = _opened(place, start, model, dtype, device, progress)
    if prompt is not None:
        from ffmem.causal.effect import effect as effect_of_prompt
        from ffmem.causal.prompt import read_prompt

        read = read_prompt(at.memories, prompt, at.start)
        return effect_of_prompt(at.memories, read, progress=progress, **options)
    from ffmem.causal.knowledge import effect_of_facts

    assert prompts is not None, "it was asked above"
    return effect_of_facts(
        at.memories, prompts, at.start, against=against, progress=progress, **options
    )


def neighbours(
    place: "Memories | Index | str | Path",
    cell: object,
    *,
    by: str = "value",
    n: int = 10,
    model: "Memories | str | Path | None" = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "list[Neighbour]":
    """Return the memories whose values, or keys, point most nearly the same or opposite way."""
    from ffmem.cells import Cell

    asked = Cell.of(cell)
    at = _opened(place, None, model, dtype, device, progress)
    from ffmem.models.neighbours import neighbours as find

    return find(at.memories, asked, by, n)


def _other_settings(at: "Opened") -> list[str]:
    """Return what makes a prompt's coefficients hard to compare with those of the index."""
    if at.index is None:
        return []
    manifest, notes = at.index.manifest, []
    dtype = str(at.memories.dtype).removeprefix("torch.")
    if at.start != manifest.start.id:
        notes.append(
            "Percentiles are those of an index whose sentences start otherwise"
            f" ({manifest.start.token or 'without a start token'})."
        )
    if dtype != manifest.dtype:
        notes.append(f"Percentiles are those of an index in {manifest.dtype}; this is {dtype}.")
    return notes


def _refuse_unknown_cells(
    place: object, asked: Mapping[str, Any], positions: Sequence[int] | None
) -> None:
    """Refuse what is no edit, or not of this index, before a model is loaded."""
    from ffmem.causal.edits import Edits, cells_of

    known = {name: cells for name, cells in asked.items() if name != "mean"}
    edits = Edits.of(**known, positions=positions)
    cells = [edit.cell for edit in edits] + cells_of("mean", asked["mean"])
    if isinstance(place, str | Path) and (Path(place) / "manifest.json").is_file():
        place = Index(place)
    if isinstance(place, Index):
        for cell in cells:
            place.layout.resolve(cell)


def _opened(
    place: "Memories | Index | str | Path",
    start: str | None,
    model: "Memories | str | Path | None",
    dtype: str | None,
    device: str,
    progress: Progress | None,
) -> "Opened":
    """Return the model of MODEL_OR_DIR, refusing a wrong path before anything heavy is loaded."""
    if isinstance(place, str | Path):
        from ffmem.models.argument import canonical

        canonical(str(place))
    elif place is None or isinstance(place, int | float | bytes | list | tuple | dict):
        raise TypeError(
            f"A model or an index was expected, by name or loaded; {place!r} was given."
        )
    from ffmem.causal.opened import opened

    return opened(place, start=start, model=model, dtype=dtype, device=device, progress=progress)


def edit(
    place: "Memories | Index | str | Path",
    out: str | Path,
    *,
    off: Sequence[object] = (),
    set: Mapping[str, float] | None = None,
    scale: Mapping[str, float] | None = None,
    mean: Sequence[object] = (),
    patch: str | Path | None = None,
    undo: str | Path | None = None,
    corpus: "Corpus | str | Path | None" = "wikitext-2:valid",
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    device: str = "auto",
    progress: Progress | None = None,
    **reading: Any,
) -> "Kept":
    """Write edits into the weights, or apply or undo a patch; save the model in a new folder.

    Side effects are measured on `corpus`, unless it is None. `reading` says how that is read:
    unit, column, detokenize, limit (200).
    """
    from ffmem.causal.kept import Request, keep
    from ffmem.corpus.corpus import Corpus
    from ffmem.errors import CorpusError

    if isinstance(corpus, str | Path):
        for name in reading:
            if name not in ("unit", "column", "detokenize", "limit"):
                raise TypeError(
                    f"edit() has no option {name!r}. How the corpus is read: unit, column,"
                    " detokenize, limit; corpus=None measures no side effects."
                )
        corpus = Corpus(str(corpus), **({"limit": 200} | reading))
    elif corpus is not None and reading:
        raise CorpusError(f"A Corpus says itself how it is read: {', '.join(reading)} came too.")
    asked = {"off": off, "set": set, "scale": scale, "mean": mean}
    _refuse_unknown_cells(place, asked, None)
    request = Request.of(Path(out), asked, patch, undo, corpus)
    at = _opened(place, start, model, "auto", device, progress)
    return keep(at, request, start, progress or Progress(quiet=True))


def compare(
    first: str | Path | Index,
    second: str | Path | Index,
    out: str | Path,
    *,
    models: bool = True,
    first_model: "Memories | str | Path | None" = None,
    second_model: "Memories | str | Path | None" = None,
    top: int = 50,
    device: str = "auto",
    progress: Progress | None = None,
) -> "Comparison":
    """Compare two indexes of one architecture over one corpus; write numbers and figure.

    The models are those that the indexes name, or are where `first_model` and `second_model` say.
    Without `models`, nothing is said about the directions of values, and none is loaded.
    """
    from ffmem.comparing.matching import refuse_unlike
    from ffmem.measuring import place

    one = first if isinstance(first, Index) else Index(first)
    other = second if isinstance(second, Index) else Index(second)
    refuse_unlike(one, other)  # told before anything heavy is loaded
    from ffmem.comparing.compare import compare as compare_indexes

    with place(Path(out)):
        return compare_indexes(
            one,
            other,
            Path(out),
            models=models,
            first_model=first_model,
            second_model=second_model,
            top=top,
            device=device,
            progress=progress,
        )


def serve(folders: Sequence[str | Path], **options: Any) -> None:
    """Show indexes on a local web page, until it is stopped.

    `options`: reports (folders of figures), host, port, token ("new" makes one), allowed (further
    names of this machine), model, device, db (of the annotators' study), ready (told the address).
    """
    from ffmem.web.serving import serve as run

    if isinstance(folders, str | Path):
        folders = [folders]
    given = options.pop("reports", ())
    run([Path(one) for one in folders], reports=[Path(one) for one in given], **options)

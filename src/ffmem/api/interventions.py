"""Interventions: trace prompts, switch memories off, edit weights, compare models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffmem.api.experiments import output_folder
from ffmem.api.index import as_index
from ffmem.errors import CorpusError, FfmemError
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
    from ffmem.models.memories import Memories, Neighbour


def trace(
    place: "Memories | Index | str | Path",
    prompt: str,
    *,
    position: int = -1,
    top: int = 10,
    off: Sequence[object] = (),
    set: Mapping[str, float] | None = None,
    scale: Mapping[str, float] | None = None,
    mean: Sequence[object] = (),
    positions: Sequence[int] | None = None,
    generate: int = 0,
    temperature: float | None = None,
    seed: int = 0,
    grid: bool = False,
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "Trace":
    """Return what each layer predicts for a prompt, and which memories contribute.

    With edits, the prompt runs a second time under them.

    Args:
        place: A model, or an index, which adds percentiles of coefficients.
        prompt: The text.
        position: Position to read; the start token, if there is one, is position 0.
        top: Tokens and memories to return per layer.
        off: Memories to switch off.
        set: Coefficients to set, by memory.
        scale: Factors to multiply coefficients by, by memory.
        mean: Memories to set to their mean coefficient in the index.
        positions: Positions to edit. Default: all.
        generate: Tokens to continue the prompt by.
        temperature: Sampling temperature of the continuation. Default: greedy.
        seed: Random seed of a sampled continuation.
        grid: Also return what every layer predicts at every position.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        dtype: Number format of the model. Default: as the index, or "float32".
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    from ffmem.causal.edits import Edits

    edits = {"off": off, "set": set, "scale": scale, "mean": mean}
    _check_edits(place, edits, positions)
    opened = _open(place, start, model, dtype, device, progress)
    from ffmem.causal.prompt import read_prompt
    from ffmem.causal.trace import trace as trace_prompt

    found = trace_prompt(
        opened.memories,
        read_prompt(opened.memories, prompt, opened.start),
        Edits.of(**edits, index=opened.index, positions=positions),
        position=position,
        top=top,
        generate=generate,
        temperature=temperature,
        seed=seed,
        index=opened.index,
        grid=grid,
    )
    found.notes.extend(_differences_from_index(opened))
    return found


def effect(
    place: "Memories | Index | str | Path",
    prompt: str | None = None,
    *,
    target: str | None = None,
    position: int | None = None,
    positions: Sequence[int] | None = None,
    prompts: str | Path | None = None,
    against: str | Path | None = None,
    top: int = 20,
    candidates: int = 200,
    cells: Sequence[object] = (),
    integrated: bool = False,
    steps: int = 20,
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "Effect | Knowledge":
    """Return the exact change of log p(next token) when memories are off, one at a time.

    A prompt gives an `Effect`; a file of prompts gives a `Knowledge`, their average.

    Args:
        place: A model, or an index.
        prompt: The text.
        target: Token to measure. Default: the model's own next token.
        position: Position to read. Default: the last.
        positions: Positions at which memories are off. Default: all.
        prompts: File of prompts and targets (.jsonl, .tsv, .txt) instead of one prompt.
        against: File of control prompts, whose mean is subtracted from that of `prompts`.
        top: Memories to return.
        candidates: Memories to measure, chosen by estimates.
        cells: Memories to measure as well.
        integrated: Also estimate by integrated gradients.
        steps: Steps of integrated gradients.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        dtype: Number format of the model. Default: as the index, or "float32".
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    if (prompt is None) == (prompts is None):
        raise FfmemError("Give either one prompt or a file of prompts.")
    if prompt is not None and against is not None:
        raise FfmemError("Control prompts need a file of prompts to be compared with.")
    of_prompt = {"target": target, "position": position, "positions": positions}
    if prompt is None and any(value is not None for value in of_prompt.values()):
        raise FfmemError("target, position and positions need one prompt, not a file of prompts.")
    for path in (prompts, against):
        if path is not None:
            from ffmem.causal.facts import read_facts

            read_facts(path)  # raises on a wrong file before a model is loaded
    opened = _open(place, start, model, dtype, device, progress)
    if prompt is not None:
        from ffmem.causal.effect import effect as effect_of_prompt
        from ffmem.causal.prompt import read_prompt

        return effect_of_prompt(
            opened.memories,
            read_prompt(opened.memories, prompt, opened.start),
            target=target,
            position=-1 if position is None else position,
            positions=positions,
            top=top,
            candidates=candidates,
            cells=cells,
            integrated=integrated,
            steps=steps,
            progress=progress,
        )
    from ffmem.causal.knowledge import effect_of_facts

    assert prompts is not None, "checked above"
    return effect_of_facts(
        opened.memories,
        prompts,
        opened.start,
        against=against,
        top=top,
        candidates=candidates,
        cells=cells,
        integrated=integrated,
        steps=steps,
        progress=progress,
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
    """Return the memories whose vectors have the largest |cosine| with those of a memory.

    Args:
        place: A model, or an index.
        cell: The memory.
        by: "value", or "key" (in gated models, the gate's).
        n: Memories to return.
        model: The model of an index, or where it is now. Default: the one that the index names.
        dtype: Number format of the model. Default: as the index, or "float32".
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    from ffmem.cells import Cell

    asked = Cell.of(cell)
    opened = _open(place, None, model, dtype, device, progress)
    from ffmem.models.memories import neighbours as find

    return find(opened.memories, asked, by, n)


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
    unit: str = "sentence",
    column: str = "text",
    detokenize: str | None = None,
    limit: int | None = 200,
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "Kept":
    """Write edits of memories into a model's weights; return what was written and measured.

    Args:
        place: A model, or an index, which knows means.
        out: Folder of the edited model.
        off: Memories to switch off.
        set: Coefficients to set, by memory.
        scale: Factors to multiply coefficients by, by memory.
        mean: Memories to set to their mean coefficient in the index.
        patch: Apply this edit.safetensors instead of edits.
        undo: Undo this edit.safetensors instead of edits.
        corpus: Corpus to measure side effects on; None measures none.
        unit: What one sentence of a corpus given by name is: "sentence", "line" or "window:N".
        column: Field of its text.
        detokenize: "wikitext" undoes WikiText's tokenization.
        limit: Read at most this many of its sentences.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    from ffmem.causal.kept import Request, keep
    from ffmem.corpus.corpus import Corpus

    if isinstance(corpus, str | Path):
        corpus = Corpus(str(corpus), unit, column, detokenize, limit)
    elif corpus is not None and (unit, column, detokenize, limit) != (
        "sentence",
        "text",
        None,
        200,
    ):
        raise CorpusError("Pass unit, column, detokenize and limit to Corpus(), not to edit().")
    edits = {"off": off, "set": set, "scale": scale, "mean": mean}
    _check_edits(place, edits, None)
    request = Request.of(Path(out), edits, patch, undo, corpus)
    opened = _open(place, start, model, "auto", device, progress)
    return keep(opened, request, start, progress or Progress(quiet=True))


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
    """Compare two indexes of one architecture over one corpus; return the comparison.

    Its numbers and figure are written to `out`.

    Args:
        first: An index.
        second: The index to compare with it.
        out: Folder to write.
        models: Whether to load the models and compare the directions of values.
        first_model: The model of the first index, or where it is now.
        second_model: The model of the second index, or where it is now.
        top: Most changed memories to list.
        device: Where the models run.
        progress: Where progress is shown. Default: nowhere.
    """
    from ffmem.comparing.matching import refuse_unlike

    one, other = as_index(first), as_index(second)
    refuse_unlike(one, other)  # before anything heavy is imported
    from ffmem.comparing.compare import compare as compare_indexes

    with output_folder(Path(out)):
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


def _open(
    place: "Memories | Index | str | Path",
    start: str | None,
    model: "Memories | str | Path | None",
    dtype: str | None,
    device: str,
    progress: Progress | None,
) -> "Opened":
    """Return the model of MODEL_OR_DIR; raise on a wrong path before anything heavy is imported."""
    if isinstance(place, str | Path):
        from ffmem.models.arguments import resolve_model

        resolve_model(str(place))
    elif place is None or isinstance(place, int | float | bytes | list | tuple | dict):
        raise TypeError(f"Expected a model or an index, or the name of one; got {place!r}.")
    from ffmem.causal.opened import opened

    return opened(place, start=start, model=model, dtype=dtype, device=device, progress=progress)


def _check_edits(place: object, edits: Mapping[str, Any], positions: Sequence[int] | None) -> None:
    """Raise if an edit is malformed or names a memory that an index lacks; loads no model."""
    from ffmem.causal.edits import Edits, cells_of

    without_means = {name: cells for name, cells in edits.items() if name != "mean"}
    known = Edits.of(**without_means, positions=positions)
    cells = [edit.cell for edit in known] + cells_of("mean", edits["mean"])
    if isinstance(place, str | Path) and (Path(place) / "manifest.json").is_file():
        place = Index(place)
    if isinstance(place, Index):
        for cell in cells:
            place.layout.resolve(cell)


def _differences_from_index(opened: "Opened") -> list[str]:
    """Return what makes a prompt's coefficients hard to compare with those of the index."""
    if opened.index is None:
        return []
    manifest, notes = opened.index.manifest, []
    dtype = str(opened.memories.dtype).removeprefix("torch.")
    if opened.start != manifest.start.id:
        token = (
            f"start with {manifest.start.token}" if manifest.start.token else "have no start token"
        )
        notes.append(f"Percentiles come from an index whose sentences {token}.")
    if dtype != manifest.dtype:
        notes.append(
            f"Percentiles come from an index in {manifest.dtype}; this trace is in {dtype}."
        )
    return notes

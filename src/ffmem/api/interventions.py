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
    from ffmem.corpus.corpus import Corpus
    from ffmem.interventions.checkpoint import EditResult
    from ffmem.interventions.comparison import Comparison
    from ffmem.interventions.effect import EffectResult
    from ffmem.interventions.facts import FactsResult
    from ffmem.interventions.prompts import LoadedModel
    from ffmem.interventions.trace import TraceResult
    from ffmem.models.memories import Memories, Neighbour


def trace(
    place: "Memories | Index | str | Path",
    prompt: str | Sequence[str] | None = None,
    *,
    prompts: str | Path | None = None,
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
) -> "TraceResult | list[TraceResult]":
    """Return what each layer predicts for a prompt, and which memories contribute.

    With edits, the prompt runs a second time under them. Several prompts give a list.

    Args:
        place: A model, or an index, which adds percentiles of coefficients.
        prompt: The text, or a list of texts.
        prompts: File of prompts (.jsonl, .tsv, .txt) instead.
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
    from ffmem.interventions.edits import Edits

    if (prompt is None) == (prompts is None):
        raise FfmemError("Give either a prompt or a file of prompts.")
    wanted = {"off": off, "set": set, "scale": scale, "mean": mean}
    _check_edits(place, wanted, positions)
    if prompts is not None:
        from ffmem.interventions.facts import read_facts

        prompt = [fact.prompt for fact in read_facts(prompts).facts]
    loaded = _open(place, start, model, dtype, device, progress)
    from ffmem.interventions.trace import trace as trace_prompt

    edits = Edits.of(**wanted, index=loaded.index, positions=positions)
    texts: Any = prompt if isinstance(prompt, list | tuple) else [prompt]
    found = [
        trace_prompt(
            loaded,
            text,
            edits,
            position=position,
            top=top,
            generate=generate,
            temperature=temperature,
            seed=seed,
            grid=grid,
        )
        for text in texts
    ]
    return found if texts is prompt else found[0]


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
) -> "EffectResult | FactsResult":
    """Return the exact change of log p(next token) when memories are off, one at a time.

    A prompt gives an `EffectResult`; a file of prompts gives a `FactsResult`, their average.

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
    if prompt is None and not (target is None and position is None and positions is None):
        raise FfmemError("target, position and positions need one prompt, not a file of prompts.")
    if prompt is not None:
        loaded = _open(place, start, model, dtype, device, progress)
        from ffmem.interventions.effect import effect as effect_of_prompt

        return effect_of_prompt(
            loaded,
            prompt,
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
    from ffmem.interventions.facts import effect_of_facts, read_facts

    assert prompts is not None, "checked above"
    for path in (prompts, against):
        if path is not None:
            read_facts(path)  # raises on a wrong file before the model is loaded
    return effect_of_facts(
        _open(place, start, model, dtype, device, progress),
        prompts,
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
    loaded = _open(place, None, model, dtype, device, progress)
    from ffmem.models.memories import neighbours as find

    return find(loaded.memories, asked, by, n)


def edit(
    place: "Memories | Index | str | Path",
    out: str | Path,
    *,
    off: Sequence[object] = (),
    set: Mapping[str, float] | None = None,
    scale: Mapping[str, float] | None = None,
    mean: Sequence[object] = (),
    edits: str | Path | None = None,
    corpus: "Corpus | str | Path | None" = "wikitext-2:valid",
    unit: str = "sentence",
    column: str = "text",
    detokenize: str | None = None,
    limit: int | None = 200,
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "EditResult":
    """Write edits of memories into a model's weights; return what was written and measured.

    Args:
        place: A model, or an index, which knows means.
        out: Folder of the edited model.
        off: Memories to switch off.
        set: Coefficients to set, by memory.
        scale: Factors to multiply coefficients by, by memory.
        mean: Memories to set to their mean coefficient in the index.
        edits: The edits.json of an edited model, to make the same edits again.
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
    from ffmem.corpus.corpus import Corpus
    from ffmem.interventions.edits import Edits, EditsFile

    if isinstance(corpus, str | Path):
        corpus = Corpus(str(corpus), unit, column, detokenize, limit)
    elif corpus is not None and (unit, column, detokenize, limit) != (
        *("sentence", "text", None, 200),
    ):
        raise CorpusError("Pass unit, column, detokenize and limit to Corpus(), not to edit().")
    wanted = {"off": off, "set": set, "scale": scale, "mean": mean}
    if any(wanted.values()) == (edits is not None):
        raise FfmemError("Give either memories to edit (off, set, scale, mean) or an edits.json.")
    # All that can be checked before the model is loaded.
    _check_edits(place, wanted, None)
    recorded = None if edits is None else EditsFile.read(Path(edits))
    if corpus is not None:
        corpus.check_exists()
    from ffmem.interventions.checkpoint import check_free, edit_checkpoint

    check_free(Path(out))
    loaded = _open(place, start, model, "auto", device, progress)
    to_write = recorded or Edits.of(**wanted, index=loaded.index)
    return edit_checkpoint(loaded, Path(out), to_write, corpus, progress)


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
    from ffmem.interventions.compare import compare as compare_indexes

    one, other = as_index(first), as_index(second)
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
) -> "LoadedModel":
    """Return the model of MODEL_OR_DIR; raise on a wrong path before anything heavy is imported."""
    if isinstance(place, str | Path):
        from ffmem.models.arguments import resolve_model

        resolve_model(str(place))
    elif place is None or isinstance(place, int | float | bytes | list | tuple | dict):
        raise TypeError(f"Expected a model or an index, or the name of one; got {place!r}.")
    from ffmem.interventions.prompts import open_model

    return open_model(
        place, start=start, model=model, dtype=dtype, device=device, progress=progress
    )


def _check_edits(place: object, edits: Mapping[str, Any], positions: Sequence[int] | None) -> None:
    """Raise if an edit is malformed or names a memory that an index lacks; loads no model."""
    from ffmem.interventions.edits import Edits, parse_cells

    without_means = {name: cells for name, cells in edits.items() if name != "mean"}
    known = Edits.of(**without_means, positions=positions)
    cells = [edit.cell for edit in known] + parse_cells("mean", edits["mean"])
    if isinstance(place, str | Path) and (Path(place) / "manifest.json").is_file():
        place = Index(place)
    if isinstance(place, Index):
        for cell in cells:
            place.layout.resolve(cell)

"""Interventions: trace prompts, switch memories off, edit weights, compare models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ffmem.api.index import index
from ffmem.cells import Cell
from ffmem.corpus.corpus import Corpus
from ffmem.errors import FfmemError
from ffmem.indexing.config import IndexConfig
from ffmem.indexing.store import Index, output_folder
from ffmem.interventions.checkpoint import EditResult, check_free, edit_checkpoint
from ffmem.interventions.compare import Comparison, compare
from ffmem.interventions.edits import Edits, EditsFile
from ffmem.interventions.effect import effect as effect_of_prompt
from ffmem.interventions.effect import effect_of_facts, read_prompt_file
from ffmem.interventions.forward import find_index, open_model
from ffmem.interventions.results import EffectResult, FactsResult, TraceResult
from ffmem.interventions.side_effects import side_effects_corpus
from ffmem.interventions.trace import trace as trace_prompt
from ffmem.models.arguments import resolve_adapter, resolve_model
from ffmem.models.chat import as_messages, check_messages
from ffmem.models.memories import Memories, Neighbour
from ffmem.models.memories import neighbours as find_neighbours
from ffmem.progress import Progress
from ffmem.signatures import check_arguments


@check_arguments
def trace(
    model_or_index: Memories | Index | str | Path,
    prompt: str | Sequence[Any] | None = None,
    *,
    prompts: str | Path | None = None,
    chat: bool = False,
    position: int = -1,
    top: int = 10,
    off: Sequence[object] = (),
    set: Mapping[str, float] | None = None,
    scale: Mapping[str, float] | None = None,
    mean: Sequence[object] = (),
    redirect: Mapping[str, str] | None = None,
    margin: float | None = None,
    forbid: Sequence[str] = (),
    force: Sequence[str] = (),
    positions: Sequence[int] | None = None,
    generate: int = 0,
    temperature: float | None = None,
    seed: int = 0,
    grid: bool = False,
    start: str | None = None,
    model: Memories | str | Path | None = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> TraceResult | list[TraceResult]:
    """Return what each layer predicts for a prompt, and which memories contribute.

    With edits, the prompt runs twice, without and with them. Several prompts give a list.

    Args:
        model_or_index: A model, or an index, which adds percentiles of coefficients.
        prompt: The text, or a list of texts; with `chat`, also messages, or a list of them.
        prompts: File of prompts (.jsonl, .tsv, .txt) instead.
        chat: Whether prompts are conversations, written by the tokenizer's chat template. A text is
            one user turn; messages are dicts with "role" and "content". Read where the answer
            begins; if the last message is the assistant's, it is the start of the answer.
        position: Position to read; the start token, if there is one, is position 0.
        top: Tokens and memories to return per layer.
        off: Memories and whole experts to switch off.
        set: Coefficients to set, by memory.
        scale: Factors to multiply coefficients by, by memory.
        mean: Memories to set to their mean coefficient in the index.
        redirect: Tokens that values should promote, by memory; "-L5N12" is about −v.
        margin: Lead of these tokens, in standard deviations of a value's logits. Default: 0.5.
        forbid: Experts that the router must not choose.
        force: Experts that the router must choose.
        positions: Positions to edit. Default: all.
        generate: Tokens to continue the prompt by.
        temperature: Sampling temperature of the continuation. Default: greedy.
        seed: Random seed of a sampled continuation.
        grid: Also return what every layer predicts at every position.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        adapter: Adapter to merge into the model; or where that of an index is now.
        dtype: Number format of the model. Default: as the index, or "float32".
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    if (prompt is None) == (prompts is None):
        raise FfmemError("Pass either a prompt or a file of prompts.")
    by_kind: dict[str, Any] = {"off": off, "set": set, "scale": scale, "mean": mean}
    by_kind |= {"redirect": redirect, "margin": margin, "forbid": forbid, "force": force}
    edits = _read_edits(model_or_index, **by_kind, positions=positions)
    if prompts is not None:
        prompt = [fact.prompt for fact in read_prompt_file(prompts, chat)[1]]
    several = prompts is not None or _is_several(prompt, chat)
    texts = _check_prompts(prompt if several else [prompt], chat)
    loaded = open_model(model_or_index, start, model, adapter, dtype, device, progress)
    found = [
        trace_prompt(
            loaded,
            text,
            edits,
            chat=chat,
            position=position,
            top=top,
            generate=generate,
            temperature=temperature,
            seed=seed,
            grid=grid,
        )
        for text in texts
    ]
    return found if several else found[0]


def _read_edits(model_or_index: object, **edits: Any) -> Edits:
    """Return edits; raise if one is malformed, or names a memory that an index lacks."""
    index = find_index(model_or_index)
    found = Edits.of(**edits, index=index)
    if index is not None:
        found.resolve(index.layout)
    return found


def _check_prompts(prompts: Any, chat: bool) -> Any:
    """Return prompts; raise on malformed messages, before a model is loaded."""
    for prompt in prompts if chat else ():
        check_messages(as_messages(prompt))
    return prompts


def _is_several(prompt: object, chat: bool) -> bool:
    """Return whether a prompt is a list of prompts, and not the messages of one conversation."""
    if not isinstance(prompt, list | tuple):
        return False
    return not (chat and prompt and all(isinstance(one, dict) for one in prompt))


@check_arguments
def effect(
    model_or_index: Memories | Index | str | Path,
    prompt: str | Sequence[Any] | None = None,
    *,
    chat: bool = False,
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
    model: Memories | str | Path | None = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> EffectResult | list[EffectResult] | FactsResult:
    """Return the exact change of log p(next token) when memories are off, one at a time.

    A prompt gives an `EffectResult`, several give a list; a file of prompts gives a `FactsResult`,
    their average.

    Args:
        model_or_index: A model, or an index.
        prompt: The text, or a list of texts; with `chat`, also messages, or a list of them.
        chat: Whether prompts are conversations, as in `trace`.
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
        adapter: Adapter to merge into the model; or where that of an index is now.
        dtype: Number format of the model. Default: as the index, or "float32".
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    if (prompt is None) == (prompts is None):
        raise FfmemError("Pass either a prompt or a file of prompts.")
    if prompt is not None and against is not None:
        raise FfmemError("against (control prompts) needs prompts, the file to compare it with.")
    if prompt is None and not (target is None and position is None and positions is None):
        raise FfmemError("target, position and positions need a prompt, not a file of prompts.")
    options: dict[str, Any] = {
        "top": top,
        "candidates": candidates,
        "cells": cells,
        "integrated": integrated,
        "steps": steps,
        "progress": progress,
    }
    if prompts is not None:
        for path in (prompts, against):
            if path is not None:
                read_prompt_file(path, chat)  # raises on a wrong file before the model is loaded
        loaded = open_model(model_or_index, start, model, adapter, dtype, device, progress)
        return effect_of_facts(loaded, prompts, chat=chat, against=against, **options)
    several = _is_several(prompt, chat)
    texts = _check_prompts(prompt if several else [prompt], chat)
    loaded = open_model(model_or_index, start, model, adapter, dtype, device, progress)
    read_at = -1 if position is None else position
    found = [
        effect_of_prompt(
            loaded, text, chat=chat, target=target, position=read_at, positions=positions, **options
        )
        for text in texts
    ]
    return found if several else found[0]


@check_arguments
def neighbours(
    model_or_index: Memories | Index | str | Path,
    cell: object,
    *,
    by: str = "value",
    n: int = 10,
    model: Memories | str | Path | None = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> list[Neighbour]:
    """Return the memories whose vectors have the largest |cosine| with those of a memory.

    Args:
        model_or_index: A model, or an index.
        cell: The memory.
        by: "value", or "key" (in gated models, the gate's).
        n: Memories to return.
        model: The model of an index, or where it is now. Default: the one that the index names.
        adapter: Adapter to merge into the model; or where that of an index is now.
        dtype: Number format of the model. Default: as the index, or "float32".
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    memory = Cell.of(cell)
    loaded = open_model(model_or_index, None, model, adapter, dtype, device, progress)
    return find_neighbours(loaded.memories, memory, by, n)


@check_arguments
def edit(
    model_or_index: Memories | Index | str | Path,
    out: str | Path,
    *,
    off: Sequence[object] = (),
    set: Mapping[str, float] | None = None,
    scale: Mapping[str, float] | None = None,
    mean: Sequence[object] = (),
    redirect: Mapping[str, str] | None = None,
    margin: float | None = None,
    edits: str | Path | None = None,
    corpus: Corpus | str | Path | None = "wikitext-2:valid",
    start: str | None = None,
    model: Memories | str | Path | None = None,
    adapter: str | Path | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> EditResult:
    """Write edits of memories into a model's weights; return what was written and measured.

    Args:
        model_or_index: A model, or an index, which knows means.
        out: Folder of the edited model.
        off: Memories and whole experts to switch off.
        set: Coefficients to set, by memory.
        scale: Factors to multiply coefficients by, by memory.
        mean: Memories to set to their mean coefficient in the index.
        redirect: Tokens that values should promote, by memory; "-L5N12" is about −v.
        margin: Lead of these tokens, in standard deviations of a value's logits. Default: 0.5.
        edits: The edits.json of an edited model, to repeat its edits.
        corpus: Corpus to measure side effects on; if given by name, its first 200 sentences. None
            measures none.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        adapter: Adapter to merge into the model; or where that of an index is now.
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    by_kind: dict[str, Any] = {"off": off, "set": set, "scale": scale, "mean": mean}
    by_kind |= {"redirect": redirect, "margin": margin}
    if any(by_kind.values()) == (edits is not None):
        raise FfmemError(
            "Pass either memories to edit (off, set, scale, mean, redirect) or an edits.json."
        )
    # All that can be checked before the model is loaded.
    to_write = (
        _read_edits(model_or_index, **by_kind) if edits is None else EditsFile.read(Path(edits))
    )
    check_free(Path(out))
    sample = side_effects_corpus(corpus)
    loaded = open_model(model_or_index, start, model, adapter, "auto", device, progress)
    return edit_checkpoint(loaded, Path(out), to_write, sample, progress)


@check_arguments
def compare_models(
    model: Memories | str | Path,
    other: Memories | str | Path | None,
    corpus: Corpus | str | Path,
    out: str | Path,
    *,
    adapter: str | Path | None = None,
    t: int = IndexConfig.t,
    prefixes: str = IndexConfig.prefixes,
    start: str = IndexConfig.start,
    batch_tokens: int = IndexConfig.batch_tokens,
    chunk_tokens: int = IndexConfig.chunk_tokens,
    threads: int | None = IndexConfig.threads,
    dtype: str = "float32",
    top: int = 50,
    device: str = "auto",
    progress: Progress | None = None,
) -> Comparison:
    """Index two models over one corpus, in `out`/first and `out`/second, and compare the indexes.

    The second model is `other`, or the first one with an adapter. Resumes an unfinished index; a
    finished one with the same settings is reused.

    Args:
        model: The first model: the base of a fine-tune, for example.
        other: The second model; None if an adapter makes it.
        corpus: The corpus, or its name.
        out: Folder to write.
        adapter: Adapter to merge into the first model, to get the second.
        t: Triggers to keep per memory and sign.
        prefixes: "best" keeps the best prefix of each sentence; "all" considers every prefix.
        start: Start token of every sentence; the second index takes that of the first.
        batch_tokens: Tokens per batch.
        chunk_tokens: Tokens per chunk, the unit of work.
        threads: CPU threads.
        dtype: Number format of the models.
        top: Most changed memories to list.
        device: Where the models run.
        progress: Where progress is shown. Default: nowhere.
    """
    if (other is None) == (adapter is None):
        raise FfmemError("Pass either a second model, or an adapter of the first.")
    for named in (model, other):
        if isinstance(named, str | Path):
            resolve_model(str(named))
    if adapter is not None:
        resolve_adapter(str(adapter))
    settings: dict[str, Any] = {
        "t": t,
        "prefixes": prefixes,
        "batch_tokens": batch_tokens,
        "chunk_tokens": chunk_tokens,
        "threads": threads,
        "dtype": dtype,
        "device": device,
        "progress": progress,
    }
    with output_folder(Path(out)):
        first = index(model, corpus, Path(out) / "first", start=start, **settings)
        id = first.manifest.start.id
        second = index(
            model if other is None else other,
            corpus,
            Path(out) / "second",
            adapter=adapter,
            start="none" if id is None else f"id:{id}",
            **settings,
        )
        return compare(first, second, out, top=top, device=device, progress=progress)

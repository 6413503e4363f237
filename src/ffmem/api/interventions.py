"""Interventions: trace prompts, switch memories off, edit weights, compare models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffmem.api.experiments import output_folder
from ffmem.api.index import as_index, index
from ffmem.errors import CorpusError, FfmemError
from ffmem.hub import is_hub_address
from ffmem.indexing.config import IndexConfig
from ffmem.indexing.store import Index
from ffmem.models.arguments import require_models, resolve_adapter, resolve_model
from ffmem.progress import Progress

if TYPE_CHECKING:
    from ffmem.corpus.corpus import Corpus
    from ffmem.interventions.checkpoint import EditResult
    from ffmem.interventions.circuit_results import CircuitResult
    from ffmem.interventions.coefficients import TextCoefficients
    from ffmem.interventions.compare import Comparison
    from ffmem.interventions.forward import LoadedModel
    from ffmem.interventions.results import (
        EffectResult,
        FactsResult,
        SourcesResult,
        TraceResult,
    )
    from ffmem.interventions.written import WriteResult
    from ffmem.models.memories import Memories, Neighbour


def trace(
    model_or_index: "Memories | Index | str | Path",
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
    model: "Memories | str | Path | None" = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "TraceResult | list[TraceResult]":
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
    from ffmem.interventions.edits import Edits

    if (prompt is None) == (prompts is None):
        raise FfmemError("Pass either a prompt or a file of prompts.")
    by_kind: dict[str, Any] = {"off": off, "set": set, "scale": scale, "mean": mean}
    by_kind |= {"redirect": redirect, "margin": margin, "forbid": forbid, "force": force}
    _check_edits(model_or_index, by_kind, positions)
    if prompts is not None:
        from ffmem.interventions.effect import read_prompt_file

        prompt = [fact.prompt for fact in read_prompt_file(prompts, chat)[1]]
    several = prompts is not None or _is_several(prompt, chat)
    texts: Any = prompt if several else [prompt]
    if chat:
        _check_chat(texts)
    loaded = _open(model_or_index, start, model, adapter, dtype, device, progress)
    from ffmem.interventions.trace import trace as trace_prompt

    edits = Edits.of(**by_kind, index=loaded.index, positions=positions)
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


def _check_chat(prompts: Sequence[Any]) -> None:
    """Raise on malformed messages, before a model is loaded."""
    from ffmem.models.chat import as_messages, check_messages

    for prompt in prompts:
        check_messages(as_messages(prompt))


def _is_several(prompt: object, chat: bool) -> bool:
    """Return whether a prompt is a list of prompts, and not the messages of one conversation."""
    if not isinstance(prompt, list | tuple):
        return False
    return not (chat and prompt and all(isinstance(one, dict) for one in prompt))


def coefficients(
    model_or_index: "Memories | Index | str | Path",
    texts: str | Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "TextCoefficients | list[TextCoefficients]":
    """Return the coefficients of every memory at every position of texts, as tensors.

    A text gives one `TextCoefficients`, several give a list: `.tokens`, `.layers[5]` with the
    axes (position, memory), `["L5N1234"]`. Experts are in `.experts`, for the positions that reach
    them.

    Args:
        model_or_index: A model, or an index.
        texts: The text, or a list of texts.
        layers: Only these layers.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        adapter: Adapter to merge into the model, or where that of an index is now.
        dtype: Number format of the model. Default: as the index, or "float32".
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    loaded = _open(model_or_index, start, model, adapter, dtype, device, progress)
    from ffmem.interventions.coefficients import coefficients as read_coefficients

    several: Any = texts if isinstance(texts, list | tuple) else [texts]
    found = read_coefficients(loaded, several, layers, progress)
    return found if several is texts else found[0]


def effect(
    model_or_index: "Memories | Index | str | Path",
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
    model: "Memories | str | Path | None" = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "EffectResult | list[EffectResult] | FactsResult":
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
        from ffmem.interventions.effect import effect_of_facts, read_prompt_file

        for path in (prompts, against):
            if path is not None:
                read_prompt_file(path, chat)  # raises on a wrong file before the model is loaded
        loaded = _open(model_or_index, start, model, adapter, dtype, device, progress)
        return effect_of_facts(loaded, prompts, chat=chat, against=against, **options)
    several = _is_several(prompt, chat)
    texts: Any = prompt if several else [prompt]
    if chat:
        _check_chat(texts)
    loaded = _open(model_or_index, start, model, adapter, dtype, device, progress)
    from ffmem.interventions.effect import effect as effect_of_prompt

    read_at = -1 if position is None else position
    found = [
        effect_of_prompt(
            loaded, text, chat=chat, target=target, position=read_at, positions=positions, **options
        )
        for text in texts
    ]
    return found if several else found[0]


def circuit(
    model_or_index: "Memories | Index | str | Path",
    prompt: str,
    *,
    target: str | None = None,
    position: int | None = None,
    nodes: int = 64,
    ablation: str = "auto",
    groups: Mapping[str, Sequence[str]] | None = None,
    off: Sequence[str] = (),
    out: str | Path | None = None,
    seed: int = 0,
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "CircuitResult":
    """Return the memories that lead to the next token, and which of them feed which.

    Args:
        model_or_index: A model, or an index, which knows the mean of each memory.
        prompt: The text.
        target: Token to explain. Default: the model's own next token.
        position: Position to read. Default: the last.
        nodes: Maximum number of nodes (memories at positions).
        ablation: Value of ablated coefficients: "mean" (of the index), "zero", or "auto".
        groups: Nodes, such as "L5N12@3", by a name; each group is ablated together.
        off: Groups to switch off all at once.
        out: Folder for circuit.json, circuit.svg and circuit-tracer.json. Default: none.
        seed: Random seed of the random circuits to compare with.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        adapter: Adapter to merge into the model, or where that of an index is now.
        dtype: Number format of the model. Default: as the index, or "float32".
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    loaded = _open(model_or_index, start, model, adapter, dtype, device, progress)
    from ffmem.interventions.circuit import circuit as find_circuit
    from ffmem.interventions.circuit_results import write_circuit

    found = find_circuit(
        loaded,
        prompt,
        target=target,
        position=-1 if position is None else position,
        nodes=nodes,
        ablation=ablation,
        groups=groups,
        off=off,
        seed=seed,
        progress=progress,
    )
    if out is not None:
        with output_folder(Path(out)):
            write_circuit(found, Path(out))
    return found


def sources(
    model_or_index: "Memories | Index | str | Path",
    cell: object,
    *,
    prompt: str | None = None,
    position: int | None = None,
    n: int = 10,
    candidates: int = 200,
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "SourcesResult":
    """Return the lower memories that feed a memory: by weights and, on a prompt, measured.

    Args:
        model_or_index: A model, or an index.
        cell: The memory.
        prompt: A text on which to measure which lower memories change its coefficient.
        position: Where to read the coefficient. Default: where it is largest.
        n: Memories to return.
        candidates: Memories to measure on the prompt, chosen by estimates.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        adapter: Adapter to merge into the model, or where that of an index is now.
        dtype: Number format of the model. Default: as the index, or "float32".
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    from ffmem.cells import Cell

    memory = Cell.of(cell)
    loaded = _open(model_or_index, start, model, adapter, dtype, device, progress)
    from ffmem.interventions.sources import find_sources

    return find_sources(
        loaded,
        memory,
        prompt=prompt,
        position=position,
        n=n,
        candidates=candidates,
        progress=progress,
    )


def neighbours(
    model_or_index: "Memories | Index | str | Path",
    cell: object,
    *,
    by: str = "value",
    n: int = 10,
    model: "Memories | str | Path | None" = None,
    adapter: str | Path | None = None,
    dtype: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "list[Neighbour]":
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
    from ffmem.cells import Cell

    memory = Cell.of(cell)
    loaded = _open(model_or_index, None, model, adapter, dtype, device, progress)
    from ffmem.models.memories import neighbours as find

    return find(loaded.memories, memory, by, n)


def edit(
    model_or_index: "Memories | Index | str | Path",
    out: str | Path,
    *,
    off: Sequence[object] = (),
    set: Mapping[str, float] | None = None,
    scale: Mapping[str, float] | None = None,
    mean: Sequence[object] = (),
    redirect: Mapping[str, str] | None = None,
    margin: float | None = None,
    edits: str | Path | None = None,
    corpus: "Corpus | str | Path | None" = "wikitext-2:valid",
    unit: str = "sentence",
    column: str = "text",
    detokenize: str | None = None,
    limit: int | None = 200,
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    adapter: str | Path | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "EditResult":
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
        corpus: Corpus to measure side effects on; None measures none.
        unit: What one sentence of a corpus given by name is: "sentence", "line" or "window:N".
        column: Field of its text.
        detokenize: "wikitext" undoes WikiText's tokenization.
        limit: Read at most this many of its sentences.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        adapter: Adapter to merge into the model; or where that of an index is now.
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    from ffmem.interventions.edits import Edits, EditsFile

    sample = _corpus(corpus, unit, column, detokenize, limit, "edit")
    by_kind: dict[str, Any] = {"off": off, "set": set, "scale": scale, "mean": mean}
    by_kind |= {"redirect": redirect, "margin": margin}
    if any(by_kind.values()) == (edits is not None):
        raise FfmemError(
            "Pass either memories to edit (off, set, scale, mean, redirect) or an edits.json."
        )
    # All that can be checked before the model is loaded.
    _check_edits(model_or_index, by_kind, None)
    recorded = None if edits is None else EditsFile.read(Path(edits))
    require_models()
    from ffmem.interventions.checkpoint import check_free, edit_checkpoint

    check_free(Path(out))
    loaded = _open(model_or_index, start, model, adapter, "auto", device, progress)
    to_write = recorded or Edits.of(**by_kind, index=loaded.index)
    return edit_checkpoint(loaded, Path(out), to_write, sample, progress)


def write(
    model_or_index: "Memories | Index | str | Path",
    prompt: str,
    token: str,
    out: str | Path,
    *,
    layer: int | None = None,
    cell: object | None = None,
    force: bool = False,
    margin: float = 1.0,
    probability: float | None = None,
    paraphrases: str | Path | None = None,
    neighbours: str | Path | None = None,
    controls: int = 3,
    seed: int = 0,
    corpus: "Corpus | str | Path | None" = "wikitext-2:valid",
    unit: str = "sentence",
    column: str = "text",
    detokenize: str | None = None,
    limit: int | None = 200,
    start: str | None = None,
    model: "Memories | str | Path | None" = None,
    adapter: str | Path | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> "WriteResult":
    """Write a fact into an idle memory: the model then continues a prompt with a token.

    Args:
        model_or_index: An index, which knows the idle memories; or a model, with `cell` and
            `force`.
        prompt: The text; its last token at the memory's layer becomes the key.
        token: The token to predict after it, with its leading space if it has one.
        out: Folder of the new model.
        layer: Layer to write into. Default: the best of four.
        cell: Memory to overwrite. Default: the most idle in the layer.
        force: Whether to overwrite a memory that is not idle, or not known to be.
        margin: How far the token should lead the next one, in nats.
        probability: What the token's probability should be, instead of a margin.
        paraphrases: File of prompts (.txt, .tsv, .jsonl) on which the fact should hold too.
        neighbours: File of prompts on which nothing should change. Default: text ending the same.
        controls: Other idle memories that get the same value and a random key, to compare with.
        seed: Random seed of the control.
        corpus: Corpus to measure side effects on; None measures none.
        unit: What one sentence of a corpus given by name is: "sentence", "line" or "window:N".
        column: Field of its text.
        detokenize: "wikitext" undoes WikiText's tokenization.
        limit: Read at most this many of its sentences.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        adapter: Adapter to merge into the model, or where that of an index is now.
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    from ffmem.interventions.effect import read_prompt_file

    sample = _corpus(corpus, unit, column, detokenize, limit, "write")
    for path in (paraphrases, neighbours):
        if path is not None:
            read_prompt_file(path)  # raises on a wrong file before the model is loaded
    require_models()
    from ffmem.interventions.checkpoint import check_free
    from ffmem.interventions.write import write as write_fact

    check_free(Path(out))
    loaded = _open(model_or_index, start, model, adapter, "auto", device, progress)
    return write_fact(
        loaded,
        prompt,
        token,
        Path(out),
        cell=cell,
        layer=layer,
        force=force,
        margin=margin,
        probability=probability,
        paraphrases=paraphrases,
        neighbours=neighbours,
        corpus=sample,
        controls=controls,
        seed=seed,
        progress=progress,
    )


def _corpus(
    corpus: "Corpus | str | Path | None",
    unit: str,
    column: str,
    detokenize: str | None,
    limit: int | None,
    function: str,
) -> "Corpus | None":
    """Return the corpus to measure side effects on; raise if there is no such one."""
    from ffmem.corpus.corpus import Corpus

    if isinstance(corpus, str | Path):
        corpus = Corpus(str(corpus), unit, column, detokenize, limit)
    elif corpus is not None and (unit, column, detokenize, limit) != (
        *("sentence", "text", None, 200),
    ):
        raise CorpusError(
            f"Pass unit, column, detokenize and limit to Corpus(), not to {function}()."
        )
    if corpus is not None:
        corpus.check_exists()
    return corpus


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


def compare_models(
    model: "Memories | str | Path",
    other: "Memories | str | Path | None",
    corpus: "Corpus | str | Path",
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
) -> "Comparison":
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


def _open(
    model_or_index: "Memories | Index | str | Path",
    start: str | None,
    model: "Memories | str | Path | None",
    adapter: str | Path | None,
    dtype: str | None,
    device: str,
    progress: Progress | None,
) -> "LoadedModel":
    """Return the model of MODEL_OR_DIR; raise on a wrong path before anything heavy is imported."""
    if is_hub_address(model_or_index):
        model_or_index = as_index(str(model_or_index))  # which says to pull it
    if isinstance(model_or_index, str | Path):
        resolve_model(str(model_or_index))
    elif model_or_index is None or isinstance(
        model_or_index, int | float | bytes | list | tuple | dict
    ):
        raise TypeError(
            f"Expected a model or an index, or the name of one; got {model_or_index!r}."
        )
    if adapter is not None:
        resolve_adapter(str(adapter))
    require_models()
    from ffmem.interventions.forward import open_model

    return open_model(
        model_or_index,
        start=start,
        model=model,
        adapter=adapter,
        dtype=dtype,
        device=device,
        progress=progress,
    )


def _check_edits(
    model_or_index: object, edits: Mapping[str, Any], positions: Sequence[int] | None
) -> None:
    """Raise if an edit is malformed or names a memory that an index lacks; loads no model."""
    from ffmem.interventions.edits import Edits, parse_cells

    without_means = {name: cells for name, cells in edits.items() if name != "mean"}
    known, means = (
        Edits.of(**without_means, positions=positions),
        parse_cells("mean", edits["mean"]),
    )
    if (
        isinstance(model_or_index, str | Path)
        and (Path(model_or_index) / "manifest.json").is_file()
    ):
        model_or_index = Index(model_or_index)
    if isinstance(model_or_index, Index):
        known.resolve(model_or_index.layout)
        for cell in means:
            model_or_index.layout.resolve(cell)

"""Commands that load a model: trace, effect, circuit, neighbours."""

import json
from pathlib import Path

import click

import ffmem
from ffmem.cli.options import (
    AT_LEAST_1,
    PATH,
    WholeNumber,
    chat_option,
    device_option,
    edit_options,
    json_option,
    model_or_index_argument,
    model_or_index_options,
    parse_edits,
    print_json,
    print_result,
    prompt_options,
    read_chat_file,
    seed_option,
    split_commas,
)
from ffmem.progress import Progress


@click.command()
@model_or_index_argument
@click.argument("prompt", required=False)
@click.option(
    "--prompts", type=PATH, help="File of prompts (.jsonl, .tsv, .txt); prints JSON Lines."
)
@click.option(
    "--top",
    type=AT_LEAST_1,
    default=10,
    show_default=True,
    help="Tokens and memories per layer in --json.",
)
@click.option(
    "--position",
    default=-1,
    show_default=True,
    metavar="N",
    help="Position to read; -1 is the last.",
)
@edit_options
@click.option(
    "--forbid", metavar="EXPERT", multiple=True, help="Never let the router choose an expert."
)
@click.option(
    "--force", metavar="EXPERT", multiple=True, help="Make the router always choose an expert."
)
@click.option(
    "--at", "positions", type=int, multiple=True, metavar="N", help="Edit only at this position."
)
@click.option("--generate", type=AT_LEAST_1, help="Continue the prompt by N tokens.")
@click.option(
    "--temperature", type=float, metavar="X", help="Sample the continuation. Default: greedy."
)
@click.option("--seed", type=int, metavar="N", help="Random seed for sampling. Default: 0.")
@click.option("--grid", is_flag=True, help="Also show every layer at every position.")
@chat_option
@prompt_options
@json_option
def trace(
    model_or_index: str,
    prompt: str | None,
    prompts: Path | None,
    top: int,
    position: int,
    off: tuple[str, ...],
    set: tuple[str, ...],
    scale: tuple[str, ...],
    mean: tuple[str, ...],
    redirect: tuple[str, ...],
    margin: float | None,
    forbid: tuple[str, ...],
    force: tuple[str, ...],
    positions: tuple[int, ...],
    generate: int | None,
    temperature: float | None,
    seed: int | None,
    grid: bool,
    chat: bool,
    start: str | None,
    model: str | None,
    adapter: str | None,
    dtype: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Trace a prompt through the layers of a model.

    Shows what each layer predicts and which memories contribute most. Pass an index instead of a
    model to also see percentiles: how unusual each coefficient is. With edits, the prompt runs
    twice, without and with them. In a mixture of experts, --off also takes a whole expert, such
    as L5E12 or L5S (shared).
    """
    edits = parse_edits(off, set, scale, mean, redirect, margin)
    edits |= {"forbid": split_commas(forbid), "force": split_commas(force)}
    if (prompt is None) == (prompts is None):
        raise click.UsageError("Pass either PROMPT or --prompts.")
    if positions and not any(edits.values()):
        raise click.UsageError("--at needs an edit, such as --off.")
    if temperature is not None and generate is None:
        raise click.UsageError("--temperature needs --generate.")
    if seed is not None and temperature is None:
        raise click.UsageError("--seed needs --temperature: greedy decoding is not random.")
    found = ffmem.trace(
        model_or_index,
        read_chat_file(prompt) if chat else prompt,
        chat=chat,
        prompts=prompts,
        top=top,
        position=position,
        positions=list(positions) or None,
        generate=generate or 0,
        temperature=temperature,
        seed=seed or 0,
        grid=grid,
        start=start,
        model=model,
        adapter=adapter,
        dtype=dtype,
        device=device,
        progress=Progress(),
        **edits,
    )
    if isinstance(found, list):
        for one in found:
            click.echo(json.dumps(one.to_dict(), ensure_ascii=False))
    else:
        print_result(found, as_json)


@click.command()
@model_or_index_argument
@click.argument("prompt", required=False)
@click.option("--target", metavar="TOKEN", help="Token to measure. Default: the predicted one.")
@click.option("--position", type=int, metavar="N", help="Position to read. Default: the last.")
@click.option(
    "--at", "positions", type=int, multiple=True, metavar="N", help="Ablate only at this position."
)
@click.option("--top", type=AT_LEAST_1, default=20, show_default=True, help="Memories to show.")
@click.option(
    "--candidates",
    type=WholeNumber(min=0),
    default=200,
    show_default=True,
    help="Memories to measure, chosen by estimates.",
)
@click.option("--cell", "cells", metavar="CELL", multiple=True, help="Also measure this memory.")
@click.option("--integrated", is_flag=True, help="Also estimate by integrated gradients.")
@click.option("--steps", type=AT_LEAST_1, help="Steps of integrated gradients. Default: 20.")
@click.option("--prompts", type=PATH, help="File of prompts and targets: .jsonl, .tsv, .txt.")
@click.option("--against", type=PATH, help="File of control prompts; subtracts their mean.")
@chat_option
@prompt_options
@json_option
def effect(
    model_or_index: str,
    prompt: str | None,
    target: str | None,
    position: int | None,
    positions: tuple[int, ...],
    top: int,
    candidates: int,
    cells: tuple[str, ...],
    integrated: bool,
    steps: int | None,
    prompts: Path | None,
    against: Path | None,
    chat: bool,
    start: str | None,
    model: str | None,
    adapter: str | None,
    dtype: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Measure how memories affect the next token.

    Ablates memories one at a time and shows the exact change in the log-probability of the token
    after PROMPT, next to cheap estimates. A negative change means that the memory supported the
    token. With --prompts, averages over a file.
    """
    if (prompt is None) == (prompts is None):
        raise click.UsageError("Pass either PROMPT or --prompts.")
    if steps is not None and not integrated:
        raise click.UsageError("--steps needs --integrated.")
    if prompt is None and (target is not None or position is not None or positions):
        raise click.UsageError("--target, --position and --at need PROMPT, not --prompts.")
    if prompt is not None and against is not None:
        raise click.UsageError("--against needs --prompts.")
    found = ffmem.effect(
        model_or_index,
        read_chat_file(prompt) if chat else prompt,
        chat=chat,
        target=target,
        position=position,
        positions=list(positions) or None,
        prompts=prompts,
        against=against,
        top=top,
        candidates=candidates,
        cells=split_commas(cells),
        integrated=integrated,
        steps=steps or 20,
        start=start,
        model=model,
        adapter=adapter,
        dtype=dtype,
        device=device,
        progress=Progress(),
    )
    print_result(found, as_json)


@click.command()
@model_or_index_argument
@click.argument("prompt")
@click.option("--target", metavar="TOKEN", help="Token to explain. Default: the predicted one.")
@click.option("--position", type=int, metavar="N", help="Position to read. Default: the last.")
@click.option(
    "--nodes",
    type=AT_LEAST_1,
    default=64,
    show_default=True,
    help="Maximum number of nodes.",
)
@click.option(
    "--ablation",
    type=click.Choice(["auto", "mean", "zero"]),
    default="auto",
    show_default=True,
    help="Ablate coefficients to their mean in the index, or to 0.",
)
@click.option(
    "--group",
    "groups",
    metavar="NAME=NODES",
    multiple=True,
    help="Ablate nodes together: capital=L5N12@3,L7N8@4.",
)
@click.option("--off", metavar="NAME", multiple=True, help="Switch this group off.")
@click.option("--out", type=PATH, help="Folder to write: JSON, SVG, circuit-tracer's JSON.")
@seed_option
@prompt_options
@json_option
def circuit(
    model_or_index: str,
    prompt: str,
    target: str | None,
    position: int | None,
    nodes: int,
    ablation: str,
    groups: tuple[str, ...],
    off: tuple[str, ...],
    out: Path | None,
    seed: int,
    start: str | None,
    model: str | None,
    adapter: str | None,
    dtype: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Show which memories feed a prediction, and each other.

    A node is a memory at a position, such as L5N12@3; an edge is what flows from one node to
    another without passing through a third. RelP estimates choose nodes and edges; exact ablations
    measure them, and how much of the target's logit they carry.
    """
    by_name: dict[str, list[str]] = {}
    for group in groups:
        name, equals, names = group.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--group {group}: write a name and nodes, like a=L5N12@3.")
        by_name.setdefault(name, []).extend(split_commas((names,)))
    found = ffmem.circuit(
        model_or_index,
        prompt,
        target=target,
        position=position,
        nodes=nodes,
        ablation=ablation,
        groups=by_name,
        off=off,
        out=out,
        seed=seed,
        start=start,
        model=model,
        adapter=adapter,
        dtype=dtype,
        device=device,
        progress=Progress(),
    )
    print_result(found, as_json)
    if out is not None:
        click.echo(f"Wrote {out}.", err=True)


@click.command()
@model_or_index_argument
@click.argument("cell")
@click.option(
    "--by",
    type=click.Choice(["value", "key"]),
    default="value",
    show_default=True,
    help="Vectors to compare; in gated models, key is the gate's.",
)
@click.option(
    "--limit", "n", type=AT_LEAST_1, default=10, show_default=True, help="Memories to show."
)
@model_or_index_options
@device_option
@json_option
def neighbours(
    model_or_index: str,
    cell: str,
    by: str,
    n: int,
    model: str | None,
    adapter: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Find memories with similar values or keys.

    Lists the memories whose vectors have the largest |cosine| with CELL's.
    """
    found = ffmem.neighbours(
        model_or_index,
        cell,
        by=by,
        n=n,
        model=model,
        adapter=adapter,
        device=device,
        progress=Progress(),
    )
    if as_json:
        print_json([{"cell": str(one.cell), "cosine": one.cosine} for one in found])
        return
    for one in found:
        click.echo(f"{one.cell!s:12} {one.cosine:+.4f}")
    if not found:
        click.echo(f"{cell} has no neighbours: its {by} is all zeros.")

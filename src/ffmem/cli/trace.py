"""Commands that load a model: trace, effect, circuit, neighbours."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import ffmem
from ffmem.cli.options import (
    AT_LEAST_1,
    PATH,
    WholeNumber,
    cell_option,
    chat_option,
    device_option,
    edit_options,
    given,
    json_option,
    model_or_index_argument,
    model_or_index_options,
    print_json,
    print_result,
    prompt_options,
    read_chat_file,
    seed_option,
    split_commas,
)
from ffmem.config_fields import Command
from ffmem.progress import Progress


def positions_option(help: str) -> Callable[[Command], Command]:
    """Return the option --at, which may be repeated."""
    return click.option("--at", "positions", type=int, multiple=True, metavar="N", help=help)


position_option = click.option(
    "--position", type=int, metavar="N", help="Position to read. Default: the last."
)


@click.command()
@model_or_index_argument
@click.argument("prompt", required=False)
@click.option(
    "--prompts", type=PATH, help="File of prompts (.jsonl, .tsv, .txt); prints JSON Lines."
)
@click.option("--top", type=AT_LEAST_1, default=10, help="Tokens and memories per layer in --json.")
@click.option("--position", default=-1, metavar="N", help="Position to read; -1 is the last.")
@edit_options
@cell_option("--forbid", help="Never let the router choose an expert.", metavar="EXPERT")
@cell_option("--force", help="Make the router always choose an expert.", metavar="EXPERT")
@positions_option("Edit only at this position.")
@click.option("--generate", type=AT_LEAST_1, help="Continue the prompt by N tokens.")
@click.option(
    "--temperature", type=float, metavar="X", help="Sample the continuation. Default: greedy."
)
@click.option("--seed", type=int, metavar="N", help="Random seed for sampling. Default: 0.")
@click.option("--grid", is_flag=True, help="Also show every layer at every position.")
@chat_option
@prompt_options
@json_option
def trace(model_or_index: str, prompt: str | None, as_json: bool, **options: Any) -> None:
    """Trace a prompt through the layers of a model.

    Shows what each layer predicts and which memories contribute most. Pass an index instead of a
    model to also see percentiles: how unusual each coefficient is. With edits, the prompt runs
    twice, without and with them. In a mixture of experts, --off also takes a whole expert, such
    as L5E12 or L5S (shared).
    """
    options = given(options)
    if (prompt is None) == ("prompts" not in options):
        raise click.UsageError("Pass either PROMPT or --prompts.")
    edits = ("off", "set", "scale", "mean", "redirect", "margin", "forbid", "force")
    if "positions" in options and not any(name in options for name in edits):
        raise click.UsageError("--at needs an edit, such as --off.")
    if "temperature" in options and "generate" not in options:
        raise click.UsageError("--temperature needs --generate.")
    if "seed" in options and "temperature" not in options:
        raise click.UsageError("--seed needs --temperature: greedy decoding is not random.")
    asked = read_chat_file(prompt) if options["chat"] else prompt
    found = ffmem.trace(model_or_index, asked, progress=Progress(), **options)
    if isinstance(found, list):
        for one in found:
            click.echo(json.dumps(one.to_dict(), ensure_ascii=False))
    else:
        print_result(found, as_json)


@click.command()
@model_or_index_argument
@click.argument("prompt", required=False)
@click.option("--target", metavar="TOKEN", help="Token to measure. Default: the predicted one.")
@position_option
@positions_option("Ablate only at this position.")
@click.option("--top", type=AT_LEAST_1, default=20, help="Memories to show.")
@click.option(
    "--candidates",
    type=WholeNumber(min=0),
    default=200,
    help="Memories to measure, chosen by estimates.",
)
@cell_option("--cell", "cells", help="Also measure this memory.")
@click.option("--integrated", is_flag=True, help="Also estimate by integrated gradients.")
@click.option("--steps", type=AT_LEAST_1, help="Steps of integrated gradients. Default: 20.")
@click.option("--prompts", type=PATH, help="File of prompts and targets: .jsonl, .tsv, .txt.")
@click.option("--against", type=PATH, help="File of control prompts; subtracts their mean.")
@chat_option
@prompt_options
@json_option
def effect(model_or_index: str, prompt: str | None, as_json: bool, **options: Any) -> None:
    """Measure how memories affect the next token.

    Ablates memories one at a time and shows the exact change in the log-probability of the token
    after PROMPT, next to cheap estimates. A negative change means that the memory supported the
    token. With --prompts, averages over a file.
    """
    options = given(options)
    if (prompt is None) == ("prompts" not in options):
        raise click.UsageError("Pass either PROMPT or --prompts.")
    if "steps" in options and not options["integrated"]:
        raise click.UsageError("--steps needs --integrated.")
    if prompt is None and {"target", "position", "positions"} & options.keys():
        raise click.UsageError("--target, --position and --at need PROMPT, not --prompts.")
    if prompt is not None and "against" in options:
        raise click.UsageError("--against needs --prompts.")
    asked = read_chat_file(prompt) if options["chat"] else prompt
    print_result(ffmem.effect(model_or_index, asked, progress=Progress(), **options), as_json)


def parse_groups(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, list[str]]:
    """Return the nodes of every group."""
    found: dict[str, list[str]] = {}
    for value in values:
        name, equals, nodes = value.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--group {value}: write a name and nodes, like a=L5N12@3.")
        found.setdefault(name, []).extend(split_commas(context, option, (nodes,)))
    return found


@click.command()
@model_or_index_argument
@click.argument("prompt")
@click.option("--target", metavar="TOKEN", help="Token to explain. Default: the predicted one.")
@position_option
@click.option("--nodes", type=AT_LEAST_1, default=64, help="Maximum number of nodes.")
@click.option(
    "--ablation",
    type=click.Choice(["auto", "mean", "zero"]),
    default="auto",
    help="Ablate coefficients to their mean in the index, or to 0.",
)
@click.option(
    "--group",
    "groups",
    metavar="NAME=NODES",
    multiple=True,
    callback=parse_groups,
    help="Ablate nodes together: capital=L5N12@3,L7N8@4.",
)
@click.option("--off", metavar="NAME", multiple=True, help="Switch this group off.")
@click.option("--out", type=PATH, help="Folder to write: JSON, SVG, circuit-tracer's JSON.")
@seed_option
@prompt_options
@json_option
def circuit(
    model_or_index: str, prompt: str, out: Path | None, as_json: bool, **options: Any
) -> None:
    """Show which memories feed a prediction, and each other.

    A node is a memory at a position, such as L5N12@3; an edge is what flows from one node to
    another without passing through a third. RelP estimates choose nodes and edges; exact ablations
    measure them, and how much of the target's logit they carry.
    """
    found = ffmem.circuit(model_or_index, prompt, out=out, progress=Progress(), **options)
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
    help="Vectors to compare; in gated models, key is the gate's.",
)
@click.option("--limit", "n", type=AT_LEAST_1, default=10, help="Memories to show.")
@model_or_index_options
@device_option
@json_option
def neighbours(model_or_index: str, cell: str, by: str, as_json: bool, **options: Any) -> None:
    """Find memories with similar values or keys.

    Lists the memories whose vectors have the largest |cosine| with CELL's.
    """
    found = ffmem.neighbours(model_or_index, cell, by=by, progress=Progress(), **options)
    if as_json:
        print_json([{"cell": str(one.cell), "cosine": one.cosine} for one in found])
        return
    for one in found:
        click.echo(f"{one.cell!s:12} {one.cosine:+.4f}")
    if not found:
        click.echo(f"{cell} has no neighbours: its {by} is all zeros.")

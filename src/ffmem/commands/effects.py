"""The command that switches memories off, one at a time, and measures what it changes: effect."""

from pathlib import Path
from typing import Any

import click

from ffmem import acting
from ffmem.commands.edit_options import parts
from ffmem.commands.options import json_option, print_json, prompt_options
from ffmem.progress import Progress

FILE = click.Path(path_type=Path)


@click.command()
@click.argument("place", metavar="MODEL_OR_DIR")
@click.argument("prompt", required=False)
@click.option("--target", metavar="TOKEN", help="The token to watch; else the model's own next.")
@click.option("--position", type=int, help="Where to read; the start is 0, else the last.")
@click.option("--at", "positions", type=int, multiple=True, help="Switch off here only.")
@click.option(
    "--top", type=click.IntRange(min=1), default=20, show_default=True, help="Memories to show."
)
@click.option(
    "--candidates",
    type=click.IntRange(min=0),
    default=200,
    show_default=True,
    help="Memories to measure, as estimates choose them.",
)
@click.option("--cell", "cells", metavar="CELL", multiple=True, help="Measure this memory too.")
@click.option("--integrated", is_flag=True, help="Estimate by integrated gradients as well.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Of integrated gradients; 20 unless told.",
)
@click.option("--prompts", type=FILE, help="A .jsonl, .tsv or .txt of prompts and targets.")
@click.option("--against", type=FILE, help="Control prompts, whose mean is subtracted.")
@prompt_options
@json_option
def effect(place: str, prompt: str | None, as_json: bool, **options: Any) -> None:
    """Measure what memories do to the next token of PROMPT, or of every prompt of a file.

    Each memory is switched off by itself, everywhere or at --at; the exact change of log p stands
    beside the cheap estimates that chose it. Negative: the memory supported the token.
    """
    one = {name: options.pop(name) for name in ("target", "position", "positions")}
    if (prompt is None) == (options["prompts"] is None):
        raise click.UsageError(
            "Give one of the two, not both: a PROMPT, or a file of them with --prompts."
        )
    steps = options.pop("steps")
    if steps is not None and not options["integrated"]:
        raise click.UsageError("--steps are those of --integrated.")
    options["steps"] = steps or 20
    options["cells"] = parts(options["cells"])
    if prompt is None and (one["target"] is not None or one["position"] is not None):
        raise click.UsageError(
            "--target and --position belong to one PROMPT; --prompts has its own."
        )
    if prompt is None and one["positions"]:
        raise click.UsageError("--at belongs to one PROMPT.")
    if prompt is not None and options["against"] is not None:
        raise click.UsageError("--against is compared with --prompts, not with one PROMPT.")
    if prompt is not None:
        options["target"] = one["target"]
        options["position"] = -1 if one["position"] is None else one["position"]
        options["positions"] = list(one["positions"]) or None
    found = acting.effect(place, prompt, progress=Progress(), **options)
    if as_json:
        print_json(found.to_dict())
    else:
        click.echo(str(found))

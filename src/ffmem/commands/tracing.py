"""Commands that look into a model: trace, neighbours."""

from typing import Any

import click

from ffmem import acting
from ffmem.commands.edit_options import edit_options, taken
from ffmem.commands.options import device_option, json_option, print_json, prompt_options
from ffmem.progress import Progress


@click.command()
@click.argument("place", metavar="MODEL_OR_DIR")
@click.argument("prompt")
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Tokens and memories of each layer, in --json.",
)
@click.option("--position", default=-1, show_default=True, help="Where to read; the start is 0.")
@edit_options
@click.option("--at", "positions", type=int, multiple=True, help="Edit at this position only.")
@click.option(
    "--generate",
    type=click.IntRange(min=1),
    metavar="N",
    help="Continue the prompt by N tokens.",
)
@click.option("--temperature", type=float, help="Sample the continuation; else greedy.")
@click.option("--seed", type=int, help="Of the sampled continuation; 0 unless told.")
@click.option("--grid", is_flag=True, help="Also every layer at every position.")
@prompt_options
@json_option
def trace(place: str, prompt: str, as_json: bool, **options: Any) -> None:
    """Follow PROMPT through a model: what each layer predicts, which memories contribute.

    With an index DIR in place of the model, percentiles tell how unusual a coefficient is. Edits
    act at every position unless --at names some; both runs are shown.
    """
    edits = taken(options)
    at = list(options.pop("positions")) or None
    generate, seed = options.pop("generate") or 0, options.pop("seed")
    if at and not any(edits.values()):
        raise click.UsageError("--at says where edits act; give one (--off, --set, …).")
    if options["temperature"] is not None and not generate:
        raise click.UsageError("--temperature is that of --generate.")
    if seed is not None and options["temperature"] is None:
        raise click.UsageError("--seed is that of a sampled continuation: add --temperature.")
    options["seed"] = seed or 0
    found = acting.trace(
        place,
        prompt,
        generate=generate,
        positions=at,
        progress=Progress(),
        **edits,
        **options,
    )
    if as_json:
        print_json(found.to_dict())
    else:
        click.echo(str(found))


@click.command()
@click.argument("place", metavar="MODEL_OR_DIR")
@click.argument("cell")
@click.option(
    "--by",
    type=click.Choice(["value", "key"]),
    default="value",
    show_default=True,
    help="Which of a memory's vectors to compare; in gated models the gate's key.",
)
@click.option(
    "--limit",
    "n",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Memories to show.",
)
@click.option("--model", help="Where the index's model is now, if it has moved.")
@device_option
@json_option
def neighbours(place: str, cell: str, as_json: bool, **options: Any) -> None:
    """Find memories whose vectors point the way of CELL's, or the opposite way."""
    found = acting.neighbours(place, cell, progress=Progress(), **options)
    if as_json:
        print_json([{"cell": str(one.cell), "cosine": one.cosine} for one in found])
        return
    for one in found:
        click.echo(f"{one.cell!s:12} {one.cosine:+.4f}")
    if not found:
        click.echo(f"{cell} has no neighbours: its {options['by']} is all zeros.")

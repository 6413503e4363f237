"""The command that tells what a run will take: plan."""

from typing import Any

import click

from ffmem.commands.options import json_option, print_json


@click.command()
@click.argument("model")
@click.argument("corpus", required=False)
@click.option("--tokens", type=float, help="Tokens of the corpus, such as 1e12.")
@click.option("--tokens-per-second", type=float, help="Tokens per second of a worker.")
@click.option("--flops", type=float, help="FLOP/s that a worker reaches, if its speed is unknown.")
@click.option("--measure", is_flag=True, help="Take the speed of MODEL on this machine.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Workers."
)
@click.option(
    "-t", type=click.IntRange(min=1), default=50, show_default=True, help="Triggers per memory."
)
@click.option(
    "--lease-tokens",
    type=click.IntRange(min=1),
    default=65_536,
    show_default=True,
    help="Tokens of a lease.",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Tokens of a batch.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Number format of the pass.",
)
@click.option(
    "--bandwidth",
    type=float,
    default=1e9,
    show_default=True,
    help="Bytes per second between a worker and the shared folder.",
)
@json_option
def plan(model: str, corpus: str | None, as_json: bool, **options: Any) -> None:
    """Tell what indexing MODEL over CORPUS will take: time, memory, disk, traffic.

    MODEL is a Hugging Face folder (only its config is read) or a shape: gpt2, gpt2-xl,
    smollm2-135m, llama-8b, llama-70b. CORPUS is a corpus, an index, wikitext-2, wikitext-103, or
    a number of tokens.
    """
    from ffmem.cluster.planned import planned, told

    found = planned(model, corpus, **options)
    if as_json:
        print_json(found.to_dict())
    else:
        click.echo("\n".join(told(found)))

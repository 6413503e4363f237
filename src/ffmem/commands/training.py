"""The command that trains a model with memories of one kind: train."""

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from ffmem.commands.options import (
    corpus_of,
    corpus_options,
    json_option,
    model_options,
    out_option,
    print_json,
)
from ffmem.errors import FfmemError
from ffmem.progress import Progress
from ffmem.training.settings import TOKENIZERS, Settings

_POSITIVE = click.IntRange(min=1)
_SHARE = click.FloatRange(min=0, max=1, max_open=True)


class Numbers(click.ParamType[list[int]]):
    """Whole numbers with commas between them."""

    name = "N,N…"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[int]:
        """Return the numbers."""
        if isinstance(value, list):
            return value
        parts = str(value).split(",")
        if not all(re.fullmatch(r"\s*[0-9]{1,18}\s*", part) for part in parts):
            self.fail(f"{value!r} is not numbers with commas between them.", param, ctx)
        return [int(part) for part in parts]


def _number(
    name: str, help: str, kind: click.ParamType[Any] = _POSITIVE
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return an option of the settings, with their default."""
    default = getattr(Settings, name)
    flag = f"--{name.replace('_', '-')}"
    return click.option(
        flag, type=kind, default=default, show_default=default is not None, help=help
    )


@click.command()
@click.option(
    "--memory",
    required=True,
    metavar="KIND",
    help="relu, gelu, swiglu, softmax, persistent, lambda.",
)
@click.option("--layers", required=True, type=_POSITIVE, help="Layers of the model.")
@click.option("--corpus", required=True, help="CORPUS to train on.")
@out_option
@click.option(
    "--valid",
    help="CORPUS for validation, whole whatever --limit; else the last 1 % of the sentences.",
)
@_number("width", "Width of the model.")
@_number(
    "memories", "Per layer (persistent: per head; with --match: of that kind); else 4 × width."
)
@click.option(
    "--match",
    metavar="KIND",
    help="As many parameters as with this kind of memory, by the number of memories.",
)
@_number("heads", "Heads of attention; else one for every 32 of the width.")
@_number("key_width", "Width of a lambda layer's keys.")
@_number("distances", "How far back a lambda layer's static keys reach.")
@_number("context", "Tokens of a block.")
@click.option(
    "--tokenizer",
    type=click.Choice(list(TOKENIZERS)),
    default=Settings.tokenizer,
    show_default=True,
    help="The corpus' white-space tokens, or a byte-level BPE trained on it.",
)
@_number("vocabulary", "Words or tokens to know; else 28000 words, or 8000 tokens.")
@click.option("--bands", type=Numbers(), help="Where bands of the vocabulary end; else one band.")
@_number("steps", "Steps to train.")
@_number("epochs", "Readings of the corpus; else until validation stops improving, 10 at most.")
@_number("evaluate_every", "Steps between two evaluations; else once an epoch.")
@_number("batch_tokens", "Tokens of a step.")
@_number("pass_tokens", "Tokens of a pass at most, whose gradients add up; else 1024 on a CPU.")
@_number("learning_rate", "The highest.", click.FloatRange(min=0, min_open=True))
@_number("warmup", "Steps; else a twentieth, 500 at most.", click.IntRange(min=0))
@_number("weight_decay", "Of matrices.", click.FloatRange(min=0))
@_number("dropout", "Share of numbers dropped in training.", _SHARE)
@_number("seed", "What random numbers come from.", click.IntRange(min=0))
@_number("threads", "Threads; recorded, for the same bytes.")
@click.option(
    "--checkpoint-minutes",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Minutes between two checkpoints.",
)
@click.option("--checkpoint-every", type=_POSITIVE, help="Steps between two checkpoints as well.")
@click.option("--keep", is_flag=True, help="Keep the last checkpoint when training is done.")
@corpus_options
@model_options
@json_option
def train(
    corpus: str,
    out: Path,
    valid: str | None,
    device: str,
    checkpoint_minutes: float,
    checkpoint_every: int | None,
    keep: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a small language model whose memories are of one KIND.

    An unfinished folder with the same settings is gone on with. The best weights, by validation,
    are kept, as a model that every command takes.
    """
    source = corpus_of(corpus, options)
    settings = Settings(**options)  # contradictions are told before anything heavy is loaded
    other = None if valid is None else replace(source, source=valid, limit=None)
    from ffmem.training.run import Saving
    from ffmem.training.telling import summary
    from ffmem.training.train import train as run

    saving = Saving(checkpoint_minutes, checkpoint_every)
    try:
        trained = run(
            settings,
            source,
            out,
            other,
            device=device,
            saving=saving,
            keep=keep,
            progress=Progress(),
        )
    except KeyboardInterrupt:
        raise FfmemError(
            f"Stopped. {out} keeps the last checkpoint, if one was written: the same command goes"
            " on from there."
        ) from None
    if as_json:
        print_json(asdict(trained))
    else:
        click.echo(summary(trained))

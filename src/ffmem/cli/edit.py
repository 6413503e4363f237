"""Commands that change a model's memories and compare the result: edit, write, compare."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

import ffmem
from ffmem.cli.options import (
    AT_LEAST_1,
    PATH,
    WholeNumber,
    device_option,
    dtype_option,
    edit_options,
    given,
    index_start_option,
    json_option,
    model_or_index_argument,
    model_or_index_options,
    out_option,
    print_result,
    resumable,
    seed_option,
)
from ffmem.config_fields import add_options, dataclass_options, option_name, take_options
from ffmem.corpus.corpus import Corpus
from ffmem.indexing.config import IndexConfig
from ffmem.progress import Progress

corpus_options = add_options(
    click.option(
        "--corpus",
        metavar="CORPUS",
        default="wikitext-2:valid",
        help="Corpus to measure side effects on.",
    ),
    dataclass_options(
        Corpus, only=("unit", "column", "detokenize", "limit"), defaults={"limit": 200}
    ),
    click.option("--no-report", is_flag=True, help="Do not measure side effects on the corpus."),
)


def take_corpus(options: dict[str, Any]) -> Corpus | None:
    """Remove `corpus_options` from a command's values, and return the corpus."""
    corpus = Corpus(options.pop("corpus"), **take_options(options, Corpus))
    return None if options.pop("no_report") else corpus


@click.command()
@model_or_index_argument
@edit_options
@click.option("--edits", type=PATH, metavar="FILE", help="Apply the edits of an edits.json.")
@out_option
@corpus_options
@index_start_option
@model_or_index_options
@device_option
@json_option
def edit(model_or_index: str, out: Path, as_json: bool, **options: Any) -> None:
    """Write edits of memories into a model's weights.

    Writes a Hugging Face folder and measures side effects (side-effects.md and .json). To repeat
    the edit, pass its edits.json with --edits. --mean needs an index instead of a model. --off
    also takes a whole expert, such as L5E12.
    """
    corpus, options = take_corpus(options), given(options)
    named = ("off", "set", "scale", "mean", "redirect", "margin")
    if any(name in options for name in named) == ("edits" in options):
        raise click.UsageError(
            "Pass either edits (--off, --set, --scale, --mean, --redirect) or --edits FILE."
        )
    written = ffmem.edit(model_or_index, out, corpus=corpus, progress=Progress(), **options)
    print_result(written, as_json)


@click.command()
@model_or_index_argument
@click.argument("prompt")
@click.argument("token")
@out_option
@click.option(
    "--layer", type=WholeNumber(min=0), help="Layer to write into. Default: the best of four."
)
@click.option(
    "--cell", metavar="CELL", help="Memory to overwrite. Default: the most idle in the layer."
)
@click.option("--force", is_flag=True, help="Overwrite CELL even if it is not idle.")
@click.option(
    "--margin",
    type=float,
    default=1.0,
    metavar="X",
    help="Lead of the token over the next one, in nats.",
)
@click.option(
    "--probability", type=float, metavar="P", help="Probability to reach, instead of a margin."
)
@click.option(
    "--paraphrases", type=PATH, help="File of other prompts on which the fact should hold."
)
@click.option(
    "--neighbours",
    type=PATH,
    help="File of prompts on which nothing should change. Default: text with the same ending.",
)
@click.option(
    "--controls",
    type=WholeNumber(min=0),
    default=3,
    help="Idle memories to give a random key, as a control.",
)
@corpus_options
@seed_option
@index_start_option
@model_or_index_options
@device_option
@json_option
def write(
    model_or_index: str, prompt: str, token: str, out: Path, as_json: bool, **options: Any
) -> None:
    """Write a fact into an idle memory.

    The new model continues PROMPT with TOKEN (include its leading space if it has one). The key
    comes from the prompt, the value points to the token, with the smallest strength that works.
    Pass the folder of an index, which knows the idle memories. Writes a Hugging Face folder with
    edits.json, and measures what else changes.
    """
    corpus = take_corpus(options)
    written = ffmem.write(
        model_or_index, prompt, token, out, corpus=corpus, progress=Progress(), **options
    )
    print_result(written, as_json)


@click.command()
@click.argument("first", metavar="DIR|MODEL")
@click.argument("second", metavar="[DIR|MODEL]", required=False)
@out_option
@click.option(
    "--corpus", metavar="CORPUS", help="Index two models over this corpus and compare them."
)
@click.option(
    "--adapter",
    metavar="FOLDER",
    help="With --corpus: merge it into MODEL to get the second model.",
)
@click.option(
    "--first-model",
    metavar="MODEL",
    help="New location of the first index's model, if it has moved.",
)
@click.option(
    "--second-model",
    metavar="MODEL",
    help="New location of the second index's model, if it has moved.",
)
@click.option("--no-models", is_flag=True, help="Load no models; do not compare value directions.")
@click.option("--top", type=AT_LEAST_1, default=50, help="Most changed memories to list.")
@dataclass_options(
    IndexConfig, only=("t", "prefixes", "start", "batch_tokens", "chunk_tokens", "threads")
)
@dataclass_options(Corpus)
@dtype_option
@device_option
@json_option
def compare(
    first: str,
    second: str | None,
    out: Path,
    corpus: str | None,
    adapter: str | None,
    first_model: str | None,
    second_model: str | None,
    no_models: bool,
    top: int,
    device: str,
    as_json: bool,
    **indexing: Any,
) -> None:
    """Compare two indexes, or two models, memory by memory.

    The models must have the same architecture and the indexes the same corpus: for example, a
    model before and after fine-tuning. With --corpus, first indexes two models, or MODEL without
    and with --adapter, in OUT/first and OUT/second; rerun the command to resume. Compares
    triggers, values and activity, and writes compare.json, memories.parquet, compare.svg and
    compare.pdf to OUT.
    """
    shared: dict[str, Any] = {"top": top, "device": device, "progress": Progress()}
    if corpus is None:
        _check_for_indexes(second, adapter)
        shared |= {"first_model": first_model, "second_model": second_model}
        found = ffmem.compare(first, str(second), out, models=not no_models, **shared)
    else:
        if (second is None) == (adapter is None):
            raise click.UsageError("With --corpus, pass either a second MODEL or --adapter.")
        if first_model or second_model or no_models:
            raise click.UsageError("--first-model, --second-model, --no-models need two indexes.")
        source = Corpus(corpus, **take_options(indexing, Corpus))
        with resumable():
            found = ffmem.compare_models(
                first, second, source, out, adapter=adapter, **shared, **indexing
            )
    print_result(found, as_json)
    if not as_json:
        click.echo(f"\nWrote compare.json, memories.parquet, compare.svg and compare.pdf to {out}.")


def _check_for_indexes(second: str | None, adapter: str | None) -> None:
    """Raise unless the options fit two indexes that are made already."""
    if second is None:
        raise click.UsageError(
            "Pass two indexes; or with --corpus, two models, or one model and --adapter."
        )
    if adapter is not None:
        raise click.UsageError("--adapter needs --corpus: it makes a second model to index.")
    context = click.get_current_context()
    for one in (*fields(IndexConfig), *fields(Corpus)):
        if context.get_parameter_source(one.name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option_name(one)} needs --corpus: it is for new indexes.")
    if context.get_parameter_source("dtype") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--dtype needs --corpus: it is for new indexes.")

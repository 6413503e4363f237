"""The `ffmem` command: each subcommand reads its arguments, calls one function, prints.

Heavy libraries are imported inside the functions called, so that `show` and `search` start at
once. An `FfmemError` is an answer: one line, exit code 1. Anything else is a bug, with traceback.
"""

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ffmem import api
from ffmem.errors import FfmemError
from ffmem.progress import Progress


class Command(click.Group):
    """Lists subcommands in the order in which people need them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of their definition."""
        return list(self.commands)


@click.group(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ffmem")
def cli() -> None:
    """Read the feed-forward layers of a language model as key-value memories.

    MODEL is a Hugging Face folder, a .gguf file, a fairseq model.pt with its dict.txt, a Hub id
    (org/name@revision), or the name smollm2-135m.

    CORPUS is a .txt, .jsonl or .parquet file (also .gz), a folder of them, - for standard input,
    wikitext-2:train|valid|test, or hf:ID[:CONFIG][:SPLIT].
    """


folder_argument = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
device_option = click.option(
    "--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
out_option = click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder to write."
)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add where and in which numbers a model runs."""
    for option in (
        click.option(
            "--dtype",
            type=click.Choice(["float32", "bfloat16"]),
            default="float32",
            show_default=True,
            help="Number format of the pass.",
        ),
        device_option,
    ):
        command = option(command)
    return command


def corpus_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add how a corpus is read."""
    for option in (
        click.option(
            "--limit", type=click.IntRange(min=1), help="Read this many sentences at most."
        ),
        click.option(
            "--detokenize",
            type=click.Choice(["wikitext"]),
            help="Undo WikiText's tokenisation first.",
        ),
        click.option("--column", default="text", show_default=True, help="Field of the text."),
        click.option(
            "--unit", default="sentence", show_default=True, help="sentence, line or window:N."
        ),
    ):
        command = option(command)
    return command


@cli.command()
@click.argument("model")
@model_options
@json_option
def describe(model: str, dtype: str, device: str, as_json: bool) -> None:
    """Say what ffmem sees in MODEL: family, layers, memories, and whether its equations hold."""
    from ffmem.models.describe import describe as describe_model

    facts = describe_model(api.load(model, dtype=dtype, device=device))
    if as_json:
        _print_json(facts)
        return
    for name, fact in facts.items():
        shown = _fact(fact)
        if isinstance(fact, dict):
            shown = ", ".join(f"{key} {_fact(value)}" for key, value in fact.items())
        click.echo(f"{name.replace('_', ' '):16} {shown}")


@cli.command()
@click.argument("model")
@click.argument("corpus")
@out_option
@click.option(
    "-t",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Triggers to keep per memory.",
)
@corpus_options
@click.option(
    "--prefixes",
    type=click.Choice(["best", "all"]),
    default="best",
    show_default=True,
    help="The best prefix of each sentence may trigger, or all.",
)
@click.option(
    "--compat", type=click.Choice(["ff-layers"]), help="Imitate the authors' code: p = 0 … n-1."
)
@click.option(
    "--start",
    default="auto",
    show_default=True,
    help="Token in front of a sentence: auto, none, bos, eos, or the token.",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Tokens of a batch.",
)
@click.option(
    "--lease-tokens",
    type=click.IntRange(min=1),
    default=65_536,
    show_default=True,
    help="Tokens of a lease: what a killed run repeats at most.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads of the pass; recorded, for the same bytes.",
)
@model_options
def index(model: str, corpus: str, out: Path, dtype: str, device: str, **options: Any) -> None:
    """Find what triggers every memory of MODEL in CORPUS, and what its value promotes.

    An unfinished folder with the same settings is gone on with.
    """
    source = _corpus(corpus, options)
    made = api.index(model, source, out, dtype=dtype, device=device, progress=Progress(), **options)
    click.echo(repr(made))


@cli.command()
@folder_argument
@click.argument("corpus")
@corpus_options
@click.option("--model", help="Where the model is now, if it has moved.")
@device_option
def extend(folder: Path, corpus: str, model: str | None, device: str, **options: Any) -> None:
    """Add CORPUS to a finished index, with its model and settings."""
    source = _corpus(corpus, options)
    made = api.extend(folder, source, model=model, device=device, progress=Progress())
    click.echo(repr(made))


@cli.command()
@click.argument(
    "folders", metavar="DIR DIR…", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@out_option
def merge(folders: tuple[Path, ...], out: Path) -> None:
    """Put indexes of parts of a corpus together."""
    click.echo(repr(api.merge(folders, out)))


@cli.command()
@folder_argument
@click.argument("cell")
@json_option
def show(folder: Path, cell: str, as_json: bool) -> None:
    """Show what triggers the memory CELL, such as L5N1234, and what its value promotes."""
    memory = api.open(folder)[cell]
    if as_json:
        _print_json(memory.to_dict())
    else:
        click.echo(str(memory))


@cli.command()
@folder_argument
@click.argument("query")
@click.option(
    "--in",
    "place",
    type=click.Choice(["values", "triggers", "patterns"]),
    default="values",
    show_default=True,
    help="What to search in.",
)
@click.option("--regex", is_flag=True, help="QUERY is a regular expression.")
@click.option("--layer", type=int, help="Only this layer.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Memories to show."
)
@json_option
def search(folder: Path, query: str, as_json: bool, place: str, **options: Any) -> None:
    """Find memories by the tokens of their values or the text of their triggers."""
    from ffmem.indexing.memory import visible, visible_token

    readable = visible_token if place == "values" else visible
    hits = api.search(folder, query, place=place, **options)
    if as_json:
        _print_json([hit._asdict() for hit in hits])
        return
    for hit in hits:
        best = f"{hit.side} {hit.rank}"
        click.echo(f"{hit.cell:12} {hit.matches:4d}×  best: {best:12} {readable(hit.snippet)}")
    if not hits:
        click.echo(f"No memory has {query!r} in its {place}.")


@cli.command()
@folder_argument
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--to", type=click.Choice(["jsonl", "csv"]), required=True, help="Format.")
def export(folder: Path, out: Path, to: str) -> None:
    """Write every memory of an index to the file OUT, for other programs."""
    made = api.open(folder)
    with Progress().bar("Writing", len(made), "memories") as step:
        api.export(made, to, out, step)
    click.echo(f"Wrote {len(made):,} memories to {out}.", err=True)


@cli.command()
@folder_argument
def verify(folder: Path) -> None:
    """Check every hash and invariant of an index."""
    wrong = api.verify(folder)
    for sentence in wrong[1:]:
        click.echo(sentence, err=True)
    if wrong:
        more = f" (and {len(wrong) - 1} more, above)" if len(wrong) > 1 else ""
        raise FfmemError(f"{folder} is not a sound index: {wrong[0]}{more}")
    made = api.open(folder)
    click.echo(f"Sound: {len(made.manifest.files)} files, {len(made):,} memories.")


@cli.command()
@click.option(
    "--out",
    default="demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder to write.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    help="Sentences to read.",
)
@click.option("--no-serve", is_flag=True, help="Do not open a page at the end; there is none yet.")
def demo(out: Path, limit: int, no_serve: bool) -> None:
    """Index smollm2-135m over a part of WikiText-2, and look at some of its memories."""
    from ffmem.demo import demo as run_demo

    run_demo(out, limit)


def _corpus(source: str, options: dict[str, Any]) -> Any:
    """Take the options of a corpus out of a command's options."""
    from ffmem.corpus.corpus import Corpus

    names = ("unit", "column", "detokenize", "limit")
    return Corpus(source, **{name: options.pop(name) for name in names})


def _fact(value: Any) -> str:
    """Return a fact as people write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        cli()
    except FfmemError as error:
        message = " ".join(str(error).split())
        raise SystemExit(f"Error: {message}") from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise SystemExit("Error: The output cannot be written: no room left there.") from None

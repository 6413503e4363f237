"""The `ffmem` command: each subcommand reads its arguments, calls one function, prints.

Heavy libraries are imported inside the functions called, so that `show` and `search` start at
once. An `FfmemError` is an answer: one line, exit code 1. Anything else is a bug, with traceback.
"""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ffmem import api
from ffmem.errors import FfmemError
from ffmem.progress import Progress

cli = typer.Typer(
    help="Read the feed-forward layers of a language model as key-value memories.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Prefixes(StrEnum):
    """Which prefixes of a sentence may trigger."""

    best = "best"
    all = "all"


class Dtype(StrEnum):
    """Number format of the pass."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Where(StrEnum):
    """What to search in."""

    values = "values"
    triggers = "triggers"
    patterns = "patterns"


class Format(StrEnum):
    """What to export to."""

    jsonl = "jsonl"
    csv = "csv"


class Compat(StrEnum):
    """Whose code to imitate."""

    ff_layers = "ff-layers"


Model = Annotated[
    str,
    typer.Argument(
        help="Hugging Face folder, .gguf, fairseq model.pt, Hub id[@revision], or smollm2-135m."
    ),
]
CorpusArgument = Annotated[
    str,
    typer.Argument(
        help="File (.txt, .jsonl, .parquet; .gz), folder of them, -, wikitext-2:train, or hf:ID."
    ),
]
Folder = Annotated[Path, typer.Argument(help="Folder of an index.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Unit = Annotated[str, typer.Option(help="What a sentence is: sentence, line, or window:N.")]
Column = Annotated[str, typer.Option(help="Field of the text in .jsonl and .parquet.")]
Detokenize = Annotated[
    str | None, typer.Option(help="wikitext: undo WikiText's tokenisation before reading.")
]
Limit = Annotated[int | None, typer.Option(help="Read this many sentences at most.")]


@cli.command()
def describe(
    model: Model,
    device: Device = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Number format.")] = Dtype.float32,
    as_json: Json = False,
) -> None:
    """Say what ffmem sees in MODEL: family, layers, memories, and whether its equations hold."""
    from ffmem.models.describe import describe as describe_model

    facts = describe_model(api.load(model, dtype=dtype.value, device=device))
    if as_json:
        _print_json(facts)
        return
    for name, fact in facts.items():
        shown = fact
        if isinstance(fact, dict):
            shown = ", ".join(f"{key} {_number(value)}" for key, value in fact.items())
        typer.echo(f"{name.replace('_', ' '):16} {_number(shown)}")


@cli.command()
def index(
    model: Model,
    corpus: CorpusArgument,
    out: Annotated[Path, typer.Option(help="Folder to write; an unfinished one is gone on with.")],
    t: Annotated[int, typer.Option("-t", help="Triggers to keep per memory.")] = 50,
    unit: Unit = "sentence",
    prefixes: Annotated[
        Prefixes, typer.Option(help="The best prefix of each sentence, or all.")
    ] = Prefixes.best,
    compat: Annotated[
        Compat | None, typer.Option(help="Imitate the authors' code: prefixes 0 to n-1.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the pass.")] = Dtype.float32,
    start: Annotated[
        str, typer.Option(help="Token in front of a sentence: auto, none, bos, eos, or the token.")
    ] = "auto",
    detokenize: Detokenize = None,
    column: Column = "text",
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a batch.")] = 4096,
    lease_tokens: Annotated[
        int, typer.Option(help="Tokens of a lease: what a killed run repeats at most.")
    ] = 65_536,
    threads: Annotated[
        int | None, typer.Option(help="Threads of the pass; recorded, for the same bytes again.")
    ] = None,
    limit: Limit = None,
    device: Device = "auto",
) -> None:
    """Find what triggers every memory of MODEL in CORPUS, and what its value promotes."""
    from ffmem.corpus.corpus import Corpus

    made = api.index(
        model,
        Corpus(corpus, unit, column, detokenize, limit),
        out,
        dtype=dtype.value,
        device=device,
        progress=Progress(),
        t=t,
        prefixes=prefixes.value,
        compat=compat.value if compat else None,
        start=start,
        batch_tokens=batch_tokens,
        lease_tokens=lease_tokens,
        threads=threads,
    )
    typer.echo(repr(made))


@cli.command()
def extend(
    folder: Folder,
    corpus: CorpusArgument,
    unit: Unit = "sentence",
    detokenize: Detokenize = None,
    column: Column = "text",
    limit: Limit = None,
    model: Annotated[
        str | None, typer.Option(help="Where the model is now, if it has moved.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Add CORPUS to a finished index, with its model and settings."""
    from ffmem.corpus.corpus import Corpus

    source = Corpus(corpus, unit, column, detokenize, limit)
    made = api.extend(folder, source, model=model, device=device, progress=Progress())
    typer.echo(repr(made))


@cli.command()
def merge(
    folders: Annotated[list[Path], typer.Argument(help="Folders of indexes of one model.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
) -> None:
    """Put indexes of parts of a corpus together."""
    typer.echo(repr(api.merge(folders, out)))


@cli.command()
def show(
    folder: Folder,
    cell: Annotated[str, typer.Argument(help="Memory, such as L5N1234 or 5.1234.")],
    as_json: Json = False,
) -> None:
    """Show what triggers a memory and what its value promotes."""
    memory = api.open(folder)[cell]
    if as_json:
        _print_json(memory.to_dict())
    else:
        typer.echo(str(memory))


@cli.command()
def search(
    folder: Folder,
    query: Annotated[str, typer.Argument(help="Token, word, phrase or regular expression.")],
    where: Annotated[Where, typer.Option("--in", help="What to search in.")] = Where.values,
    regex: Annotated[bool, typer.Option(help="QUERY is a regular expression.")] = False,
    layer: Annotated[int | None, typer.Option(help="Only this layer.")] = None,
    limit: Annotated[int, typer.Option(help="Memories to show.", min=1)] = 20,
    as_json: Json = False,
) -> None:
    """Find memories by the tokens of their values or the text of their triggers."""
    from ffmem.indexing.memory import visible

    options = {"place": where.value, "regex": regex, "layer": layer, "limit": limit}
    hits = api.search(folder, query, **options)
    if as_json:
        _print_json([hit._asdict() for hit in hits])
        return
    for hit in hits:
        best = f"{hit.side} {hit.rank}"
        typer.echo(f"{hit.cell:12} {hit.matches:4d}×  best: {best:12} {visible(hit.snippet)}")
    if not hits:
        typer.echo(f"No memory has {query!r} in its {where.value}.")


@cli.command()
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(help="File to write.")],
    to: Annotated[Format, typer.Option(help="Format.")],
) -> None:
    """Write every memory of an index to a file for other programs."""
    api.export(folder, to.value, out)


@cli.command()
def verify(folder: Folder) -> None:
    """Check every hash and invariant of an index."""
    wrong = api.verify(folder)
    for sentence in wrong[1:]:
        typer.echo(sentence, err=True)
    if wrong:
        more = f" (and {len(wrong) - 1} more, above)" if len(wrong) > 1 else ""
        raise FfmemError(f"{folder} is not a sound index: {wrong[0]}{more}")
    made = api.open(folder)
    typer.echo(f"Sound: {len(made.manifest.files)} files, {len(made):,} memories.")


@cli.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("demo"),
    limit: Annotated[int, typer.Option(help="Sentences to read.", min=1)] = 2000,
    serve: Annotated[bool, typer.Option(help="Open the page at the end, on a terminal.")] = True,
) -> None:
    """Index smollm2-135m over a part of WikiText-2, and look at some of its memories."""
    from ffmem.demo import demo as run_demo

    run_demo(out, limit)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return (
        {True: "yes", False: "no", None: "none"}.get(value, str(value))
        if not isinstance(value, str)
        else value
    )


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        cli()
    except FfmemError as error:
        message = " ".join(str(error).split())
        raise SystemExit(f"Error: {message}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        raise SystemExit(0) from None

"""The command that writes an edit into a model's weights: edit."""

from pathlib import Path
from typing import Any

import click

from ffmem import acting
from ffmem.commands.edit_options import edit_options, taken
from ffmem.commands.options import device_option, json_option, out_option, print_json
from ffmem.progress import Progress

patch_type = click.Path(path_type=Path)


@click.command()
@click.argument("place", metavar="MODEL_OR_DIR")
@edit_options
@click.option("--patch", type=patch_type, metavar="FILE", help="Apply an edit.safetensors.")
@click.option("--undo", type=patch_type, metavar="FILE", help="Undo an edit.safetensors.")
@out_option
@click.option(
    "--corpus", default="wikitext-2:valid", show_default=True, help="Measure side effects on it."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=200,
    show_default=True,
    help="Read this many sentences at most.",
)
@click.option("--unit", default="sentence", show_default=True, help="sentence, line or window:N.")
@click.option("--column", default="text", show_default=True, help="Field of the text.")
@click.option(
    "--detokenize", type=click.Choice(["wikitext"]), help="Undo WikiText's tokenisation first."
)
@click.option("--no-report", is_flag=True, help="Do not measure side effects.")
@click.option("--start", help="auto, none, bos, eos or a token; else as the index.")
@click.option("--model", help="Where the index's model is now, if it has moved.")
@device_option
@json_option
def edit(
    place: str, out: Path, patch: Path | None, undo: Path | None, as_json: bool, **options: Any
) -> None:
    """Write an edit of memories into the weights, and save the model.

    Writes a Hugging Face folder with the patch that undoes the edit (edit.safetensors), and what
    else it changes (side-effects.md and .json). With an index DIR in place of the model, --mean
    knows the means. --patch and --undo take the file of an earlier edit instead of edits.
    """
    edits = taken(options)
    if sum((any(edits.values()), patch is not None, undo is not None)) != 1:
        raise click.UsageError(
            "Give one of the three, and only one: edits (--off, --set, --scale, --mean), --patch or"
            " --undo."
        )
    if options.pop("no_report"):
        options["corpus"] = None
    kept = acting.edit(place, out, patch=patch, undo=undo, progress=Progress(), **edits, **options)
    if as_json:
        print_json(kept.to_dict())
    else:
        click.echo(str(kept))

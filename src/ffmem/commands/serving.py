"""The command that opens the explorer: serve."""

from pathlib import Path
from typing import Any

import click

from ffmem.commands.options import device_option


@click.command()
@click.argument(
    "folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8800,
    show_default=True,
    help="0 takes any that is free.",
)
@click.option(
    "--token",
    is_flag=False,
    flag_value="new",
    envvar="FFMEM_TOKEN",
    help="Ask everybody for this token; without a value, one is made. Other hosts need it.",
)
@click.option(
    "--allow-host",
    "allowed",
    multiple=True,
    metavar="NAME",
    help="A further name of this machine that browsers may use.",
)
@click.option(
    "--report",
    "reports",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where `report` or `experiment` wrote figures; DIR-report is found by itself.",
)
@click.option("--model", help="Where the model is now, if it has moved.")
@click.option(
    "--db",
    metavar="URL",
    envvar="FFMEM_ANNOTATIONS",
    help="Database of the annotators' study; DIR-annotations.sqlite is found by itself.",
)
@click.option("--open/--no-open", "opening", default=False, help="Open a browser.")
@device_option
def serve(folders: tuple[Path, ...], opening: bool, **options: Any) -> None:
    """Browse, search and trace indexes on a local web page."""
    from ffmem.web.serving import serve as run

    def ready(address: str) -> None:
        click.echo(f"The explorer is at {address}\nCtrl-C stops it.")
        if opening:
            click.launch(address)

    run(folders, ready=ready, **options)

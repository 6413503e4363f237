"""Commands that open the explorer: serve, demo."""

import sys
from pathlib import Path
from typing import Any

import click

import ffmem
from ffmem.cli.options import (
    AT_LEAST_1,
    PATH,
    WholeNumber,
    db_option,
    device_option,
    index_model_option,
    reports_option,
    resumable,
)


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=PATH)
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on.")
@click.option(
    "--port",
    type=WholeNumber(0, 65535),
    default=8800,
    help="Port to listen on; 0 picks a free one.",
)
@click.option(
    "--token",
    is_flag=False,
    flag_value="new",
    envvar="FFMEM_TOKEN",
    metavar="TOKEN",
    help="Require this token; new, or no value, generates one. Required with --host.",
)
@click.option(
    "--allow-host",
    "allowed",
    multiple=True,
    metavar="NAME",
    help="Additional host name that browsers may use.",
)
@reports_option
@index_model_option
@db_option
@click.option(
    "--no-model",
    "load_model",
    flag_value=False,
    default=True,
    show_default=False,
    help="Load the model only when a page needs it.",
)
@click.option("--open/--no-open", "open_browser", default=False, help="Open a browser.")
@device_option
def serve(folders: tuple[Path, ...], open_browser: bool, **options: Any) -> None:
    """Serve indexes on a local web page.

    Browse, search and trace them in a browser. An index may be unfinished: its pages fill in while
    it is built.
    """

    def ready(url: str) -> None:
        click.echo(f"The explorer is at {url}\nPress Ctrl-C to stop it.")
        if open_browser:
            click.launch(url)

    ffmem.serve(folders, ready=ready, **options)


@click.command()
@click.option("--tiny", is_flag=True, help="Use mini-wiki: about a minute, offline.")
@click.option("--out", type=PATH, help="Folder to write. Default: demo, or demo-tiny.")
@click.option(
    "--limit",
    type=AT_LEAST_1,
    help="Read at most this many sentences. Default: 2000; with --tiny, all.",
)
@click.option("--no-serve", is_flag=True, help="Do not open the explorer.")
@resumable()
def demo(tiny: bool, out: Path | None, limit: int | None, no_serve: bool) -> None:
    """Index a model, run the paper's figures, open the explorer.

    Indexes smollm2-135m over part of WikiText-2; with --tiny, a small model and text that come with
    ffmem. In a terminal, the explorer opens as soon as there is something to see.
    """
    from ffmem.demo import FULL, TINY
    from ffmem.demo import demo as run_demo

    config = TINY if tiny else FULL
    serve = not no_serve and sys.stdout.isatty()
    run_demo(config, out or config.out, limit or config.limit, serve)

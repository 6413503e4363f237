"""The command for agents: mcp."""

from importlib.util import find_spec
from pathlib import Path

import click

from ffmem.cli.options import PATH, device_option, index_model_option
from ffmem.errors import FfmemError


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=PATH)
@click.option(
    "--report",
    "reports",
    multiple=True,
    type=PATH,
    metavar="FOLDER",
    help="Folder of a report or experiment. Default: DIR-report.",
)
@index_model_option
@device_option
def mcp(
    folders: tuple[Path, ...],
    reports: tuple[Path, ...],
    model: str | None,
    adapter: str | None,
    device: str,
) -> None:
    """Serve indexes as tools for language-model agents.

    A Model Context Protocol server on stdin and stdout, started by your agent's host. The model
    loads when a tool first needs it.
    """
    if find_spec("mcp") is None:
        raise FfmemError("Agents need the package mcp. Install it: pip install 'ffmem[mcp]'.")
    from ffmem.agents.server import serve

    serve(folders, reports=reports, model=model, adapter=adapter, device=device)

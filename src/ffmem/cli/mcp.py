"""The command for agents: mcp."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from ffmem.cli.options import PATH, device_option, index_model_option, reports_option
from ffmem.errors import FfmemError


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=PATH)
@reports_option
@index_model_option
@device_option
def mcp(folders: tuple[Path, ...], **options: Any) -> None:
    """Serve indexes as tools for language-model agents.

    A Model Context Protocol server on stdin and stdout, started by your agent's host. The model
    loads when a tool first needs it.
    """
    if find_spec("mcp") is None:
        raise FfmemError("Agents need the package mcp. Install it: pip install 'ffmem[mcp]'.")
    from ffmem.agents.server import serve

    serve(folders, **options)

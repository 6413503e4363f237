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
    """Give indexes to a language-model agent as tools.

    A server of the Model Context Protocol on stdin and stdout: your agent's host starts this
    command. The model is loaded when a tool first needs it.
    """
    if find_spec("mcp") is None:
        raise FfmemError("Agents need the package mcp. Install it: pip install 'ffmem[mcp]'.")
    from ffmem.agents.server import serve

    serve(folders, **options)

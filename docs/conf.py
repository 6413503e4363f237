"""The documentation site: `make docs` writes it to docs/_build, without a network.

Its sources are the files below the root of the project, so links between them work here and there.
"""

import re
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import click
from sphinx.application import Sphinx

import ffmem
from ffmem.cli import GROUPS, cli

project = "ffmem"
author = "The ffmem authors"
copyright = author
release = version_of("ffmem")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**", "examples/*.ipynb", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "src", "tests", "benchmarks", "dist", "docs/_build", "**/table.md"]

html_theme = "furo"
html_title = "ffmem"
html_copy_source = False
html_extra_path = ["site"]  # index.html, which leads to docs/index.html

myst_heading_anchors = 4

# Notebooks are shown with the outputs that are committed; the tests run them.
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # they would be loaded from the network

autodoc_member_order = "bysource"
default_role = "code"  # one backtick in a docstring is code, as in Markdown
maximum_signature_line_length = 80


def _escape_bars(*event: Any) -> None:
    """Keep |m| in a docstring as it is: between bars reStructuredText expects a substitution."""
    lines = event[-1]
    lines[:] = [line.replace("|", r"\|") for line in lines]


def _keep_anchors(app: Sphinx, document: str, source: list[str]) -> None:
    """Keep links within a report or comparison, whose anchors are HTML; tests check them."""
    if document.endswith(("/report", "/comparison")):
        source[0] = re.sub(r"\[([^]]+)\]\((#[\w-]+)\)", r'<a href="\2">\1</a>', source[0])


def _find_results(app: Sphinx, document: str, source: list[str]) -> None:
    """Replace `.. result:: NAME` by the documentation of that class, wherever it is defined."""
    if document == "docs/reference/python":
        package = Path(ffmem.__file__).parent
        modules = {path: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}

        def autoclass(found: re.Match[str]) -> str:
            name = found[1]
            (path,) = (one for one in modules if re.search(rf"^class {name}\b", modules[one], re.M))
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            return f".. autoclass:: {module}.{name}\n   :members:"

        source[0] = re.sub(r"^\.\. result:: (\w+)", autoclass, source[0], flags=re.M)


def _add_help(app: Sphinx, document: str, source: list[str]) -> None:
    """Add the help of every command to the page of the command line."""
    if document == "docs/reference/command-line":
        source[0] += "".join(_help_pages())


def _help_pages() -> Iterator[str]:
    """Yield what `ffmem COMMAND --help` prints, group by group, in Markdown."""

    def section(command: click.Command, parent: click.Context, level: str) -> Iterator[str]:
        context = click.Context(command, parent, command.name, terminal_width=88)
        yield f"\n{level} {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"
        for inner in getattr(command, "commands", {}).values():
            yield from section(inner, context, level)

    root = click.Context(cli, info_name="ffmem", terminal_width=88, show_default=True)
    yield f"\n```text\n{cli.get_help(root)}\n```\n"
    for group, commands in GROUPS.items():
        yield f"\n## {group}\n"
        for name in commands:
            command = cli.get_command(root, name)
            assert command is not None
            yield from section(command, root, "###")


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("autodoc-process-docstring", _escape_bars)
    app.connect("source-read", _keep_anchors)
    app.connect("source-read", _find_results)
    app.connect("source-read", _add_help)

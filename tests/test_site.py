"""The documentation site builds without a warning, and every link in it leads somewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest

import ffmem
from ffmem.cli import COMMANDS, cli

ROOT = Path(__file__).parent.parent


class Page(HTMLParser):
    """The anchors and links of a page, and its text."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.text = {""}, [], ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        self.links += [found[name] for name in ("href", "src") if found.get(name)]

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [*(sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"), "-c", ROOT / "docs"]
    done = subprocess.run(
        [*command, "-d", folder / "doctrees", ROOT, folder / "html"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site):
    """Every page of the site by its path."""
    return {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}


def test_every_link_within_the_site_leads_somewhere(site, pages):
    assert len(pages) > 30
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            is_page = target in pages
            if not target.exists() or (
                is_page and unquote(parts.fragment) not in pages[target].anchors
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_no_page_loads_anything_from_the_network(pages):
    for path, page in pages.items():
        text = path.read_text(encoding="utf-8")
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text):
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), (path.name, tag)
        assert page.text


def test_the_reference_has_every_public_name(site, pages):
    page = pages[site / "docs/reference/python.html"]
    for name in ffmem.__all__:
        documented = getattr(ffmem, name)
        names = {f"ffmem.{name}", f"{documented.__module__}.{documented.__qualname__}"}
        assert names & page.anchors, name


@pytest.mark.parametrize("name", COMMANDS)
def test_the_reference_has_every_command_and_option(name, site, pages):
    text = pages[site / "docs/reference/command-line.html"].text
    command = cli.get_command(click.Context(cli), name)
    for one in (command, *getattr(command, "commands", {}).values()):
        for option in one.params:
            if isinstance(option, click.Option):
                assert option.opts[-1] in text, (one.name, option.opts)

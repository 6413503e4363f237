"""What the documents say is true."""

import re
import tomllib
from pathlib import Path

import click
import pytest

import ffmem
from ffmem.cli import COMMANDS, cli
from ffmem.models.families import FAMILIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_tree_of_folders_names_every_package_and_no_other():
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## Folders")[1].split("```")[1]
    lines = [line.split(maxsplit=1) for line in tree.splitlines() if line.strip()]
    assert all(len(line) == 2 for line in lines), "each folder has a line about it"
    packages = {path.parent.relative_to(ROOT) for path in (ROOT / "src").rglob("*.py")}
    named = {Path(line[0]) for line in lines if line[0].startswith("src/")}
    assert named == {package for package in packages if len(package.parts) <= 3}
    assert all((ROOT / line[0]).is_dir() for line in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme_and_every_option_has_help(name):
    command = cli.get_command(click.Context(cli), name)
    assert f"`ffmem {command.name}" in README
    for one in (command, *getattr(command, "commands", {}).values()):
        assert one.help
        options = [option for option in one.params if isinstance(option, click.Option)]
        assert all(option.help for option in options), one.name


def test_the_readme_names_every_family():
    for name in FAMILIES:
        assert name in README or name == "ffmem_adaptive"


def test_links_and_paths_in_the_documents_lead_somewhere():
    for document in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("README.md"),
        *(ROOT / "docs").glob("*.md"),
    ):
        text = document.read_text()
        for link in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (document.parent / link).exists(), link
        for path in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), path
        for module in re.findall(
            r"`((?:models|corpus|indexing|experiments|patterns|annotation|web|api|cli)/\w+\.py)`",
            text,
        ):
            assert (ROOT / "src" / "ffmem" / module).exists(), module


def test_the_python_of_the_readme_uses_public_names():
    code = README.split("```python")[1].split("```")[0]
    assert set(re.findall(r"ffmem\.(\w+)", code)) <= set(ffmem.__all__)
    compile(code, "README.md", "exec")


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().split()
    }
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    for extra in ("explain", "llama"):  # which dev takes in
        wanted += project["optional-dependencies"][extra]
    for dependency in wanted:
        name = re.split(r"[<>=!~ \[]", dependency)[0]
        assert name in pinned or name == "ffmem", dependency


def test_the_words_of_the_terminology_are_in_the_code():
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    rows = (ROOT / "docs" / "terminology.md").read_text().split("|---|---|---|---|")[1]
    for row in rows.strip().splitlines():
        in_code = row.split("|")[3]
        for word in re.findall(r"`([A-Za-z_.]+)`", in_code):
            assert word.split(".")[-1] in source, word

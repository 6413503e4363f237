"""What the documents say is true."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import click
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import ffmem
from benchmarks.table import BEGIN, END, TABLES
from ffmem.cli import COMMANDS, cli
from ffmem.experiments.base import NAMES, find
from ffmem.indexing.store import KINDS
from ffmem.indexing.tidy import SCHEMAS
from ffmem.models.families import FAMILIES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "guides").glob("*.md"),
    *(ROOT / "docs" / "reference").glob("*.md"),
    *(ROOT / "docs" / "results").rglob("README.md"),
]
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def command_named(words):
    """Return the command that a command line calls, and the words that follow its name."""
    command = cli.get_command(click.Context(cli), words[0])
    if isinstance(command, click.Group) and len(words) > 1 and words[1] in command.commands:
        return command.commands[words[1]], words[2:]
    return command, words[1:]


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 200
    assert max(map(len, lines)) <= 120


def test_the_tree_of_folders_names_every_package_and_no_other():
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## Folders")[1].split("```")[1]
    lines = [line.split(maxsplit=1) for line in tree.splitlines() if line.strip()]
    assert all(len(line) == 2 for line in lines), "each folder has a line about it"
    packages = {path.parent.relative_to(ROOT) for path in (ROOT / "src").rglob("*.py")}
    named = {Path(line[0]) for line in lines if line[0].startswith("src/")}
    assert named == {package for package in packages if len(package.parts) <= 3}
    assert all((ROOT / line[0]).is_dir() for line in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_a_guide_and_every_option_has_help(name):
    pages = "\n".join(path.read_text() for path in DOCUMENTS if path.name != "command-line.md")
    assert re.search(rf"\bffmem {name}\b", pages)
    command = cli.get_command(click.Context(cli), name)
    for one in (command, *getattr(command, "commands", {}).values()):
        assert one.help
        options = [option for option in one.params if isinstance(option, click.Option)]
        assert all(option.help for option in options), one.name


def test_the_table_of_models_has_every_type_and_the_readme_counts_them():
    causal, multimodal = (
        (ROOT / "docs" / "coverage.md").read_text().split("## Text decoders of models")
    )
    names = set(re.findall(r"^\| (\S+) \| ", causal, re.M)) - {"type"}
    read = re.findall(r"^\| (\S+) \| (row|search) \|", causal, re.M)
    assert names == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert f"{len(read)} of the {len(names)} types" in README
    by_row = {name for name, by in read if by == "row"}
    assert by_row <= set(FAMILIES) | {"gpt-sw3", "llama4"}  # these have the config of another type
    assert "| qwen3_vl | search |" in multimodal


@each_document
def test_commands_and_options_in_a_document_exist(document):
    text = document.read_text()
    shown = r"(?:^ {4,}(?:\w*\$ )?|^\w*\$ |`)ffmem ((?:[a-z]|--)[^`#\n]*)"
    for line in re.findall(shown, text, re.MULTILINE):
        words = re.sub(r"[\[\]|…]", " ", line).split()
        if words[0].startswith("--"):
            continue
        assert words[0] in COMMANDS, line
        command, rest = command_named(words)
        known = {
            flag for option in command.params for flag in (*option.opts, *option.secondary_opts)
        }
        options = {word.split("=")[0] for word in rest if re.match(r"--[a-z]", word)}
        assert options <= known | {"--help"}, line


def test_the_page_about_traces_shows_every_option_and_parameter():
    page = (ROOT / "docs" / "trace.md").read_text()
    usage = page.split("\n\n")[1]
    options = {
        (option.opts[0], "" if option.is_flag else option.make_metavar(click.Context(cli)))
        for option in command_named(["trace"])[0].params
        if isinstance(option, click.Option)
    }
    shown = set(re.findall(r"(--[a-z]+) ?([A-Z=]*)", usage))
    assert {name for name, _ in shown} == {name for name, _ in options}
    for name, value in options:
        taken = {found for option, found in shown if option == name}.pop()
        assert bool(taken) == bool(value), name
        assert taken == value or taken in ("FILE", "DTYPE"), name
    call = page.split("`ffmem.trace(")[1].split(")`")[0]
    names = [part.split("=")[0].strip() for part in call.split(",")]
    assert [*names, "progress"] == list(inspect.signature(ffmem.trace).parameters)


@each_document
def test_links_and_paths_in_a_document_lead_somewhere(document):
    text = document.read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (document.parent / link).exists(), link
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    packages = "models|corpus|indexing|experiments|patterns|annotation|web|api|cli"
    for module in re.findall(rf"`((?:{packages})/\w+\.py)`", text):
        assert (ROOT / "src" / "ffmem" / module).exists(), module
    for target in re.findall(r"(?:^    |`)make (\w+)", text, re.MULTILINE):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target


@each_document
def test_python_in_a_document_calls_public_names_with_parameters_that_exist(document):
    for code in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "ffmem":
                assert node.attr in ffmem.__all__, node.attr
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if getattr(node.func.value, "id", None) == "ffmem":
                    called = getattr(ffmem, node.func.attr)
                elif node.func.attr == "table":
                    called = ffmem.Index.table
                else:
                    continue
                parameters = inspect.signature(called).parameters
                assert {word.arg for word in node.keywords} <= set(parameters), code


def test_the_readme_shows_ten_lines_of_python():
    code = README.split("```python")[1].split("```")[0]
    first, *rest = [line for line in code.splitlines() if line][1:]
    assert first.startswith("index = ffmem.open(")
    assert len(rest) <= 10


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_measurements_is_that_of_the_benchmarks(name):
    text = (ROOT / name).read_text()
    assert text.split(BEGIN)[1].split(END)[0] == TABLES[name]()


def test_the_guide_names_every_experiment_and_which_need_a_corpus():
    page = (ROOT / "docs" / "guides" / "paper.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (yes)? ?\|$", page, re.MULTILINE)
    assert {name: needs == "yes" for name, needs in rows} == {
        name: bool(find(name).metrics) for name in NAMES
    }


def test_the_formats_name_every_file_and_column(tiny_index):
    page = (ROOT / "docs" / "reference" / "formats.md").read_text()
    for name, schema in SCHEMAS.items():
        (row,) = re.findall(rf"^\| `{name}` \| [^|]* \| (.*) \|$", page, re.MULTILINE)
        assert re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", row)) == schema.names
    for kind in (*KINDS, "agreement"):
        (row,) = re.findall(rf"^\| `{kind}/layer-000.parquet` \| (.*) \|$", page, re.MULTILINE)
        columns = set(re.findall(r"`(\w+)`", row))
        stored = set(tiny_index.columns(kind, 0)) - {"memory"}
        prefixed = {column.replace("bottom_", "top_") for column in stored}
        assert prefixed <= columns, kind


def test_every_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().split()
    }
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    for extra in ("models", "docs", "explain", "llama", "ray", "mcp"):  # which dev takes in
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


def test_the_citation_has_the_version_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation

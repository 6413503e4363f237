"""The notebooks and the script in examples/ run, on the small model that comes with ffmem."""

import re
import runpy
import sys
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
INDEX = "mini-wiki-index"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the notebooks run one after the other, so that one index serves all."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture
def shell():
    """A fresh session of IPython in this process, which has the libraries loaded already."""
    shell = InteractiveShell.instance()
    shell.reset()
    yield shell
    InteractiveShell.clear_instance()


def code_cells(name):
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_on_the_small_model(name, shell, folder, monkeypatch):
    monkeypatch.chdir(folder)
    first, *rest = (cell.source for cell in code_cells(name))
    assert "SMALL = False" in first
    for source in (first.replace("SMALL = False", "SMALL = True"), *rest):
        shell.run_cell(source).raise_error()
    assert shell.user_ns["MODEL"] == "mini-wiki"
    assert (folder / INDEX / "manifest.json").exists()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_with_its_outputs_and_names_no_folder_of_a_machine(name):
    cells = code_cells(name)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell.outputs for cell in cells)
    text = (EXAMPLES / f"{name}.ipynb").read_text()
    assert "Traceback" not in text
    assert not any(folder in text for folder in ("/home/", "/root", "/tmp", "/work"))


@pytest.fixture
def made_index(folder, shell, monkeypatch, capsys):
    """The folder, with an index of the small model, as the working directory."""
    monkeypatch.chdir(folder)
    if not (folder / INDEX).exists():
        shell.run_cell(f"import ffmem; ffmem.index('mini-wiki', 'mini-wiki:train', {INDEX!r})")
        capsys.readouterr()


@pytest.mark.usefixtures("made_index")
def test_the_experiment_of_ones_own_runs_in_20_lines(monkeypatch, capsys):
    script = EXAMPLES / "own_experiment.py"
    monkeypatch.setattr(sys, "argv", [str(script), INDEX])
    runpy.run_path(str(script))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(rows) == 16
    assert all(float(row[2]) < float(row[3]) for row in rows)  # triggers of a memory are alike
    code = script.read_text().split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


@pytest.mark.usefixtures("made_index")
def test_the_measurement_of_ones_own_runs_over_all_memories(monkeypatch, capsys):
    script = EXAMPLES / "own_measure.py"
    monkeypatch.setattr(sys, "argv", [str(script), INDEX])
    runpy.run_path(str(script))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [int(row[0]) for row in rows] == list(range(16))
    own, another = (sum(float(row[n]) for row in rows) for n in (1, 2))
    assert own > 2 * another
    code = script.read_text().split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


@pytest.mark.usefixtures("made_index")
def test_the_guide_to_tables_runs(folder):
    guide = (EXAMPLES.parent / "docs" / "guides" / "tables.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) >= 9
    names = {}
    for block in blocks:
        exec(compile(block.replace("demo", INDEX), "tables.md", "exec"), names)
    index, strongest = names["index"], names["strongest"]
    assert len(names["stats"]) == len(index)
    assert len(names["means"]) == index.n_layers
    # SQL decodes prefixes as ffmem does.
    expected = index.table("triggers", layer=5).to_pandas().nlargest(5, "coefficient")
    assert [row[0] for row in strongest] == expected["memory"].tolist()
    assert [row[4] for row in strongest] == expected["prefix"].tolist()
    tops = {row["memory"]: row["token"] for row in names["tops"].to_dicts()}
    assert tops[141] == index["L5N141"].value.top[0].token
    assert len(names["found"][0].tokens) == len(names["found"][0]["L5N141"])
    assert len(names["traces"]) == 2

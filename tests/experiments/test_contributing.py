"""The experiment in CONTRIBUTING.md is complete: it runs, draws itself and stands in a report."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import ffmem
import ffmem.api.experiments  # before NAMES is changed: it takes them in
from ffmem.experiments import base, render

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_example_in_contributing_runs_as_it_stands(
    tiny_index, model_folder, tmp_path, monkeypatch
):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    module = ModuleType("ffmem.experiments.trigger_length")
    exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(base, "NAMES", (*base.NAMES, "trigger-length"))
    (result,) = ffmem.experiment("trigger-length", tiny_index, tmp_path, model=model_folder)
    for row in result.rows:
        memories = tiny_index.memories(row["layer"])
        lengths = [trigger.length for memory in memories for trigger in memory.triggers]
        assert (row["n"], row["mean"]) == (len(lengths), sum(lengths) / len(lengths))
    assert json.loads((tmp_path / "trigger-length.json").read_text()) == result.to_dict()
    assert (tmp_path / "trigger-length.svg").read_text().startswith("<svg")
    assert "Triggers are longest in layer" in str(result)
    assert "<svg" in result._repr_html_()
    page = render.write_report(tmp_path, [result], tiny_index).read_text(encoding="utf-8")
    assert "Length of triggers" in page
    assert "Triggers grow longer through the layers" in page

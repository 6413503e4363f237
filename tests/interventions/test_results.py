"""Results as plain data: the schema that an API publishes for them is that of their JSON."""

import json
import subprocess
import sys

import pytest
from pydantic import TypeAdapter

from ffmem.interventions.edits import Edits
from ffmem.interventions.effect import effect, effect_of_facts
from ffmem.interventions.trace import trace
from tests.interventions.planted import planted, with_start

TEXT = "w5 w9 w2 w17"


def traced(loaded, path):
    return trace(loaded, TEXT)


def traced_under_edits(loaded, path):
    edits = Edits.of(off=["L1N7"], set={"L0N1": 2}, positions=[-1])
    return trace(loaded, TEXT, edits, top=3, generate=2, temperature=1.0, grid=True)


def measured(loaded, path):
    return effect(loaded, TEXT, candidates=4, positions=[0, 2])


def measured_over_a_file(loaded, path):
    path.write_text("w5 w9\nw4\n")
    return effect_of_facts(loaded, path, against=path, candidates=3)


@pytest.mark.parametrize("make", [traced, traced_under_edits, measured, measured_over_a_file])
def test_a_result_is_read_back_from_its_json_as_the_schema_says(make, tmp_path):
    result = make(with_start(planted()), tmp_path / "facts.txt")
    model = TypeAdapter(type(result))
    content = json.dumps(result.to_dict(), allow_nan=False)
    assert model.validate_json(content, strict=True) == result
    assert set(json.loads(content)) == set(model.json_schema()["properties"])


def test_results_load_no_torch():
    code = "import sys, ffmem.interventions.results; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

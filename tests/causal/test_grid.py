"""The grid against traces position by position, in families of every kind."""

import pytest

import ffmem
from ffmem.causal.edits import Edits
from ffmem.causal.prompt import read_prompt
from ffmem.causal.trace import trace
from tests.causal.planted import planted
from tests.experiments.test_forward import VARIANTS
from tests.tiny import tiny, tiny_tokenizer

TEXT = "w5 w9 w2 w17"


@pytest.mark.parametrize("name", VARIANTS)
def test_the_grid_is_a_trace_at_every_position(name):
    memories = ffmem.load(tiny(name), tiny_tokenizer())
    prompt = read_prompt(memories, TEXT, 0)
    edits = Edits.of(set={"L0N3": 2.0})
    found = trace(memories, prompt, edits, grid=True)
    for position in range(len(prompt.ids)):
        alone = trace(memories, prompt, edits, position=position)
        for grid, run in ((found.grid, alone.plain), (found.edited_grid, alone.edited)):
            for row, layer in zip(grid, run.layers, strict=True):
                place = row[position]
                assert place.case == layer.case
                for one, other in (
                    (place.residual, layer.residual_top[0]),
                    (place.ff, layer.ff_top[0]),
                    (place.output, layer.output_top[0]),
                ):
                    assert (one.token, one.id) == (other.token, other.id)
                    assert one.probability == pytest.approx(other.probability, rel=1e-3)


def test_the_grid_is_in_json_and_table_only_when_it_is_asked_for():
    memories = planted()
    prompt = read_prompt(memories, TEXT, 0)
    found = trace(memories, prompt, grid=True)
    rows = found.to_dict()["grid"]
    assert [len(row) for row in rows] == [len(prompt.ids)] * memories.n_layers
    assert set(rows[0][0]) == {"residual", "ff", "output", "case"}
    assert "at each position" in str(found)
    assert "grid" not in trace(memories, prompt).to_dict()
    assert "edited_grid" not in found.to_dict()

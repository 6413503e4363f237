"""The grid against traces position by position, in families of every kind."""

import pytest

import ffmem
from ffmem.interventions.edits import Edits
from ffmem.interventions.trace import trace
from tests.interventions.planted import planted, with_start
from tests.tiny import TINY, tiny, tiny_tokenizer

TEXT = "w5 w9 w2 w17"


@pytest.mark.parametrize("name", TINY)
def test_the_grid_is_a_trace_at_every_position(name):
    memories = ffmem.load(tiny(name), tiny_tokenizer())
    edits = Edits.of(set={"L0N3": 2.0})
    found = trace(with_start(memories), TEXT, edits, grid=True)
    for position in range(len(found.tokens)):
        alone = trace(with_start(memories), TEXT, edits, position=position)
        for grid, run in ((found.grid, alone.plain), (found.edited_grid, alone.edited)):
            for row, layer in zip(grid, run.layers, strict=True):
                place = row[position]
                assert place.case == layer.case
                if not layer.ff_top:  # a layer without memories
                    assert place.ff is None
                    continue
                for one, other in (
                    (place.residual, layer.residual_top[0]),
                    (place.ff, layer.ff_top[0]),
                    (place.output, layer.output_top[0]),
                ):
                    assert (one.token, one.id) == (other.token, other.id)
                    assert one.probability == pytest.approx(other.probability, rel=1e-3)


def test_the_grid_is_in_json_and_table_only_when_it_is_asked_for():
    memories = planted()
    found = trace(with_start(memories), TEXT, grid=True)
    rows = found.to_dict()["grid"]
    assert [len(row) for row in rows] == [len(found.tokens)] * memories.n_layers
    assert set(rows[0][0]) == {"residual", "ff", "output", "case"}
    assert "at each position" in str(found)
    assert "grid" not in trace(with_start(memories), TEXT).to_dict()
    assert "edited_grid" not in found.to_dict()

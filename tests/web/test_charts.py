"""Charts of the pages are Vega-Lite that Vega can compile, in both themes, without a NaN."""

import json
from dataclasses import replace

import altair as alt
import numpy as np
import pytest
import vl_convert

from ffmem.errors import FfmemError
from ffmem.experiments.base import ExperimentResult
from ffmem.experiments.charts import GROUND, THEMES, VEGA_LITE
from ffmem.indexing.memory import visible_token
from ffmem.web.charts import (
    AGREEMENT_LABELS,
    figure_spec,
    fixed_width,
    home_spec,
    layer_spec,
)
from ffmem.web.layer_table import AGREEMENT, LayerQuery, filter_memories, layer_table
from tests.experiments.results import PAPERS, result

LAYERS = 3


def compiled(spec):
    """Return what Vega-Lite makes of a chart, after JSON that has no NaN and the schema."""
    plain = json.loads(json.dumps(spec, allow_nan=False))
    alt.Chart.from_dict(plain, validate=True)
    vl_convert.vegalite_to_vega(plain, vl_version=VEGA_LITE)
    return plain


def marks(part):
    for inner in (*part.get("layer", ()), *part.get("vconcat", ())):
        yield from marks(inner)
    if "mark" in part:
        yield part


def rows_of(spec):
    """Return every row that a chart draws."""
    sets = [*spec.get("datasets", {}).values()]
    own = [part["data"]["values"] for part in [spec] if "values" in part.get("data", {})]
    return [row for rows in [*sets, *own] for row in rows]


def all_kept(index, layer=0):
    return np.ones(index.layout.widths[0], bool)


@pytest.mark.parametrize("name", PAPERS)
def test_every_figure_compiles_for_a_page_and_as_a_still_picture(name):
    assert rows_of(compiled(figure_spec(result(name, n_layers=LAYERS), "dark")))
    drawn = fixed_width(figure_spec(result(name, n_layers=LAYERS)), 200)
    panels = drawn.get("vconcat", [drawn])
    assert [panel["width"] for panel in panels] == [200] * len(panels)
    assert vl_convert.vegalite_to_svg(drawn, vl_version=VEGA_LITE).startswith("<svg")


@pytest.mark.parametrize("name", PAPERS)
def test_a_figure_of_nothing_compiles(name):
    found = result(name, n_layers=LAYERS)
    spec = figure_spec(ExperimentResult(name, found.paper, found.settings, [], {}))
    vl_convert.vegalite_to_vega(spec, vl_version=VEGA_LITE)


@pytest.mark.parametrize("name", PAPERS)
def test_layer_n_of_a_figure_opens_layer_n_minus_1(name):
    measured = result(name, n_layers=LAYERS)
    spec = figure_spec(measured)
    rows = [row for row in rows_of(spec) if "layer" in row]
    assert bool(rows) == any("layer" in row for row in measured.rows if name not in OF_NO_LAYER)
    for row in rows:
        assert 1 <= row["layer"] <= LAYERS
        opens = f"/m/{row['cell']}" if "cell" in row else f"/layer/{row['layer'] - 1}"
        assert row["url"] == opens


OF_NO_LAYER = {"last-layer-composition"}
"""Their rows may name a layer, their marks do not."""


def test_points_of_the_most_predictive_values_open_those_memories():
    measured = result("predictive-values", n_layers=LAYERS)
    named = [row for row in rows_of(figure_spec(measured)) if "cell" in row]
    expected = [row for row in measured.rows if row["precision"] is not None]
    assert [row["cell"] for row in named] == [row["cell"] for row in expected]
    assert [row["precision"] for row in named] == [100 * row["precision"] for row in expected]


@pytest.mark.parametrize("name", PAPERS)
def test_marks_say_their_numbers_and_no_width_in_pixels_is_left(name):
    spec = figure_spec(result(name, n_layers=LAYERS))
    for mark in marks(spec):
        assert "size" not in mark["mark"] or mark["mark"]["type"] != "tick"
        fields = [tip["field"] for tip in mark["encoding"].get("tooltip", [])]
        assert not {"url", "order", "at"} & set(fields)
    assert any("tooltip" in mark["encoding"] for mark in marks(spec))
    if "vconcat" in spec:
        assert spec["usermeta"]["gutter"] > 0
    else:
        assert spec["width"] == "container"


@pytest.mark.parametrize("name", PAPERS)
def test_a_dark_page_exchanges_the_ground_and_nothing_else(name):
    light, dark = (figure_spec(result(name, n_layers=LAYERS), theme) for theme in THEMES)
    assert rows_of(light) == rows_of(dark)
    text = json.dumps({key: part for key, part in dark.items() if key != "datasets"})
    assert not [light for light, _ in GROUND.values() if light in text]
    plain = json.dumps({key: part for key, part in light.items() if key != "datasets"})
    for color, other in GROUND.values():
        plain = plain.replace(color, other)
    assert plain == text


def test_a_layer_has_a_point_for_every_memory_with_its_own_numbers(index):
    for layer in range(index.n_layers):
        table = layer_table(index, layer)
        spec = compiled(layer_spec(index, table, all_kept(index)))
        points = {point["cell"]: point for point in rows_of(spec)}
        assert len(points) == index.layout.widths[0]
        for memory in index.memories(layer):
            point, stats = points[str(memory.cell)], memory.stats
            strong = max(abs(stats.max), abs(stats.min)) if memory.gated else stats.max
            assert point["height"] == pytest.approx(strong, rel=1e-3)
            assert point["active"] == pytest.approx(100 * stats.active_share, rel=1e-3)
            assert point["top"] == visible_token(memory.value.top[0].token)
            assert point["bottom"] == visible_token(memory.value.bottom[0].token)
            assert point["url"] == f"/m/{memory.cell}"
            said = AGREEMENT_LABELS[AGREEMENT[int(table.agreement[memory.cell.memory])]]
            assert point["agreement"] == said


def test_memories_that_the_filters_leave_out_are_still_there_but_not_kept(index):
    table = layer_table(index, 0)
    left = filter_memories(index, table, LayerQuery(has="the"))
    points = rows_of(layer_spec(index, table, left))
    assert {point["cell"] for point in points if point["passes"]} == {
        f"L0N{memory}" for memory in np.flatnonzero(left).tolist()
    }


def test_a_layer_with_memories_that_were_never_active_compiles(tiny_index):
    table = layer_table(tiny_index, 0)
    flat = np.zeros(tiny_index.layout.widths[0])
    for numbers in (flat, flat * np.nan, flat - 1):
        dead = replace(table, max=numbers, min=numbers, active_share=flat)
        spec = layer_spec(tiny_index, dead, all_kept(tiny_index), "dark")
        json.dumps(spec, allow_nan=False)
        vl_convert.vegalite_to_vega(spec, vl_version=VEGA_LITE)


@pytest.mark.parametrize("theme", THEMES)
def test_the_picture_of_the_index_compiles_and_shows_every_layer(index, theme):
    spec = compiled(home_spec(index, theme))
    assert {row["layer"] for row in rows_of(spec)} == set(range(1, index.n_layers + 1))
    assert {row["url"] for row in rows_of(spec)} == {
        f"/layer/{layer}" for layer in range(index.n_layers)
    }


def test_another_theme_is_refused(tiny_index):
    with pytest.raises(FfmemError, match=r"no theme 'sepia'\. There are: light, dark"):
        home_spec(tiny_index, "sepia")

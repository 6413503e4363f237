import json
from dataclasses import replace

import pytest

from ffmem.errors import FfmemError
from ffmem.experiments.base import NAMES, ExperimentResult
from ffmem.experiments.charts import figure_chart as chart
from ffmem.experiments.charts import figure_svg as figure
from tests.experiments.results import PAPERS, result

SHAPES = [(16, True), (1, False)]
KEPT = ("layer", "token", "how", "definition", "target", "memories", "group", "source", "cell")


def data(spec):
    """Return all rows that a figure draws."""
    return [row for rows in spec["datasets"].values() for row in rows]


def emptied(one):
    """Return a result in which every number is missing."""
    bins = ("low", "high") if one.experiment == "max-probability" else ()
    rows = [
        {
            k: v if k in (*KEPT, *bins) or not isinstance(v, float | int) else None
            for k, v in row.items()
        }
        for row in one.rows
    ]
    return replace(one, rows=rows, also={})


def test_experiments_stand_in_the_papers_order():
    assert list(NAMES) == list(PAPERS)


@pytest.mark.parametrize(("n_layers", "gated"), SHAPES)
@pytest.mark.parametrize("name", PAPERS)
def test_every_experiment_draws_at_any_depth(name, n_layers, gated):
    one = result(name, n_layers, gated)
    chart(one).to_dict()  # checked against the schema
    assert "<path" in figure(one)


@pytest.mark.parametrize("name", PAPERS)
def test_missing_numbers_leave_a_gap_and_no_error(name):
    svg = figure(emptied(result(name, 4, True)))
    assert "NaN" not in svg
    assert "undefined" not in svg


@pytest.mark.parametrize("name", PAPERS)
def test_a_result_without_rows_draws_an_empty_figure(name):
    assert figure(replace(result(name), rows=[], also={})).endswith("</svg>")


def test_figures_need_the_json_alone(tmp_path):
    for name in PAPERS:
        one = result(name, 4, True)
        again = ExperimentResult.read(one.write(tmp_path))
        assert chart(again).to_dict() == chart(one).to_dict()


def test_layers_are_shown_from_1():
    spec = json.dumps(chart(result("agreement", 30)).to_dict())
    assert f'"domain": {list(range(1, 31))}' in spec
    layers = {row["layer"] for row in data(json.loads(spec)) if "layer" in row}
    assert layers == set(range(1, 31))


def test_shares_are_drawn_in_percent():
    one = result("agreement", 5)
    drawn = [row for row in data(chart(one).to_dict()) if row.get("series") == "next token"]
    assert [row["rate"] for row in drawn] == [100 * row["rate"] for row in one.rows]


def test_the_best_rank_0_has_a_place_on_the_logarithmic_axis():
    one = result("next-token-rank", 1)
    one.rows[0].update(q1=0, median=0, q3=9)
    (row,) = data(chart(one).to_dict())
    assert (row["q1"], row["median"], row["q3"]) == (1, 1, 10)


def test_a_single_bin_of_equal_probabilities_draws():
    one = result("max-probability")
    row = one.rows[0] | {"low": 0.25, "high": 0.25}
    assert figure(replace(one, rows=[row])).endswith("</svg>")


def test_an_unknown_experiment_is_named_beside_the_known_ones():
    with pytest.raises(FfmemError, match=r"Unknown experiment 'guess'\. Experiments: patterns, "):
        chart(replace(result("agreement"), experiment="guess"))

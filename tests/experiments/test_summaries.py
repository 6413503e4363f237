from dataclasses import replace

import pytest

from ffmem.experiments.base import find
from tests.experiments.results import PAPERS, result
from tests.experiments.test_charts import emptied


def shows(one):
    return find(one.experiment).summary(one)


@pytest.mark.parametrize("name", PAPERS)
def test_every_experiment_is_told_in_whole_sentences(name):
    experiment = find(name)
    for text in (experiment.describe(result(name)), experiment.paper_says, shows(result(name))):
        assert text[0].isupper()
        assert text.endswith(".")
        assert "None" not in text
        assert "nan" not in text.lower().split()
    assert experiment.finding.startswith("The paper")


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize("n_layers", [1, 2])
def test_few_layers_are_told_as_well(name, n_layers):
    assert shows(result(name, n_layers, False)).endswith(".")


@pytest.mark.parametrize("name", PAPERS)
def test_missing_numbers_and_rows_are_told_and_no_error(name):
    for one in (emptied(result(name)), replace(result(name), rows=[], also={})):
        assert shows(one).endswith(".")


@pytest.mark.parametrize("name", PAPERS)
def test_the_paper_is_quoted_with_its_place_or_not_at_all(name):
    experiment = find(name)
    assert all(quote["value"] in experiment.paper_says for quote in result(name).quoted)
    assert all(quote["where"] in experiment.paper_says for quote in result(name).quoted)
    if not result(name).quoted:
        assert experiment.paper_says == experiment.finding


def test_the_highest_agreement_is_told_with_its_layer_interval_and_baseline():
    one = result("agreement", 6)
    one.rows[2].update(rate=0.5, low=0.4, high=0.6, permutation=0.123, unigram=0.077, n=88)
    told = shows(one)
    assert "highest in layer 3: 50.0 % (95 % interval 40.0 to 60.0 %, n = 88)" in told
    assert "permuted next tokens give 12.3 %" in told
    assert "most frequent token 7.7 %" in told


def test_the_largest_drop_is_told_with_its_layer_and_token():
    one = result("token-removal", 6)
    row = next(r for r in one.rows if r["layer"] == 4 and r["token"] == "first")
    row.update(median=-0.99, q1=-1.0, q3=-0.5, n=7)
    assert "of the first token in layer 5: −99.0 % (middle half −100 % to −50.0 %), n = 7" in shows(
        one
    )


def test_mid_depth_is_the_middle_layer():
    one = result("residual-prediction", 5)
    one.rows[2].update(residual_share=0.444, decided_share=0.333, low=0.4, high=0.5)
    told = shows(one)
    assert "44.4 % at mid-depth (layer 3; 95 % interval 40.0 to 50.0 %)" in told
    assert "By mid-depth, 33.3 % are final" in told

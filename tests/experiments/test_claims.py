import re
from dataclasses import replace

import pytest

from ffmem.experiments.base import (
    FAILS,
    HOLDS,
    INCOMPARABLE,
    MIN_CASES,
    MIN_LAYERS,
    PARTLY,
    VERDICTS,
    find,
)
from ffmem.experiments.base import check_claims as claims
from tests.experiments.results import PAPERS, result, results
from tests.experiments.test_charts import emptied


def verdicts(one):
    return [claim.verdict for claim in claims([one])]


def each(one, **changed):
    """Return a result with fields changed; a change may be a function of the row."""
    rows = [
        row | {k: change(row) if callable(change) else change for k, change in changed.items()}
        for row in one.rows
    ]
    return replace(one, rows=rows)


def test_every_experiment_but_one_is_behind_a_claim_with_its_rule():
    found = claims(results())
    assert {claim.experiment for claim in found} == set(PAPERS) - {"neural-memory"}
    for claim in found:
        assert claim.verdict in VERDICTS
        assert claim.rule.startswith("Holds if ")
        assert "in part" in claim.rule


def test_only_quoted_numbers_stand_in_the_papers_column():
    for claim in claims(results()):
        quoted = " ".join(str(value) for value in find(claim.experiment).paper_values)
        if claim.paper != "no number in the text":
            assert set(re.findall(r"[\d.,]*\d", claim.paper)) <= set(
                re.findall(r"[\d.,]*\d", quoted)
            )


def test_claims_stand_for_the_results_there_are():
    found = claims([result("zero-agreement"), result("agreement")])
    assert [claim.experiment for claim in found] == ["agreement", "agreement", "zero-agreement"]


@pytest.mark.parametrize("name", PAPERS)
def test_nothing_measured_cannot_be_compared(name):
    for one in (emptied(result(name)), replace(result(name), rows=[], also={})):
        if name == "predictive-values" and one.rows:
            continue  # its layers are known
        assert set(verdicts(one)) <= {INCOMPARABLE}


def test_one_layer_has_no_lower_and_upper_layers():
    unknown = {claim.claim for claim in claims(results(1, False)) if claim.verdict == INCOMPARABLE}
    assert len(unknown) >= 7
    assert any("upper layers" in claim for claim in unknown)


def test_agreement_that_rises_above_its_baseline_holds():
    one = each(
        result("agreement", 16),
        rate=lambda row: 0.03 if row["layer"] >= 10 else 0.001,
        low=lambda row: 0.02 if row["layer"] >= 10 else 0.0,
        permutation=0.001,
        unigram=0.01,
    )
    assert verdicts(one) == [HOLDS, HOLDS]
    assert verdicts(each(one, permutation=0.025)) == [PARTLY, HOLDS]
    assert verdicts(each(one, unigram=0.025)) == [HOLDS, PARTLY]
    assert verdicts(each(one, rate=0.01, low=0.0)) == [FAILS, FAILS]


def test_the_boundary_of_upper_layers_is_the_papers():
    """In 16 layers, agreement in layer 10 of the paper does not count as upper."""
    one = each(
        result("agreement", 16),
        rate=lambda row: 0.9 if row["layer"] == 9 else 0.0,
        low=0.0,
        permutation=0.0,
    )
    assert verdicts(one)[0] == FAILS


def test_a_last_token_that_matters_most_and_less_above_holds():
    one = each(
        result("token-removal", 16),
        median=lambda row: (-0.8 if row["layer"] < 9 else -0.4) if row["token"] == "last" else -0.1,
    )
    assert verdicts(one) == [HOLDS]
    assert verdicts(each(one, median=lambda row: -0.5 if row["token"] == "last" else -0.1)) == [
        PARTLY
    ]
    assert verdicts(each(one, median=-0.5)) == [FAILS]


@pytest.mark.parametrize(("name", "sign"), [("next-token-rank", -1), ("residual-probability", 1)])
def test_a_median_that_moves_the_right_way_holds(name, sign):
    assert verdicts(each(result(name), median=lambda row: sign * row["layer"])) == [HOLDS]
    assert verdicts(each(result(name), median=lambda row: -sign * row["layer"])) == [FAILS]


def test_predictive_values_are_judged_by_their_layers_and_triggers():
    one = replace(result("predictive-values", 16), also={})
    assert verdicts(each(one, layer=12, agreeing=1)) == [HOLDS, HOLDS]
    assert verdicts(each(one, layer=2, agreeing=0)) == [FAILS, FAILS]
    half = each(one, layer=lambda row: 12 if row["memory"] % 2 else 2)
    assert verdicts(half)[0] == PARTLY


def test_activity_is_judged_by_the_gate_in_gated_models():
    one = each(result("active-memories", 16, True), median=0.9)
    assert verdicts(one)[0] == FAILS
    gate = each(one, median=lambda row: 0.3 if row["definition"] == "gate" else 0.9)
    assert verdicts(gate)[0] == HOLDS


def test_the_dip_must_lie_near_the_papers_layer_10():
    for place, verdict in ((9, HOLDS), (6, PARTLY), (0, FAILS), (15, FAILS)):
        one = each(
            result("active-memories", 16, False),
            median=lambda row, place=place: 0.1 if row["layer"] == place else 0.4,
        )
        assert verdicts(one)[1] == verdict


def test_shares_that_hold_in_some_layers_hold_in_part():
    one = result("zero-agreement", 4)
    assert verdicts(each(one, share=0.7)) == [HOLDS]
    assert verdicts(each(one, share=lambda row: 0.7 if row["layer"] < 2 else 0.5)) == [PARTLY]
    assert verdicts(each(one, share=0.5)) == [FAILS]


def test_a_preference_counts_only_beyond_all_cases():
    one = result("stop-words")
    assert verdicts(one) == [HOLDS, HOLDS]
    assert verdicts(each(one, stop_word_share=0.9, short_prefix_share=0.9)) == [FAILS, FAILS]


def test_growth_is_compared_before_and_after_the_papers_layer_10():
    def line(row):
        return 0.02 * row["layer"] + (0.05 * (row["layer"] - 8) if row["layer"] > 8 else 0)

    one = each(result("residual-prediction", 16), residual_share=line)
    assert verdicts(one) == [FAILS, HOLDS]
    steady = each(one, residual_share=lambda row: 0.3 + 0.04 * row["layer"])
    assert verdicts(steady)[0] == HOLDS
    assert verdicts(each(one, residual_share=lambda row: 0.5 - 0.02 * row["layer"]))[1] == FAILS


def test_cases_are_counted_layer_by_layer():
    one = result("prediction-cases", 4)
    assert verdicts(one) == [HOLDS, HOLDS]
    ffn = each(one, residual=0.1, agreement=0.1, ffn=0.7, composition=0.1)
    assert verdicts(ffn) == [FAILS, FAILS]


def test_what_a_rule_calls_related_is_not_compared_with_what_people_did():
    one = result("last-layer-composition")
    for related in (True, False):
        (claim,) = claims([each(one, related=related)])
        assert claim.verdict == INCOMPARABLE
        assert "judged by people, these by a rule" in claim.model
        assert claim.n == "n = 100 compositions"


def test_patterns_are_judged_by_people_where_they_looked():
    one = people()
    wrong = each(one, shallow=lambda row: 0.1, semantic=0.5)
    assert verdicts(wrong)[0] == FAILS  # as much semantic below as above
    machine = each(wrong, source="automatic")
    for claim in claims([replace(one, rows=[*machine.rows, *one.rows])]):
        assert "(source: human)" in claim.model
        assert claim.n == "n = 160 memories"


@pytest.mark.parametrize("source", ["automatic", "explained"])
def test_labels_of_programs_are_shown_and_not_compared_with_those_of_people(source):
    for claim in claims([each(people(), source=source)]):
        assert claim.verdict == INCOMPARABLE
        assert f"(source: {source}); the paper's labels are human, these are automatic" in (
            claim.model
        )


def people():
    """Figure 2 as people labeled it: ten memories in each of 16 layers."""
    return each(result("patterns", 16), source="human")


SMALL = {"predictive-values", "last-layer-composition", "patterns", "stop-words"}
"""Their n is not that of a row."""


@pytest.mark.parametrize("name", sorted(set(PAPERS) - SMALL - {"neural-memory"}))
def test_too_few_cases_cannot_be_compared_and_n_says_how_many(name):
    one = each(result(name, 16, False), n=MIN_CASES - 1)
    for claim in claims([one]):
        if claim.n.endswith(" changes") or claim.n.endswith("agreeing memories"):
            continue  # they add up over rows
        assert claim.verdict == INCOMPARABLE
        assert claim.n.startswith(f"n = {MIN_CASES - 1} ")
        assert f"{MIN_CASES} are needed" in claim.model
    for claim in claims([each(one, n=MIN_CASES)]):
        assert claim.verdict != INCOMPARABLE or claim.n.endswith("agreeing memories")


def test_few_agreeing_cases_cannot_be_compared():
    one = result("stop-words")
    rows = [row | {"n": 29} if row["group"] == "agreeing" else row for row in one.rows]
    assert verdicts(replace(one, rows=rows)) == [INCOMPARABLE] * 2
    one = result("predictive-values")
    assert verdicts(replace(one, rows=one.rows[:29])) == [INCOMPARABLE] * 2
    one = each(result("max-probability"), rate=0.0005)
    (claim,) = claims([one])
    assert claim.verdict == INCOMPARABLE


def test_few_layers_say_nothing_about_depth():
    for n_layers, expected in ((MIN_LAYERS - 1, {INCOMPARABLE}), (MIN_LAYERS, {HOLDS})):
        one = each(result("residual-probability", n_layers), median=lambda row: row["layer"])
        assert set(verdicts(one)) == expected


def test_every_verdict_has_its_n():
    for claim in claims(results()):
        assert claim.n.startswith("n = ")


def test_shallow_below_and_semantic_above_is_judged_by_layers_and_by_their_trend():
    one = people()
    planted = each(
        one,
        semantic=lambda row: 0.5 if row["layer"] >= 9 else 0.1,
        shallow=lambda row: 0.2 if row["layer"] >= 9 else 0.6,
    )
    assert verdicts(planted)[:2] == [HOLDS, HOLDS]
    turned = each(
        one,
        semantic=lambda row: 0.1 if row["layer"] >= 9 else 0.5,
        shallow=lambda row: 0.6 if row["layer"] >= 9 else 0.2,
    )
    assert verdicts(turned)[:2] == [FAILS, FAILS]
    some = each(
        one,
        semantic=lambda row: 0.5 if row["layer"] >= 14 else 0.1,
        shallow=0.3,
    )
    assert verdicts(some)[0] == PARTLY
    assert verdicts(each(one, semantic=0.0, shallow=0.3))[0] == FAILS


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"with_pattern": 1.0, "patterns_per_key": 3.6, "uncovered": 0.3}, [HOLDS] * 3),
        ({"with_pattern": 0.95, "patterns_per_key": 1.5, "uncovered": 0.1}, [PARTLY] * 3),
        ({"with_pattern": 0.5, "patterns_per_key": 0.9, "uncovered": 0.6}, [FAILS] * 3),
    ],
)
def test_patterns_per_key_and_coverage_are_judged(changed, expected):
    assert verdicts(each(people(), **changed))[2:] == expected


def test_layers_weigh_by_their_keys():
    one = each(result("patterns", 2), source="human")
    rows = [
        one.rows[0] | {"keys": 99, "with_pattern": 1.0},
        one.rows[1] | {"keys": 1, "with_pattern": 0.0},
    ]
    claim = claims([replace(one, rows=rows)])[2]
    assert claim.model == "99.0 % of 100 memories (source: human)"
    assert claim.verdict == PARTLY

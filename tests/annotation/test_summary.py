"""The numbers of a study against plain counting, and against what was planted."""

import json
from collections import Counter

import numpy as np
import pytest

from ffmem.annotation.coverage import difference, judged_keys, shares
from ffmem.annotation.summary import summarise
from ffmem.patterns.store import LABELS
from tests.annotation.studies import composed, judged, simulated


def label(one, rank):
    """Return a trigger's label by the definition."""
    kinds = {p.kind for p in one.sheet.patterns if rank in p.marks}
    return "both" if len(kinds) == 2 else kinds.pop() if kinds else "uncovered"


def test_figure_2_is_what_counting_gives():
    study = simulated(0.1, people=1, keys=40, controls=0)
    for row in summarise(study)["figure2"]:
        own = [one for one in study if row["layer"] in (None, int(one.item.cell[1]))]
        counted = Counter(label(one, rank) for one in own for rank in range(1, 26))
        patterns = [len(one.sheet.patterns) for one in own]
        assert row["n"] == 25 * len(own) == sum(counted.values())
        assert row["keys"] == len(own)
        for name in LABELS:
            assert row[name] == pytest.approx(counted[name] / row["n"])
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
        assert row["covered"] == pytest.approx(1 - row["uncovered"])
        assert row["patterns_per_key"] == np.mean(patterns)
        assert (row["patterns_min"], row["patterns_max"]) == (min(patterns), max(patterns))
        assert row["with_pattern"] == 1


def test_every_source_has_a_row_for_each_layer_and_one_for_all():
    rows = summarise(simulated(0.1, keys=8, controls=0))["figure2"]
    assert [(row["layer"], row["source"]) for row in rows] == [
        *((layer, "human") for layer in range(4)),
        (None, "human"),
    ]


def test_a_key_counts_by_its_adjudicated_sheet_or_by_the_mean_of_its_annotators():
    study = [
        judged("k1", "a", ("shallow", range(1, 11))),
        judged("k1", "b"),
        judged("k2", "a", ("semantic", range(1, 6)), memory=2),
        judged("k2", "head", ("semantic", range(1, 26)), memory=2, role="adjudicator"),
    ]
    row = summarise(study)["figure2"][-1]
    assert row["shallow"] == pytest.approx(0.5 * 10 / 50)
    assert row["semantic"] == pytest.approx(25 / 50)
    assert row["patterns_per_key"] == pytest.approx((0.5 + 1) / 2)
    assert row["with_pattern"] == pytest.approx(0.75)
    assert summarise(study)["voices"].startswith("1 of 2 items count by their adjudicated sheet")


def test_planted_error_rates_are_found_again():
    """People who describe a pattern in every tenth control, and err in every tenth mark."""
    found = summarise(simulated(0.1, people=3, keys=40, controls=200))
    control = found["control"]
    assert control["false_pattern_rate"] == pytest.approx(0.1, abs=0.03)
    assert control["control"]["with_pattern_low"] < 0.1 < control["control"]["with_pattern_high"]
    assert control["real"]["with_pattern"] == 1
    assert control["difference"]["with_pattern"] == pytest.approx(0.9, abs=0.03)
    assert control["difference"]["covered_low"] > 0.5
    assert [row["name"] for row in found["annotators"]] == ["a", "b", "c"]
    assert np.mean([row["false_pattern_rate"] for row in found["annotators"]]) == pytest.approx(
        control["false_pattern_rate"]
    )
    assert found["counts"] == {
        **{"annotators": 3, "adjudicators": 0, "sheets": 720, "adjudicated": 0},
        **{"keys": 40, "controls": 200, "compositions": 0},
    }


def test_agreement_falls_as_people_err_more():
    found = [
        summarise(simulated(error, keys=20, controls=0))["agreement"]["people"]
        for error in (0.0, 0.1, 0.3)
    ]
    for question in ("coverage", "type", "marks", "marks_of_kind"):
        for name in ("kappa", "alpha"):
            values = [one[question][name] for one in found]
            assert values[0] == 1
            assert values == sorted(values, reverse=True)


def test_people_who_answer_at_random_agree_as_chance_would():
    found = summarise(simulated(0.5, people=2, keys=150, controls=0))["agreement"]["people"]
    for question in ("coverage", "type"):
        assert abs(found[question]["alpha"]) < 0.06
        assert abs(found[question]["kappa"]) < 0.06


def test_neither_the_order_of_sheets_nor_peoples_names_change_a_number():
    study = simulated(0.2, keys=8, controls=4)
    renamed = [
        one._replace(annotator={"a": "z", "b": "y", "c": "x"}[one.annotator]) for one in study
    ]
    first = summarise(study)
    again = summarise(list(reversed(renamed)))
    assert again["figure2"] == first["figure2"]
    for question in ("coverage", "type", "marks"):
        for name in ("kappa", "alpha", "agreeing"):
            people = [one["agreement"]["people"][question][name] for one in (first, again)]
            assert people[1] == pytest.approx(people[0])


def test_machines_stand_beside_people_by_the_same_measures():
    study = simulated(0.05, people=2, keys=20, controls=4)
    copied = [
        one._replace(annotator="automatic", role="machine")
        for one in study
        if one.annotator == "a" and one.item.kind == "triggers"
    ]
    found = summarise(study, copied)
    machine = found["agreement"]["automatic_people"]
    assert machine["coverage"]["couples"] == 2
    # It says what `a` says: one couple in full agreement, the other as people among themselves.
    people = found["agreement"]["people"]["coverage"]["kappa"]
    assert machine["coverage"]["kappa"] == pytest.approx((1 + people) / 2)
    assert {row["source"] for row in found["figure2"]} == {"human", "automatic"}
    assert "automatic_adjudicated" not in found["agreement"]
    assert "not that protocol" in found["protocol"]


def test_a_machine_is_compared_with_what_was_adjudicated():
    study = [judged("k", name, ("shallow", {1, 2, 3})) for name in "ab"]
    study += [judged("k", "head", ("shallow", {4, 5, 6}), role="adjudicator")]
    machine = [judged("k", "automatic", ("shallow", {4, 5, 6}), role="machine")]
    found = summarise(study, machine)["agreement"]
    assert found["automatic_adjudicated"]["marks"]["kappa"] == 1
    assert found["automatic_people"]["marks"]["matched_share"] == 0


def test_compositions_stand_beside_the_papers():
    study = [composed(f"c{i}", name, i < 30) for i in range(90) for name in "abc"]
    found = summarise(study)["composition"]
    assert found["related"] == pytest.approx(1 / 3)
    assert found["distant"] == pytest.approx(2 / 3)
    assert found["related_low"] < 1 / 3 < found["related_high"]
    assert found["n"] == 90
    assert found["agreement"]["kappa"] == found["agreement"]["alpha"] == 1
    assert {quote["value"] for quote in found["quoted"]} == {"66", "34"}


@pytest.mark.parametrize("study", [[], simulated(0.0, people=1, keys=1, controls=0)])
def test_numbers_that_do_not_exist_are_null(study):
    text = json.dumps(summarise(study), allow_nan=False)
    found = json.loads(text)
    assert found["control"]["false_pattern_rate"] is None
    assert found["control"]["difference"]["covered"] is None
    assert found["agreement"]["people"]["coverage"]["alpha_why"]
    assert found["composition"]["related"] is None


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_intervals():
    study = simulated(0.2, keys=12, controls=6)
    first, again, other = (json.dumps(summarise(study, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Keys whose triggers are covered together: 95 % intervals of 60 draws of 30 keys."""
    chance = np.random.default_rng(0)
    inside = 0
    for seed in range(60):
        study = [
            judged(f"k{i:02}", "a", *([("shallow", range(1, 26))] if chance.random() < 0.4 else []))
            for i in range(30)
        ]
        row = shares(judged_keys(study), seed)
        inside += row["covered_low"] <= 0.4 <= row["covered_high"]
    assert inside >= 52


def test_a_difference_is_wider_than_its_sides_and_0_of_the_same():
    keys = judged_keys(simulated(0.2, people=1, keys=40, controls=0))
    found = difference(keys, keys)
    assert found["covered"] == 0
    assert found["covered_low"] < 0 < found["covered_high"]

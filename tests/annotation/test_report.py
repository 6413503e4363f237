"""What a study found: numbers against plain counting, its report, and what is published."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest

from ffmem.annotation.agreement import count_keys
from ffmem.annotation.report import (
    RULE,
    patterns_of,
    publish,
    published_sheets,
    summarize,
    tables,
    write_report,
)
from ffmem.annotation.sampling import draw_plan
from ffmem.annotation.study import AnnotationStudy, Sheet
from ffmem.cells import Cell
from ffmem.errors import StoreError
from ffmem.patterns.labels import LABELS, difference, shares
from ffmem.patterns.store import Patterns, damaged_files
from tests.annotation.kept_patterns import copied, first_three, keep
from tests.annotation.studies import composed, judged, sheet, simulated
from tests.experiments.test_patterns import patterns

# Numbers


def label(one, rank):
    """Return a trigger's label by the definition."""
    kinds = {p.kind for p in one.sheet.patterns if rank in p.marks}
    return "both" if len(kinds) == 2 else kinds.pop() if kinds else "uncovered"


def test_figure_2_is_what_counting_gives():
    study = simulated(0.1, people=1, keys=40, controls=0)
    for row in summarize(study)["figure2"]:
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
    rows = summarize(simulated(0.1, keys=8, controls=0))["figure2"]
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
    row = summarize(study)["figure2"][-1]
    assert row["shallow"] == pytest.approx(0.5 * 10 / 50)
    assert row["semantic"] == pytest.approx(25 / 50)
    assert row["patterns_per_key"] == pytest.approx((0.5 + 1) / 2)
    assert row["with_pattern"] == pytest.approx(0.75)
    assert summarize(study)["voices"] == (
        "Counted by the adjudicated sheet: 1 of 2 items; by the mean of the annotators: 1."
    )


def test_planted_error_rates_are_found_again():
    """People who describe a pattern in every tenth control, and err in every tenth mark."""
    found = summarize(simulated(0.1, people=3, keys=40, controls=200))
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
        summarize(simulated(error, keys=20, controls=0))["agreement"]["people"]
        for error in (0.0, 0.1, 0.3)
    ]
    for question in ("coverage", "type", "marks"):
        for name in ("kappa", "alpha"):
            values = [one[question][name] for one in found]
            assert values[0] == 1
            assert values == sorted(values, reverse=True)


def test_people_who_answer_at_random_agree_as_chance_would():
    found = summarize(simulated(0.5, people=2, keys=150, controls=0))["agreement"]["people"]
    for question in ("coverage", "type"):
        assert abs(found[question]["alpha"]) < 0.06
        assert abs(found[question]["kappa"]) < 0.06


def test_neither_the_order_of_sheets_nor_peoples_names_change_a_number():
    study = simulated(0.2, keys=8, controls=4)
    renamed = [
        one._replace(annotator={"a": "z", "b": "y", "c": "x"}[one.annotator]) for one in study
    ]
    first = summarize(study)
    again = summarize(list(reversed(renamed)))
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
    found = summarize(study, copied)
    machine = found["agreement"]["automatic_people"]
    assert machine["coverage"]["pairs"] == 2
    # It says what `a` says: one couple in full agreement, the other as people among themselves.
    people = found["agreement"]["people"]["coverage"]["kappa"]
    assert machine["coverage"]["kappa"] == pytest.approx((1 + people) / 2)
    assert {row["source"] for row in found["figure2"]} == {"human", "automatic"}
    assert "automatic_adjudicated" not in found["agreement"]
    assert "do not follow it" in found["protocol"]


def test_a_machine_is_compared_with_what_was_adjudicated():
    study = [judged("k", name, ("shallow", {1, 2, 3})) for name in "ab"]
    study += [judged("k", "head", ("shallow", {4, 5, 6}), role="adjudicator")]
    machine = [judged("k", "automatic", ("shallow", {4, 5, 6}), role="machine")]
    found = summarize(study, machine)["agreement"]
    assert found["automatic_adjudicated"]["marks"]["kappa"] == 1
    assert found["automatic_people"]["marks"]["matched_share"] == 0


def test_compositions_stand_beside_the_papers():
    study = [composed(f"c{i}", name, i < 30) for i in range(90) for name in "abc"]
    found = summarize(study)["composition"]
    assert found["related"] == pytest.approx(1 / 3)
    assert found["distant"] == pytest.approx(2 / 3)
    assert found["related_low"] < 1 / 3 < found["related_high"]
    assert found["n"] == 90
    assert found["agreement"]["kappa"] == found["agreement"]["alpha"] == 1
    assert {quote["value"] for quote in found["quoted"]} == {"66", "34"}


@pytest.mark.parametrize("study", [[], simulated(0.0, people=1, keys=1, controls=0)])
def test_numbers_that_do_not_exist_are_null(study):
    text = json.dumps(summarize(study), allow_nan=False)
    found = json.loads(text)
    assert found["control"]["false_pattern_rate"] is None
    assert found["control"]["difference"]["covered"] is None
    assert found["agreement"]["people"]["coverage"]["alpha_why"]
    assert found["composition"]["related"] is None


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_intervals():
    study = simulated(0.2, keys=12, controls=6)
    first, again, other = (json.dumps(summarize(study, seed=seed)) for seed in (0, 0, 1))
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
        row = shares(count_keys(study), seed)
        inside += row["covered_low"] <= 0.4 <= row["covered_high"]
    assert inside >= 52


def test_a_difference_is_wider_than_its_sides_and_0_of_the_same():
    keys = count_keys(simulated(0.2, people=1, keys=40, controls=0))
    found = difference(keys, keys)
    assert found["covered"] == 0
    assert found["covered_low"] < 0 < found["covered_high"]


def wilson_of_halves(halves, n):
    """Return Wilson's interval of halves / 2 of n, between scipy's of the whole counts around it.

    The interval's ends solve (p̂ − p)² = z²·p(1 − p)/n, whatever p̂ is.
    """
    z, share = 1.959963984540054, halves / 2 / n
    low, high = sorted(
        np.roots([1 + z * z / n, -2 * share - z * z / n, share * share]).real.tolist()
    )
    return low, high


@pytest.mark.parametrize(("halves", "n"), [(49, 30), (1, 1), (3, 2), (7, 5)])
def test_the_interval_of_half_counts_is_wilsons_for_the_half_count(halves, n):
    """Two people who differ about a memory count half: 24.5 of 30 is not 24 of 30."""
    study = []
    for place in range(n):
        seen = [2 * place + side < halves for side in (0, 1)]
        for name, sees in zip("ab", seen, strict=True):
            some = [("shallow", {1, 2, 3})] if sees else []
            study.append(judged(f"k{place:02}", name, *some, memory=place))
    row = summarize(study)["figure2"][-1]
    assert row["with_pattern"] == pytest.approx(halves / 2 / n)
    found = row["with_pattern_low"], row["with_pattern_high"]
    assert found == pytest.approx(wilson_of_halves(halves, n))
    around = [binomtest(k, n).proportion_ci(0.95, "wilson") for k in (halves // 2, halves // 2 + 1)]
    assert around[0].low < found[0] < around[1].low
    assert around[0].high < found[1] < around[1].high


def test_the_interval_of_cases_that_people_differ_about_is_wilsons_for_the_half_count():
    study = [
        composed(f"c{i:02}", name, 2 * i + side < 9)
        for i in range(8)
        for side, name in enumerate("ab")
    ]
    found = summarize(study)["composition"]
    assert found["related"] == pytest.approx(4.5 / 8)
    interval = found["related_low"], found["related_high"]
    assert interval == pytest.approx(wilson_of_halves(9, 8))


# Publishing


@pytest.fixture
def own(tiny_index, tmp_path):
    return copied(tiny_index, tmp_path / "index")


@pytest.fixture
def study(own, tmp_path):
    plan = draw_plan(own, per_layer=4, top=5, annotators=3, controls=0.2)
    return AnnotationStudy.create(tmp_path / "study.sqlite", plan)


def hand_in(study, said, people=("annotator-1", "annotator-2", "annotator-3")):
    """Hand in `said(name, item)`, a list of (kind, marks, description), of everything."""
    for person in study.people():
        if person.name not in people:
            continue
        for task in study.queue(person):
            study.save(person, task.item.key, 0, sheet(*said(person.name, task.item)))


def three(name, item):
    n = len(item.texts)
    return [("shallow", {1, 2, 3}, f"seen by {name}")] if n >= 3 else []


def test_the_sheet_most_like_the_others_counts_where_nothing_was_adjudicated():
    alone = ("semantic", {9, 10, 11})
    study = [
        judged("k1", "a", alone),
        judged("k1", "b", ("shallow", {1, 2, 3, 4})),
        judged("k1", "c", ("shallow", {1, 2, 3})),
        judged("k2", "a", ("shallow", {1, 2, 3}), memory=1),
        judged("k2", "b", memory=1),
        judged("k2", "c", memory=1),
        judged("k3", "a", ("shallow", {1, 2, 3}), memory=2),
        judged("k3", "b", ("shallow", {1, 2, 3}), memory=2),
        judged("k3", "head", alone, memory=2, role="adjudicator"),
        judged("k4", "z", alone, memory=3),
        judged("k5", "a", alone, kind="control", memory=3),
    ]
    found = {one.item.key: one.annotator for one in published_sheets(study)}
    assert found == {"k1": "b", "k2": "b", "k3": "head", "k4": "z"}


def test_the_most_marked_pattern_comes_first_and_nobody_scored_it():
    one = judged("k", "a", ("semantic", {7, 5, 6}, " a topic "), ("shallow", {4, 3, 2, 1}, "x"))
    first, second = patterns_of(one)
    assert (first.number, first.kind, first.ranks) == (1, "shallow", (1, 2, 3, 4))
    assert (second.number, second.description, second.ranks) == (2, "a topic", (5, 6, 7))
    assert first.rule == "person"
    assert first.precision is first.q_value is None


def test_what_people_saw_is_kept_in_the_index_with_control_and_agreement(study, own):
    hand_in(study, three)
    found = publish(study, own)
    assert found.source == "human"
    assert damaged_files(own) == []
    items = {one.item.cell: one.item for one in study.handed_in() if one.item.kind == "triggers"}
    assert len(items) == 4 * own.n_layers
    lists = [one for layer in range(own.n_layers) for one in found.lists(layer)]
    assert {str(one.cell): (one.sign, one.n) for one in lists} == {
        cell: (item.sign, len(item.texts)) for cell, item in items.items()
    }
    for cell, item in items.items():
        expected = [(1, 2, 3)] if len(item.texts) >= 3 else []
        assert [one.ranks for one in found.of(cell)] == expected
    settings = found.settings
    assert settings["rule"] == RULE
    assert settings["control"]["false_pattern_rate"] is not None
    assert settings["agreement"]["marks"]["agreeing"] == 1
    assert "annotator-1" not in json.dumps(settings)
    rows = patterns(own).rows
    assert {row["source"] for row in rows} == {"human"}
    assert [row["keys"] for row in rows] == [4] * own.n_layers


def test_published_again_the_same_sheets_give_the_same_bytes(study, own):
    hand_in(study, three)
    publish(study, own)
    folder = own.folder / "patterns/human"
    before = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    publish(study, own)
    assert before == {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_adjudicated_sheet_counts(study, own):
    hand_in(study, three)
    (head,) = [one for one in study.people() if one.role == "adjudicator"]
    key = next(
        one.item.key
        for one in study.handed_in()
        if one.item.kind == "triggers" and len(one.item.texts) >= 4
    )
    cell = next(one.item.cell for one in study.handed_in() if one.item.key == key)
    study.save(head, key, 0, sheet(("semantic", {1, 2, 4}, "agreed")))
    found = publish(study, own)
    assert [(one.kind, one.ranks) for one in found.of(cell)] == [("semantic", (1, 2, 4))]
    assert found.settings["adjudicated"] == 1


def test_nothing_handed_in_is_nothing_to_publish_or_to_report(study, own, tmp_path):
    person = study.people()[0]
    task = study.queue(person)[0]
    study.save(person, task.item.key, 0, Sheet(note="only begun"))
    with pytest.raises(StoreError, match="there is nothing to publish"):
        publish(study, own)
    with pytest.raises(StoreError, match="there is nothing to report"):
        write_report(study, own, tmp_path / "out")
    assert not (own.folder / "patterns/human").exists()


def test_an_index_whose_triggers_people_did_not_see_is_refused(study, own, tmp_path):
    hand_in(study, three)
    path = own.folder / "manifest.json"
    path.write_text(path.read_text() + "\n")
    for action in (lambda: publish(study, own), lambda: write_report(study, own, tmp_path)):
        with pytest.raises(StoreError, match="drawn from a different version of the index"):
            action()


def test_patterns_are_kept_for_the_sign_that_people_saw(study, own):
    hand_in(study, three)
    found = Patterns(own, publish(study, own).source)
    for one in study.handed_in():
        if one.item.kind == "triggers":
            assert {p.sign for p in found.of(one.item.cell)} <= {one.item.sign}
            assert Cell.parse(one.item.cell).layer < own.n_layers


def test_machines_patterns_stay_beside_peoples(study, own):
    keep(own, "automatic", first_three)
    hand_in(study, three)
    publish(study, own)
    assert {row["source"] for row in patterns(own).rows} == {"human", "automatic"}


def test_a_sheet_taken_back_is_not_published(study, own):
    hand_in(study, three)
    keys = {one.item.key for one in study.handed_in() if one.item.kind == "triggers"}
    key = min(keys)
    for person in study.people():
        if person.role == "annotator":
            opened = study.open_item(person, key)
            study.save(person, key, opened.version, replace(opened.sheet, done=False))
    found = publish(study, own)
    assert sum(len(found.lists(layer)) for layer in range(own.n_layers)) == len(keys) - 1


# The report


def test_all_files_are_there_and_the_same_sheets_give_the_same_bytes(study, own, tmp_path):
    keep(own, "automatic", first_three)
    hand_in(study, three)
    page = write_report(study, own, tmp_path / "a")
    assert page == tmp_path / "a/annotation.md"
    names = {path.name for path in page.parent.iterdir()}
    assert names == {"annotation.json", "annotation.md", "annotation.svg", "annotation.pdf"}
    again = write_report(study, own, tmp_path / "b").parent
    for name in ("annotation.json", "annotation.md", "annotation.svg"):
        assert (again / name).read_bytes() == (page.parent / name).read_bytes()


def test_the_page_says_what_the_numbers_are(study, own, tmp_path):
    keep(own, "automatic", first_three)
    hand_in(study, three)
    page = write_report(study, own, tmp_path)
    text, found = page.read_text(), json.loads((tmp_path / "annotation.json").read_text())
    assert found["figure2"][0]["source"] == "human"
    assert {row["source"] for row in found["figure2"]} == {"human", "automatic"}
    assert found["agreement"]["automatic_people"]["coverage"]["pairs"] == 3
    assert found["settings"]["study"]["options"]["seed"] == 0
    for part in (
        *("| human | 1 |", "| automatic | all |", "automatic with people", "| controls |"),
        *("do not follow it", "false-pattern rate", "Table 1", "Table 3", "source: human"),
    ):
        assert part in text
    assert "built-in" not in text
    assert "nan" not in text.lower().replace("annotat", "")


def test_text_of_people_and_corpus_does_nothing_in_the_page(study, own, tmp_path):
    hostile = "<script>alert(1)</script> | [x](http://evil) `y`"
    hand_in(study, lambda name, item: [(k, m, hostile) for k, m, _ in three(name, item)])
    text = write_report(study, own, tmp_path).read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "](http://evil)" not in text


def test_tables_show_a_pattern_of_each_kind_and_one_key_in_full():
    people = [
        judged("k1", "a", ("shallow", range(1, 11), "ends in x"), ("semantic", {2, 4, 11}, "news")),
        judged("k2", "a", ("shallow", range(1, 4), "rare"), memory=1),
        judged("k3", "a", ("semantic", range(1, 20), "press"), layer=3, memory=2),
    ]
    rows, one_key = tables(people)
    assert [(row.cell, row.kind, row.marked, row.of) for row in rows] == [
        ("L0N0", "shallow", 10, 25),
        ("L0N0", "semantic", 3, 25),
        ("L3N2", "semantic", 19, 25),
    ]
    assert [one.before + one.last for one in rows[1].excerpts] == [
        f"text {rank} of k1" for rank in (2, 4, 11)
    ]
    assert one_key.cell == "L0N0"
    assert [one.description for one in one_key.patterns] == ["ends in x", "news"]
    numbers = {line.rank: line.numbers for line in one_key.lines}
    assert len(numbers) == 25
    assert (numbers[1], numbers[2], numbers[11], numbers[12]) == ([1], [1, 2], [2], [])


def test_a_study_of_compositions_alone_is_summed_up():
    found = summarize([composed(f"c{i}", "a", i % 3 == 0) for i in range(9)])
    assert found["composition"]["n"] == 9
    assert found["figure2"][0]["n"] == 0
    assert tables([composed("c", "a", True)]) == ([], None)


@pytest.mark.parametrize("people", [("annotator-1",), ("annotator-1", "annotator-2")])
def test_a_study_that_is_not_finished_is_reported_as_far_as_it_is(study, own, tmp_path, people):
    hand_in(study, three, people)
    found = json.loads((write_report(study, own, tmp_path).parent / "annotation.json").read_text())
    assert found["counts"]["annotators"] == len(people)
    known = found["agreement"]["people"]["coverage"]["agreeing"]
    assert (known is None) == (len(people) == 1)

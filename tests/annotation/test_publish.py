"""People's patterns in their index: whose sheet counts, and what is told beside it."""

import json
from dataclasses import replace

import pytest

from ffmem.annotation.plan import draw
from ffmem.annotation.publish import RULE, patterns_of, publish, published
from ffmem.annotation.report import write_report
from ffmem.annotation.sheet import Sheet
from ffmem.annotation.study import AnnotationStudy
from ffmem.cells import Cell
from ffmem.errors import StoreError
from ffmem.experiments.pattern_shares import patterns
from ffmem.patterns.store import Patterns, damaged_files
from tests.annotation.kept_patterns import copied, first_three, keep
from tests.annotation.studies import judged, sheet


@pytest.fixture
def own(tiny_index, tmp_path):
    return copied(tiny_index, tmp_path / "index")


@pytest.fixture
def study(own, tmp_path):
    plan = draw(own, per_layer=4, top=5, annotators=3, controls=0.2)
    with AnnotationStudy.create(tmp_path / "study.sqlite", plan) as made:
        yield made


def hand_in(study, said, people=("annotator-1", "annotator-2", "annotator-3")):
    """Hand in `said(name, item)`, a list of (kind, marks, description), of everything."""
    for person in study.people():
        if person.name not in people:
            continue
        for task in study.queue(person):
            item = study.open_item(person, task.key).item
            filled = sheet(*said(person.name, item))
            study.save(person, task.key, 0, filled, f"{person.name} {task.key}")


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
    found = {one.item.key: one.annotator for one in published(study)}
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
    items = {one.item.cell: one.item for one in study.judged() if one.item.kind == "triggers"}
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
        for one in study.judged()
        if one.item.kind == "triggers" and len(one.item.texts) >= 4
    )
    cell = next(one.item.cell for one in study.judged() if one.item.key == key)
    study.save(head, key, 0, sheet(("semantic", {1, 2, 4}, "agreed")), "final")
    found = publish(study, own)
    assert [(one.kind, one.ranks) for one in found.of(cell)] == [("semantic", (1, 2, 4))]
    assert found.settings["adjudicated"] == 1


def test_nothing_handed_in_is_nothing_to_publish_or_to_report(study, own, tmp_path):
    person = study.people()[0]
    task = study.queue(person)[0]
    study.save(person, task.key, 0, Sheet(note="only begun"), "begun")
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
        with pytest.raises(StoreError, match="is of another state of an index"):
            action()


def test_patterns_are_kept_for_the_sign_that_people_saw(study, own):
    hand_in(study, three)
    found = Patterns(own, publish(study, own).source)
    for one in study.judged():
        if one.item.kind == "triggers":
            assert {p.sign for p in found.of(one.item.cell)} <= {one.item.sign}
            assert Cell.parse(one.item.cell).layer < own.n_layers


def test_machines_patterns_stay_beside_peoples(study, own):
    keep(own, "automatic", first_three)
    hand_in(study, three)
    publish(study, own)
    assert {row["source"] for row in patterns(own).rows} == {"human", "automatic"}
    assert patterns(own).also["agreement"]["automatic_human"]["coverage"]["items"] > 0


def test_a_sheet_taken_back_is_not_published(study, own):
    hand_in(study, three)
    keys = {one.item.key for one in study.judged() if one.item.kind == "triggers"}
    key = min(keys)
    for person in study.people():
        if person.role == "annotator":
            opened = study.open_item(person, key)
            study.save(person, key, opened.version, replace(opened.sheet, done=False), f"b{key}")
    found = publish(study, own)
    assert sum(len(found.lists(layer)) for layer in range(own.n_layers)) == len(keys) - 1

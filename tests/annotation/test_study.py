"""The store of a study: who sees what, what is saved, undone and handed in, on both databases."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.annotation import revisions
from ffmem.annotation.item import COMPOSITION, CONTROL, TRIGGERS
from ffmem.annotation.revisions import NothingThere, SaveConflict, Unfinished, steps
from ffmem.annotation.sheet import Conflict, Sheet, SheetPattern
from ffmem.annotation.study import AnnotationStudy, NotAssigned, UnknownCode, beside
from ffmem.errors import FfmemError
from tests.annotation.conftest import small_plan


def pattern(*marks, id="a", description="ends with press", kind="shallow"):
    return SheetPattern(id, description, kind, frozenset(marks))


def sheet(*marks, **options):
    return Sheet((pattern(*marks),), **options)


DONE = sheet(1, 2, 3, done=True)
NONE = Sheet(no_pattern=True, done=True)


def hand_in(study, person, key, answer=DONE):
    version = study.open_item(person, key).version
    return study.save(person, key, version, answer, f"hand in {version}")


def test_a_study_is_the_plan_and_is_there_when_it_is_opened_again(study):
    with AnnotationStudy.open(study.url) as again:
        assert again.settings == small_plan().settings
        assert again.people() == study.people()
        items = {one.item.key: one.item for one in again.standing()}
    assert items == {item.key: item for item in small_plan().items}


def test_everybody_has_a_code_of_their_own_that_opens_their_queue(study):
    people = study.people()
    assert [(one.name, one.role) for one in people] == [
        *((name, "annotator") for name in ("ana", "ben", "cai")),
        *(("head", "adjudicator"), ("second", "adjudicator")),
    ]
    assert len({one.code for one in people}) == 5
    assert all(len(one.code) >= 16 for one in people)
    assert [study.enter(one.code) for one in people] == people


def test_a_wrong_code_opens_nothing(study, ana):
    odd = ("", "ana", "ü" * 22, "\ud800", "x" * 10_000)
    for wrong in (*odd, ana.code[:-1], ana.code + "x"):
        with pytest.raises(UnknownCode, match=r"Nobody .* `ffmem annotate people`"):
            study.enter(wrong)


def test_a_queue_is_in_the_persons_order(study):
    orders = small_plan().orders
    for person in study.people()[:3]:
        queue = study.queue(person)
        assert [task.key for task in queue] == list(orders[person.name])
        assert [task.place for task in queue] == [1, 2, 3, 4]
        assert not any(task.done or task.version for task in queue)


def test_neither_queue_nor_item_tells_a_control_or_a_memory(study, ana):
    assert {t.key: t.kind for t in study.queue(ana)} == {
        **{"k1": TRIGGERS, "k2": TRIGGERS, "k3": TRIGGERS, "k4": COMPOSITION}
    }
    opened = [study.open_item(ana, key).item for key in ("k1", "k2", "k3")]
    assert {(item.kind, item.cell, item.sign, item.words) for item in opened} == {
        (TRIGGERS, None, opened[0].sign, ())
    }
    truth = {item.key: item.texts for item in small_plan().items}
    assert all(item.texts == truth[item.key] for item in opened)


def test_what_is_saved_is_there(study, ana):
    saved = study.save(ana, "k1", 0, sheet(1, 2), "r1")
    assert saved == (1, sheet(1, 2), False)
    opened = study.open_item(ana, "k1")
    assert (opened.sheet, opened.version, opened.place, opened.of) == (sheet(1, 2), 1, 2, 4)
    assert study.open_item(study.people()[1], "k1").sheet == Sheet()


def test_a_sheet_that_says_nothing_new_makes_no_revision(study, ana):
    study.save(ana, "k1", 0, sheet(1), "r1")
    study.save(ana, "k1", 1, sheet(1, 2), "r2")
    assert study.save(ana, "k1", 1, sheet(1), "r3") == (2, sheet(1, 2), False)
    assert len(study.history(ana, "k1")) == 2


def test_what_two_windows_did_from_the_same_version_is_joined(study, ana):
    study.save(ana, "k1", 0, sheet(1), "r1")
    study.save(ana, "k1", 1, sheet(1, 2), "r2")
    assert study.save(ana, "k1", 1, sheet(1, 3), "r3") == (3, sheet(1, 2, 3), True)
    assert [one.what for one in study.history(ana, "k1")] == ["save", "save", "merge"]


def test_what_cannot_be_joined_is_a_conflict_that_shows_what_stands(study, ana):
    study.save(ana, "k1", 0, Sheet(note="one"), "r1")
    with pytest.raises(Conflict, match="the note meanwhile") as caught:
        study.save(ana, "k1", 0, Sheet(note="two"), "r2")
    assert caught.value.current == (1, Sheet(note="one"), False)
    assert study.open_item(ana, "k1").version == 1


def test_more_patterns_than_a_sheet_holds_are_a_conflict_and_not_a_broken_sheet(study, ana):
    first = Sheet(tuple(pattern(1, id=f"a{i}") for i in range(20)))
    study.save(ana, "k1", 0, first, "r1")
    with pytest.raises(SaveConflict, match="at most 30"):
        study.save(ana, "k1", 0, Sheet(tuple(pattern(id=f"b{i}") for i in range(20))), "r2")
    assert study.open_item(ana, "k1").sheet == first


def test_the_same_request_twice_is_one_save(study, ana):
    first = study.save(ana, "k1", 0, sheet(1), "r1")
    study.save(ana, "k1", 1, sheet(1, 2), "r2")
    assert study.save(ana, "k1", 0, sheet(1), "r1") == first
    assert len(study.history(ana, "k1")) == 2
    with pytest.raises(SaveConflict, match="'r1' was used for another save"):
        study.save(ana, "k1", 2, sheet(3), "r1")
    # Requests are names within one sheet.
    study.save(ana, "k2", 0, sheet(3), "r1")


def test_a_request_has_a_plain_name(study, ana):
    for name in ("", "x" * 101, "a\nb"):
        with pytest.raises(FfmemError, match="name of a request"):
            study.save(ana, "k1", 0, sheet(1), name)


def test_a_version_that_never_was_is_refused(study, ana):
    for base in (1, -1):
        with pytest.raises(FfmemError, match="never saved; the newest is 0"):
            study.save(ana, "k1", base, sheet(1), "r")


def test_items_of_others_are_not_opened(study, ana):
    for ask in (study.open_item, study.history):
        with pytest.raises(NotAssigned, match="'k9' is no item that is for ana"):
            ask(ana, "k9")
    with pytest.raises(NotAssigned):
        study.save(ana, "k9", 0, sheet(1), "r")
    # The adjudicators' sheet is not an annotator's, even if somebody calls themselves one.
    with pytest.raises(NotAssigned):
        study.open_item(ana._replace(name="adjudicators"), "k1")


def test_an_unfinished_sheet_is_not_handed_in_and_says_why(study, ana):
    for key, answer, sentence in (
        ("k1", sheet(1, 2, done=True), "at least 3"),
        ("k1", Sheet(done=True), "Describe a pattern"),
        ("k4", Sheet(done=True), "Say whether the two words are related."),
    ):
        with pytest.raises(Unfinished, match=sentence) as caught:
            study.save(ana, key, 0, answer, "r")
        assert len(caught.value.problems) == 1
        assert study.open_item(ana, key).version == 0


def test_a_sheet_must_be_about_its_item(study, ana):
    for key, answer, sentence in (
        ("k1", Sheet(related=True), "only two words can be related"),
        ("k4", Sheet(no_pattern=True), "has no patterns"),
        ("k4", sheet(), "has no patterns"),
        ("k2", sheet(5), "1 to 4"),
    ):
        with pytest.raises(FfmemError, match=sentence):
            study.save(ana, key, 0, answer, "r")


def test_undo_and_redo_go_through_what_was_saved_and_delete_nothing(study, ana):
    states = [Sheet(), sheet(1), sheet(1, 2), sheet(1, 2, 3)]
    for version, state in enumerate(states[1:]):
        study.save(ana, "k1", version, state, f"s{version}")
    seen = []
    for i, step in enumerate([study.undo] * 3 + [study.redo] * 3):
        seen.append(step(ana, "k1", 3 + i, f"u{i}"))
    assert [one.sheet for one in seen] == [states[i] for i in (2, 1, 0, 1, 2, 3)]
    assert [one.version for one in seen] == [4, 5, 6, 7, 8, 9]
    opened = study.open_item(ana, "k1")
    assert (opened.can_undo, opened.can_redo) == (True, False)
    history = study.history(ana, "k1")
    assert [one.version for one in history] == list(range(1, 10))
    assert [one.what for one in history] == ["save"] * 3 + ["undo"] * 3 + ["redo"] * 3
    assert {one.by for one in history} == {"ana"}
    assert [one.saved_at for one in history] == sorted(one.saved_at for one in history)
    assert all(one.saved_at.utcoffset().total_seconds() == 0 for one in history)


def test_a_save_after_an_undo_leaves_nothing_to_redo(study, ana):
    study.save(ana, "k1", 0, sheet(1), "r1")
    study.undo(ana, "k1", 1, "u1")
    assert study.open_item(ana, "k1").can_redo
    study.save(ana, "k1", 2, sheet(2), "r2")
    opened = study.open_item(ana, "k1")
    assert (opened.can_undo, opened.can_redo) == (True, False)
    with pytest.raises(NothingThere, match="nothing to redo"):
        study.redo(ana, "k1", 3, "u2")


def test_undo_of_what_one_has_not_seen_is_a_conflict(study, ana):
    with pytest.raises(NothingThere, match="nothing to undo"):
        study.undo(ana, "k1", 0, "u0")
    study.save(ana, "k1", 0, sheet(1), "r1")
    study.save(ana, "k1", 1, sheet(1, 2), "r2")
    with pytest.raises(Conflict, match="something else to undo") as caught:
        study.undo(ana, "k1", 1, "u1")
    assert caught.value.current == (2, sheet(1, 2), False)
    first = study.undo(ana, "k1", 2, "u2")
    assert study.undo(ana, "k1", 2, "u2") == first
    assert len(study.history(ana, "k1")) == 3


@given(st.lists(st.sampled_from(["save", "merge", "import", "undo", "redo"]), max_size=30))
def test_steps_are_those_of_an_editor(wanted):
    # An editor with a list of states and a place in it; what it cannot do, it does not.
    states, place, made = [0], 0, []
    for what in wanted:
        if (what == "undo" and place == 0) or (what == "redo" and place == len(states) - 1):
            continue
        made.append((len(made) + 1, what))
        if what == "undo":
            place -= 1
        elif what == "redo":
            place += 1
        else:
            states[place + 1 :] = [len(made)]
            place += 1
    back, forth = steps(made)
    assert back == states[: place + 1]
    assert forth == states[place + 1 :][::-1]


def test_judged_is_what_was_handed_in_with_the_truth(study, ana):
    hand_in(study, ana, "k3", NONE)
    hand_in(study, ana, "k4", Sheet(related=True, done=True))
    study.save(ana, "k1", 0, sheet(1), "r")  # begun, not handed in
    judged = study.judged()
    assert [(one.item.key, one.annotator, one.role) for one in judged] == [
        *(("k3", "ana", "annotator"), ("k4", "ana", "annotator")),
    ]
    assert judged[0].item == small_plan().items[2]
    assert (judged[0].item.kind, judged[0].item.cell) == (CONTROL, "L0N3")
    assert study.judged("adjudicator") == []
    # Taking it back takes it out.
    study.undo(ana, "k3", 1, "back")
    assert [one.item.key for one in study.judged("annotator")] == ["k4"]


def test_progress_counts_what_is_handed_in(study, ana):
    hand_in(study, ana, "k3", NONE)
    study.save(ana, "k1", 0, sheet(1), "r")
    first, second, *_ = study.progress()
    assert (first.name, first.role, first.done, first.of) == ("ana", "annotator", 1, 4)
    assert first.last_saved == study.history(ana, "k1")[0].saved_at
    assert (second.done, second.of, second.last_saved) == (0, 4, None)
    assert [task.key for task in study.queue(ana) if task.done] == ["k3"]


def test_an_item_is_adjudicated_when_two_have_handed_it_in(study, heads):
    ana, ben, cai = study.people()[:3]
    head, second = heads
    hand_in(study, ana, "k1")
    assert study.queue(head) == []
    for ask in (lambda: study.adjudication("k1"), lambda: study.open_item(head, "k1")):
        with pytest.raises(NotAssigned, match="not open to adjudicators yet"):
            ask()
    with pytest.raises(NotAssigned, match="not open"):
        study.save(head, "k1", 0, sheet(1), "r")
    hand_in(study, ben, "k1", NONE)
    study.save(cai, "k1", 0, sheet(4), "begun")
    seen = study.adjudication("k1")
    assert seen.sheets == {"ana": DONE, "ben": NONE}
    assert (seen.item.kind, seen.item.cell) == (TRIGGERS, None)
    assert (seen.own.sheet, seen.own.version, seen.own.place, seen.own.of) == (Sheet(), 0, 1, 1)
    assert [(task.key, task.place) for task in study.queue(second)] == [("k1", 1)]


def test_adjudicators_share_a_sheet_and_lose_no_mark_of_each_other(study, heads):
    head, second = heads
    for person in study.people()[:2]:
        hand_in(study, person, "k1")
    study.save(head, "k1", 0, sheet(1, 2), "r1")
    study.save(second, "k1", 0, Sheet((pattern(3),)), "r2")
    assert study.open_item(head, "k1").sheet == sheet(1, 2, 3)
    assert [one.by for one in study.history(head, "k1")] == ["head", "second"]
    study.save(head, "k1", 2, sheet(1, 2, 3, done=True), "r3")
    (one,) = study.judged("adjudicator")
    assert (one.annotator, one.role, one.sheet) == ("adjudicators", "adjudicator", DONE)
    # It stays open, whatever annotators do afterwards.
    ana = study.people()[0]
    study.undo(ana, "k1", 1, "back")
    assert [task.done for task in study.queue(second)] == [True]


def test_where_one_person_judges_an_item_that_one_is_enough(url):
    plan = small_plan(("ana",))
    with AnnotationStudy.create(url, plan) as study:
        ana, head, _ = study.people()
        hand_in(study, ana, "k1")
        assert [task.key for task in study.queue(head)] == ["k1"]


def test_a_sheet_in_the_database_is_checked_when_it_is_read(study, ana, monkeypatch):
    monkeypatch.setattr(revisions, "refuse_unfit", lambda item, sheet: None)
    study.save(ana, "k2", 0, sheet(5), "r")  # four texts only
    with pytest.raises(FfmemError, match="1 to 4"):
        study.open_item(ana, "k2")


def test_every_text_comes_back_as_it_was(study, ana):
    odd = Sheet(
        (pattern(1, description="שלום 😀 \u2028 'quoted' \\ \t", kind=None),), note="ü" * 500
    )
    study.save(ana, "k1", 0, odd, "r ü")
    assert study.open_item(ana, "k1").sheet == odd
    assert json.loads(json.dumps(odd.to_dict())) == odd.to_dict()


def test_the_default_place_is_beside_the_index(tmp_path, monkeypatch):
    assert beside(tmp_path / "demo") == tmp_path / "demo-annotations.sqlite"
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path / "demo")
    assert beside(tmp_path / "demo" / "..") == beside(tmp_path)
    from pathlib import Path

    assert beside(Path()) == tmp_path / "demo-annotations.sqlite"

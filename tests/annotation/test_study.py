"""The store of a study: who sees what, what is saved, and that nothing saved is ever lost."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ffmem
from ffmem.annotation.study import (
    COMPOSITION,
    CONTROL,
    MAX_CHARACTERS,
    MAX_PATTERNS,
    TRIGGERS,
    AnnotationStudy,
    Item,
    NoStudy,
    NotAssigned,
    SaveConflict,
    Sheet,
    SheetPattern,
    StudyExists,
    Text,
    UnknownCode,
    study_path,
)
from ffmem.errors import FfmemError, StoreError
from tests.annotation.conftest import TEXTS, small_plan

N = 6
LIST = Item("k", TRIGGERS, "L0N3", 1, TEXTS)
CASE = Item("c", COMPOSITION, None, 0, (Text("p", None, None, ""),), (" a", " b", " c"))
GOOD = SheetPattern("a", "ends with press", "shallow", frozenset({1, 2, 3}))


def pattern(*marks, **fields):
    return replace(GOOD, marks=frozenset(marks), **fields)


def sheet(*marks, **options):
    return Sheet((pattern(*marks),), **options)


DONE = sheet(1, 2, 3, done=True)
NONE = Sheet(no_pattern=True, done=True)


def hand_in(study, person, key, answer=DONE):
    return study.save(person, key, study.open_item(person, key).version, answer)


# Sheets

sheets = st.tuples(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.sampled_from(["", "ends with press", "news"]),
            st.sampled_from([None, "shallow", "semantic"]),
            st.frozensets(st.integers(1, N)),
        ),
        max_size=4,
        unique_by=lambda one: one[0],
    ),
    st.booleans(),
    st.none(),
    st.sampled_from(["", "a note"]),
    st.booleans(),
)


@given(sheets)
def test_a_sheet_is_the_same_after_a_round_trip(content):
    listed, *rest = content
    made = Sheet(tuple(SheetPattern(*one) for one in listed), *rest)
    assert Sheet.parse(made.to_dict(), LIST) == made


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {"mark": 1},
        {"patterns": {}},
        {"patterns": [None]},
        {"patterns": [{"id": "a"}, {"id": "a"}]},
        {"patterns": [{"id": str(i)} for i in range(MAX_PATTERNS + 1)]},
        {"patterns": [{"id": ""}]},
        {"patterns": [{"id": "a\n"}]},
        {"patterns": [{"id": 3}]},
        {"patterns": [{"id": "a", "color": 1}]},
        {"patterns": [{"id": "a", "kind": "deep"}]},
        {"patterns": [{"id": "a", "kind": []}]},
        {"patterns": [{"id": "a", "marks": [0]}]},
        {"patterns": [{"id": "a", "marks": [N + 1]}]},
        {"patterns": [{"id": "a", "marks": [True]}]},
        {"patterns": [{"id": "a", "marks": ["1"]}]},
        {"patterns": [{"id": "a", "marks": 1}]},
        {"patterns": [{"id": "a", "description": None}]},
        {"note": "x" * (MAX_CHARACTERS + 1)},
        {"note": "a\x00b"},
        {"note": "half a pair \ud83d"},
        {"done": 1},
        {"no_pattern": None},
        {"related": 1},
        {"related": "yes"},
        {"related": True},
    ],
    ids=repr,
)
def test_anything_odd_is_refused(content):
    with pytest.raises(FfmemError, match=r"\.$"):
        Sheet.parse(content, LIST)


def test_a_sheet_must_be_about_its_item(study, ana):
    for key, answer, sentence in (
        ("k1", Sheet(related=True), "Only two words can be related"),
        ("k4", Sheet(no_pattern=True), "has no patterns"),
        ("k4", sheet(), "has no patterns"),
        ("k2", sheet(5), "1 to 4"),
    ):
        with pytest.raises(FfmemError, match=sentence):
            study.save(ana, key, 0, answer)


@pytest.mark.parametrize(
    ("unfinished", "sentence"),
    [
        (Sheet(), "Describe a pattern, or say that there is none."),
        (Sheet((GOOD,), no_pattern=True), "Remove one or the other"),
        (Sheet((replace(GOOD, description=" "),)), "Pattern 1 has no description."),
        (Sheet((GOOD, replace(GOOD, id="b", kind=None))), "Pattern 2 is not marked shallow"),
        (sheet(1, 2), "marked in 2 of the texts; a pattern occurs in at least 3"),
        (Sheet((GOOD, replace(GOOD, id="b", description=" Ends with PRESS"))), "are the same"),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(study, ana, unfinished, sentence):
    assert any(sentence in problem for problem in unfinished.problems(LIST))
    with pytest.raises(FfmemError, match="cannot be handed in yet"):
        study.save(ana, "k1", 0, replace(unfinished, done=True))
    assert study.open_item(ana, "k1").version == 0


def test_a_finished_sheet_has_no_problems():
    assert Sheet((GOOD,)).problems(LIST) == []
    assert Sheet(no_pattern=True).problems(LIST) == []
    assert Sheet(related=False).problems(CASE) == []
    assert Sheet().problems(CASE) == ["Choose whether the two words are related."]


# Who sees what


def test_a_study_is_the_plan_and_is_there_when_it_is_opened_again(study):
    again = AnnotationStudy.open(study.path)
    assert again.settings == small_plan().settings
    assert again.people() == study.people()
    assert again.items == {item.key: item for item in small_plan().items}


def test_everybody_has_a_code_of_their_own(study):
    people = study.people()
    assert [(one.name, one.role) for one in people] == [
        *((name, "annotator") for name in ("ana", "ben", "cai")),
        *(("head", "adjudicator"), ("second", "adjudicator")),
    ]
    assert len({one.code for one in people}) == 5
    assert all(len(one.code) >= 16 for one in people)
    assert [study.find_person(one.code) for one in people] == people


def test_a_wrong_code_opens_nothing(study, ana):
    odd = ("", "ana", "ü" * 22, "\ud800", "x" * 10_000)
    for wrong in (*odd, ana.code[:-1], ana.code + "x"):
        with pytest.raises(UnknownCode, match=r"Nobody .* `ffmem annotate people`"):
            study.find_person(wrong)


def test_a_queue_is_in_the_persons_order(study):
    for person in study.people()[:3]:
        queue = study.queue(person)
        assert [one.item.key for one in queue] == list(small_plan().orders[person.name])
        assert [one.place for one in queue] == [1, 2, 3, 4]
        assert not any(one.sheet.done or one.version for one in queue)


def test_neither_queue_nor_item_tells_a_control_or_a_memory(study, ana):
    for seen in (study.queue(ana), [study.open_item(ana, key) for key in ("k1", "k2", "k3", "k4")]):
        assert {one.item.key: one.item.kind for one in seen} == {
            **{"k1": TRIGGERS, "k2": TRIGGERS, "k3": TRIGGERS, "k4": COMPOSITION}
        }
        assert {(one.item.cell, one.item.sign) for one in seen} == {(None, 0)}
        truth = {item.key: item.texts for item in small_plan().items}
        assert all(one.item.texts == truth[one.item.key] for one in seen)
    saved = study.save(ana, "k3", 0, sheet(1))
    assert (saved.item.kind, saved.item.cell, saved.item.sign) == (TRIGGERS, None, 0)
    with pytest.raises(SaveConflict) as caught:
        study.save(ana, "k3", 0, sheet(2))
    assert caught.value.newest.item == saved.item


def test_items_of_others_are_not_opened(study, ana):
    for ask in (lambda: study.open_item(ana, "k9"), lambda: study.save(ana, "k9", 0, sheet(1))):
        with pytest.raises(NotAssigned, match="no item 'k9' for ana"):
            ask()
    # The adjudicators' sheet is not an annotator's, even if somebody is called like them.
    with pytest.raises(NotAssigned):
        study.open_item(ana._replace(name="adjudicator"), "k1")


# Saving


def test_what_is_saved_is_there(study, ana):
    saved = study.save(ana, "k1", 0, sheet(1, 2))
    assert (saved.version, saved.sheet) == (1, sheet(1, 2))
    opened = study.open_item(ana, "k1")
    assert (opened.sheet, opened.version, opened.place) == (sheet(1, 2), 1, 2)
    assert study.open_item(study.people()[1], "k1").sheet == Sheet()


def test_a_save_from_an_older_version_is_a_conflict_that_shows_what_stands(study, ana):
    study.save(ana, "k1", 0, sheet(1))
    study.save(ana, "k1", 1, sheet(1, 2))
    for base in (0, 1, 7):
        with pytest.raises(SaveConflict, match="version 2 is newer") as caught:
            study.save(ana, "k1", base, sheet(1, 3))
        assert (caught.value.newest.version, caught.value.newest.sheet) == (2, sheet(1, 2))
    assert study.save(ana, "k1", 2, sheet(1, 3)).version == 3  # looked at, and overwritten
    assert [one.sheet for one in study.history("ana", "k1")] == [
        *(sheet(1), sheet(1, 2), sheet(1, 3))
    ]


def test_a_save_that_is_sent_twice_is_one(study, ana):
    first = study.save(ana, "k1", 0, sheet(1))
    assert study.save(ana, "k1", 0, sheet(1)) == first
    assert study.save(ana, "k1", 1, sheet(1)) == first
    assert len(study.history("ana", "k1")) == 1


def test_every_revision_is_kept_with_who_and_when(study, ana):
    for version in range(3):
        study.save(ana, "k1", version, sheet(version + 1))
    history = study.history("ana", "k1")
    assert [one.version for one in history] == [1, 2, 3]
    assert {one.saved_by for one in history} == {"ana"}
    assert [one.saved_at for one in history] == sorted(one.saved_at for one in history)
    assert all(one.saved_at.endswith("+00:00") for one in history)


def test_every_text_comes_back_as_it_was(study, ana):
    odd = Sheet(
        (pattern(1, description="שלום 😀 \u2028 'quoted' \\ \t", kind=None),), note="ü" * 500
    )
    study.save(ana, "k1", 0, odd)
    assert study.open_item(ana, "k1").sheet == odd


def test_what_is_handed_in_comes_with_the_truth(study, ana):
    hand_in(study, ana, "k3", NONE)
    hand_in(study, ana, "k4", Sheet(related=True, done=True))
    study.save(ana, "k1", 0, sheet(1))  # begun, not handed in
    found = study.handed_in()
    assert [(one.item.key, one.annotator, one.role) for one in found] == [
        *(("k3", "ana", "annotator"), ("k4", "ana", "annotator")),
    ]
    assert found[0].item == small_plan().items[2]
    assert (found[0].item.kind, found[0].item.cell) == (CONTROL, "L0N3")
    study.save(ana, "k3", 1, replace(NONE, done=False))  # taken back
    assert [one.item.key for one in study.handed_in()] == ["k4"]


def test_progress_counts_what_is_handed_in(study, ana):
    hand_in(study, ana, "k3", NONE)
    study.save(ana, "k1", 0, sheet(1))
    first, second, *_ = study.progress()
    assert (first.name, first.role, first.done, first.of) == ("ana", "annotator", 1, 4)
    assert first.last_saved == study.history("ana", "k1")[0].saved_at
    assert (second.done, second.of, second.last_saved) == (0, 4, None)


def test_time_per_item_is_the_time_between_saves_without_breaks(study, ana, monkeypatch):
    minutes = iter([0, 1, 3, 4, 10, 12])

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2030, 1, 1, 12, next(minutes), tzinfo=tz)

    monkeypatch.setattr(ffmem.annotation.study, "datetime", Clock)
    assert study.seconds_per_item() == {}
    study.save(ana, "k3", 0, sheet(1))  # at 0: nothing is known of what was before
    hand_in(study, ana, "k3")  # at 1: k3 took 1 minute
    study.save(ana, "k1", 0, sheet(1))  # at 3
    hand_in(study, ana, "k1")  # at 4: k1 took 3
    study.save(ana, "k2", 0, sheet(1))  # at 10, after a break
    assert study.seconds_per_item() == {"ana": 120}
    hand_in(study, ana, "k2")  # at 12: k2 took 2
    assert study.seconds_per_item() == {"ana": 120}
    assert [one.seconds_per_item for one in study.progress()][:2] == [120, None]


# Adjudication


def test_an_item_is_adjudicated_when_two_have_handed_it_in(study, heads):
    ana, ben, cai = study.people()[:3]
    head, second = heads
    hand_in(study, ana, "k1")
    assert study.queue(head) == []
    for ask in (
        lambda: study.open_item(head, "k1"),
        lambda: study.save(head, "k1", 0, sheet(1)),
    ):
        with pytest.raises(NotAssigned, match="not ready"):
            ask()
    hand_in(study, ben, "k1", NONE)
    study.save(cai, "k1", 0, sheet(4))
    assert study.sheets("k1") == {"ana": DONE, "ben": NONE}
    opened = study.open_item(head, "k1")
    assert (opened.item.kind, opened.item.cell, opened.sheet) == (TRIGGERS, None, Sheet())
    assert [(one.item.key, one.place) for one in study.queue(second)] == [("k1", 1)]


def test_adjudicators_share_a_sheet_that_stays_open_to_them(study, heads):
    head, second = heads
    for person in study.people()[:2]:
        hand_in(study, person, "k1")
    study.save(head, "k1", 0, sheet(1, 2))
    with pytest.raises(SaveConflict):
        study.save(second, "k1", 0, sheet(3))
    study.save(second, "k1", 1, sheet(1, 2, 3, done=True))
    assert [one.saved_by for one in study.history("adjudicators", "k1")] == ["head", "second"]
    (one,) = [one for one in study.handed_in() if one.role == "adjudicator"]
    assert (one.annotator, one.sheet) == ("adjudicators", DONE)
    study.save(study.people()[0], "k1", 1, replace(DONE, done=False))  # an annotator takes it back
    assert [one.sheet.done for one in study.queue(second)] == [True]


def test_where_one_person_judges_an_item_that_one_is_enough(tmp_path):
    study = AnnotationStudy.create(tmp_path / "one.sqlite", small_plan(("ana",)))
    ana, head, _ = study.people()
    hand_in(study, ana, "k1")
    assert [one.item.key for one in study.queue(head)] == ["k1"]


# Many at once, killed in between

WRITERS = 8
MARKS = range(1, 7)


def with_mark(sheet, id, mark):
    known = {one.id: one for one in sheet.patterns}
    before = known.get(id, SheetPattern(id, "x", "shallow"))
    known[id] = replace(before, marks=before.marks | {mark})
    return replace(sheet, patterns=tuple(known.values()))


def test_eight_writers_who_look_before_they_overwrite_lose_no_mark(study, ana):
    begin = threading.Barrier(WRITERS)

    def write(number):
        mine = AnnotationStudy.open(study.path) if number % 2 else study
        begin.wait()
        version, seen = 0, Sheet()
        for mark in MARKS:
            while True:
                try:
                    saved = mine.save(ana, "k1", version, with_mark(seen, f"{number}", mark))
                except SaveConflict as conflict:
                    version, seen = conflict.newest.version, conflict.newest.sheet
                else:
                    version, seen = saved.version, saved.sheet
                    break

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(WRITERS)))
    found = {one.id: one.marks for one in study.open_item(ana, "k1").sheet.patterns}
    assert found == {f"{number}": frozenset(MARKS) for number in range(WRITERS)}
    versions = [one.version for one in study.history("ana", "k1")]
    assert versions == list(range(1, WRITERS * len(MARKS) + 1))


def test_the_same_save_from_many_threads_is_one_revision(study, ana):
    begin = threading.Barrier(WRITERS)

    def write(number):
        begin.wait()
        return study.save(ana, "k1", 0, sheet(1))

    with ThreadPoolExecutor(WRITERS) as pool:
        assert len(set(pool.map(write, range(WRITERS)))) == 1
    assert len(study.history("ana", "k1")) == 1


def test_who_looks_at_the_newest_version_to_save_keeps_others_waiting(study, ana, monkeypatch):
    newest, others = AnnotationStudy._newest, []

    def slow(self, db, key, owner):
        found = newest(self, db, key, owner)
        if not others:  # somebody else comes between looking and saving
            others.append(pool.submit(study.save, ana, "k1", 0, sheet(2)))
            time.sleep(0.3)
        return found

    monkeypatch.setattr(AnnotationStudy, "_newest", slow)
    with ThreadPoolExecutor(1) as pool:
        assert study.save(ana, "k1", 0, sheet(1)).version == 1
        with pytest.raises(SaveConflict):
            others[0].result()


SAVER = """
import sys
from ffmem.annotation.study import AnnotationStudy, Sheet
study = AnnotationStudy.open(sys.argv[1])
ana = study.people()[0]
for version in range(100_000):
    print(study.save(ana, "k1", version, Sheet(note=f"note {version + 1}")).version, flush=True)
"""


def test_what_was_acknowledged_before_a_kill_is_there(study, ana):
    environment = os.environ | {"PYTHONPATH": str(Path(ffmem.__file__).parent.parent)}
    command = [sys.executable, "-c", SAVER, str(study.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for _ in range(20):
            process.stdout.readline()
        process.kill()
        rest = process.stdout.read().split()
    acknowledged = int(rest[-1]) if rest else 20
    again = AnnotationStudy.open(study.path)
    history = again.history("ana", "k1")
    assert [one.version for one in history] == list(range(1, len(history) + 1))
    assert 20 <= acknowledged <= len(history) <= acknowledged + 1
    assert all(one.sheet.note == f"note {one.version}" for one in history)
    # And it goes on; the save whose answer was lost is not made twice.
    again.save(ana, "k1", len(history) - 1, Sheet(note=f"note {len(history)}"))
    assert len(again.history("ana", "k1")) == len(history)


def test_two_who_create_a_study_at_once_create_one(tmp_path):
    begin = threading.Barrier(3)

    def make(number):
        begin.wait()
        try:
            AnnotationStudy.create(tmp_path / "s.sqlite", small_plan((f"only {number}",)))
        except StudyExists:
            return 0
        return 1

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(make, range(3))) == 1
    assert len(AnnotationStudy.open(tmp_path / "s.sqlite").people()) == 3


# Files


def test_a_study_is_next_to_its_index(tmp_path, monkeypatch):
    assert study_path(tmp_path / "demo") == tmp_path / "demo-annotations.sqlite"
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path / "demo")
    assert study_path(Path()) == tmp_path / "demo-annotations.sqlite"


def test_codes_are_for_the_owner_of_the_file_alone(tmp_path):
    study = AnnotationStudy.create(tmp_path / "study.sqlite", small_plan())
    study.save(study.people()[0], "k1", 0, sheet(1))
    assert [path.name for path in tmp_path.iterdir()] == ["study.sqlite"]
    assert study.path.stat().st_mode & 0o077 == 0


def test_a_file_that_is_no_study_is_refused_and_not_changed(tmp_path):
    text, other = tmp_path / "notes.txt", tmp_path / "other.sqlite"
    text.write_text("These are notes, and they are longer than a header. " * 20)
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE recipes (name)")
    db.close()
    for path, sentence in ((text, "not a SQLite database"), (other, "another program's database")):
        before = path.read_bytes()
        for use in (AnnotationStudy.open, lambda path: AnnotationStudy.create(path, small_plan())):
            with pytest.raises(StoreError, match=sentence):
                use(path)
        assert path.read_bytes() == before


def test_a_study_of_another_format_is_refused(study):
    with sqlite3.connect(study.path) as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(StoreError, match="has format 7; this ffmem reads format 1"):
        AnnotationStudy.open(study.path)


def test_a_study_that_is_there_is_not_overwritten(study):
    before = study.path.read_bytes()
    with pytest.raises(StudyExists, match="was not changed"):
        AnnotationStudy.create(study.path, small_plan())
    assert study.path.read_bytes() == before


def test_a_folder_that_is_not_there_and_an_address_are_refused(tmp_path):
    with pytest.raises(StoreError, match="Its folder must exist"):
        AnnotationStudy.create(tmp_path / "no" / "study.sqlite", small_plan())
    with pytest.raises(NoStudy, match="ffmem annotate init"):
        AnnotationStudy.open(tmp_path / "none.sqlite")
    (tmp_path / "empty.sqlite").touch()  # what a killed `init` may leave
    with pytest.raises(NoStudy):
        AnnotationStudy.open(tmp_path / "empty.sqlite")
    AnnotationStudy.create(tmp_path / "empty.sqlite", small_plan())
    with pytest.raises(StoreError, match="not a URL") as caught:
        AnnotationStudy.open("postgresql://ana:s3cret@host/db")
    assert "s3cret" not in str(caught.value)


def test_a_file_that_may_not_be_written_to_is_a_sentence():
    folder = Path(tempfile.mkdtemp(prefix="ffmem-"))
    root = os.geteuid() == 0
    try:
        study = AnnotationStudy.create(folder / "study.sqlite", small_plan())
        ana = study.people()[0]
        for path, mode in ((study.path, 0o444), (folder, 0o555)):
            path.chmod(mode)
        if root:
            os.seteuid(65534)  # root may write anywhere
        with pytest.raises(StoreError, match="permissions"):
            study.save(ana, "k1", 0, Sheet(note="x"))
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_file_that_is_removed_while_it_is_used_is_told_at_the_next_save(study, ana):
    study.save(ana, "k1", 0, Sheet(note="first"))
    study.path.unlink()
    for ask in (lambda: study.save(ana, "k1", 1, Sheet(note="second")), lambda: study.queue(ana)):
        with pytest.raises(StoreError, match="moved or deleted"):
            ask()
    assert not study.path.exists()

"""Many at once, killed in between, cut off: nothing is lost, nothing is doubled."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import ffmem
from ffmem.annotation.sheet import Sheet, SheetPattern
from ffmem.annotation.study import AnnotationStudy, Annotator
from ffmem.errors import StoreError

WRITERS = 8
MARKS = range(1, 7)


def with_mark(sheet, id, mark):
    """Return a sheet with one more mark."""
    known = {pattern.id: pattern for pattern in sheet.patterns}
    before = known.get(id, SheetPattern(id, "x", "shallow"))
    known[id] = replace(before, marks=before.marks | {mark})
    return replace(sheet, patterns=tuple(known.values()))


def test_every_mark_of_eight_writers_is_there_and_versions_have_no_gap(study, ana):
    begin = threading.Barrier(WRITERS)

    def write(number):
        # Half of them as another process would: with connections of their own.
        with AnnotationStudy.open(study.url) as other:
            mine = study if number % 2 else other
            sheet, version = Sheet(), 0
            begin.wait()
            for mark in MARKS:
                sheet = with_mark(sheet, f"own {number}", mark)
                sheet = with_mark(sheet, "shared", (mark + number) % 6 + 1)
                saved = mine.save(ana, "k1", version, sheet, f"{number} {mark}")
                version, sheet = saved.version, saved.sheet
            return version

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, range(WRITERS)))
    found = {pattern.id: pattern.marks for pattern in study.open_item(ana, "k1").sheet.patterns}
    assert found == {
        **{f"own {number}": frozenset(MARKS) for number in range(WRITERS)},
        "shared": frozenset(MARKS),
    }
    versions = [one.version for one in study.history(ana, "k1")]
    assert versions == list(range(1, WRITERS * len(MARKS) + 1))


def test_the_same_request_from_many_threads_is_one_revision(study, ana):
    begin = threading.Barrier(WRITERS)

    def write(number):
        begin.wait()
        return study.save(ana, "k1", 0, with_mark(Sheet(), "a", 1), "the same")

    with ThreadPoolExecutor(WRITERS) as pool:
        answers = set(pool.map(write, range(WRITERS)))
    assert len(answers) == 1
    assert len(study.history(ana, "k1")) == 1


def test_of_many_undos_at_once_one_is_done_and_the_others_hear_of_it(study, ana):
    study.save(ana, "k1", 0, with_mark(Sheet(), "a", 1), "r1")
    study.save(ana, "k1", 1, with_mark(Sheet(), "a", 2), "r2")
    begin = threading.Barrier(4)

    def undo(number):
        begin.wait()
        try:
            return study.undo(ana, "k1", 2, f"u{number}").version
        except ffmem.FfmemError as error:
            return error.current.version

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(undo, range(4))) == [3] * 4
    assert study.open_item(ana, "k1").sheet == with_mark(Sheet(), "a", 1)


SAVER = """
import sys
from ffmem.annotation.sheet import Sheet
from ffmem.annotation.study import AnnotationStudy
study = AnnotationStudy.open(sys.argv[1])
ana = study.people()[0]
for version in range(100_000):
    saved = study.save(ana, "k1", version, Sheet(note=f"note {version + 1}"), f"r{version}")
    print(saved.version, flush=True)
"""


def test_what_was_acknowledged_before_a_kill_is_there(study, ana):
    environment = os.environ | {"PYTHONPATH": str(Path(ffmem.__file__).parent.parent)}
    command = [sys.executable, "-c", SAVER, study.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for _ in range(20):
            process.stdout.readline()
        process.kill()
        rest = process.stdout.read().split()
    acknowledged = int(rest[-1]) if rest else 20
    assert acknowledged >= 20
    with AnnotationStudy.open(study.url) as again:
        history = again.history(ana, "k1")
        assert [one.version for one in history] == list(range(1, len(history) + 1))
        assert acknowledged <= len(history) <= acknowledged + 1
        assert all(one.sheet.note == f"note {one.version}" for one in history)
        # And it goes on; the save whose answer was lost is not made twice.
        last = len(history)
        again.save(ana, "k1", last - 1, Sheet(note=f"note {last}"), f"r{last - 1}")
        assert len(again.history(ana, "k1")) == last


@pytest.mark.parametrize("kind", ["postgresql"])
def test_a_server_that_goes_away_is_a_sentence_and_is_found_again(study, ana, postgres):
    study.save(ana, "k1", 0, Sheet(note="before"), "r1")
    postgres.stop("immediate")
    try:
        with pytest.raises(StoreError, match=r"Cannot use the database .* the server runs"):
            study.save(ana, "k1", 1, Sheet(note="while"), "r2")
    finally:
        postgres.start()
    assert study.save(ana, "k1", 1, Sheet(note="after"), "r2").version == 2


def test_two_who_make_a_study_at_once_make_one(url):
    from ffmem.annotation.schema import StudyExists
    from tests.annotation.conftest import small_plan

    begin = threading.Barrier(3)

    def make(number):
        begin.wait()
        try:
            AnnotationStudy.create(url, small_plan((f"only {number}",))).close()
        except StudyExists:
            return 0
        return 1

    with ThreadPoolExecutor(3) as pool:
        assert sum(pool.map(make, range(3))) == 1
    with AnnotationStudy.open(url) as study:
        assert isinstance(study.people()[0], Annotator)
        assert len(study.people()) == 3

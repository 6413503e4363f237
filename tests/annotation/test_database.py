"""Which URLs are taken, and that whatever goes wrong is a sentence without a password."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from sqlalchemy import text

from ffmem.annotation.database import Database, url_of
from ffmem.annotation.sheet import Sheet
from ffmem.annotation.study import AnnotationStudy
from ffmem.errors import StoreError
from tests.annotation.conftest import small_plan

SECRET = "s3cret-pass"


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_a_password_is_in_no_message(scheme):
    database = Database(f"{scheme}://ana:{SECRET}@127.0.0.1:1/study?sslpassword={SECRET}")
    assert database.name == "postgresql://ana:***@127.0.0.1:1/study"
    with (
        pytest.raises(StoreError, match=r"Cannot use .*server runs") as caught,
        database.reading() as session,
    ):
        session.execute(text("SELECT 1"))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (f"mysql://ana:{SECRET}@host/db", "SQLite or PostgreSQL, not in 'mysql'"),
        (f"postgresql://ana:{SECRET}@host:port/db", "cannot be read. Write sqlite:///FILE"),
        (f"://ana:{SECRET}@", "cannot be read"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///x?mode=ro", "names no file"),
    ],
)
def test_what_is_no_url_of_a_study_is_refused(url, sentence):
    with pytest.raises(StoreError, match=sentence) as caught:
        Database(url)
    assert SECRET not in str(caught.value)


def test_a_path_is_a_sqlite_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = str(tmp_path / "x.sqlite")
    for given in ("x.sqlite", Path("x.sqlite"), "sqlite:///x.sqlite", f"sqlite:///{file}"):
        assert url_of(given).database == file


def test_without_the_driver_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"pip install 'ffmem\[postgres\]'"):
        Database("postgresql://host/db")


def test_a_file_that_is_no_database_is_a_sentence(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("These are notes, and they are longer than a header. " * 20)
    before = file.read_bytes()
    for use in (AnnotationStudy.open, lambda file: AnnotationStudy.create(file, small_plan())):
        with pytest.raises(StoreError, match="no SQLite database"):
            use(file)
    assert file.read_bytes() == before


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path):
    with pytest.raises(StoreError, match="its folder must be there"):
        AnnotationStudy.create(tmp_path / "no" / "study.sqlite", small_plan())


def test_a_file_that_may_not_be_written_to_is_a_sentence():
    folder = Path(tempfile.mkdtemp(prefix="ffmem-"))
    file = folder / "study.sqlite"
    root = os.geteuid() == 0
    try:
        with AnnotationStudy.create(file, small_plan()) as study:
            ana = study.people()[0]
        for path, mode in ((file, 0o444), (folder, 0o555)):
            path.chmod(mode)
        if root:
            os.seteuid(65534)  # root may write anywhere
        with (
            pytest.raises(StoreError, match=r"writable|written"),
            AnnotationStudy.open(file) as study,
        ):
            study.save(ana, "k1", 0, Sheet(note="x"), "r")
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_sqlite_keeps_what_it_acknowledged_and_checks_what_refers_to_what(tmp_path):
    database = Database(tmp_path / "x.sqlite")
    with database.reading() as session:
        found = {
            name: session.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    database.close()
    full = 2
    assert found == {
        **{"journal_mode": "wal", "synchronous": full, "foreign_keys": 1},
        "busy_timeout": 30_000,
    }


def test_a_file_that_is_removed_while_it_is_used_is_told_at_the_next_save(tmp_path):
    path = tmp_path / "study.sqlite"
    with AnnotationStudy.create(path, small_plan()) as study:
        person = study.people()[0]
        key = study.queue(person)[0].key
        study.save(person, key, 0, Sheet(note="first"), "request-1")
        for left in tmp_path.glob("study.sqlite*"):
            left.unlink()
        with pytest.raises(StoreError, match="removed or replaced"):
            study.save(person, key, 1, Sheet(note="second"), "request-2")
        with pytest.raises(StoreError, match="removed or replaced"):
            study.queue(person)


def test_a_file_that_is_replaced_by_another_is_refused(tmp_path):
    path = tmp_path / "study.sqlite"
    AnnotationStudy.create(tmp_path / "other.sqlite", small_plan()).close()
    with AnnotationStudy.create(path, small_plan()) as study:
        person = study.people()[0]
        (tmp_path / "other.sqlite").replace(path)
        with pytest.raises(StoreError, match="removed or replaced"):
            study.queue(person)


def test_codes_are_for_the_owner_of_the_file_alone(tmp_path):
    with AnnotationStudy.create(tmp_path / "study.sqlite", small_plan()) as study:
        study.people()
        for path in tmp_path.glob("study.sqlite*"):
            assert path.stat().st_mode & 0o077 == 0, path

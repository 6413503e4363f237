"""Tables of older studies are brought up to date; newer and foreign ones are refused."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

import ffmem.annotation
from ffmem.annotation import schema
from ffmem.annotation.database import Database
from ffmem.annotation.sheet import Sheet
from ffmem.annotation.study import AnnotationStudy
from ffmem.annotation.tables import Table
from ffmem.errors import StoreError
from tests.annotation.conftest import small_plan

OLD = [
    "INSERT INTO study VALUES (1, '{\"plan\": \"p\"}', '2026-01-01 00:00:00')",
    "INSERT INTO person VALUES (1, 'ana', 'a-code-of-22-characters', 'annotator')",
    "INSERT INTO item VALUES (1, 'k1', 'triggers', 'L0N3', 1, '[[\"a\", \"a\", null, \"\"]]')",
    "INSERT INTO assignment VALUES (1, 1, 1, 1)",
    "INSERT INTO revision VALUES (1, 1, 1, 'r', 's', 'save', 1, FALSE,"
    " '{\"note\": \"old\"}', '2026-01-01 00:00:00')",
]
"""A study as the first version had it: items without words, sheets without `related`."""


@pytest.fixture
def old(url):
    """The URL of a study of version 0001."""
    database = Database(url)
    with database.writing() as session:
        schema.upgrade(session.connection(), "0001")
        for statement in OLD:
            session.execute(text(statement))
    database.close()
    return url


def version(url):
    database = Database(url)
    with database.reading() as session:
        found = schema.version(session.connection(), "it")
    database.close()
    return found


def test_an_old_study_is_upgraded_when_it_is_opened_and_keeps_everything(old):
    assert version(old) == "0001"
    with AnnotationStudy.open(old) as study:
        (ana,) = study.people()
        opened = study.open_item(ana, "k1")
        assert (opened.sheet, opened.version, opened.item.words) == (Sheet(note="old"), 1, ())
        study.save(ana, "k1", 1, Sheet(note="new"), "r2")
        assert [one.sheet.note for one in study.history(ana, "k1")] == ["old", "new"]
    assert version(old) == schema.VERSIONS[-1]


def test_many_who_open_an_old_study_at_once_upgrade_it_once(old):
    def look(_):
        with AnnotationStudy.open(old) as study:
            return study.open_item(study.people()[0], "k1").sheet

    with ThreadPoolExecutor(5) as pool:
        assert set(pool.map(look, range(5))) == {Sheet(note="old")}


def test_the_steps_make_exactly_the_tables_that_the_code_uses(url):
    AnnotationStudy.create(url, small_plan()).close()
    database = Database(url)
    with database.reading() as session:
        options = {"version_table": schema.TABLE}
        context = MigrationContext.configure(session.connection(), opts=options)
        assert compare_metadata(context, Table.metadata) == []
    database.close()


def test_the_known_versions_are_the_steps_in_the_package():
    folder = Path(ffmem.annotation.__file__).parent / "migrations"
    steps = ScriptDirectory(str(folder)).walk_revisions()
    assert [step.revision for step in steps][::-1] == list(schema.VERSIONS)


def test_a_newer_study_is_refused_and_not_touched(url):
    AnnotationStudy.create(url, small_plan()).close()
    database = Database(url)
    with database.writing() as session:
        session.execute(text(f"UPDATE {schema.TABLE} SET version_num = '0099'"))
    database.close()
    with pytest.raises(StoreError, match=r"newer ffmem: .* 0099, this one knows 0001 to 0002"):
        AnnotationStudy.open(url)
    with pytest.raises(schema.StudyExists, match="not touched"):
        AnnotationStudy.create(url, small_plan())
    assert version(url) == "0099"


def test_another_programs_database_is_refused_and_not_touched(url):
    database = Database(url)
    with database.writing() as session:
        session.execute(text("CREATE TABLE recipes (id INTEGER)"))
    for use in (AnnotationStudy.open, lambda url: AnnotationStudy.create(url, small_plan())):
        with pytest.raises(StoreError, match=r"another program's .* recipes"):
            use(url)
    with database.reading() as session:
        assert session.execute(text("SELECT * FROM recipes")).all() == []
    database.close()


def test_a_study_that_cannot_be_made_leaves_nothing_behind(url):
    twice = small_plan()
    broken = type(twice)((*twice.items, twice.items[0]), twice.orders, (), twice.settings)
    with pytest.raises(Exception, match=r"(?i)unique"):
        AnnotationStudy.create(url, broken)
    assert version(url) is None
    AnnotationStudy.create(url, twice).close()


def test_where_there_is_no_study_it_is_said_and_no_file_is_made(tmp_path):
    file = tmp_path / "none.sqlite"
    with pytest.raises(schema.NoStudy, match=r"no study .*`ffmem annotate init`"):
        AnnotationStudy.open(file)
    assert not file.exists()
    file.touch()
    with pytest.raises(schema.NoStudy):
        AnnotationStudy.open(file)


def test_an_existing_study_is_not_made_again(study):
    with pytest.raises(schema.StudyExists, match="already"):
        AnnotationStudy.create(study.url, small_plan())
    assert len(study.people()) == 5

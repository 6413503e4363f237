"""The version of a study's tables: made, brought up to date, or refused.

    no tables  ─ make ─►  0001  ─►  …  ─►  VERSIONS[-1]

Steps run in one transaction, one process at a time: tables are of one version or of the next.
"""

import threading
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from ffmem.errors import StoreError

VERSIONS = ("0001", "0002")
"""What this ffmem knows, the newest last."""

TABLE = "ffmem_annotation_schema"
"""Holds the version."""

_LOCK = 0x66666D656D  # "ffmem": the same number for everybody who changes the tables
_ALEMBIC = threading.Lock()  # alembic keeps what it works on in module globals


class StudyExists(StoreError):
    """There is a study already."""


class NoStudy(StoreError):
    """There is no study."""


def make(connection: Connection, name: str) -> None:
    """Make the tables in a database that has none; the caller's transaction commits them."""
    _lock(connection)
    if version(connection, name) is not None:
        raise StudyExists(
            f"There is a study in {name} already; it was not touched. Name another database with"
            " --db, or move this one away."
        )
    upgrade(connection)


def is_current(connection: Connection, name: str) -> bool:
    """Return whether the tables are of the newest version; newer or foreign ones are refused."""
    found = version(connection, name)
    if found is None:
        raise no_study(name)
    if found not in VERSIONS:
        raise StoreError(
            f"The study in {name} was made by a newer ffmem: its tables are of version {found},"
            f" this one knows {VERSIONS[0]} to {VERSIONS[-1]}. Install a newer ffmem."
        )
    return found == VERSIONS[-1]


def bring_up_to_date(connection: Connection, name: str) -> None:
    """Bring older tables to the newest version; whoever comes second finds nothing to do."""
    _lock(connection)
    if not is_current(connection, name):
        upgrade(connection)


def version(connection: Connection, name: str) -> str | None:
    """Return the version of the tables, None where there are none at all."""
    tables = inspect(connection).get_table_names()
    if TABLE in tables:
        found = connection.execute(text(f"SELECT version_num FROM {TABLE}")).scalars().all()
        if len(found) != 1:
            raise StoreError(
                f"The study in {name} is damaged: it does not say of which version its tables are."
                " Take a backup, or make a new study and import an export."
            )
        return str(found[0])
    if tables:
        raise StoreError(
            f"{name} is another program's database: it has the tables"
            f" {', '.join(sorted(tables)[:3])}{', …' if len(tables) > 3 else ''}."
            " Name another one with --db."
        )
    return None


def no_study(name: str) -> NoStudy:
    """Return the error that says where no study is."""
    return NoStudy(f"There is no study in {name}. Make one with `ffmem annotate init`.")


def upgrade(connection: Connection, to: str = "head") -> None:
    """Run the steps up to a version."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    folder = str(Path(__file__).parent / "migrations")
    config.set_main_option("script_location", folder.replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.attributes |= {"connection": connection, "version_table": TABLE}
    with _ALEMBIC:
        command.upgrade(config, to)


def _lock(connection: Connection) -> None:
    """Let nobody else change the tables until the transaction ends; in SQLite nobody can."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})

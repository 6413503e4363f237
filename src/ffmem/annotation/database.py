"""Where a study is kept: a SQLite file, or a PostgreSQL database by its URL.

What was committed is on the disk (SQLite: `synchronous=FULL`), whatever is killed afterwards.
Whatever the database raises becomes a sentence; a password in a URL is never in it.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from ffmem.errors import StorageFull, StoreError

PATIENCE = 30
"""Seconds that a write waits for others, or that a connection may take to come about."""

_SENTENCES = {
    "readonly": "it may not be written to: use a file and folder that you may write to",
    "unable to open": "the file cannot be opened: its folder must be there, and be writable",
    "locked": "somebody else has been writing for too long: try again",
    "not a database": "the file is no SQLite database: choose another with --db",
    "malformed": "the file is damaged: take a backup, or an export",
}


class Beaten(Exception):
    """Somebody else was faster, and the database gave up for us: do it again."""


class Database:
    """A database that may hold a study; nothing is read or written before it is asked for."""

    def __init__(self, url: str | Path) -> None:
        self.url = url_of(url)
        self.name = shown(self.url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._engine = self._made()
        self._file: tuple[int, int] | None = None

    @property
    def is_missing(self) -> bool:
        """Whether it is a file that is not there; connecting would make it."""
        return self.is_sqlite and not Path(str(self.url.database)).exists()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Give a session that sees one state of the database."""
        self._refuse_gone()  # before anything: connecting would make the file again
        with self._explaining(), Session(self._engine) as session, session.begin():
            session.connection()
            self._refuse_gone()
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Give a session whose changes are all committed when the block ends well, or none."""
        self._refuse_gone()
        engine = self._engine.execution_options(writing=True)
        with self._explaining(), Session(engine) as session, session.begin():
            session.connection()
            yield session
            # Last of all: SQLite would go on writing to a file that nobody can find any more.
            self._refuse_gone()

    def make_private(self) -> None:
        """Make a file that only its owner may read: it holds everybody's codes."""
        if self.is_missing:
            with self._explaining_files():
                Path(str(self.url.database)).touch(mode=0o600)

    def _refuse_gone(self) -> None:
        """Refuse a file that was removed or replaced since it was first used."""
        if not self.is_sqlite:
            return
        found = None
        with suppress(OSError):
            stat = Path(str(self.url.database)).stat()
            found = (stat.st_dev, stat.st_ino)
        self._file = self._file or found
        if found != self._file:
            raise StoreError(
                f"The study's file {self.name} was removed or replaced while it was in use:"
                " nothing is saved. Put it back, with its -wal file, and start again."
            )

    @contextmanager
    def _explaining_files(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"Cannot make the study {self.name} ({error.strerror}): its folder must be there,"
                " and be writable."
            ) from None

    def close(self) -> None:
        """Close the connections that nobody uses."""
        self._engine.dispose()

    def _made(self) -> Engine:
        if self.is_sqlite:
            engine = create_engine(
                self.url, connect_args={"timeout": PATIENCE}, pool_size=10, max_overflow=30
            )
            event.listen(engine, "connect", _set_up)
            event.listen(engine, "begin", _begin)
            return engine
        try:
            return create_engine(
                self.url,
                connect_args={"connect_timeout": PATIENCE},
                pool_size=10,
                max_overflow=30,
                pool_pre_ping=True,  # the server may have been restarted
            )
        except ImportError:
            raise StoreError(
                "A study in PostgreSQL needs psycopg: pip install 'ffmem[postgres]'."
            ) from None

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            raise  # a race, which the caller decides
        except PoolTimeout:
            raise StoreError(
                f"Too many are at the database {self.name} at once: try again."
            ) from None
        except DBAPIError as error:
            if isinstance(error, ProgrammingError) and _state(error) != "42501":
                raise  # a bug, unless it is the right to do it that is missing
            if _state(error) in ("40001", "40P01"):  # could not serialise; deadlock
                raise Beaten from None
            raise self._explained(error) from None

    def _explained(self, error: DBAPIError) -> StoreError | StorageFull:
        reason = " ".join(str(error.orig).split())
        if self.url.password:
            reason = reason.replace(str(self.url.password), "***")
        if "disk is full" in reason or _state(error) == "53100":
            return StorageFull(
                f"No room left on the disk of the database {self.name}. What was saved before is"
                " kept: free some space and try again."
            )
        for sign, sentence in _SENTENCES.items():
            if self.is_sqlite and sign in reason:
                return StoreError(f"Cannot use the database {self.name}: {sentence}.")
        return StoreError(
            f"Cannot use the database {self.name}: {reason.rstrip('.')}."
            " Check the URL, and that the server runs and lets you in."
        )


@contextmanager
def closed_on_error(database: Database) -> Iterator[Database]:
    """Give a database that is closed unless the block ends well."""
    try:
        yield database
    except BaseException:
        database.close()
        raise


def url_of(given: str | Path) -> URL:
    """Return the URL that a text or a path means; a path is a SQLite file."""
    if isinstance(given, Path) or "://" not in given:
        return URL.create("sqlite", database=str(Path(given).resolve()))
    try:
        url = make_url(given)
        backend = url.get_backend_name()
    except (ArgumentError, ValueError):
        raise StoreError(
            "The URL of the database cannot be read. Write sqlite:///FILE or"
            " postgresql://USER:PASSWORD@HOST/DATABASE; odd characters of a password as %XX."
        ) from None
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    if url.drivername in ("sqlite", "sqlite+pysqlite"):
        if not url.database or url.database == ":memory:" or url.query:
            raise StoreError(f"{shown(url)} names no file: write sqlite:///FILE.")
        return URL.create("sqlite", database=str(Path(url.database).resolve()))
    raise StoreError(f"A study is kept in SQLite or PostgreSQL, not in {backend!r}.")


def shown(url: URL) -> str:
    """Return a URL without anything secret: no password, no options."""
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.set(query={}, drivername="postgresql").render_as_string(hide_password=True)


def beside(folder: Path) -> Path:
    """Return where the study of an index is kept by default: never inside, `extend` swaps that."""
    whole = folder.resolve()
    return whole.with_name(f"{whole.name}-annotations.sqlite")


def _set_up(connection: Any, record: Any) -> None:
    """Make a new SQLite connection safe: for several at once, and against a power cut."""
    connection.isolation_level = None  # `_begin` begins; the driver would commit before DDL
    for pragma in ("synchronous=FULL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}").close()
    # The one statement that does not wait for others by itself; several may open a new file.
    for attempt in range(100):
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or attempt == 99:
                raise
            time.sleep(0.02)


def _begin(connection: Connection) -> None:
    # Who reads first and writes later in one transaction would find the snapshot outdated.
    writing = connection.get_execution_options().get("writing", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")


def _state(error: DBAPIError) -> str | None:
    """Return PostgreSQL's own code for an error."""
    return getattr(error.orig, "sqlstate", None)

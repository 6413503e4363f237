"""The tables of a study, the same in SQLite and PostgreSQL.

    study ─ settings        item ─ what is judged, with the truth      person ─ who, by which code
    assignment ─ an item for a person to judge, at a place of the person's order;
                 for nobody in particular: the sheet that adjudicators share
    revision ─ a sheet as it was saved; rows are added, never changed or removed

    UNIQUE (assignment, version)   of two saves that started from the same version, one is first
    UNIQUE (assignment, request)   a save that is sent twice is one save

The tables are made and changed by `migrations/` only.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import DateTime, Dialect, ForeignKey, Index, Text, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator


class Utc(TypeDecorator[datetime]):
    """A moment, in UTC whatever the database makes of it."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """Return the moment as it is stored."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """Return the moment as it was; SQLite forgets the zone."""
        if value is None:
            return None
        moment: datetime = value if value.tzinfo else value.replace(tzinfo=UTC)
        return moment.astimezone(UTC)


class Table(DeclarativeBase):
    """Base of the tables."""


class StudyRow(Table):
    """The study; there is one."""

    __tablename__ = "study"

    id: Mapped[int] = mapped_column(primary_key=True)
    settings: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(Utc)


class PersonRow(Table):
    """Somebody who takes part."""

    __tablename__ = "person"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(Text, unique=True)
    code: Mapped[str] = mapped_column(Text, unique=True)
    role: Mapped[str] = mapped_column(Text)


class ItemRow(Table):
    """Something to judge. The texts are copies: the study stands even if the index changes."""

    __tablename__ = "item"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(Text, unique=True)
    kind: Mapped[str] = mapped_column(Text)
    cell: Mapped[str | None] = mapped_column(Text)
    sign: Mapped[int]
    texts: Mapped[str] = mapped_column(Text)
    words: Mapped[str | None] = mapped_column(Text)


class AssignmentRow(Table):
    """An item for a person to judge; without a person, for the adjudicators together."""

    __tablename__ = "assignment"
    __table_args__ = (
        UniqueConstraint("item_id", "person_id", name="one_assignment"),
        # Two NULLs are not the same to a UNIQUE constraint.
        Index(
            "one_adjudication",
            "item_id",
            unique=True,
            sqlite_where=text("person_id IS NULL"),
            postgresql_where=text("person_id IS NULL"),
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    item_id: Mapped[int] = mapped_column(ForeignKey("item.id"))
    person_id: Mapped[int | None] = mapped_column(ForeignKey("person.id"))
    place: Mapped[int]


class RevisionRow(Table):
    """A sheet as it was saved."""

    __tablename__ = "revision"
    __table_args__ = (
        UniqueConstraint("assignment_id", "version", name="one_version"),
        UniqueConstraint("assignment_id", "request", name="one_request"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    assignment_id: Mapped[int] = mapped_column(ForeignKey("assignment.id"))
    version: Mapped[int]
    request: Mapped[str] = mapped_column(Text)
    sent: Mapped[str] = mapped_column(Text)
    what: Mapped[str] = mapped_column(Text)
    person_id: Mapped[int] = mapped_column(ForeignKey("person.id"))
    done: Mapped[bool]
    content: Mapped[str] = mapped_column(Text)
    saved_at: Mapped[datetime] = mapped_column(Utc)

"""Lists of triggers to judge, who judges them, and every sheet that was saved."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "study",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("settings", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "person",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("code", sa.Text, nullable=False, unique=True),
        sa.Column("role", sa.Text, nullable=False),
    )
    op.create_table(
        "item",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("key", sa.Text, nullable=False, unique=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("cell", sa.Text),
        sa.Column("sign", sa.Integer, nullable=False),
        sa.Column("texts", sa.Text, nullable=False),
    )
    op.create_table(
        "assignment",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("item_id", sa.Integer, sa.ForeignKey("item.id"), nullable=False),
        sa.Column("person_id", sa.Integer, sa.ForeignKey("person.id")),
        sa.Column("place", sa.Integer, nullable=False),
        sa.UniqueConstraint("item_id", "person_id", name="one_assignment"),
    )
    nobody = sa.text("person_id IS NULL")
    op.create_index(
        "one_adjudication",
        "assignment",
        ["item_id"],
        unique=True,
        sqlite_where=nobody,
        postgresql_where=nobody,
    )
    op.create_table(
        "revision",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("assignment_id", sa.Integer, sa.ForeignKey("assignment.id"), nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("sent", sa.Text, nullable=False),
        sa.Column("what", sa.Text, nullable=False),
        sa.Column("person_id", sa.Integer, sa.ForeignKey("person.id"), nullable=False),
        sa.Column("done", sa.Boolean, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
        sa.Column("saved_at", sa.DateTime(timezone=True), nullable=False),
        sa.UniqueConstraint("assignment_id", "version", name="one_version"),
        sa.UniqueConstraint("assignment_id", "request", name="one_request"),
    )

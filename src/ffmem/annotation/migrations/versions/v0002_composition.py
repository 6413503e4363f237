"""Cases of composition to judge: an item may have words, the tops of three vectors."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the words; items that were there before have none."""
    op.add_column("item", sa.Column("words", sa.Text))

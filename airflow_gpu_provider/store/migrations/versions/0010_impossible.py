"""Keep since when a claim that was let in is impossible, so that the next leader goes on counting."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; nothing is known of before."""
    op.add_column("gpu_claim", sa.Column("impossible_since", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    """Remove it, in place: SQLite would copy the table in a batch, and leases would go with the old one."""
    op.drop_column("gpu_claim", "impossible_since")

"""Keep how much of its DAG run a claim completes, so that the next leader ranks it alike."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; nothing is known of claims of before."""
    op.add_column("gpu_claim", sa.Column("completes", sa.Float, nullable=True))


def downgrade() -> None:
    """Remove it, in place: SQLite would copy the table in a batch, and leases would go with the old one."""
    op.drop_column("gpu_claim", "completes")

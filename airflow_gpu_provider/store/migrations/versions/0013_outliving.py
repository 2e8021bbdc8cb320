"""Keep which claims outlive the worker of their task, so that the next leader leaves them alone too."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; claims of before end with their worker."""
    column = sa.Column("outlives_worker", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("gpu_claim", column)


def downgrade() -> None:
    """Remove it, in place: SQLite would copy the table in a batch, and leases would go with the old one."""
    op.drop_column("gpu_claim", "outlives_worker")

"""Keep what finished runs tell of themselves: work done, shards lost."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table of runs."""
    op.create_table(
        "gpu_run",
        sa.Column("lease_id", sa.String(36), primary_key=True),
        sa.Column("task_class", sa.String(250), nullable=True),
        sa.Column("model", sa.String(250), nullable=True),
        sa.Column("devices", sa.Integer, nullable=False),
        sa.Column("nodes", sa.JSON, nullable=False),
        sa.Column("work", sa.Float, nullable=True),
        sa.Column("work_s", sa.Float, nullable=True),
        sa.Column("shards", sa.Integer, nullable=True),
        sa.Column("failures", sa.Integer, nullable=False),
        sa.Column("failed_on", sa.JSON, nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("ix_gpu_run_ended_at", "gpu_run", ["ended_at"])


def downgrade() -> None:
    """Remove it."""
    op.drop_table("gpu_run")

"""Keep whose claim it is, and what became of it when its devices were taken back."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; claims of before are of no team and were never preempted."""
    with op.batch_alter_table("gpu_claim") as table:
        table.add_column(sa.Column("team", sa.String(250), nullable=True))
        table.add_column(sa.Column("preemptible", sa.Boolean, nullable=False, server_default="0"))
        table.add_column(sa.Column("preemptions", sa.Integer, nullable=False, server_default="0"))
        table.add_column(sa.Column("preempted_by", sa.JSON, nullable=False, server_default="[]"))


def downgrade() -> None:
    """Remove them."""
    with op.batch_alter_table("gpu_claim") as table:
        for name in ("preempted_by", "preemptions", "preemptible", "team"):
            table.drop_column(name)

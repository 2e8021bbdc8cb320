"""Let a live lease become more or less than its claim asked for, and be offered a move."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add what a resized lease is, and the offers; leases of before are as their claims asked."""
    with op.batch_alter_table("gpu_lease") as table:
        table.add_column(sa.Column("request", sa.JSON, nullable=True))
        table.add_column(sa.Column("moved_by", sa.String(36), nullable=True))
    with op.batch_alter_table("gpu_lease_device") as table:
        table.add_column(sa.Column("is_offered", sa.Boolean, nullable=False, server_default="0"))
    op.create_table(
        "gpu_offer",
        sa.Column(
            "lease_id", sa.String(36), sa.ForeignKey("gpu_lease.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("devices", sa.JSON, nullable=False),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("phase", sa.String(20), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
    )


def downgrade() -> None:
    """Remove them, and what open offers hold."""
    op.drop_table("gpu_offer")
    op.execute("DELETE FROM gpu_lease_device WHERE is_offered")
    with op.batch_alter_table("gpu_lease_device") as table:
        table.drop_column("is_offered")
    with op.batch_alter_table("gpu_lease") as table:
        for name in ("moved_by", "request"):
            table.drop_column(name)

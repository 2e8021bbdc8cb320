"""Let replicas tell the leader what they wrote, and tell whose agents report to whom."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table of events and the replica of each node."""
    op.create_table(
        "gpu_event",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("claim_id", sa.String(36), nullable=False),
    )
    op.create_index("ix_gpu_claim_ended_at", "gpu_claim", ["ended_at"])
    op.create_index("ix_gpu_claim_submitted_at", "gpu_claim", ["submitted_at"])
    with op.batch_alter_table("gpu_node") as node:
        node.add_column(sa.Column("reported_to", sa.String(250), nullable=True))
        node.create_index("ix_gpu_node_reported_at", ["reported_at"])


def downgrade() -> None:
    """Remove them."""
    with op.batch_alter_table("gpu_node") as node:
        node.drop_index("ix_gpu_node_reported_at")
        node.drop_column("reported_to")
    op.drop_index("ix_gpu_claim_submitted_at", "gpu_claim")
    op.drop_index("ix_gpu_claim_ended_at", "gpu_claim")
    op.drop_table("gpu_event")

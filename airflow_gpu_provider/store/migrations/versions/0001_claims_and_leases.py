"""Create the tables of nodes, claims, leases and the leader."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "gpu_node",
        sa.Column("name", sa.String(250), primary_key=True),
        sa.Column("report", sa.JSON, nullable=False),
        sa.Column("reported_at", _TIME, nullable=False),
    )
    op.create_table(
        "gpu_claim",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("dag_id", sa.String(250), nullable=False),
        sa.Column("run_id", sa.String(250), nullable=False),
        sa.Column("task_id", sa.String(250), nullable=False),
        sa.Column("map_index", sa.Integer, nullable=False),
        sa.Column("try_number", sa.Integer, nullable=False),
        sa.Column("ti_id", sa.String(36)),
        sa.Column("owner", sa.String(500)),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("value", sa.Float, nullable=False),
        sa.Column("run_type", sa.String(20), nullable=False),
        sa.Column("excluded", sa.JSON, nullable=False),
        sa.Column("submitted_at", _TIME, nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("reason_code", sa.String(50)),
        sa.Column("reason", sa.Text),
        sa.Column("position", sa.Integer),
        sa.Column("expected_at", _TIME),
        sa.Column("ended_at", _TIME),
        sa.UniqueConstraint(
            "dag_id", "run_id", "task_id", "map_index", "try_number", name="uq_gpu_claim_key"
        ),
    )
    op.create_index("ix_gpu_claim_state", "gpu_claim", ["state"])
    op.create_table(
        "gpu_lease",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column(
            "claim_id", sa.String(36), sa.ForeignKey("gpu_claim.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("match_degree", sa.Float, nullable=False),
        sa.Column("granted_at", _TIME, nullable=False),
        sa.Column("collected_at", _TIME),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.Column("ended_at", _TIME),
        sa.Column("end_reason", sa.String(50)),
        sa.Column("outcome", sa.String(250)),
        sa.Column("failed_devices", sa.JSON),
        sa.UniqueConstraint("claim_id", name="uq_gpu_lease_claim"),
    )
    op.create_index("ix_gpu_lease_ended_at", "gpu_lease", ["ended_at"])
    op.create_table(
        "gpu_lease_device",
        sa.Column(
            "lease_id", sa.String(36), sa.ForeignKey("gpu_lease.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("device_id", sa.String(250), primary_key=True),
        sa.Column("node", sa.String(250), nullable=False),
        sa.Column("rank", sa.Integer, nullable=False),
        sa.Column("is_spare", sa.Integer, nullable=False),
        sa.Column("ended_at", _TIME),
    )
    live = sa.text("ended_at IS NULL")
    op.create_index(
        "uq_gpu_lease_device_live",
        "gpu_lease_device",
        ["device_id"],
        unique=True,
        sqlite_where=live,
        postgresql_where=live,
    )
    op.create_table(
        "gpu_leader",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("holder", sa.String(250), nullable=False),
        sa.Column("term", sa.Integer, nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
    )


def downgrade() -> None:
    """Remove the tables."""
    for table in ("gpu_leader", "gpu_lease_device", "gpu_lease", "gpu_claim", "gpu_node"):
        op.drop_table(table)

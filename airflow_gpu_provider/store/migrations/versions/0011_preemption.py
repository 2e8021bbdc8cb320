"""Let a lease be taken back for another claim, and its own claim wait again under the same id.

A claim may have had several leases then, of which at most one is live.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_NAME = "uq_gpu_lease_claim"
_LIVE = sa.text("ended_at IS NULL")


def upgrade() -> None:
    """Add the columns, and let only live leases of a claim be unique."""
    with op.batch_alter_table("gpu_lease") as table:
        table.add_column(sa.Column("checkpoint_at", sa.DateTime(timezone=True), nullable=True))
        table.add_column(sa.Column("ends_for", sa.String(36), nullable=True))
        table.add_column(sa.Column("ends_at", sa.DateTime(timezone=True), nullable=True))
        table.add_column(sa.Column("ends_why", sa.Text, nullable=True))
        table.drop_constraint(_NAME, type_="unique")
    op.create_index(_NAME, "gpu_lease", ["claim_id"], unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE)
    ends = sa.text("ends_for IS NOT NULL")
    op.create_index(
        "ix_gpu_lease_ends_for", "gpu_lease", ["ends_for"], sqlite_where=ends, postgresql_where=ends
    )


def downgrade() -> None:
    """Remove them; raise IntegrityError while a claim has had several leases."""
    op.drop_index("ix_gpu_lease_ends_for", "gpu_lease")
    op.drop_index(_NAME, "gpu_lease")
    with op.batch_alter_table("gpu_lease") as table:
        table.create_unique_constraint(_NAME, ["claim_id"])
        for name in ("ends_why", "ends_at", "ends_for", "checkpoint_at"):
            table.drop_column(name)

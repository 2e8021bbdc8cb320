"""Keep what people took out of service."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table of drains."""
    op.create_table(
        "gpu_drain",
        sa.Column("scope", sa.String(10), primary_key=True),
        sa.Column("target", sa.String(250), primary_key=True),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("by", sa.String(250), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=True),
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_table("gpu_drain")

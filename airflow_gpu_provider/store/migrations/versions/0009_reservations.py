"""Keep what people reserved ahead."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table of reservations."""
    op.create_table(
        "gpu_reservation",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("starts_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ends_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("by", sa.String(250), nullable=False),
        sa.Column("team", sa.String(250), nullable=True),
        sa.Column("dag_id", sa.String(250), nullable=True),
        sa.Column("devices", sa.JSON, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("model", sa.String(250), nullable=True),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("kept", sa.JSON, nullable=False),
    )


def downgrade() -> None:
    """Remove it."""
    op.drop_table("gpu_reservation")

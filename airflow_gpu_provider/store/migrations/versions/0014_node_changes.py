"""Number what is written of a node, so that replicas read again only what changed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.schema import CreateSequence, DropSequence

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_CHANGES = sa.Sequence("gpu_node_change")


def upgrade() -> None:
    """Add the number; SQLite has no sequences, and no second replica either."""
    op.add_column("gpu_node", sa.Column("change", sa.BigInteger, nullable=False, server_default="0"))
    if op.get_context().dialect.supports_sequences:
        op.execute(CreateSequence(_CHANGES))


def downgrade() -> None:
    """Remove it, in place."""
    if op.get_context().dialect.supports_sequences:
        op.execute(DropSequence(_CHANGES))
    op.drop_column("gpu_node", "change")

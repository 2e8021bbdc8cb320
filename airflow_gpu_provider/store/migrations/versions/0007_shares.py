"""Let several live leases share a device, never more of it than there is.

The database keeps that itself, without a statement of the leader: whole devices by the unique index, shares
beside shares and beside whole devices by a trigger. Grants are written one turn after another, since each
turn holds the leader's row, so what the trigger sums up cannot change meanwhile. On SQLite a migration that
makes `gpu_lease_device` anew loses its triggers and must create them again.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_LIVE = "ended_at IS NULL"
_WHOLE = "ended_at IS NULL AND milli = 1000"
_SHARED = "ended_at IS NULL AND milli < 1000"

#: What others hold of the device; two sums, each by one of the indexes.
_OTHERS = """(SELECT count(*) * 1000 FROM gpu_lease_device WHERE device_id = NEW.device_id
      AND lease_id <> NEW.lease_id AND ended_at IS NULL AND milli = 1000)
  + (SELECT coalesce(sum(milli), 0) FROM gpu_lease_device WHERE device_id = NEW.device_id
      AND lease_id <> NEW.lease_id AND ended_at IS NULL AND milli < 1000)"""

_POSTGRESQL = f"""CREATE OR REPLACE FUNCTION gpu_lease_device_room() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF NEW.milli + {_OTHERS} > 1000 THEN
    RAISE EXCEPTION 'the live leases of device % exceed it', NEW.device_id USING ERRCODE = 'check_violation';
  END IF;
  RETURN NEW;
END $$"""
_SQLITE = """CREATE TRIGGER gpu_lease_device_room_{when} BEFORE {event} ON gpu_lease_device
WHEN NEW.ended_at IS NULL AND NEW.milli + {others} > 1000
BEGIN SELECT RAISE(ABORT, 'the live leases of a device exceed it'); END"""


def upgrade() -> None:
    """Add the column, the indexes and the triggers; leases of before hold whole devices."""
    with op.batch_alter_table("gpu_lease_device") as table:
        table.add_column(sa.Column("milli", sa.Integer, nullable=False, server_default="1000"))
    with op.batch_alter_table("gpu_offer") as table:
        table.add_column(sa.Column("shares", sa.JSON, nullable=False, server_default="[]"))
    op.drop_index("uq_gpu_lease_device_live", "gpu_lease_device")
    _index("uq_gpu_lease_device_live", _WHOLE, unique=True)
    _index("ix_gpu_lease_device_shared", _SHARED, unique=False)
    if op.get_context().dialect.name == "postgresql":
        op.execute(_POSTGRESQL)
        op.execute(
            "CREATE TRIGGER gpu_lease_device_room BEFORE INSERT OR UPDATE OF milli ON gpu_lease_device "
            "FOR EACH ROW WHEN (NEW.ended_at IS NULL) EXECUTE FUNCTION gpu_lease_device_room()"
        )
    else:
        for when, event in (("added", "INSERT"), ("changed", "UPDATE OF milli")):
            op.execute(_SQLITE.format(when=when, event=event, others=_OTHERS))


def downgrade() -> None:
    """Remove them; raise IntegrityError while a device is shared."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("DROP TRIGGER gpu_lease_device_room ON gpu_lease_device")
        op.execute("DROP FUNCTION gpu_lease_device_room()")
    else:
        for when in ("added", "changed"):
            op.execute(f"DROP TRIGGER gpu_lease_device_room_{when}")
    op.drop_index("ix_gpu_lease_device_shared", "gpu_lease_device")
    op.drop_index("uq_gpu_lease_device_live", "gpu_lease_device")
    _index("uq_gpu_lease_device_live", _LIVE, unique=True)
    with op.batch_alter_table("gpu_lease_device") as table:
        table.drop_column("milli")
    with op.batch_alter_table("gpu_offer") as table:
        table.drop_column("shares")


def _index(name: str, where: str, *, unique: bool) -> None:
    condition = sa.text(where)
    op.create_index(
        name,
        "gpu_lease_device",
        ["device_id"],
        unique=unique,
        sqlite_where=condition,
        postgresql_where=condition,
    )

"""The broker's tables.

Invariants that the database itself keeps: a task try has one claim; the live leases of a device never exceed
it (a partial unique index for whole devices, a trigger for shares, see migration 0007); a leader's write
carries its term. "Used" is never stored: it is the live leases. All names start with `gpu_`, since the tables
may live beside Airflow's own. Queries are in `repository`.
"""

from __future__ import annotations

from datetime import datetime, timezone

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Sequence,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    and_,
    false,
)
from sqlalchemy.engine import Dialect

VERSION_TABLE = "gpu_alembic_version"

metadata = MetaData()


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC in Python, whatever the database keeps (SQLite forgets the zone)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse naive times: they would be stored in an unknown zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"naive datetime {value!r}")
        return value.astimezone(timezone.utc)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Put the zone back."""
        if value is None:
            return None
        return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value.astimezone(timezone.utc)


#: numbers what is written of nodes; each number is given once, by whichever replica
node_change = Sequence("gpu_node_change", metadata=metadata)

node = Table(
    "gpu_node",
    metadata,
    Column("name", String(250), primary_key=True),
    Column("report", JSON, nullable=False),  # reports.NodeReport
    Column("reported_at", UtcDateTime, nullable=False),
    Column("reported_to", String(250), nullable=True),  # the replica that its agent talks to
    Column("change", BigInteger, nullable=False, server_default="0"),  # another with each report written
    Index("ix_gpu_node_reported_at", "reported_at"),
)

claim = Table(
    "gpu_claim",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("dag_id", String(250), nullable=False),
    Column("run_id", String(250), nullable=False),
    Column("task_id", String(250), nullable=False),
    Column("map_index", Integer, nullable=False),
    Column("try_number", Integer, nullable=False),
    Column("ti_id", String(36), nullable=True),
    Column("owner", String(500), nullable=True),
    Column("request", JSON, nullable=False),  # wire.RequestBody
    Column("value", Float, nullable=False),
    Column("run_type", String(20), nullable=False),
    Column("excluded", JSON, nullable=False),  # device ids
    Column("team", String(250), nullable=True),
    Column("preemptible", Boolean, nullable=False),
    Column("outlives_worker", Boolean, nullable=False),
    Column("completes", Float, nullable=True),  # part of its DAG run that is done once it is
    Column("preemptions", Integer, nullable=False),
    Column("preempted_by", JSON, nullable=False),  # claim ids
    Column("submitted_at", UtcDateTime, nullable=False),
    Column("state", String(20), nullable=False),
    Column("reason_code", String(50), nullable=True),
    Column("reason", Text, nullable=True),
    Column("position", Integer, nullable=True),
    Column("expected_at", UtcDateTime, nullable=True),
    Column("impossible_since", UtcDateTime, nullable=True),  # the fleet shrank and cannot run it
    Column("ended_at", UtcDateTime, nullable=True),
    UniqueConstraint("dag_id", "run_id", "task_id", "map_index", "try_number", name="uq_gpu_claim_key"),
    Index("ix_gpu_claim_state", "state"),
    Index("ix_gpu_claim_ended_at", "ended_at"),
    Index("ix_gpu_claim_submitted_at", "submitted_at"),
)

lease = Table(
    "gpu_lease",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("claim_id", String(36), ForeignKey("gpu_claim.id", ondelete="CASCADE"), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("match_degree", Float, nullable=False),
    Column("granted_at", UtcDateTime, nullable=False),
    Column("collected_at", UtcDateTime, nullable=True),
    Column("expires_at", UtcDateTime, nullable=False),
    Column("ended_at", UtcDateTime, nullable=True),
    Column("end_reason", String(50), nullable=True),
    Column("outcome", String(250), nullable=True),
    Column("failed_devices", JSON, nullable=True),
    Column("request", JSON, nullable=True),  # wire.RequestBody of a resized lease; null: the claim's
    Column("moved_by", String(36), nullable=True),  # the offer that it committed last
    Column("checkpoint_at", UtcDateTime, nullable=True),  # when its holder last saved its work
    Column("ends_for", String(36), nullable=True),  # the claim that it is, or was, taken back for
    Column("ends_at", UtcDateTime, nullable=True),  # then at the latest
    Column("ends_why", Text, nullable=True),
    Index("ix_gpu_lease_ended_at", "ended_at"),
)
for _name, _unique, _column, _only in (
    ("uq_gpu_lease_claim", True, lease.c.claim_id, lease.c.ended_at.is_(None)),
    ("ix_gpu_lease_ends_for", False, lease.c.ends_for, lease.c.ends_for.is_not(None)),
):
    Index(_name, _column, unique=_unique, sqlite_where=_only, postgresql_where=_only)

lease_device = Table(
    "gpu_lease_device",
    metadata,
    Column("lease_id", String(36), ForeignKey("gpu_lease.id", ondelete="CASCADE"), primary_key=True),
    Column("device_id", String(250), primary_key=True),
    Column("node", String(250), nullable=False),
    Column("rank", Integer, nullable=False),  # order of the members, then of the spares
    Column("is_spare", Integer, nullable=False),
    # held for a move of the lease, not its own yet
    Column("is_offered", Boolean, nullable=False, server_default=false()),
    Column("milli", Integer, nullable=False, server_default="1000"),  # of 1000 = the whole device
    Column("ended_at", UtcDateTime, nullable=True),
)
for _name, _unique, _part in (
    ("uq_gpu_lease_device_live", True, lease_device.c.milli == 1000),
    ("ix_gpu_lease_device_shared", False, lease_device.c.milli < 1000),
):
    _where = and_(lease_device.c.ended_at.is_(None), _part)
    Index(_name, lease_device.c.device_id, unique=_unique, sqlite_where=_where, postgresql_where=_where)

# A move that a live lease is offered.
offer = Table(
    "gpu_offer",
    metadata,
    Column("lease_id", String(36), ForeignKey("gpu_lease.id", ondelete="CASCADE"), primary_key=True),
    Column("id", String(36), nullable=False),
    Column("devices", JSON, nullable=False),  # all devices after the move, members first
    Column("request", JSON, nullable=False),  # wire.RequestBody after the move
    Column(
        "shares", JSON, nullable=False, server_default="[]"
    ),  # milli of each device; empty = whole devices
    Column("phase", String(20), nullable=False),  # broker.move.OfferPhase
    Column("expires_at", UtcDateTime, nullable=False),
)

leader = Table(
    "gpu_leader",
    metadata,
    Column("id", Integer, primary_key=True),  # one row, id 1
    Column("holder", String(250), nullable=False),
    Column("term", Integer, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
)

# What replicas that do not lead wrote, until the leader took note of it.
event = Table(
    "gpu_event",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("claim_id", String(36), nullable=False),
)

# What only the leader can answer, asked by other replicas for their callers.
ask = Table(
    "gpu_ask",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("claim_id", String(36), nullable=False),
    Column("kind", String(20), nullable=False),  # a request of server.changes
    Column("body", JSON, nullable=False),
    Column("asked_at", UtcDateTime, nullable=False),
    Column("answer", JSON, nullable=True),
)

# What people took out of service; what agents found wrong is in the reports.
drain = Table(
    "gpu_drain",
    metadata,
    Column("scope", String(10), primary_key=True),  # node | device
    Column("target", String(250), primary_key=True),
    Column("reason", Text, nullable=False),
    Column("by", String(250), nullable=False),
    Column("since", UtcDateTime, nullable=False),
    Column("until", UtcDateTime, nullable=True),
)

# What finished runs told of themselves, a row for each lease. It outlives claims: it is what is learned from.
run = Table(
    "gpu_run",
    metadata,
    Column("lease_id", String(36), primary_key=True),
    Column("task_class", String(250), nullable=True),
    Column("model", String(250), nullable=True),  # NULL: of several models
    Column("devices", Integer, nullable=False),
    Column("nodes", JSON, nullable=False),
    Column("work", Float, nullable=True),  # NULL: not told, or not comparable
    Column("work_s", Float, nullable=True),
    Column("shards", Integer, nullable=True),  # NULL: no training
    Column("failures", Integer, nullable=False),
    Column("failed_on", JSON, nullable=False),  # nodes
    Column("ended_at", UtcDateTime, nullable=False),
    Index("ix_gpu_run_ended_at", "ended_at"),
)

# What people reserved ahead; which devices are kept for it is the leader's choice.
reservation = Table(
    "gpu_reservation",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("starts_at", UtcDateTime, nullable=False),
    Column("ends_at", UtcDateTime, nullable=False),
    Column("by", String(250), nullable=False),
    Column("team", String(250), nullable=True),
    Column("dag_id", String(250), nullable=True),
    Column("devices", JSON, nullable=False),  # named ones; empty: `number` of `model`
    Column("number", Integer, nullable=False),
    Column("model", String(250), nullable=True),
    Column("reason", Text, nullable=False),
    Column("kept", JSON, nullable=False),
)

"""What a cycle reads and writes: one snapshot in, one fenced transaction out.

The leader decides on a snapshot that may be a little old by the time it writes. Each write therefore states
what it relied on (still pending, still expired), and the unique index on live devices has the last word.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from sqlalchemy import Connection, Engine, Row, insert, select, update

from airflow_gpu_provider.broker.model import (
    Claim,
    ClaimId,
    Decisions,
    DeviceId,
    Lease,
    LeaseId,
    Placement,
    RunType,
    Waiting,
)
from airflow_gpu_provider.store.engine import WRITES
from airflow_gpu_provider.store.leadership import Term, fence
from airflow_gpu_provider.store.tables import claim, lease, lease_device
from airflow_gpu_provider.wire import ClaimState, RequestBody

_MOVED_S = 5.0  # an expected start that moved by less is not worth a write


@dataclass(slots=True)
class Written:
    """What came of a cycle's decisions."""

    granted: list[ClaimId] = field(default_factory=list)
    rejected: list[ClaimId] = field(default_factory=list)
    ended: list[LeaseId] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.granted or self.rejected or self.ended)


class DecisionStore:
    """The tables as the leader's cycle sees them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def load(self) -> tuple[tuple[Lease, ...], tuple[Claim, ...]]:
        """Return the live leases and the pending claims."""
        with self._engine.connect() as connection:
            held: dict[str, list[DeviceId]] = {}
            for row in connection.execute(
                select(lease_device.c.lease_id, lease_device.c.device_id)
                .where(lease_device.c.ended_at.is_(None))
                .order_by(lease_device.c.lease_id, lease_device.c.is_spare, lease_device.c.rank)
            ):
                held.setdefault(row.lease_id, []).append(DeviceId(row.device_id))
            leases = connection.execute(
                select(lease, claim.c.request)
                .join(claim, claim.c.id == lease.c.claim_id)
                .where(lease.c.ended_at.is_(None))
                .order_by(lease.c.granted_at, lease.c.id)
            ).all()
            claims = connection.execute(
                select(claim).where(claim.c.state == ClaimState.PENDING.value).order_by(claim.c.submitted_at)
            ).all()
        return tuple(_lease(row, held.get(row.id, [])) for row in leases), tuple(
            _claim(row) for row in claims
        )

    def write(
        self,
        term: Term,
        decisions: Decisions,
        *,
        now: datetime,
        collect_within_s: float,
        node_of: Mapping[DeviceId, str],
    ) -> Written:
        """Write a cycle's decisions in one transaction.

        Raise StaleTerm when another replica leads by now, IntegrityError when a device of a placement was
        leased meanwhile; nothing is written then.
        """
        written = Written()
        with self._engine.connect().execution_options(**WRITES) as connection, connection.begin():
            fence(connection, term)
            written.ended = _expire(connection, decisions.expired, now)
            for rejection in decisions.rejections:
                values = {"reason_code": rejection.reason.code.value, "reason": rejection.reason.text}
                if _leave_pending(
                    connection, rejection.claim_id, ClaimState.REJECTED, ended_at=now, **values
                ):
                    written.rejected.append(rejection.claim_id)
            for placement in decisions.placements:
                if _leave_pending(connection, placement.claim_id, ClaimState.GRANTED):
                    _grant(connection, placement, now, collect_within_s, node_of)
                    written.granted.append(placement.claim_id)
            _note_waiting(connection, decisions.waiting, now)
        return written


def _claim(row: Row[tuple[object, ...]]) -> Claim:
    return Claim(
        id=ClaimId(row.id),
        request=RequestBody.model_validate(row.request).to_request(),
        submitted_at=row.submitted_at,
        value=row.value,
        run_type=RunType(row.run_type),
        excluded=frozenset(DeviceId(d) for d in row.excluded),
    )


def _lease(row: Row[tuple[object, ...]], devices: list[DeviceId]) -> Lease:
    return Lease(
        id=LeaseId(row.id),
        claim_id=ClaimId(row.claim_id),
        devices=tuple(devices),
        request=RequestBody.model_validate(row.request).to_request(),
        granted_at=row.granted_at,
        expires_at=row.expires_at,
    )


def _leave_pending(connection: Connection, claim_id: ClaimId, state: ClaimState, **values: object) -> bool:
    """Move a claim on, unless it is no longer pending (cancelled meanwhile)."""
    cleared = {"position": None, "expected_at": None, "reason_code": None, "reason": None, **values}
    result = connection.execute(
        update(claim)
        .where(claim.c.id == claim_id, claim.c.state == ClaimState.PENDING.value)
        .values(state=state.value, **cleared)
    )
    return result.rowcount == 1


def _grant(
    connection: Connection,
    placement: Placement,
    now: datetime,
    collect_within_s: float,
    node_of: Mapping[DeviceId, str],
) -> None:
    lease_id = str(uuid.uuid4())
    connection.execute(
        insert(lease).values(
            id=lease_id,
            claim_id=placement.claim_id,
            epoch=1,
            match_degree=placement.match_degree,
            granted_at=now,
            expires_at=now + timedelta(seconds=collect_within_s),
        )
    )
    rows = [
        {
            "lease_id": lease_id,
            "device_id": device,
            "node": node_of[device],
            "rank": rank,
            "is_spare": is_spare,
        }
        for is_spare, devices in ((0, placement.devices), (1, placement.spares))
        for rank, device in enumerate(devices)
    ]
    connection.execute(insert(lease_device), rows)


def _expire(connection: Connection, leases: Iterable[LeaseId], now: datetime) -> list[LeaseId]:
    """End the leases that are still expired: a renewal may have come since the snapshot."""
    ended = []
    for lease_id in leases:
        still = lease.c.expires_at <= now
        if end_lease(connection, lease_id, now=now, reason="expired", only_if=still):
            ended.append(lease_id)
    return ended


def end_lease(
    connection: Connection,
    lease_id: str,
    *,
    now: datetime,
    reason: str,
    outcome: str | None = None,
    failed_devices: Iterable[str] = (),
    only_if: object = True,
) -> bool:
    """End a live lease, its devices and its claim; return False when it is not live (or not `only_if`)."""
    result = connection.execute(
        update(lease)
        .where(lease.c.id == lease_id, lease.c.ended_at.is_(None), only_if)  # type: ignore[arg-type]
        .values(ended_at=now, end_reason=reason, outcome=outcome, failed_devices=list(failed_devices))
    )
    if result.rowcount != 1:
        return False
    connection.execute(
        update(lease_device)
        .where(lease_device.c.lease_id == lease_id, lease_device.c.ended_at.is_(None))
        .values(ended_at=now)
    )
    connection.execute(
        update(claim)
        .where(claim.c.id == select(lease.c.claim_id).where(lease.c.id == lease_id).scalar_subquery())
        .values(state=ClaimState.ENDED.value, ended_at=now, reason_code=reason)
    )
    return True


def _note_waiting(connection: Connection, waiting: Iterable[Waiting], now: datetime) -> None:
    """Write where pending claims stand, only where it changed: most cycles change nothing for most claims."""
    notes = {w.claim_id: w for w in waiting}
    if not notes:
        return
    rows = connection.execute(
        select(claim.c.id, claim.c.position, claim.c.reason_code, claim.c.reason, claim.c.expected_at).where(
            claim.c.state == ClaimState.PENDING.value
        )
    ).all()
    for row in rows:
        note = notes.get(row.id)
        if note is None:
            continue
        expected_at = None if note.starts_in_s is None else now + timedelta(seconds=note.starts_in_s)
        same = (row.position, row.reason_code, row.reason) == (
            note.position,
            note.reason.code.value,
            note.reason.text,
        )
        if same and not _moved(row.expected_at, expected_at):
            continue
        connection.execute(
            update(claim)
            .where(claim.c.id == row.id)
            .values(
                position=note.position,
                reason_code=note.reason.code.value,
                reason=note.reason.text,
                expected_at=expected_at,
            )
        )


def _moved(old: datetime | None, new: datetime | None) -> bool:
    if old is None or new is None:
        return old is not new
    return abs((new - old).total_seconds()) > _MOVED_S

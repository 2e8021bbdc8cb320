"""Claims and leases in the tables: for looking, and for requests to a replica that does not lead.

Every call is one transaction and can be repeated: the key of a claim is the task try, a lease is addressed
by id and epoch. What is written here is noted as an event, for the leader keeps its own picture; what the
leader itself writes goes through `turns`.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Row,
    and_,
    case,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from airflow_gpu_provider.store.endings import end_lease, why_lost
from airflow_gpu_provider.store.engine import looking, writing
from airflow_gpu_provider.store.history import DeviceOf, FinishedRun, finished_run, run_row
from airflow_gpu_provider.store.preemptions import Kept, kept_for, release_preempted
from airflow_gpu_provider.store.rows import (
    MOST_NAMED,
    OF_CLAIM,
    ClaimPart,
    ClaimRow,
    StoredLease,
    new_claim_row,
    with_devices,
)
from airflow_gpu_provider.store.script import StepByStep, one_of
from airflow_gpu_provider.store.tables import claim, lease, run
from airflow_gpu_provider.store.tries import PassedOn, failed_devices, may_pass_on, pass_on
from airflow_gpu_provider.store.turns import Overtaken, note_event
from airflow_gpu_provider.wire import (
    PREEMPTED,
    ClaimBody,
    ClaimState,
    ReleaseBody,
    RequestBody,
    TaskKey,
)


class Repository:
    """The tables as requests see them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # -- claims
    def submit(
        self, body: ClaimBody, *, now: datetime, usable: Collection[str], suspects: Collection[str] = ()
    ) -> str:
        """Store a claim and return its id; the same key returns the same id.

        An earlier try of the same task is over when a later one asks. Its live lease passes to the new try
        under a new epoch when the request is the same and all its devices are `usable`; otherwise it ends.
        Devices on which earlier tries failed are excluded, and those they held that are `suspects` now.
        """
        try:
            with writing(self._engine) as connection:
                return self._submit(connection, body, now, usable, suspects)
        except IntegrityError:  # the same key raced us: its claim is the one
            with self._engine.connect() as connection:
                return str(connection.execute(select(claim.c.id).where(_same_try(body.key))).scalar_one())

    def _submit(
        self,
        connection: Connection,
        body: ClaimBody,
        now: datetime,
        usable: Collection[str],
        suspects: Collection[str],
    ) -> str:
        known = connection.execute(select(claim).where(_same_try(body.key))).one_or_none()
        if known is not None:
            is_over = ClaimState(known.state).is_terminal
            if not (is_over and known.ti_id and body.ti_id and known.ti_id != body.ti_id):
                return str(known.id)
            # A run that was deleted and made again under the same id: the old claim is not this task's.
            connection.execute(delete(claim).where(claim.c.id == known.id))
        claim_id = str(uuid.uuid4())
        task = (body.key.dag_id, body.key.run_id, body.key.task_id, body.key.map_index)
        excluded = failed_devices(connection, [task], suspects).get(task, set())
        connection.execute(insert(claim).values(new_claim_row(claim_id, body, excluded, now)))
        self._supersede(connection, body, claim_id, now, usable)
        note_event(connection, claim_id)
        return claim_id

    def _supersede(
        self, connection: Connection, body: ClaimBody, claim_id: str, now: datetime, usable: Collection[str]
    ) -> None:
        earlier = and_(_same_task(body.key), claim.c.try_number < body.key.try_number)
        withdrawn = connection.execute(
            update(claim)
            .where(earlier, claim.c.state == ClaimState.PENDING.value)
            .values(state=ClaimState.CANCELLED.value, ended_at=now, reason_code="superseded")
            .returning(claim.c.id)
        )
        for row in withdrawn.all():
            note_event(connection, row.id)
        live = connection.execute(
            select(lease, claim.c.request.label("asked"))
            .join(claim, claim.c.id == lease.c.claim_id)
            .where(earlier, lease.c.ended_at.is_(None), lease.c.expires_at > now)
            .with_for_update(of=lease)
        ).all()
        passed_on = False
        for held in with_devices(connection, live):
            row, devices = held.row, (*held.devices, *held.spares)
            request = RequestBody.model_validate(row.request or row.asked)
            fits = row.ends_for is None and may_pass_on(request, devices, body.request, usable)
            if not passed_on and fits:
                passed = PassedOn(row.id, row.claim_id, claim_id, row.epoch + 1)
                pass_on(StepByStep(connection), passed, now, Overtaken(f"lease {row.id} ended meanwhile"))
                granted = update(claim).where(claim.c.id == claim_id)
                connection.execute(granted.values(state=ClaimState.GRANTED.value))
                passed_on = True
            else:
                end_lease(connection, row.id, now=now, reason="superseded")
            note_event(connection, row.claim_id)

    def claims_and_leases(self, claim_ids: Sequence[str]) -> list[tuple[ClaimRow, StoredLease | None]]:
        """Return the claims with these ids and what they hold, unknown ones left out."""
        found: list[ClaimRow] = []
        with looking(self._engine) as connection:
            for start in range(0, len(claim_ids), MOST_NAMED):
                part = claim_ids[start : start + MOST_NAMED]
                found += connection.execute(select(claim).where(claim.c.id.in_(part))).all()
            granted = [row.id for row in found if row.state == ClaimState.GRANTED.value]
            held = {row.id: lease for lease, row in _live_leases(connection, granted)} if granted else {}
        return [(row, held.get(row.id)) for row in found]

    def open_claims(self) -> list[tuple[ClaimRow, StoredLease | None]]:
        """Return all claims that wait, next first, then those that hold devices with what they hold."""
        with looking(self._engine) as connection:
            waiting = [(row, None) for row in connection.execute(_PENDING).all()]
            return waiting + [(row, held) for held, row in _live_leases(connection)]

    def cancel(self, claim_id: str, *, now: datetime, reason: str = "cancelled") -> bool:
        """Withdraw a pending claim, or end the lease of a granted one; return False when neither was left."""
        with writing(self._engine) as connection:
            # Locked, or another replica could pass it on before it ends here.
            held = connection.execute(
                select(lease.c.id)
                .where(lease.c.claim_id == claim_id, lease.c.ended_at.is_(None))
                .with_for_update()
            ).scalar_one_or_none()
            note_event(connection, claim_id)
            if held is not None:
                return end_lease(connection, held, now=now, reason=reason)
            result = connection.execute(
                update(claim)
                .where(claim.c.id == claim_id, claim.c.state == ClaimState.PENDING.value)
                .values(state=ClaimState.CANCELLED.value, ended_at=now, reason_code=reason, position=None)
            )
            return bool(result.rowcount)

    # -- leases
    def lease_of(self, claim_id: str, *, now: datetime, ttl_s: float) -> StoredLease | None:
        """Return the live lease of a claim; the first look is the collection and starts its TTL."""
        with writing(self._engine) as connection:
            connection.execute(
                update(lease)
                .where(
                    lease.c.claim_id == claim_id, lease.c.ended_at.is_(None), lease.c.collected_at.is_(None)
                )
                .values(collected_at=now, expires_at=now + timedelta(seconds=ttl_s))
            )
            note_event(connection, claim_id)
            row = connection.execute(
                select(lease).where(lease.c.claim_id == claim_id, lease.c.ended_at.is_(None))
            ).one_or_none()
            return None if row is None else with_devices(connection, [row])[0]

    def live_leases(self, claim_ids: Sequence[str] | None = None) -> list[tuple[StoredLease, ClaimRow]]:
        """Return the live leases (of these claims) with their claims, oldest first."""
        with looking(self._engine) as connection:
            return _live_leases(connection, claim_ids)

    def renew(
        self, lease_id: str, epoch: int, *, now: datetime, ttl_s: float, saved_at: datetime | None = None
    ) -> Row[Any]:
        """Keep a lease for another TTL, or until it has to end, and return it.

        Raise LeaseLost when it ended or passed to a later epoch.
        """
        until = now + timedelta(seconds=ttl_s)
        ends_first = case((lease.c.ends_at < until, lease.c.ends_at), else_=until)
        saved = {} if saved_at is None else {"checkpoint_at": saved_at}
        with writing(self._engine) as connection:
            row = connection.execute(
                update(lease)
                .where(lease.c.id == lease_id, lease.c.epoch == epoch, lease.c.ended_at.is_(None))
                .values(expires_at=ends_first, **saved)
                .returning(lease)
            ).one_or_none()
            if row is not None:
                note_event(connection, row.claim_id)
                return row
            raise why_lost(connection, lease_id, epoch)

    def release(self, lease_id: str, body: ReleaseBody, *, now: datetime, device_of: DeviceOf) -> bool:
        """Give a lease back; return False when it had ended already. Raise LeaseLost for an old epoch."""
        with writing(self._engine) as connection:
            of_id = select(lease).where(lease.c.id == lease_id).with_for_update()
            row = connection.execute(of_id).one_or_none()
            if row is None or row.epoch != body.epoch:
                raise why_lost(connection, lease_id, body.epoch)
            note_event(connection, row.claim_id)
            if body.outcome == PREEMPTED:
                ended = Overtaken(f"lease {lease_id} ended meanwhile")
                failed = body.failed_devices
                return release_preempted(connection, row, now=now, failed_devices=failed, otherwise=ended)
            told = _told(connection, row, body, now, device_of) if body.tells_history else None
            has_ended = end_lease(
                connection,
                lease_id,
                now=now,
                reason="released",
                outcome=body.outcome,
                failed_devices=body.failed_devices,
            )
            if has_ended and told is not None:
                connection.execute(insert(run).values(run_row(told)))
            return has_ended

    def kept_for(self, claim_ids: Sequence[str], since: datetime) -> list[Kept]:
        """Return the leases that ended for these claims since then, and what is left of them."""
        with self._engine.connect() as connection:
            return kept_for(connection, claim_ids, since)


def _live_leases(
    connection: Connection, claim_ids: Sequence[str] | None = None
) -> list[tuple[StoredLease, ClaimRow]]:
    statement = (
        select(lease, *(column.label(f"{OF_CLAIM}{column.name}") for column in claim.c))
        .join(claim, lease.c.claim_id == claim.c.id)
        .where(lease.c.ended_at.is_(None))
        .order_by(lease.c.granted_at, lease.c.id)
    )
    values: dict[str, list[str]] = {}
    if claim_ids is not None:
        statement, values = statement.where(one_of(lease.c.claim_id, "ids")), {"ids": list(claim_ids)}
    rows = connection.execute(statement, values).all()
    return [(held, ClaimPart(held.row)) for held in with_devices(connection, rows)]


_PENDING = (
    select(claim)
    .where(claim.c.state == ClaimState.PENDING.value)
    .order_by(claim.c.position.is_(None), claim.c.position, claim.c.submitted_at)
)


def _told(
    connection: Connection, row: Row[Any], body: ReleaseBody, now: datetime, device_of: DeviceOf
) -> FinishedRun | None:
    asked = connection.execute(select(claim.c.request).where(claim.c.id == row.claim_id)).scalar_one()
    request = RequestBody.model_validate(asked)
    (held,) = with_devices(connection, [row])
    return finished_run(
        body,
        lease_id=row.id,
        request=request,
        members=held.devices,
        was_changed=row.request is not None or row.moved_by is not None,
        device_of=device_of,
        now=now,
    )


def _same_task(key: TaskKey) -> ColumnElement[bool]:
    return and_(
        claim.c.dag_id == key.dag_id,
        claim.c.run_id == key.run_id,
        claim.c.task_id == key.task_id,
        claim.c.map_index == key.map_index,
    )


def _same_try(key: TaskKey) -> ColumnElement[bool]:
    return and_(_same_task(key), claim.c.try_number == key.try_number)

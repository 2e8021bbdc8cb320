"""How leases are taken back in the tables: marked for a claim, then ended while their own claims wait again.

What a victim held is the other claim's from then on. The leader keeps that in memory; `kept_for` tells it to
the next leader. A renewal that another replica writes moves an end no further than the mark says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select, update

from airflow_gpu_provider.broker.preemption import made_way
from airflow_gpu_provider.store.endings import Ending, give_up
from airflow_gpu_provider.store.script import Row as Values
from airflow_gpu_provider.store.script import Script, StepByStep, one_of
from airflow_gpu_provider.store.tables import claim, lease, lease_device
from airflow_gpu_provider.wire import PREEMPTED, ClaimState


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A live lease that has to end for a claim."""

    lease_id: str
    for_claim: str
    ends_at: datetime
    why: str


@dataclass(frozen=True, slots=True)
class WaitsAgain:
    """A lease that ends as preempted, and its claim, which waits again."""

    lease_id: str
    claim_id: str
    preemptions: int
    preempted_by: tuple[str, ...]
    outcome: str | None = None
    failed_devices: tuple[str, ...] = ()


@dataclass(slots=True)
class Preemptions:
    """What a turn takes back."""

    taken: list[TakenBack] = field(default_factory=list)
    spared: list[str] = field(default_factory=list)  #: leases that need not end any more
    waits_again: list[WaitsAgain] = field(default_factory=list)
    saved: dict[str, datetime] = field(default_factory=dict)  #: lease, when its holder last saved its work

    def is_empty(self) -> bool:
        """Return whether there is nothing to write."""
        return not any((self.taken, self.spared, self.waits_again, self.saved))

    def leases(self) -> list[str]:
        """Return the leases that are changed for who holds them and go on."""
        return [*(each.lease_id for each in self.taken), *self.saved]


def write_preemptions(script: Script, preemptions: Preemptions, now: datetime, otherwise: Exception) -> None:
    """Write what a turn takes back; raise `otherwise` when a lease or claim is not what it relied on."""
    for each in preemptions.waits_again:
        wait_again(script, each, now, otherwise)
    for taken in preemptions.taken:
        values = {"key": taken.lease_id, "whom": taken.for_claim, "until": taken.ends_at, "why": taken.why}
        script.require(_TAKE, 1, otherwise, **values)
    if preemptions.spared:
        script.run(_SPARE, ids=preemptions.spared)
    if preemptions.saved:
        rows: list[Values] = [{"key": key, "saved": moment} for key, moment in preemptions.saved.items()]
        script.run_each(_SAVED, rows)


def wait_again(script: Script, again: WaitsAgain, now: datetime, otherwise: Exception) -> None:
    """End a lease as preempted and let its claim wait again."""
    ending = Ending(again.claim_id, PREEMPTED, again.lease_id, again.outcome, again.failed_devices)
    give_up(script, [ending], now, otherwise)
    by = sorted(again.preempted_by)
    script.require(_WAIT, 1, otherwise, key=again.claim_id, times=again.preemptions, by=by)


def release_preempted(
    connection: Connection,
    row: Row[Any],
    *,
    now: datetime,
    failed_devices: Sequence[str],
    otherwise: Exception,
) -> bool:
    """Let the claim of this lease wait again, whose holder stopped for others; False when it had ended."""
    if row.ended_at is not None:
        return False
    asked = connection.execute(
        select(claim.c.preemptions, claim.c.preempted_by).where(claim.c.id == row.claim_id)
    ).one()
    times, by = asked.preemptions, frozenset(asked.preempted_by)
    if row.ends_for is not None:  # else it was spared while its holder stopped already
        times, by = made_way(times, by, row.ends_for)
    again = WaitsAgain(row.id, row.claim_id, times, tuple(by), PREEMPTED, tuple(failed_devices))
    wait_again(StepByStep(connection), again, now, otherwise)
    return True


@dataclass(frozen=True, slots=True)
class Kept:
    """An ended lease whose devices are kept for the claim that it ended for."""

    row: Row[Any]
    devices: tuple[tuple[str, int], ...]  #: with the milli-GPU of each


def kept_for(connection: Connection, claim_ids: Sequence[str], since: datetime) -> list[Kept]:
    """Return the leases that ended for these claims since then, with what nobody else was given of them."""
    rows = connection.execute(
        select(lease, claim.c.request.label("asked"))
        .join(claim, claim.c.id == lease.c.claim_id)
        .where(one_of(lease.c.ends_for, "ids"), lease.c.ended_at >= since),
        {"ids": list(claim_ids)},
    ).all()
    found = []
    for row in rows:
        others = select(lease_device.c.device_id).where(lease_device.c.ended_at.is_(None))
        free = connection.execute(
            select(lease_device.c.device_id, lease_device.c.milli)
            .where(
                lease_device.c.lease_id == row.id,
                lease_device.c.ended_at == row.ended_at,
                lease_device.c.device_id.not_in(others),
            )
            .order_by(lease_device.c.is_spare, lease_device.c.rank)
        ).all()
        if free:
            found.append(Kept(row, tuple((each.device_id, each.milli) for each in free)))
    return found


_LIVE = (lease.c.id == bindparam("key"), lease.c.ended_at.is_(None))
_TAKE = (
    update(lease)
    .where(*_LIVE)
    .values(ends_for=bindparam("whom"), ends_at=bindparam("until"), ends_why=bindparam("why"))
)
_SPARE = (
    update(lease)
    .where(one_of(lease.c.id, "ids"), lease.c.ended_at.is_(None))
    .values(ends_for=None, ends_at=None, ends_why=None)
)
_SAVED = update(lease).where(*_LIVE).values(checkpoint_at=bindparam("saved"))
_WAIT = (
    update(claim)
    .where(claim.c.id == bindparam("key"), claim.c.state == ClaimState.GRANTED.value)
    .values(
        state=ClaimState.PENDING.value,
        preemptions=bindparam("times"),
        preempted_by=bindparam("by"),
        reason_code=None,
        reason=None,
        position=None,
        expected_at=None,
    )
)

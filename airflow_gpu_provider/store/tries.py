"""How the tries of one task follow one another: what they failed on, and when a lease passes to the next.

The same rule for a retry that the leader serves and for one that another replica writes into the tables: it
goes on with the live lease of an earlier try when that is what it asks for and all its devices are fine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, not_, select, tuple_, update

from airflow_gpu_provider.store.changes import withdraw_offers
from airflow_gpu_provider.store.endings import close_claims
from airflow_gpu_provider.store.script import Script, one_of
from airflow_gpu_provider.store.tables import claim, lease, lease_device
from airflow_gpu_provider.wire import ClaimState, RequestBody

#: (dag_id, run_id, task_id, map_index)
Task = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class PassedOn:
    """A lease that a later try of the same task takes over, under a new epoch."""

    lease_id: str
    old_claim_id: str
    new_claim_id: str
    epoch: int


def may_pass_on(
    held: RequestBody, devices: Collection[str], wanted: RequestBody, usable: Collection[str]
) -> bool:
    """Return whether a lease is what the next try asks for, and all its devices are usable."""
    return held == wanted and all(device in usable for device in devices)


def pass_on(script: Script, passed: PassedOn, now: datetime, otherwise: Exception) -> None:
    """Give a lease to the later try; raise `otherwise` when it is not live any more."""
    values = {
        "key": passed.lease_id,
        "of": passed.old_claim_id,
        "to": passed.new_claim_id,
        "number": passed.epoch,
    }
    script.require(_PASS_ON, 1, otherwise, **values)
    withdraw_offers(script, [passed.lease_id])
    close_claims(script, [passed.old_claim_id], ClaimState.ENDED, "superseded", now)


def hold_still(script: Script, holders: Mapping[str, str], otherwise: Exception) -> None:
    """Raise `otherwise` when one of these leases (lease, claim) passed to a later try.

    It goes behind what changes them: their rows are locked then, and stay as this finds them.
    """
    if holders:
        script.require(_PASSED, 0, otherwise, ids=list(holders), claims=list(holders.values()))


def failed_devices(
    connection: Connection, tasks: Sequence[Task], suspects: Collection[str] = ()
) -> dict[Task, set[str]]:
    """Return the devices on which earlier tries of these tasks failed.

    The tries said so, or the device is suspect now; what a try was kept off already stays so.
    """
    columns = (claim.c.dag_id, claim.c.run_id, claim.c.task_id, claim.c.map_index)
    of_tasks = tuple_(*columns).in_(list(tasks))
    rows = connection.execute(
        select(claim.c.excluded, lease.c.failed_devices, *columns)
        .outerjoin(lease, claim.c.id == lease.c.claim_id)
        .where(of_tasks)
    )
    failed: dict[Any, set[str]] = {}
    for excluded, devices, *task in rows:
        if excluded or devices:
            failed.setdefault(tuple(task), set()).update(excluded, devices or ())
    if suspects:
        held = connection.execute(
            select(lease_device.c.device_id, *columns)
            .join(lease, lease.c.id == lease_device.c.lease_id)
            .join(claim, claim.c.id == lease.c.claim_id)
            .where(of_tasks)
        )
        for device, *task in held:
            if device in suspects:
                failed.setdefault(tuple(task), set()).add(device)
    return failed


_PASSED = select(lease.c.id).where(one_of(lease.c.id, "ids"), not_(one_of(lease.c.claim_id, "claims")))
_PASS_ON = (
    update(lease)
    .where(lease.c.id == bindparam("key"), lease.c.claim_id == bindparam("of"), lease.c.ended_at.is_(None))
    .values(claim_id=bindparam("to"), epoch=bindparam("number"), collected_at=None)
)

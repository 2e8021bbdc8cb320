"""How claims and leases end in the tables: the lease, its devices and its claim together, once.

Most endings of a turn are alike (released, done), so they take three statements together, however many they
are. A lease ends for the claim that it is thought to be of: it may have passed to the task's next try.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, bindparam, select, update

from airflow_gpu_provider.exceptions import LeaseLost
from airflow_gpu_provider.store.script import Script, StepByStep, one_of
from airflow_gpu_provider.store.tables import claim, lease, lease_device
from airflow_gpu_provider.wire import PASSED_ON, ClaimState


@dataclass(frozen=True, slots=True)
class Ending:
    """A lease or pending claim that ends, and how."""

    claim_id: str
    reason: str
    lease_id: str | None = None
    outcome: str | None = None
    failed_devices: tuple[str, ...] = ()


def end_lease(
    connection: Connection,
    lease_id: str,
    *,
    now: datetime,
    reason: str,
    outcome: str | None = None,
    failed_devices: Iterable[str] = (),
) -> bool:
    """End a live lease, its devices and its claim; return False when it had ended already."""
    row = connection.execute(
        select(lease.c.claim_id).where(lease.c.id == lease_id, lease.c.ended_at.is_(None)).with_for_update()
    ).one_or_none()
    if row is None:
        return False
    ending = Ending(row.claim_id, reason, lease_id, outcome, tuple(failed_devices))
    _end_leases(StepByStep(connection), [ending], now, LookupError(f"lease {lease_id} is not locked"))
    return True


def close_claims(
    script: Script, claim_ids: Sequence[str], state: ClaimState, reason: str, now: datetime
) -> None:
    """Show that claims are over; one that was over already stays as it is."""
    script.run(_CLOSE, ids=claim_ids, to=state.value, now=now, why=reason)


def end_all(script: Script, endings: Iterable[Ending], now: datetime, otherwise: Exception) -> None:
    """End leases and withdraw claims. Raise `otherwise` when a lease is not the claim's, or ended."""

    def manner(ending: Ending) -> tuple[str, bool, str, tuple[str, ...]]:
        return ending.reason, ending.lease_id is None, ending.outcome or "", ending.failed_devices

    for (reason, is_claim, _, _), group in itertools.groupby(sorted(endings, key=manner), manner):
        alike = list(group)
        if is_claim:
            script.run(_WITHDRAW, ids=[each.claim_id for each in alike], now=now, why=reason)
        else:
            _end_leases(script, alike, now, otherwise)


def _end_leases(script: Script, alike: Sequence[Ending], now: datetime, otherwise: Exception) -> None:
    give_up(script, alike, now, otherwise)
    close_claims(script, [each.claim_id for each in alike], ClaimState.ENDED, alike[0].reason, now)


def give_up(script: Script, alike: Sequence[Ending], now: datetime, otherwise: Exception) -> None:
    """End leases that end alike, and free their devices; what becomes of their claims is for the caller."""
    first, lease_ids = alike[0], [str(each.lease_id) for each in alike]
    script.require(
        _END,
        len(alike),
        otherwise,
        ids=lease_ids,
        claims=[each.claim_id for each in alike],
        now=now,
        why=first.reason,
        result=first.outcome,
        failed=list(first.failed_devices),
    )
    free_devices(script, lease_ids, now)


def free_devices(script: Script, lease_ids: Sequence[str], now: datetime) -> None:
    """Show that what these leases held is free."""
    script.run(_FREE, ids=lease_ids, now=now)


_CLOSE = (
    update(claim)
    .where(one_of(claim.c.id, "ids"), claim.c.ended_at.is_(None))
    .values(
        state=bindparam("to"),
        ended_at=bindparam("now"),
        reason_code=bindparam("why"),
        position=None,
        expected_at=None,
    )
)
_WITHDRAW = (
    update(claim)
    .where(one_of(claim.c.id, "ids"), claim.c.state == ClaimState.PENDING.value)
    .values(
        state=ClaimState.CANCELLED.value,
        ended_at=bindparam("now"),
        reason_code=bindparam("why"),
        position=None,
        expected_at=None,
    )
)
_END = (
    update(lease)
    .where(one_of(lease.c.id, "ids"), one_of(lease.c.claim_id, "claims"), lease.c.ended_at.is_(None))
    .values(
        ended_at=bindparam("now"),
        end_reason=bindparam("why"),
        outcome=bindparam("result"),
        failed_devices=bindparam("failed"),
    )
)
_FREE = (
    update(lease_device)
    .where(one_of(lease_device.c.lease_id, "ids"), lease_device.c.ended_at.is_(None))
    .values(ended_at=bindparam("now"))
)


def why_lost(connection: Connection, lease_id: str, epoch: int) -> LeaseLost:
    """Return the error for a lease that is not live in this epoch."""
    row = connection.execute(select(lease).where(lease.c.id == lease_id)).one_or_none()
    if row is None:
        return LeaseLost(f"The broker knows no lease {lease_id}.")
    if row.epoch != epoch:
        why = f"Lease {lease_id} is in epoch {row.epoch}; epoch {epoch} is over: a later try holds it."
        return LeaseLost(why, reason=PASSED_ON)
    return LeaseLost(f"Lease {lease_id} ended at {row.ended_at:%Y-%m-%d %H:%M:%S} UTC: {row.end_reason}.")

"""How claims and leases end in the tables: the lease, its devices and its claim together, once.

Most endings of a turn are alike (released, done), so they take three statements together, however many they
are. One that ended already stays as it is, so that endings can be repeated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, select, update

from airflow_gpu_provider.store.tables import claim, lease, lease_device
from airflow_gpu_provider.wire import ClaimState


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
    _end_leases(connection, [Ending(row.claim_id, reason, lease_id, outcome, tuple(failed_devices))], now)
    return True


def close_claims(
    connection: Connection, claim_ids: Sequence[str], state: ClaimState, reason: str, now: datetime
) -> None:
    """Show that claims are over."""
    connection.execute(
        update(claim)
        .where(claim.c.id.in_(claim_ids))
        .values(state=state.value, ended_at=now, reason_code=reason, position=None, expected_at=None)
    )


def end_all(connection: Connection, endings: Iterable[Ending], now: datetime) -> None:
    """End leases and withdraw claims; one that ended already stays as it is."""

    def manner(ending: Ending) -> tuple[str, bool, str, tuple[str, ...]]:
        return ending.reason, ending.lease_id is None, ending.outcome or "", ending.failed_devices

    for (reason, is_claim, _, _), group in itertools.groupby(sorted(endings, key=manner), manner):
        alike = list(group)
        if is_claim:
            connection.execute(
                update(claim)
                .where(
                    claim.c.id.in_([each.claim_id for each in alike]),
                    claim.c.state == ClaimState.PENDING.value,
                )
                .values(
                    state=ClaimState.CANCELLED.value,
                    ended_at=now,
                    reason_code=reason,
                    position=None,
                    expected_at=None,
                )
            )
        else:
            _end_leases(connection, alike, now)


def _end_leases(connection: Connection, alike: Sequence[Ending], now: datetime) -> None:
    first, lease_ids = alike[0], [str(each.lease_id) for each in alike]
    connection.execute(
        update(lease)
        .where(lease.c.id.in_(lease_ids), lease.c.ended_at.is_(None))
        .values(
            ended_at=now,
            end_reason=first.reason,
            outcome=first.outcome,
            failed_devices=list(first.failed_devices),
        )
    )
    free_devices(connection, lease_ids, now)
    close_claims(connection, [each.claim_id for each in alike], ClaimState.ENDED, first.reason, now)


def free_devices(connection: Connection, lease_ids: Sequence[str], now: datetime) -> None:
    """Show that what these leases held is free."""
    connection.execute(
        update(lease_device)
        .where(lease_device.c.lease_id.in_(lease_ids), lease_device.c.ended_at.is_(None))
        .values(ended_at=now)
    )

"""How much waits and how much is held, counted by the database.

For a replica that does not lead: it keeps no claims in memory, and must not read thousands to count them. The
next step is `server.figures`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Engine, func, select

from airflow_gpu_provider.store.engine import looking
from airflow_gpu_provider.store.tables import claim, lease, lease_device
from airflow_gpu_provider.wire import ClaimState


@dataclass(frozen=True, slots=True)
class Held:
    """Claims that wait, live leases, and each share of a device that one holds, in milli-GPU."""

    pending: int
    leases: int
    shares: list[tuple[str, int]]


def held(engine: Engine) -> Held:
    """Return what the tables have, all of one moment."""
    with looking(engine) as connection:
        pending = connection.scalar(_PENDING)
        leases = connection.scalar(_LEASES)
        shares = [(device, milli) for device, milli in connection.execute(_SHARES)]
    return Held(pending or 0, leases or 0, shares)


_PENDING = select(func.count()).select_from(claim).where(claim.c.state == ClaimState.PENDING.value)
_LEASES = select(func.count()).select_from(lease).where(lease.c.ended_at.is_(None))
_SHARES = select(lease_device.c.device_id, lease_device.c.milli).where(lease_device.c.ended_at.is_(None))

"""What people drained and reserved, as rows for people."""

from __future__ import annotations

from airflow_gpu_provider.broker.drain import Drain
from airflow_gpu_provider.broker.reservation import overstayers
from airflow_gpu_provider.rows import DrainRow, ReservationRow
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.views import task_name


def reservations(broker: Broker) -> list[ReservationRow]:
    """Return what is reserved ahead, the first to start first."""
    kept, now = broker.reservations.kept(), broker.clock()
    holders = {entry.held.lease_id: entry for entry in broker.entries() if entry.held is not None}
    live = [entry.lease() for entry in holders.values()]
    rows = []
    for each in kept:
        late = overstayers([each], live, now)
        what = each.reservation
        rows.append(
            ReservationRow(
                id=what.id,
                starts_at=what.starts_at,
                ends_at=what.ends_at,
                state="begun" if what.starts_at <= now else "ahead",
                team=what.team,
                dag_id=what.dag_id,
                devices=sorted(what.devices),
                number=what.number or len(what.devices),
                model=what.model,
                by=what.by,
                reason=what.reason,
                kept=sorted(each.devices),
                overstays=sorted(task_name(holders[lease_id].body.key) for lease_id in late),
            )
        )
    return sorted(rows, key=lambda row: (row.starts_at, row.id))


def drain_row(drain: Drain) -> DrainRow:
    """Return a drain for people."""
    return DrainRow(
        scope=drain.scope.value,
        target=drain.target,
        reason=drain.reason,
        by=drain.by,
        since=drain.since,
        until=drain.until,
    )

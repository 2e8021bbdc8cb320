"""Rows of the tables as values: a lease with its devices, a claim with its task try."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, false, select

from airflow_gpu_provider.broker.move import OfferPhase
from airflow_gpu_provider.store.tables import lease_device, offer
from airflow_gpu_provider.wire import ClaimBody, ClaimState, TaskKey

ClaimRow = Any  # a row of the claim table

MOST_NAMED = 500  # ids in one statement; SQLite takes some 32,000
OF_CLAIM = "of_claim_"


@dataclass(frozen=True, slots=True)
class StoredLease:
    """A live lease with the devices it holds, and the move it is offered."""

    row: Row[Any]
    devices: tuple[str, ...]
    spares: tuple[str, ...]
    nodes: tuple[str, ...]
    offer: Row[Any] | None = None
    shares: tuple[int, ...] = ()  #: milli-GPU of each device, then of each spare; empty = whole devices

    def at_work(self) -> tuple[str, ...]:
        """Return the devices that its holder may use: both places while it moves."""
        own = (*self.devices, *self.spares)
        if self.offer is None or self.offer.phase != OfferPhase.ACCEPTED.value:
            return own
        return (*own, *(device for device in self.offer.devices if device not in own))


def task_key(row: ClaimRow) -> TaskKey:
    """Return the task try that a row of the claim table belongs to."""
    return TaskKey(
        dag_id=row.dag_id,
        run_id=row.run_id,
        task_id=row.task_id,
        map_index=row.map_index,
        try_number=row.try_number,
    )


def new_claim_row(
    claim_id: str, body: ClaimBody, excluded: Iterable[str], submitted_at: datetime
) -> dict[str, Any]:
    """Return the row of a claim that was just asked for."""
    return {
        "id": claim_id,
        **body.key.model_dump(),
        "ti_id": body.ti_id,
        "owner": body.owner,
        "request": body.request.model_dump(mode="json"),
        "value": body.value,
        "run_type": body.run_type.value,
        "excluded": sorted(excluded),
        "team": body.team,
        "preemptible": body.preemptible,
        "outlives_worker": body.outlives_worker,
        "completes": body.completes,
        "preemptions": 0,
        "preempted_by": [],
        "submitted_at": submitted_at,
        "state": ClaimState.PENDING.value,
    }


class ClaimPart:
    """The claim's columns of a row that joins a lease with its claim."""

    def __init__(self, row: Row[Any]) -> None:
        self._row = row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, f"{OF_CLAIM}{name}")


def with_devices(connection: Connection, rows: Sequence[Row[Any]]) -> list[StoredLease]:
    """Return these live leases, rows of the lease table, with the devices and the offer of each."""
    held: dict[str, list[Row[Any]]] = {row.id: [] for row in rows}
    live = lease_device.c.ended_at.is_(None), lease_device.c.is_offered == false()
    of_leases = select(lease_device).where(*live).order_by(lease_device.c.is_spare, lease_device.c.rank)
    offers = select(offer)
    # Thousands of live leases are named by their state: their ids would make too long a statement.
    if len(held) <= MOST_NAMED:
        of_leases = of_leases.where(lease_device.c.lease_id.in_(list(held)))
        offers = offers.where(offer.c.lease_id.in_(list(held)))
    for row in connection.execute(of_leases):
        if row.lease_id in held:
            held[row.lease_id].append(row)
    offered = {row.lease_id: row for row in connection.execute(offers)}
    return [
        StoredLease(
            row=row,
            devices=tuple(d.device_id for d in held[row.id] if not d.is_spare),
            spares=tuple(d.device_id for d in held[row.id] if d.is_spare),
            nodes=tuple(sorted({d.node for d in held[row.id]})),
            offer=offered.get(row.id),
            shares=tuple(d.milli for d in held[row.id]) if any(d.milli < 1000 for d in held[row.id]) else (),
        )
        for row in rows
    ]

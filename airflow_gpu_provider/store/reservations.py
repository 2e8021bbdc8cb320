"""Reservations in the tables, with the devices that the leader keeps for each.

What is kept is stored so that other replicas show what the leader decided, and so that the next leader goes
on with the same devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, delete, insert, select, text, update

from airflow_gpu_provider.broker.model import DeviceId
from airflow_gpu_provider.broker.reservation import Kept, Reservation
from airflow_gpu_provider.store.engine import writing
from airflow_gpu_provider.store.tables import reservation


class ReservationStore:
    """The table of reservations."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def load(self) -> tuple[Kept, ...]:
        """Return all reservations with what was kept for each at last, the first to start first."""
        with self._engine.connect() as connection:
            rows = connection.execute(
                select(reservation).order_by(reservation.c.starts_at, reservation.c.id)
            ).all()
        return tuple(map(_kept, rows))

    def add(self, wish: Reservation, check: Callable[[tuple[Reservation, ...]], None]) -> Reservation:
        """Store a reservation unless ``check`` of the others raises; return the stored one of the same id."""
        with writing(self._engine) as connection:
            if connection.dialect.name == "postgresql":
                # Two people who reserve the same at the same moment: the second one must see the first.
                connection.execute(text("LOCK TABLE gpu_reservation IN SHARE ROW EXCLUSIVE MODE"))
            others = tuple(_kept(row).reservation for row in connection.execute(select(reservation)).all())
            for other in others:
                if other.id == wish.id:
                    return other
            check(others)
            connection.execute(
                insert(reservation).values(
                    id=wish.id,
                    starts_at=wish.starts_at,
                    ends_at=wish.ends_at,
                    by=wish.by,
                    team=wish.team,
                    dag_id=wish.dag_id,
                    devices=sorted(wish.devices),
                    number=wish.number,
                    model=wish.model,
                    reason=wish.reason,
                    kept=[],
                )
            )
        return wish

    def remove(self, reservation_id: str) -> bool:
        """Take a reservation back; return False when there is none."""
        with writing(self._engine) as connection:
            return bool(
                connection.execute(delete(reservation).where(reservation.c.id == reservation_id)).rowcount
            )

    def note(self, kept: Iterable[Kept]) -> None:
        """Store what is kept."""
        with writing(self._engine) as connection:
            for each in kept:
                connection.execute(
                    update(reservation)
                    .where(reservation.c.id == each.reservation.id)
                    .values(kept=sorted(each.devices))
                )

    def forget_before(self, moment: datetime) -> None:
        """Delete what ended before."""
        with writing(self._engine) as connection:
            connection.execute(delete(reservation).where(reservation.c.ends_at < moment))


def _kept(row: Any) -> Kept:
    return Kept(
        Reservation(
            id=row.id,
            starts_at=row.starts_at,
            ends_at=row.ends_at,
            by=row.by,
            team=row.team,
            dag_id=row.dag_id,
            devices=frozenset(map(DeviceId, row.devices)),
            number=row.number,
            model=row.model,
            reason=row.reason,
        ),
        frozenset(map(DeviceId, row.kept)),
    )

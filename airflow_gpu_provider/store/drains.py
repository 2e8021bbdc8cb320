"""Drains in the tables: one for each node or device, the newest word counts."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Engine, and_, delete, insert, select

from airflow_gpu_provider.broker.drain import Drain, DrainScope
from airflow_gpu_provider.store.engine import writing
from airflow_gpu_provider.store.tables import drain


class DrainStore:
    """The table of drains."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def load(self) -> tuple[Drain, ...]:
        """Return all drains, those over included, oldest first."""
        with self._engine.connect() as connection:
            rows = connection.execute(select(drain).order_by(drain.c.since, drain.c.target)).all()
        return tuple(
            Drain(DrainScope(row.scope), row.target, row.reason, row.by, row.since, row.until) for row in rows
        )

    def put(self, wish: Drain) -> None:
        """Store a drain, in place of an earlier one of the same target."""
        with writing(self._engine) as connection:
            connection.execute(delete(drain).where(_is(wish.scope, wish.target)))
            connection.execute(
                insert(drain).values(
                    scope=wish.scope.value,
                    target=wish.target,
                    reason=wish.reason,
                    by=wish.by,
                    since=wish.since,
                    until=wish.until,
                )
            )

    def remove(self, scope: DrainScope, target: str) -> bool:
        """End a drain; return False when there was none."""
        with writing(self._engine) as connection:
            return bool(connection.execute(delete(drain).where(_is(scope, target))).rowcount)


def _is(scope: DrainScope, target: str) -> ColumnElement[bool]:
    return and_(drain.c.scope == scope.value, drain.c.target == target)

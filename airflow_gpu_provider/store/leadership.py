"""Who decides: one row elects the leader, and its term fences every write the leader makes.

A replica becomes leader by taking the row when its holder has been silent for the TTL; each take-over raises
the term. A leader that was paused and comes back carries an old term, and the database refuses its writes.
On PostgreSQL the database's clock rules, so that the replicas' clocks need not agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from sqlalchemy import Connection, Engine, bindparam, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from airflow_gpu_provider.store.engine import writing
from airflow_gpu_provider.store.tables import leader


class StaleTerm(Exception):
    """Another replica leads by now: this one must stop deciding."""


@dataclass(frozen=True, slots=True)
class Term:
    """The right to decide."""

    holder: str
    number: int


_SQLITE_TTL_S = 6.0


def ttl_on(engine: Engine, ttl_s: float) -> float:
    """Return how long a lead lasts; on SQLite longer: fewer heartbeats disturb Airflow's own writes less."""
    return max(ttl_s, _SQLITE_TTL_S) if engine.dialect.name == "sqlite" else ttl_s


def database_now(connection: Connection) -> datetime:
    """Return the time all replicas agree on."""
    if connection.dialect.name == "postgresql":
        # clock_timestamp, not now(): the latter stands still within a transaction that waited for a lock
        stamp = connection.scalar(select(func.clock_timestamp()))
        if isinstance(stamp, datetime):
            return stamp.astimezone(timezone.utc)
    return datetime.now(timezone.utc)


def _ignore(stamp: datetime, asked_at: float, answered_at: float) -> None:
    """Do without the time."""


class Leadership:
    """The election row."""

    def __init__(self, engine: Engine, holder: str, ttl_s: float) -> None:
        self._engine = engine
        self.holder = holder
        self.ttl_s = ttl_s
        #: in how many seconds the lead of another replica ends, as of the last `acquire`; None = nobody's
        self.free_in_s: float | None = None
        #: hears the database's time with each look, and between which two of the monotonic clock it was that
        self.hear: Callable[[datetime, float, float], None] = _ignore

    def acquire(self) -> Term | None:
        """Take or keep the lead; return the term, or None while another replica leads."""
        self.free_in_s = self._others_s()
        if self.free_in_s is not None:
            return None
        try:
            with writing(self._engine) as connection:
                return self._acquire(connection)
        except IntegrityError:  # two replicas inserted the first row: the other one won
            return None

    def _acquire(self, connection: Connection) -> Term | None:
        row = connection.execute(select(leader).where(leader.c.id == 1).with_for_update()).one_or_none()
        now = self._now(connection)
        expires_at = now + timedelta(seconds=self.ttl_s)
        if row is None:
            connection.execute(insert(leader).values(id=1, holder=self.holder, term=1, expires_at=expires_at))
            return Term(self.holder, 1)
        if row.holder != self.holder and row.expires_at > now:
            return None
        kept = row.holder == self.holder and row.expires_at > now
        term = row.term if kept else row.term + 1
        connection.execute(
            update(leader)
            .where(leader.c.id == 1)
            .values(holder=self.holder, term=term, expires_at=expires_at)
        )
        return Term(self.holder, term)

    def _others_s(self) -> float | None:
        """Return how long another replica still leads; None = none does. Locks nothing: leaders write."""
        with self._engine.connect() as connection:
            row = connection.execute(select(leader).where(leader.c.id == 1)).one_or_none()
            if row is None or row.holder == self.holder:
                return None
            left_s: float = (row.expires_at - self._now(connection)).total_seconds()
            return left_s if left_s > 0 else None

    def hear_time(self) -> None:
        """Ask for the time alone."""
        with self._engine.connect() as connection:
            self._now(connection)

    def _now(self, connection: Connection) -> datetime:
        asked_at = time.monotonic()
        stamp = database_now(connection)
        self.hear(stamp, asked_at, time.monotonic())
        return stamp

    def renew(self, term: Term) -> bool:
        """Keep the lead for another TTL; return False when another replica has taken it."""
        with writing(self._engine) as connection:
            is_mine = (leader.c.id == 1, leader.c.holder == term.holder, leader.c.term == term.number)
            # No look at the clock before: waiting for a lock takes its time.
            asked_at = time.monotonic()
            until: object = datetime.now(timezone.utc) + timedelta(seconds=self.ttl_s)
            if connection.dialect.name == "postgresql":
                until = func.clock_timestamp() + timedelta(seconds=self.ttl_s)
            kept = update(leader).where(*is_mine).values(expires_at=until).returning(leader.c.expires_at)
            expires_at = connection.scalar(kept)
            answered_at = time.monotonic()
        if expires_at is None:
            return False
        self.hear(expires_at - timedelta(seconds=self.ttl_s), asked_at, answered_at)
        return True

    def resign(self, term: Term) -> None:
        """Let another replica take over at once; nothing happens when one already has."""
        with writing(self._engine) as connection:
            connection.execute(
                update(leader)
                .where(leader.c.id == 1, leader.c.holder == term.holder, leader.c.term == term.number)
                .values(expires_at=database_now(connection))
            )

    def current(self) -> str | None:
        """Return who leads, None when nobody does."""
        with self._engine.connect() as connection:
            row = connection.execute(select(leader).where(leader.c.id == 1)).one_or_none()
            if row is None or row.expires_at <= database_now(connection):
                return None
            return str(row.holder)


#: the election row, locked, while this term lasts: exactly one row, or the term is over
IN_TERM = (
    select(leader.c.id)
    .where(leader.c.id == 1, leader.c.holder == bindparam("me"), leader.c.term == bindparam("number"))
    .with_for_update()
)


def fence(connection: Connection, term: Term) -> None:
    """Hold the election row for this transaction; raise StaleTerm when the term is over."""
    row = connection.execute(
        select(leader.c.holder, leader.c.term).where(leader.c.id == 1).with_for_update()
    ).one()
    if (row.holder, row.term) != (term.holder, term.number):
        raise StaleTerm(f"term {term.number} of {term.holder} is over: {row.holder} leads in term {row.term}")

"""Questions that only the leader can answer, and its answers, for callers of other replicas.

The replica that was asked writes the question with an event, the leader serves it like its own callers' and
writes the answer. Who asked takes the question back when the time is over: it is never served later, when
its caller has gone on. How old a question is goes by the database's clock, since the replicas' own may
differ. The next step is `server.asks`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, delete, insert, select, update

from airflow_gpu_provider.store.endings import why_lost
from airflow_gpu_provider.store.engine import writing
from airflow_gpu_provider.store.leadership import database_now
from airflow_gpu_provider.store.tables import ask, lease
from airflow_gpu_provider.store.turns import note_event

_NUMBERS = 2**31 - 1  # as many as the column takes


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a claim's lease: a kind of request, and its fields."""

    id: int
    claim_id: str
    kind: str
    body: dict[str, Any]


class AskStore:
    """The table of questions."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def put(self, lease_id: str, epoch: int, kind: str, body: dict[str, Any]) -> Question:
        """Write a question about a live lease; raise LeaseLost when it is not in this epoch any more."""
        with writing(self._engine) as connection:
            row = connection.execute(select(lease).where(lease.c.id == lease_id)).one_or_none()
            if row is None or row.epoch != epoch or row.ended_at is not None:
                raise why_lost(connection, lease_id, epoch)
            # By chance: SQLite gives the number of a question that was taken back to the next one, and the
            # leader may be about to answer the first.
            number = 1 + secrets.randbelow(_NUMBERS)
            values = {"claim_id": row.claim_id, "kind": kind, "body": body}
            connection.execute(insert(ask).values(id=number, asked_at=database_now(connection), **values))
            note_event(connection, row.claim_id)
            return Question(number, row.claim_id, kind, body)

    def unanswered(self, within_s: float, claim_ids: Sequence[str] | None = None) -> list[Question]:
        """Return the questions of the last seconds (about these claims), oldest first."""
        statement = select(ask).where(ask.c.answer.is_(None)).order_by(ask.c.asked_at, ask.c.id)
        if claim_ids is not None:
            statement = statement.where(ask.c.claim_id.in_(claim_ids))
        with self._engine.connect() as connection:
            since = database_now(connection) - timedelta(seconds=within_s)
            rows = connection.execute(statement.where(ask.c.asked_at >= since)).all()
        return [Question(row.id, row.claim_id, row.kind, row.body) for row in rows]

    def is_open(self, number: int, within_s: float) -> bool:
        """Return whether who asked this, some seconds ago at most, still waits for the answer."""
        with self._engine.connect() as connection:
            since = database_now(connection) - timedelta(seconds=within_s)
            of_id = select(ask.c.id).where(ask.c.id == number, ask.c.asked_at >= since)
            return connection.scalar(of_id) is not None

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        """Write an answer; nobody hears it when the question was taken back."""
        with writing(self._engine) as connection:
            connection.execute(update(ask).where(ask.c.id == number).values(answer=answer))

    def look(self, number: int) -> dict[str, Any] | None:
        """Return the answer, None while there is none."""
        with self._engine.connect() as connection:
            found: dict[str, Any] | None = connection.scalar(select(ask.c.answer).where(ask.c.id == number))
            return found

    def take_back(self, number: int) -> None:
        """Forget a question."""
        with writing(self._engine) as connection:
            connection.execute(delete(ask).where(ask.c.id == number))

    def forget_older(self, than_s: float) -> None:
        """Forget what replicas that died did not take back."""
        with writing(self._engine) as connection:
            moment = database_now(connection) - timedelta(seconds=than_s)
            connection.execute(delete(ask).where(ask.c.asked_at < moment))

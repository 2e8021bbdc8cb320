"""Questions that only the leader can answer, and its answers, for callers of other replicas.

The replica that was asked writes the question with an event, the leader serves it like its own callers' and
writes the answer. Who asked takes the question back when the time is over: it is never served later, when
its caller has gone on. The next step is `server.asks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, delete, insert, select, update

from airflow_gpu_provider.exceptions import LeaseLost
from airflow_gpu_provider.store.engine import WRITES
from airflow_gpu_provider.store.repository import why_lost
from airflow_gpu_provider.store.tables import ask, lease
from airflow_gpu_provider.store.turns import note_event


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

    def put(self, lease_id: str, epoch: int, kind: str, body: dict[str, Any], now: datetime) -> Question:
        """Write a question about a live lease; raise LeaseLost when it is not in this epoch any more."""
        with self._writing() as connection:
            row = connection.execute(select(lease).where(lease.c.id == lease_id)).one_or_none()
            if row is None or row.epoch != epoch or row.ended_at is not None:
                raise LeaseLost(*why_lost(connection, lease_id, epoch))
            values = {"claim_id": row.claim_id, "kind": kind, "body": body, "asked_at": now}
            number = connection.execute(insert(ask).values(values).returning(ask.c.id)).scalar_one()
            note_event(connection, row.claim_id)
            return Question(int(number), row.claim_id, kind, body)

    def unanswered(self, since: datetime, claim_ids: Sequence[str] | None = None) -> list[Question]:
        """Return the questions (about these claims), oldest first."""
        statement = select(ask).where(ask.c.answer.is_(None), ask.c.asked_at >= since).order_by(ask.c.id)
        if claim_ids is not None:
            statement = statement.where(ask.c.claim_id.in_(claim_ids))
        with self._engine.connect() as connection:
            rows = connection.execute(statement).all()
        return [Question(row.id, row.claim_id, row.kind, row.body) for row in rows]

    def answer(self, number: int, answer: dict[str, Any]) -> None:
        """Write an answer; nobody hears it when the question was taken back."""
        with self._writing() as connection:
            connection.execute(update(ask).where(ask.c.id == number).values(answer=answer))

    def look(self, number: int) -> dict[str, Any] | None:
        """Return the answer, None while there is none."""
        with self._engine.connect() as connection:
            found: dict[str, Any] | None = connection.scalar(select(ask.c.answer).where(ask.c.id == number))
            return found

    def take_back(self, number: int) -> None:
        """Forget a question."""
        with self._writing() as connection:
            connection.execute(delete(ask).where(ask.c.id == number))

    def forget_before(self, moment: datetime) -> None:
        """Forget what replicas that died did not take back."""
        with self._writing() as connection:
            connection.execute(delete(ask).where(ask.c.asked_at < moment))

    def _writing(self) -> Any:
        return self._engine.execution_options(**WRITES).begin()

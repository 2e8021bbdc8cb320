"""Nodes as their agents last reported them, so that every replica and the next leader know the fleet.

Each written report has another number, which the database gives. A replica reads the reports whose numbers it
does not know; of the others it learns only that they are alive. The next step is `server.other_reports`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import ValidationError
from sqlalchemy import ColumnElement, Engine, bindparam, delete, func, insert, select, update

from airflow_gpu_provider.reports import NodeReport
from airflow_gpu_provider.store.engine import writing
from airflow_gpu_provider.store.script import one_of
from airflow_gpu_provider.store.tables import node, node_change

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A report and when it came."""

    report: NodeReport
    reported_at: datetime
    change: int | None = None  #: its number in the tables; None = an agent told it here


@dataclass(frozen=True, slots=True)
class Glance:
    """What the tables have of a node, without its report."""

    name: str
    change: int
    reported_at: datetime


class NodeStore:
    """The table of nodes, as the replica `me` uses it."""

    def __init__(self, engine: Engine, me: str) -> None:
        self._engine = engine
        self._me = me

    def glance(self) -> list[Glance]:
        """Return when the nodes of other replicas were heard of, and which reports they have, unread.

        All of them, each time: what is read is chosen by comparing each node's number with the one that is
        known, so no order of commits and no replica's clock can hide a change.
        """
        with self._engine.connect() as connection:
            return [Glance(*row) for row in connection.execute(_GLANCE, {"me": self._me})]

    def load(self, names: Sequence[str] | None = None) -> list[StoredNode]:
        """Return all known nodes, or these."""
        if names is not None and not names:
            return []
        of_these = () if names is None else (one_of(node.c.name, "names"),)
        statement = select(node.c.report, node.c.reported_at, node.c.change).where(*of_these)
        with self._engine.connect() as connection:
            rows = connection.execute(statement, {} if names is None else {"names": names}).all()
        found = []
        for report, at, change in rows:
            try:
                found.append(StoredNode(NodeReport.model_validate(report), at, change))
            except ValidationError as error:  # one row must not cost the fleet
                log.error("A node's stored report cannot be read, its next one replaces it: %s", error)
        return found

    def save(self, nodes: Iterable[StoredNode]) -> None:
        """Insert or replace reports; one older than the stored one changes nothing."""
        rows = [
            {
                "key": n.report.name,
                "new_report": n.report.model_dump(mode="json"),
                "at": n.reported_at,
                "to": self._me,
            }
            for n in nodes
        ]
        if not rows:
            return
        change = self._next_change()
        with writing(self._engine) as connection:
            known = set(
                connection.scalars(select(node.c.name).where(node.c.name.in_([r["key"] for r in rows])))
            )
            if new := [r for r in rows if r["key"] not in known]:
                values = [
                    {
                        "name": r["key"],
                        "report": r["new_report"],
                        "reported_at": r["at"],
                        "reported_to": r["to"],
                    }
                    for r in new
                ]
                connection.execute(insert(node).values(change=change), values)
            if old := [r for r in rows if r["key"] in known]:
                statement = (
                    update(node)
                    .where(node.c.name == bindparam("key"), node.c.reported_at <= bindparam("at"))
                    .values(
                        report=bindparam("new_report"),
                        reported_at=bindparam("at"),
                        reported_to=bindparam("to"),
                        change=change,
                    )
                )
                connection.execute(statement, old)

    def touch(self, names: Sequence[str], at: datetime) -> set[str]:
        """Note that these nodes reported and nothing that matters changed; return those that others wrote.

        What another replica wrote last may differ: the caller must save such a node whole.
        """
        if not names:
            return set()
        with writing(self._engine) as connection:
            mine = connection.scalars(_TOUCH, {"names": names, "me": self._me, "at": at})
            return set(names) - set(mine)

    def forget_before(self, moment: datetime) -> int:
        """Drop nodes that have not reported since `moment`; return how many."""
        with writing(self._engine) as connection:
            return connection.execute(delete(node).where(node.c.reported_at < moment)).rowcount

    def _next_change(self) -> ColumnElement[int]:
        """Return the number of another change, made by the database as it writes the row."""
        if self._engine.dialect.supports_sequences:
            return node_change.next_value()
        return select(func.coalesce(func.max(node.c.change), 0) + 1).scalar_subquery()


_GLANCE = select(node.c.name, node.c.change, node.c.reported_at).where(node.c.reported_to != bindparam("me"))
_TOUCH = (
    update(node)
    .where(one_of(node.c.name, "names"), node.c.reported_to == bindparam("me"))
    .values(reported_at=bindparam("at"))
    .returning(node.c.name)
)

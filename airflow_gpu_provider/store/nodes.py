"""Nodes as their agents last reported them, so that every replica and the next leader know the fleet."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Engine, Select, bindparam, delete, insert, select, update

from airflow_gpu_provider.reports import NodeReport
from airflow_gpu_provider.store.engine import writing
from airflow_gpu_provider.store.script import one_of
from airflow_gpu_provider.store.tables import node

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A report and when it came."""

    report: NodeReport
    reported_at: datetime


class NodeStore:
    """The table of nodes, as the replica `me` uses it."""

    def __init__(self, engine: Engine, me: str) -> None:
        self._engine = engine
        self._me = me

    def load(self) -> list[StoredNode]:
        """Return all known nodes."""
        return self._read(select(node.c.report, node.c.reported_at))

    def load_others(self, since: datetime | None) -> list[StoredNode]:
        """Return the nodes that reported to other replicas since then; None = ever."""
        statement = select(node.c.report, node.c.reported_at).where(node.c.reported_to != self._me)
        return self._read(statement if since is None else statement.where(node.c.reported_at >= since))

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
                connection.execute(insert(node), values)
            if old := [r for r in rows if r["key"] in known]:
                statement = (
                    update(node)
                    .where(node.c.name == bindparam("key"), node.c.reported_at <= bindparam("at"))
                    .values(
                        report=bindparam("new_report"),
                        reported_at=bindparam("at"),
                        reported_to=bindparam("to"),
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

    def _read(self, statement: Select[tuple[Any, datetime]]) -> list[StoredNode]:
        with self._engine.connect() as connection:
            rows = connection.execute(statement).all()
        found = []
        for report, at in rows:
            try:
                found.append(StoredNode(NodeReport.model_validate(report), at))
            except ValidationError as error:  # one row must not cost the fleet
                log.error("A node's stored report cannot be read, its next one replaces it: %s", error)
        return found


_TOUCH = (
    update(node)
    .where(one_of(node.c.name, "names"), node.c.reported_to == bindparam("me"))
    .values(reported_at=bindparam("at"))
    .returning(node.c.name)
)

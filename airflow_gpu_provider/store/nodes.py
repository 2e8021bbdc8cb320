"""Nodes as their agents last reported them, so that every replica and the next leader know the fleet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Engine, bindparam, delete, insert, select, update

from airflow_gpu_provider.store.engine import WRITES
from airflow_gpu_provider.store.tables import node
from airflow_gpu_provider.wire import NodeReport


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A report and when it came."""

    report: NodeReport
    reported_at: datetime


class NodeStore:
    """The table of nodes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def load(self) -> list[StoredNode]:
        """Return all known nodes."""
        with self._engine.connect() as connection:
            rows = connection.execute(select(node.c.report, node.c.reported_at)).all()
        return [StoredNode(NodeReport.model_validate(row.report), row.reported_at) for row in rows]

    def save(self, nodes: Iterable[StoredNode]) -> None:
        """Insert or update; a report older than the stored one changes nothing."""
        rows = [
            {"key": n.report.name, "report": n.report.model_dump(mode="json"), "reported_at": n.reported_at}
            for n in nodes
        ]
        if not rows:
            return
        with self._engine.connect().execution_options(**WRITES) as connection, connection.begin():
            known = set(
                connection.scalars(select(node.c.name).where(node.c.name.in_([r["key"] for r in rows])))
            )
            new = [r for r in rows if r["key"] not in known]
            old = [r for r in rows if r["key"] in known]
            if new:
                values = [
                    {"name": r["key"], "report": r["report"], "reported_at": r["reported_at"]} for r in new
                ]
                connection.execute(insert(node), values)
            if old:
                statement = (
                    update(node)
                    .where(node.c.name == bindparam("key"), node.c.reported_at <= bindparam("newer_than"))
                    .values(report=bindparam("report"), reported_at=bindparam("reported_at"))
                )
                connection.execute(statement, [{**r, "newer_than": r["reported_at"]} for r in old])

    def forget_before(self, moment: datetime) -> int:
        """Drop nodes that have not reported since `moment`; return how many."""
        with self._engine.connect().execution_options(**WRITES) as connection, connection.begin():
            return connection.execute(delete(node).where(node.c.reported_at < moment)).rowcount

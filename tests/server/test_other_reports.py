"""What replicas read of one another's nodes: each change once, whatever clocks and commits do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import Engine, event, update

from airflow_gpu_provider.reports import NodeReport
from airflow_gpu_provider.server.fleet import FleetMirror
from airflow_gpu_provider.server.other_reports import take_in
from airflow_gpu_provider.store.engine import make_engine
from airflow_gpu_provider.store.nodes import NodeStore
from airflow_gpu_provider.store.tables import node

from .conftest import report

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


class Replica:
    """A mirror with its tables, which counts the reports that it reads."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.mirror = FleetMirror(stale_after_s=10, forget_after_s=3600, max_load=0.5)
        self.nodes = NodeStore(engine, name)
        self.read: list[str] = []
        load = self.nodes.load

        def counted(names: list[str] | None = None) -> list[object]:
            found = load(names)
            self.read += [each.report.name for each in found]
            return found  # type: ignore[return-value]

        self.nodes.load = counted  # type: ignore[assignment, method-assign]

    def hear(self, now: datetime, *reports: NodeReport) -> None:
        """Take reports of agents, and store what the others must know."""
        self.mirror.fold(reports, now)
        changed, alive = self.mirror.unsaved()
        self.nodes.save(changed)
        self.nodes.save(self.mirror.stored(self.nodes.touch(alive, now)))
        self.mirror.mark_saved(changed, alive)

    def look(self) -> list[str]:
        """Read what others stored; return the nodes whose reports were read."""
        self.read.clear()
        take_in(self.mirror, self.nodes)
        return sorted(self.read)

    def suspects(self) -> dict[str, str | None]:
        return {each.report.name: each.report.devices[0].suspect for each in self.mirror.stored()}


@pytest.fixture
def engine(migrated_postgres_url: str) -> Iterator[Engine]:
    engine = make_engine(migrated_postgres_url)
    yield engine
    engine.dispose()


def test_a_report_of_another_replica_is_read_when_it_changed_and_else_its_node_is_only_alive(
    engine: Engine,
) -> None:
    one, other = Replica(engine, "one"), Replica(engine, "other")
    one.hear(NOW, *(report(name) for name in "abc"))
    assert other.look() == ["a", "b", "c"]
    for second in range(4, 20, 4):
        one.hear(after(second), *(report(name) for name in "abc"))
        assert other.look() == []
    assert {node.unavailable for node in other.mirror.fleet(after(17)).nodes} == {None}, "alive all the time"
    one.hear(after(20), report("b", suspect="XID 79"))
    assert other.look() == ["b"] and other.suspects()["b"] == "XID 79"
    assert other.look() == []


def test_what_a_replica_writes_that_knows_no_numbers_yet_is_always_read(engine: Engine) -> None:
    old, new = Replica(engine, "old"), Replica(engine, "new")
    for second, suspect in ((0, None), (4, "XID 79")):
        old.hear(after(second), report("a", suspect=suspect))
        with engine.begin() as connection:
            connection.execute(update(node).values(change=0))
        assert new.look() == ["a"] and new.suspects()["a"] == suspect


def test_a_report_is_read_whose_replica_has_a_clock_far_behind(engine: Engine) -> None:
    late, other = Replica(engine, "late"), Replica(engine, "other")
    other.hear(NOW, report("a"))
    late.hear(after(-3600), report("b"))
    assert other.look() == ["b"]
    late.hear(after(-3599), report("b", suspect="XID 79"))
    assert other.look() == ["b"] and other.suspects()["b"] == "XID 79"
    late.hear(after(-1), report("a", suspect="XID 48"))  # its agent moved, which the other knows by its clock
    assert other.look() == [] and other.suspects()["a"] is None, "what is known is newer"
    late.hear(after(3), report("a", suspect="XID 48"))
    assert other.look() == ["a"] and other.suspects()["a"] == "XID 48"


def test_a_report_that_is_committed_late_is_read_though_later_ones_were_before(
    engine: Engine, migrated_postgres_url: str
) -> None:
    one, other = Replica(engine, "one"), Replica(engine, "other")
    one.hear(NOW, report("a"), report("b"))
    other.look()
    slow_engine = make_engine(migrated_postgres_url)
    written, may_commit = threading.Event(), threading.Event()

    @event.listens_for(slow_engine, "connect")
    def may_sleep(connection: object, _entry: object) -> None:
        connection.cursor().execute("SET idle_in_transaction_session_timeout = 0")  # type: ignore[attr-defined]
        connection.commit()  # type: ignore[attr-defined]

    @event.listens_for(slow_engine, "commit")
    def commit_late(_connection: object) -> None:
        written.set()
        assert may_commit.wait(20)

    slow = Replica(slow_engine, "slow")
    thread = threading.Thread(target=slow.hear, args=(after(1), report("a", suspect="XID 79")))
    thread.start()
    assert written.wait(20)
    for second in (2, 3, 4):
        one.hear(after(second), report("b", suspect=f"XID {second}"))
        assert other.look() == ["b"] and other.suspects()["a"] is None
    may_commit.set()
    thread.join(20)
    assert other.look() == ["a"] and other.suspects() == {"a": "XID 79", "b": "XID 4"}
    slow_engine.dispose()


def test_an_agent_that_goes_from_one_replica_to_another_and_back_is_followed(engine: Engine) -> None:
    one, other = Replica(engine, "one"), Replica(engine, "other")
    one.hear(NOW, report("a"))
    other.look()
    for second, replica, watcher in ((4, other, one), (8, one, other), (12, other, one)):
        replica.hear(after(second), report("a"))
        assert watcher.look() == ["a"], "who wrote last may have written something else"
        assert watcher.mirror.fleet(after(second + 9)).nodes[0].unavailable is None

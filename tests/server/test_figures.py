"""The figures of the whole broker are those of its rows, on every replica, without making the rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server import views
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import ClaimBody, RequestBody, TaskKey
from airflow_gpu_provider.wishes import DrainBody

from .conftest import SECRET, ask, report, until_leading
from .test_replicas import until


@pytest.fixture
def replicas(migrated_postgres_url: str) -> Iterator[tuple[Broker, Broker]]:
    """Yield (leader, follower), both with what agents told the leader."""
    settings = Settings(
        token_secret=SECRET, sql_alchemy_conn=migrated_postgres_url, stale_after_s=600, leader_ttl_s=1.0
    )
    leader, follower = Broker(settings), Broker(settings)
    leader.start()
    until_leading(leader)
    follower.start()
    twin = report("twin").model_copy(update={"devices": report("n1").devices})
    sick = report("sick", suspect="XID 79")
    leader.report(ReportBody(nodes=(report("n1", gpus=3), twin, sick, report("out"), report("fine", gpus=4))))
    until(lambda: len(follower.mirror.stored()) == 5, "the follower hears of the nodes")
    yield leader, follower
    follower.stop()
    leader.stop()


def counted(broker: Broker) -> tuple[int, int, float, int, int]:
    """Return the figures as people would count them in the rows."""
    rows = views.nodes(broker)
    devices = [device for row in rows for device in row.devices]
    free = round(sum(device.free for device in devices), 3)
    return len(rows), len(devices), free, len(views.queue(broker)), len(views.leases(broker))


def told(broker: Broker) -> tuple[int, int, float, int, int]:
    status = views.status(broker)
    return status.nodes, status.devices, status.free, status.pending, status.leases


def test_the_figures_are_those_of_the_rows_on_each_replica(replicas: tuple[Broker, Broker]) -> None:
    leader, follower = replicas
    leader.drains.drain(DrainBody(target="out", reason="new fans"), "me")
    leader.drains.drain(DrainBody(target="GPU-fine-3", reason="fan"), "me")
    follower.drains.refresh()
    ask(leader, "whole", gpus=2)
    key = TaskKey(dag_id="d", run_id="r", task_id="shared", map_index=-1, try_number=1)
    share = ClaimBody(key=key, request=RequestBody(milli=300))
    asyncio.run(leader.submit(share, is_attended=False))
    ask(leader, "waits", gpus=6)
    for broker in replicas:
        until(lambda broker=broker: told(broker)[3:] == (1, 2), "two hold devices and one waits")  # type: ignore[misc]
        nodes, devices, free, *_ = told(broker)
        assert (nodes, devices) == (5, 13)
        assert 3 < free < 4, "six are in service, two are leased whole and one in part"
        assert told(broker) == counted(broker)


def test_figures_that_are_asked_again_make_no_rows_and_read_no_claims(
    replicas: tuple[Broker, Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    for broker in replicas:
        before, fleets = told(broker), []
        monkeypatch.setattr(broker.stored, "waiting_or_held", lambda: pytest.fail("claims were read"))
        monkeypatch.setattr(broker.mirror, "stored", lambda: pytest.fail("reports were copied"))
        monkeypatch.setattr(broker, "fleet", lambda now, fleets=fleets: fleets.append(now))
        assert [told(broker) for _ in range(3)] == [before] * 3
        assert fleets == [], "nothing was reported or drained since"
        monkeypatch.undo()

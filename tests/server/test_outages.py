"""Agents that fall silent, devices that fail and fleets that shrink, as seen over HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.reports import NodeReport, ReportBody
from airflow_gpu_provider.server.board import Entry
from airflow_gpu_provider.server.broker import Broker
from tests.stored_rows import claims

from .conftest import ask, look, report, until_leading

Client = Callable[..., httpx.Client]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"stale_after_s": 2.0})


@pytest.fixture
def speaking(broker: Broker) -> Iterator[list[NodeReport]]:
    """Report these nodes again and again, as agents do; the list may be changed."""
    nodes = [report()]

    def tell() -> None:
        broker.report(ReportBody(nodes=tuple(nodes)))

    stopping = threading.Event()

    def loop() -> None:
        while not stopping.wait(0.1):
            tell()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    yield nodes
    stopping.set()
    thread.join(5)


def until(broker: Broker, claim_id: str, code: str) -> Entry:
    deadline = time.monotonic() + 20
    while (entry := look(broker, claim_id, "", seconds=0)).reason_code != code:
        assert time.monotonic() < deadline, (entry.state, entry.reason_code, entry.reason)
        time.sleep(0.05)
    return entry


def test_devices_of_a_silent_agent_are_not_offered_and_come_back_with_it(
    broker: Broker, client: Client, speaking: list[NodeReport]
) -> None:
    node = speaking.pop()
    time.sleep(2.5)
    waits = ask(broker, "one")
    entry = until(broker, waits, "devices_unavailable")
    assert "no report for more than 2 s" in (entry.reason or "")
    assert client("task").get("/v1/nodes").json()[0]["state"] == "stale"
    speaking.append(node)
    assert look(broker, waits, "granted").state.value == "granted"


def failing(node: NodeReport, device: str, why: str = "XID 79, the GPU has fallen off the bus") -> NodeReport:
    devices = tuple(
        each.model_copy(update={"suspect": why}) if each.id == device else each for each in node.devices
    )
    return node.model_copy(update={"devices": devices})


def test_a_leased_device_that_fails_is_shown_and_the_retry_gets_another(
    broker: Broker, client: Client, speaking: list[NodeReport]
) -> None:
    first = ask(broker, "train")
    held = look(broker, first, "granted").held
    assert held is not None
    (bad,) = held.devices
    speaking[0] = failing(speaking[0], bad)
    deadline = time.monotonic() + 20
    while True:
        devices = {each["id"]: each for each in client("task").get("/v1/nodes").json()[0]["devices"]}
        if devices[bad]["why"]:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert devices[bad]["state"] == "leased" and "XID 79" in devices[bad]["why"]
    asyncio.run(broker.cancel(first, "failed"))  # the task failed and said nothing of the device
    second = ask(broker, "train", try_number=2)
    again = look(broker, second, "granted").held
    assert again is not None and bad not in again.devices
    asyncio.run(broker.cancel(second, "failed"))
    speaking[0] = report()  # the agent was started anew and forgot the XID
    third = look(broker, ask(broker, "train", try_number=3), "granted").held
    assert third is not None and bad not in third.devices


def test_a_retry_through_the_tables_avoids_it_as_well(broker: Broker, speaking: list[NodeReport]) -> None:
    first = ask(broker, "train")
    held = look(broker, first, "granted").held
    assert held is not None
    speaking[0] = failing(speaking[0], held.devices[0])
    deadline = time.monotonic() + 20
    while not broker.mirror.suspects():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    key = broker.desk.board.entries[first].body
    retry = key.model_copy(update={"key": key.key.model_copy(update={"try_number": 2})})
    claim_id = broker.repository.submit(
        retry, now=broker.clock(), usable=(), suspects=broker.mirror.suspects()
    )
    (row,) = claims(broker.repository, [claim_id])
    assert row.excluded == [held.devices[0]]


def test_devices_behind_a_dead_driver_are_out_of_reach_and_not_gone(
    broker: Broker, client: Client, speaking: list[NodeReport]
) -> None:
    """An agent that starts before the driver is loaded reports its node without devices."""
    words = "no NVML: driver not loaded; load the kernel module nvidia (modprobe nvidia)"
    speaking[0] = report(gpus=0).model_copy(update={"labels": {"nvml": words}})
    deadline = time.monotonic() + 20
    while not broker.mirror.suspects():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    waits = ask(broker, "both", 2)
    assert "driver not loaded" in (until(broker, waits, "devices_unavailable").reason or "")
    speaking[0] = report()
    assert look(broker, waits, "granted").state.value == "granted"


def test_a_waiting_claim_outlives_a_fleet_that_shrinks_and_grows_again(
    broker: Broker, client: Client, speaking: list[NodeReport]
) -> None:
    speaking.append(report("n2"))
    deadline = time.monotonic() + 20
    while client("task").get("/v1/status").json()["devices"] < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    blocker = ask(broker, "blocker")
    look(broker, blocker, "granted")
    waits = ask(broker, "gang", 4)
    until(broker, waits, "devices_leased")
    speaking[1] = report("n2", gpus=0)  # its devices were taken out, or split
    entry = until(broker, waits, "impossible")
    assert entry.state.value == "pending"
    assert "the fleet has 2, the largest node 2" in (entry.reason or "")
    assert "unless what is missing comes back" in (entry.reason or "")
    (row,) = client("task").get("/v1/queue").json()
    assert row["reason_code"] == "impossible"
    speaking[1] = report("n2")
    asyncio.run(broker.cancel(blocker))
    assert look(broker, waits, "granted").state.value == "granted"


def test_the_next_leader_counts_on_and_rejects_in_time(
    broker: Broker, settings: Settings, speaking: list[NodeReport]
) -> None:
    look(broker, ask(broker, "blocker"), "granted")
    waits = ask(broker, "both", 2)
    until(broker, waits, "devices_leased")
    speaking[0] = report(gpus=1)
    since = until(broker, waits, "impossible").impossible_since
    assert since is not None
    while not claims(broker.repository, [waits])[0].impossible_since:
        time.sleep(0.05)
    broker.leader.stop()
    heir = Broker(settings.model_copy(update={"impossible_for_s": 3.0}))
    heir.start()
    try:
        until_leading(heir)
        assert heir.desk.board.entries[waits].impossible_since == since
        entry = look(heir, waits, "rejected")
        assert (entry.state.value, entry.reason_code) == ("rejected", "exceeds_fleet")
        assert "impossible since" in (entry.reason or "")
    finally:
        heir.stop()


def test_a_claim_that_comes_before_any_agent_waits_for_it(settings: Settings) -> None:
    broker = Broker(settings)
    broker.start()
    try:
        until_leading(broker)
        waits = ask(broker, "early")
        assert "start an agent" in (until(broker, waits, "impossible").reason or "")
        broker.report(ReportBody(nodes=(report(),)))
        assert look(broker, waits, "granted").state.value == "granted"
    finally:
        broker.stop()

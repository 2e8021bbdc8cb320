"""Parts of devices over real HTTP: who gets how much, and what people and agents see of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.board import entry_of
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import ClaimBody, DeviceView, RequestBody, TaskKey

from .conftest import report, until_leading

Client = Callable[..., httpx.Client]
GIB = 1024


@pytest.fixture
def tasks(client: Client) -> httpx.Client:
    return client("task")


def ask(tasks: httpx.Client, task: str, *, wait_s: float = 5, try_number: int = 1, **request: Any) -> Any:
    key = {"dag_id": "d", "run_id": "r", "task_id": task, "try_number": try_number}
    answer = tasks.post(f"/v1/claims?wait_s={wait_s}", json={"key": key, "request": request}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def device_of(view: Any) -> DeviceView:
    (device,) = view["lease"]["devices"]
    return DeviceView.model_validate(device)


def rows(tasks: httpx.Client) -> dict[str, Any]:
    return {device["id"]: device for node in tasks.get("/v1/nodes").json() for device in node["devices"]}


def end(tasks: httpx.Client, view: Any) -> None:
    lease = view["lease"]
    body = {"secret": lease["secret"], "epoch": lease["epoch"]}
    assert tasks.post(f"/v1/leases/{lease['lease_id']}/release", json=body).status_code == 200


def test_tasks_share_a_device_by_memory_and_each_hears_its_limit(tasks: httpx.Client) -> None:
    held = [ask(tasks, f"t{number}", milli=1, memory_mib=8 * GIB) for number in range(6)]
    devices = [device_of(view) for view in held]
    # 8 of 40 GiB are a fifth: five on the first device, then the second one.
    assert [each.milli for each in devices] == [200] * 6
    assert {each.memory_limit_mib for each in devices} == {8 * GIB}
    assert [sum(each.id == name for each in devices) for name in sorted({d.id for d in devices})] == [5, 1]


def test_people_see_who_shares_a_device_and_what_is_left_of_it(tasks: httpx.Client) -> None:
    first = ask(tasks, "small", milli=1, memory_mib=8 * GIB)
    second = ask(tasks, "half", milli=500)
    name = device_of(first).id
    assert device_of(second).id == name
    row = rows(tasks)[name]
    assert (row["state"], row["free"]) == ("shared", 0.3)
    assert [(each["task"], each["share"]) for each in row["holders"]] == [
        ("d.small r try 1", 0.2),
        ("d.half r try 1", 0.5),
    ]
    assert [lease["shares"] for lease in tasks.get("/v1/leases").json()] == [[0.2], [0.5]]
    assert tasks.get("/v1/status").json()["free"] == 1.3
    end(tasks, first)
    assert [each["share"] for each in rows(tasks)[name]["holders"]] == [0.5]
    end(tasks, second)
    assert (rows(tasks)[name]["state"], rows(tasks)[name]["free"]) == ("free", 1.0)


def test_the_agent_hears_of_every_lease_of_its_device(tasks: httpx.Client, client: Client) -> None:
    held = [ask(tasks, f"t{number}", milli=250) for number in range(3)]
    body = ReportBody(nodes=(report(),)).model_dump(mode="json")
    leased = client("agent").post("/v1/agents/report", json=body).json()["leased"]
    assert {each["lease_id"] for each in leased} == {view["lease"]["lease_id"] for view in held}
    assert len({each["id"] for each in leased}) == 1


def test_a_whole_device_waits_until_the_last_share_of_it_ends(broker: Broker, tasks: httpx.Client) -> None:
    broker.report(ReportBody(nodes=(report(gpus=1),)))
    shares = [ask(tasks, f"t{number}", milli=500) for number in range(2)]
    whole = ask(tasks, "whole", wait_s=0)
    end(tasks, shares[0])
    assert tasks.post(f"/v1/claims/{whole['claim_id']}/collect").json()["state"] == "pending"
    end(tasks, shares[1])
    assert device_of(ask(tasks, "whole")).milli == 1000


def test_a_retry_takes_over_the_share_of_the_try_before(tasks: httpx.Client) -> None:
    first = ask(tasks, "train", milli=1, memory_mib=10 * GIB)
    again = ask(tasks, "train", milli=1, memory_mib=10 * GIB, try_number=2)
    assert (again["lease"]["lease_id"], again["lease"]["epoch"]) == (first["lease"]["lease_id"], 2)
    assert device_of(again).milli == 250
    assert rows(tasks)[device_of(again).id]["free"] == 0.75


def test_more_memory_than_any_device_has_is_refused_with_the_largest(tasks: httpx.Client) -> None:
    never = ask(tasks, "t", milli=1, memory_mib=48 * GIB)
    assert (never["state"], never["reason_code"]) == ("rejected", "exceeds_memory")
    assert "asked 1 shared GPU with 48GiB" in never["reason"]
    assert "the largest has 40GiB" in never["reason"]


def test_shares_are_the_same_after_another_replica_took_over(
    broker: Broker, tasks: httpx.Client, settings: Settings
) -> None:
    shares = [ask(tasks, f"t{number}", milli=500) for number in range(2)]
    broker.leader.stop()
    second = Broker(settings)
    second.start()
    try:
        second.report(ReportBody(nodes=(report(),)))
        until_leading(second)
        assert second.desk.engine is not None
        second.desk.engine.validate()
        assert sorted(second.desk.engine.floor.capacity.free_of_kind) == [1000]
        (name,) = {device_of(view).id for view in shares}
        assert [entry.held and entry.held.shares for entry in second.desk.board.by_device[name]] == [
            (500,),
            (500,),
        ]
    finally:
        second.stop()


@pytest.mark.parametrize(("most", "devices"), [(8, 1), (2, 2), (1, 4)])
def test_no_more_share_a_device_than_is_allowed(settings: Settings, most: int, devices: int) -> None:
    broker = Broker(settings.model_copy(update={"most_sharers": most}))
    broker.start()
    try:
        broker.report(ReportBody(nodes=(report(gpus=4),)))
        until_leading(broker)
        held = []
        for number in range(4):
            key = TaskKey(dag_id="d", run_id="r", task_id=f"t{number}")
            wish = ClaimBody(key=key, request=RequestBody(milli=1, memory_mib=GIB))
            entry = asyncio.run(broker.submit(wish, is_attended=True))
            assert entry.held is not None
            held += entry.held.devices
        assert len(set(held)) == devices
    finally:
        broker.stop()


def change(tasks: httpx.Client, view: Any, path: str, **more: Any) -> httpx.Response:
    lease = view["lease"]
    body = {"secret": lease["secret"], "epoch": lease["epoch"], **more}
    return tasks.post(f"/v1/leases/{lease['lease_id']}/{path}", json=body)


def test_a_share_grows_in_place_and_else_is_offered_the_other_device(
    broker: Broker, tasks: httpx.Client
) -> None:
    first = ask(tasks, "first", milli=1, memory_mib=10 * GIB)
    second = ask(tasks, "second", milli=1, memory_mib=10 * GIB)
    here = device_of(first).id
    assert device_of(second).id == here
    grown = change(tasks, first, "resize", memory_mib=20 * GIB).json()
    (device,) = grown["lease"]["devices"]
    assert (device["id"], device["milli"], grown["offer"]) == (here, 500, None)
    offered = change(tasks, second, "resize", memory_mib=30 * GIB).json()["offer"]
    (there,) = offered["devices"]
    assert (there["id"] != here, there["milli"]) == (True, 750)
    assert rows(tasks)[there["id"]]["free"] == 0.25, "it is held while the offer is open"
    for path in ("accept", "commit"):
        assert change(tasks, second, path, offer_id=offered["offer_id"]).status_code == 200
    assert {name: row["free"] for name, row in rows(tasks).items()} == {here: 0.5, there["id"]: 0.25}
    stored = {held.devices[0]: held.shares for held, _ in broker.repository.live_leases()}
    assert stored == {here: (500,), there["id"]: (750,)}
    smaller = change(tasks, first, "resize", memory_mib=GIB).json()["lease"]["devices"]
    assert smaller[0]["milli"] == 125, "never less than the smallest share"


def test_a_share_that_is_all_of_its_device_is_so_for_the_next_leader_too(
    broker: Broker, tasks: httpx.Client
) -> None:
    ask(tasks, "large", milli=1, memory_mib=40 * GIB)
    ((held, row),) = broker.repository.live_leases()
    assert entry_of(row, held).lease().milli == (1000,)

"""What people reported of other systems, tried on the served broker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.store.tables import claim, lease

from .conftest import report

Client = Callable[..., httpx.Client]


@pytest.fixture
def tasks(client: Client) -> httpx.Client:
    return client("task")


def acquire(tasks: httpx.Client, task: str, *, try_number: int = 1, wait_s: float = 2, gpus: int = 1) -> Any:
    key = {"dag_id": "d", "run_id": "r", "task_id": task, "try_number": try_number}
    body = {"key": key, "request": {"gpus": gpus}}
    return tasks.post("/v1/claims", params={"wait_s": wait_s}, json=body).raise_for_status().json()


def release(tasks: httpx.Client, held: dict[str, Any], **more: object) -> None:
    body = {"secret": held["secret"], "epoch": held["epoch"], **more}
    tasks.post(f"/v1/leases/{held['lease_id']}/release", json=body).raise_for_status()


def devices(view: dict[str, Any]) -> set[str]:
    return {device["id"] for device in view["lease"]["devices"]}


def test_two_acquires_at_once_with_one_key_give_one_lease(tasks: httpx.Client) -> None:
    views: list[Any] = []
    racers = [threading.Thread(target=lambda: views.append(acquire(tasks, "one"))) for _ in range(8)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(30)
    assert len({view["lease"]["lease_id"] for view in views}) == 1
    assert len(tasks.get("/v1/leases").json()) == 1


def test_what_waits_is_shown_as_waiting_and_not_as_running(tasks: httpx.Client) -> None:
    acquire(tasks, "busy", gpus=2)
    waiting = acquire(tasks, "waits", wait_s=0.2)
    assert (waiting["state"], waiting["lease"]) == ("pending", None)
    assert [row["key"]["task_id"] for row in tasks.get("/v1/leases").json()] == ["busy"]
    (row,) = tasks.get("/v1/queue").json()
    assert row["key"]["task_id"] == "waits" and row["waiting_s"] >= 0


def test_idle_devices_are_still_shown_when_one_of_them_is_leased(tasks: httpx.Client) -> None:
    """NVIDIA/dcgm-exporter#569: unallocated GPUs vanish once one is allocated."""
    (before,) = tasks.get("/v1/nodes").json()
    held = devices(acquire(tasks, "one"))
    (after,) = tasks.get("/v1/nodes").json()
    assert [each["id"] for each in after["devices"]] == [each["id"] for each in before["devices"]]
    assert {each["state"] for each in after["devices"] if each["id"] not in held} == {"free"}


def test_a_retry_after_a_killed_worker_finds_its_own_devices(tasks: httpx.Client) -> None:
    first = acquire(tasks, "train")
    again = acquire(tasks, "train", try_number=2)
    assert again["lease"]["lease_id"] == first["lease"]["lease_id"]
    assert devices(again) == devices(first)
    assert again["lease"]["epoch"] == first["lease"]["epoch"] + 1
    assert len(tasks.get("/v1/leases").json()) == 1


def test_a_retry_does_not_come_back_to_a_device_with_ecc_errors(broker: Broker, tasks: httpx.Client) -> None:
    first = acquire(tasks, "train", gpus=2)
    ecc = "uncorrectable ECC error"
    broker.report(ReportBody(nodes=(report(suspect=ecc), report("n2", gpus=2, host="h2"))))
    again = acquire(tasks, "train", try_number=2, gpus=2)
    assert {device["node"] for device in again["lease"]["devices"]} == {"n2"}
    states = {d["id"]: d["state"] for node in tasks.get("/v1/nodes").json() for d in node["devices"]}
    assert all(states[device] == "unavailable" for device in devices(first))


def test_a_device_that_failed_a_task_is_not_given_to_its_retry(tasks: httpx.Client) -> None:
    first = acquire(tasks, "train")
    (failed,) = devices(first)
    release(tasks, first["lease"], outcome="failed", failed_devices=[failed])
    again = acquire(tasks, "train", try_number=2)
    assert devices(again) and failed not in devices(again)


def test_the_history_of_a_killed_holder_names_its_dag_run_and_task(
    broker: Broker, tasks: httpx.Client
) -> None:
    broker.settings = broker.desk.settings = broker.settings.model_copy(update={"lease_ttl_s": 1.0})
    acquire(tasks, "killed", gpus=2)
    assert acquire(tasks, "next", gpus=2, wait_s=20)["state"] == "granted", "devices come back by the TTL"
    with broker.engine.connect() as connection:
        columns = (claim.c.dag_id, claim.c.run_id, claim.c.task_id, lease.c.end_reason)
        joined = select(*columns).join(lease, lease.c.claim_id == claim.c.id)
        rows = connection.execute(joined.where(lease.c.ended_at.is_not(None))).all()
    assert [tuple(row) for row in rows] == [("d", "r", "killed", "expired")]


def test_a_device_in_use_by_outsiders_is_not_given_out_and_names_them(
    broker: Broker, tasks: httpx.Client
) -> None:
    node = report()
    busy = node.devices[0].model_copy(update={"foreign_pids": (4242,)})
    broker.report(ReportBody(nodes=(node.model_copy(update={"devices": (busy, node.devices[1])}),)))
    assert acquire(tasks, "both", gpus=2, wait_s=0.3)["state"] == "pending"
    (row,) = tasks.get("/v1/nodes").json()
    assert "4242" in next(device["why"] for device in row["devices"] if device["id"] == busy.id)

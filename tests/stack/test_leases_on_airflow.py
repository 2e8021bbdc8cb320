"""Leases of real tasks in a real Airflow that are killed, marked, deferred and refused."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from scripts.rest import BrokerApi
from scripts.stack import Stack

pytestmark = pytest.mark.stack
DAG = "lease_probe"


def until(check: Callable[[], Any], what: str, seconds: float = 90) -> Any:
    """Return the first true answer of `check`."""
    deadline = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < deadline, what
        time.sleep(0.25)
    return answer


@pytest.fixture
def start(stack: Stack) -> Callable[..., str]:
    """Return ``start(**conf)``: trigger a run of the probe, return its id."""

    def trigger(**conf: object) -> str:
        stack.wait_for_dag(DAG)
        return stack.api.trigger(DAG, conf)

    return trigger


@pytest.fixture
def tasks(broker: Callable[[str], BrokerApi]) -> BrokerApi:
    return broker("admin")


@pytest.fixture
def all_leased(stack: Stack, tasks: BrokerApi) -> Iterator[Callable[[], None]]:
    """Hold the whole fleet; yield what gives it back."""
    until(lambda: tasks.get("/status").json()["free"] == 4, "the fleet is free")
    key = {"dag_id": "tests", "run_id": str(time.monotonic_ns()), "task_id": "holder"}
    claim = tasks.post("/claims?wait_s=10", {"key": key, "request": {"gpus": 4}}).json()
    assert claim["state"] == "granted", claim

    def give_back() -> None:
        tasks.post(f"/claims/{claim['claim_id']}/cancel", {})

    yield give_back
    give_back()


def instance(stack: Stack, run_id: str, task: str = "hold") -> dict[str, Any]:
    (found,) = [t for t in stack.api.task_instances(DAG, run_id) if t["task_id"] == task]
    return found


def test_a_task_killed_on_its_last_try_gives_its_devices_back(
    stack: Stack, tasks: BrokerApi, start: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    run_id = start(gpus=4, seconds=300, file=str(file))
    pid = int(until(lambda: file.is_file() and file.read_text(), "the task works"))
    (lease,) = tasks.get("/leases").json()
    assert (lease["key"]["run_id"], len(lease["devices"])) == (run_id, 4)
    os.kill(pid, signal.SIGKILL)
    until(lambda: tasks.get("/leases").json() == [], "the devices return")
    database = sqlite3.connect(stack.home.database)
    (reason,) = database.execute(
        "select end_reason from gpu_lease where id = ?", (lease["lease_id"],)
    ).fetchone()
    database.close()
    assert reason == "task_failed", "seen at once, not by the end of the TTL"


def test_a_deferred_task_resumes_when_devices_are_free(
    stack: Stack, tasks: BrokerApi, start: Callable[..., str], all_leased: Callable[[], None]
) -> None:
    run_id = start(gpus=1)
    until(lambda: instance(stack, run_id)["state"] == "deferred", "it leaves its worker slot")
    (row,) = until(
        lambda: [r for r in tasks.get("/queue").json() if r["key"]["run_id"] == run_id and r["reason"]],
        "its place is known",
    )
    assert (row["position"], row["reason_code"]) == (1, "devices_leased")
    all_leased()
    until(lambda: instance(stack, run_id)["state"] == "success", "it resumes")


def test_marking_a_deferred_task_failed_withdraws_its_claim(
    stack: Stack, tasks: BrokerApi, start: Callable[..., str], all_leased: Callable[[], None]
) -> None:
    run_id = start(gpus=1)
    until(lambda: instance(stack, run_id)["state"] == "deferred", "it leaves its worker slot")
    path = f"/api/v2/dags/{DAG}/dagRuns/{run_id}/taskInstances/hold"
    stack.api.request("PATCH", path, json={"new_state": "failed"})
    until(
        lambda: not [r for r in tasks.get("/queue").json() if r["key"]["run_id"] == run_id],
        "the claim is withdrawn",
    )


def test_marking_a_running_task_failed_ends_its_work_and_gives_its_devices_back(
    stack: Stack, tasks: BrokerApi, start: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    run_id = start(gpus=2, seconds=300, file=str(file))
    pid = int(until(lambda: file.is_file() and file.read_text(), "the task works"))
    path = f"/api/v2/dags/{DAG}/dagRuns/{run_id}/taskInstances/hold"
    stack.api.request("PATCH", path, json={"new_state": "failed"})
    until(lambda: not psutil.pid_exists(pid), "the work ends")
    until(lambda: tasks.get("/leases").json() == [], "the devices return")


def test_what_the_fleet_can_never_give_fails_without_a_retry(stack: Stack, start: Callable[..., str]) -> None:
    run_id = start()
    failed = until(
        lambda: (found := instance(stack, run_id, "impossible"))["state"] == "failed" and found, "it fails"
    )
    assert failed["try_number"] == 1
    log = stack.api.task_log(failed)
    assert "asked 16 GPUs" in log and "[exceeds_fleet]" in log


def test_the_priority_of_a_run_reaches_its_tasks(stack: Stack, start: Callable[..., str]) -> None:
    hot, plain = start(priority=42), start()
    assert instance(stack, hot)["priority_weight"] == 42
    assert instance(stack, plain)["priority_weight"] == 1


def test_people_need_airflows_login_to_look(stack: Stack) -> None:
    with httpx.Client(base_url=stack.url, trust_env=False) as anonymous:
        for path in ("/gpu/ui/nodes", "/gpu/ui/queue", "/gpu/ui/leases", "/gpu/ui/status"):
            assert anonymous.get(path).status_code == 401
        for path in ("/gpu/docs", "/gpu/openapi.json"):
            assert anonymous.get(path).status_code == 404
    nodes = stack.api.request("GET", "/gpu/ui/nodes")
    assert {device["model"] for node in nodes for device in node["devices"]} == {"A100", "V100"}

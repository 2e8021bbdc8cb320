"""Poison, races and twins: what must not stop the broker or touch those who did nothing wrong."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from airflow_gpu_provider.broker.engine import Engine
from airflow_gpu_provider.broker.model import Decisions, LeaseId
from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.exceptions import BrokerUnavailable, InvalidRequest, LeaseLost
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.requests import Renew, Submit
from airflow_gpu_provider.store.tables import lease
from airflow_gpu_provider.store.turns import Overtaken
from airflow_gpu_provider.wire import ClaimBody, RequestBody, TaskKey

from .conftest import SECRET, ask, look, report

Client = Callable[..., httpx.Client]


def body(task: str, *, try_number: int = 1, ti_id: str | None = None, gpus: int = 1) -> ClaimBody:
    key = TaskKey(dag_id="d", run_id="r", task_id=task, map_index=-1, try_number=try_number)
    return ClaimBody(key=key, request=RequestBody(gpus=gpus), ti_id=ti_id)


def fail_writes(broker: Broker, monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> None:
    """Let the next turns fail with these errors before anything is written."""
    left, write = list(errors), broker.store.write

    def failing(*args: Any) -> None:
        if left:
            raise left.pop(0)
        write(*args)

    monkeypatch.setattr(broker.store, "write", failing)


def test_a_broker_that_could_not_start_leaves_nothing_in_the_way_of_the_next(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/gpu.db"
    settings = Settings(token_secret=SECRET, sql_alchemy_conn=url)
    tries = [Broker(settings) for _ in range(2)]
    for each in tries:
        with pytest.raises(OperationalError, match="no such table"):
            each.start()


def test_a_refused_request_in_an_overtaken_turn_does_not_end_the_leader(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_writes(broker, monkeypatch, Overtaken("another replica"), Overtaken("again"))
    good = broker.desk.ask(Submit(body("good")))
    refused = broker.desk.ask(Renew("no such lease", 1))
    with pytest.raises(LeaseLost):
        refused.result(10)
    assert good.result(10).body.key.task_id == "good"
    assert look(broker, ask(broker, "later"), "granted").state.value == "granted"


def test_a_database_that_fails_for_a_moment_is_an_answer_and_not_a_hang(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_writes(broker, monkeypatch, OperationalError("insert", {}, Exception("disk")))
    with pytest.raises(BrokerUnavailable, match="database failed"):
        broker.desk.ask(Submit(body("unlucky"))).result(10)
    deadline = time.monotonic() + 20
    while not broker.desk.is_open:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert look(broker, ask(broker, "later"), "granted").state.value == "granted"


def test_a_request_that_cannot_be_judged_is_refused_alone(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide, is_served = Engine.turn, threading.Event()

    def poisoned(self: Engine, now: datetime) -> Decisions:
        if any(claim.value == 13 for claim in self._intake):
            raise OverflowError("poison")
        return decide(self, now)

    monkeypatch.setattr(Engine, "turn", poisoned)
    serve = broker.desk.turn
    monkeypatch.setattr(broker.desk, "turn", lambda term: is_served.is_set() and serve(term))
    bad = body("bad").model_copy(update={"value": 13.0})
    futures = [broker.desk.ask(Submit(each)) for each in (body("one"), bad, body("two"))]
    is_served.set()  # all three in one turn
    with pytest.raises(InvalidRequest, match="cannot judge this request: poison"):
        futures[1].result(20)
    assert [f.result(20).body.key.task_id for f in (futures[0], futures[2])] == ["one", "two"]


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": 10**20},
        {"max_runtime_s": 1e12},
        {"cpu_cores": float("inf")},
        {"host_memory_mib": 10**30},
        {"host": "h\0"},
        {"models": ["x" * 1000]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_values_that_no_fleet_has_are_refused_at_the_door(client: Client, change: dict[str, Any]) -> None:
    key = {"dag_id": "d", "run_id": "r", "task_id": "t"}
    content = json.dumps({"key": key, "request": {"gpus": 1, **change}})
    answer = client("task").post("/v1/claims", content=content)
    assert answer.status_code == 422, answer.text
    assert next(iter(change)) in answer.text


@pytest.mark.parametrize(
    "key", [{"map_index": 2**40}, {"try_number": 0}, {"dag_id": "x" * 251}, {"run_id": "\0"}]
)
def test_keys_that_no_column_holds_are_refused_at_the_door(client: Client, key: dict[str, Any]) -> None:
    full = {"dag_id": "d", "run_id": "r", "task_id": "t", **key}
    answer = client("task").post("/v1/claims", json={"key": full, "request": {"gpus": 1}})
    assert answer.status_code == 422, answer.text


def test_a_device_that_two_nodes_report_is_given_out_once(broker: Broker, client: Client) -> None:
    twin = report().model_copy(update={"name": "renamed"})
    broker.report(ReportBody(nodes=(twin,)))
    first = ask(broker, "one", gpus=2)
    assert look(broker, first, "granted").state.value == "granted"
    third = ask(broker, "two", gpus=3)
    assert look(broker, third, "rejected").reason_code == "exceeds_fleet"
    nodes = {node["name"]: node for node in client("task").get("/v1/nodes").json()}
    assert "also reported by node n1" in nodes["renamed"]["devices"][0]["why"]


def test_a_retry_in_the_turn_in_which_the_old_lease_ends_gets_a_lease_that_lives(broker: Broker) -> None:
    first = ask(broker, "t", gpus=2)
    entry = look(broker, first, "granted")
    held = entry.held
    assert held is not None and broker.desk.engine is not None
    past = broker.clock() - timedelta(seconds=1)
    held.expires_at = past
    with broker.engine.begin() as connection:
        connection.execute(update(lease).where(lease.c.id == held.lease_id).values(expires_at=past))
    broker.desk.engine.renew(LeaseId(held.lease_id), past)
    second = asyncio.run(broker.submit(body("t", try_number=2, gpus=2), is_attended=False)).claim_id
    fresh = look(broker, second, "granted")
    assert fresh.held is not None and fresh.held.lease_id != held.lease_id
    ((stored, claim),) = broker.repository.live_leases()
    assert (stored.row.id, claim.id) == (fresh.held.lease_id, second)


def test_a_run_made_again_under_the_same_id_gets_a_claim_of_its_own(broker: Broker) -> None:
    def submit(ti_id: str) -> str:
        return asyncio.run(broker.submit(body("t", ti_id=ti_id), is_attended=False)).claim_id

    first = submit("first run")
    look(broker, first, "granted")
    asyncio.run(broker.cancel(first))
    assert submit("first run") == first, "the same task asks again"
    second = submit("second run")
    assert second != first
    assert look(broker, second, "granted").state.value == "granted"
    with pytest.raises(InvalidRequest):
        asyncio.run(broker.find(first))


def test_who_waits_hears_before_the_turn_comes(client: Client, broker: Broker) -> None:
    tasks = client("task")
    key = {"dag_id": "d", "run_id": "r", "task_id": "holder"}
    holder = {"key": key, "request": {"gpus": 2, "max_runtime_s": 30}}
    assert tasks.post("/v1/claims?wait_s=5", json=holder).json()["state"] == "granted"
    waiting = ask(broker, "next")
    question = {"claim_ids": [waiting], "timeout_s": 15, "near_s": 60}
    (view,) = tasks.post("/v1/claims/wait", json=question, timeout=30).json()["ready"]
    assert view["state"] == "pending" and 0 < view["starts_in_s"] <= 30


def test_a_watch_is_told_again_what_it_did_not_acknowledge(client: Client, broker: Broker) -> None:
    tasks, waiting = client("task"), ask(broker, "one")
    first = tasks.post("/v1/claims/wait", json={"claim_ids": [waiting], "timeout_s": 10}).json()
    again = tasks.post("/v1/claims/wait", json={"watch": first["watch"], "timeout_s": 10}).json()
    assert [view["claim_id"] for view in again["ready"]] == [waiting], "the first answer may be lost"
    heard = {"watch": first["watch"], "drop": [waiting], "timeout_s": 0}
    assert tasks.post("/v1/claims/wait", json=heard).json()["ready"] == []
    assert tasks.post("/v1/claims/wait", json={"watch": "gone", "timeout_s": 0}).json()["watch"] is None

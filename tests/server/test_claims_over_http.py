"""Claims and leases over real HTTP, decided by a real leader."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker
from tests.stored_rows import pending

from .conftest import report

Client = Callable[..., httpx.Client]


def ask(task: str, **request: Any) -> dict[str, Any]:
    key = {"dag_id": "d", "run_id": "r", "task_id": task, "try_number": request.pop("try_number", 1)}
    return {"key": key, "value": request.pop("value", 0), "request": request}


@pytest.fixture
def tasks(client: Client) -> httpx.Client:
    return client("task")


def submit(tasks: httpx.Client, body: dict[str, Any], wait_s: float = 5) -> dict[str, Any]:
    answer = tasks.post(f"/v1/claims?wait_s={wait_s}", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    view: dict[str, Any] = answer.json()
    return view


def release(tasks: httpx.Client, lease: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"secret": lease["secret"], "epoch": lease["epoch"], **more}
    return tasks.post(f"/v1/leases/{lease['lease_id']}/release", json=body)


def queue(tasks: httpx.Client) -> list[dict[str, Any]]:
    """Return the queue once every claim's place in it is worked out, which happens once a second."""
    deadline = time.monotonic() + 20
    while True:
        rows: list[dict[str, Any]] = tasks.get("/v1/queue").json()
        if all(row["position"] for row in rows):
            return rows
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_free_device_is_granted_with_the_answer(tasks: httpx.Client) -> None:
    view = submit(tasks, ask("train", gpus=1, min_tflops=35))
    assert view["state"] == "granted"
    (device,) = view["lease"]["devices"]
    assert (device["model"], device["node"], device["host"]) == ("A100", "n1", "h1")
    assert view["lease"]["match_degree"] == 1.0
    assert release(tasks, view["lease"]).json() == {"released": True}
    assert tasks.get("/v1/leases").json() == []


def test_never_and_not_now_are_two_answers(tasks: httpx.Client) -> None:
    first = submit(tasks, ask("one", gpus=2))
    assert first["state"] == "granted"
    later = submit(tasks, ask("two", gpus=2), wait_s=0.5)
    assert (later["state"], later["lease"]) == ("pending", None)
    never = submit(tasks, ask("three", gpus=16))
    assert (never["state"], never["reason_code"]) == ("rejected", "exceeds_fleet")
    assert "16" in never["reason"] and "2" in never["reason"]
    (row,) = queue(tasks)
    assert (row["position"], row["claim_id"]) == (1, later["claim_id"])
    assert row["reason"] and row["reason_code"]


def test_a_waiting_claim_is_granted_when_another_ends(tasks: httpx.Client) -> None:
    first = submit(tasks, ask("one", gpus=2))
    second = submit(tasks, ask("two", gpus=1), wait_s=0)
    third = submit(tasks, ask("three", gpus=1), wait_s=0)
    ids = [second["claim_id"], third["claim_id"]]
    threading.Timer(0.3, release, (tasks, first["lease"])).start()
    granted: set[str] = set()
    deadline = time.monotonic() + 20
    while len(granted) < 2 and time.monotonic() < deadline:
        left = [claim_id for claim_id in ids if claim_id not in granted]
        answer = tasks.post("/v1/claims/wait", json={"claim_ids": left, "timeout_s": 5}, timeout=30)
        granted |= {view["claim_id"] for view in answer.json()["ready"] if view["state"] == "granted"}
    assert granted == set(ids)
    held = [tasks.post(f"/v1/claims/{claim_id}/collect").json()["lease"] for claim_id in ids]
    devices = [device["id"] for lease in held for device in lease["devices"]]
    assert len(set(devices)) == 2, "two claims never share a device"


def test_renew_and_release_need_the_secret_of_the_lease(tasks: httpx.Client, client: Client) -> None:
    lease = submit(tasks, ask("one", gpus=1))["lease"]
    url = f"/v1/leases/{lease['lease_id']}"
    for path in ("renew", "release"):
        answer = client("admin").post(f"{url}/{path}", json={"secret": "guess", "epoch": 1})
        assert (answer.status_code, answer.json()["detail"]["reason"]) == (403, "lease_secret")
    body = {"secret": lease["secret"], "epoch": lease["epoch"]}
    assert tasks.post(f"{url}/renew", json=body).status_code == 200
    assert release(tasks, lease).status_code == 200
    lost = tasks.post(f"{url}/renew", json=body)
    assert (lost.status_code, lost.json()["detail"]["reason"]) == (409, "lease_lost")


def test_no_answer_shows_a_secret_but_to_the_holder(tasks: httpx.Client) -> None:
    lease = submit(tasks, ask("one", gpus=1))["lease"]
    for path in ("/v1/leases", "/v1/nodes", "/v1/queue", "/v1/status"):
        assert lease["secret"] not in tasks.get(path).text


def test_a_lease_that_nobody_renews_ends_and_its_device_returns(broker: Broker, tasks: httpx.Client) -> None:
    broker.settings = broker.desk.settings = broker.settings.model_copy(update={"lease_ttl_s": 1.0})
    submit(tasks, ask("one", gpus=2))
    second = submit(tasks, ask("two", gpus=2), wait_s=10)
    assert second["state"] == "granted"
    (row,) = tasks.get("/v1/leases").json()
    assert row["key"]["task_id"] == "two"


def test_a_device_that_turns_suspect_is_not_offered(broker: Broker, tasks: httpx.Client) -> None:
    broker.report(
        ReportBody(nodes=(report(suspect="uncorrectable ECC error"), report("n2", model="V100", gpus=1)))
    )
    view = submit(tasks, ask("one", gpus=1, min_tflops=35))
    assert view["lease"]["devices"][0]["model"] == "V100", "a weaker match is the fallback"
    assert view["lease"]["match_degree"] == pytest.approx(15 / 35)
    waiting = submit(tasks, ask("two", gpus=1, models=["A100"]), wait_s=0.5)
    assert waiting["state"] == "pending"
    states = {d["id"]: (d["state"], d["why"]) for n in tasks.get("/v1/nodes").json() for d in n["devices"]}
    assert states["GPU-n1-0"] == ("unavailable", "uncorrectable ECC error")


@pytest.mark.parametrize(
    "body, field",
    [
        (ask("x", gpus=0), "gpus"),
        (ask("x", gpus=-1), "gpus"),
        (ask("x", gpus=1.5), "gpus"),
        (ask("x", gpus="two"), "gpus"),
        (ask("x", gpu=1), "gpu"),
        ({"request": {"gpus": 1}}, "key"),
    ],
    ids=["zero", "negative", "fraction", "word", "misspelt", "no key"],
)
def test_bad_requests_are_refused_by_field(tasks: httpx.Client, body: dict[str, Any], field: str) -> None:
    answer = tasks.post("/v1/claims", json=body)
    assert answer.status_code == 422
    assert field in answer.text
    assert tasks.get("/v1/queue").json() == []


def test_waiting_for_an_unknown_claim_is_an_error_and_not_a_wait(tasks: httpx.Client) -> None:
    answer = tasks.post("/v1/claims/wait", json={"claim_ids": ["nonsense"], "timeout_s": 30}, timeout=10)
    assert (answer.json()["ready"], answer.json()["unknown"]) == ([], ["nonsense"])


def test_broken_json_is_refused(tasks: httpx.Client) -> None:
    answer = tasks.post("/v1/claims", content='{"key": {', headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


def test_an_agent_hears_which_of_its_devices_are_leased(tasks: httpx.Client, client: Client) -> None:
    lease = submit(tasks, ask("one", gpus=1))["lease"]
    body = {"nodes": [report().model_dump(mode="json")]}
    answer = client("agent").post("/v1/agents/report", json=body).json()
    assert answer["leased"] == [{"id": lease["devices"][0]["id"], "lease_id": lease["lease_id"]}]


def test_a_killed_broker_starts_again_with_all_it_promised(broker: Broker, tasks: httpx.Client) -> None:
    held = submit(tasks, ask("one", gpus=2))["lease"]
    waiting = submit(tasks, ask("two", gpus=1), wait_s=0)
    again = Broker(broker.settings)
    while not again.nodes.load():  # reports are stored once a second
        time.sleep(0.05)
    again.mirror.merge(again.nodes.load())
    ((lease, _claim),) = again.repository.live_leases()
    assert lease.row.id == held["lease_id"]
    assert [row.id for row in pending(again.repository)] == [waiting["claim_id"]]
    assert [stored.report.name for stored in again.mirror.stored()] == ["n1"]
    again.engine.dispose()

"""Whatever is sent to the broker, it answers with a refusal that teaches, and goes on for the others."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.auth import mint_token
from airflow_gpu_provider.server.broker import Broker
from tests.stored_rows import counts

from .conftest import SECRET, ask, look, report, until_leading

Client = Callable[..., httpx.Client]


def claim(task: str = "t", **request: object) -> dict[str, Any]:
    return {"key": {"dag_id": "d", "run_id": "r", "task_id": task}, "request": {"gpus": 1, **request}}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "Invalid JSON"),
        (b"[]", "should be an object"),
        (bytes(range(256)), "Invalid JSON"),
        (b'{"key":' * 50_000, "recursion limit"),
        (b'{"key":{"dag_id":"\\ud800","run_id":"r","task_id":"t"}}', "Invalid JSON"),
        (json.dumps(claim()).replace('"gpus": 1', '"gpus": 1e999').encode(), "request.gpus"),
        (json.dumps({**claim(), "value": float("nan")}).encode(), "value: Input should be a finite number"),
        (json.dumps(claim(gpus=10**9)).encode(), "less than or equal to 100000"),
        (json.dumps(claim(gpus=-1)).encode(), "greater than or equal to 1"),
        (json.dumps(claim(gpu=1)).encode(), "request.gpu: Extra inputs"),
        (json.dumps({**claim(), "run_type": "hot"}).encode(), "'live' or 'backfill'"),
        (json.dumps(claim("nul\0")).encode(), "must not contain NUL"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused_with_its_reason(
    client: Client, broker: Broker, content: bytes, told: str
) -> None:
    answer = client("task").post("/v1/claims", content=content)
    assert answer.status_code == 422
    assert told in answer.json()["detail"]["message"]
    assert counts(broker.repository) == (0, 0, 0)


def test_a_body_without_end_is_not_kept_in_memory(client: Client) -> None:
    answer = client("agent").post("/v1/agents/report", content=b"x" * 17_000_000)
    assert answer.status_code == 413
    assert "16 MiB" in answer.json()["detail"]["message"]


@pytest.mark.parametrize("odd", ["a/b", "a%2Fb", "..", "%00", "%F0%9F%92%A5", "x" * 10_000, "'", "%ff"])
def test_no_id_of_a_claim_or_lease_brings_the_broker_out_of_step(client: Client, odd: str) -> None:
    task = client("task")
    for path in (f"/v1/claims/{odd}/collect", f"/v1/claims/{odd}/cancel", f"/v1/leases/{odd}/renew"):
        answer = task.post(path, json={"secret": "é💥", "epoch": 1})
        assert answer.status_code in (200, 400, 403, 404, 422), (path, answer.text)
        if answer.status_code == 200:
            assert answer.json() == {"cancelled": False}
        if len(odd) > 36:  # more than PostgreSQL has room for
            assert "at most 36 characters" in answer.json()["detail"]["message"]


def test_names_that_mean_something_to_databases_are_names(client: Client) -> None:
    task = client("task")
    for name in ("'; DROP TABLE gpu_claim; -- %s %(x)s \\", "ü💥\u202e", "$1", "{}", "null"):
        view = task.post("/v1/claims?wait_s=5", json=claim(name)).json()
        assert view["key"]["task_id"] == name
        secret = {"secret": view["lease"]["secret"], "epoch": 1}
        released = task.post(f"/v1/leases/{view['lease']['lease_id']}/release", json=secret)
        assert released.json() == {"released": True}


def test_connections_that_end_within_a_request_leave_nothing_that_waits(
    client: Client, base_url: str, broker: Broker
) -> None:
    token = mint_token(SECRET, role="task", subject="test", ttl_s=600)
    body = json.dumps(claim("cut", gpus=2)).encode()
    whole = (
        f"POST /gpu/v1/claims?wait_s=1 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    where = urlsplit(base_url)
    for length in range(1, len(whole) + 1, 7):
        with socket.create_connection((str(where.hostname), where.port or 0)) as connection:
            connection.sendall(whole[:length])
            linger = struct.pack("ii", 1, 0)  # the end is a reset, not a farewell
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    view = client("task").post("/v1/claims?wait_s=10", json=claim("cut", gpus=2)).json()
    assert view["state"] == "granted"
    assert counts(broker.repository) == (0, 1, 2)


def test_a_claim_that_is_sent_by_many_at_once_is_one_claim(client: Client, broker: Broker) -> None:
    with ThreadPoolExecutor(16) as pool:
        sent = [pool.submit(client("task").post, "/v1/claims", json=claim("same")) for _ in range(32)]
    assert len({each.result().json()["claim_id"] for each in sent}) == 1
    assert counts(broker.repository) == (0, 1, 1)


def test_a_claim_withdrawn_while_it_is_granted_holds_nothing(client: Client, broker: Broker) -> None:
    def withdraw(number: int) -> None:
        with client("task") as task:
            claim_id = task.post("/v1/claims", json=claim(f"gone-{number}")).json()["claim_id"]
            waits = pool.submit(task.post, f"/v1/claims/{claim_id}/collect")
            assert task.post(f"/v1/claims/{claim_id}/cancel").status_code == 200
            assert waits.result().status_code == 200

    with ThreadPoolExecutor(8) as pool, ThreadPoolExecutor(4) as askers:
        list(askers.map(withdraw, range(40)))
    assert counts(broker.repository) == (0, 0, 0)


def test_a_thousand_claims_at_once_wait_and_none_is_lost(client: Client, broker: Broker) -> None:
    def submit(part: int) -> set[str]:
        with client("task") as task:
            answers = [task.post("/v1/claims", json=claim(f"{part}-{number}")) for number in range(63)]
        return {answer.json()["claim_id"] for answer in answers}

    with ThreadPoolExecutor(16) as pool:
        found: set[str] = set().union(*pool.map(submit, range(16)))
    assert len(found) == 1008
    assert counts(broker.repository) == (1006, 2, 2)


def test_a_question_to_airflow_that_hangs_delays_no_grant(settings: Any) -> None:
    asked, answered = threading.Event(), threading.Event()

    def hangs(_tasks: object) -> dict[Any, Any]:
        asked.set()
        answered.wait(60)
        raise ConnectionError("Airflow's database is gone")

    broker = Broker(settings, task_states=hangs)
    broker.start()
    try:
        broker.report(ReportBody(nodes=(report(),)))
        until_leading(broker)
        look(broker, ask(broker, "first", ti_id="ti"), "granted")
        assert asked.wait(20)
        assert look(broker, ask(broker, "second"), "granted").state.value == "granted"
        assert not answered.is_set()
    finally:
        answered.set()
        broker.stop()

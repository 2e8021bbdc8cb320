"""Devices that are taken back over real HTTP, on both kinds of database: who hears what, who waits again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.store.tables import claim, lease

from .test_claims_over_http import submit

Client = Callable[..., httpx.Client]

GRACE_S = 4.0


@pytest.fixture(params=["sqlite", "postgresql"])
def settings(request: pytest.FixtureRequest, settings: Settings) -> Settings:
    """Return settings by which whatever is preemptible may be taken back at once."""
    changes: dict[str, Any] = {"preemption_grace_s": GRACE_S, "preemption_least_runtime_s": 0.0}
    if request.param == "postgresql":
        url = request.getfixturevalue("migrated_postgres_url")
        changes["sql_alchemy_conn"] = url
    return settings.model_copy(update=changes)


@pytest.fixture
def tasks(client: Client) -> httpx.Client:
    return client("task")


def asks(task: str, gpus: int = 2, *, value: float = 0, preemptible: bool = False) -> dict[str, Any]:
    key = {"dag_id": "d", "run_id": "r", "task_id": task, "try_number": 1}
    return {"key": key, "value": value, "preemptible": preemptible, "request": {"gpus": gpus}}


def call(tasks: httpx.Client, what: str, held: dict[str, Any], **more: object) -> httpx.Response:
    body = {"secret": held["secret"], "epoch": held["epoch"], **more}
    return tasks.post(f"/v1/leases/{held['lease_id']}/{what}", json=body)


def until_taken_back(tasks: httpx.Client, held: dict[str, Any]) -> dict[str, Any]:
    """Renew until the lease has to end; return what the holder then hears."""
    deadline = time.monotonic() + 20
    while True:
        answer: dict[str, Any] = call(tasks, "renew", held).raise_for_status().json()
        if answer["ends_in_s"] is not None:
            return answer
        assert time.monotonic() < deadline, "nobody takes the lease back"
        time.sleep(0.05)


def until_state(tasks: httpx.Client, claim_id: str, state: str) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while True:
        view: dict[str, Any] = tasks.post(f"/v1/claims/{claim_id}/collect").raise_for_status().json()
        if view["state"] == state:
            return view
        assert time.monotonic() < deadline, f"{view['state']}, not {state}"
        time.sleep(0.05)


def preempted(tasks: httpx.Client) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the view of work that is being preempted, and of the claim that it makes way for."""
    work = submit(tasks, asks("work", preemptible=True))
    urgent = submit(tasks, asks("urgent", value=9), wait_s=0)
    until_taken_back(tasks, work["lease"])
    return work, urgent


def test_preempted_work_waits_again_under_its_claim_while_the_other_runs(
    tasks: httpx.Client, broker: Broker
) -> None:
    work, urgent = preempted(tasks)
    (row,) = tasks.get("/v1/leases").json()
    assert f"taken back for claim {urgent['claim_id']}" in row["taken_back"]
    assert "d.urgent, run r" in row["taken_back"]

    call(tasks, "release", work["lease"], outcome="preempted").raise_for_status()
    held = until_state(tasks, urgent["claim_id"], "granted")["lease"]
    assert tasks.post(f"/v1/claims/{work['claim_id']}/collect").json()["state"] == "pending"
    assert submit(tasks, asks("work", preemptible=True), wait_s=0)["claim_id"] == work["claim_id"]
    (waits,) = tasks.get("/v1/queue").json()
    assert (waits["claim_id"], waits["preemptions"]) == (work["claim_id"], 1)

    call(tasks, "release", held).raise_for_status()
    again = until_state(tasks, work["claim_id"], "granted")["lease"]
    assert again["lease_id"] != work["lease"]["lease_id"]
    with broker.engine.connect() as connection:
        rows = connection.execute(select(lease).order_by(lease.c.granted_at)).all()
        mine = connection.execute(select(claim).where(claim.c.id == work["claim_id"])).one()
    assert [(r.end_reason, r.outcome) for r in rows if r.claim_id == mine.id] == [
        ("preempted", "preempted"),
        (None, None),
    ]
    assert (mine.state, mine.preemptions, mine.preempted_by) == ("granted", 1, [urgent["claim_id"]])
    assert mine.submitted_at <= rows[0].granted_at, "it kept its age"


def test_a_preempted_run_is_recorded_as_preempted_and_its_try_is_not_used_up(
    tasks: httpx.Client, broker: Broker
) -> None:
    """facebookincubator/submitit#1656: a short preempted job is taken for one that timed out; torchx#394."""
    work, _ = preempted(tasks)
    call(tasks, "release", work["lease"], outcome="preempted").raise_for_status()
    with broker.engine.connect() as connection:
        of_work = select(lease).where(lease.c.claim_id == work["claim_id"])
        (row,) = connection.execute(of_work).all()
        (mine,) = connection.execute(select(claim).where(claim.c.id == work["claim_id"])).all()
    assert (row.end_reason, row.outcome) == ("preempted", "preempted")
    assert (mine.state, mine.try_number, mine.ended_at) == ("pending", 1, None)


def test_work_that_does_not_stop_loses_its_lease_when_the_grace_is_over_and_waits_again(
    tasks: httpx.Client,
) -> None:
    work, urgent = preempted(tasks)
    deadline = time.monotonic() + 20
    while (answer := call(tasks, "renew", work["lease"])).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert answer.status_code == 409 and "preempted" in answer.json()["detail"]["message"]
    until_state(tasks, urgent["claim_id"], "granted")
    until_state(tasks, work["claim_id"], "pending")


def test_work_that_is_done_within_the_grace_is_done(tasks: httpx.Client) -> None:
    work, urgent = preempted(tasks)
    call(tasks, "release", work["lease"], outcome="done").raise_for_status()
    until_state(tasks, urgent["claim_id"], "granted")
    assert until_state(tasks, work["claim_id"], "ended")["reason_code"] == "released"
    assert tasks.get("/v1/queue").json() == []


def test_a_lease_goes_on_when_the_one_it_should_make_way_for_does_not_want_it_any_more(
    tasks: httpx.Client, broker: Broker
) -> None:
    work, urgent = preempted(tasks)
    tasks.post(f"/v1/claims/{urgent['claim_id']}/cancel").raise_for_status()
    deadline = time.monotonic() + GRACE_S + 1
    while time.monotonic() < deadline:
        answer = call(tasks, "renew", work["lease"]).raise_for_status().json()
        time.sleep(0.1)
    assert answer["ends_in_s"] is None
    with broker.engine.connect() as connection:
        (row,) = connection.execute(select(lease)).all()
    assert (row.ended_at, row.ends_for, row.ends_at) == (None, None, None)


def test_the_work_that_was_saved_last_is_taken_first(tasks: httpx.Client) -> None:
    first, second = (submit(tasks, asks(name, 1, preemptible=True))["lease"] for name in ("a", "b"))
    call(tasks, "renew", first, saved_s=3600)
    call(tasks, "renew", second, saved_s=0)
    submit(tasks, asks("urgent", 1, value=9), wait_s=0)
    until_taken_back(tasks, second)
    assert call(tasks, "renew", first).json()["ends_in_s"] is None


def test_the_next_leader_goes_on_where_the_last_one_was(tasks: httpx.Client, broker: Broker) -> None:
    """One of two victims has ended, and a third claim would take what is kept."""
    pair = [submit(tasks, asks(name, 1, preemptible=True))["lease"] for name in ("a", "b")]
    urgent = submit(tasks, asks("urgent", 2, value=9), wait_s=0)
    for held in pair:
        until_taken_back(tasks, held)
    call(tasks, "release", pair[0], outcome="preempted").raise_for_status()
    broker.leader._must_load = True
    richer = submit(tasks, asks("richer", 1, value=99), wait_s=1)
    assert richer["state"] == "pending"
    call(tasks, "release", pair[1], outcome="preempted").raise_for_status()
    until_state(tasks, urgent["claim_id"], "granted")
    assert {row["key"]["task_id"] for row in tasks.get("/v1/queue").json()} == {"a", "b", "richer"}


def test_a_preempted_claim_can_be_withdrawn(tasks: httpx.Client, broker: Broker) -> None:
    work, _ = preempted(tasks)
    call(tasks, "release", work["lease"], outcome="preempted").raise_for_status()
    assert asyncio.run(broker.cancel(work["claim_id"], "task_failed"))
    assert until_state(tasks, work["claim_id"], "cancelled")["reason_code"] == "task_failed"


def test_a_retry_takes_no_lease_over_that_has_to_end(tasks: httpx.Client) -> None:
    work, urgent = preempted(tasks)
    retry = asks("work", preemptible=True)
    retry["key"]["try_number"] = 2
    assert submit(tasks, retry, wait_s=0.5)["state"] == "pending"
    until_state(tasks, urgent["claim_id"], "granted")
    until_state(tasks, work["claim_id"], "ended")


def test_a_lease_that_has_to_end_is_not_made_larger(tasks: httpx.Client) -> None:
    work = submit(tasks, asks("work", 1, preemptible=True))
    submit(tasks, asks("urgent", 2, value=9), wait_s=0)
    until_taken_back(tasks, work["lease"])
    answer = call(tasks, "resize", work["lease"], gpus=2)
    assert answer.status_code == 412 and "ends by" in answer.json()["detail"]["message"]

"""Reservations over HTTP: who may make them, what they keep, and when they open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wire import wrong_fields
from airflow_gpu_provider.wishes import ReservationBody

from .conftest import ask, look, report, until_leading

Client = Callable[..., httpx.Client]


def in_s(seconds: float) -> str:
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()


def reserve(client: httpx.Client, *, start_s: float = 0, for_s: float = 3600, **more: Any) -> httpx.Response:
    body = {"starts_at": in_s(start_s), "for_s": for_s, "team": "vision", **more}
    return client.post("/v1/reservations", json=body)


def test_others_wait_for_the_end_of_a_reservation_and_its_owner_does_not(
    broker: Broker, client: Client
) -> None:
    row = reserve(client("admin"), for_s=2.5, number=2, reason="demo").json()
    assert (row["kept"], row["state"], row["by"]) == (["GPU-n1-0", "GPU-n1-1"], "begun", "test")
    waits = ask(broker, "other", team="text")
    own = ask(broker, "own", team="vision")
    assert look(broker, own, "granted").state.value == "granted"
    assert look(broker, waits, "granted", seconds=0.3).state.value == "pending"
    assert look(broker, waits, "granted").state.value == "granted"
    assert client("admin").get("/v1/reservations").json() == []


def test_a_waiting_claim_is_told_for_whom_and_until_when(broker: Broker, client: Client) -> None:
    reserve(client("admin"), devices=["GPU-n1-0", "GPU-n1-1"])
    waits = ask(broker, "other")
    deadline = time.monotonic() + 20
    while (entry := look(broker, waits, "granted", seconds=0)).reason is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert entry.reason_code == "reserved"
    assert "2 reserved by test for team vision from" in entry.reason
    assert entry.expected_at is not None
    assert abs((entry.expected_at - datetime.now(timezone.utc)).total_seconds() - 3600) < 30


def test_a_reservation_that_is_taken_back_opens_its_devices(broker: Broker, client: Client) -> None:
    admin = client("admin")
    made = reserve(admin, number=2).json()["id"]
    waits = ask(broker, "other")
    assert look(broker, waits, "granted", seconds=0.3).state.value == "pending"
    assert admin.post("/v1/unreserve", json={"id": made}).json() == {"unreserved": True}
    assert look(broker, waits, "granted").state.value == "granted"
    assert admin.post("/v1/unreserve", json={"id": made}).json() == {"unreserved": False}


def test_who_overstays_is_shown(broker: Broker, client: Client) -> None:
    late = ask(broker, "late")
    look(broker, late, "granted")
    held = broker.desk.board.entries[late].held
    assert held is not None
    assert reserve(client("admin"), devices=list(held.devices)).json()["overstays"] == ["d.late r try 1"]
    asyncio.run(broker.cancel(late))
    (row,) = client("task").get("/v1/reservations").json()
    assert row["overstays"] == []


def test_a_claim_is_let_in_before_the_start_if_it_promises_to_end_in_time(
    broker: Broker, client: Client
) -> None:
    reserve(client("admin"), start_s=1000, number=2)
    for task, runtime_s, state in (
        ("long", 2000, "pending"),
        ("never", None, "pending"),
        ("short", 500, "granted"),
    ):
        found = ask(broker, task, max_runtime_s=runtime_s)
        assert look(broker, found, state, seconds=1).state.value == state, task


def test_a_reservation_that_cannot_be_kept_says_why_and_what_to_change(client: Client) -> None:
    admin = client("admin")
    first = reserve(admin, number=1).json()["id"]

    def told(**more: Any) -> str:
        answer = reserve(admin, **more)
        assert answer.status_code == 400, answer.text
        return str(answer.json()["detail"]["message"])

    assert "asked 2 x GPU; the fleet has 2, 1 of them may be taken by reservations at the same time" in told(
        number=2
    )
    assert f"({first}): lower the number or choose another time" in told(number=2)
    assert "the fleet has no device GPU-x: take names from the list of devices" in told(devices=["GPU-x"])
    assert "the fleet has no H100: it has A100" in told(number=1, model="H100")
    assert "name devices, or give a number" in told()
    assert "is for nobody" in told(number=1, team=None)
    assert "which is past" in told(number=1, start_s=-8000)
    assert "within a year" in told(number=1, start_s=800 * 86_400)


def test_a_repeated_call_makes_one_reservation(client: Client) -> None:
    admin = client("admin")
    for _ in range(2):
        assert reserve(admin, id="night", number=2).json()["id"] == "night"
    assert len(admin.get("/v1/reservations").json()) == 1


def test_times_without_a_zone_are_refused(client: Client) -> None:
    answer = client("admin").post(
        "/v1/reservations", json={"starts_at": "2026-03-01T14:00", "for_s": 60, "team": "t", "number": 1}
    )
    assert answer.status_code == 422 and "timezone" in answer.json()["detail"]["message"]


def test_only_admins_reserve_and_tasks_may_look(client: Client) -> None:
    assert reserve(client("task"), number=1).status_code == 403
    assert client("task").post("/v1/unreserve", json={"id": "x"}).status_code == 403
    assert client("task").get("/v1/reservations").json() == []


def test_other_replicas_learn_of_it_and_the_next_leader_keeps_the_same_devices(broker: Broker) -> None:
    deadline = time.monotonic() + 20
    other = Broker(broker.settings)
    while not other.mirror.stored():  # the leader stores nodes once a second
        assert time.monotonic() < deadline
        time.sleep(0.1)
        other.mirror.merge(other.nodes.load())
    body = ReservationBody(starts_at=datetime.now(timezone.utc), for_s=3600, team="vision", number=1)
    other.reservations.reserve(body, "ann")
    while not broker.reservations.chosen().get(body.id):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    chosen = broker.reservations.chosen()[body.id]
    broker.leader.stop()
    other.start()
    try:
        until_leading(other)
        while not other.desk.engine.keeping.kept:  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert [each.devices for each in other.desk.engine.keeping.kept] == [chosen]  # type: ignore[union-attr]
    finally:
        other.stop()


def test_a_retry_does_not_take_over_what_is_reserved_for_others_by_now(
    broker: Broker, client: Client
) -> None:
    first = ask(broker, "late", 2)
    look(broker, first, "granted")
    reserve(client("admin"), number=2)
    second = ask(broker, "late", 2, try_number=2)
    assert look(broker, second, "granted", seconds=0.5).state.value == "pending"
    assert look(broker, first, "ended").state.value == "ended"


def test_a_device_that_fails_is_replaced_in_what_is_kept(broker: Broker, client: Client) -> None:
    admin = client("admin")
    assert reserve(admin, number=1).json()["kept"] == ["GPU-n1-0"]
    good = report()
    bad = good.devices[0].model_copy(update={"suspect": "XID 79"})
    broker.report(ReportBody(nodes=(good.model_copy(update={"devices": (bad, good.devices[1])}),)))
    deadline = time.monotonic() + 20
    while admin.get("/v1/reservations").json()[0]["kept"] != ["GPU-n1-1"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"team": "", "number": 1}, "team: Value error, is empty: write a name or leave it out"),
        ({"dag_id": " ", "number": 1}, "dag_id: Value error, is empty"),
        ({"model": "", "number": 1}, "model: Value error, is empty"),
        ({"model": "A100", "devices": ["GPU-n1-0"]}, "leave the model out, it goes with a number"),
        ({"starts_at": "0001-01-01T00:00:00+02:00", "number": 1}, "in the year 1: give a start from now"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_write(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ReservationBody.model_validate({"starts_at": in_s(0), "for_s": 60.0, "team": "vision", **wrong})
    assert says in wrong_fields(refused.value)

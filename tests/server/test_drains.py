from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest

from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.wishes import DrainBody

from .conftest import ask, look

Client = Callable[..., httpx.Client]


def drain(client: httpx.Client, target: str, **more: object) -> httpx.Response:
    return client.post("/v1/drains", json={"target": target, "reason": "fan fails", **more})


def states(client: httpx.Client) -> dict[str, str]:
    return {
        device["id"]: device["state"] for node in client.get("/v1/nodes").json() for device in node["devices"]
    }


def test_a_drained_device_is_not_given_out_and_comes_back(broker: Broker, client: Client) -> None:
    admin = client("admin")
    assert drain(admin, "GPU-n1-0").json()["scope"] == "device"
    assert states(admin) == {"GPU-n1-0": "drained", "GPU-n1-1": "free"}
    waiting = ask(broker, "both", gpus=2)
    assert look(broker, waiting, "granted", seconds=0.5).state.value == "pending"
    assert admin.post("/v1/undrain", json={"target": "GPU-n1-0"}).json() == {"undrained": True}
    assert look(broker, waiting, "granted").state.value == "granted"
    assert admin.post("/v1/undrain", json={"target": "GPU-n1-0"}).json() == {"undrained": False}


def test_leases_on_a_drained_node_go_on(broker: Broker, client: Client) -> None:
    admin, held = client("admin"), ask(broker, "one", gpus=2)
    look(broker, held, "granted")
    drain(admin, "n1")
    (node,) = admin.get("/v1/nodes").json()
    assert (node["state"], node["why"]) == ("drained", "drained by test: fan fails")
    assert set(states(admin).values()) == {"leased"}
    assert look(broker, held, "granted").held is not None


def test_a_drain_ends_by_itself(broker: Broker, client: Client) -> None:
    admin = client("admin")
    drain(admin, "n1", for_s=1.0)
    waiting = ask(broker, "one")
    assert look(broker, waiting, "granted", seconds=0.4).state.value == "pending"
    assert look(broker, waiting, "granted").state.value == "granted"
    assert admin.get("/v1/drains").json() == []


def test_only_admins_drain_and_tasks_may_look(client: Client) -> None:
    assert drain(client("task"), "n1").status_code == 403
    assert client("task").get("/v1/drains").json() == []


def test_a_drain_needs_a_target_that_exists_and_a_reason(client: Client) -> None:
    answer = drain(client("admin"), "n7")
    assert answer.status_code == 400
    assert "nodes are n1" in answer.json()["detail"]["message"]
    assert client("admin").post("/v1/drains", json={"target": "n1", "reason": ""}).status_code == 422


def test_other_replicas_learn_of_it_from_the_tables(broker: Broker) -> None:
    other = Broker(broker.settings)
    try:
        deadline = time.monotonic() + 20
        while not other.mirror.stored():  # the leader stores nodes once a second
            assert time.monotonic() < deadline
            time.sleep(0.1)
            other.mirror.merge(other.nodes.load())
        other.drains.drain(DrainBody(target="n1", reason="x"), "ann")
        while not broker.drains.in_force():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        waiting = ask(broker, "one")
        assert look(broker, waiting, "granted", seconds=0.5).state.value == "pending"
    finally:
        other.engine.dispose()


@pytest.mark.parametrize("target", ["n1", "GPU-n1-1"])
def test_the_reason_of_a_waiting_claim_names_the_drain(broker: Broker, client: Client, target: str) -> None:
    drain(client("admin"), target)
    waiting = ask(broker, "both", gpus=2)
    deadline = time.monotonic() + 20
    while (entry := look(broker, waiting, "granted", seconds=0)).reason is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "drained by test" in entry.reason

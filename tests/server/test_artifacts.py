"""Claims near the artifacts they read, from an agent's report to the grant, over real HTTP."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from airflow_gpu_provider.server.broker import Broker

from .conftest import report
from .test_claims_over_http import ask, queue, submit
from .test_history import Client, settings

__all__ = ["settings"]

GPT2 = "/data/models/gpt2"


@pytest.fixture
def agent(client: Client) -> httpx.Client:
    return client("agent")


@pytest.fixture
def tasks(client: Client) -> httpx.Client:
    return client("task")


def tell(agent: httpx.Client, node: str, *artifacts: str, **more: Any) -> None:
    told = report(node, **more).model_copy(update={"artifacts": artifacts})
    answer = agent.post("/v1/agents/report", json={"nodes": [told.model_dump(mode="json")]})
    assert answer.status_code == 200, answer.text


def test_a_claim_gets_a_device_where_its_model_is(agent: httpx.Client, tasks: httpx.Client) -> None:
    tell(agent, "n1")
    tell(agent, "n2", GPT2 + "/", gpus=1)
    near = submit(tasks, ask("one", artifacts=[GPT2]))
    assert near["lease"]["devices"][0]["node"] == "n2"
    far = submit(tasks, ask("two", artifacts=[GPT2]))
    assert far["lease"]["devices"][0]["node"] == "n1", "rather than wait"
    shown = {node["name"]: node["artifacts"] for node in tasks.get("/v1/nodes").json()}
    assert shown == {"n1": [], "n2": [GPT2 + "/"]}


def test_what_requires_its_model_waits_until_it_was_brought(
    broker: Broker, agent: httpx.Client, tasks: httpx.Client
) -> None:
    asked = ask("one", artifacts=[GPT2], artifacts_required=True)
    view = submit(tasks, asked, wait_s=0.2)
    assert view["state"] == "pending"
    (row,) = queue(tasks)
    assert row["reason_code"] == "artifacts_absent"
    assert f"none of 1 nodes holds them ({GPT2} is on 0); bring them to a node" in row["reason"]
    tell(agent, "n1", GPT2)
    deadline = time.monotonic() + 20
    while (found := submit(tasks, asked, wait_s=0.2))["state"] == "pending":
        assert time.monotonic() < deadline
    assert found["claim_id"] == view["claim_id"] and found["lease"]["devices"][0]["node"] == "n1"
    tell(agent, "n1")
    assert submit(tasks, ask("two", artifacts=[GPT2], artifacts_required=True), wait_s=0.2)["lease"] is None
    assert len(broker.repository.live_leases()) == 1, "who works goes on"

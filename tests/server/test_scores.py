"""Who waits is told what its place is made of, and a new leader ranks it alike."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.board import entry_of
from airflow_gpu_provider.server.broker import Broker
from tests.stored_rows import pending

from .conftest import ask, report


def test_a_row_of_the_queue_says_what_its_place_is_made_of(
    broker: Broker, client: Callable[..., httpx.Client]
) -> None:
    ask(broker, "busy", 2)
    chunk = ask(broker, "chunk", value=5, completes=0.5, max_runtime_s=240)
    (row,) = client("task").get("/v1/queue").json()
    assert (row["claim_id"], row["completes"]) == (chunk, 0.5)
    assert row["score_why"].startswith("3.38 = 5 value + 0.38 ready")
    assert row["score"] == pytest.approx(3.38, abs=0.02)
    (stored,) = pending(broker.repository)
    assert entry_of(stored, None).claim().completes == 0.5, "so a new leader ranks it alike"


def test_what_a_claim_reads_counts_as_far_as_a_node_holds_it(
    broker: Broker, client: Callable[..., httpx.Client]
) -> None:
    ask(broker, "busy", 2)
    body = {"key": {"dag_id": "d", "run_id": "r", "task_id": "t"}, "request": {"artifacts": ["/a", "/b"]}}
    tasks = client("task")
    tasks.post("/v1/claims?wait_s=0", json=body).raise_for_status()

    def ready() -> str:
        (row,) = tasks.get("/v1/queue").json()
        return str(row["score_why"])

    assert "ready" not in ready()
    broker.report(ReportBody(nodes=(report().model_copy(update={"artifacts": ("/a",)}),)))
    assert "+ 0.12 ready" in ready()

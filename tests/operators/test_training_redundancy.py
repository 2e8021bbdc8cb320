"""`redundancy="auto"` asks the broker's history, and does without it when it has to."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import insert

from airflow_gpu_provider.operators import redundancy
from airflow_gpu_provider.operators.training import DistributedTrainingOperator
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.store.history import FinishedRun, run_row
from airflow_gpu_provider.store.tables import run
from airflow_gpu_provider.training.slots import USUAL_REDUNDANCY
from tests.hooks.test_broker_hook import connect

CONTEXT: Any = {
    "ti": SimpleNamespace(dag_id="d", run_id="r", task_id="train", map_index=-1, try_number=1, id="x"),
    "dag_run": SimpleNamespace(run_type="manual"),
}


def operator(**arguments: Any) -> DistributedTrainingOperator:
    usual = {"entrypoint": "a.b:train", "gpus": 20, "model": "A100"}
    return DistributedTrainingOperator(task_id="train", **{**usual, **arguments})


def spares(training: DistributedTrainingOperator) -> int:
    return training.claim_body(CONTEXT).request.spares


def said(caplog: pytest.LogCaptureFixture) -> float:
    """Return what "auto" stands for, told in a log that can be read here."""
    log: Any = logging.getLogger(__name__)
    with caplog.at_level(logging.INFO):
        return redundancy.auto_redundancy("gpu_default", "d.train", "A100", log)


@pytest.fixture
def failed_often(broker: Broker) -> None:
    """Let a fifth of the shards of earlier runs have failed."""
    runs = [
        FinishedRun(f"l{i}", "d.train", "A100", 20, ("n1",), None, None, 20, 4, (), broker.clock())
        for i in range(100)
    ]
    with broker.engine.begin() as connection:
        connection.execute(insert(run), [run_row(each) for each in runs])
    broker.history._next_look = 0.0
    broker.history.refresh()


@pytest.mark.usefixtures("failed_often")
def test_as_many_spares_are_asked_for_as_earlier_failures_call_for(
    base_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect(monkeypatch, base_url)
    assert spares(operator()) == 8, "twice a fifth of 20"
    assert said(caplog) == pytest.approx(0.4, abs=0.02)
    assert "redundant shards for a failure rate of 19" in caplog.text
    assert spares(operator(redundancy=0.05)) == 1, "what the author says counts"
    assert spares(operator(task_class="another", model=None)) > 2, "drawn towards the fleet"


def test_without_an_answer_the_usual_share_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redundancy, "_PATIENCE_S", 0.1)
    connect(monkeypatch, "http://127.0.0.1:9")
    assert spares(operator()) == 2
    assert said(caplog) == USUAL_REDUNDANCY
    assert "10 % redundant shards, as usual" in caplog.text and "did not answer" in caplog.text


def test_a_broker_that_does_not_know_the_question_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect(monkeypatch, "http://127.0.0.1:9")

    def older(self: httpx.Client, method: str, url: str, **_: Any) -> httpx.Response:
        return httpx.Response(404, json={"detail": "Not Found"}, request=httpx.Request(method, url))

    monkeypatch.setattr(httpx.Client, "request", older)
    assert spares(operator()) == 2
    assert said(caplog) == USUAL_REDUNDANCY
    assert "the broker does not tell" in caplog.text


def test_reading_the_dag_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: Any, **__: Any) -> None:
        raise AssertionError("a DAG that is only read must not call the broker")

    monkeypatch.setattr(redundancy, "GpuBrokerHook", nobody)
    assert operator().build_request().spares == 2

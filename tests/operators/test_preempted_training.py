"""A training whose devices are taken back saves, waits under the same try, and goes on from there."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.hooks.broker import GpuBrokerHook
from airflow_gpu_provider.operators.training import DistributedTrainingOperator
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.training.run_file import RunState, read_record
from airflow_gpu_provider.wire import ClaimBody, ClaimState, RequestBody, TaskKey
from tests.operators.test_training_operator import context
from tests.server.conftest import ask, look, report
from tests.training.oracle import expected_weights
from tests.training.running import ROOT


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Return settings by which devices are taken back at once, and holders hear of it within a second."""
    changes = {"preemption_least_runtime_s": 0.0, "preemption_grace_s": 20.0, "lease_ttl_s": 3.0}
    return settings.model_copy(update=changes)


def preempt(broker: Broker, run_file: Path, told: list[ClaimState]) -> None:
    """Once the training has saved something, have its devices for a moment."""
    deadline = time.monotonic() + 120
    while (record := read_record(run_file)) is None or record.checkpoint is None or record.step < 20:
        assert time.monotonic() < deadline, record
        time.sleep(0.05)
    urgent = ask(broker, "urgent", gpus=2, value=99.0)
    told.append(look(broker, urgent, "granted", 60).state)
    asyncio.run(broker.collect(urgent))
    time.sleep(0.5)
    asyncio.run(broker.cancel(urgent))


def test_a_preempted_training_goes_on_from_its_checkpoint_within_its_try(
    broker: Broker, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(ROOT))
    broker.report(ReportBody(nodes=(report(simulated=True),)))
    attempts = tmp_path / "training" / "attempts"
    training = DistributedTrainingOperator(
        task_id="train",
        entrypoint="tests.training.entrypoints:train",
        gpus=2,
        sync_interval=10,
        redundancy=0,
        preemptible=True,
        deferrable=False,
        checkpoint_dir=str(attempts.parent),
        checkpoint_every=0,
        train_params={"steps": 120, "pause_s": 0.05},
    )
    told: list[ClaimState] = []
    other = threading.Thread(target=preempt, args=(broker, attempts / "try-1" / "run.json", told))
    other.start()
    hook = GpuBrokerHook()
    key = TaskKey(dag_id="d", run_id="r", task_id="train", try_number=1)
    body = ClaimBody(key=key, request=RequestBody(gpus=2), preemptible=True)
    result = training._proceed(context(), hook, hook.submit(body, wait_s=5), None)
    other.join(60)
    hook.close()

    assert told == [ClaimState.GRANTED]
    first, second = (read_record(attempts / name / "run.json") for name in ("try-1", "try-1-2"))
    assert first is not None and first.state is RunState.STOPPED and first.checkpoint is not None
    assert second is not None and second.resumed_from == first.checkpoint.step >= 20
    assert result["resumed_from"] == first.checkpoint.step, "what it did before was not done again"
    assert result["state_sha256"] == expected_weights(10, 120)
    assert json.loads((attempts / "try-1-2" / "delivered.json").read_text())["result"] == result
    with broker.engine.connect() as connection:
        rows = connection.exec_driver_sql(
            "SELECT c.try_number, c.preemptions, l.end_reason FROM gpu_lease l JOIN gpu_claim c "
            "ON c.id = l.claim_id WHERE c.task_id = 'train' ORDER BY l.granted_at"
        ).all()
    assert [tuple(row) for row in rows] == [(1, 1, "preempted"), (1, 1, "released")]

"""A try of a training that was lost is followed by one with more redundant shards, callback or not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_gpu_provider.callbacks.redundancy import spawn_redundant_shards
from airflow_gpu_provider.operators import redundancy
from airflow_gpu_provider.operators.training import DistributedTrainingOperator
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.training.failures import FailureCause, ShardFailure
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.run_file import RunRecord, RunState, read_record, write_record
from tests.server.conftest import report
from tests.training.running import ROOT, make_plan


def context(try_number: int = 2) -> Any:
    ti = {"dag_id": "d", "run_id": "r", "task_id": "train", "map_index": -1, "id": "x"}
    return {
        "ti": SimpleNamespace(**ti, try_number=try_number),
        "dag_run": SimpleNamespace(run_type="manual"),
    }


def operator(folder: Path, **arguments: Any) -> DistributedTrainingOperator:
    usual: dict[str, Any] = {"entrypoint": "a.b:train", "gpus": 8, "checkpoint_dir": str(folder)}
    return DistributedTrainingOperator(task_id="train", **{**usual, **arguments})


def spares(training: DistributedTrainingOperator, try_number: int = 2) -> int:
    return training.claim_body(context(try_number)).request.spares


@pytest.fixture(autouse=True)
def no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airflow_gpu_provider.operators.redundancy.auto_redundancy", lambda *_: 0.1)


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """Return the folder of a training whose first try lost two shards more than its one spare."""
    plan = make_plan(tmp_path, shards=8, spares=1, attempt="attempts/try-1")
    plan.paths.create()
    plan.paths.plan.write_text(plan.model_dump_json())
    failures = [
        ShardFailure(uid=f"u{rank}", rank=rank, step=7, cause=FailureCause.HUNG, evidence="no heartbeat")
        for rank in range(3)
    ]
    now = datetime.now(timezone.utc)
    last = RunRecord(
        run_id="r",
        pid=1,
        state=RunState.FAILED,
        failures=failures,
        takeovers=["u8 took rank 0 of u0"],
        started_at=now,
        updated_at=now,
    )
    write_record(plan.paths.run, last)
    return tmp_path


def test_a_retry_asks_for_the_shards_that_were_missing(lost: Path) -> None:
    assert spares(operator(lost)) == 3
    assert spares(operator(lost), try_number=1) == 1, "another run of the task begins as it is configured"
    assert operator(lost).build_request().spares == 1, "a DAG that is only read looks at no folder"


def test_a_number_of_the_author_grows_only_where_the_callback_is_named(lost: Path) -> None:
    assert spares(operator(lost, redundancy=0.1)) == 1
    assert spares(operator(lost, redundancy=0.1, on_retry_callback=spawn_redundant_shards)) == 3
    assert spares(operator(lost, redundancy=1, on_retry_callback=[spawn_redundant_shards])) == 8
    assert spares(operator(lost, redundancy=0, gpus=4, on_retry_callback=spawn_redundant_shards)) == 2, "half"


def test_a_folder_that_cannot_be_read_is_no_obstacle(lost: Path, caplog: pytest.LogCaptureFixture) -> None:
    (lost / "attempts" / "try-1" / "plan.json").write_text("{")
    assert spares(operator(lost)) == 1
    log: Any = logging.getLogger(__name__)
    assert redundancy.look_back(lost, log) is None
    assert "cannot be read" in caplog.text


@pytest.fixture
def three_simulated(broker: Broker) -> None:
    broker.report(ReportBody(nodes=(report(gpus=3, simulated=True),)))


@pytest.mark.usefixtures("three_simulated")
def test_in_airflow_the_retry_comes_soon_resumes_and_has_a_spare(
    dag_test: Callable[..., Any], environment: dict[str, str], tmp_path: Path
) -> None:
    run = dag_test(
        Path(__file__).parent / "dags",
        "lost_training",
        environment={
            **environment,
            "PYTHONPATH": str(ROOT),
            "TRAINING_FOLDER": str(tmp_path / "training"),
        },
    )
    assert run.state == "success", run.output[-5000:]
    attempts = tmp_path / "training" / "attempts"
    first, second = (read_record(attempts / name / "run.json") for name in ("try-1", "try-2"))
    assert first is not None and first.state is RunState.FAILED
    assert second is not None and second.state is RunState.SUCCEEDED and second.resumed_from is not None
    plans = [
        RunPlan.model_validate_json((attempts / n / "plan.json").read_text()) for n in ("try-1", "try-2")
    ]
    assert [len(plan.spare_slots) for plan in plans] == [0, 1]
    assert plans[1].spare_slots[0].device_ids == ("GPU-n1-2",), "on a device of its own"
    assert "a signal from outside ended it" in run.output, "the policy's reason"
    assert "Next try of train: At least 1 redundant shard(s) after 0" in run.output, "the callback's word"

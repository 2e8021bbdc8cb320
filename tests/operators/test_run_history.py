"""What the holder of a lease tells of its work."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.operators.run_history import RunHistory
from airflow_gpu_provider.operators.run_report import StepsSeen, failed_on
from airflow_gpu_provider.training.failures import FailureCause, ShardFailure
from airflow_gpu_provider.training.plan import RunPlan, Slot
from airflow_gpu_provider.training.run_file import RunRecord, RunState

START = datetime(2026, 3, 1, tzinfo=timezone.utc)


def test_reports_of_work_add_up() -> None:
    history = RunHistory()
    assert history.as_fields() == {}
    history.add_work(3, 2.0)
    history.add_work(5, 4.0)
    assert history.as_fields() == {"work": 8.0, "work_s": 6.0}


def test_without_seconds_the_time_since_the_work_began_counts_once() -> None:
    history = RunHistory()
    history.begin()
    history.add_work(1, None)
    first = history.as_fields()["work_s"]
    history.add_work(1, None)
    assert 0 < first < history.as_fields()["work_s"] < 10


@pytest.mark.parametrize(("units", "seconds"), [(-1, 1), (float("nan"), 1), (1, -1), (float("inf"), None)])
def test_what_is_no_amount_of_work_is_refused(units: float, seconds: float | None) -> None:
    with pytest.raises(InvalidRequest, match="how much was done"):
        RunHistory().add_work(units, seconds)


def record(step: int, at_s: float, state: RunState = RunState.RUNNING, **more: Any) -> RunRecord:
    at = START + timedelta(seconds=at_s)
    return RunRecord(run_id="r", pid=1, state=state, step=step, started_at=START, updated_at=at, **more)


def followed(*records: RunRecord) -> tuple[int, float] | None:
    """Return what was measured of a run that leaves these records."""
    steps = StepsSeen()
    for each in records:
        steps.note(each)
    return steps.measured()


def test_a_trainings_speed_is_that_of_its_steps_without_its_start() -> None:
    done = record(300, 90, RunState.SUCCEEDED)
    assert followed(record(0, 1, RunState.STARTING), record(100, 60), record(200, 70), done) == (100, 10.0)
    assert followed(record(100, 60), record(100, 65), record(300, 80, RunState.FINISHING), done) == (
        200,
        20.0,
    )


def test_a_run_that_was_too_short_tells_no_speed() -> None:
    done = record(300, 62, RunState.SUCCEEDED)
    assert followed(record(100, 60), done) is None
    assert followed(record(100, 60), record(200, 61), done) is None


def slot(device: str) -> Slot:
    return Slot(device_ids=(device,))


def test_each_shard_that_needed_a_spare_counts_once_on_the_node_where_it_failed(tmp_path: Path) -> None:
    plan = RunPlan(
        run_id="r",
        run_dir=tmp_path,
        checkpoint_dir=tmp_path,
        entrypoint="a:b",
        shard_count=2,
        sync_interval=1,
        member_slots=(slot("G0"), slot("G1")),
        spare_slots=(slot("G2"),),
    )
    lease: Any = SimpleNamespace(
        devices=[SimpleNamespace(id="G0", node="n0"), SimpleNamespace(id="G1", node="n1")],
        spares=[SimpleNamespace(id="G2", node="n2")],
    )

    def failure(uid: str, rank: int | None, cause: FailureCause = FailureCause.KILLED) -> ShardFailure:
        return ShardFailure(uid=uid, rank=rank, step=1, cause=cause, evidence="")

    def nodes(*failures: ShardFailure) -> list[str | None]:
        return failed_on(record(1, 1, failures=list(failures)), plan, lease)

    assert nodes() == []
    assert nodes(failure("u1", 1), failure("u2", 1), failure("u0", 0)) == ["n1", "n0"]
    assert nodes(failure("u2", None)) == [], "a spare is no shard"
    assert nodes(failure("u7", 0)) == [None], "a replacement's slot is not known"
    assert nodes(failure("u0", 0, FailureCause.USER_ERROR), failure("u0", 0, FailureCause.NON_FINITE)) == []

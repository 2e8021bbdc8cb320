"""What people read of a training in the log of its task."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import pytest

from airflow_gpu_provider.launchers.base import TrainingRun
from airflow_gpu_provider.operators import training_progress
from airflow_gpu_provider.operators.training_progress import ProgressLog
from airflow_gpu_provider.training.failures import FailureCause, ShardFailure
from airflow_gpu_provider.training.plan import RunPaths
from airflow_gpu_provider.training.run_file import RunRecord, RunState

AT = datetime(2026, 3, 1, tzinfo=timezone.utc)


class Told:
    """A run that says one record after the other."""

    def __init__(self, *records: RunRecord) -> None:
        self._records = list(records)

    def record(self) -> RunRecord:
        return self._records.pop(0)

    def has_ended(self) -> bool:
        return len(self._records) == 1

    def shard_log_tail(self, uid: str) -> list[str]:
        return [f"last words of {uid}"]


def record(step: int, state: RunState = RunState.RUNNING, **more: Any) -> RunRecord:
    return RunRecord(run_id="r", pid=1, state=state, step=step, started_at=AT, updated_at=AT, **more)


def test_the_log_says_who_was_lost_why_who_took_over_and_how_long_that_took(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(training_progress, "_POLL_S", 0.001)
    failure = ShardFailure(
        uid="u0", rank=0, step=57, cause=FailureCause.KILLED, evidence="ended by SIGKILL from outside"
    )
    lost: dict[str, Any] = {"failures": [failure], "takeovers": ["u2 took rank 0 of u0"], "generation": 1}
    run = Told(
        record(0, RunState.STARTING),
        record(50),
        record(50),
        record(50, **lost),
        record(100, **lost),
        record(100, RunState.SUCCEEDED, **lost),
    )
    log = logging.getLogger("task")
    with caplog.at_level(logging.INFO, "task"):
        ProgressLog(cast(TrainingRun, run), RunPaths(tmp_path), cast(Any, log)).follow()
    said = [each.getMessage() for each in caplog.records]
    expected = (
        "Training is starting",
        "Training is running",
        "Step 50 of ?",
        "shard 0 (u0) failed at step 57: killed: ended by SIGKILL from outside; its last lines:\n    last",
        "Takeover: u2 took rank 0 of u0, generation 1",
        "Training goes on in generation 1: step 100 was synchronised 0.0 s after",
        "Training has succeeded",
    )
    assert len(said) == len(expected), said
    for sentence, begins in zip(said, expected, strict=True):
        assert sentence.startswith(begins)


def test_a_try_that_goes_on_with_a_run_tells_its_past_in_a_line_and_then_what_is_new(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    old, new = (
        ShardFailure(uid=uid, rank=0, step=1, cause=FailureCause.KILLED, evidence="SIGKILL")
        for uid in ("u0", "u2")
    )
    past: dict[str, Any] = {"failures": [old], "takeovers": ["u2 took 0", "u3 took 1"], "generation": 2}
    now: dict[str, Any] = {
        "failures": [old, new],
        "takeovers": [*past["takeovers"], "u4 took 0", "u5 took 0"],
        "generation": 4,
    }
    run = Told(record(50, **past), record(50, **past), record(50, RunState.STOPPED, **now))
    with caplog.at_level(logging.INFO, "task"):
        log = cast(Any, logging.getLogger("task"))
        progress = ProgressLog(cast(TrainingRun, run), RunPaths(tmp_path), log)
        progress.skip_the_past()
        progress.follow()
    said = "\n".join(each.getMessage() for each in caplog.records)
    assert said.startswith("Before this try: 1 loss(es) and 2 takeover(s), up to generation 2; ")
    assert "(u0)" not in said and "u3 took 1" not in said and "(u2) failed" in said
    assert "Takeover: u4 took 0\n" in said and "Takeover: u5 took 0, generation 4" in said

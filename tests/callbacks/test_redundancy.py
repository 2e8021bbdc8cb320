"""What the callback says, wherever Airflow calls it; what it brings about is tested with the operator."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import BaseOperator

from airflow_gpu_provider.callbacks.redundancy import spawn_redundant_shards
from airflow_gpu_provider.operators.training import DistributedTrainingOperator
from tests.training.running import make_plan


def said(task: Any, caplog: pytest.LogCaptureFixture) -> str:
    names = {"dag_id": "d", "run_id": "r", "task_id": "train", "map_index": -1, "try_number": 1}
    with caplog.at_level(logging.INFO):
        spawn_redundant_shards({"ti": SimpleNamespace(**names), "task": task})  # type: ignore[arg-type]
    return caplog.text


def training(folder: str) -> DistributedTrainingOperator:
    return DistributedTrainingOperator(task_id="train", entrypoint="a.b:train", gpus=4, checkpoint_dir=folder)


def test_in_the_worker_it_tells_what_the_next_try_will_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "redundant shards as before" in said(training(str(tmp_path)), caplog)
    plan = make_plan(tmp_path, shards=4, spares=1, attempt="attempts/try-1")
    plan.paths.create()
    plan.paths.plan.write_text(plan.model_dump_json())
    assert "Next try of train: At least 2 redundant shard(s) after 1" in said(training(str(tmp_path)), caplog)


def test_in_the_dag_processor_it_leaves_it_to_the_next_try(caplog: pytest.LogCaptureFixture) -> None:
    assert "by what this one left" in said(training("/c/{{ run_id }}"), caplog)


def test_for_a_mapped_or_another_task_it_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    mapped = DistributedTrainingOperator.partial(task_id="train", entrypoint="a.b:train").expand(gpus=[1, 2])
    assert "by what this one left" in said(mapped, caplog)
    assert "by what this one left" in said(BaseOperator(task_id="other"), caplog)

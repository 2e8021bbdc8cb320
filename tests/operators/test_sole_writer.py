"""A training's folder has one writer, and its own runs are found beside those of others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_gpu_provider.exceptions import FolderInUse
from airflow_gpu_provider.inventory.host import local_host
from airflow_gpu_provider.operators.keeper_files import Whereabouts
from airflow_gpu_provider.operators.reattachment import last_run
from airflow_gpu_provider.operators.sole_writer import sole_writer
from airflow_gpu_provider.operators.training import DistributedTrainingOperator
from airflow_gpu_provider.training.run_file import write_json
from airflow_gpu_provider.wire import RequestBody, TaskKey
from tests.operators.test_training_operator import context
from tests.training.running import make_plan


def key_of(task_id: str) -> TaskKey:
    return TaskKey(dag_id="dag", run_id=context()["ti"].run_id, task_id=task_id, map_index=-1, try_number=1)


def test_a_second_training_is_refused_by_name_until_the_last_process_of_the_first_has_ended(
    tmp_path: Path,
) -> None:
    with sole_writer(tmp_path, key_of("one")) as guarded:
        code = "print('here', flush=True); input()"
        shard = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(guarded,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    assert shard.stdin is not None and shard.stdout is not None
    shard.stdout.readline()
    refused = pytest.raises(FolderInUse, match=r"written by dag\.one of run manual.*try 1.*max_active_runs=1")
    with refused, sole_writer(tmp_path, key_of("two"), patience_s=0):
        pass
    shard.kill()
    shard.communicate()
    with sole_writer(tmp_path, key_of("two"), patience_s=0) as guarded:
        os.fstat(guarded)
        assert '"two"' in (tmp_path / "writer.json").read_text()


def test_the_run_of_a_task_is_found_although_another_task_has_begun_a_newer_one_there(tmp_path: Path) -> None:
    for number, task_id in enumerate(("train", "other")):
        plan = make_plan(tmp_path, attempt=f"attempts/try-{number}")
        plan.paths.create()
        write_json(plan.paths.plan, plan.model_dump_json())
        os.utime(plan.paths.plan, (number, number))
        names: dict[str, Any] = {"host": local_host(), "lease_id": "l", "claim_id": "c", "started": "?"}
        here = Whereabouts(**names, pid=1, key=key_of(task_id), request=RequestBody(gpus=1))
        here.write(plan.paths.keeper)
    training = DistributedTrainingOperator(
        task_id="train", entrypoint="a.b:c", gpus=1, checkpoint_dir=str(tmp_path)
    )
    found = last_run(training, context())
    assert found is not None and found.plan.run_dir.name == "try-0"

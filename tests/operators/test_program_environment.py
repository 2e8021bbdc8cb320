"""Programs that a task starts can import Airflow, though Airflow keeps the task from its database."""

from __future__ import annotations

import subprocess
import sys

import pytest

from airflow_gpu_provider.operators.program_environment import program_environment


def test_the_keeper_can_be_loaded_where_airflow_keeps_a_task_from_its_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from airflow.sdk.execution_time import supervisor

    names = ("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "AIRFLOW__CORE__SQL_ALCHEMY_CONN")
    for name in names:
        monkeypatch.setenv(name, "sqlite://")
    monkeypatch.setattr(supervisor, "sys", type("NothingLoaded", (), {"modules": {}}))
    supervisor.block_orm_access()  # as Airflow does it to the process of a task
    command = [sys.executable, "-c", "import airflow_gpu_provider.operators.keeper"]
    blocked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert blocked.returncode != 0, "else the environment of the task would do"
    done = subprocess.run(command, env=program_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

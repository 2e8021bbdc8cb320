from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from airflow_gpu_provider.priority.policy import task_instance_mutation_hook, weight_of


def _task_instance(module: str = "airflow_gpu_provider.operators.leased") -> SimpleNamespace:
    return SimpleNamespace(task=SimpleNamespace(_task_module=module), priority_weight=1)


def _run(conf: object, run_type: str = "manual") -> SimpleNamespace:
    return SimpleNamespace(conf=conf, run_type=run_type)


def test_a_hot_run_goes_first() -> None:
    ti = _task_instance()
    task_instance_mutation_hook(ti, _run({"priority": 42}))
    assert ti.priority_weight == 42


def test_a_backfill_stays_below_live_work_whatever_it_says() -> None:
    ti = _task_instance()
    task_instance_mutation_hook(ti, _run({"priority": 42}, "backfill"))
    assert ti.priority_weight == 1


def test_tasks_of_others_are_left_alone() -> None:
    ti = _task_instance("airflow.providers.standard.operators.bash")
    task_instance_mutation_hook(ti, _run({"priority": 42}))
    assert ti.priority_weight == 1


@pytest.mark.parametrize(
    "conf", [None, {}, [], {"priority": "high"}, {"priority": float("nan")}, {"priority": True}]
)
def test_nothing_usable_changes_nothing_and_raises_nothing(conf: object) -> None:
    assert weight_of(conf, "manual") is None


def test_a_priority_that_the_column_cannot_hold_is_cut() -> None:
    assert weight_of({"priority": 10**12}, "manual") == 2**31 - 1


def test_the_first_call_without_a_run_is_no_error() -> None:
    task_instance_mutation_hook(_task_instance(), None)


def test_airflow_takes_the_hook_for_present() -> None:
    code = (
        "from airflow import settings; settings.get_policy_plugin_manager();"
        "print(settings.task_instance_mutation_hook.is_noop)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"

"""Arguments of a training that are only known when it runs: as templates, as results of tasks, and mapped."""

from __future__ import annotations

from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, task

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.operators.lateness import is_late
from airflow_gpu_provider.operators.training import DistributedTrainingOperator
from airflow_gpu_provider.operators.training_code import script_of
from airflow_gpu_provider.operators.training_plan import params_of

CODE = {"entrypoint": "tests.training.entrypoints:train", "gpus": 1}


@task
def steps() -> int:
    return 7


@pytest.mark.parametrize("value", ["{{ x }}", ["a", "{{ x }}"], {"a": ("{% if x %}",)}, {"{{ x }}": 1}])
def test_a_template_is_late_however_deep_it_lies(value: object) -> None:
    assert is_late(value)


def test_what_is_known_is_checked_when_the_dag_is_read() -> None:
    assert not is_late({"a": [1, "b", None]})
    with pytest.raises(InvalidRequest, match=r"train_params=\[1\].*names and plain values"):
        DistributedTrainingOperator(task_id="t", train_params=[1], **CODE)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="memory"):
        DistributedTrainingOperator(task_id="t", memory="lots", train_params={"steps": 3}, **CODE)


def test_results_of_tasks_are_taken_whole_and_within_lists_and_mappings() -> None:
    with DAG("d", schedule=None, start_date=datetime(2026, 1, 1)) as dag:
        found = steps()
        whole = DistributedTrainingOperator(task_id="whole", train_params=found, **CODE)
        within = DistributedTrainingOperator(task_id="within", train_params={"steps": [found]}, **CODE)
        script = DistributedTrainingOperator(
            task_id="script", script="-m a.b", script_args=["--steps", found], gpus=1
        )
    assert {whole.task_id, within.task_id, script.task_id} <= dag.get_task("steps").downstream_task_ids
    whole.train_params = {"steps": 7}  # as Airflow renders it
    assert params_of(whole) == {"steps": 7}


def test_templates_become_parameters_and_arguments_when_they_are_rendered() -> None:
    given = {"steps": "{{ n }}", "names": ["{{ name }}"]}
    training = DistributedTrainingOperator(task_id="t", train_params=given, **CODE)
    training.render_template_fields({"n": 3, "name": "a", "task": training, "ti": SimpleNamespace()})
    assert params_of(training) == {"steps": "3", "names": ["a"]}
    text = DistributedTrainingOperator(task_id="t2", train_params="{{ conf | tojson }}", **CODE)
    text.render_template_fields({"conf": {"steps": 3}, "task": text, "ti": SimpleNamespace()})
    assert params_of(text) == {"steps": 3}
    text.train_params = "three steps"
    with pytest.raises(InvalidRequest, match="train_params='three steps'"):
        params_of(text)


def test_a_training_is_mapped_over_parameters_and_arguments() -> None:
    with DAG("d", schedule=None, start_date=datetime(2026, 1, 1)):
        found = steps()
        over = DistributedTrainingOperator.partial(task_id="over", **CODE).expand(
            train_params=[{"steps": 1}, {"steps": 2}]
        )
        args = DistributedTrainingOperator.partial(
            task_id="args", script="-m a.b", gpus=1, train_params={"steps": found}
        ).expand(script_args=[["--lr", "{{ params.lr }}"], ["--lr", "2"]])
    assert params_of(over.unmap({"train_params": {"steps": 2}})) == {"steps": 2}
    second: Any = args.unmap({"script_args": ["--lr", "2"]})
    script = script_of(second)
    assert script is not None and script.args == ("--lr", "2")
    assert is_late(second.train_params) and is_late(args.unmap({"script_args": ["{{ a }}"]}).script_args)

"""Trainings for tests that end parts of Airflow below them: the language model's, and one with a brake."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from airflow_gpu_provider.callbacks.redundancy import spawn_redundant_shards
from airflow_gpu_provider.operators.training import DistributedTrainingOperator

EXAMPLES = Path(__file__).resolve().parents[3] / "dags"
# They are a bundle of their own, and its folder is on the path of its own tasks only.
sys.path.append(str(EXAMPLES))

TRAIN = {"steps": 60, "pause_s": 0.01, "hold_at": -1, "hold_file": "/nowhere"}


def tiny_training(dag_id: str, *, deferrable: bool) -> DAG:
    """Return a DAG of one training, followed by a worker or waited for in the triggerer."""
    made = DAG(
        dag_id,
        schedule=None,
        params={**TRAIN, "gpus": 2},
        default_args={"owner": "tests"},
        render_template_as_native_obj=True,
    )
    with made:
        DistributedTrainingOperator(
            task_id="train",
            entrypoint="tests.training.entrypoints:train",
            gpus="{{ params.gpus }}",
            sync_interval=10,
            checkpoint_every=0.5,
            redundancy=0,
            train_params={name: f"{{{{ params.{name} }}}}" for name in TRAIN},
            deferrable=deferrable,
            retries=2,
            retry_delay=timedelta(seconds=1),
            on_retry_callback=spawn_redundant_shards,
        )
    return made


def mapped_trainings() -> DAG:
    """Return a DAG of one training for each seed in its run's configuration."""
    with DAG("trainings_mapped", schedule=None, default_args={"owner": "tests"}) as made:
        DistributedTrainingOperator.partial(
            task_id="train",
            entrypoint="tests.training.entrypoints:train",
            gpus=2,
            sync_interval=10,
            redundancy=0,
            deferrable=True,
        ).expand(seed=[1, 2])
    return made


def example_followed() -> str:
    """Return the source of the language model's DAG with a worker that follows its training."""
    source = (EXAMPLES / "fine_tune_language_model.py").read_text()
    for old, new in {
        "fine_tune_language_model()": "language_model_followed()",
        "deferrable=True,\n        on_retry": "deferrable=False,\n        on_retry",
        "timedelta(seconds=10)": "timedelta(seconds=1)",
        # A busy machine takes long to start an API server again, and each try that begins meanwhile is lost.
        '"retries": 3': '"retries": 12',
    }.items():
        assert old in source, old
        source = source.replace(old, new)
    return source


followed = tiny_training("training_followed", deferrable=False)
deferred = tiny_training("training_deferred", deferrable=True)
mapped = mapped_trainings()
exec(compile(example_followed(), __file__, "exec"))  # not imported: that would define the example once more

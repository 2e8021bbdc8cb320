"""Fine-tune a small language model in shards that survive the loss of one.

The run's configuration is the training request itself: paste the JSON into *Trigger*, or change single
fields in the form. The first task makes what the request depends on (a small pretrained model, and Python's
own sources as text) unless it is there; the sensor waits until both are complete; then the shards train,
each on its GPU, and share their weights every `sync_interval` steps. Kill one of the shard processes while
it runs: a spare takes over.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import Param, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException

from airflow_gpu_provider.callbacks.redundancy import spawn_redundant_shards
from airflow_gpu_provider.operators.hopeless import fail_the_hopeless
from airflow_gpu_provider.operators.training import DistributedTrainingOperator
from airflow_gpu_provider.sensors.artifacts import ArtifactSensor
from airflow_gpu_provider.task_request import parse_task_request

DATA = Path(
    os.environ.get("LANGUAGE_MODEL_DATA")
    or Path(os.environ.get("AIRFLOW_HOME", "~/airflow")).expanduser() / "language_model"
).absolute()

REQUEST: dict[str, Any] = {
    "task_id": "fine_tune_gpt2",
    "task_type": "micro_train",
    "resource_requirements": {
        "gpu": {"count": 2, "model": "A100", "min_flops": 35},
        "memory": "64GiB",
        "cpu_cores": 8,
    },
    "priority": 5,
    "dependencies": {
        "pretrained_model": str(DATA / "models" / "gpt2_pretrained"),
        "dataset": str(DATA / "datasets" / "python_sources"),
    },
    "shard_count": 2,
    "sync_interval": 100,
}

PARAMS = {
    "task_id": Param(REQUEST["task_id"], type="string", minLength=1, title="Name"),
    "task_type": Param(REQUEST["task_type"], enum=["micro_train"], title="Kind"),
    "resource_requirements": Param(
        REQUEST["resource_requirements"],
        type="object",
        required=["gpu"],
        title="Resources",
        description="GPUs (count, model, min_flops in TFLOPS), main memory with its unit, CPU cores.",
    ),
    "priority": Param(
        REQUEST["priority"],
        type="number",
        minimum=-1_000_000,
        maximum=1_000_000,
        title="Priority",
        description="Higher is sooner.",
    ),
    "dependencies": Param(
        REQUEST["dependencies"],
        type="object",
        additionalProperties={"type": "string"},
        required=["pretrained_model", "dataset"],
        title="Dependencies",
        description="Absolute paths of the pretrained model and the data set.",
    ),
    "shard_count": Param(
        REQUEST["shard_count"],
        type="integer",
        minimum=1,
        maximum=4096,
        title="Shards",
        description="The GPUs are dealt out to them evenly.",
    ),
    "sync_interval": Param(
        REQUEST["sync_interval"],
        type="integer",
        minimum=1,
        maximum=1_000_000_000,
        title="Synchronise every",
        description="Steps between two AllReduces of the weights; 1: gradients at every step.",
    ),
}


@task
def prepare_artifacts() -> dict[str, Any]:
    """Make the small pretrained model and the data set where the request says, unless something is there."""
    from workloads.language_model.pretrain import make_pretrained
    from workloads.language_model.text import make_dataset

    with fail_the_hopeless():
        request = parse_task_request(dict(get_current_context()["params"]))
    made: dict[str, Any] = {}
    for name, make in (("dataset", make_dataset), ("pretrained_model", make_pretrained)):
        folder = Path(request.dependencies[name])
        try:
            made[name] = "was there" if folder.is_dir() else make(folder)
        except OSError as error:
            raise AirflowFailException(
                f"dependencies.{name}={str(folder)!r} is no folder and none can be made there: {error}. Name "
                "a folder that holds it, or one that the workers may create."
            ) from error
    return made


@dag(
    schedule=None,
    catchup=False,
    tags=["gpu", "training", "language model"],
    default_args={"owner": "language", "retries": 3, "retry_delay": timedelta(seconds=10)},
    params=PARAMS,
    doc_md=__doc__,
    description="A small GPT-2-style model, fine-tuned in two shards on leased GPUs",
)
def fine_tune_language_model() -> None:
    """Wire the tasks."""
    artifacts = ArtifactSensor(
        task_id="wait_for_artifacts",
        paths=["{{ params.dependencies.pretrained_model }}", "{{ params.dependencies.dataset }}"],
        deferrable=True,
        poke_interval=5,
        timeout=timedelta(hours=1).total_seconds(),
    )
    fine_tune = DistributedTrainingOperator(
        task_id="fine_tune",
        entrypoint="workloads.language_model.training:train",
        task_request="{{ params | tojson }}",
        train_params={"steps": 300},
        deferrable=True,
        on_retry_callback=spawn_redundant_shards,
    )
    prepare_artifacts() >> artifacts >> fine_tune


fine_tune_language_model()

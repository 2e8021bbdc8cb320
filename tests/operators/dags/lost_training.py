"""A training whose first try loses a shard more often than it is replaced."""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import dag

from airflow_gpu_provider.callbacks.redundancy import spawn_redundant_shards
from airflow_gpu_provider.operators.training import DistributedTrainingOperator
from airflow_gpu_provider.retry_policy import GpuRetryPolicy


@dag(schedule=None)
def lost_training() -> None:
    DistributedTrainingOperator(
        task_id="train",
        entrypoint="tests.training.entrypoints:train",
        gpus=2,
        sync_interval=10,
        redundancy=0,
        checkpoint_dir=os.environ.get("TRAINING_FOLDER", "/nowhere"),
        checkpoint_every=0,
        # Every process that gets there in the first try dies, so no replacement brings it any further.
        train_params={"die_at": "{{ 25 if ti.try_number == 1 else -1 }}"},
        retries=1,
        retry_delay=timedelta(seconds=2),
        retry_policy=GpuRetryPolicy(soon=0),
        on_retry_callback=spawn_redundant_shards,
    )


lost_training()

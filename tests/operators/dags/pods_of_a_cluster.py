"""Tasks that run pods on a cluster's GPUs."""

from __future__ import annotations

import sys

from airflow.sdk import dag

from airflow_gpu_provider.operators.gpu_pods import GpuPodsOperator

_SAY = "import os; print('SEEN', os.environ['NODE_RANK'], 'of', os.environ['NNODES'], flush=True)"


@dag(schedule=None)
def pods_of_a_cluster() -> None:
    common = {"image": "example.invalid/train:1", "kubernetes_conn_id": "prod", "gpus": 4}
    fine = GpuPodsOperator(task_id="fine", command=[sys.executable, "-c", _SAY], **common)
    fails = [sys.executable, "-c", "raise SystemExit(3)"]
    wrong = GpuPodsOperator(task_id="wrong", command=fails, trigger_rule="all_done", **common)
    fine >> wrong


pods_of_a_cluster()

"""Tasks that hold GPUs, for the operator's tests: run by `dag.test()` against a served broker."""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import dag, task

from airflow_gpu_provider.operators.leased import GpuLeasedOperator

# Without retry_delay: a retry that must not happen should not take long to be seen.
RETRIES = {"retries": 2, "retry_delay": timedelta(seconds=0)}


class _SayDevices(GpuLeasedOperator):
    """Returns what it holds."""

    def run_leased(self, context, lease):
        return sorted(device.id for device in lease.devices)


@dag(schedule=None, params={"n": 2})
def leased_tasks() -> None:
    @task.gpu(gpus=1, memory="8GiB", min_tflops=35)
    def environment(gpu_lease=None) -> dict[str, object]:
        gpu_lease.raise_if_lost()
        return {
            "devices": [device.id for device in gpu_lease.devices],
            "visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "order": os.environ["CUDA_DEVICE_ORDER"],
        }

    @task.gpu(memory="8GiB", shared=True)
    def shares(gpu_lease=None) -> dict[str, object]:
        gpu_lease.limit_torch_memory()
        return {
            "milli": [device.milli for device in gpu_lease.devices],
            "limit": os.environ["GPU_MEMORY_LIMIT_MIB"],
            "same": str(gpu_lease.memory_limit_mib),
        }

    @task
    def print_it(value: object, name: str) -> None:
        # What a mapped task returned arrives as a lazy sequence.
        print(f"SEEN {name} {list(value) if name == 'templated' else value}")

    @task.gpu(gpus=1, **RETRIES)
    def fails_once(ti=None) -> int:
        if ti.try_number == 1:
            raise RuntimeError("the first try fails")
        return ti.try_number

    templated = _SayDevices.partial(task_id="templated").expand(gpus=["{{ params.n }}", 1])
    too_many = _SayDevices(task_id="too_many", gpus=16, **RETRIES)
    unknown = _SayDevices(task_id="unknown_model", model="Z9000", **RETRIES)
    impatient = _SayDevices(task_id="impatient", gpus=2, queue_timeout=1, deferrable=True, max_runtime=60)

    seen = print_it(environment(), "environment")
    retried = print_it.override(task_id="print_retried")(fails_once(), "retried")
    say = print_it.override(task_id="print_templated")(templated.output, "templated")
    part = print_it.override(task_id="print_share")(shares(), "share")
    seen >> part >> retried >> say >> [too_many, unknown, impatient]


leased_tasks()

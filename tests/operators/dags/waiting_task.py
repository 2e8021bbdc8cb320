"""A deferrable task that must wait for devices."""

from __future__ import annotations

from airflow.sdk import dag, task


@dag(schedule=None)
def waiting_task() -> None:
    @task.gpu(gpus=2, deferrable=True)
    def work(gpu_lease=None) -> None:
        print("SEEN work", [device.id for device in gpu_lease.devices])

    work()


waiting_task()

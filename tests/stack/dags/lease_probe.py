"""A task that holds devices and says so in a file, for tests that end it in unfriendly ways."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import dag, task


@dag(
    schedule=None,
    params={"gpus": 1, "seconds": 0, "file": "/dev/null"},
    default_args={"owner": "tests"},
    tags=["gpu"],
    doc_md=__doc__,
)
def lease_probe() -> None:
    """Wire the task."""

    @task.gpu(gpus="{{ params.gpus }}", deferrable=True)
    def hold(params=None, gpu_lease=None) -> list[str]:
        import os
        import time
        from pathlib import Path

        Path(params["file"]).write_text(str(os.getpid()))
        time.sleep(params["seconds"])
        return [device.id for device in gpu_lease.devices]

    @task.gpu(gpus=16, retries=2, retry_delay=timedelta(seconds=1))
    def impossible() -> None:
        raise AssertionError("16 devices on a fleet of four")

    hold()
    impossible()


lease_probe()

"""Tasks whose devices are taken back while they work; two save themselves, one does not listen."""

from __future__ import annotations

import os
import time
from pathlib import Path

from airflow.sdk import dag, task


def _work(gpu_lease, name: str) -> str:
    """Count to two runs, saving the number before the devices go."""
    saved = Path(os.environ["PREEMPTED_SAVES"], name)
    runs = int(saved.read_text()) if saved.exists() else 0
    print("SEEN", name, "run", runs, [device.id for device in gpu_lease.devices], flush=True)
    if runs:
        return f"done after {runs}"
    saved.with_suffix(".began").touch()
    assert gpu_lease.ending.wait(60), "nobody takes the devices back"
    saved.write_text(str(runs + 1))
    gpu_lease.raise_if_ending()
    raise AssertionError("it has to end")


@dag(schedule=None)
def preempted_tasks() -> None:
    @task.gpu(gpus=2, preemptible=True, deferrable=False)
    def stays(gpu_lease=None) -> str:
        return _work(gpu_lease, "stays")

    @task.gpu(gpus=2, preemptible=True, deferrable=True)
    def leaves(gpu_lease=None) -> str:
        return _work(gpu_lease, "leaves")

    @task.gpu(gpus=2, preemptible=True, deferrable=False)
    def is_deaf(gpu_lease=None) -> str:
        saved = Path(os.environ["PREEMPTED_SAVES"], "is_deaf")
        print("SEEN is_deaf run", int(saved.exists()), flush=True)
        if saved.exists():
            return "done"
        saved.touch()
        saved.with_suffix(".began").touch()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.05)
        raise AssertionError("its devices are another's by now")

    stays() >> leaves() >> is_deaf()


preempted_tasks()

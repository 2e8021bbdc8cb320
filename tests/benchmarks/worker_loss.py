"""What it costs a training that the Airflow worker of its task is killed, for `recovery --fault worker`.

The operator runs in a task process as a worker runs it, against a served broker that is told the states of
the task. That process is killed while it follows the training; the next try begins at once. Shown is that the
training was not touched: it went on while no task looked on, in the same generation, to the same weights.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from airflow_gpu_provider.config import Settings
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.auth import mint_token
from airflow_gpu_provider.server.board import TaskId
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.reconciler import TaskState
from airflow_gpu_provider.store.db_manager import migrate
from airflow_gpu_provider.training.measurements import read_telemetry
from airflow_gpu_provider.training.plan import RunPaths
from airflow_gpu_provider.training.run_file import RunRecord, read_record
from tests.server.conftest import SECRET, report, served, until_leading
from tests.training.running import ROOT

GIVE_UP_S = 300.0
T = TypeVar("T")


class Task:
    """One task whose tries run in processes of their own."""

    def __init__(self, folder: Path, broker: Broker, url: str, arguments: dict[str, Any]) -> None:
        self.folder = folder
        self.broker = broker
        self.paths = RunPaths(folder / "attempts" / "try-1")
        self._arguments = json.dumps(arguments)
        token = mint_token(SECRET, role="task", subject="benchmark", ttl_s=3600)
        connection = {"conn_type": "gpu", "host": url, "password": token}
        known = {
            "AIRFLOW_CONN_GPU_DEFAULT": json.dumps(connection),
            "GPU_HOST": "h1",
            "PYTHONPATH": str(ROOT),
        }
        self._environment = {**os.environ, **known}

    def start(self, try_number: int) -> subprocess.Popen[str]:
        """Start a try."""
        command = [sys.executable, "-m", "tests.operators.training_worker", str(self.folder)]
        return subprocess.Popen(
            [*command, str(try_number), self._arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )

    def record(self) -> RunRecord | None:
        """Return where the training stands."""
        return read_record(self.paths.run)

    def held_for_try(self) -> int | None:
        """Return which try holds the lease."""
        return next((claim.try_number for _, claim in self.broker.repository.live_leases()), None)


def result_of(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a try that succeeded hands over."""
    output, _ = worker.communicate(timeout=GIVE_UP_S)
    said: dict[str, Any] = json.loads(output.splitlines()[-1])
    if "result" not in said:
        raise SystemExit(f"The task did not succeed: {said}")
    result: dict[str, Any] = said["result"]
    return result


def until(look: Callable[[], T | None], what: str) -> T:
    """Return what ``look`` returns once it is something."""
    deadline = time.monotonic() + GIVE_UP_S
    while (found := look()) is None or found is False:
        if time.monotonic() > deadline:
            raise SystemExit(f"Gave up waiting until {what}")
        time.sleep(0.02)
    return found


@contextmanager
def broker_of_one_host(folder: Path, devices: int) -> Iterator[tuple[Broker, str]]:
    """Yield a served broker that believes the task to be running, and its URL."""
    url = f"sqlite:///{folder / 'gpu.db'}"
    migrate(url)
    broker = Broker(Settings(token_secret=SECRET, sql_alchemy_conn=url, stale_after_s=600))

    def states(tasks: Iterable[TaskId]) -> dict[TaskId, TaskState]:
        return {task: TaskState("running", 1) for task in tasks}

    broker.upkeep.reconciler._task_states = states
    broker.start()
    try:
        broker.report(ReportBody(nodes=(report(gpus=devices, simulated=True),)))
        until_leading(broker)
        with served(broker) as address:
            yield broker, address
    finally:
        broker.stop()


def lose_worker(task: Task, *, after_step: int) -> dict[str, Any]:
    """Kill the worker of a training once it trains; return what came of it."""
    worker = task.start(1)
    before = until(lambda: (r := task.record()) and (r if r.step >= after_step else None), "it trains")
    at = time.time()
    worker.kill()
    worker.wait()
    retry = task.start(2)
    until(lambda: task.held_for_try() == 2 or None, "the retry has the lease")
    attached_s, attached = time.time() - at, task.record()
    result = result_of(retry)
    syncs = [
        line for line in read_telemetry(task.paths.telemetry) if line["kind"] == "sync" and line["at"] > at
    ]
    assert attached is not None
    return {
        "result": result,
        "first_sync_s": min(line["at"] for line in syncs) - at,
        "attached_s": attached_s,
        "steps_without_task": attached.step - before.step,
        "same_generation": {line["generation"] for line in syncs} == {before.generation},
    }


def measure_worker_loss(
    folder: Path, *, shards: int, spares: int, sync_interval: int, steps: int, runs: int, pause_s: float
) -> dict[str, Any]:
    """Kill the worker of several trainings, and compare with one that nothing happened to."""
    arguments = {
        "entrypoint": "tests.benchmarks.training_workload:train",
        "gpus": shards,
        "redundancy": spares / shards,
        "sync_interval": sync_interval,
        "train_params": {"steps": steps, "pause_s": pause_s, "oom_file": str(folder / "oom")},
    }
    lost = []
    with broker_of_one_host(folder, shards + spares) as (broker, url):
        alone = result_of(Task(folder / "alone" / "training", broker, url, arguments).start(1))
        for number in range(runs):
            task = Task(folder / f"run-{number}" / "training", broker, url, arguments)
            lost.append(lose_worker(task, after_step=4 * sync_interval))
    return {
        "fault_to_first_sync_s": round(statistics.median(each["first_sync_s"] for each in lost), 3),
        "all_fault_to_first_sync_s": [round(each["first_sync_s"], 3) for each in lost],
        "fault_to_retry_attached_s": round(statistics.median(each["attached_s"] for each in lost), 1),
        "steps_without_task": [each["steps_without_task"] for each in lost],
        "same_generation": all(each["same_generation"] for each in lost),
        "bitwise_equal": {each["result"]["state_sha256"] for each in lost} == {alone["state_sha256"]},
        "lost_samples": sum(each["result"]["result"]["lost_samples"] for each in lost),
        "repeated_samples": sum(each["result"]["result"]["repeated_samples"] for each in lost),
    }

"""A training outlives its worker: real processes, real signals, a served broker that knows task states."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from airflow_gpu_provider.operators.keeper_files import KeeperEnd, Whereabouts
from airflow_gpu_provider.reports import ReportBody
from airflow_gpu_provider.server.board import TaskId
from airflow_gpu_provider.server.broker import Broker
from airflow_gpu_provider.server.reconciler import TaskState
from airflow_gpu_provider.training.run_file import RunRecord, RunState, read_record
from tests.server.conftest import report
from tests.training.oracle import expected_weights
from tests.training.running import ROOT, is_alive

STEPS = 200
HOLD_AT = 150  #: a worker takes longer to start than all steps do
GIVE_UP_S = 120


class Workers:
    """Starts the tries of one task and says what became of them."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.attempt = folder / "attempts" / "try-1"
        self.go_on = folder.parent / "go_on"
        self._environment = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
        self._started: list[subprocess.Popen[str]] = []

    def start(self, try_number: int = 1, **arguments: Any) -> subprocess.Popen[str]:
        params = {"steps": STEPS, "pause_s": 0.02, "hold_at": HOLD_AT, "hold_file": str(self.go_on)}
        arguments = {"train_params": params, **arguments}
        command = [sys.executable, "-m", "tests.operators.training_worker", str(self.folder)]
        log = (self.folder.parent / f"worker-{try_number}.log").open("w")
        with log:
            started = subprocess.Popen(
                [*command, str(try_number), json.dumps(arguments)],
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )
        self._started.append(started)
        return started

    def end(self, worker: subprocess.Popen[str]) -> dict[str, Any]:
        output, _ = worker.communicate(timeout=GIVE_UP_S)
        said: dict[str, Any] = json.loads(output.splitlines()[-1])
        return said

    def record(self) -> RunRecord | None:
        return read_record(self.attempt / "run.json")

    def where(self) -> Whereabouts:
        where = Whereabouts.read(self.attempt / "keeper.json")
        assert where is not None
        return where

    def trains(self, beyond: int = 20) -> RunRecord:
        return until(lambda: (r := self.record()) and r.step > beyond and r.checkpoint and r, "it trains")

    def processes(self) -> list[psutil.Process]:
        """Return the keeper and all below it."""
        keeper = psutil.Process(self.where().pid)
        return [keeper, *keeper.children(recursive=True)]

    def close(self) -> None:
        for each in self._started:
            each.kill()
            each.communicate()
        for file in self.folder.glob("attempts/*/keeper.json"):
            where = Whereabouts.read(file)
            if where is not None and where.is_alive:
                os.kill(where.pid, signal.SIGKILL)


def until(check: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + GIVE_UP_S
    while not (answer := check()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return answer


@pytest.fixture
def states(broker: Broker) -> dict[str, str]:
    """Return what Airflow says of the task, under "train"; the try it is at does not matter here."""
    said = {"train": "running"}

    def task_states(tasks: Iterable[TaskId]) -> dict[TaskId, TaskState]:
        return {task: TaskState(said["train"], 1) for task in tasks}

    broker.upkeep.reconciler._task_states = task_states
    broker.report(ReportBody(nodes=(report(simulated=True),)))
    return said


@pytest.fixture
def workers(states: dict[str, str], environment: dict[str, str], tmp_path: Path) -> Iterator[Workers]:
    started = Workers(tmp_path / "training", environment)
    yield started
    started.close()


@pytest.mark.slow
def test_a_retry_goes_on_with_the_run_whose_worker_was_killed(
    workers: Workers, states: dict[str, str], broker: Broker, tmp_path: Path, environment: dict[str, str]
) -> None:
    worker = workers.start()
    before = workers.trains()
    lease_id = workers.where().lease_id
    processes = workers.processes()
    worker.kill()
    states["train"] = "up_for_retry"
    on_its_own = workers.trains(before.step + 30)
    ((held, claim),) = broker.repository.live_leases()
    assert (held.row.id, claim.try_number, held.row.epoch) == (lease_id, 1, 1)
    states["train"] = "running"
    retry = workers.start(2)
    until(lambda: [c.try_number for _, c in broker.repository.live_leases()] == [2], "the lease is passed on")
    workers.go_on.touch()
    said = workers.end(retry)
    assert said["result"]["steps"] == STEPS and said["result"]["resumed_from"] is None, said
    assert [each.name for each in workers.folder.glob("attempts/*")] == ["try-1"], "no second attempt"
    record = workers.record()
    assert record is not None and record.failures == [] and record.pid == on_its_own.pid
    assert broker.repository.live_leases() == []
    psutil.wait_procs(processes, timeout=20)
    assert not any(each.is_running() for each in processes)
    alone = Workers(tmp_path / "alone" / "training", environment)
    (tmp_path / "alone").mkdir()
    alone.go_on.touch()
    undisturbed = alone.end(alone.start())
    assert undisturbed["result"]["state_sha256"] == said["result"]["state_sha256"]
    # Of the same tries, so Airflow did not store the result: it is handed over without asking for devices.
    again = workers.end(workers.start(3))
    assert again["result"] == said["result"]
    assert [each.name for each in workers.folder.glob("attempts/*")] == ["try-1"]


@pytest.mark.slow
def test_a_retry_goes_on_with_a_run_that_took_idle_devices_meanwhile(
    workers: Workers, states: dict[str, str], broker: Broker
) -> None:
    params = {"steps": STEPS, "pause_s": 0.1, "hold_at": HOLD_AT, "hold_file": str(workers.go_on)}
    elastic = {"shard_count": "1-2", "gpus": 1, "train_params": params}
    worker = workers.start(**elastic)
    until(lambda: (record := workers.record()) and record.growths, "the idle device is used")
    grown = workers.where()
    assert grown.request.gpus == 2
    worker.kill()
    retry = workers.start(2, **elastic)
    until(lambda: [c.try_number for _, c in broker.repository.live_leases()] == [2], "the lease is passed on")
    ((held, _),) = broker.repository.live_leases()
    assert (held.row.id, len(held.devices)) == (grown.lease_id, 2)
    workers.go_on.touch()
    said = workers.end(retry)
    assert said["result"]["steps"] == STEPS and said["result"]["resumed_from"] is None, said
    assert said["result"]["state_sha256"] == expected_weights(10, STEPS)
    assert broker.repository.live_leases() == []


def test_a_run_whose_task_is_over_saves_and_gives_its_devices_back(
    workers: Workers, states: dict[str, str], broker: Broker
) -> None:
    quicken(broker, 15.0)
    worker = workers.start(train_params={"steps": 100_000, "pause_s": 0.02})
    workers.trains()
    processes = workers.processes()
    worker.kill()
    states["train"] = "failed"
    until(lambda: not broker.repository.live_leases(), "the devices return")
    _gone, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    record = workers.record()
    assert record is not None and record.state is RunState.STOPPED and record.checkpoint is not None
    assert workers.where().end is KeeperEnd.LOST


@pytest.mark.slow
def test_a_persons_end_stops_the_run_and_a_workers_end_does_not(
    workers: Workers, states: dict[str, str], broker: Broker
) -> None:
    worker = workers.start()
    workers.trains()
    worker.terminate()  # the state is still "running": the worker is being stopped
    said = workers.end(worker)
    assert said["error"] == "SystemExit" and "goes on under its lease" in said["message"]
    assert workers.where().is_alive
    retry = workers.start(2)
    until(lambda: [c.try_number for _, c in broker.repository.live_leases()] == [2], "the lease is passed on")
    time.sleep(1)  # the keeper gets its orders
    assert workers.where().is_alive
    states["train"] = "failed"
    retry.terminate()
    said = workers.end(retry)
    assert "ended from outside" in said["message"], said
    record = workers.record()
    assert record is not None and record.state is RunState.STOPPED and record.checkpoint is not None
    assert broker.repository.live_leases() == []


def test_nothing_of_a_run_outlives_its_keeper_and_a_retry_resumes(workers: Workers, broker: Broker) -> None:
    worker = workers.start()
    workers.trains()
    _, *below = workers.processes()
    os.kill(workers.where().pid, signal.SIGKILL)
    said = workers.end(worker)
    assert said["error"] == "WorkerGroupFailed", said
    assert not any(is_alive(each.pid) for each in below)
    workers.go_on.touch()
    said = workers.end(workers.start(2))
    assert said["result"]["resumed_from"] > 0, said


def test_a_deferred_task_leaves_its_worker_while_it_trains(workers: Workers) -> None:
    worker = workers.start(deferrable=True)
    assert workers.end(worker) == {"deferred": "conclude"}
    workers.trains()
    assert workers.where().is_alive


def quicken(broker: Broker, ttl_s: float) -> None:
    broker.settings = broker.desk.settings = broker.settings.model_copy(update={"lease_ttl_s": ttl_s})

"""A local run ends with whoever started it, and leaves a checkpoint behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.launchers.local import LocalLauncher
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.run_file import RunState
from tests.training.running import ROOT, Running, is_alive, make_plan, start

STARTER = """
import sys, time
from airflow_gpu_provider.launchers.local import LocalLauncher
from airflow_gpu_provider.training.plan import RunPlan
run = LocalLauncher().start(RunPlan.model_validate_json(open(sys.argv[1]).read()))
print(run.pid, flush=True)
time.sleep(300)
"""


def started(plan: RunPlan, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Start a run from a process of its own; return that process and the pid of the run's guard."""
    plan_file = folder / "plan.json"
    plan_file.write_text(plan.model_dump_json())
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(plan_file)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert starter.stdout is not None
    return starter, int(starter.stdout.readline())


def test_when_the_starter_is_killed_the_run_saves_and_every_process_ends(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "run", checkpoint_every_s=1000, params={"pause_s": 0.05, "steps": 1000})
    starter, supervisor = started(plan, tmp_path)

    class Watching(Running):
        """The test is not the supervisor's parent, so it looks at the files and processes only."""

    watching = Watching(plan, _Foreign(plan, supervisor))  # type: ignore[arg-type]
    watching.until_step(10)
    shards = watching.pids()
    assert len(shards) == 2
    starter.kill()
    starter.wait()
    record = watching.until(lambda record: record.state.is_terminal, "the end")
    assert record.state is RunState.STOPPED
    assert "the process that started the run is gone" in str(record.error)
    assert record.checkpoint is not None and record.checkpoint.step >= 10, "saved at the next synchronisation"
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in (supervisor, *shards.values())):
        assert time.monotonic() < deadline, "a process outlived its starter"
        time.sleep(0.05)


def test_a_run_whose_starter_dies_while_it_imports_does_not_train_on(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "run", params={"pause_s": 0.05, "steps": 100_000})
    starter, guard = started(plan, tmp_path)
    starter.kill()  # long before the guard has imported torch and can look at its parent
    starter.wait()
    deadline = time.monotonic() + 120
    while is_alive(guard):
        assert time.monotonic() < deadline, "an orphan trains on"
        time.sleep(0.05)


class _Foreign:
    def __init__(self, plan: object, pid: int) -> None:
        self._plan = plan
        self._pid = pid

    def has_ended(self) -> bool:
        return not is_alive(self._pid)

    def record(self) -> object:
        from airflow_gpu_provider.training.run_file import read_record

        return read_record(self._plan.paths.run)  # type: ignore[attr-defined]

    def explain_end(self) -> str:
        return "ended"


def test_killing_the_guard_ends_everything_below_it(tmp_path: Path) -> None:
    running = start(make_plan(tmp_path, params={"pause_s": 0.05, "steps": 1000}))
    running.until_step(10)
    below = [running.supervisor(), running.nursery(), *running.pids().values()]
    os.kill(running.run.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in below):
        assert time.monotonic() < deadline, "a process lives on without its guard"
        time.sleep(0.05)
    running.run.stop()
    running.run.kill()  # both may be repeated on a run that has ended
    assert "exit code -9" in running.run.explain_end()


def test_an_entrypoint_that_is_not_there_is_explained(tmp_path: Path) -> None:
    record = start(make_plan(tmp_path, shards=1, entrypoint="tests.training.entrypoints:trian")).end()
    assert record.state is RunState.FAILED and record.hopeless
    assert "has no function 'trian'; it has" in str(record.error) and "train_and_break" in str(record.error)


def test_leaving_the_loop_early_is_explained(tmp_path: Path) -> None:
    record = start(
        make_plan(tmp_path, shards=1, entrypoint="tests.training.entrypoints:train_and_break")
    ).end()
    assert record.state is RunState.FAILED and record.hopeless
    assert "do not break out of" in str(record.error)


def test_a_worker_without_torch_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"pip install 'airflow-gpu-provider\[torch\]'"):
        LocalLauncher().start(make_plan(tmp_path))

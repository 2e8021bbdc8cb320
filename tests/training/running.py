"""Start real training runs in the tests, hurt their processes, and look at what comes out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_gpu_provider.launchers.local import LocalLauncher, LocalRun
from airflow_gpu_provider.training.plan import RunPlan, Slot
from airflow_gpu_provider.training.run_file import RunRecord

ROOT = Path(__file__).resolve().parents[2]
GIVE_UP_S = 120


@dataclass
class Running:
    """A run and its plan."""

    plan: RunPlan
    run: LocalRun

    def until(self, condition: Callable[[RunRecord], bool], what: str) -> RunRecord:
        """Return the first record that fulfils the condition."""
        deadline = time.monotonic() + GIVE_UP_S
        record = None
        while time.monotonic() < deadline:
            has_ended = self.run.has_ended()
            record = self.run.record()
            if record is not None and condition(record):
                return record
            assert not has_ended, f"ended before {what}: {record} {self.run.explain_end()} {self.logs()}"
            time.sleep(0.02)
        raise AssertionError(f"waited in vain for {what}: {record} {self.logs()}")

    def end(self, *, give_up_s: float = GIVE_UP_S) -> RunRecord:
        """Return the last record."""
        deadline = time.monotonic() + give_up_s
        while not self.run.has_ended():
            assert time.monotonic() < deadline, f"did not end: {self.run.record()} {self.logs()}"
            time.sleep(0.02)
        record = self.run.record()
        assert record is not None, self.run.explain_end()
        return record

    def until_step(self, step: int) -> RunRecord:
        """Return once all shards share the state of ``step``."""
        return self.until(lambda record: record.step >= step, f"step {step}")

    def pid_of_rank(self, rank: int) -> int:
        """Return the process that holds a rank."""
        record = self.run.record()
        assert record is not None
        uid = next(uid for uid, held in record.members.items() if held == rank)
        return self.pids()[uid]

    def pids(self) -> dict[str, int]:
        """Return the shard processes of this run that are alive, by uid."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (log := _output(entry)).parent == self.plan.paths.logs:
                found[log.stem] = int(entry.name)
        return found

    def supervisor(self) -> int:
        """Return the supervisor's process."""
        record = self.run.record()
        assert record is not None
        return record.pid

    def nursery(self) -> int:
        """Return the process that forks shards."""
        supervisor = self.supervisor()
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        return next(int(pid) for pid in children if _name(pid) == "nursery")

    def hurt(self, rank: int, number: int) -> None:
        """Send a signal to the process that holds a rank."""
        os.kill(self.pid_of_rank(rank), number)

    def logs(self) -> str:
        """Return what all processes printed, for a failed assertion."""
        files = [self.plan.paths.supervisor_log, *sorted(self.plan.paths.logs.glob("*.log"))]
        return "\n".join(f"--- {file.name}\n{file.read_text()[-2000:]}" for file in files if file.exists())


def make_plan(
    folder: Path, *, shards: int = 2, spares: int = 0, attempt: str = "try-1", **changes: Any
) -> RunPlan:
    """Return a plan of shards on the CPU."""
    fields: dict[str, Any] = {
        "run_id": folder.name,
        "run_dir": folder / attempt,
        "checkpoint_dir": folder / "checkpoints",
        "entrypoint": "tests.training.entrypoints:train",
        "shard_count": shards,
        "sync_interval": 10,
        "member_slots": (Slot(),) * shards,
        "spare_slots": (Slot(),) * spares,
        "python_path": (str(ROOT),),
        "max_respawns": 0,
        "checkpoint_every_s": 0,
    }
    return RunPlan(**{**fields, **changes})


def start(plan: RunPlan) -> Running:
    """Start the plan's guard as a child of this process."""
    return Running(plan, LocalLauncher().start(plan))


def is_alive(pid: int) -> bool:
    """Say whether a process runs; one that nobody has reaped yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _name(pid: str) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _output(process: Path) -> Path:
    try:
        return (process / "fd/1").readlink()
    except OSError:
        return Path()

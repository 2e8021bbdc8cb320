"""The process a launcher starts for a run: ``python -m airflow_gpu_provider.training.guard PLAN PARENT_PID``.

Imports torch once, forks the supervisor, and forks another when that one is lost: the new one goes on from
the last checkpoint in the same attempt, under the same lease. Everything of the run is below this process
and ends with it; when its own parent is gone it asks the supervisor to let the shards save. It does nothing
else, so that there is little that could end it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from airflow_gpu_provider.training.endings import end_children
from airflow_gpu_provider.training.growth_words import GrowthFiles
from airflow_gpu_provider.training.nursery import import_for_shards
from airflow_gpu_provider.training.parenthood import (
    adopt_orphans,
    end_with_parent,
    in_child,
    name_process,
)
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.respawns import RespawnBudget
from airflow_gpu_provider.training.run_file import RunRecord, RunState, read_record, write_record
from airflow_gpu_provider.training.shard import SHARD_NAME

log = logging.getLogger(__name__)

_POLL_S = 0.05
#: without progress in between
_MAX_RESTARTS = 3


class Guard:
    """Keeps one supervisor running until the run has ended."""

    def __init__(self, plan: RunPlan, plan_file: Path, parent_pid: int) -> None:
        self._plan = plan
        self._plan_file = plan_file
        self._parent = parent_pid
        self._restarts = RespawnBudget(_MAX_RESTARTS)
        self._stop_signal: int | None = None

    def run(self) -> int:
        """Return the exit code of the last supervisor."""
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        while True:
            code = self._run_supervisor()
            # Shards of a lost supervisor: their devices are free only when they are gone.
            staying = end_children(within_s=self._plan.fence_timeout_s)
            record = read_record(self._plan.paths.run)
            if staying and record is not None and not record.state.is_terminal:
                self._give_up(record, staying)
                return code
            if self._stop_signal is not None or record is None or record.state.is_terminal:
                return code
            if self._restarts.left(record.step) <= 0:
                log.error("The supervisor was lost %d times without progress", _MAX_RESTARTS + 1)
                return code
            self._restarts.spend(record.step)
            log.warning("The supervisor ended with %d; another one resumes from the last checkpoint", code)

    def _run_supervisor(self) -> int:
        previous = read_record(self._plan.paths.run)
        sys.stdout.flush()
        sys.stderr.flush()
        if (pid := os.fork()) == 0:
            in_child(partial(_supervise, self._plan, self._plan_file, previous, guard=os.getppid()))
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if os.getppid() != self._parent and self._stop_signal is None:
                self._stop_signal = signal.SIGHUP
            if self._stop_signal is not None:
                os.kill(pid, self._stop_signal)  # again and again: the first may come before it can listen
            time.sleep(_POLL_S)

    def _give_up(self, record: RunRecord, staying: dict[int, str]) -> None:
        """End a run whose processes stay after their supervisor: none may be started a second time."""
        evidence = "; ".join(staying.values())
        log.error("The supervisor was lost and what it had started stays: %s", evidence)
        record.suspect_devices += [
            device
            for device in devices_of(staying, record, self._plan)
            if device not in record.suspect_devices
        ]
        record.state = RunState.FAILED
        record.error = (
            f"the supervisor was lost and what it had started does not end: {evidence}. A retry resumes from "
            "the last checkpoint on other devices; see what the driver and the disks of this host wait for."
        )
        write_record(self._plan.paths.run, record)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stop_signal = self._stop_signal or number


def devices_of(pids: Iterable[int], record: RunRecord, plan: RunPlan) -> list[str]:
    """Return the devices of those processes that are shards, by the names that they have given themselves."""
    placed = GrowthFiles(plan.run_dir).placement()
    slots = plan.member_slots if placed is None else placed.members
    found: list[str] = []
    for pid in pids:
        with suppress(OSError):
            uid = Path(f"/proc/{pid}/comm").read_text().strip().removeprefix(SHARD_NAME)
            if uid in record.members:
                found += slots[record.members[uid]].device_ids
    return found


def _supervise(plan: RunPlan, plan_file: Path, previous: RunRecord | None, *, guard: int) -> int:
    end_with_parent(guard)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # the shards inherit what is set here
    name_process("supervisor")
    if plan.script is not None:
        from airflow_gpu_provider.training.script_supervisor import ScriptSupervisor

        return ScriptSupervisor(plan, plan.script, previous).run()
    from airflow_gpu_provider.training.supervisor import Supervisor

    return Supervisor(plan, plan_file, previous).run()


def main(plan_file: Path, parent_pid: int) -> int:
    """Run the plan for a process, which may have ended while this one started."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    plan = RunPlan.model_validate_json(plan_file.read_text())
    if plan.script is None:  # a script imports what it needs, in a process of its own
        import_for_shards()
    return Guard(plan, plan_file, parent_pid).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

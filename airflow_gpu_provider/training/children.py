"""The shard processes of a run: started, ended and examined here only.

They are children of the supervisor and end with it (`parenthood`), forked by the `nursery` or, without one,
started cold from the supervisor's main thread. Each prints to a log of its own. A process that is given up is
killed and reaped before anyone takes its rank, as far as the kernel lets it: `fence` says what follows.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from airflow_gpu_provider.training import shard
from airflow_gpu_provider.training.endings import end_children, wait_until, why_it_stays
from airflow_gpu_provider.training.failures import Remains, ShardReport
from airflow_gpu_provider.training.isolation import without_limits
from airflow_gpu_provider.training.nursery import Nursery, Order
from airflow_gpu_provider.training.parenthood import reap_strays
from airflow_gpu_provider.training.plan import RunPlan, Slot

log = logging.getLogger(__name__)

_TAIL_BYTES = 8192
_TAIL_LINES = 20


class _Process(Protocol):
    """A child of this process; what is used of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class _Forked:
    """A child that the nursery has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def kill(self) -> None:
        if self.poll() is None:  # not reaped, so the number is still this child's
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


@dataclass
class _Child:
    process: _Process
    slot: Slot
    oom_kills_before: int


class Children:
    """All processes that this supervisor has started."""

    def __init__(
        self, plan: RunPlan, plan_file: Path, nursery: Nursery | None, *, address: str, prefix: str
    ) -> None:
        self._plan = plan
        self._plan_file = plan_file
        self._nursery = nursery
        self._address = address
        self._prefix = prefix
        self._children: dict[str, _Child] = {}
        self._staying: set[int] = set()  #: what SIGKILL has not ended; nobody waits for it again
        #: where the run may have processes, one each
        self.slots: tuple[Slot, ...] = (*plan.member_slots, *plan.spare_slots)

    def start(self, uid: str, slot: Slot) -> None:
        """Start a shard process."""
        environment = {
            **without_limits(os.environ),
            "OMP_NUM_THREADS": str(self._plan.threads_per_shard),
            "PYTHONUNBUFFERED": "1",
            **slot.environment,
            shard.STORE_VARIABLE: self._address,
            # In the environment, not on the command line: other users of the host can read that.
            shard.PREFIX_VARIABLE: self._prefix,
            shard.DEVICE_VARIABLE: slot.torch_device,
            shard.PARENT_VARIABLE: str(os.getpid()),
        }
        order = Order(uid, str(self._plan_file), str(self._plan.paths.log(uid)), environment)
        pid = self._nursery.start(order) if self._nursery is not None else None
        if pid is None:  # of a nursery that is gone there may be a half-started shard
            self._staying.update(end_children(spared=self._own() | self._staying, within_s=1.0))
        process = _Forked(pid) if pid is not None else _start_cold(order)
        self._children[uid] = _Child(process, slot, kernel_oom_kills())

    def reap_strays(self) -> None:
        """Reap what shards have left behind."""
        reap_strays(self._own())

    def exit_code(self, uid: str) -> int | None:
        """Return how the process ended, None while it runs."""
        return self._children[uid].process.poll()

    def pid(self, uid: str) -> int:
        """Return the process's id."""
        return self._children[uid].process.pid

    def slot(self, uid: str) -> Slot:
        """Return where the process runs."""
        return self._children[uid].slot

    def free_slot(self, suspect_devices: Sequence[str], *, besides: Collection[str] = ()) -> Slot | None:
        """Return a slot in which no process runs and whose devices are not suspect.

        The processes ``besides`` are in places of a change that is under way, which may look the same.
        """
        free = list(self.slots)
        for uid, child in self._children.items():
            if uid not in besides and child.process.poll() is None and child.slot in free:
                free.remove(child.slot)
        return next((slot for slot in free if not set(suspect_devices).intersection(slot.device_ids)), None)

    def set_slots(self, slots: Sequence[Slot]) -> None:
        """Start processes in these places from now on; those that run stay where they are."""
        self.slots = tuple(slots)

    def change_slots(self, change: Callable[[Slot], Slot]) -> None:
        """Let every place, with the process in it, be what it became."""
        self.slots = tuple(change(slot) for slot in self.slots)
        for child in self._children.values():
            child.slot = change(child.slot)

    def unended(self) -> list[str]:
        """Return the processes that may still run, but for those that were given up."""
        return [
            uid
            for uid, child in self._children.items()
            if child.process.poll() is None and child.process.pid not in self._staying
        ]

    def fence(self, uids: Sequence[str]) -> dict[str, str]:
        """Make sure that neither these processes nor what they started (data loaders, say) run any longer.

        Return those that stay although they were killed, with the evidence. It is waited for all of them
        together, and once.
        """
        within_s = self._plan.fence_timeout_s
        deadline = time.monotonic() + within_s
        processes = {uid: self._children[uid].process for uid in uids}
        for process in processes.values():
            process.kill()
        wait_until(lambda: all(process.poll() is not None for process in processes.values()), deadline)
        staying = {uid: process.pid for uid, process in processes.items() if process.poll() is None}
        strays = end_children(
            spared=self._own() | self._staying, within_s=max(1.0, deadline - time.monotonic())
        )
        self._staying.update(strays, staying.values())
        for evidence in strays.values():
            log.error("What %s had started stays: %s", ", ".join(uids), evidence)
        return {uid: why_it_stays(pid, within_s) for uid, pid in staying.items()}

    def _own(self) -> frozenset[int]:
        nursery = {self._nursery.pid} if self._nursery is not None else set()
        return frozenset(nursery | {child.process.pid for child in self._children.values()})

    def remains(self, uid: str) -> Remains:
        """Gather what the process left behind."""
        child = self._children[uid]
        report_file = self._plan.paths.failure(uid)
        report = ShardReport.model_validate_json(report_file.read_text()) if report_file.exists() else None
        return Remains(
            exit_code=child.process.poll(),
            report=report,
            log_tail=_tail(self._plan.paths.log(uid)),
            kernel_oom_kills=max(0, kernel_oom_kills() - child.oom_kills_before),
        )


def _start_cold(order: Order) -> _Process:
    command = [sys.executable, "-m", shard.__name__, order.plan_file, order.uid]
    with Path(order.log).open("ab") as log:
        return subprocess.Popen(
            command,
            env=dict(order.environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def kernel_oom_kills() -> int:
    """Return how many processes the kernel has ended for lack of memory: in our cgroup, else on the host."""
    for path, name in ((_cgroup_events(), "oom_kill"), (Path("/proc/vmstat"), "oom_kill")):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _cgroup_events() -> Path:
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
    except OSError:
        own = "/"
    return Path("/sys/fs/cgroup") / own.lstrip("/") / "memory.events"


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []

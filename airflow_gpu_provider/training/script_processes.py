"""All ranks of a script's run, started together and ended together.

A script cannot take up a lost rank in the middle, so there is never a process of one round beside those of
another: `end_all` ends whatever lives below the supervisor, data loaders and other helpers included. The
supervisor hosts the store behind MASTER_PORT, so that it is in no rank, and a new one for each round, so that
nothing of the last one is found in it. Used by `script_supervisor`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from airflow_gpu_provider.training import script_process
from airflow_gpu_provider.training.children import kernel_oom_kills
from airflow_gpu_provider.training.coordination import LOOPBACK
from airflow_gpu_provider.training.endings import end_children
from airflow_gpu_provider.training.failures import Remains
from airflow_gpu_provider.training.memory_limit import LIMIT_VARIABLE
from airflow_gpu_provider.training.plan import RunPlan, Slot
from airflow_gpu_provider.training.process_state import ProcessState, read_process_state
from airflow_gpu_provider.training.script import Script, rank_environment
from airflow_gpu_provider.training.script_errors import error_at_the_start, error_in

log = logging.getLogger(__name__)

#: its `sitecustomize` keeps PyTorch to a part of a device
_SITE = Path(__file__).parent / "script_site"
_STORE_TIMEOUT = timedelta(minutes=5)
_TAIL_BYTES = 64 * 1024


class ScriptProcesses:
    """The processes of the present round, by rank."""

    def __init__(self, plan: RunPlan, script: Script) -> None:
        self._plan = plan
        self._script = script
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._uids: list[str] = []
        self._store: dist.TCPStore | None = None
        self._oom_kills_before = 0
        self._staying: set[int] = set()  #: what SIGKILL has not ended; nobody waits for it again
        known = set(sys.path)  # what every Python here finds by itself
        self._python_path = [entry for entry in plan.python_path if entry not in known]

    def start(self, slots: Sequence[Slot], uids: Sequence[str], *, restarts: int) -> None:
        """Start one process for each rank."""
        self._oom_kills_before = kernel_oom_kills()
        self._uids = list(uids)
        listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        for rank, (slot, uid) in enumerate(zip(slots, uids, strict=True)):
            environment = self._environment(slot)
            environment.update(rank_environment(self._plan, rank=rank, port=port, restarts=restarts))
            self._ranks.append(self._start_rank(uid, environment))

    def exit_codes(self) -> dict[int, int]:
        """Return how each rank ended that has."""
        codes = {rank: process.poll() for rank, process in enumerate(self._ranks)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def states(self) -> dict[int, ProcessState]:
        """Return what the kernel says of the ranks that live."""
        states = {
            rank: read_process_state(process.pid)
            for rank, process in enumerate(self._ranks)
            if process.poll() is None
        }
        return {rank: state for rank, state in states.items() if state is not None}

    def uid(self, rank: int) -> str:
        """Return the name of a rank's process."""
        return self._uids[rank]

    def output_bytes(self) -> int:
        """Return how much all ranks of this round have printed."""
        return sum(_size(self._plan.paths.log(uid)) for uid in self._uids)

    def remains(self, rank: int) -> Remains:
        """Gather what a rank left behind."""
        code = self._ranks[rank].poll()
        lines = _tail(self._plan.paths.log(self._uids[rank]))
        return Remains(
            exit_code=_as_signal(code),
            # 1 is Python's code after an exception
            report=(error_in(lines) if code == 1 else None) or error_at_the_start(lines, code),
            log_tail=lines[-20:],
            kernel_oom_kills=max(0, kernel_oom_kills() - self._oom_kills_before),
        )

    def ask_to_stop(self) -> None:
        """Send SIGTERM to every rank that lives, once; a script may save and leave."""
        for process in self._ranks:
            process.send_signal(signal.SIGTERM)

    def end_all(self) -> dict[int, str]:
        """Leave no process below the supervisor; return ranks that stay all the same, with the evidence."""
        staying = end_children(spared=self._staying, within_s=self._plan.fence_timeout_s)
        self._staying.update(staying)
        for process in self._ranks:
            process.poll()
        ranks = {process.pid: rank for rank, process in enumerate(self._ranks)}
        self._ranks = []
        self._store = None
        for evidence in staying.values():
            log.error("%s", evidence)
        return {ranks[pid]: evidence for pid, evidence in staying.items() if pid in ranks}

    def _environment(self, slot: Slot) -> dict[str, str]:
        environment = {**os.environ, **slot.environment}
        # Shards that roll back keep NCCL from ending a process whose peer is lost; a script relies on that.
        environment.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING", None)
        limit = [str(_SITE)] if LIMIT_VARIABLE in environment else []
        path = [*limit, environment.get("PYTHONPATH", ""), *self._python_path]
        if joined := os.pathsep.join(entry for entry in path if entry):
            environment["PYTHONPATH"] = joined
        return environment

    def _start_rank(self, uid: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        place = (str(os.getpid()), str(self._script.folder))
        command = [
            sys.executable,
            "-m",
            script_process.__name__,
            *place,
            sys.executable,
            *self._script.command,
        ]
        with self._plan.paths.log(uid).open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self._plan.run_dir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


def _as_signal(code: int | None) -> int | None:
    """Return a shell's way to say that its child was ended by a signal (128 + n) as Python's (-n)."""
    return 128 - code if code is not None and 128 < code < 128 + signal.NSIG else code


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, _size(path) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []

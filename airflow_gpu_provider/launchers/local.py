"""Runs on this host: a guard in a session of its own, below it the supervisor, below that the shards.

The guard ends with the process that started it (it watches its parent, and everything below it ends with
it), so leased devices are never used after the lease's holder is gone. Start it from a thread that lives as
long as the run.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from airflow_gpu_provider.exceptions import InvalidRequest
from airflow_gpu_provider.training.parenthood import living_in_group
from airflow_gpu_provider.training.plan import RunPlan
from airflow_gpu_provider.training.run_file import RunRecord, read_record, write_json

log = logging.getLogger(__name__)

_GUARD = "airflow_gpu_provider.training.guard"
#: beyond the plan's grace, for the supervisor to write its record and leave
_LEAVE_S = 5.0
_TAIL_LINES = 15


class LocalRun:
    """A run on this host."""

    def __init__(self, plan: RunPlan, process: subprocess.Popen[bytes]) -> None:
        self._plan = plan
        self._process = process

    @property
    def pid(self) -> int:
        """The guard's process id; the supervisor's is in the record."""
        return self._process.pid

    def record(self) -> RunRecord | None:
        """Return where the run stands, None while it has not said anything."""
        return read_record(self._plan.paths.run)

    def has_ended(self) -> bool:
        """Say whether the guard has ended; everything below it then has too."""
        return self._process.poll() is not None

    def shard_log_tail(self, uid: str) -> list[str]:
        """Return the last lines a shard printed."""
        return last_lines(self._plan.paths.log(uid))

    def explain_end(self) -> str:
        """Say how the supervisor ended, with its last lines."""
        lines = "\n".join(last_lines(self._plan.paths.supervisor_log))
        code = self._process.poll()
        return f"the supervisor ended with exit code {code} and no outcome; its last lines:\n{lines}"

    def stop(self) -> None:
        """Let the shards save, then end the run; return when it has ended."""
        if self.has_ended():
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=self._plan.stop_grace_s + _LEAVE_S)
        except subprocess.TimeoutExpired:
            log.warning("The run did not stop within its grace; it is killed")
            self.kill()

    def kill(self) -> None:
        """End the guard and everything below it now; return when it is gone."""
        if self.has_ended():
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + _LEAVE_S
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_LEAVE_S)
        while (living := living_in_group(self.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if living:
            log.error("Processes %s were killed and have not ended in %.0f s", living, _LEAVE_S)


class LocalLauncher:
    """Starts runs on this host, whose processes keep the files ``keep_open`` open."""

    def __init__(self, *, keep_open: tuple[int, ...] = ()) -> None:
        self._keep_open = keep_open

    def check(self) -> None:
        """Raise InvalidRequest when no run can start here, since torch is not installed."""
        if importlib.util.find_spec("torch") is None:
            raise InvalidRequest(
                "Training needs torch, which is not installed for "
                f"{sys.executable}: pip install 'airflow-gpu-provider[torch]' on every worker.",
                reason="torch_missing",
            )

    def start(self, plan: RunPlan) -> LocalRun:
        """Write the plan and start its guard. Raise InvalidRequest when torch is not installed."""
        self.check()
        plan.paths.create()
        write_json(plan.paths.plan, plan.model_dump_json(indent=1))
        # Guard and supervisor compute nothing; hiding the devices keeps a context off them. Shards are forked
        # from them, so libraries that read their number of threads when they are loaded do that here.
        threads = {"OMP_NUM_THREADS": str(plan.threads_per_shard)}
        environment = {**os.environ, **threads, "CUDA_VISIBLE_DEVICES": ""}
        with plan.paths.supervisor_log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", _GUARD, str(plan.paths.plan), str(os.getpid())],
                env=environment,
                pass_fds=self._keep_open,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return LocalRun(plan, process)


def last_lines(path: Path) -> list[str]:
    """Return the end of what was printed to a file, nothing of one that is not there."""
    try:
        return path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except FileNotFoundError:
        return []

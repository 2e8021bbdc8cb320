"""Look at processes through /proc, and end one of ours.

The lease a process works for is in its environment or its mark, see `lease_mark`. Nothing here decides:
`health.verdict` says whose a process is, `leftovers` when it has to go. Pids of the driver are those of
the host's own pid namespace: an agent in a container needs ``hostPID``.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Protocol

from airflow_gpu_provider.inventory.health import Process
from airflow_gpu_provider.inventory.lease_mark import LEASE_VARIABLE

#: inode of the first pid namespace, fixed in the kernel (PROC_PID_INIT_INO); it shows all processes
_HOST_PID_NAMESPACE = 0xEFFFFFFC
#: `nvidia-cuda-mps-server` as the kernel shows it, which keeps 15 characters of a name
_MPS_SERVER = "nvidia-cuda-mps"
#: deeper than any real process tree; a loop cannot occur, but a race of re-used pids could look like one
_MAX_ANCESTORS = 64

log = logging.getLogger(__name__)


class ProcessTable(Protocol):
    """Something that knows processes."""

    def look(self, pid: int) -> Process | None:
        """Return the process, or None when it is certainly gone."""
        ...

    def signal(self, process: Process, number: signal.Signals) -> bool:
        """Send a signal to exactly this process; False when it is gone or out of reach."""
        ...


class ProcTable:
    """The processes of this machine."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._sees_host = _sees_host(proc)

    def look(self, pid: int) -> Process | None:
        """Return the process, or None when it is certainly gone.

        In a container of its own pid namespace an unseen pid may well live, so it is returned as unreadable.
        """
        started = self._started(pid)
        if started is None:
            return None if self._sees_host else Process(pid, 0, None, readable=False)
        if self._name(pid) == _MPS_SERVER:
            return Process(pid, started, None, is_mps_server=True)
        lease_id, readable = self._own_lease(pid)
        if lease_id is not None:
            return Process(pid, started, lease_id)
        ancestor = self._ancestor_lease(pid)
        return Process(pid, started, ancestor, inherited=ancestor is not None, readable=readable)

    def signal(self, process: Process, number: signal.Signals) -> bool:
        """Send a signal to exactly this process; False when it is gone or out of reach.

        It is looked at again first: the pid may have been given to another process since.
        """
        if self.look(process.pid) != process:
            return False
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            log.warning("May not end process %d: run the agent as root or as its user", process.pid)
            return False
        return True

    def _stat(self, pid: int) -> list[str] | None:
        try:
            text = (self._proc / str(pid) / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        # the command in brackets may itself contain blanks and brackets: split after the last one
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields  # a zombie holds nothing any more

    def _name(self, pid: int) -> str:
        try:
            return (self._proc / str(pid) / "comm").read_text(errors="replace").rstrip("\n")
        except OSError:  # gone since
            return ""

    def _started(self, pid: int) -> int | None:
        fields = self._stat(pid)
        return None if fields is None else int(fields[19])

    def _own_lease(self, pid: int) -> tuple[str | None, bool]:
        """Return (lease id, may we look into it). Its mark is newer than its environment."""
        folder = self._proc / str(pid)
        try:
            marked = _marked(folder / "fd")
            environ = (folder / "environ").read_bytes() if marked is None else b""
        except PermissionError:
            return None, False
        except (FileNotFoundError, ProcessLookupError):
            return None, True
        if marked is not None:
            return marked, True
        prefix = f"{LEASE_VARIABLE}=".encode()
        for entry in environ.split(b"\0"):
            if entry.startswith(prefix) and len(entry) > len(prefix):
                return entry[len(prefix) :].decode(errors="replace"), True
        return None, True

    def _ancestor_lease(self, pid: int) -> str | None:
        for _ in range(_MAX_ANCESTORS):
            fields = self._stat(pid)
            if fields is None:
                return None
            pid = int(fields[1])
            if pid <= 1:
                return None
            lease_id, _readable = self._own_lease(pid)
            if lease_id is not None:
                return lease_id
        return None


def _sees_host(proc: Path) -> bool:
    try:
        return (proc / "self" / "ns" / "pid").stat().st_ino == _HOST_PID_NAMESPACE
    except OSError:
        return False


def _marked(folder: Path) -> str | None:
    """Return the lease of the memory file that `lease_mark` opened, from a process's open files."""
    prefix = f"/memfd:{LEASE_VARIABLE}="
    for entry in os.scandir(folder):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:  # closed since it was listed
            continue
        if target.startswith(prefix):
            return target[len(prefix) :].removesuffix(" (deleted)")
    return None

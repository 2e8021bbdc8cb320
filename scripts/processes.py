"""Which processes belong to whom, and how to end them for certain; Linux only (/proc, prctl).

Invariant: a process is named by (pid, start time), never by its pid alone, so a recycled pid is never
signalled. Next step: `scripts.warden` keeps the processes of a stack and ends them through `end_all`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: after a fork it is too late to import


@dataclass(frozen=True)
class Process:
    """One process that ever was: the kernel reuses pids, but not a pid with its start time."""

    pid: int
    started: int  #: clock ticks since boot

    @property
    def is_alive(self) -> bool:
        """True while it runs; a zombie holds nothing and counts as ended."""
        fields = _stat(self.pid)
        return fields is not None and int(fields[19]) == self.started and fields[0] not in "ZX"


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def identify(pid: int) -> Process | None:
    """Return the process that has this pid now, if any."""
    fields = _stat(pid)
    return None if fields is None else Process(pid, int(fields[19]))


def descendants(root: int) -> list[Process]:
    """Return all live processes below ``root``, itself left out; a parent comes before its children."""
    children: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        fields = _stat(int(entry)) if entry.isdigit() else None
        if fields is not None and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(Process(int(entry), int(fields[19])))
    found: list[Process] = []
    frontier = [root]
    while frontier:
        below = [process for parent in frontier for process in children.get(parent, ())]
        found += below
        frontier = [process.pid for process in below]
    return found


def send(process: Process, signum: int) -> None:
    """Signal the process if it is still that one."""
    if process.is_alive:
        with contextlib.suppress(ProcessLookupError):  # it may end between the two lines
            os.kill(process.pid, signum)


def end_all(living: Callable[[], Iterable[Process]], *, grace_s: float) -> None:
    """Ask all to end, give them ``grace_s``, then kill until ``living`` finds none (they may still fork)."""
    for process in living():
        send(process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(process.is_alive for process in living()):
        if time.monotonic() > deadline:
            for process in living():
                send(process, signal.SIGKILL)
        time.sleep(0.05)


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when the *thread* that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own, so that none escapes."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

"""What the kernel says of a process on this host: whether a signal stopped it, and how much it computes.

It tells a process that holds Python's global lock, which sends no heartbeat but uses its processor, from one
that is stopped, which does neither. Read by `watch`; None on systems without /proc, where only heartbeats
count.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STOPPED = "T"  #: by SIGSTOP and the like; "t" would be a debugger, whose user knows what he does
_USER_TICKS, _SYSTEM_TICKS = 11, 12  #: counted behind the name in parentheses


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One look at a process."""

    is_stopped: bool
    cpu_s: float  #: used by all its threads so far


def read_process_state(pid: int) -> ProcessState | None:
    """Return the state of a process, None when the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return parse_stat(text, ticks_per_s=os.sysconf("SC_CLK_TCK"))


def parse_stat(text: str, *, ticks_per_s: int) -> ProcessState:
    """Read the contents of /proc/PID/stat; the process's name in it may hold anything."""
    fields = text.rpartition(")")[2].split()
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return ProcessState(is_stopped=fields[0] == _STOPPED, cpu_s=ticks / ticks_per_s)

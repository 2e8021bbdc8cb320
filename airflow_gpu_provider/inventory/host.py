"""What this machine is called and what it has.

The agent that reports the devices of a machine and the launcher that starts processes on it must name it
alike, else a claim bound to "this host" finds no node: both call `local_host`. Standard library only.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

_PROC = Path("/proc")


def local_host() -> str:
    """Return the name of this machine: ``GPU_HOST`` where it is set, else its host name."""
    return os.environ.get("GPU_HOST", "").strip() or socket.gethostname()


def cpu_cores() -> int:
    """Return the cores that processes started from here may use (a container may have fewer)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_mib(proc: Path = _PROC) -> int:
    """Return the memory of this machine in MiB."""
    meminfo = proc / "meminfo"
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) // 1024
    # not Linux: ask the C library instead
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def cpu_load(proc: Path = _PROC) -> float | None:
    """Return the share of the CPU in demand over the last minute, 0..1; None where it is not known.

    The system's load average counts waiting processes too, so it is cut at 1: more than full is full.
    """
    try:
        runnable = float((proc / "loadavg").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    # Divided by all cores of the machine, not by ours: the load average knows no container.
    return round(min(1.0, runnable / (os.cpu_count() or 1)), 3)

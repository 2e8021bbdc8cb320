"""Whether a process that was started earlier, maybe by another process, still runs.

A number alone may be another's by now: with the moment of its start it names one process of this host until
the next boot. Where the system does not tell (no /proc), the number has to do.
"""

from __future__ import annotations

import os
from pathlib import Path

_START_TICKS = 19  #: counted behind the name in parentheses
_ENDED = ("Z", "X")


def started_at(pid: int) -> str | None:
    """Return when a process started, in the kernel's own count; None = it has ended, "" = not told here."""
    if not Path("/proc/self/stat").exists():
        return "" if _answers(pid) else None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in _ENDED else fields[_START_TICKS]


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

"""Whether a script's run hangs: no rank computes, prints or saves for a long time.

A script sends no heartbeat. A rank that waits in a collective for one that is lost either spins (then it
ends by torch's own timeout) or sleeps, and when all sleep, nothing will come of it. Pure but for the clock,
which is passed in; used by `script_supervisor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: part of a processor that a rank has to use for the run to be at work
_BUSY_SHARE = 0.05


class Silence:
    """For how long nothing was heard of a run."""

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._cpu_s: Mapping[int, float] = {}
        self._words: tuple[int, int] = (0, 0)

    def look(self, now: float, *, cpu_s: Mapping[int, float], output_bytes: int, saved_at_ns: int) -> None:
        """Take what each rank has used of its processor, and what all have printed and saved so far."""
        words = (output_bytes, saved_at_ns)
        enough = _BUSY_SHARE * (now - self._heard_at)
        is_busy = any(used - self._cpu_s.get(rank, 0.0) > enough for rank, used in cpu_s.items())
        if words != self._words or is_busy:
            self._heard_at, self._cpu_s, self._words = now, dict(cpu_s), words

    def lasts_for(self, now: float) -> float:
        """Return the seconds since the last sign of life."""
        return now - self._heard_at


def newest_change_ns(folder: Path) -> int:
    """Return when something in ``folder`` or the folders in it was last written, 0 when it is empty."""
    newest = 0
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        try:
            newest = max(newest, path.stat().st_mtime_ns)
        except OSError:
            continue  # removed meanwhile
    return newest

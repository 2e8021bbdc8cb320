"""Ending processes for good, within a bound, and what is said of one that SIGKILL does not end.

A process that sleeps in the kernel (state D: a driver or a disk that does not answer) takes SIGKILL only
when it wakes. It runs no code of its own any more, so its rank may be another's, but its device is not free
and may never be: whoever waits for it has to give up. Next: `fence` draws the conclusions for a run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

#: far longer than the kernel takes to free the memory of the largest process
END_WITHIN_S = 30.0
_SHORTEST_S, _LONGEST_S = 0.001, 0.05


def wait_until(is_over: Callable[[], bool], deadline: float) -> bool:
    """Wait until something is over and return True; False at the deadline (of `time.monotonic`)."""
    pause_s = _SHORTEST_S
    while not is_over():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)
    return True


def end_children(*, spared: Collection[int] = frozenset(), within_s: float = END_WITHIN_S) -> dict[int, str]:
    """Kill and reap every child of this process, adopted ones and what those leave included, but ``spared``.

    Return those that have not ended in time, each with the evidence.
    """
    living: list[int] = []

    def are_gone() -> bool:
        living[:] = _ended_but(spared)
        return not living and (bool(spared) or not _has_child())

    if wait_until(are_gone, time.monotonic() + within_s):
        return {}
    return {pid: why_it_stays(pid, within_s) for pid in living}


def why_it_stays(pid: int, waited_s: float) -> str:
    """Return what the kernel says of a process that SIGKILL has not ended."""
    try:
        name, _, fields = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        where = Path(f"/proc/{pid}/wchan").read_text().strip("0\n ")
    except OSError:
        return f"process {pid} has not ended {waited_s:g} s after SIGKILL"
    place = f" in {where}" if where else ""
    return (
        f"process {pid} ({name}) has not ended {waited_s:g} s after SIGKILL: state {fields.split()[0]}{place}"
    )


def _ended_but(spared: Collection[int]) -> list[int]:
    """Reap the children that have ended, kill the others, and return those; of ``spared`` none."""
    living = [pid for pid in _children() if pid not in spared and not _is_reaped(pid)]
    for pid in living:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return living


def _children() -> Iterator[int]:
    try:
        yield from map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    except OSError:  # not every kernel tells; what has asked for it ends with its parent
        return


def _is_reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _has_child() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True

"""Processes that end with their parent, so that no orphan trains on devices that are no longer ours.

The kernel's parent-death signal fires when the *thread* that started the child ends; children must therefore
be started from a thread that lives as long as its process. Linux only; elsewhere the store's loss ends a
shard.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends; end now when that has happened already."""
    signal_with_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def signal_with_parent(number: int) -> None:
    """Ask the kernel to signal this process when its parent ends; 0 takes it back. Raise OSError."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> bool:
    """Let this process become the parent of its descendants' orphans; False where that is not possible."""
    if sys.platform != "linux":
        return False
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return True


def reap_strays(own: frozenset[int]) -> None:
    """Reap adopted processes that have ended, such as data loaders of a lost shard, but none of ``own``."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, 0)


def living_in_group(group: int) -> list[int]:
    """Return the processes of a process group that have not ended; none where the system does not tell."""
    living = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = file.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # it has just ended
        if int(its_group) == group and state not in ("Z", "X"):
            living.append(int(file.parent.name))
    return living


def name_process(name: str) -> None:
    """Set what `ps` and `top` call this process; at most 15 characters are kept."""
    if sys.platform == "linux":
        _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]))


def in_child(main: Callable[[], int]) -> None:
    """Run ``main`` in a process just forked and leave: it never returns into its parent's code."""
    code = 1
    try:
        code = main()
    except BaseException:
        logging.getLogger(__name__).exception("A forked process failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prctl(option: int, value: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
